"""What both engines promise: a failed step leaves an empty window, and other hyperparameters take effect."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from unigram_mixture import UnigramMixture, fit_rows

from smoothgrad_jax import (
    LDA,
    Adaptive,
    Batched,
    Corpus,
    Exponential,
    Mean,
    NotFiniteError,
    Sampled,
    Sequential,
    SVIState,
    Variational,
    fit,
    pack,
)
from smoothgrad_jax.core.errors import OptionError
from smoothgrad_jax.core.row_sparse.kernel import GatheredKernel
from smoothgrad_jax.core.row_sparse.state import RowSparseState
from smoothgrad_jax.models.lda import local_steps
from smoothgrad_jax.training import driver
from smoothgrad_jax.training.engines import DenseAdaptiveState

V, K, D, B = 60, 3, 80, 8
KEY = jax.random.key(0)


class DenseMixture(UnigramMixture):
    """The same model without a row kernel: it runs on the dense engine."""

    row_kernel = None


class DenseLDA(LDA):
    """LDA on the dense engine."""

    row_kernel = None


def spoiled_rows(model, rows, totals, weights, batch, key):
    """Like the mixture, but a count of 1,000 makes the statistics of the dense leaf infinite, and those of no row."""
    stats, weight_stats, r = fit_rows(model, rows, totals, weights, batch, key)
    return stats, jnp.where((batch.counts == 1000).any(), jnp.inf, weight_stats), r


def negative_rows(model, rows, totals, weights, batch, key):
    """Like the mixture, but a count of 1,000 makes the statistics of the rows negative."""
    stats, weight_stats, r = fit_rows(model, rows, totals, weights, batch, key)
    return jnp.where((batch.counts == 1000).any(), -stats, stats), weight_stats, r


class SpoiledMixture(UnigramMixture):
    function = staticmethod(spoiled_rows)

    def row_kernel(self, num_columns, dtype):
        return GatheredKernel(self, self.function, num_columns, self.num_docs)


class NegativeMixture(SpoiledMixture):
    function = staticmethod(negative_rows)


@pytest.fixture
def documents(make_documents):
    return make_documents(D, V, longest=15, shortest=1)


@pytest.fixture
def params(rng):
    return {"words": (rng.gamma(1, 1, (V, K)) + 0.1).astype(np.float32), "weights": np.ones(K, np.float32)}


@pytest.fixture
def batches(documents):
    corpus = Corpus.of(documents, num_words=V)
    layout = corpus.layout(B)
    return [corpus.pack(np.arange(t * B, (t + 1) * B), layout) for t in range(10)]


def spoil(batch, count):
    return batch._replace(counts=np.where(batch.counts > 0, count, 0).astype(np.float32))


@pytest.mark.parametrize("every", [1, 100])
@pytest.mark.parametrize(
    ("model", "message"),
    [(SpoiledMixture, "the statistics are not finite"), (NegativeMixture, "returned negative statistics of rows")],
)
def test_a_bad_step_of_a_model_with_dense_leaves_restores_the_parameters(params, batches, every, model, message):
    """Also where the rows alone, or the dense leaves alone, have good statistics."""
    model, options = model(0.3, 1.0, D), {"window": 3, "rho": 0.3, "slots": "bfloat16"}
    bad = spoil(batches[4], 1000)
    training = fit([*batches[:4], bad, *batches[4:]], model, params, report_every=every, **options)
    with pytest.raises(NotFiniteError, match=f"step 4: .*{message}"):
        training.finish()
    expected = fit(batches[:4], model, params, **options).finish()
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), training.params, expected.params)
    assert training.step == 4
    state = training.state
    assert isinstance(state, RowSparseState)
    assert state.num_values == 0
    assert int(state.rest.window.num_pushed) == 0
    assert state.rest.window.kind == expected.state.rest.window.kind


def num_in_window(state):
    """The number of values in the window of a state of either engine."""
    if isinstance(state, RowSparseState):
        return int(state.num_values)
    window = state.state.window if isinstance(state, DenseAdaptiveState) else state.window
    return int(window.num_pushed - window.first) if hasattr(window, "first") else int(window.weight)


@pytest.mark.parametrize("model", [LDA, DenseLDA], ids=["row-sparse", "dense"])
@pytest.mark.parametrize("window", [3, np.inf, Exponential(3), Adaptive(4)], ids=str)
def test_a_run_after_a_bad_step_starts_with_an_empty_window(params, batches, model, window):
    lam, options = params["words"], {"window": window, "rho": 0.3}
    training = fit([*batches[:4], spoil(batches[0], np.inf), *batches], model(0.3, 0.2, D), lam, **options)
    with pytest.raises(NotFiniteError, match="step 4"):
        training.finish()
    assert num_in_window(training.state) == 0
    assert training.step == 4
    kept = training.params
    continued = fit(batches, model(0.3, 0.2, D), training.state, **options).finish()
    fresh = fit(batches, model(0.3, 0.2, D), kept, **options).finish()
    np.testing.assert_allclose(continued.params, fresh.params, rtol=1e-5)


class NoisyMean(NamedTuple):
    """A model whose local step samples if ``noise`` is an array; then it needs a key."""

    mean: float
    noise: object = None

    @property
    def prior(self):
        return 1.0

    @property
    def uses_key(self):
        return self.noise is not None

    def local_step(self, params, batch, key=None):
        noise = 0.0 if self.noise is None else self.noise * jax.random.gamma(key, 1.0, params.shape)
        return jnp.zeros_like(params) + self.mean + batch.mean() + noise, None


def test_a_model_that_begins_to_sample_gets_the_key_of_the_run():
    x = [np.ones(2, np.float32)] * 6
    training = fit(x, NoisyMean(1.0), jnp.ones(3), window=1, rho=0.5, report_every=3, key=KEY)
    next(training)
    training.model = NoisyMean(1.0, np.float32(2.0))
    expected = 1.0 + 7 / 8 * np.ones(3) * 2
    for step in range(3, 6):
        drawn = jax.random.gamma(jax.random.fold_in(KEY, step), 1.0, (3,))
        expected = 0.5 * expected + 0.5 * (1.0 + 2.0 + 2 * np.asarray(drawn))
    np.testing.assert_allclose(training.finish().params, expected, rtol=1e-5)
    without = fit(x, NoisyMean(1.0), jnp.ones(3), window=1, rho=0.5, report_every=3)
    next(without)
    with pytest.raises(OptionError, match="key is needed, because NoisyMean samples"):
        without.model = NoisyMean(1.0, np.float32(2.0))
    np.testing.assert_allclose(without.finish().params, 1 + (1 - 0.5**6) * 2)


@jax.tree_util.register_pytree_node_class
class PaddedKernel(GatheredKernel):
    """The kernel of the mixture with two more columns per row if there is one prior per weight."""

    def width(self):
        return K + 2 * np.ndim(self._model.eta_weights)

    def features(self, rows, normalisers):
        return jnp.pad(rows, [(0, 0), (0, self.width() - K)])

    def fit(self, features, totals, rest, batch, bounds, scratch, key):
        assert scratch.shape == (sum(map(len, features)), self.width())
        result = super().fit(tuple(each[:, :K] for each in features), totals, rest, batch, bounds, scratch, key)
        return result._replace(sums=jnp.pad(result.sums, [(0, 0), (0, self.width() - K)]))


class PaddedMixture(UnigramMixture):
    def row_kernel(self, num_columns, dtype):
        return PaddedKernel(self, fit_rows, num_columns, self.num_docs)


@pytest.mark.parametrize("resumed", [False, True])
def test_a_model_set_between_reports_may_have_rows_of_another_width(params, batches, resumed):
    options = {"window": 2, "rho": 0.3}
    narrow = PaddedMixture(0.3, 1.0, D)
    wide = narrow._replace(eta_weights=np.ones(K, np.float32))
    expected = fit(batches, UnigramMixture(0.3, 1.0, D), params, **options).finish().params
    if resumed:
        first = fit(batches[:5], narrow, params, **options).finish()
        training = fit(batches[5:], wide, first.state, **options)
    else:
        training = fit(batches, narrow, params, report_every=5, **options)
        next(training)
        training.model = wide
    got = training.finish().params
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), got, expected)


def test_the_rows_of_a_batch_must_fit_the_parameters(params, documents):
    wide = pack(documents[:B], num_words=V + 1)
    training = fit([wide], UnigramMixture(0.3, 1.0, D), params)
    with pytest.raises(ValueError, match="the documents have 61 words, but λ has 60 rows"):
        training.finish()


class TestElsewhereThanOnACPU:
    """No machine with an accelerator is needed: the platform is an input of the choice of the engine."""

    @pytest.fixture
    def gpu(self, monkeypatch):
        monkeypatch.setattr(driver, "default_platform", lambda: "gpu")

    @pytest.fixture
    def lam(self, rng):
        return rng.gamma(1, 1, (V, K)) + 0.1

    def run(self, documents, lam, model, **options):
        corpus = Corpus.of(documents, num_words=V)
        return fit(corpus, model, lam, window=3, rho=0.1, steps=4, batch_size=B, key=KEY, **options)

    @pytest.mark.parametrize("method", [Variational(), Sampled(2, 1)])
    def test_the_dense_engine_fits_all_documents_at_once(self, documents, lam, method, gpu, monkeypatch, x64):
        model = LDA(0.3, 0.1, D, method=method)
        with monkeypatch.context() as loops:
            loops.setattr(local_steps, "fit_batch", None)  # the loops over documents
            training = self.run(documents, lam, model).finish()
        assert isinstance(training.state, SVIState)
        monkeypatch.undo()
        expected = self.run(documents, lam, model).finish()
        assert isinstance(expected.state, RowSparseState)
        np.testing.assert_allclose(training.params, expected.params, rtol=1e-10)
        same = self.run(documents, lam, model._replace(execution=Batched())).finish()
        assert isinstance(same.state, SVIState)
        np.testing.assert_array_equal(same.params, training.params)

    def test_another_row_sparse_model_runs_on_the_dense_engine(self, batches, params, gpu):
        training = fit(batches, UnigramMixture(0.1, 0.1, D), params, window=3, rho=0.1).finish()
        assert isinstance(training.state, SVIState)

    def test_a_model_that_is_set_later_has_the_local_step_of_the_platform(self, documents, lam, gpu, monkeypatch):
        monkeypatch.setattr(local_steps, "fit_batch", None)
        training = self.run(documents, lam, LDA(0.3, 0.1, D, method=Mean()), report_every=2)
        next(training)
        training.model = LDA(0.2, 0.1, D, method=Mean())
        training.finish()
        assert training.step == 4

    def test_loops_over_documents_are_refused(self, documents, lam, gpu):
        with pytest.raises(OptionError, match="execution must be batched on gpu"):
            self.run(documents, lam, LDA(0.3, 0.1, D, execution=Sequential()))

    @pytest.mark.parametrize(("option", "value"), [("threads", 2), ("slots", "uint8")])
    def test_options_of_the_row_sparse_engine_are_refused(self, documents, lam, gpu, option, value):
        with pytest.raises(OptionError, match=option):
            self.run(documents, lam, LDA(0.3, 0.1, D), **{option: value})

    def test_a_state_of_the_row_sparse_engine_is_refused(self, documents, lam, monkeypatch):
        state = self.run(documents, lam.astype(np.float32), LDA(0.3, 0.1, D)).finish().state
        monkeypatch.setattr(driver, "default_platform", lambda: "gpu")
        with pytest.raises(ValueError, match="row-sparse engine; it cannot continue with window=3 and a batched local"):
            self.run(documents, state, LDA(0.3, 0.1, D))


@pytest.mark.parametrize("options", [{}, {"threads": 2}])
def test_a_schedule_that_is_always_infinite_is_an_infinite_window(documents, rng, options):
    model, lam = LDA(0.3, 0.2, D), rng.gamma(1, 1, (V, K)).astype(np.float32) + 0.1
    options = options | {"batch_size": B, "key": KEY, "steps": 4}
    given = [fit(documents, model, lam, window=window, **options) for window in (np.inf, lambda step: np.inf)]
    np.testing.assert_array_equal(*(run.finish().params for run in given))
    with pytest.raises(OptionError, match="slots has no effect with window=∞"):
        fit(documents, model, lam, window=lambda step: np.inf, slots="bfloat16", **options)


def test_a_batch_can_be_a_number_or_a_random_key():
    """Data that the local step simulates: a batch counts as one document."""

    def simulate(params, key):
        return jax.random.uniform(key, params.shape), None

    for batches in (jax.random.split(KEY, 3), list(jax.random.split(KEY, 3))):
        run = fit(batches, simulate, np.ones(2, np.float32), prior=1.0, rho=1.0, window=np.inf, steps=3)
        assert list(run)[-1].documents == 3
        expected = 1 + np.mean([jax.random.uniform(key, (2,)) for key in batches], axis=0)
        np.testing.assert_allclose(run.params, expected, rtol=1e-6)
    run = fit([2.0, 4.0], lambda params, number: (params * 0 + number, None), np.ones(2), prior=1.0, rho=1.0, steps=2)
    np.testing.assert_allclose(run.finish().params, 4)
