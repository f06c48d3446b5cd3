"""The steps: against Algorithm 1 with a real queue, for LDA and for a model that the package has never seen."""

import math
import re
from pathlib import Path

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
    Adaptive,
    Exponential,
    Moving,
    annealed,
    averaged_step,
    global_step,
    init,
    init_topics,
    local_step,
    pack,
    phase_out,
    robbins_monro,
    run,
    smoothed_svi,
    sweep,
    sweep_bytes,
    topics,
    window_mean,
)
from smoothgrad_jax.core import svi
from smoothgrad_jax.core.errors import OptionError
from smoothgrad_jax.core.model import as_model

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


@pytest.mark.parametrize(
    ("length", "warmup"),
    [
        (1, "mean"),
        (3, "zeros"),
        (10, "mean"),
        (math.inf, "mean"),
        pytest.param(1, "zeros", marks=pytest.mark.slow),
        pytest.param(3, "mean", marks=pytest.mark.slow),
        pytest.param(10, "zeros", marks=pytest.mark.slow),
        pytest.param(math.inf, "zeros", marks=pytest.mark.slow),
    ],
)
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


@pytest.mark.parametrize("length", [pytest.param(1, marks=pytest.mark.slow), 10])
def test_float32_stays_near_algorithm_1(corpus, rows, lam, length):
    state, batches = init(lam.astype(np.float32), length), pack(corpus, rows, num_words=V)
    _, path = run(Partial(local_step, MODEL), state, batches, MODEL.eta, 0.05, length, record=keep_params)
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


@pytest.mark.parametrize("warmup", ["mean", pytest.param("zeros", marks=pytest.mark.slow)])
def test_sweep_equals_separate_runs(x64, corpus, rows, lam, warmup):
    step, batches = Partial(local_step, MODEL), pack(corpus, rows[:60], num_words=V)
    lengths, schedule = [1, 3, 10, math.inf], robbins_monro(5, 0.6)
    options = {"warmup": warmup, "record": keep_params}
    states, paths = sweep(step, lam, batches, MODEL.eta, schedule, lengths, **options)
    assert paths.shape == (4, 60, V, K)
    for r, length in enumerate(lengths):
        alone, path = run(step, init(lam, length), batches, MODEL.eta, schedule, length, **options)
        np.testing.assert_allclose(paths[r], path, rtol=1e-10)
        np.testing.assert_allclose(states.params[r], alone.params, rtol=1e-10)
    assert np.abs(np.asarray(paths[0] - paths[2])).max() > 1  # and the runs do differ


def test_sweep_asks_before_it_allocates(lam):
    batches = pack(np.eye(3, V), [[0, 1]])
    with pytest.raises(
        MemoryError, match=r"3 runs with windows of up to 1000000 need .* GB with their records, and 1.0 GB"
    ):
        sweep(Partial(local_step, MODEL), lam, batches, 0.1, 0.1, [1, 10**6, math.inf], memory_limit=1e9)


def test_an_absurd_length_is_refused_before_anything_is_traced(lam):
    batches = pack(np.eye(3, V), [[0, 1]])
    with pytest.raises(MemoryError, match="up to 1000000000 need"):
        sweep(Partial(local_step, MODEL), lam, batches, 0.1, 0.1, [1, 10**9])


def test_the_memory_of_a_sweep_counts_what_it_records(lam):
    """λ [30, 4] is small; γ [T, B, K] of every step is not."""
    step, batches = Partial(local_step, MODEL), pack(np.eye(100, V), np.zeros((50, 100), int))
    start = lam.astype(np.float32)
    with pytest.raises(MemoryError, match="2 runs with"):
        sweep(step, start, batches, 0.1, 0.1, [1, 2], memory_limit=2 * 50 * 100 * K * 4)
    sweep(step, start, batches, 0.1, 0.1, [1, 2], memory_limit=1e5, record=keep_nothing)


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_sweep_bytes_are_those_of_the_arrays_that_a_sweep_returns(lam, dtype):
    batches = pack(np.eye(100, V), np.zeros((5, 100), int))
    arguments = (Partial(local_step, MODEL), lam.astype(np.float32), batches, 0.1, 0.1, [1, 7, math.inf])
    expected = sweep_bytes(*arguments, dtype=dtype)
    states, records = sweep(*arguments, dtype=dtype)
    assert expected == tuple(sum(leaf.nbytes for leaf in jax.tree.leaves(each)) for each in (states, records))
    assert expected.states > 3 * 8 * V * K * (2 if dtype else 4)  # three rings of seven slots and one


