"""The training loop: from data to parameters, with progress reports.

    training = fit(corpus, LDA(0.1, 0.1, corpus.num_docs), lam, window=10, passes=2, key=key)
    for progress in training:
        print(progress)
    lam = training.params

:func:`fit` draws minibatches, which a thread packs ahead, takes steps, and yields a :class:`Progress` at intervals.
Between two reports the caller can read the parameters, stop, or be interrupted: a step in progress is completed first,
so that the state always belongs to a whole number of steps. A run continues from its state. Which documents come next
depends only on the key and the step number.
"""

import contextlib
import itertools
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from smoothgrad_jax.core._threads import check_not_forked, submit
from smoothgrad_jax.core.adaptive import Adaptive
from smoothgrad_jax.core.errors import OptionError
from smoothgrad_jax.core.model import Model, ScoringModel, as_model, check_key
from smoothgrad_jax.core.platforms import default_platform
from smoothgrad_jax.core.schedules import robbins_monro
from smoothgrad_jax.core.svi import check_rho
from smoothgrad_jax.core.types import ArrayLike, LocalStep, PRNGKey, PyTree, Schedule, Warmup
from smoothgrad_jax.core.window import Window
from smoothgrad_jax.data.corpus import Corpus
from smoothgrad_jax.training import distributed
from smoothgrad_jax.training.defaults import KAPPA, MAX_THREADS, WINDOW, default_tau
from smoothgrad_jax.training.engines import Engine, EngineOptions, Request, WindowSpec, choose_engine
from smoothgrad_jax.training.mesh_engine import MeshEngine, local_devices
from smoothgrad_jax.training.minibatches import Division, Minibatches, Sampler, open_minibatches

_REPORT_INTERVAL = 0.25  # seconds between two reports, unless the caller asks for a number of steps
_SCHEDULE_CHUNK = 1024  # values of a schedule that are computed at a time
_NOT_TRACEABLE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)

Score: TypeAlias = Callable[[PyTree, PyTree], float]  # (params, held_out) -> score; higher is better


class Progress(NamedTuple):
    """A progress report.

    Attributes:
      step: Steps taken, since the start of the first run.
      documents: Documents seen in this run.
      passes: Effective passes over the corpus in this run: documents / D.
      seconds: Time spent on training in this run, without scoring and without the time of the caller.
      rate: Documents per second since the last report.
      remaining: Estimated seconds until the end, from the mean rate since the first report; None if not known.
      score: Held-out score, if it was requested and is due; else None.
      window: L of the last step, as given or as an adaptive window chose it. A window that has just grown may hold
        fewer values. None before the first step of this run.
    """

    step: int
    documents: int
    passes: float
    seconds: float
    rate: float
    remaining: float | None
    score: float | None
    window: float | None = None


