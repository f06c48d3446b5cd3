"""The training loop: the same λ as the oracle, progress, limits, interruption, errors that name the option."""

import functools
import itertools
import math
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import mixture
import numpy as np
import oracle
import pytest
import scipy.sparse
import scipy.stats

from smoothgrad_jax import (
    LDA,
    Adaptive,
    Corpus,
    Exponential,
    NotFiniteError,
    fit,
    init,
    init_topics,
    local_step,
    log_predictive,
    pack,
    phase_out,
    robbins_monro,
    run,
    sample,
    split_documents,
)

V, K, D, B = 80, 4, 120, 10
KEY = jax.random.key(5)


class DenseLDA(LDA):
    """LDA on the dense engine."""

    row_kernel = None


@pytest.fixture(name="X")
def some_documents(rng):
    return rng.poisson(rng.gamma(0.2, 1, (D, V)))


@pytest.fixture
def lam():
    return init_topics(jax.random.key(0), V, K)


def listed(X, rows):
    return [(np.flatnonzero(X[d]), X[d][X[d] > 0]) for d in rows]


@pytest.mark.parametrize("replace", [True, False])
@pytest.mark.parametrize(
    ("window", "lengths"),
    [(1, None), (3, None), (math.inf, None), (phase_out(4, 3, 9), [4, 4, 4, 4, 3, 3, 2, 2, 1, 1, 1, 1])],
    ids=["1", "3", "inf", "phase out"],
)
def test_fit_is_algorithm_1_on_the_sampled_documents(x64, X, lam, replace, window, lengths):
    rho = robbins_monro(2, 0.6)
    options = {"window": window, "rho": rho, "passes": 1, "batch_size": B, "key": KEY, "replace": replace}
    training = fit(X, LDA(0.3, 0.2, D, tol=1e-4), np.asarray(lam, np.float64), **options).finish()
    batches = [listed(X, sample(KEY, t, D, B, replace=replace)) for t in range(12)]
    expected, queue = np.asarray(lam, np.float64), []
    for t, batch in enumerate(batches):
        stats, _ = oracle.local_step(0.3, expected, batch, D, tol=1e-4)
        keep = lengths[t] if lengths else window
        queue = [*queue, stats] if keep == math.inf else [*queue, stats][-keep:]
        step = float(rho(t))
        expected = (1 - step) * expected + step * (0.2 + np.mean(queue, axis=0))
    np.testing.assert_allclose(training.params, expected, rtol=1e-7)


def test_progress(X, lam):
    reports = list(fit(X, LDA(0.3, 0.2, D), lam, steps=7, batch_size=B, key=KEY, report_every=3))
    assert [p.step for p in reports] == [3, 6, 7]
    assert [p.documents for p in reports] == [30, 60, 70]
    assert reports[-1].passes == pytest.approx(70 / D)
    assert reports[-1].remaining == 0
    assert all(p.seconds > 0 and p.rate > 0 and p.score is None for p in reports)
    # The first report includes compilation, so that no estimate is possible before the second.
    assert reports[0].remaining is None


def test_one_pass_is_the_default_and_seconds_are_a_limit(X, lam):
    model = LDA(0.3, 0.2, D)
    *_, last = fit(X, model, lam, batch_size=B, key=KEY)
    assert last.documents == D
    begun = time.perf_counter()
    *_, last = fit(X, model, lam, batch_size=B, key=KEY, seconds=0.3)
    assert last.seconds >= 0.3
    assert time.perf_counter() - begun < 10
    *_, last = fit(
        X, model, lam, batch_size=500, key=KEY, passes=2
    )  # larger than the corpus: each minibatch is the corpus
    assert last.step == 2


def test_held_out_score(X, lam):
    model = LDA(0.3, 0.2, 100)
    train, unseen = X[:100], X[100:]
    halves = split_documents(unseen, jax.random.key(9))
    training = fit(train, model, lam, steps=6, batch_size=B, key=KEY, held_out=halves, score_every=4, report_every=100)
    scores = [(p.step, p.score) for p in training]
    assert [step for step, _ in scores] == [4, 6]
    assert scores[-1][1] == pytest.approx(float(log_predictive(model, training.params, *halves)), rel=1e-6)
    assert scores[0][1] != scores[1][1]
    # Documents that are not split yet are split by a key that follows from that of the run.
    *_, last = fit(train, model, lam, steps=6, batch_size=B, key=KEY, held_out=unseen)
    halves = split_documents(unseen, jax.random.fold_in(KEY, 1))
    assert last.score == pytest.approx(float(log_predictive(model, training.params, *halves)), rel=1e-6)


