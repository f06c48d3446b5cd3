"""Bias and variance: against a loop that keeps everything, and the paper's claims on small data."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import random_documents
from jax.tree_util import Partial

from smoothgrad_jax import (
    LDA,
    averaged_step,
    bias_variance,
    count_negative,
    global_step,
    init,
    local_step,
    pack,
    run,
)

V, K, D, B = 40, 4, 200, 20
MODEL = LDA(0.5, 0.5, D)


@pytest.fixture(scope="module")
def problem():
    rng = np.random.default_rng(0)
    documents = random_documents(rng, D, V, longest=15, shortest=3)
    lam = jnp.asarray(rng.gamma(100, 0.01, (V, K)), jnp.float32)
    return documents, lam, rng.integers(0, D, (400, B))


@pytest.mark.parametrize("warmup", ["mean", "zeros"])
def test_errors_are_those_of_a_loop_that_keeps_everything(problem, warmup):
    documents, lam, rows = problem
    step, data = Partial(local_step, MODEL), pack(documents, num_words=V)
    L, steps, rho = 4, 12, 0.05
    end, errors = bias_variance(
        step, init(lam, L), pack(documents, rows[:steps], num_words=V), data, 0.5, rho, L, warmup=warmup
    )
    noisy, full = [], []
    params = np.asarray(lam, np.float64)
    for t in range(steps):
        lam_t = jnp.asarray(params, jnp.float32)
        noisy.append(np.asarray(step(lam_t, pack(documents, rows[t], num_words=V))[0], np.float64))
        full.append(np.asarray(step(lam_t, data)[0], np.float64))
        divisor = L if warmup == "zeros" else min(t + 1, L)
        noisy_mean, full_mean = sum(noisy[-L:]) / divisor, sum(full[-L:]) / divisor
        g = 0.5 - params + full[-1]
        g_hat, g_mean = 0.5 - params + noisy_mean, 0.5 - params + full_mean
        np.testing.assert_allclose(errors.squared_bias[t], ((g_mean - g) ** 2).sum(), rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(errors.variance[t], ((g_hat - g_mean) ** 2).sum(), rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(errors.squared_error[t], ((g_hat - g) ** 2).sum(), rtol=1e-3, atol=1e-4)
        params = params + rho * (0.5 - params + noisy_mean)
    np.testing.assert_allclose(end.params, params, rtol=1e-4)


@pytest.fixture(scope="module")
def along_runs(problem):
    """All lengths in one program."""
    documents, lam, rows = problem
    lengths = jnp.array([1.0, 4.0, 16.0])
    state = init(lam, 16)
    batches, data = pack(documents, rows[:300], num_words=V), pack(documents, num_words=V)
    step = Partial(local_step, MODEL)
    return jax.vmap(lambda L: bias_variance(step, state, batches, data, 0.5, 0.01, L)[1])(lengths)


def test_variance_falls_as_one_over_length(along_runs):
    variance = np.asarray(along_runs.variance)[:, 50:].mean(1)
    np.testing.assert_allclose(variance[0] / variance, [1, 4, 16], rtol=0.25)


def test_squared_error_is_bias_plus_variance(along_runs):
    bias, variance, error = (np.asarray(x)[:, 50:] for x in along_runs)
    np.testing.assert_allclose(error.mean(1), (bias + variance).mean(1), rtol=0.1)


def test_bias_grows_with_length_and_is_none_at_one(along_runs):
    bias = np.asarray(along_runs.squared_bias)[:, 50:].mean(1)
    assert bias[0] == 0
    assert bias[2] > 3 * bias[1] > 0


def test_averaged_gradients_go_negative_where_smoothed_ones_stay_positive(problem):
    documents, lam, rows = problem
    batches = pack(documents, rows[:100], num_words=V)
    model = LDA(0.5, 0.01, D)

    def negatives(update):
        def record(state, info):
            del info
            return count_negative(state.params)

        _, counts = run(Partial(local_step, model), init(lam, 20), batches, 0.01, 0.1, 20, record=record, update=update)
        return np.asarray(counts)

    assert negatives(global_step).sum() == 0
    assert negatives(averaged_step).max() > 0


def test_only_from_the_start(problem):
    """The full statistics of steps before are not known: their bias would be understated."""
    documents, lam, rows = problem
    step, data, batches = (
        Partial(local_step, MODEL),
        pack(documents, num_words=V),
        pack(documents, rows[:3], num_words=V),
    )
    state, _ = bias_variance(step, init(lam, 4), batches, data, 0.5, 0.1)
    with pytest.raises(ValueError, match="bias_variance starts with the run"):
        bias_variance(step, state, batches, data, 0.5, 0.1)


def test_float64_and_exponential_windows(x64, problem):
    documents, lam, rows = problem
    step, data, batches = (
        Partial(local_step, MODEL),
        pack(documents, num_words=V),
        pack(documents, rows[:5], num_words=V),
    )
    state = init(np.asarray(lam, np.float64), exponential=True)
    _, errors = bias_variance(step, state, batches, data, 0.5, 0.1, 3.5)
    assert errors.variance.dtype == jnp.float64
    assert (np.asarray(errors.variance) > 0).all()
    assert float(errors.squared_bias[0]) == pytest.approx(0, abs=1e-20)


def test_averaged_step_by_hand():
    """Two steps with L = 2: the old gradient keeps pulling."""
    state = init(jnp.array([4.0, 1.0]), 2)
    state = averaged_step(state, jnp.array([0.0, 3.0]), 1.0, 0.5)
    np.testing.assert_allclose(state.params, [2.5, 2.5])  # gradient (−3, 3)
    state = averaged_step(state, jnp.array([0.0, 3.0]), 1.0, 0.5)
    np.testing.assert_allclose(state.params, [1.375, 3.625])  # gradients (−3, 3) and (−1.5, 1.5): mean (−2.25, 2.25)
    assert int(state.step) == 2


def test_averaged_step_with_length_one_is_svi(problem):
    _, lam, _ = problem
    stats = jnp.full((V, K), 3.0)
    averaged, plain = (step(init(lam, 1), stats, 0.5, 0.1).params for step in (averaged_step, global_step))
    np.testing.assert_allclose(averaged, plain, rtol=1e-6)


def test_count_negative():
    assert int(count_negative({"a": jnp.array([1.0, -1.0, 0.0]), "b": jnp.array([-2.0])})) == 3