def test_sweep_bytes_of_a_sweep_that_fits_in_no_machine(lam):
    need = sweep_bytes(
        Partial(local_step, MODEL), lam.astype(np.float32), pack(np.eye(3, V), [[0, 1]]), 0.1, 0.1, [1e9]
    )
    assert need.states == pytest.approx(1e9 * V * K * 4, rel=1e-6)


def keep_nothing(state, info):
    del state, info


def test_free_memory_is_what_linux_says():
    if not Path("/proc/meminfo").exists():
        pytest.skip("no /proc/meminfo on this system")
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert 0.001 * total < svi.free_memory() <= total


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
    assert init(lam, 3, dtype=jnp.bfloat16).window.buffer.dtype.itemsize == 2
    assert init(lam, math.inf).window.buffer.size == 0
    state = init(lam, Exponential())
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
    size = svi._global_step._cache_size()
    for rho, length in [(0.3, 3), (1, 1.0), (np.float64(0), math.inf), (jnp.ones(()), jnp.array(2))]:
        state = global_step(state, stats, 0.1, rho, length)
    assert svi._global_step._cache_size() == size


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
    state = init(lam, 2)
    new = global_step(state, lam, 0.1, 0.1, donate=True, warmup="zeros")
    assert state.window.buffer.is_deleted()
    assert float(lam.sum()) == 10
    batches = pack(np.eye(3, 5), [[0, 1], [1, 2]])
    end, _ = run(Partial(local_step, LDA(0.1, 0.1, 3)), new, batches, 0.1, 0.1, donate=True)
    assert new.window.buffer.is_deleted()
    assert int(end.step) == 3


def test_sweep_copies_no_ring():
    """Also where the statistics of a leaf do not depend on the run, so that its ring could be shared at first."""

    def step(params, x):
        return {"moving": params["moving"] * x.mean(), "same": jnp.ones((300, 64)) * x.mean()}, None

    params = {"moving": jnp.ones((300, 64)), "same": jnp.ones((300, 64))}
    inputs = (as_model(step, 0.1), params, jnp.ones((9, 2)), jnp.full(9, 0.1), jnp.array([1.0, 5.0, 20.0]), None)
    compiled = svi._sweep.lower(*inputs, kind=Moving(20), warmup="mean", record=None).compile()
    loops, _ = compiled.as_text().split("ENTRY")  # what is done once, before the first step, stands in the entry
    assert "f32[3,21,300,64]" in loops
    assert not re.findall(r"f32\[3,21,300,64\]\S* copy\(", loops)


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


def test_annealed():
    schedule = annealed(10, 0.5, 20)
    expected = [10**-0.5, 0.5 * 20**-0.5, 0.05 * 29**-0.5, 0, 0]
    np.testing.assert_allclose([schedule(t) for t in (0, 10, 19, 20, 30)], expected, rtol=1e-6)
    assert annealed(10, 0.5, 20) == annealed(10, 0.5, 20) != annealed(10, 0.5, 21)
    for bad in [(0, 0.5, 20), (10, -1, 20), (10, 0.5, 0)]:
        with pytest.raises(ValueError, match=r"tau must be|kappa must not|steps must be"):
            annealed(*bad)


def test_phase_out(corpus, rows, lam):
    """The lengths of the schedule, and the end of a run with them: from ``stop`` on it takes the steps of SVI."""
    schedule = phase_out(8, start=4, stop=10)
    lengths = [float(schedule(t)) for t in range(13)]
    np.testing.assert_array_equal(lengths, [8] * 5 + [6, 4, 3, 2, 1, 1, 1, 1])
    lam = jnp.asarray(lam, jnp.float32)
    step, batches = Partial(local_step, MODEL), pack(corpus, rows[:13], num_words=V)
    phased_out, _ = run(step, init(lam, 8), batches, MODEL.eta, 0.2, schedule)
    by_hand, _ = run(step, init(lam, 8), batches, MODEL.eta, 0.2, np.array(lengths))
    np.testing.assert_array_equal(phased_out.params, by_hand.params)
    stats = jnp.ones_like(lam)
    last = global_step(phased_out, stats, 0.1, 0.2, schedule(phased_out.step))
    np.testing.assert_allclose(last.params, 0.8 * phased_out.params + 0.2 * (0.1 + stats), rtol=1e-6)
    mean = window_mean(schedule, capacity=8)
    state = mean.init(jnp.zeros(()))
    for t in range(12):
        value, state = mean.update(jnp.asarray(float(t)), state)
    assert float(value) == 11
    for bad in [(0, 1, 2), (3, 5, 5), (3, -1, 4)]:
        with pytest.raises(ValueError, match="expected length ≥ 1 and 0 ≤ start < stop"):
            phase_out(*bad)