def fit(
    data: Corpus | Iterable[PyTree],
    model: Model | LocalStep,
    params: PyTree,
    *,
    window: WindowSpec = WINDOW,
    warmup: Warmup = "mean",
    slots: str | None = None,
    rho: float | Schedule | None = None,
    passes: float | None = None,
    steps: int | None = None,
    seconds: float | None = None,
    batch_size: int | None = None,
    key: PRNGKey | None = None,
    replace: bool = False,
    documents: ArrayLike | None = None,
    held_out: PyTree = None,
    score: Score | None = None,
    score_every: int | None = None,
    report_every: int | None = None,
    prior: PyTree = None,
    threads: int | None = None,
    mesh: Mesh | None = None,
    messages: str | None = None,
) -> "Training":
    """Train a model and report progress.

    Args:
      data: For a model of documents, a :class:`smoothgrad_jax.Corpus` or anything :func:`smoothgrad_jax.pack` takes.
        For any model, an iterable of batches, which is iterated in a thread and ends the run when it ends; an array is
        such an iterable, along its first axis: one batch per entry.
      model: A model such as :class:`smoothgrad_jax.LDA`; or a function ``(params, batch) -> (statistics, info)``
        together with ``prior``.
      params: Parameters to start from. Or the ``state`` of an earlier run, to continue it with the same model, window,
        key and batch size. The new run overwrites that state.
      window: L: a number, ∞, or a schedule of the step number such as :func:`smoothgrad_jax.phase_out`, which must
        start with its longest window. Or :class:`smoothgrad_jax.Adaptive`, which chooses L during the run. Or a window
        kind such as :class:`smoothgrad_jax.Exponential`.
      warmup: ``"mean"`` or ``"zeros"``; see :func:`smoothgrad_jax.window.push`.
      slots: Dtype in which the window stores statistics: ``"bfloat16"`` halves the memory of a long window;
        ``"uint8"``, for row-sparse models, quarters it (each entry within a tenth, the sum of every row exact).
      rho: ρ: a number in [0, 1] or a schedule of the step number. By default (τ + t)^−0.7, where τ is the number of
        minibatches per pass, at most 64; 10 for batches that you supply.
      passes, steps, seconds: Limits; the first one that is reached ends the run. By default one pass. They count from
        this call on, also for a run that continues from a state: give it what is left.
      batch_size: B, for a corpus; by default D/32, at least 32 and at most 256.
      key: Random key. It decides which documents are drawn, which tokens are held out, and what a model samples.
        Batches that you supply need a key only for a model that samples; otherwise it is accepted, and has no effect
        on training.
      replace: Whether to draw documents with replacement, as in the paper, instead of in shuffled passes.
      documents: Numbers of the documents of the corpus to learn from; by default all.
      held_out: Data to score, in the form that the model's ``split_held_out`` takes. For LDA: documents, or a pair
        ``(observed, held_out)`` from :func:`smoothgrad_jax.split_documents`. With ``score`` in any form.
      score: A score of your own, ``(params, held_out) -> float``; higher is better. It replaces the score of the model,
        and gets the held-out data as they are given.
      score_every: Number of steps between two scores; a last score follows at the end. By default only that one.
      report_every: Number of steps between two reports; by default there are four reports per second.
      prior: η, for a model that is a function.
      threads: Number of threads, for row-sparse models; by default one per core, up to 8, and fewer for small
        minibatches.
      mesh: Devices to train on, of one or several processes, each of which makes this call; see
        :mod:`smoothgrad_jax.training.distributed`. ``batch_size`` is that of all devices together.
      messages: Dtype in which the devices of a mesh exchange rows of λ and statistics: ``"bfloat16"`` halves what a
        step sends. By default that of the parameters.

    Returns:
      A :class:`Training`, an iterator of :class:`Progress`.

    Raises:
      ValueError: An argument cannot be used; raised here, before anything is computed (for a schedule, its first
        thousand values are checked).
      RuntimeError: In a process that was forked after jax had started.
      NotFiniteError: From the iterator, which keeps the last good state.
    """
    check_not_forked()
    model = as_model(model, prior)
    check_key(model, key)
    division = None
    if mesh is not None:
        numbers = tuple(number for number, _ in local_devices(mesh))
        division = Division(mesh.size, numbers)
    source = open_minibatches(data, model, batch_size, key, replace, documents, division)
    platform = default_platform() if mesh is None else mesh.devices.flat[0].platform
    if messages is not None and (mesh is None or messages != "bfloat16"):
        expected = "has no effect without a mesh" if mesh is None else f'must be "bfloat16" or None, got {messages!r}'
        raise OptionError("messages", expected)
    options = EngineOptions(
        window, warmup, slots, threads, key, source.num_words, source.entries_per_batch, platform, messages
    )
    if (_check_count("threads", threads) or 1) > MAX_THREADS:
        raise OptionError("threads", f"must be at most {MAX_THREADS:,}, got {threads}")
    for name, value in (("score", score), ("score_every", score_every)):
        if value is not None and held_out is None:
            raise OptionError(name, "has no effect without held_out")
    engine: Engine
    if mesh is None:
        engine = choose_engine(model, params, options)
    else:
        engine = MeshEngine(model, params, options, mesh)
        if source.sampler is not None:
            engine.check_batch_size(source.sampler.batch_size)
        if engine.is_shared:
            _compare_processes(engine, source, passes=passes, steps=steps, score_every=score_every, report=report_every)
    return Training(
        source,
        engine,
        model,
        window=window,
        rho=robbins_monro(default_tau(source.batches_per_pass), KAPPA) if rho is None else rho,
        limits=_limits(source, passes, steps, seconds),
        held_out=_prepare_held_out(model, held_out, score, key, engine),
        score=score,
        score_every=_check_count("score_every", score_every),
        report_every=_check_count("report_every", report_every),
    )


