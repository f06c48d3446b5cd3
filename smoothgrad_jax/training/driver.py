"""The driver of a run: from data to topics, with progress on the way.

    training = fit(corpus, LDA(0.1, 0.1, corpus.num_docs), lam, window=10, passes=2, key=key)
    for progress in training:
        print(progress)
    lam = training.params

:func:`fit` takes minibatches that a thread packs ahead, steps, and yields a :class:`Progress` now and then. Between two
of them the caller may look at the topics, stop, or be interrupted: a step that has begun is finished first, so that the
state is always that of a whole number of steps. A run goes on from its state: which documents come next follows from
the key and the step number.

LDA runs on the rows that a minibatch uses (:mod:`smoothgrad_jax.training.rows`), on as many cores as it has work
for; any other
model, and LDA with an exponential window, through :func:`smoothgrad_jax.global_step`.
"""

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from smoothgrad_jax.core import adaptive, schedules, svi
from smoothgrad_jax.core._threads import num_cores, submit
from smoothgrad_jax.core.adaptive import Adaptive
from smoothgrad_jax.core.window import Exponential, ExponentialState, Warmup, check_lengths
from smoothgrad_jax.data.batches import Batch, check_rows, pack
from smoothgrad_jax.data.corpus import Corpus
from smoothgrad_jax.data.sampling import draw, prefetch, seed_of
from smoothgrad_jax.models import lda
from smoothgrad_jax.models.lda import LDA
from smoothgrad_jax.training import rows

_PATIENCE = 0.25  # seconds between two reports, unless the caller asks for a number of steps
# Entries × topics a thread: with 330,000 in all (news, K = 50) two were no faster than one, with 650,000 by a tenth.
_LEAST_WORK = 400_000
_SLOTS = (jnp.float32, jnp.float64, jnp.bfloat16, jnp.uint8)  # float16 overflows at 65,504, which counts do reach
_IN_FLIGHT = 3  # steps that are handed out before the first of them has ended: handing out may have to wait for a core
_AHEAD = 1024  # values of a schedule that are computed at a time
_NEEDS_A_NUMBER = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


class Progress(NamedTuple):
    """Where a run is.

    Attributes:
      step: Steps taken, since the very first.
      documents: Documents seen in this run.
      passes: Effective passes over the corpus in this run: documents / D.
      seconds: Time spent on training in this run: neither the scoring nor what the caller does is in it.
      rate: Documents per second since the last report.
      remaining: Seconds that are left at the mean rate since the first report; None if nobody knows.
      score: Nats per held-out word, if it was asked for and is due; else None.
      window: L of the last step: as given, or as an adaptive window chose it (one that grew may hold fewer values as
        yet); None before the first step of this run.
    """

    step: int
    documents: int
    passes: float
    seconds: float
    rate: float
    remaining: float | None
    score: float | None
    window: float | None = None


class AdaptiveRun(NamedTuple):
    """The state of a run through :func:`smoothgrad_jax.global_step` with an adaptive window.

    Attributes:
      state: Parameters, window and step.
      rule: What finds the length of the window.
    """

    state: svi.SVIState
    rule: adaptive.Delayed


class NotFiniteError(ArithmeticError):
    """A step found statistics that are not finite; λ is that before the step, and the window begins anew."""