def test_a_score_of_ones_own_needs_no_method_of_the_model():
    """A model that is a function is scored by the density of its mixture, against scipy."""
    rng = np.random.default_rng(0)
    x, unseen = rng.poisson(3, (12, 20)).astype(np.float32), rng.poisson(3, 50)
    seen = []

    def score(params, held_out):
        seen.append(held_out)
        weights, rates = params["weights"] / params["weights"].sum(), params["shape"] / params["rate"]
        return np.log(scipy.stats.poisson.pmf(held_out[:, None], rates) @ np.asarray(weights)).mean()

    model = functools.partial(mixture.local_step, 240)
    options = {"prior": mixture.PRIOR, "held_out": unseen, "score": score, "score_every": 8}
    training = fit(x, model, mixture.start(2), **options)
    scores = [(progress.step, progress.score) for progress in training if progress.score is not None]
    assert [step for step, _ in scores] == [8, 12]
    assert scores[-1][1] == pytest.approx(score(training.params, unseen))
    assert all(each is unseen for each in seen)


def test_a_score_of_ones_own_replaces_that_of_the_model(X, lam):
    *_, last = fit(X, LDA(0.3, 0.2, D), lam, steps=1, batch_size=B, key=KEY, held_out="any", score=lambda *_: 2.5)
    assert last.score == 2.5


def test_supplied_batches(X, lam):
    model = LDA(0.3, 0.2, D)
    rows = [sample(KEY, t, D, B) for t in range(12)]
    corpus = Corpus.of(X)
    layout = corpus.layout(B)
    options = {"rho": robbins_monro(10, 0.7), "threads": 2}
    by_corpus = fit(corpus, model, lam, key=KEY, batch_size=B, **options).finish()
    by_list = fit([corpus.pack(r, layout) for r in rows], model, lam, **options).finish()
    by_generator = fit((corpus.pack(r, layout) for r in rows), model, lam, passes=1, **options).finish()
    np.testing.assert_array_equal(by_list.params, by_corpus.params)
    np.testing.assert_array_equal(by_generator.params, by_corpus.params)
    # Another layout changes the order of the arithmetic, and not the result.
    repacked = fit((pack(X, r) for r in rows), model, lam).finish()
    np.testing.assert_allclose(repacked.params, by_corpus.params, rtol=1e-3)


@pytest.mark.parametrize("window", [3, math.inf])
def test_a_run_continues_from_its_state(X, lam, window):
    model = LDA(0.3, 0.2, D)
    options = {"window": window, "batch_size": B, "key": KEY, "threads": 2}
    complete = fit(X, model, lam, steps=17, **options).finish()
    part = fit(X, model, lam, steps=6, **options).finish()
    rest = fit(X, model, part.state, steps=11, **options).finish()
    np.testing.assert_array_equal(rest.params, complete.params)
    with pytest.raises(ValueError, match="a later run continued from this state and overwrote it"):
        fit(X, model, part.state, steps=11, **options)
    with pytest.raises(ValueError, match="a later run continued from this state and overwrote it"):
        np.asarray(part.params)


@pytest.mark.parametrize(
    ("window", "slots", "threads", "then"),
    [
        (3, None, 2, 3),
        (3, "uint8", 3, 1),
        (lambda t: jnp.where(t < 7, 4, 2), "bfloat16", 1, 2),
        (math.inf, None, 3, 2),
        (Adaptive(4, 6), None, 2, 4),
    ],
)
def test_a_run_continues_with_another_number_of_threads(x64, X, window, slots, threads, then):
    model, lam = LDA(0.3, 0.2, D), np.asarray(init_topics(jax.random.key(0), V, K), np.float64)
    options = {"window": window, "slots": slots, "batch_size": B, "key": KEY, "rho": 0.2}
    complete = fit(X, model, lam, steps=17, threads=threads, **options).finish()
    # After 7 steps, several slots are about to leave the window that becomes shorter.
    state = fit(X, model, lam, steps=7, threads=threads, **options).finish().state
    rest = fit(X, model, state, steps=10, threads=then, **options).finish()
    assert len(rest.state.partitions) == then
    # A rounded slot may round the other way.
    np.testing.assert_allclose(rest.params, complete.params, rtol=1e-10 if slots is None else 1e-2)


