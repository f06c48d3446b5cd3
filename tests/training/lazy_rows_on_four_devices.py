"""Rows that decay lazily on a mesh of virtual devices; ``test_mesh_engine.py`` runs this file in a process of four."""

import math

import jax
import numpy as np
import pytest
import scipy.sparse
from on_four_devices import (
    KEY,
    QUICK,
    NegativeMixture,
    UnigramMixture,
    assert_close,
    lda,
    mesh,
    mixture_params,
    rho,
    slow,
    spoil,
    train,
)

from smoothgrad_jax import LDA, Adaptive, Checkpoints, Corpus, NotFiniteError, Sampled, fit, phase_out, sample
from smoothgrad_jax.core import mesh_exchange
from smoothgrad_jax.core.errors import OptionError
from smoothgrad_jax.core.row_sparse import mesh as row_mesh
from smoothgrad_jax.core.row_sparse.state import RowSparseState
from smoothgrad_jax.training import mesh_engine
from smoothgrad_jax.training.mesh_parameters import DenseParameters, LazyRows

V, K, D, B = 61, 5, 150, 23  # neither V nor B is a multiple of 2, 3 or 4


@pytest.fixture(autouse=True)
def lazy_from_the_first_row(monkeypatch):
    monkeypatch.setattr(mesh_engine, "LAZY_FROM", 1)


@pytest.fixture(name="X")
def some_documents(rng):
    return rng.poisson(rng.gamma(0.2, 1, (D, V)))


@pytest.fixture
def lam(rng):
    return rng.gamma(100, 0.01, (V, K))


@pytest.mark.parametrize(
    ("size", "window"),
    [(2, 4), (3, math.inf), (3, Adaptive(4, 6)), *slow((4, phase_out(4, 3, 9)), (1, 4), (3, 4), (4, 4), (2, 1))],
    ids=lambda value: str(value)[:12],
)
def test_lazy_rows_on_devices_are_those_of_one_process(x64, X, lam, size, window):
    expected, got = (train(X, lda(), lam, number, window=window) for number in (None, size))
    assert isinstance(got._engine._parameters, LazyRows)
    np.testing.assert_allclose(got.params, expected.params, rtol=1e-10)
    assert got._engine.length == expected._engine.length


def test_lazy_rows_with_a_local_step_that_samples(x64, X, lam):
    expected, got = (train(X, lda(Sampled(3, 1)), lam, size).params for size in (None, 3))
    np.testing.assert_allclose(got, expected, rtol=1e-10)


@pytest.mark.parametrize("window", [4, *slow(Adaptive(4, 6))], ids=str)
def test_lazy_rows_with_dense_leaves(x64, X, rng, window):
    model, params = UnigramMixture(0.3, 1.0, D), mixture_params(rng)
    expected, got = (train(X, model, params, size, batch_size=24, window=window).params for size in (None, 4))
    assert_close(got, expected)


@pytest.mark.parametrize("slots", ["uint8", *slow("bfloat16")])
def test_slots_in_low_precision_and_zero_warmup(x64, X, lam, slots):
    options = {"slots": slots, "warmup": "zeros", "window": 20}
    expected, got = (train(X, lda(), lam, size, **options).params for size in (None, 2))
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_the_same_devices_compute_the_same_bits_with_and_without_reading(x64, X, lam):
    first = train(X, lda(), lam, 3)
    second = fit(X, lda(), lam, window=4, steps=12, batch_size=B, key=KEY, rho=rho, mesh=mesh(3), report_every=2)
    for _ in second:
        np.asarray(second.params)
    np.testing.assert_array_equal(second.params, first.params)


@pytest.mark.parametrize(
    ("window", "then"), [(4, 3), (4, 4), *slow((Adaptive(4, 6), 4), (4, 2), (4, 1), (math.inf, 2))]
)
def test_lazy_rows_continue_on_any_number_of_devices(x64, X, lam, window, then, tmp_path):
    expected = train(X, lda(), lam, 3, steps=12, window=window)
    half = train(X, lda(), lam, 3, steps=6, window=window)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.write(half)
    stored = checkpoints.latest().state
    assert all(isinstance(part, RowSparseState) for part in stored.parts)
    continued = train(X, lda(), stored, then, steps=6, window=window)
    assert continued.step == 12
    compare = np.testing.assert_array_equal if then == 3 else assert_close
    compare(np.asarray(continued.params), np.asarray(expected.params))


@pytest.mark.slow
def test_lazy_rows_under_other_hyperparameters(x64, X, lam, rng):
    eta = rng.gamma(2, 0.2, (V, K))

    def changed(size):
        given = {} if size is None else {"mesh": mesh(size)}
        run = fit(X, lda()._replace(eta=eta), lam, rho=0.3, steps=8, batch_size=B, key=KEY, report_every=4, **given)
        next(run)
        run.model = lda()._replace(alpha=0.7, eta=2 * eta)
        return run.finish().params

    assert_close(changed(3), changed(None))