def fit(
    data: Corpus | Iterable[Batch] | Any,
    model: LDA | svi.LocalStep,
    params: Any,
    *,
    window: float | Adaptive | Callable[[Any], Any] = 10,
    rho: float | Callable[[Any], Any] | None = None,
    passes: float | None = None,
    steps: int | None = None,
    seconds: float | None = None,
    batch_size: int = 300,
    key: jax.Array | None = None,
    replace: bool = False,
    rows: Any = None,
    held_out: Any = None,
    score_every: int | None = None,
    every: int | None = None,
    warmup: Warmup = "mean",
    exponential: bool = False,
    prior: Any = None,
    tol: float = 1e-3,
    max_iter: int = 100,
    threads: int | None = None,
    dtype: Any = None,
) -> "Training":
    """Train, and tell how it goes.

    Args:
      data: A :class:`smoothgrad_jax.Corpus`, or anything :func:`smoothgrad_jax.pack` takes; or an iterable of batches,
        which is iterated in a thread and ends the run when it ends.
      model: :class:`smoothgrad_jax.LDA`, or a function ``(params, batch) -> (stats, info)`` and ``prior``.
      params: λ to start from; or the ``state`` of an earlier run, to go on with the same model, window, key and
        batch size. The new run uses the state up, and with it the earlier run.
      window: L: a number, ∞, or a schedule of the step number such as :func:`smoothgrad_jax.phase_out`. A schedule
        starts with its longest window. Or :class:`smoothgrad_jax.Adaptive`, which weighs noise against drift as the
        run goes (:mod:`smoothgrad_jax.core.adaptive`) and takes the memory of the length it is at, up to ``longest``: a
        window that grows keeps the values to come, and does not take old ones back. It needs ``warmup="mean"``: the
        zeros of Algorithm 1 would come back with every growth.
      rho: ρ: a number in [0, 1] or a schedule of the step number; by default ``robbins_monro(τ, 0.7)`` with τ from
        :func:`smoothgrad_jax.core.schedules.default_delay` for a corpus, and 10 for batches of one's own.
      passes, steps, seconds: How long: the first limit that is reached ends the run. By default one pass. They count
        from here: a run that goes on is given what is left.
      batch_size: B, for a corpus.
      key: Which documents are drawn, for a corpus.
      replace: Draw documents with replacement, as in the paper, instead of in shuffled passes.
      rows: Which documents of the corpus to learn from, [D] numbers; by default all. The rest may be held out.
      held_out: Unseen documents to score by completion; or a pair ``(observed, held_out)`` from
        :func:`smoothgrad_jax.split_documents`.
      score_every: Score after that many steps, and at the end; by default at the end only.
      every: Yield after that many steps; by default four times a second.
      warmup: ``"mean"`` or ``"zeros"``; see :func:`smoothgrad_jax.core.window.push`.
      exponential: Forget exponentially, with one slot for any length.
      prior: η, for a model that is a function.
      tol, max_iter: Of the local step of LDA.
      threads: How many share the work of LDA; by default as many as there are cores, up to 8, and fewer for small
        minibatches of a corpus.
      dtype: dtype of the stored statistics: ``jnp.bfloat16`` halves the memory of a long window, and for LDA
        ``jnp.uint8`` quarters it (each entry within a tenth, the sum of every word exact).

    Returns:
      A :class:`Training`, an iterator of :class:`Progress`.

    Raises:
      ValueError: Here, before anything is computed, if an argument does not fit (of a schedule, its first thousand
        values).
      NotFiniteError: From the iterator, which keeps the last good state.
    """
    source = _source(data, model, batch_size, key, replace, rows)
    engine = _engine(model, params, source, window, warmup, exponential, prior, tol, max_iter, threads, dtype)
    return Training(
        source,
        engine,
        window=window,
        rho=schedules.robbins_monro(_offset(source), 0.7) if rho is None else rho,
        limits=_limits(source, passes, steps, seconds),
        model=model,
        scorer=_scorer(model, held_out, key, tol, max_iter, engine),
        score_every=_whole("score_every", score_every),
        every=_whole("every", every),
    )