def test_a_state_is_not_for_every_run(X, lam):
    model = LDA(0.3, 0.2, D)
    state = fit(X, model, lam, steps=2, batch_size=B, key=KEY, threads=2).finish().state
    for change, message in (
        ({"slots": "uint8"}, "slots must be float32, as in the run that is continued"),
        ({"window": Exponential(4)}, "of a run on the row-sparse engine"),
    ):
        with pytest.raises(ValueError, match=message):
            fit(X, model, state, steps=2, batch_size=B, key=KEY, **change)
    with pytest.raises(ValueError, match="eta must be one number or broadcast"):
        fit(X, LDA(0.3, np.ones((V - 1, K)), D), state, steps=2, batch_size=B, key=KEY)


@pytest.mark.parametrize("window", [lambda t: 3 if t < 2 else 1, ([3, 3] + [1] * 2_000).__getitem__])
def test_no_end_and_plain_python_schedules(X, lam, window):
    training = fit(X, LDA(0.3, 0.2, D), lam, passes=math.inf, report_every=2, batch_size=B, key=KEY, window=window)
    assert next(training).remaining is None
    assert next(training).step == 4
    training.close()


def test_parts_of_a_corpus_are_documents_too(X, lam):
    corpus = Corpus.of(X)
    options = {"batch_size": B, "key": KEY, "steps": 2}
    *_, by_part = fit(corpus.part(0, 100), LDA(0.3, 0.2, 100), lam, held_out=corpus.part(100, D), **options)
    *_, by_rows = fit(X[:100], LDA(0.3, 0.2, 100), lam, held_out=X[100:], **options)
    assert by_part.score == by_rows.score


def test_looking_does_not_change_the_run(X, lam):
    model = LDA(0.3, 0.2, D)
    options = {"steps": 9, "batch_size": B, "key": KEY, "report_every": 1}
    quiet = fit(X, model, lam, **options).finish()
    watched = fit(X, model, lam, **options)
    for _ in watched:
        assert watched.params.shape == (V, K)
    np.testing.assert_array_equal(quiet.params, watched.params)


def test_the_number_of_threads_does_not_change_the_result(X, lam):
    model = LDA(0.3, 0.2, D, tol=1e-5)
    one, three = (fit(X, model, lam, steps=20, batch_size=B, key=KEY, threads=n).finish().params for n in (1, 3))
    np.testing.assert_allclose(one, three, rtol=2e-3)


def test_a_model_that_is_a_function(rng):
    x = rng.poisson(np.where(rng.random((30, 50)) < 0.3, 2, 15)).astype(np.float32)
    model = jax.tree_util.Partial(mixture.local_step, 1000.0)
    for window in (1, 4):
        options = {"prior": mixture.PRIOR, "window": window, "rho": robbins_monro(2, 0.7)}
        training = fit(iter(x), model, mixture.start(2), report_every=10, **options)
        reports = list(training)
        state = init(mixture.start(2), window)
        expected, _ = run(model, state, x, mixture.PRIOR, robbins_monro(2, 0.7), window)
        for got, wanted in zip(jax.tree.leaves(training.params), jax.tree.leaves(expected.params), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-5)
        assert [p.step for p in reports] == [10, 20, 30]
        assert math.isnan(reports[-1].passes)


def test_an_exponential_window_runs_on_the_dense_engine(X, lam):
    model = LDA(0.3, 0.2, D)
    batches = pack(X, np.stack([sample(KEY, t, D, B) for t in range(12)]))
    state = init(lam, Exponential())
    expected, _ = run(jax.tree_util.Partial(local_step, model), state, batches, 0.2, robbins_monro(10, 0.7), 4)
    options = {"window": Exponential(4), "rho": robbins_monro(10, 0.7)}
    training = fit(X, model, lam, batch_size=B, key=KEY, **options).finish()
    np.testing.assert_allclose(training.params, expected.params, rtol=2e-3)


class OtherState(NamedTuple):
    """The state of :class:`OtherWindow`."""

    inner: Any

    @property
    def kind(self):
        return OtherWindow()


