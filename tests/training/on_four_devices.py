"""The engine for a mesh, on virtual devices; ``test_mesh_engine.py`` runs this file in a process that has four."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import scipy.sparse
from skeleton_model import PoissonMixture, init_params
from unigram_mixture import UnigramMixture, fit_rows

from smoothgrad_jax import (
    LDA,
    Adaptive,
    Batched,
    Collapsed,
    Corpus,
    Exponential,
    Mean,
    NotFiniteError,
    Sampled,
    Variational,
    fit,
    global_step,
    init,
    local_step,
    phase_out,
    sample,
)
from smoothgrad_jax.core import mesh_step
from smoothgrad_jax.core.errors import OptionError
from smoothgrad_jax.core.row_sparse.kernel import GatheredKernel
from smoothgrad_jax.data import batches as packing
from smoothgrad_jax.training.mesh_engine import MeshState

V, K, D, B = 61, 5, 150, 23  # neither V nor B is a multiple of 2, 3 or 4
KEY = jax.random.key(3)
QUICK = Collapsed()  # the local step that compiles in the least time


def mesh(size):
    return jax.make_mesh((size,), ("p",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:size])


def slow(*values):
    """Values of a parameter that only the slow tests have."""
    return [
        pytest.param(
            *(each if isinstance(each, tuple) and not hasattr(each, "_fields") else (each,)), marks=pytest.mark.slow
        )
        for each in values
    ]


def test_16_bit_messages_are_refused_where_nothing_is_exchanged_by_rows():
    def local_step(params, batch):
        return batch.sum(0), None

    options = {"prior": 1.0, "window": 2, "rho": 0.1, "mesh": mesh(2), "messages": "bfloat16"}
    with pytest.raises(OptionError, match="messages has no effect: FunctionModel has no row-sparse parameters"):
        fit(np.ones((3, 4, 5), np.float32), local_step, np.ones(5, np.float32), **options)


@pytest.fixture(name="X")
def some_documents(rng):
    return rng.poisson(rng.gamma(0.2, 1, (D, V)))


@pytest.fixture
def lam(rng):
    return rng.gamma(100, 0.01, (V, K))


def rho(t):
    return (2.0 + t) ** -0.6


def train(X, model, params, size=None, **options):
    given = {} if size is None else {"mesh": mesh(size)}
    defaults = {"window": 4, "steps": 12, "batch_size": B, "key": KEY, "rho": rho}
    return fit(X, model, params, **defaults | options | given).finish()


def lda(method=QUICK):
    return LDA(0.3, 0.2, D, method=method)


class DenseLDA(LDA):
    """LDA on the dense engine, and replicated on a mesh."""

    row_kernel = None


@pytest.mark.parametrize("size", [2, 4, *slow(1, 3)])
def test_devices_compute_what_one_process_computes(x64, X, lam, size):
    expected = train(X, lda(), lam).params
    np.testing.assert_allclose(train(X, lda(), lam, size).params, expected, rtol=1e-10)


def test_small_rows_count_beside_a_large_one():
    """In float32, 50,000 hardly grows by 0.05: the sum of a column must not add its rows one after the other."""
    num_words = 400_000
    X = scipy.sparse.csr_array((np.ones(3, np.float32), ([0, 0, 1], [1, 2, 3])), (2, num_words))
    lam = np.full((num_words, 2), 0.05, np.float32)
    lam[0, 0] = 50_000
    options = {"window": 1, "steps": 1, "batch_size": 2, "rho": lambda t: 0.5}
    expected = train(X, lda(Mean()), lam, **options).params
    np.testing.assert_allclose(train(X, lda(Mean()), lam, 1, **options).params, expected, rtol=1e-5)


def test_devices_compute_what_the_dense_functions_compute(x64, X, lam):
    state, model, corpus = init(lam, 4), lda(Variational()), Corpus.of(X)
    for t in range(12):
        batch = corpus.pack(sample(KEY, t, D, B), corpus.layout(B))
        stats, _ = local_step(model, state.params, batch)
        state = global_step(state, stats, model.eta, rho(t), 4)
    np.testing.assert_allclose(train(X, model, lam, 3).params, state.params, rtol=1e-10)


@pytest.mark.slow
def test_devices_compute_the_equations_of_the_paper(x64, X, lam):
    def minibatches():
        for t in range(12):
            rows = sample(KEY, t, D, B)
            yield [(np.flatnonzero(X[d]), X[d][X[d] > 0]) for d in rows]

    expected = oracle.algorithm_1(lam, minibatches(), 0.3, 0.2, rho, 4, D)[-1]
    np.testing.assert_allclose(train(X, lda(Variational()), lam, 4).params, expected, rtol=1e-8)


@pytest.mark.parametrize(
    "method", [Collapsed(), Sampled(3, 1), *slow(Mean(), Variational())], ids=lambda method: type(method).__name__
)
def test_every_local_step(x64, X, lam, method):
    expected = train(X, lda(method), lam).params
    np.testing.assert_allclose(train(X, lda(method), lam, 3).params, expected, rtol=1e-10)


def test_copies_of_a_document_on_several_devices_are_sampled_independently(x64, X, lam):
    options = {"replace": True, "documents": np.arange(6), "batch_size": 6}
    expected, got = (train(X, lda(Sampled(3, 1)), lam, size, **options).params for size in (None, 4))
    np.testing.assert_allclose(got, expected, rtol=1e-10)


@pytest.mark.parametrize(
    "window",
    [math.inf, Adaptive(4, 6), *slow(1, phase_out(4, 3, 9), Exponential(5))],
    ids=lambda window: str(window)[:12],
)
def test_every_window(x64, X, lam, window):
    expected, got = (train(X, lda(), lam, size, window=window) for size in (None, 3))
    np.testing.assert_allclose(got.params, expected.params, rtol=1e-10)
    if not isinstance(window, Exponential):
        assert got._engine.length == expected._engine.length


@pytest.mark.slow
def test_warmup_and_slots(x64, X, lam):
    """The dense engine rounds a slot in the same way."""
    options = {"warmup": "zeros", "slots": "bfloat16", "window": 20}
    model = DenseLDA(0.3, 0.2, D, method=QUICK)
    expected = train(X, model, lam, **options).params
    np.testing.assert_allclose(train(X, lda(), lam, 2, **options).params, expected, rtol=1e-4)


def test_the_same_devices_compute_the_same_bits(x64, X, lam):
    first, second = (train(X, lda(), lam, 3).params for _ in range(2))
    np.testing.assert_array_equal(first, second)


def mixture_params(rng):
    return {"words": rng.gamma(1, 1, (V, K)) + 0.1, "weights": np.ones(K)}


def assert_close(got, expected, rtol=1e-10):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol), got, expected)


@pytest.mark.parametrize("window", [4, *slow(Adaptive(4, 6), Exponential(5))], ids=str)
def test_a_model_with_row_sparse_and_dense_leaves(x64, X, rng, window):
    model, params = UnigramMixture(0.3, 1.0, D), mixture_params(rng)
    expected, got = (train(X, model, params, size, batch_size=24, window=window).params for size in (None, 4))
    assert_close(got, expected)


@pytest.mark.slow
def test_a_model_of_documents_without_rows_is_replicated(x64, X, lam):
    model = DenseLDA(0.3, 0.2, D)
    assert_close(train(X, model, lam, 3, batch_size=24).params, train(X, model, lam, batch_size=24).params)


def test_a_model_without_rows_is_replicated(x64, rng):
    points, model = rng.poisson(4, (20, 12)).astype(float), PoissonMixture(1.0, 1.0, 0.1, 400)
    options = {"window": 4, "rho": 0.3}
    expected, got = (fit(points, model, init_params(3), **options, **more).finish() for more in ({}, {"mesh": mesh(4)}))
    assert_close(got.params, expected.params)


@pytest.mark.parametrize("method", [Sampled(3, 1), *slow(Variational())], ids=lambda method: type(method).__name__)
def test_batches_that_the_caller_packed(x64, X, lam, method):
    corpus = Corpus.of(X)
    packed = [corpus.pack(sample(KEY, t, D, B), corpus.layout(B)) for t in range(12)]
    options = {"window": 4, "rho": 0.3, "key": KEY}
    expected = fit(packed, lda(method), lam, **options).finish()
    assert_close(fit(packed, lda(method), lam, mesh=mesh(3), **options).finish().params, expected.params)


@pytest.mark.slow
def test_a_minibatch_that_exceeds_the_planned_capacity(x64, rng):
    """One document of 3,000 holds words that no other document holds."""
    X = np.zeros((3_000, 150), int)
    X[:, 0] = 1
    X[sample(KEY, 2, 3_000, 8)[0]] = 1
    assert Corpus.of(X).layout(4).num_used < 150
    lam, options = rng.gamma(100, 0.01, (150, K)), {"batch_size": 8, "steps": 4}
    expected, got = (train(X, LDA(0.3, 0.2, 3_000, method=QUICK), lam, size, **options).params for size in (None, 2))
    np.testing.assert_allclose(got, expected, rtol=1e-10)


def test_other_hyperparameters_take_effect(x64, X, lam, rng):
    eta = rng.gamma(2, 0.2, (V, K))

    def changed(size):
        given = {} if size is None else {"mesh": mesh(size)}
        run = fit(X, lda()._replace(eta=eta), lam, rho=0.3, steps=8, batch_size=B, key=KEY, report_every=4, **given)
        next(run)
        run.model = lda()._replace(alpha=0.7, eta=2 * eta)
        return run.finish().params

    assert_close(changed(3), changed(None))


def spoiled_rows(model, rows, totals, weights, batch, key):
    stats, weight_stats, r = fit_rows(model, rows, totals, weights, batch, key)
    bad = (batch.counts == 1000).any()
    return jnp.where(bad, -stats, stats), weight_stats, r


class NegativeMixture(UnigramMixture):
    def row_kernel(self, num_columns, dtype):
        return GatheredKernel(self, spoiled_rows, num_columns, self.num_docs)


def spoil(batch, count):
    return batch._replace(counts=np.where(batch.counts > 0, count, 0).astype(np.float32))


@pytest.mark.parametrize("window", [3, *slow(Exponential(3), Adaptive(4))], ids=str)
def test_statistics_that_are_not_finite_stop_the_run_and_keep_the_topics(X, lam, window):
    corpus, lam = Corpus.of(X), lam.astype(np.float32)
    packed = [corpus.pack(np.arange(t, t + 8), corpus.layout(8)) for t in range(10)]
    options, model = {"window": window, "rho": 0.3, "mesh": mesh(4)}, LDA(0.3, 0.2, 1e12, method=QUICK)
    run = fit([*packed[:4], spoil(packed[4], 1e30), *packed[5:]], model, lam, **options)
    with pytest.raises(NotFiniteError, match="step 4: the statistics are not finite"):
        run.finish()
    kept = run.params
    np.testing.assert_array_equal(kept, fit(packed[:4], model, lam, **options).finish().params)
    assert run.step == 4
    continued, fresh = (fit(packed, model, start, **options).finish().params for start in (run.state, kept))
    np.testing.assert_allclose(continued, fresh, rtol=1e-5)


@pytest.mark.slow
def test_negative_statistics_of_rows_stop_the_run(X, rng):
    corpus = Corpus.of(X)
    packed = [corpus.pack(np.arange(t, t + 8), corpus.layout(8)) for t in range(4)]
    model, params = NegativeMixture(0.3, 1.0, D), mixture_params(rng)
    run = fit([*packed[:2], spoil(packed[2], 1000)], model, params, rho=0.3, mesh=mesh(2))
    with pytest.raises(NotFiniteError, match="step 2: NegativeMixture returned negative statistics of rows"):
        run.finish()


@pytest.mark.parametrize(
    ("window", "then"),
    [(4, 3), (Adaptive(4, 6), 4), *slow((4, 2), (math.inf, 4), (Exponential(5), 2), (Adaptive(4, 6), 3))],
)
def test_a_run_continues_on_any_number_of_devices(x64, X, lam, window, then):
    options = {"window": window}
    expected = train(X, lda(), lam, 3, steps=12, **options)
    half = train(X, lda(), lam, 3, steps=6, **options).state
    assert isinstance(half, MeshState)
    continued = train(X, lda(), half, then, steps=6, **options)
    assert continued.step == 12
    compare = np.testing.assert_array_equal if then == 3 else assert_close
    compare(continued.params, expected.params)


@pytest.mark.parametrize("method", [Variational(), *slow(Mean(), Collapsed(), Sampled(3, 1))])
def test_documents_fitted_at_once_give_the_same_parameters(x64, X, lam, method):
    expected = train(X, lda(method), lam, 3).params
    batched = lda(method)._replace(execution=Batched())
    np.testing.assert_allclose(train(X, batched, lam, 3).params, expected, rtol=1e-10)


@pytest.mark.parametrize("method", [Variational(), *slow(Collapsed(), Sampled(3, 2))])
def test_the_step_of_four_devices_lowers_for_accelerators(X, lam, method, monkeypatch):
    """The program does not depend on the platform of the mesh, so that devices of a CPU stand for accelerators."""
    texts, compiled_step = [], mesh_step.compiled_step

    def lowered_step(program):
        step = compiled_step(program)

        def call(*arguments):
            exported = jax.export.export(step, platforms=["cuda", "tpu"])(*arguments)
            texts.append((exported.nr_devices, exported.mlir_module()))
            return step(*arguments)

        return call

    monkeypatch.setattr(mesh_step, "compiled_step", lowered_step)
    model = lda(method)._replace(execution=Batched())
    train(X, model, lam.astype(np.float32), 4, steps=1)
    ((num_devices, text),) = texts
    assert num_devices == 4
    assert "all_to_all" in text
    called = set(re.findall(r"custom_call @(\w+)", text))
    assert called <= {"Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape"}


def test_scores_and_limits(X, lam):
    held_out, lam = X[:20], lam.astype(np.float32)
    one, several = (
        list(fit(X, lda(), lam, batch_size=B, key=KEY, held_out=held_out, score_every=3, steps=7, rho=0.3, **more))
        for more in ({}, {"mesh": mesh(4)})
    )
    assert [report.step for report in several if report.score] == [3, 6, 7]
    np.testing.assert_allclose([r.score for r in several if r.score], [r.score for r in one if r.score], rtol=1e-4)
    run = fit(X, lda(), lam, batch_size=B, key=KEY, seconds=0.1, rho=0.3, mesh=mesh(4)).finish()
    assert run.step > 0


def test_an_interrupted_run_raises_after_the_step_and_can_continue(X, lam):
    run = fit(X, lda(), lam.astype(np.float32), batch_size=B, key=KEY, steps=9, report_every=3, rho=0.3, mesh=mesh(2))
    next(run)
    run.interrupt()
    with pytest.raises(KeyboardInterrupt):
        next(run)
    assert run.step == 3
    assert run.finish().step == 9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threads": 2}, "threads has no effect with a mesh"),
        ({"slots": "uint8"}, "slots must be"),
        ({"batch_size": 3}, "batch_size must be at least the 4 devices"),
        ({"model": UnigramMixture(0.3, 1.0, D)}, "batch_size must be a multiple of the 4 devices"),
        ({"window": 2.5}, "window must be a whole number"),
        ({"mesh": "p"}, "mesh must be a mesh of one axis"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_a_mesh_cannot_do_is_refused(X, lam, rng, options, message):
    options = {"model": lda(), "mesh": mesh(4), "batch_size": B, "key": KEY} | options
    model = options.pop("model")
    with pytest.raises(OptionError, match=message):
        fit(X, model, mixture_params(rng) if isinstance(model, UnigramMixture) else lam.astype(np.float32), **options)


def test_a_state_of_another_engine_is_refused(X, lam):
    lam = lam.astype(np.float32)
    with pytest.raises(ValueError, match="a run without a mesh"):
        train(X, lda(), train(X, lda(), lam).state, 2)
    with pytest.raises(ValueError, match="a run on a mesh"):
        train(X, lda(), train(X, lda(), lam, 2).state)


def test_documents_with_more_words_than_rows_are_refused(lam):
    batch = packing.pack([([V + 3], [1.0])] * 8, num_words=V + 9)
    with pytest.raises(ValueError, match=f"{V + 9} words, but λ has {V} rows"):
        fit([batch], lda(), lam.astype(np.float32), rho=0.3, mesh=mesh(2)).finish()
