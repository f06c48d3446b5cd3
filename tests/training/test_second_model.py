"""A model that the package does not know goes through everything that LDA goes through."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from unigram_mixture import UnigramMixture, document_of_entry, fit_rows, reference_step

from smoothgrad_jax import (
    Adaptive,
    Checkpoints,
    Corpus,
    Exponential,
    fit,
    init,
    natural_gradient,
    pack,
    phase_out,
    run,
    sample,
    smoothed_svi,
    sweep,
    window_mean,
)
from smoothgrad_jax.core.errors import OptionError
from smoothgrad_jax.core.row_sparse.kernel import GatheredKernel, KernelResult
from smoothgrad_jax.core.row_sparse.state import RowSparseState
from smoothgrad_jax.core.svi import SVIState
from smoothgrad_jax.core.window import Moving

V, K, D, B = 60, 3, 80, 8


@pytest.fixture
def documents(make_documents):
    return make_documents(D, V, longest=15, shortest=1)


@pytest.fixture
def corpus(documents):
    return Corpus.of(documents, num_words=V)


@pytest.fixture
def params(rng):
    return {"words": rng.gamma(1, 1, (V, K)) + 0.1, "weights": np.ones(K)}


class DenseMixture(UnigramMixture):
    """The same model without a row kernel: it runs on the dense engine."""

    row_kernel = None


MODEL, DENSE = UnigramMixture(0.3, 1.0, D), DenseMixture(0.3, 1.0, D)


def train(corpus, params, model=MODEL, **options):
    return fit(corpus, model, params, **{"steps": 12, "batch_size": B, "key": jax.random.key(0), "rho": 0.3} | options)


def assert_close(got, expected, rtol=1e-9):
    for name in ("words", "weights"):
        np.testing.assert_allclose(got[name], expected[name], rtol=rtol)


def test_the_local_step_is_the_transcription(x64, documents, params):
    stats, _ = MODEL.local_step(jax.tree.map(jnp.asarray, params), pack(documents[:B], num_words=V))
    assert_close(stats, reference_step(MODEL, params, documents[:B]))


@pytest.mark.parametrize(
    "window",
    [1, 4, np.inf, phase_out(4, 3, 9), lambda t: jnp.where((t > 3) & (t < 6), 2.0, 8.0), Adaptive(4)],
    ids=["1", "4", "inf", "phase out", "8 to 2 to 8", "adaptive"],
)
def test_both_engines_compute_the_same_parameters(x64, corpus, params, window):
    sparse = train(corpus, params, window=window).finish()
    assert isinstance(sparse.state, RowSparseState)
    if isinstance(window, Adaptive):
        # The rule sees sketches of other leaves, so that lengths may differ; the parameters stay positive and finite.
        assert all(np.isfinite(leaf).all() and (leaf > 0).all() for leaf in jax.tree.leaves(sparse.params))
        return
    dense = train(corpus, params, DENSE, window=window).finish()
    assert isinstance(dense.state, SVIState)
    assert_close(sparse.params, dense.params)


def test_an_exponential_window_runs_on_the_dense_engine(x64, corpus, documents, params):
    training = train(corpus, params, window=Exponential(4)).finish()
    assert isinstance(training.state, SVIState)
    rows = np.stack([sample(jax.random.key(0), t, D, B) for t in range(12)])
    state = init(jax.tree.map(jnp.asarray, params), Exponential())
    expected, _ = run(MODEL, state, pack(documents, rows, num_words=V), rho=0.3, length=4)
    assert_close(training.params, expected.params)


def test_a_moving_window_object_runs_on_the_row_sparse_engine(corpus, params):
    params = jax.tree.map(np.float32, params)
    training = train(corpus, params, window=Moving(4)).finish()
    assert isinstance(training.state, RowSparseState)
    jax.tree.map(np.testing.assert_array_equal, training.params, train(corpus, params, window=4).finish().params)
    stored = train(corpus, params, window=Moving(4, jnp.bfloat16)).finish().state
    assert stored.slot_dtype == jnp.bfloat16
    everything = train(corpus, params, window=Moving(np.inf)).finish().state
    assert everything.slots is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window must be a number from 1 on"),
        ({"window": 2.5}, "window must be a whole number"),
        ({"window": lambda t: 2.0 + t}, "window must be a whole number from 1 to the capacity 2"),
        ({"window": Moving(4, jnp.bfloat16), "slots": "bfloat16"}, "slots belongs to the window kind"),
    ],
)
@pytest.mark.parametrize("model", [MODEL, DENSE], ids=["row-sparse", "dense"])
def test_errors_name_the_option_of_fit(corpus, params, model, options, message):
    with pytest.raises(OptionError, match=message):
        train(corpus, jax.tree.map(np.float32, params), model, **options)


def test_the_dense_engine_stores_no_bytes(corpus, params):
    with pytest.raises(OptionError, match="slots must be a floating dtype, got uint8"):
        train(corpus, jax.tree.map(np.float32, params), DENSE, slots="uint8")


def test_a_dense_state_is_not_for_every_run(corpus, params):
    params = jax.tree.map(np.float32, params)
    part = train(corpus, params, DENSE, window=3, slots="bfloat16").finish()
    for change, message in (
        ({"window": 3, "slots": "float32"}, "slots must be bfloat16, as in the run that is continued"),
        ({"window": 4}, "window must be a whole number from 1 to the capacity 3"),
        ({"window": Exponential(3)}, "it cannot continue with window=Exponential"),
    ):
        with pytest.raises(ValueError, match=message):
            train(corpus, part.state, DENSE, **change)
    train(corpus, part.state, DENSE, window=3, slots="bfloat16").finish()
    for use in (lambda: part.state, lambda: part.params):
        with pytest.raises(ValueError, match="a later run continued from this state and overwrote it"):
            use()
    exponential = train(corpus, params, DENSE, window=Exponential(3)).finish().state
    with pytest.raises(ValueError, match="it cannot continue with window=3"):
        train(corpus, exponential, DENSE, window=3)


@jax.tree_util.register_pytree_node_class
class ThreadedKernel(GatheredKernel):
    """The kernel of the mixture for any number of threads, each with a range of documents."""

    max_threads = None

    def fit(self, features, totals, rest, batch, bounds, memory, key):
        document, number = document_of_entry(batch), jnp.arange(batch.size)
        counts = jnp.where((document >= bounds[0]) & (document < bounds[1]), batch.counts, 0)
        rows, batch = jnp.concatenate(features), batch._replace(counts=counts)
        sums, _, r = fit_rows(self._model, rows, totals[0], rest, batch, key)
        mine = (number >= bounds[0]) & (number < bounds[1])
        weights = self._num_docs / batch.size * jnp.where(mine[:, None], r, 0).sum(0)
        return KernelResult(sums, sums.sum(0), weights, r)


class ThreadedMixture(UnigramMixture):
    def row_kernel(self, num_columns, dtype):
        return ThreadedKernel(self, fit_rows, num_columns, self.num_docs)


def test_several_threads_add_their_statistics_of_dense_leaves(x64, corpus, params):
    expected = train(corpus, params, window=3).finish().params
    got = train(corpus, params, ThreadedMixture(*MODEL), window=3, threads=2).finish().params
    assert_close(got, expected)


def test_held_out_scores_rise(params, rng):
    """On documents from three groups of words, which the model finds."""
    words = rng.integers(0, V // 3, (2 * D, 12)) + V // 3 * rng.integers(0, 3, (2 * D, 1))
    corpus = Corpus.of([(np.unique(each), np.unique(each, return_counts=True)[1]) for each in words], num_words=V)
    held_out, params = corpus.select(np.arange(D, 2 * D)), jax.tree.map(np.float32, params)
    reports = list(train(corpus.part(0, D), params, steps=60, held_out=held_out, score_every=10))
    scores = [report.score for report in reports if report.score is not None]
    assert len(scores) == 6
    assert scores[-1] > -np.log(V / 3) - 0.2 > -np.log(V)


def test_a_resumed_run_ends_with_the_same_bits(tmp_path, corpus, params):
    params = jax.tree.map(np.float32, params)
    complete = train(corpus, params, window=3).finish().params
    first = train(corpus, params, window=3, steps=5).finish()
    Checkpoints(tmp_path).write(first)
    last = Checkpoints(tmp_path).latest()
    resumed = train(corpus, last.state, window=3, steps=7).finish().params
    assert last.step == 5
    jax.tree.map(np.testing.assert_array_equal, resumed, complete)


def test_other_hyperparameters_between_reports(x64, corpus, params):
    """The prior of the rows and of the dense leaf may change, on both engines alike."""
    results = []
    for model in (MODEL, DENSE):
        training = train(corpus, params, model, window=3, report_every=6)
        next(training)
        training.model = model._replace(eta_words=0.7, eta_weights=2.0)
        results.append(training.finish().params)
    assert_close(*results)
    assert not np.allclose(results[0]["words"], train(corpus, params, window=3).finish().params["words"])


def test_run_sweep_and_optax(x64, corpus, documents, params):
    """``run`` and ``sweep`` take the model without asking for its prior; the optax chain computes the same."""
    params = jax.tree.map(jnp.asarray, params)
    rows = np.arange(40).reshape(5, B)
    batches = pack(documents, rows, num_words=V)
    final, _ = run(MODEL, init(params, 3), batches, rho=0.3, length=3)
    states, _ = sweep(MODEL, params, batches, rho=0.3, lengths=[1, 3])
    assert_close({name: leaf[1] for name, leaf in states.params.items()}, final.params)
    parts = optax.chain(window_mean(3), natural_gradient(MODEL.prior), optax.scale_by_learning_rate(0.3))
    for optimiser in (smoothed_svi(3, MODEL.prior, 0.3), parts):
        now, state = params, optimiser.init(params)
        for i in range(5):
            stats, _ = MODEL.local_step(now, jax.tree.map(lambda x, i=i: x[i], batches))
            updates, state = optimiser.update(stats, state, now)
            now = optax.apply_updates(now, updates)
        assert_close(now, final.params)


def test_a_single_thread_is_enough(corpus, params):
    with pytest.raises(ValueError, match="threads must be at most 1"):
        train(corpus, params, threads=2)