def _compare_processes(engine: Engine, source: Minibatches, **options: float | None) -> None:
    """Raise an error if another process would take other steps; it would otherwise wait for this one for ever."""
    drawn = source.sampler._asdict() if source.sampler else {}
    shapes = [leaf.shape for leaf in jax.tree.leaves(engine.template)]
    sizes = {"words": source.num_words, "entries": source.entries_per_batch, "parameters": shapes, "step": engine.step}
    distributed.check_same({**drawn, **sizes, **options})


class Limits(NamedTuple):
    """Where a run ends; None is no limit."""

    passes: float | None
    steps: float | None
    seconds: float | None


class Training:
    """A run in progress: iterate over it, or call :meth:`finish`. Made by :func:`fit`."""

    def __init__(
        self,
        source: Minibatches,
        engine: Engine,
        model: Model,
        window: WindowSpec,
        rho: float | Schedule,
        limits: Limits,
        held_out: PyTree,
        score: Score | None,
        score_every: int | None,
        report_every: int | None,
    ) -> None:
        self._engine, self._model, self._held_out, self._own_score = engine, model, held_out, score
        self._score_every, self._report_every = score_every, report_every
        self._num_docs, self._limits, self._first = source.num_docs, limits, engine.step
        self._rho = _schedule_values("rho", rho, self._first, check_rho)
        self._lengths = _window_lengths(window, self._first, engine)
        self._batches = engine.prepared(source.from_step(self._first))
        # Also at the exit of Python, while the modules that the generator needs exist.
        weakref.finalize(self, self._batches.close)
        self._sampler = source.sampler
        self._documents, self._seconds, self._scored, self._done = 0, 0.0, False, False
        self._first_report: tuple[float, float] | None = None  # seconds, and fraction left
        self._stop, self._interrupted = threading.Event(), False
        self._between_steps = threading.RLock()  # held while a step is started, and while the state is read
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fit")

    def __iter__(self) -> Iterator[Progress]:
        return self

    def __next__(self) -> Progress:
        """Train until the next report is due."""
        if self._done:
            raise StopIteration
        advance = None
        try:
            advance = submit(self._thread, self._advance)
            progress = advance.result()
        except BaseException as error:
            # Any interruption, Ctrl-C or another signal, lets the step in progress end, so that the state is complete.
            self._stop.set()
            if advance is not None:
                _wait_for(advance)
            failure = advance.exception() if advance else None
            is_interrupt = isinstance(error, KeyboardInterrupt)
            if failure is not None or not is_interrupt:
                self.close()
            if failure is not None and failure is not error:
                raise failure from error
            if advance is None or failure is not None or not (is_interrupt and self._engine.is_shared):
                self._clear_interrupt()
                raise
            progress = advance.result()
        if self._interrupted:
            self._clear_interrupt()
            raise KeyboardInterrupt
        if progress is None:
            raise StopIteration
        return progress

    def interrupt(self) -> None:
        """Make the iterator raise KeyboardInterrupt after the step in progress; for signal handlers.

        If several processes train, it is raised in all of them, after the same step.
        """
        self._stop.set()

    def _clear_interrupt(self) -> None:
        self._stop.clear()
        self._interrupted = False

    def finish(self) -> "Training":
        """Train to the end without reports."""
        for _ in self:
            pass
        return self

    def close(self) -> None:
        """End the run here; ``params`` and ``state`` stay available."""
        self._done = True
        self._batches.close()
        self._thread.shutdown(wait=False)

    @property
    def step(self) -> int:
        """Steps taken, since the start of the first run; an interruption can come some steps after the last report."""
        return self._engine.step

    @property
    def params(self) -> PyTree:
        """Parameters after the last step; another thread can read them while the run is in progress."""
        with self._between_steps:
            return self._engine.params()

    @property
    def state(self) -> PyTree:
        """What :func:`fit` can continue from, a pytree of arrays. The next step, or that run, overwrites it."""
        with self._between_steps:
            return self._engine.state()

    @property
    def sampler(self) -> Sampler | None:
        """What decides, with the step number, which documents come next; None if the caller supplies batches."""
        return self._sampler

    @property
    def model(self) -> Model:
        """The model. A model of the same class and shapes can be set between reports, for the steps to come."""
        return self._model

    @model.setter
    def model(self, model: Model) -> None:
        if type(model) is not type(self._model):
            raise ValueError(f"expected a {type(self._model).__name__}, got a {type(model).__name__}")
        with self._between_steps:
            self._engine.set_model(model)
            self._model = model

    def _advance(self) -> Progress | None:
        """Take steps until a report is due; return None if nothing is left to report."""
        begun = time.perf_counter()
        seen, ended = self._take_steps(begun)
        with self._between_steps:
            self._engine.wait()
        elapsed = time.perf_counter() - begun
        self._documents += seen
        self._seconds += elapsed
        ended = ended or self._is_over(self._documents) or self._engine.agree(self._request(0.0, False)) == Request.END
        if ended:
            self.close()
        score = self._score(seen, ended)
        if not seen and score is None:
            return None
        left = self._fraction_left(self._documents, self._engine.step, self._seconds)
        return Progress(
            step=self._engine.step,
            documents=self._documents,
            passes=self._documents / self._num_docs,
            seconds=self._seconds,
            rate=seen / elapsed if seen else 0.0,
            remaining=0.0 if ended else self._remaining(left),
            score=score,
            window=self._engine.length,
        )

    def _take_steps(self, begun: float) -> tuple[int, bool]:
        """Take steps until a report is due or the run ends; return the documents seen, and whether it ended."""
        first, seen = self._engine.step, 0
        while not self._is_over(self._documents + seen):
            taken = self._engine.step - first
            elapsed = time.perf_counter() - begun
            decision = self._engine.agree(self._request(elapsed, taken > 0 and elapsed >= _REPORT_INTERVAL))
            self._interrupted = decision == Request.INTERRUPT
            if self._interrupted or decision == Request.END:
                return seen, not self._interrupted
            if taken and (decision == Request.REPORT or taken == self._report_every or self._score_is_due()):
                return seen, False
            prepared = next(self._batches, None)
            if prepared is None:
                return seen, True
            with self._between_steps:
                self._engine.advance(prepared.batch, next(self._rho), next(self._lengths))
            seen += prepared.size
        return seen, True

    def _request(self, elapsed: float, report_is_due: bool) -> Request:
        """Return what this process would do next; the clocks of several processes differ."""
        if self._stop.is_set():
            return Request.INTERRUPT
        if self._limits.seconds and self._seconds + elapsed >= self._limits.seconds:
            return Request.END
        return Request.REPORT if report_is_due and not self._report_every else Request.CONTINUE

    def _is_over(self, documents: int) -> bool:
        """Return whether the limit in passes or in steps is reached."""
        return self._fraction_left(documents, self._engine.step, 0.0) <= 0

    def _score_is_due(self) -> bool:
        return self._score_every is not None and self._engine.step % self._score_every == 0

    def _score(self, seen: int, ended: bool) -> float | None:
        """Return the held-out score, if it is due and not the same as the last one."""
        is_due = ended or (seen and self._score_is_due())
        if self._held_out is None or not is_due or (self._scored and not seen):
            return None
        self._scored = True
        params, held_out = self.params, self._held_out
        if self._own_score is not None:
            score = self._own_score
        else:
            assert isinstance(self._model, ScoringModel), "the model was checked before the first step"
            score = self._model.held_out_score
        return self._engine.share(lambda: float(score(params, held_out)))

    def _remaining(self, left: float) -> float | None:
        """Return the seconds for this fraction of the run, at the mean rate since the first report.

        Before the first report the step compiled.
        """
        if self._first_report is None:
            self._first_report = (self._seconds, left)
            return None
        seconds, then = self._first_report
        return (self._seconds - seconds) * left / (then - left) if then - left > 0 else None

    def _fraction_left(self, documents: int, step: int, seconds: float) -> float:
        """Return the fraction of the run that is left, by the limit that is reached first; ∞ without limits."""
        limits = self._limits
        fractions = [
            1 - documents / (limits.passes * self._num_docs) if limits.passes else math.inf,
            1 - (step - self._first) / limits.steps if limits.steps else math.inf,
            1 - seconds / limits.seconds if limits.seconds else math.inf,
        ]
        return min(fractions)


