"""The model file that contributors copy goes through ``run``, ``sweep``, ``fit`` and the optax chain."""

from functools import partial

import jax
import numpy as np
import optax
import pytest
from skeleton_model import PoissonMixture, init_params, log_joint

from smoothgrad_jax import Checkpoints, fit, init, natural_gradient, robbins_monro, run, sweep, window_mean
from smoothgrad_jax.core.diagnostics import bias_variance
from smoothgrad_jax.core.errors import OptionError

MODEL = PoissonMixture(a=1.0, b=1.0, c=0.1, num_docs=10_000)
RHO = robbins_monro(2, 0.7)
TRUTH = [2, 15]


@pytest.fixture(scope="module")
def batches():
    rng = np.random.default_rng(0)
    return rng.poisson(np.where(rng.random((200, 50)) < 0.3, *TRUTH)).astype(np.float32)


def means(params):
    return sorted(np.asarray(params["shape"] / params["rate"]))


def test_run_finds_the_rates(batches):
    state, r = run(MODEL, init(init_params(2), 5), batches, rho=RHO)
    assert means(state.params) == pytest.approx(TRUTH, rel=0.1)
    assert r.shape == (200, 50, 2)


def test_a_sweep_runs_several_windows(batches):
    states, _ = sweep(MODEL, init_params(2), batches, rho=RHO, lengths=[1, 5])
    for i in range(2):
        assert means(jax.tree.map(lambda x, i=i: x[i], states.params)) == pytest.approx(TRUTH, rel=0.1)


def test_fit_trains_scores_and_resumes(batches, tmp_path):
    options = {"window": 5, "rho": RHO}
    *_, report = training = fit(batches, MODEL, init_params(2), held_out=batches[0], **options)
    assert means(training.params) == pytest.approx(TRUTH, rel=0.1)
    assert report.score > MODEL.held_out_score(init_params(2), batches[0])

    half = fit(batches[:100], MODEL, init_params(2), **options).finish()
    Checkpoints(tmp_path).write(half)
    resumed = fit(batches[100:], MODEL, Checkpoints(tmp_path).latest().state, **options).finish()
    jax.tree.map(np.testing.assert_array_equal, resumed.params, training.params)


class Sampling(PoissonMixture):
    """The mixture with one drawn component per point, instead of responsibilities."""

    uses_key = True

    def local_step(self, params, batch, key=None):
        drawn = jax.nn.one_hot(jax.random.categorical(key, log_joint(params, batch)), params["weights"].shape[0])
        scale = self.num_docs / batch.shape[0]
        return {"weights": scale * drawn.sum(0), "shape": scale * (batch @ drawn), "rate": scale * drawn.sum(0)}, key


def test_a_model_that_samples_gets_a_key_per_step(batches):
    """The same keys in ``run``, ``sweep``, ``fit`` and the diagnostics; without a key each of them is an error."""
    model, key, batches = Sampling(*MODEL), jax.random.key(7), batches[:12]
    state, keys = run(model, init(init_params(2), 3), batches, rho=0.3, key=key)
    assert keys[5] == jax.random.fold_in(key, 5)
    half, _ = run(model, init(init_params(2), 3), batches[:6], rho=0.3, key=key)
    half, _ = run(model, half, batches[6:], rho=0.3, key=key)
    states, _ = sweep(model, init_params(2), batches, rho=0.3, lengths=[3, 1], key=key)
    trained = fit(batches, model, init_params(2), rho=0.3, window=3, key=key).finish()
    measured, errors = bias_variance(model, init(init_params(2), 3), batches, batches[0], rho=0.3, key=key)
    assert np.isfinite(errors.squared_error).all()
    for params in (half.params, jax.tree.map(lambda x: x[0], states.params), trained.params, measured.params):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), params, state.params)
    other, _ = run(model, init(init_params(2), 3), batches, rho=0.3, key=jax.random.key(8))
    assert not np.allclose(other.params["shape"], state.params["shape"])
    for call in (
        lambda: run(model, init(init_params(2), 3), batches, rho=0.3),
        lambda: sweep(model, init_params(2), batches, rho=0.3, lengths=[1]),
        lambda: fit(batches, model, init_params(2)),
        lambda: bias_variance(model, init(init_params(2), 3), batches, batches[0], rho=0.3),
    ):
        with pytest.raises(OptionError, match="key is needed, because Sampling samples"):
            call()


def test_the_optax_chain_computes_the_same_parameters(batches):
    chain = optax.chain(window_mean(5), natural_gradient(MODEL.prior), optax.scale_by_learning_rate(RHO))

    @jax.jit
    def update(params, opt_state, batch):
        updates, opt_state = chain.update(MODEL.local_step(params, batch)[0], opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = init_params(2)
    opt_state = chain.init(params)
    for batch in batches[:20]:
        params, opt_state = update(params, opt_state, batch)
    expected, _ = run(MODEL, init(init_params(2), 5), batches[:20], rho=RHO)
    for name in params:
        np.testing.assert_allclose(params[name], expected.params[name], rtol=1e-4)
