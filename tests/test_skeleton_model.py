"""The model file that contributors copy goes through ``run``, ``sweep``, ``fit`` and the optax chain."""

import jax
import numpy as np
import optax
import pytest
from skeleton_model import PoissonMixture, init_params

from smoothgrad_jax import Checkpoints, fit, init, natural_gradient, robbins_monro, run, sweep, window_mean

MODEL = PoissonMixture(a=1.0, b=1.0, c=0.1, num_points=10_000)
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