@dataclass(frozen=True)
class OtherWindow:
    """A window kind that the package does not know: an exponential window under another name."""

    length: float | None = None

    def init(self, template):
        return OtherState(Exponential().init(template))

    def push(self, state, value, length=None, *, warmup="mean"):
        mean, inner = Exponential(self.length).push(state.inner, value, length, warmup=warmup)
        return mean, OtherState(inner)

    def mean(self, state, length=None, *, warmup="mean"):
        return Exponential(self.length).mean(state.inner, length, warmup=warmup)

    def check_lengths(self, lengths):
        Exponential(self.length).check_lengths(lengths)

    def vmap_axes(self):
        return OtherState(Exponential().vmap_axes())


def test_a_window_kind_of_the_caller_runs_on_the_dense_engine(X, lam):
    model, options = LDA(0.3, 0.2, D), {"steps": 6, "batch_size": B, "key": KEY}
    expected = fit(X, model, lam, window=Exponential(4), **options).finish().params
    np.testing.assert_array_equal(fit(X, model, lam, window=OtherWindow(4), **options).finish().params, expected)


def test_default_step_sizes_depend_on_the_number_of_minibatches_per_pass(X, lam):
    model = LDA(0.3, 0.2, D)
    options = {"batch_size": B, "key": KEY, "steps": 3, "threads": 1}
    plain = fit(X, model, lam, **options).finish().params
    np.testing.assert_array_equal(plain, fit(X, model, lam, rho=robbins_monro(D / B, 0.7), **options).finish().params)


INTERRUPTED = """
import signal, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # the parent may ignore SIGINT
import jax, numpy as np
from smoothgrad_jax import LDA, fit, init_topics
X = np.random.default_rng(0).poisson(0.3, (200, 80))
lam, model = init_topics(jax.random.key(0), 80, 4), LDA(0.3, 0.2, 200)
options = {"batch_size": 10, "key": jax.random.key(5), "threads": 2}
training = fit(X, model, lam, steps=10**6, report_every=10**6, **options)
assert next(fit(X, model, lam, steps=1, **options)).step == 1  # compile
def interrupt_after_some_steps():
    while training.step < 20:
        time.sleep(0.001)
    print("ready", flush=True)
threading.Thread(target=interrupt_after_some_steps, daemon=True).start()
try:
    next(training)
except KeyboardInterrupt:
    done = training.step
assert 20 <= done < 10**6
np.testing.assert_array_equal(training.params, fit(X, model, lam, steps=done, **options).finish().params)
more = fit(X, model, training.state, steps=3, **options).finish()
np.testing.assert_array_equal(more.params, fit(X, model, lam, steps=done + 3, **options).finish().params)
training.close()
print("complete", flush=True)
"""


def test_an_interrupt_leaves_a_complete_state():
    """After Ctrl-C the step in progress has ended, the topics are available, and the run can continue."""
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, text=True, cwd=root) as child:
        try:
            assert child.stdout.readline() == "ready\n"
            child.send_signal(signal.SIGINT)
            out, _ = child.communicate(timeout=90)
        finally:
            child.kill()
    assert out == "complete\n"


def test_a_second_interrupt_waits_for_the_step_too():
    begin, ended = threading.Event(), threading.Event()

    def batches():
        yield np.ones(2, np.float32)
        begin.wait(30)
        for _ in range(2):
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        ended.set()
        yield np.ones(2, np.float32)

    def count(params, batch):
        return params * 0 + batch.sum(), None

    training = fit(batches(), count, np.ones(3, np.float32), prior=1.0, window=1, report_every=1)
    assert next(training).step == 1
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        begin.set()
        with pytest.raises(KeyboardInterrupt):
            next(training)
        assert ended.is_set()
        assert training.step == 2
    finally:
        signal.signal(signal.SIGINT, before)
    assert list(training) == []


