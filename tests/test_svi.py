"""The steps: against Algorithm 1 with a real queue, for LDA and for a model that the package has never seen."""

import math

import jax
import jax.numpy as jnp
import mixture
import numpy as np
import optax
import oracle
import pytest
from conftest import random_documents
from jax.tree_util import Partial

from smoothgrad_jax import (
    LDA,
    averaged_step,
    global_step,
    init,
    init_topics,
    local_step,
    pack,
    robbins_monro,
    run,
    smoothed_svi,
    svi,
    sweep,
    topics,
)

V, K, D, B, STEPS = 30, 4, 60, 5, 200
MODEL = LDA(0.3, 0.1, D)


@pytest.fixture
def corpus(rng):
    return random_documents(rng, D, V, longest=14)


@pytest.fixture
def rows(rng):
    return rng.integers(0, D, (STEPS, B))


@pytest.fixture
def lam(rng):
    return rng.gamma(100, 0.01, (V, K))


@pytest.mark.parametrize("warmup", ["mean", "zeros"])
@pytest.mark.parametrize("length", [1, 3, 10, math.inf])
def test_follows_algorithm_1_for_200_steps(x64, corpus, rows, lam, length, warmup):
    schedule = robbins_monro(5, 0.6)
    state = init(lam, length)
    step = Partial(local_step, MODEL)
    _, path = run(
        step, state, pack(corpus, rows, num_words=V), MODEL.eta, schedule, length, warmup=warmup, record=keep_params
    )
    minibatches = [[corpus[d] for d in batch] for batch in rows]
    expected = oracle.algorithm_1(lam, minibatches, 0.3, 0.1, lambda i: (5 + i) ** -0.6, length, D, warmup)
    np.testing.assert_allclose(path, expected, rtol=1e-8)


def keep_params(state, info):
    del info
    return state.params


@pytest.mark.parametrize("length", [1, 10])
def test_float32_stays_near_algorithm_1(corpus, rows, lam, length):
    _, path = run(Partial(local_step, MODEL), init(lam.astype(np.float32), length), pack(corpus, rows, num_words=V),
                  MODEL.eta, 0.05, length, record=keep_params)  # fmt: skip
    minibatches = [[corpus[d] for d in batch] for batch in rows]
    expected = oracle.algorithm_1(lam, minibatches, 0.3, 0.1, lambda i: 0.05, length, D)
    assert np.abs(path - expected).max() < 0.01 * expected.max()


def test_run_is_the_loop_over_steps(corpus, rows, lam):
    lam = jnp.asarray(lam, jnp.float32)
    lengths = np.array([1, 2, 5, 5, 3, 1, 1, math.inf, 4, 2])
    rhos = np.linspace(0.5, 0.1, 10)
    state = init(lam, 5)
    for t in range(10):
        stats, _ = local_step(MODEL, state.params, pack(corpus, rows[t], num_words=V))
        state = global_step(state, stats, MODEL.eta, rhos[t], lengths[t])
    batches = pack(corpus, rows[:10], num_words=V)
    compiled, infos = run(Partial(local_step, MODEL), init(lam, 5), batches, MODEL.eta, rhos, lengths)
    np.testing.assert_allclose(compiled.params, state.params, rtol=1e-5)
    assert int(compiled.step) == 10
    assert infos.gamma.shape == (10, B, K)


def test_run_goes_on_where_it_stopped(corpus, rows, lam):
    lam = jnp.asarray(lam, jnp.float32)
    step, schedule = Partial(local_step, MODEL), robbins_monro(2, 0.7)
    whole, _ = run(step, init(lam, 4), pack(corpus, rows[:20], num_words=V), MODEL.eta, schedule, 4)
    half, _ = run(step, init(lam, 4), pack(corpus, rows[:9], num_words=V), MODEL.eta, schedule, 4)
    half, _ = run(step, half, pack(corpus, rows[9:20], num_words=V), MODEL.eta, schedule, 4)
    np.testing.assert_allclose(half.params, whole.params, rtol=1e-5)


def test_batch_variational_bayes_is_a_limit(corpus, lam):
    """B = D, L = 1, ρ = 1: λ ← η + S."""
    lam = jnp.asarray(lam, jnp.float32)
    stats, _ = local_step(MODEL, lam, pack(corpus, num_words=V))
    state = global_step(init(lam, 1), stats, MODEL.eta, 1.0)
    np.testing.assert_array_equal(state.params, MODEL.eta + stats)