@pytest.mark.parametrize(
    "call",
    [
        lambda lam, stack, length: run(Partial(local_step, MODEL), init(lam, 2), stack, 0.1, 0.1, length),
        lambda lam, stack, length: sweep(Partial(local_step, MODEL), lam, stack, 0.1, 0.1, [1, length]),
        lambda lam, stack, length: sweep(Partial(local_step, MODEL), lam, stack, 0.1, 0.1, length),
        lambda lam, stack, length: global_step(init(lam, 2), lam, 0.1, 0.1, length),
        lambda lam, stack, length: init(lam, length),
        lambda lam, stack, length: smoothed_svi(length, 0.1, 0.1),
    ],
    ids=["run", "sweep", "sweep of one", "global_step", "init", "smoothed_svi"],
)
def test_an_adaptive_window_is_refused_with_the_place_where_it_works(lam, call):
    lam, stack = jnp.asarray(lam, jnp.float32), pack(np.eye(3, V), [[0, 1], [1, 2]])
    with pytest.raises(OptionError, match=r"got Adaptive\(.*by fit\(window=Adaptive\(\)\), .* by adaptive\.push"):
        call(lam, stack, Adaptive(8))


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
    with pytest.raises(ValueError, match="lengths must be several window lengths"):
        sweep(step, lam, stack, 0.1, 0.1, [])
    for bad in (0, math.nan, -math.inf):
        with pytest.raises(ValueError, match="length must be"):
            sweep(step, lam, stack, 0.1, 0.1, [bad, 3])
    with pytest.raises(ValueError, match="must be single numbers"):
        global_step(init(lam, 2), lam, 0.1, [0.5, 0.2, 0.1, 0.1])
    with pytest.raises(ValueError, match="give it the parameters to start from"):
        sweep(step, init(lam, 2), stack, 0.1, 0.1, [1, 3])
    with pytest.raises(ValueError, match="expected a state, got ArrayImpl"):
        run(step, lam, stack, 0.1, 0.1)
    with pytest.raises(ValueError, match=r"must return \(stats, info\)"):
        run(lambda params, batch: params, init(lam, 2), stack, 0.1, 0.1)
    with pytest.raises(ValueError, match="the documents have 30 words, but lam has 29 rows"):
        run(step, init(lam[:-1], 2), stack, 0.1, 0.1)
    with pytest.raises(ValueError, match="capacity is missing: give the longest window, or a window kind"):
        init(lam)
    with pytest.raises(ValueError, match="dtype belongs to the window kind"):
        init(lam, Exponential(), dtype=jnp.bfloat16)
    with pytest.raises(OptionError, match=r"length of Exponential\(length=10\) is not kept in the state: start with"):
        init(lam, Exponential(10))
    with pytest.raises(ValueError, match=r"params\['a'\] must be floats, got int32"):
        init({"a": jnp.array([3, 9])}, 2)


@pytest.mark.parametrize("length", [0, 4, -1, 2.5, jnp.array(9)])
def test_global_step_refuses_a_length_beyond_its_capacity(lam, length):
    lam = jnp.asarray(lam, jnp.float32)
    with pytest.raises(ValueError, match="whole number from 1 to the capacity 3"):
        global_step(init(lam, 3), lam, 0.1, 0.1, length)


@pytest.mark.parametrize("rho", [2.0, -0.1, float("nan"), np.array([0.1, 1.5])])
def test_step_sizes_beyond_one_are_refused(lam, rho):
    lam = jnp.asarray(lam, jnp.float32)
    stack = pack(np.eye(3, V), [[0, 1], [1, 2]])
    with pytest.raises(ValueError, match=r"rho must lie in \[0, 1\]"):
        run(Partial(local_step, MODEL), init(lam, 2), stack, 0.1, rho)
    if np.ndim(rho) == 0:
        with pytest.raises(ValueError, match=r"rho must lie in \[0, 1\]"):
            global_step(init(lam, 2), lam, 0.1, rho)


def test_global_step_takes_numbers_not_schedules(lam):
    lam = jnp.asarray(lam, jnp.float32)
    with pytest.raises(ValueError, match=r"call a schedule with state\.step"):
        global_step(init(lam, 2), lam, 0.1, robbins_monro())


def test_a_prior_cannot_change_the_shape(lam):
    lam = jnp.asarray(lam, jnp.float32)
    with pytest.raises(ValueError, match="roadcast"):
        global_step(init(lam, 2), lam, jnp.ones((3, 1, 1)), 0.1)


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
    rates = np.sort(np.asarray(state.params["shape"] / state.params["rate"]))
    np.testing.assert_allclose(rates, [2, 15], rtol=0.2)