@pytest.mark.parametrize("every", [1, 100])
@pytest.mark.parametrize("window", [2, lambda t: jnp.maximum(4 - jnp.maximum(t - 2, 0), 1)], ids=["fixed", "shrinking"])
@pytest.mark.parametrize("then", ["more", "empty"])
def test_statistics_that_are_not_finite_stop_the_run_and_keep_the_topics(X, lam, every, window, then):
    """Also where the steps started before the failure was known have slots that leave, or are empty."""
    good = [pack(X, sample(KEY, t, D, B)) for t in range(3)]
    bad = good[0]._replace(counts=np.where(good[0].counts > 0, np.inf, 0).astype(np.float32))
    empty = good[0]._replace(counts=np.zeros_like(good[0].counts), offsets=np.zeros_like(good[0].offsets))
    after = good if then == "more" else [empty] * 3
    options = {"window": window, "rho": 0.3, "threads": 1}
    training = fit([*good, bad, *after], LDA(0.3, 0.2, D), lam, report_every=every, **options)
    with pytest.raises(NotFiniteError, match="step 3: the statistics are not finite"):
        training.finish()
    expected = fit(good, LDA(0.3, 0.2, D), lam, **options).finish().params
    np.testing.assert_allclose(training.params, expected, rtol=1e-6)
    assert list(training) == []


def test_a_bad_document_is_named_and_the_topics_stay(X, lam, tmp_path):
    X = X.astype(float)
    X[17, 3] = -1
    with pytest.raises(ValueError, match="document 17: the count of word 3 is -1"):
        fit(X, LDA(0.3, 0.2, D), lam, batch_size=B, key=KEY)
    # Counts on disk are checked when they are read.
    matrix = scipy.sparse.csr_array(X)
    np.save(tmp_path / "data.npy", matrix.data)
    data = np.load(tmp_path / "data.npy", mmap_mode="r")
    corpus = Corpus(matrix.indptr, matrix.indices, data, X.shape[1])
    training = fit(corpus, LDA(0.3, 0.2, D), lam, batch_size=B, key=KEY)
    with pytest.raises(ValueError, match="document 17: the count of word 3 is -1"):
        training.finish()
    assert np.isfinite(training.params).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": None}, "key is needed to draw"),
        ({"window": 0}, "must be a number from 1 on"),
        ({"window": 2.5}, "a whole number of minibatches, got 2.5"),
        ({"window": "10"}, "window must be a number, a schedule"),
        ({"window": Exponential(4), "slots": "bfloat16"}, "slots has no effect"),
        ({"window": Exponential(4), "threads": 2}, "threads has no effect"),
        ({"window": lambda t: 3.0 + 0.1 * t}, "a whole number of minibatches"),
        ({"window": lambda t: jnp.where(t < 5, 3.0, jnp.inf)}, "∞ at every step or at none"),
        ({"window": [1, 2]}, "window must be a number, a schedule"),
        ({"rho": 1.5}, r"in \[0, 1\]"),
        ({"rho": lambda t: t * 1.0}, r"in \[0, 1\]"),
        ({"passes": 0}, "passes must be positive, got 0"),
        ({"steps": -1}, "steps must be positive"),
        ({"steps": 2.5}, "steps must be a whole number or ∞, got 2.5"),
        ({"steps": "3"}, "steps must be a number, got '3'"),
        ({"replace": 1.0}, "replace must be True or False, got 1.0"),
        ({"batch_size": True}, "batch_size must be a whole number"),
        ({"batch_size": 0}, "batch_size must be a whole number"),
        ({"threads": 0}, "threads must be a whole number"),
        ({"report_every": 0.5}, "report_every must be a whole number"),
        ({"warmup": "cold"}, 'warmup must be "mean" or "zeros"'),
        ({"params": jnp.ones((V - 1, K))}, "the documents have 80 words, but lam has 79 rows"),
        ({"params": jnp.ones((V + 1, K))}, "lam has 81 rows, but the documents have only 80 words"),
        ({"params": jnp.ones((V, K)).at[0, 0].set(-1)}, "λ must be positive and finite"),
        ({"params": jnp.ones((V, K)).at[0, 0].set(jnp.nan)}, "λ must be positive and finite"),
        ({"model": LDA(-1.0, 0.2, D)}, "alpha must be positive"),
        ({"model": LDA(0.2, np.full((V, K), -0.5), D)}, "eta must be positive, got -0.5"),
        ({"model": LDA(0.2, jnp.full((V, 1), jnp.nan), D)}, "eta must be positive, got nan"),
        ({"model": 3}, "expected a model or a function"),
        ({"model": lambda params, batch: None}, "needs its prior"),
        ({"prior": 0.1}, "LDA carries its prior"),
        ({"held_out": np.ones((2, V + 1))}, "held-out documents have 81 words, but λ has 80 rows"),
        ({"held_out": (np.ones((2, V)), np.ones((3, V)))}, "2 documents are observed, but 3 are held out"),
        ({"slots": "float16"}, "slots must be one of float32, float64, bfloat16, uint8"),
        ({"slots": "float64"}, r"slots must be at most float32 here: float64 needs jax.enable_x64\(True\)"),
        ({"slots": "bfloat16", "window": math.inf}, "slots has no effect with window=∞"),
        (
            {"slots": "bfloat16", "window": math.inf, "model": DenseLDA(0.3, 0.2, D)},
            "slots has no effect with window=∞",
        ),
        ({"score_every": 3}, "score_every has no effect without held_out"),
        ({"score": max}, "score has no effect without held_out"),
        ({"held_out": np.ones((2, V)), "score": 3}, "score must be a function .*, got 3"),
        ({"data": pack(np.eye(3, V))}, "expected many batches, got one"),
    ],
)
def test_bad_options_are_named_before_anything_runs(X, lam, change, message):
    arguments = {"data": X, "model": LDA(0.3, 0.2, D), "params": lam, "key": KEY, "batch_size": B} | change
    with pytest.raises(ValueError, match=message):
        fit(arguments.pop("data"), arguments.pop("model"), arguments.pop("params"), **arguments)