def test_failed_steps_leave_lazy_rows_as_they_were(X, lam, rng):
    corpus, lam = Corpus.of(X), lam.astype(np.float32)
    packed = [corpus.pack(np.arange(t, t + 8), corpus.layout(8)) for t in range(10)]
    options, model = {"window": 3, "rho": 0.3, "mesh": mesh(4)}, LDA(0.3, 0.2, 1e12, method=QUICK)
    run = fit([*packed[:4], spoil(packed[4], 1e30), *packed[5:]], model, lam, **options)
    with pytest.raises(NotFiniteError, match="step 4: the statistics are not finite"):
        run.finish()
    kept = run.params
    # The rows at the clock of step 4 are computed in another order of rounding.
    np.testing.assert_allclose(kept, fit(packed[:4], model, lam, **options).finish().params, rtol=1e-5)
    assert run.step == 4
    continued, fresh = (fit(packed, model, start, **options).finish().params for start in (run.state, kept))
    np.testing.assert_allclose(continued, fresh, rtol=1e-4)
    mixture, params = NegativeMixture(0.3, 1.0, D), mixture_params(rng)
    run = fit([*packed[:2], spoil(packed[2], 1000)], mixture, params, rho=0.3, mesh=mesh(4))
    with pytest.raises(NotFiniteError, match="step 2: NegativeMixture returned negative statistics of rows"):
        run.finish()


def test_a_minibatch_that_exceeds_the_planned_capacity_of_lazy_rows(x64, rng):
    """One document of 3,000 holds words that no other document holds: lists of words become longer during the run."""
    X = np.zeros((3_000, 150), int)
    X[:, 0] = 1
    X[sample(KEY, 2, 3_000, 8)[0]] = 1
    assert Corpus.of(X).layout(4).num_used < 150
    lam, options = rng.gamma(100, 0.01, (150, K)), {"batch_size": 8, "steps": 6, "window": 2}
    expected, got = (train(X, LDA(0.3, 0.2, 3_000, method=QUICK), lam, size, **options).params for size in (None, 2))
    np.testing.assert_allclose(got, expected, rtol=1e-10)


@pytest.mark.parametrize("is_lazy", [True, *slow(False)])
def test_messages_of_16_bits_round_rows_and_statistics(X, lam, monkeypatch, is_lazy):
    if not is_lazy:
        monkeypatch.setattr(mesh_engine, "LAZY_FROM", math.inf)
    lam = lam.astype(np.float32)
    full, short = (train(X, lda(), lam, 3, steps=6, **more) for more in ({}, {"messages": "bfloat16"}))
    assert isinstance(short._engine._parameters, LazyRows if is_lazy else DenseParameters)
    error = np.abs(np.asarray(short.params) / np.asarray(full.params) - 1)
    assert 1e-5 < error.max() < 0.05  # a bfloat16 has 8 bits


def test_messages_of_16_bits_carry_a_vector_in_full_precision(rng):
    x = np.concatenate([rng.gamma(1, 10.0 ** rng.integers(-20, 20, 200)), [-np.inf, np.nan, 0]]).astype(np.float32)
    exchange = mesh_exchange.Exchange(mesh(2), True, False)

    def swap(blocks, extra):
        rows, extras = exchange.rows(blocks[0], extra[0])
        return rows[None], extras[None]

    spec = jax.sharding.PartitionSpec("p")
    swapped = jax.jit(jax.shard_map(swap, mesh=mesh(2), in_specs=spec, out_specs=spec, check_vma=False))
    blocks = rng.gamma(1, 1, (2, 2, 6, len(x))).astype(np.float32)
    rows, extras = swapped(blocks, np.stack([x, 2 * x]))
    np.testing.assert_allclose(rows[:, :, :3], blocks.swapaxes(0, 1)[:, :, :3], rtol=2**-8)
    for device in range(2):
        np.testing.assert_allclose(extras[device], np.stack([x, 2 * x]), rtol=2**-23)


def test_uint8_needs_lazy_rows(X, lam, monkeypatch):
    monkeypatch.setattr(mesh_engine, "LAZY_FROM", 100)
    with pytest.raises(OptionError, match="slots must be a float type on a mesh, unless λ has 100 rows; got uint8"):
        train(X, lda(), lam.astype(np.float32), 2, slots="uint8")


def test_a_step_on_many_rows_copies_none_of_them(monkeypatch):
    """A copy of the rows would cost more than the step."""
    num_words, num_columns, compiled_step, sizes = 60_000, 16, row_mesh.compiled_step, []

    def measured_step(program, capacity):
        step = compiled_step(program, capacity)

        def call(*arguments):
            sizes.append(step.lower(*arguments).compile().memory_analysis().temp_size_in_bytes)
            return step(*arguments)

        return call

    monkeypatch.setattr(row_mesh, "compiled_step", measured_step)
    X = scipy.sparse.csr_array((np.ones(3, np.float32), ([0, 0, 1], [1, 2, 3])), (2, num_words))
    lam = np.full((num_words, num_columns), 0.05, np.float32)
    train(X, LDA(0.3, 0.2, 2, method=QUICK), lam, 2, window=2, steps=1, batch_size=2)
    rows = num_words // 2 * (3 * num_columns + 4) * 4
    assert 0 < sizes[0] < rows / 4
