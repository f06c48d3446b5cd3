"""Bias and variance: against a loop that keeps everything, and the paper's claims on small data."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import random_documents
from jax.tree_util import Partial

from smoothgrad_jax import (
    LDA,
    Exponential,
    averaged_step,
    bias_variance,
    count_negative,
    global_step,
    init,
    local_step,
    pack,
    run,
)
from smoothgrad_jax.core import diagnostics

V, K, D, B = 40, 4, 200, 20
MODEL = LDA(0.5, 0.5, D)


@pytest.fixture(scope="module")
def problem():
    rng = np.random.default_rng(0)
    documents = random_documents(rng, D, V, longest=15, shortest=3)
    lam = jnp.asarray(rng.gamma(100, 0.01, (V, K)), jnp.float32)
    return documents, lam, rng.integers(0, D, (400, B))


def shares(params, counts):
    """A local step that compiles at once: every word is shared between two topics by their λ."""
    share = params / params.sum(0)
    return 100 / len(counts) * counts.sum(0) * share, None


def small_problem():
    rng = np.random.default_rng(1)
    data = rng.poisson(1.0, (100, 30)).astype(np.float32)
    lam = jnp.asarray(rng.gamma(100, 0.01, (2, 30)), jnp.float32)
    return Partial(shares), lam, data[rng.integers(0, 100, (12, 5))], data


def keep_all(step, params, batches, data, L, rho, warmup, update, rows=slice(None)):
    """The paper's definitions in a loop that keeps everything, in float64 but for the local step; of some rows."""
    past, noisy, full, found = [], [], [], []
    params = np.asarray(params, np.float64)
    for t in range(12):
        past.append(params)
        for kept, batch in ((noisy, jax.tree.map(lambda x, t=t: x[t], batches)), (full, data)):
            kept.append(np.asarray(step(jnp.asarray(params, jnp.float32), batch)[0], np.float64))
        divisor = L if warmup == "zeros" else min(t + 1, L)
        g = 0.5 - params + full[-1]
        if update is averaged_step:
            g_hat = sum(0.5 - lam_j + s for lam_j, s in zip(past[-L:], noisy[-L:], strict=True)) / divisor
            g_mean = sum(0.5 - lam_j + s for lam_j, s in zip(past[-L:], full[-L:], strict=True)) / divisor
        else:
            g_hat, g_mean = (0.5 - params + sum(s[-L:]) / divisor for s in (noisy, full))
        found.append([(x[rows] ** 2).sum() for x in (g_mean - g, g_hat - g_mean, g_hat - g)])
        params = params + rho * g_hat
    return params, np.array(found).T, np.array(past)