def _wait_for(future: Future[Progress | None]) -> None:
    """Wait until a step has ended; a second Ctrl-C must not return while the step changes the state."""
    while not future.done():
        with contextlib.suppress(BaseException):
            wait([future])


def _limits(source: Minibatches, passes: float | None, steps: float | None, seconds: float | None) -> Limits:
    for name, value in (("passes", passes), ("steps", steps), ("seconds", seconds)):
        if value is not None and (not isinstance(value, int | float | np.number) or isinstance(value, bool)):
            raise OptionError(name, f"must be a number, got {value!r}")
        if value is not None and not value > 0:
            raise OptionError(name, f"must be positive, got {value}")
    if steps not in (None, math.inf) and steps != int(steps):
        raise OptionError("steps", f"must be a whole number or ∞, got {steps}")
    if passes is None and steps is None and seconds is None and source.sampler is not None:
        passes = 1
    if passes is not None and passes != math.inf and not source.num_docs > 0:
        raise OptionError(
            "passes", "need the number of documents, which is not known for batches that you supply: give steps"
        )
    return Limits(*(None if value == math.inf else value for value in (passes, steps, seconds)))


def _check_count(name: str, value: int | None) -> int | None:
    if value is not None and (not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1):
        raise OptionError(name, f"must be a whole number of at least 1, got {value}")
    return value