@pytest.mark.parametrize("warmup", ["mean", "zeros"])
def test_sweep_equals_separate_runs(corpus, rows, lam, warmup):
    lam = jnp.asarray(lam, jnp.float32)
    step, batches = Partial(local_step, MODEL), pack(corpus, rows[:60], num_words=V)
    lengths, schedule = [1, 3, 10, math.inf], robbins_monro(5, 0.6)
    options = {"warmup": warmup, "record": keep_params}
    states, paths = sweep(step, lam, batches, MODEL.eta, schedule, lengths, **options)
    assert paths.shape == (4, 60, V, K)
    for r, length in enumerate(lengths):
        alone, path = run(step, init(lam, length), batches, MODEL.eta, schedule, length, **options)
        np.testing.assert_allclose(paths[r], path, rtol=2e-3)
        np.testing.assert_allclose(states.params[r], alone.params, rtol=2e-3)
    assert np.abs(np.asarray(paths[0] - paths[2])).max() > 1  # and the runs do differ


def test_sweep_asks_before_it_allocates(lam):
    batches = pack(np.eye(3, V), [[0, 1]])
    with pytest.raises(MemoryError, match=r"3 runs with windows of up to 1000000 take .* GB, and 1.0 GB are free"):
        sweep(Partial(local_step, MODEL), lam, batches, 0.1, 0.1, [1, 10**6, math.inf], memory_limit=1e9)


def test_memory_of_this_machine_is_known():
    free = svi._free_memory()
    assert free is None or free > 1e6


def test_positive_for_every_step_size_up_to_one(rng):
    """λ never leaves the positive numbers, from 1e-6 to 1e8, with zero statistics now and then."""
    lam = jnp.asarray(10 ** rng.uniform(-6, 8, (50, 3)), jnp.float32)
    for rho in (0.0, 1e-3, 0.5, 1.0):
        state = init(lam, 3)
        for _ in range(40):
            stats = jnp.asarray(10 ** rng.uniform(-3, 8, (50, 3)) * (rng.random((50, 3)) < 0.3), jnp.float32)
            state = global_step(state, stats, 1e-6, rho)
            assert float(state.params.min()) > 0


def test_planted_topics_are_recovered():
    rng = np.random.default_rng(3)
    truth = np.kron(np.eye(5), np.full((1, 8), 1 / 8))  # five topics of eight words each
    documents = np.array([rng.multinomial(60, rng.dirichlet(np.full(5, 0.2)) @ truth) for _ in range(500)])
    rows = rng.integers(0, 500, (150, 50))
    model = LDA(0.2, 0.1, 500)
    lam = init_topics(jax.random.key(1), 40, 5)
    state, _ = run(Partial(local_step, model), init(lam, 5), pack(documents, rows), model.eta, robbins_monro(5, 0.7), 5)
    overlap = np.asarray(topics(state.params)) @ (8 * truth.T)  # share of a found topic's mass in a planted one
    assert overlap.max(1).min() > 0.95
    assert sorted(overlap.argmax(1)) == [0, 1, 2, 3, 4]


def test_window_options_reach_the_state():
    lam = jnp.ones((4, 2))
    assert init(lam, 3, dtype=jnp.bfloat16).window.buffer.dtype == jnp.bfloat16
    assert init(lam, math.inf).window.buffer.size == 0
    state = init(lam, exponential=True)
    for value in (1.0, 3.0):
        state = global_step(state, jnp.full((4, 2), value), 0.5, 1.0, length=math.inf)
    np.testing.assert_allclose(state.params, 2.5)


def test_steps_are_compiled_once(corpus, rows, lam):
    lam = jnp.asarray(lam, jnp.float32)
    traces = []

    def counted(model, params, batch):
        traces.append(None)
        return local_step(model, params, batch)

    batches = pack(corpus, rows[:5], num_words=V)
    for alpha, rho, length in [(0.3, 0.1, 2), (0.5, 0.2, 3), (0.7, 0.3, math.inf)]:
        run(Partial(counted, LDA(alpha, 0.1, D)), init(lam, 3), batches, 0.1, rho, length)
    assert len(traces) == 1
    for lengths in ([1, 3], [2, 3]):
        sweep(Partial(counted, MODEL), lam, batches, 0.1, 0.2, lengths)
    assert len(traces) <= 2

    stats = jnp.ones_like(lam)
    state = global_step(init(lam, 3), stats, 0.1, 0.1, 2)
    size = global_step._cache_size()
    state = global_step(state, stats, 0.2, 0.3, 3)
    assert global_step._cache_size() == size


def test_donated_global_step_is_in_place():
    lam = jnp.ones((500, 64))
    compiled = (
        jax.jit(global_step, donate_argnums=0).lower(init(lam, 40), lam, 0.1, 0.1, 7).compile()  # ring: 41 slots
    )
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 2 * lam.nbytes
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < lam.nbytes