class Training:
    """A run that is under way: iterate it, or let it :meth:`finish`; :func:`fit` makes it."""

    def __init__(self, source, engine, window, rho, limits, model, scorer, score_every, every):
        self._engine, self._scorer, self._score_every, self._every = engine, scorer, score_every, every
        self._model = model
        self._num_docs, self._limits, self._first = source.num_docs, limits, engine.step
        self._rho = _values("rho", rho, self._first, svi.check_rho)
        chosen = isinstance(window, Adaptive)
        self._length = itertools.repeat(None) if chosen else _values("window", window, self._first, engine.check_window)
        self._items = prefetch(engine.prepare, source.batches(self._first))
        self._sampler = source.sampler
        self._documents, self._time, self._scored, self._done = 0, 0.0, False, False
        self._reported = None  # (seconds, share left) at the first report
        self._stop = threading.Event()
        self._driver = ThreadPoolExecutor(1, thread_name_prefix="fit")

    def __iter__(self) -> Iterator[Progress]:
        return self

    def __next__(self) -> Progress:
        """Train until the next report is due."""
        if self._done:
            raise StopIteration
        self._stop.clear()
        advance = None
        try:
            advance = submit(self._driver, self._advance)
            progress = advance.result()
        except BaseException as error:
            # Whatever interrupts us, Ctrl-C or another signal, lets the step under way end: the state is whole.
            self._stop.set()
            failure = advance.exception() if advance else None
            if failure is not None or not isinstance(error, KeyboardInterrupt):
                self.close()
            if failure is not None and failure is not error:
                raise failure from error
            raise
        if progress is None:
            raise StopIteration
        return progress

    def finish(self) -> "Training":
        """Train to the end, without reports."""
        for _ in self:
            pass
        return self

    def close(self) -> None:
        """End the run here; ``params`` and ``state`` stay."""
        self._done = True
        self._items.close()
        self._driver.shutdown(wait=False)

    @property
    def step(self) -> int:
        """Steps taken, since the very first; an interruption may have come some steps after the last report."""
        return self._engine.step

    @property
    def params(self) -> Any:
        """λ after the last step."""
        return self._engine.params()

    @property
    def state(self) -> Any:
        """What :func:`fit` can go on from, until the next report of this run, or that run, uses it up."""
        return self._engine.state()

    def snapshot(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The state as arrays and facts, from which :func:`resume` makes it again; the run is not touched.

        Nothing is copied on a CPU: the arrays are views, and while one is held a step copies before it writes there.

        Returns:
          ``(arrays, facts)``: arrays by name, or lists of pieces of them to be joined along the first axis; and what
          JSON can hold, among it ``"step"`` and ``"sampler"``, which says what documents come next.
        """
        arrays, facts = self._engine.export()
        return arrays, facts | {"sampler": self._sampler}

    @property
    def model(self) -> Any:
        """The model. Another LDA, with priors of the same shapes, may be set between reports for the steps to come."""
        return self._model

    @model.setter
    def model(self, model: LDA) -> None:
        if not isinstance(self._model, LDA) or not isinstance(model, LDA):
            raise ValueError("only the priors of LDA can change during a run")
        self._engine.set_model(model)
        self._model = model

    def _advance(self):
        """Steps until a report is due; None if there was nothing left to report."""
        first, begun, seen, ended, due = self._engine.step, time.perf_counter(), 0, False, False
        while not self._stop.is_set() and not due:
            elapsed = time.perf_counter() - begun
            ended = self._left(self._documents + seen, self._engine.step, self._time + elapsed) <= 0
            item = None if ended else next(self._items, None)
            ended = item is None
            if ended:
                break
            self._engine.advance(item.batch, next(self._rho), next(self._length))
            seen += item.size
            taken = self._engine.step - first
            due = taken >= self._every if self._every else time.perf_counter() - begun >= _PATIENCE
            due = due or (self._score_every is not None and self._engine.step % self._score_every == 0)
        self._engine.wait()
        elapsed = time.perf_counter() - begun
        self._documents += seen
        self._time += elapsed
        if not ended and self._left(self._documents, self._engine.step, self._time) <= 0:
            ended = True
        if ended:
            self.close()
        score = None
        if self._scorer and (ended or (self._score_every and seen and self._engine.step % self._score_every == 0)):
            score = self._scorer(self._model, self.params) if seen or not self._scored else None
            self._scored = True
        if not seen and score is None:
            return None
        share = self._left(self._documents, self._engine.step, self._time)
        return Progress(
            step=self._engine.step,
            documents=self._documents,
            passes=self._documents / self._num_docs,
            seconds=self._time,
            rate=seen / elapsed if seen else 0.0,
            remaining=0.0 if ended else self._remaining(share),
            score=score,
            window=self._engine.length,
        )

    def _remaining(self, share):
        """Seconds for this share of the run, at the mean rate since the first report: before it, the step compiled."""
        if self._reported is None:
            self._reported = (self._time, share)
            return None
        seconds, then = self._reported
        return (self._time - seconds) * share / (then - share) if then - share > 0 else None

    def _left(self, documents, step, seconds):
        """The share of the run that is left, 0 … 1 by the limit that is reached first; ∞ if there is none."""
        passes, steps, most = self._limits
        shares = [
            1 - documents / (passes * self._num_docs) if passes else math.inf,
            1 - (step - self._first) / steps if steps else math.inf,
            1 - seconds / most if most else math.inf,
        ]
        return min(shares)


def resume(arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any], like: Any = None) -> Any:
    """The state of :meth:`Training.snapshot`, for :func:`fit` to go on from.

    Args:
      arrays, facts: As they came, the pieces joined.
      like: A pytree with the structure of the parameters, for a model of one's own with more than one array.
    """
    if facts["engine"] == "rows":
        return rows.restore(arrays, facts)
    state, rule = svi.restore(arrays, facts, like), adaptive.restore(arrays)
    return state if rule is None else AdaptiveRun(state, rule)


class _Source(NamedTuple):
    """Minibatches from a step on, how large they are, how many documents they stand for, and how these are drawn."""

    num_docs: float
    num_words: int | None
    num_entries: float
    batches: Callable[[int], Iterator[Batch]]
    endless: bool
    sampler: dict[str, Any] | None


def _source(data, model, batch_size, key, replace, rows):
    if not isinstance(data, Corpus) and (not isinstance(model, LDA) or _are_batches(data)):
        if rows is not None:
            raise ValueError("rows choose documents of a corpus; batches of one's own hold what they hold")
        num_docs = float(model.num_docs) if isinstance(model, LDA) else math.nan
        return _Source(num_docs, None, math.inf, lambda _: iter(data), endless=False, sampler=None)
    corpus = Corpus.of(data)
    if key is None:
        raise ValueError("give a key, by which the documents of each minibatch are drawn: key=jax.random.key(0)")
    rows = None if rows is None else check_rows(np.ravel(rows), corpus.num_docs)
    num_docs = corpus.num_docs if rows is None else len(rows)
    size = min(_whole("batch_size", batch_size), num_docs)
    layout, seed = corpus.layout(size), seed_of(key)

    def batches(first):
        for step in itertools.count(first):
            drawn = draw(seed, step, num_docs, size, replace)
            yield corpus.pack(drawn if rows is None else rows[drawn], layout)

    num_entries = size * float(corpus.indptr[-1] - corpus.indptr[0]) / corpus.num_docs
    sampler = {"seed": list(seed), "num_docs": num_docs, "batch_size": size, "replace": bool(replace)}
    return _Source(num_docs, corpus.num_words, num_entries, batches, endless=True, sampler=sampler)


def _offset(source):
    """τ of the default step sizes; of batches of one's own nobody knows how many make a pass."""
    return 10 if source.sampler is None else schedules.default_delay(source.num_docs / source.sampler["batch_size"])


def _are_batches(data):
    if isinstance(data, Batch):
        raise ValueError("expected many batches, got one: give a list of them, or the corpus")
    if isinstance(data, list | tuple):
        return bool(data) and isinstance(data[0], Batch)
    return hasattr(data, "__iter__") and not hasattr(data, "shape")


def _limits(source, passes, steps, seconds):
    for name, value in (("passes", passes), ("steps", steps), ("seconds", seconds)):
        if value is not None and not value > 0:
            raise ValueError(f"{name} must be positive, got {value}")
    if passes is None and steps is None and seconds is None and source.endless:
        passes = 1
    passes, steps, seconds = (None if value == math.inf else value for value in (passes, steps, seconds))
    if passes is not None and not source.num_docs > 0:
        raise ValueError("passes need the number of documents, which batches of one's own do not tell: give steps")
    return passes, steps, seconds


def _whole(name, value):
    if value is not None and (not isinstance(value, int | np.integer) or value < 1):
        raise ValueError(f"{name} must be a whole number of at least 1, got {value}")
    return value


def _values(name, value, first, check):
    """The numbers of a schedule from a step on, checked; computed many at a time, as each alone costs a dispatch."""

    def chunk(start):
        steps = jnp.arange(start, start + _AHEAD)
        try:
            values = np.asarray(jax.vmap(lambda step: jnp.asarray(value(step), float))(steps))
        except _NEEDS_A_NUMBER:
            values = np.array([value(step) for step in range(start, start + _AHEAD)], float)  # plain Python
        values = values[max(first - start, 0) :]
        check(values)
        return values.tolist()

    if not callable(value):
        if np.ndim(value):
            raise ValueError(f"{name} must be a number or a schedule of the step number, got {value}")
        check(value)
        return itertools.repeat(float(value))
    # Always in the same portions, so that a run that goes on computes what the whole run would have.
    begin = first // _AHEAD * _AHEAD
    return itertools.chain(chunk(begin), _more(chunk, begin))


def _more(chunk, begin):
    for start in itertools.count(begin + _AHEAD, _AHEAD):
        yield from chunk(start)


def _scorer(model, held_out, key, tol, max_iter, engine):
    if held_out is None:
        return None
    if not isinstance(model, LDA):
        raise ValueError(
            "held-out documents are scored for LDA; for a model of your own look at params between reports"
        )
    if not (isinstance(held_out, tuple) and len(held_out) == 2):
        if key is None:
            raise ValueError(
                "give a key, by which the held-out documents are split in two halves: key=jax.random.key(0)"
            )
        held_out = lda.split_documents(held_out, jax.random.fold_in(key, 1))
    observed, scored = (half if isinstance(half, Batch) else pack(half) for half in held_out)
    # Now, and not when the score is due at the end of the run.
    for half in (observed, scored):
        if half.num_words > engine.num_words:
            raise ValueError(f"held-out documents have {half.num_words} words, but λ has {engine.num_words} rows")
    if observed.size != scored.size:
        raise ValueError(f"{observed.size} documents are observed, but {scored.size} are held out")
    return lambda model, lam: float(lda.log_predictive(model, lam, observed, scored, tol, max_iter))


def _engine(model, params, source, window, warmup, exponential, prior, tol, max_iter, threads, dtype):
    if warmup not in ("mean", "zeros"):
        raise ValueError(f'warmup must be "mean" or "zeros", got {warmup!r}')
    if isinstance(window, Adaptive):
        window = adaptive.check(window)
        if exponential:
            raise ValueError("an adaptive window is a moving one: it cannot be exponential")
        if warmup != "mean":
            raise ValueError('an adaptive window needs warmup="mean": zeros would come back whenever it grows')
    if isinstance(model, LDA):
        if prior is not None:
            raise ValueError("the prior of LDA is model.eta")
        if exponential and isinstance(params, rows.RowState):
            raise ValueError("this state is of a run with a moving window; it cannot go on with an exponential one")
        if not exponential and not isinstance(params, svi.SVIState | AdaptiveRun):
            return _Rows(model, params, source, window, warmup, tol, max_iter, threads, dtype)
        prior, model = model.eta, jax.tree_util.Partial(_lda_step, model, tol, max_iter)
    elif not callable(model):
        raise ValueError(f"expected an LDA or a function (params, batch) -> (stats, info), got {type(model).__name__}")
    elif prior is None:
        raise ValueError("a model that is a function needs its prior")
    return _Dense(model, params, prior, window, warmup, exponential, dtype)


def _lda_step(model, tol, max_iter, lam, batch):
    return lda.local_step(model, lam, batch, tol, max_iter)


class _Item(NamedTuple):
    """A minibatch as an engine wants it, and its number of documents."""

    batch: Any
    size: int


class _Rows:
    """LDA on the rows that a minibatch uses, with threads."""

    def __init__(self, model, params, source, window, warmup, tol, max_iter, threads, dtype):
        if dtype is not None and jnp.dtype(dtype) not in map(jnp.dtype, _SLOTS):
            raise ValueError(f"dtype must be one of {', '.join(jnp.dtype(each).name for each in _SLOTS)}; got {dtype}")
        resumed = isinstance(params, rows.RowState)
        if resumed:
            _check_unused(params)
            self._state = params
            if threads not in (None, len(params.shards)) or (dtype is not None and jnp.dtype(dtype) != params.dtype):
                raise ValueError(f"this state is for {len(params.shards)} threads and slots of {params.dtype}")
            _check_rule(params.rule, window)
            lam = np.empty((params.num_words, params.num_topics), params.shards[0].dtype)  # for its shape
        else:
            lam = np.asarray(params)
        model = lda.check(model, lam, source.num_words)
        if not resumed:
            if not (np.isfinite(lam).all() and (lam > 0).all()):
                raise ValueError("λ must be positive and finite to start from")
            threads = _whole("threads", threads) or _num_threads(source.num_entries * lam.shape[1])
            threads = min(threads, len(lam))
            infinite = not callable(window) and window == math.inf
            rule = window if isinstance(window, Adaptive) else None
            self._state = rows.init(lam, threads, infinite=infinite, dtype=dtype, window=rule)
        self._threads = len(self._state.shards)
        self._model = rows.deal(model, self._state)
        self._options = {"warmup": warmup, "tol": tol, "max_iter": max_iter}
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="rows")
        self._infos = deque()
        self._buckets = None if self._state.rule is None else adaptive.buckets(self._state.num_words)[0]
        self.length = None

    @property
    def step(self):
        return self._state.step

    @property
    def num_words(self):
        return self._state.num_words

    def prepare(self, batch):
        if batch.num_words > self.num_words:
            raise ValueError(f"the documents have {batch.num_words} words, but λ has {self.num_words} rows")
        return _Item(rows.share(batch, self._threads, self._buckets), batch.size)

    def check_window(self, lengths):
        lengths = np.ravel(np.asarray(lengths, float))
        check_lengths(lengths, None)
        if (lengths == math.inf).any() != (self._state.slots is None):
            raise ValueError("a window of LDA is ∞ from the first step to the last, or never")
        if (lengths != np.floor(lengths)).any():
            raise ValueError(
                f"a window spans a whole number of minibatches, got {lengths[lengths != np.floor(lengths)][0]}"
            )

    def advance(self, share, rho, length):
        self._state, info = rows.step(self._state, share, self._model, rho, length, self._pool, **self._options)
        self.length = float(info.length)
        # Some steps ahead: while these are handed out, the last ones run.
        self._infos.append(info)
        self._wait_for(_IN_FLIGHT)

    def _wait_for(self, number):
        """Until no more than so many steps are under way."""
        while len(self._infos) > number:
            info = self._infos.popleft()
            if not info.finite:
                self._infos.clear()
                self._state = rows.before(self._state, info, self._model)
                raise _not_finite(self.step)

    def wait(self):
        self._wait_for(0)

    def state(self):
        self.wait()
        _check_unused(self._state)
        return self._state

    def set_model(self, model):
        shape = np.empty((self._state.num_words, self._state.num_topics), self._state.shards[0].dtype)
        model = rows.deal(lda.check(model, shape), self._state)
        if not all(map(np.array_equal, model.eta, self._model.eta)):
            # What a row missed was under the old η.
            settled = rows.settle(self.state(), self._model, self._pool)
            self._state = rows.catch_up(settled, self._model)
        self._model = model

    def export(self):
        arrays, facts = rows.export(self.state())
        return arrays, facts | {"engine": "rows"}

    def params(self):
        return rows.params(self.state(), self._model)