def _prepare_held_out(
    model: Model, held_out: PyTree, score: Score | None, key: PRNGKey | None, engine: Engine
) -> PyTree:
    if score is not None and not callable(score):
        raise OptionError("score", f"must be a function (params, held_out) -> float, got {score!r}")
    if held_out is None or score is not None:
        return held_out
    if not isinstance(model, ScoringModel):
        raise OptionError(
            "held_out",
            f"needs a model that scores held-out data; {type(model).__name__} has no split_held_out and "
            "held_out_score. Give a function score=(params, held_out) -> float, or leave held_out out",
        )
    return model.split_held_out(held_out, key, engine.template)


def _window_lengths(window: WindowSpec, first: int, engine: Engine) -> Iterator[float | None]:
    """Iterate over the window lengths from a step on."""
    if isinstance(window, Adaptive):
        return itertools.repeat(None)
    lengths = window.length if isinstance(window, Window) else window
    return (
        itertools.repeat(None) if lengths is None else _schedule_values("window", lengths, first, engine.check_lengths)
    )


def _schedule_values(
    name: str, value: float | Schedule, first: int, check: Callable[[ArrayLike], None]
) -> Iterator[float]:
    """Iterate over the values of a schedule from a step on, checked.

    The values are computed many at a time, because each computation alone costs a dispatch.
    """
    if not callable(value):
        if np.ndim(value) or isinstance(value, str):
            raise OptionError(name, f"must be a number or a schedule of the step number, got {value!r}")
        check(value)
        return itertools.repeat(float(value))

    def chunk(start: int) -> list[float]:
        steps = jnp.arange(start, start + _SCHEDULE_CHUNK)
        try:
            values = np.asarray(jax.vmap(lambda step: jnp.asarray(value(step), float))(steps))
        except _NOT_TRACEABLE:
            values = np.array([value(step) for step in range(start, start + _SCHEDULE_CHUNK)], float)
        values = values[max(first - start, 0) :]
        check(values)
        return values.tolist()

    # Chunks always begin at the same steps, so that a run that continues computes the values of the complete run.
    begin = first // _SCHEDULE_CHUNK * _SCHEDULE_CHUNK
    later = map(chunk, itertools.count(begin + _SCHEDULE_CHUNK, _SCHEDULE_CHUNK))
    return itertools.chain(chunk(begin), itertools.chain.from_iterable(later))