def test_donating_the_state_leaves_the_start_alone():
    lam = jnp.ones((5, 2))
    jax.jit(global_step, donate_argnums=0)(init(lam, 2), lam, 0.1, 0.1)
    assert float(lam.sum()) == 10


def test_state_survives_when_it_is_not_donated(lam):
    lam = jnp.asarray(lam, jnp.float32)
    state = init(lam, 3)
    first = global_step(state, lam, 0.1, 0.1)
    second = global_step(state, lam, 0.1, 0.1)
    np.testing.assert_array_equal(first.params, second.params)
    np.testing.assert_array_equal(state.params, lam)


def test_robbins_monro():
    schedule = robbins_monro(10, 0.7)
    np.testing.assert_allclose([schedule(t) for t in (0, 1, 90)], [10**-0.7, 11**-0.7, 100**-0.7], rtol=1e-6)
    counts = jnp.arange(3)
    np.testing.assert_allclose(jax.vmap(schedule)(counts), (10.0 + np.arange(3)) ** -0.7, rtol=1e-6)
    optimiser = optax.sgd(schedule)
    updates, _ = optimiser.update(jnp.ones(()), optimiser.init(jnp.ones(())))
    assert float(updates) == pytest.approx(-(10**-0.7))
    with pytest.raises(ValueError, match="tau must be at least 1"):
        robbins_monro(0, 0.7)
    with pytest.raises(ValueError, match="kappa must not be negative"):
        robbins_monro(1, -1)


def test_bad_arguments_are_named(lam):
    lam = jnp.asarray(lam, jnp.float32)
    step = Partial(local_step, MODEL)
    one = pack(np.eye(3, V))
    stack = pack(np.eye(3, V), [[0, 1], [1, 2]])
    with pytest.raises(ValueError, match="batches must be stacked"):
        run(step, init(lam, 2), one, 0.1, 0.1)
    with pytest.raises(ValueError, match="whole number from 1 to the capacity 2"):
        run(step, init(lam, 2), stack, 0.1, 0.1, 3)
    with pytest.raises(ValueError, match=r"rho must be a number, a schedule, or one per step \[2\]; got \(3,\)"):
        run(step, init(lam, 2), stack, 0.1, np.ones(3))
    with pytest.raises(ValueError, match="nothing to sweep"):
        sweep(step, lam, stack, 0.1, 0.1, [])
    with pytest.raises(ValueError, match="got 0"):
        sweep(step, lam, stack, 0.1, 0.1, [0, 3])


# A mixture of Poisson distributions: nothing in window, svi and transform knows LDA.


@pytest.fixture
def counts(rng):
    x = np.where(rng.random(3000) < 0.3, rng.poisson(2, 3000), rng.poisson(15, 3000)).astype(np.float32)
    return x[rng.integers(0, 3000, (250, 64))]


def test_a_mixture_through_run(counts):
    state, infos = run(
        Partial(mixture.local_step, 3000), init(mixture.start(2), 5), counts, mixture.PRIOR, robbins_monro(2, 0.7), 5
    )
    rates = np.sort(np.asarray(state.params["shape"] / state.params["rate"]))
    np.testing.assert_allclose(rates, [2, 15], rtol=0.1)
    share = np.asarray(state.params["weights"] / state.params["weights"].sum())
    np.testing.assert_allclose(np.sort(share), [0.3, 0.7], atol=0.05)
    assert infos["mean_rate"].shape == (250, 2)


def test_a_mixture_through_sweep_and_optax(counts):
    step, schedule = Partial(mixture.local_step, 3000), robbins_monro(2, 0.7)
    params = mixture.start(2)
    states, _ = sweep(step, params, counts, mixture.PRIOR, schedule, [1, 5, math.inf])
    for r, length in enumerate([1, 5, math.inf]):
        alone, _ = run(step, init(params, length), counts, mixture.PRIOR, schedule, length)
        optimiser = smoothed_svi(length, mixture.PRIOR, schedule)

        def descend(carry, x, optimiser=optimiser):
            params, state = carry
            updates, state = optimiser.update(step(params, x)[0], state, params)
            return (optax.apply_updates(params, updates), state), None

        (through_optax, _), _ = jax.jit(lambda carry, d=descend: jax.lax.scan(d, carry, counts))(
            (params, optimiser.init(params))
        )
        for name in params:
            np.testing.assert_allclose(states.params[name][r], alone.params[name], rtol=1e-4)
            np.testing.assert_allclose(through_optax[name], alone.params[name], rtol=1e-4)


def test_a_mixture_with_averaged_gradients(counts):
    step = Partial(mixture.local_step, 3000)
    state, _ = run(step, init(mixture.start(2), 3), counts, mixture.PRIOR, 0.1, 3, update=averaged_step)
    assert np.isfinite(state.params["shape"]).all()