class _Dense:
    """Any model, through its local step and the global step."""

    def __init__(self, local_step, params, prior, window, warmup, exponential, dtype):
        self._state, self._rule = params if isinstance(params, AdaptiveRun) else (params, None)
        chosen = isinstance(window, Adaptive)
        if not isinstance(self._state, svi.SVIState):
            capacity = window.longest if chosen else float(window(0) if callable(window) else window)
            self._state = svi.init(params, Exponential() if exponential else capacity, dtype=dtype)
        if chosen and self._rule is None and not int(self._state.step):
            self._rule = adaptive.delayed(window, jax.eval_shape(adaptive.sketch, self._state.params))
        _check_rule(self._rule, window)
        if chosen:
            if isinstance(self._state.window, ExponentialState):
                raise ValueError("an adaptive window is a moving one: this state has an exponential one")
            self.check_window(window.longest)
        self.length = None
        self._local_step, self._prior, self._warmup = svi.as_pytree(local_step), prior, warmup

    @property
    def step(self):
        return int(self._state.step)

    @property
    def num_words(self):
        """Of LDA; nobody asks for that of another model."""
        return len(self._state.params)

    def prepare(self, batch):
        return _Item(batch, batch.size if isinstance(batch, Batch) else len(jax.tree.leaves(batch)[0]))

    def check_window(self, lengths):
        self._state.window.kind.check_lengths(lengths)

    def advance(self, batch, rho, length):
        stats, finite = _dense_step(self._local_step, self._state.params, batch)
        if not finite:
            raise _not_finite(self.step)
        self.length = length
        if self._rule is not None:
            chosen, rule = adaptive.take(self._rule, rho)
            self._rule = adaptive.Delayed(rule, (_sketch(stats),), 1.0)
            # As in the rows: a window that grows does not take values back, though here they are still stored.
            window = self._state.window
            self.length, length = float(chosen), min(chosen, int(window.index - window.first) + 1)
        self._state = svi.global_step(self._state, stats, self._prior, rho, length, warmup=self._warmup, donate=True)

    def wait(self):
        jax.block_until_ready(self._state)

    def state(self):
        return self._state if self._rule is None else AdaptiveRun(self._state, self._rule)

    def set_model(self, model):
        raise ValueError("the priors can change during a run with a moving window only")

    def export(self):
        arrays, facts = svi.export(self._state)
        if self._rule is not None:
            arrays |= adaptive.export(self._rule)
        return arrays, facts | {"engine": "svi"}

    def params(self):
        return jax.tree.map(jnp.array, self._state.params)  # a copy: the next step gives the state away


@jax.jit
def _dense_step(local_step, params, batch):
    """The statistics, and whether they are finite; compiled for the function, not for the numbers it was given."""
    stats, _ = local_step(params, batch)
    return stats, jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(stats)]).all()


_sketch = jax.jit(adaptive.sketch)


def _check_unused(state):
    """An error if a run has gone on from this state of rows, and written over it."""
    if any(shard.is_deleted() for shard in state.shards):
        raise ValueError("this state was used up by a run that went on from it; take the state and topics of that one")


def _check_rule(rule, window):
    """An error unless a state with this rule, or none, can go on with this window."""
    before = None if rule is None else adaptive.spec_of(rule.state)
    if before != (window if isinstance(window, Adaptive) else None):
        was = "with lengths that were given" if before is None else f"with window={before}"
        raise ValueError(f"this state is of a run {was}; it cannot go on with window={window}")


def _not_finite(step):
    return NotFiniteError(
        f"step {step}: the statistics are not finite. The parameters before this step are kept in .params; look for "
        "parameters or counts of extreme size, or take a smaller step size"
    )


def _num_threads(work):
    """As many threads as there are cores, unless a minibatch of so many entries times topics has little for each."""
    return max(1, round(min(num_cores(), work / _LEAST_WORK)))