@pytest.mark.parametrize("warmup", ["mean", "zeros"])
@pytest.mark.parametrize("update", [global_step, averaged_step])
def test_errors_are_those_of_a_loop_that_keeps_everything(problem, update, warmup):
    if update is global_step:
        documents, lam, rows = problem
        step = Partial(local_step, MODEL)
        batches, data = pack(documents, rows[:12], num_words=V), pack(documents, num_words=V)
    else:
        step, lam, batches, data = small_problem()
    L, rho = 4, 0.05
    end, errors = bias_variance(step, init(lam, L), batches, data, 0.5, rho, L, warmup=warmup, update=update)
    params, expected, past = keep_all(step, lam, batches, data, L, rho, warmup, update)
    np.testing.assert_allclose(errors[:3], expected, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(end.params, params, rtol=1e-4)
    if update is global_step:
        assert errors.extra_bias is None
        return
    # The paper's term λ_i − λ̄ᴸ_i; where Algorithm 1 has zeros for what is missing, from the first full window on.
    for t in range(L - 1 if warmup == "zeros" else 0, 12):
        drag = past[t] - past[max(t + 1 - L, 0) : t + 1].mean(0)
        np.testing.assert_allclose(errors.extra_bias[t], (drag**2).sum(), rtol=1e-3, atol=1e-4)


def of_two_leaves(step, params, batch):
    """The same model with its topics in two leaves."""
    stats, info = step(jnp.concatenate([params["first"], params["others"][0]]), batch)
    return {"first": stats[:1], "others": [stats[1:]]}, info


@pytest.mark.parametrize("update", [global_step, averaged_step])
def test_errors_per_leaf_are_those_of_the_parts_of_the_gradient(update):
    step, lam, batches, data = small_problem()
    params, L = {"first": lam[:1], "others": [lam[1:]]}, 4
    arguments = (Partial(of_two_leaves, step), init(params, L), batches, data, 0.5, 0.05, L)
    _, errors = bias_variance(*arguments, update=update, per_leaf=True)
    for rows, leaf in ((slice(0, 1), lambda each: each["first"]), (slice(1, 2), lambda each: each["others"][0])):
        expected = keep_all(step, lam, batches, data, L, 0.05, "mean", update, rows)[1]
        np.testing.assert_allclose([leaf(each) for each in errors[:3]], expected, rtol=1e-3, atol=1e-4)
    _, whole = bias_variance(*arguments, update=update)
    for part, total in zip(errors, whole, strict=True):
        np.testing.assert_allclose(sum(jax.tree.leaves(part)), 0 if total is None else total, rtol=1e-5)


def with_negatives(state, error):
    return error, count_negative(state.params)


@pytest.mark.parametrize("update", [global_step, pytest.param(averaged_step, marks=pytest.mark.slow)])
def test_a_study_goes_on_to_the_same_bits(update):
    step, lam, batches, data = small_problem()

    def go_on(state, batches, **options):
        return bias_variance(step, state, batches, data, 0.5, 0.1, record=with_negatives, update=update, **options)

    whole, records = go_on(init(lam, 4), batches)
    state, parts = init(lam, 4), []
    for part in (batches[:6], batches[6:]):
        before = state
        state, record = go_on(state, part, donate=True)
        parts.append(record)
        assert before.window.buffer.is_deleted()
    jax.tree.map(np.testing.assert_array_equal, state, whole)
    jax.tree.map(lambda a, *b: np.testing.assert_array_equal(np.concatenate(b), a), records, *parts)
    other = global_step if update is averaged_step else averaged_step
    with pytest.raises(ValueError, match="a run with another update"):
        bias_variance(step, state, batches, data, 0.5, 0.1, update=other)


@pytest.mark.parametrize("update", [global_step, pytest.param(averaged_step, marks=pytest.mark.slow)])
def test_lengths_side_by_side_in_chunks_are_single_runs(update):
    step, lam, batches, data = small_problem()
    lengths, axes = jnp.array([1.0, 3.0, 4.0]), diagnostics.vmap_axes(update)

    def one(state, batches, length):
        return bias_variance(step, state, batches, data, 0.5, 0.05, length, warmup="zeros", update=update)

    @partial(jax.jit, donate_argnums=0)
    def chunk(states, batches):
        return jax.vmap(one, in_axes=(axes, None, 0), out_axes=(axes, 0))(states, batches, lengths)

    states = jax.vmap(lambda _: diagnostics.measured(init(lam, 4), update), out_axes=axes)(lengths)
    states, first = chunk(states, batches[:6])
    states, last = chunk(states, batches[6:])
    assert chunk._cache_size() == 1
    assert states.step.shape == states.window.num_pushed.shape == states.full.num_pushed.shape == ()
    for i, length in enumerate(lengths):
        alone, errors = one(init(lam, 4), batches, float(length))
        np.testing.assert_allclose(states.params[i], alone.params, rtol=1e-5)
        together = jax.tree.map(lambda a, b, i=i: np.concatenate([a[i], b[i]]), first, last)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), together, errors)


def test_no_ring_is_copied():
    lam, lengths, axes = jnp.ones((300, 64)), jnp.array([3.0, 20.0]), diagnostics.vmap_axes(averaged_step)
    states = jax.vmap(lambda _: diagnostics.measured(init(lam, 20), averaged_step), out_axes=axes)(lengths)

    def one(state, length):
        step = Partial(lambda params, batch: (params * batch, None))
        return bias_variance(step, state, jnp.ones(3), jnp.ones(()), 0.5, 0.05, length, update=averaged_step)

    def chunk(states):
        return jax.vmap(one, in_axes=(axes, 0), out_axes=(axes, 0))(states, lengths)

    memory = jax.jit(chunk, donate_argnums=0).lower(states).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 0.99 * sum(leaf.nbytes for leaf in jax.tree.leaves(states))
    assert memory.temp_size_in_bytes < 0.5 * states.window.buffer.nbytes


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
    bias, variance, error = (np.asarray(x)[:, 50:] for x in along_runs[:3])
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
    state, _ = run(step, init(lam, 4), batches, 0.5, 0.1)
    with pytest.raises(ValueError, match="bias_variance needs a state before its first step"):
        bias_variance(step, state, batches, data, 0.5, 0.1)


def test_a_local_step_without_info_is_named():
    lam, batches = jnp.ones(3), jnp.ones((2, 1))
    with pytest.raises(ValueError, match=r"local_step must return \(stats, info\), got"):
        bias_variance(lambda params, batch: jnp.stack([params, params]), init(lam, 2), batches, batches[0], 1.0, 0.5)


@pytest.mark.slow
def test_float64_and_exponential_windows(x64, problem):
    documents, lam, rows = problem
    step, data, batches = (
        Partial(local_step, MODEL),
        pack(documents, num_words=V),
        pack(documents, rows[:5], num_words=V),
    )
    state = init(np.asarray(lam, np.float64), Exponential())
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