def test_passes_over_batches_need_the_number_of_documents():
    with pytest.raises(ValueError, match="give steps"):
        fit(iter([]), mixture.local_step, mixture.start(2), prior=1.0, passes=1)


def test_no_batches_at_all(lam):
    training = fit(itertools.chain(), LDA(0.3, 0.2, D), lam)
    assert list(training) == []
    np.testing.assert_allclose(training.params, lam)


def test_another_thread_reads_the_parameters_of_a_run_in_progress(X, lam):
    """A step overwrites the state: a reader waits for the step in progress."""
    training = fit(X, LDA(0.3, 0.2, D), lam, batch_size=B, key=KEY, steps=400, report_every=400, threads=2)
    found, errors = [], []

    def read():
        try:
            while not found or found[-1][0] < 400:
                found.append((training.step, np.asarray(training.params)))
        except Exception as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    training.finish()
    reader.join(60)
    assert errors == []
    assert len({step for step, _ in found}) > 5
    assert all(np.isfinite(params).all() and (params > 0).all() for _, params in found)


FORKED = """
import multiprocessing, sys, warnings
import jax, numpy as np
from smoothgrad_jax import LDA, fit, init_topics
X = np.random.default_rng(0).poisson(0.3, (200, 80))
def train():
    lam = init_topics(jax.random.key(0), 80, 4)
    fit(X, LDA(0.3, 0.2, 200), lam, batch_size=10, key=jax.random.key(5), steps=2).finish()
def refused(lam, key):
    try:
        fit(X, LDA(0.3, 0.2, 200), lam, batch_size=10, key=key, steps=2).finish()
    except RuntimeError as error:
        print(error)
warnings.simplefilter("ignore")  # jax warns of the fork
context = multiprocessing.get_context("fork")
first = context.Process(target=train)  # jax has not started
first.start()
first.join()
assert first.exitcode == 0
lam, key = np.asarray(init_topics(jax.random.key(0), 80, 4)), jax.random.key(5)
child = context.Process(target=refused, args=(lam, key))
child.start()
child.join(60)
child.kill()
sys.exit(child.exitcode)
"""


def test_a_process_that_was_forked_after_jax_had_started_is_refused():
    program = [sys.executable, "-c", FORKED]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])
    assert (done.returncode, done.stderr) == (0, "")
    assert "this process was forked after jax had started" in done.stdout
    assert 'multiprocessing.get_context("spawn")' in done.stdout


def test_a_corpus_without_words_is_refused(lam):
    empty, options = np.zeros((D, V)), {"batch_size": B, "key": KEY}
    with pytest.raises(ValueError, match=f"no document has a word: all {D} documents are empty"):
        fit(empty, LDA(0.3, 0.2, D), lam, **options)
    empty[3, 5] = 1
    with pytest.raises(ValueError, match="no document has a word: all 2 documents are empty"):
        fit(empty, LDA(0.3, 0.2, D), lam, documents=[1, 2], **options)


def test_an_absurd_number_of_threads_is_refused(X, lam):
    with pytest.raises(ValueError, match="threads must be at most 1,024, got 1000000000000000000"):
        fit(X, LDA(0.3, 0.2, D), lam, batch_size=B, key=KEY, threads=10**18)
