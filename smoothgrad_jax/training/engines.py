"""Engines: how a run advances by one step. All engines satisfy one contract, :class:`Engine`.

| engine                   | runs                                                                                  |
|--------------------------|---------------------------------------------------------------------------------------|
| :class:`RowSparseEngine` | models with row-sparse statistics, with a moving or adaptive window, on a CPU         |
| :class:`DenseEngine`     | every other combination, through :func:`smoothgrad_jax.global_step`                   |
| ``MeshEngine``           | any model and window on the devices of a mesh; see                                    |
|                          | :mod:`smoothgrad_jax.training.mesh_engine`                                            |

Without a mesh, :func:`choose_engine` decides by the model, the window and the platform. The row-sparse engine consists
of loops over rows and documents, which an accelerator would run kernel by kernel. Elsewhere than on a CPU, and for a
model that is told to use its local step for accelerators, the dense engine runs. All engines take the same options and
compute the same parameters up to rounding. An option that an engine cannot honour raises an error.
"""

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from enum import IntEnum
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from smoothgrad_jax.core import _xla, adaptive, svi
from smoothgrad_jax.core._threads import num_threads
from smoothgrad_jax.core.adaptive import Adaptive
from smoothgrad_jax.core.errors import OptionError
from smoothgrad_jax.core.mesh_step import MeshState
from smoothgrad_jax.core.model import Model, check_key, checked, for_platform, is_batched, local_step, uses_key
from smoothgrad_jax.core.row_sparse.kernel import RowBatch, RowSparseModel
from smoothgrad_jax.core.row_sparse.state import (
    RowSparseState,
    Workspace,
    init_rows,
    partition_batch,
    partition_prior,
    repartition,
)
from smoothgrad_jax.core.row_sparse.step import (
    RowInfo,
    StepOptions,
    check_row_lengths,
    flush,
    read_rows,
    restart,
    step,
)
from smoothgrad_jax.core.types import ArrayLike, PRNGKey, PyTree, Schedule, Warmup
from smoothgrad_jax.core.window import Moving, MovingState, Window, WindowState, check_lengths
from smoothgrad_jax.core.window_kind import check_warmup
from smoothgrad_jax.data.sampling import prefetch

WindowSpec = float | Schedule | Adaptive | Window

# Entries × columns per thread: below that a second thread costs as much as it gains (experiments/BENCHMARKS.md).
_MIN_WORK = 400_000
_SLOT_DTYPES = ("float32", "float64", "bfloat16", "uint8")  # float16 overflows at 65,504, which counts reach
_OPTION_OF_FIT = {"capacity": "window", "length": "window", "dtype": "slots"}
_STEPS_IN_PROGRESS = 3  # steps started before the first of them has ended: starting a step may wait for a core


class NotFiniteError(ArithmeticError):
    """A step computed statistics that are not finite; the parameters before the step remain, with an empty window.

    Also raised by the row-sparse engine if the statistics of the rows are negative.
    """


class EngineOptions(NamedTuple):
    """What :func:`smoothgrad_jax.fit` passes to an engine.

    Attributes:
      window: See :func:`smoothgrad_jax.fit`.
      warmup: See :func:`smoothgrad_jax.window.push`.
      slots: Dtype in which the window stores statistics; None is that of the parameters.
      threads: Number of threads; None lets the engine decide.
      key: Random key of the run, for models that sample.
      num_words: V of the corpus, if known.
      entries_per_batch: Expected number of entries of a minibatch.
      platform: Where the steps run, such as ``"cpu"`` or ``"gpu"``.
      messages: Dtype in which the devices of a mesh exchange rows and statistics; None is that of the parameters.
    """

    window: WindowSpec
    warmup: Warmup
    slots: str | None
    threads: int | None
    key: PRNGKey | None
    num_words: int | None
    entries_per_batch: float
    platform: str
    messages: str | None = None


class PreparedBatch(NamedTuple):
    """A minibatch in the form an engine takes, and its number of documents."""

    batch: PyTree
    size: int


class Request(IntEnum):
    """What a run does next; of several requests, the largest counts."""

    CONTINUE = 0
    REPORT = 1
    END = 2
    INTERRUPT = 3


class Engine(Protocol):
    """A run that advances step by step.

    Attributes:
      length: L of the last step; None before the first step.
      is_shared: Whether several processes run this engine, all in the same way.
    """

    length: float | None = None
    is_shared: bool = False

    @property
    def step(self) -> int:
        """Number of steps taken, since the start of the first run."""

    @property
    def template(self) -> PyTree:
        """Shapes and dtypes of the parameters."""

    def prepared(self, batches: Iterable[PyTree]) -> Generator[PreparedBatch, None, None]:
        """Convert minibatches in another thread, ahead of :meth:`advance`."""

    def check_lengths(self, lengths: ArrayLike) -> None:
        """Raise an error if the window cannot have one of these lengths."""

    def advance(self, batch: PyTree, rho: float, length: float | None) -> None:
        """Take one step with a prepared minibatch; may return while the step is in progress.

        Raises:
          NotFiniteError: This step, or one of the last few, computed statistics that are not finite.
        """

    def wait(self) -> None:
        """Wait until no step is in progress; raises as :meth:`advance`."""

    def agree(self, request: Request) -> Request:
        """Return what to do next: the same in all processes, if several run this engine.

        Several processes learn of a request after the next step, with which it is exchanged. The request of process 0
        counts, or of any process that is interrupted.
        """
        return request

    def share(self, compute: Callable[[], float]) -> float:
        """Return a number that one process computes for all."""
        return compute()

    def state(self) -> PyTree:
        """Return the state after the last step, a pytree of arrays; the next step donates it."""

    def params(self) -> PyTree:
        """Return a copy of the parameters after the last step."""

    def set_model(self, model: Model) -> None:
        """Use a model with other hyperparameters of the same shapes for the steps to come."""


class DenseAdaptiveState(NamedTuple):
    """The state of the dense engine with an adaptive window.

    Attributes:
      state: Parameters, window and step.
      rule: The rule that chooses the window length.
    """

    state: svi.SVIState
    rule: adaptive.DelayedRule


def choose_engine(model: Model, start: PyTree, options: EngineOptions) -> Engine:
    """Return the engine for a model and a window.

    Args:
      model: The model.
      start: Parameters, or the state of an earlier run on the same engine.
      options: See :class:`EngineOptions`.
    """
    options = check_options(options)
    window, model = options.window, for_platform(model, options.platform)
    is_row_sparse = (
        isinstance(model, RowSparseModel)
        and not isinstance(window, Window)
        and options.platform == "cpu"
        and not is_batched(model)
    )
    if isinstance(start, MeshState):
        raise ValueError("this state is of a run on a mesh; continue it on a mesh, or start from its parameters")
    if isinstance(start, svi.SVIState | DenseAdaptiveState if is_row_sparse else RowSparseState):
        raise ValueError(
            f"this state is of a run on the {'dense' if is_row_sparse else 'row-sparse'} engine; it cannot continue "
            f"with window={window}{' and a batched local step' if is_batched(model) else ''} on {options.platform}. "
            "Continue with the window, platform and execution of that run, or start from its parameters"
        )
    with option_names():
        if isinstance(model, RowSparseModel) and is_row_sparse:
            return RowSparseEngine(model, start, options)
        return DenseEngine(model, start, options)


def check_options(options: EngineOptions) -> EngineOptions:
    """Return the options with the window in the form that every engine takes; raise an error for invalid ones."""
    check_warmup(options.warmup)
    options = _without_moving(options)
    window = options.window
    if isinstance(window, Adaptive):
        options = options._replace(window=adaptive.check(window))
        if options.warmup != "mean":
            raise OptionError("warmup", 'must be "mean" for an adaptive window: zeros would return when it grows')
    elif not isinstance(window, Window):
        if not callable(window) and not _is_number(window):
            raise OptionError("window", f"must be a number, a schedule, Adaptive() or a window kind, got {window!r}")
        with option_names():
            check_lengths(longest_length(window))
        if options.slots is not None and longest_length(window) == math.inf:
            raise OptionError("slots", "has no effect with window=∞, which stores no statistics: leave it out")
    slot_dtype(options.slots)
    return options


@contextmanager
def option_names() -> Iterator[None]:
    """Report errors of a window under the names of the options of :func:`smoothgrad_jax.fit`."""
    try:
        yield
    except OptionError as error:
        raise OptionError(_OPTION_OF_FIT.get(error.option, error.option), error.problem) from error


def _without_moving(options: EngineOptions) -> EngineOptions:
    """Return the options with a moving window as its length and the dtype of its slots, which every engine takes."""
    window = options.window
    if not isinstance(window, Moving):
        return options
    if window.dtype is not None:
        if options.slots is not None:
            raise OptionError("slots", f"belongs to the window kind: leave it out beside {window}")
        options = options._replace(slots=jnp.dtype(window.dtype).name)
    return options._replace(window=window.length)


class RowSparseEngine(Engine):
    """Runs a model on the rows that a minibatch uses, with threads; see :mod:`smoothgrad_jax.core.row_sparse`."""

    def __init__(self, model: RowSparseModel, start: PyTree, options: EngineOptions) -> None:
        slots = slot_dtype(options.slots)
        if isinstance(start, RowSparseState):
            check_not_donated(start.partitions)
            check_rows(start, options)
            check_rule(start.rule, options.window)
            self._state = start
            model = checked(model, self._template(model), options.num_words)
            self._state = _with_threads(model, self._state, options.threads)
        else:
            start = jax.tree.map(np.asarray, start)
            model = checked(model, start, options.num_words)
            self._state = _init_rows(model, start, options)
        self._model = model
        self._slots = slots or self._state.slot_dtype or self._state.dtype
        self._warmup, self._run_key = options.warmup, options.key
        self._set_hyperparameters(model)
        self._pool = ThreadPoolExecutor(len(self._state.partitions), thread_name_prefix="rows")
        self._workspace = Workspace()
        self._infos: deque[RowInfo] = deque()
        num_words = self._state.num_words
        words = None if self._state.rule is None else np.arange(num_words, dtype=np.uint32)
        self._buckets = None if words is None else adaptive.bucket_of(words, num_words)

    def _set_hyperparameters(self, model: RowSparseModel) -> None:
        prior, rest_prior = model.row_prior()
        self._prior = partition_prior(prior, self._state)
        kernel = model.row_kernel(self._state.num_columns, self._state.dtype)
        # On the device, because every step would transfer arrays of NumPy again.
        self._kernel = jax.tree.map(lambda leaf: jnp.array(leaf) if isinstance(leaf, np.ndarray) else leaf, kernel)
        self._options = StepOptions(self._warmup, self._slots, rest_prior)
        self._key = _key_for(model, self._run_key)
        self._model = model

    def _template(self, model: RowSparseModel) -> PyTree:
        state = self._state
        matrix = jax.ShapeDtypeStruct((state.num_words, state.num_columns), state.dtype)
        return model.join_rows(matrix, None if state.rest is None else state.rest.params)

    @property
    def step(self) -> int:
        return int(self._state.step)

    @property
    def template(self) -> PyTree:
        return self._template(self._model)

    def prepared(self, batches: Iterable[RowBatch]) -> Generator[PreparedBatch, None, None]:
        return prefetch(self._prepare, batches)

    def _prepare(self, batch: RowBatch) -> PreparedBatch:
        if batch.num_words > self._state.num_words:
            raise ValueError(f"the documents have {batch.num_words} words, but λ has {self._state.num_words} rows")
        return PreparedBatch(partition_batch(batch, len(self._state.partitions), self._buckets), batch.size)

    def check_lengths(self, lengths: ArrayLike) -> None:
        """Raise an error unless all lengths are whole numbers, or all are ∞."""
        with option_names():
            check_row_lengths(lengths, self._state.slots is None, self._state.rest)

    def advance(self, batch: PyTree, rho: float, length: float | None) -> None:
        key = None if self._key is None else jax.random.fold_in(self._key, self.step)
        self._state, info = step(
            self._state,
            batch,
            self._kernel,
            self._prior,
            rho,
            length,
            self._workspace,
            self._pool,
            options=self._options,
            key=key,
        )
        self.length = info.length
        self._infos.append(info)
        self._wait_until(_STEPS_IN_PROGRESS)

    def _wait_until(self, number: int) -> None:
        """Wait until at most this many steps are in progress."""
        while len(self._infos) > number:
            info = self._infos.popleft()
            if not info.is_finite:
                self._infos.clear()
                self._state = restart(self._state, info, self._prior, self._slots)
                raise negative_error(self.step, self._model) if info.is_negative else not_finite_error(self.step)

    def wait(self) -> None:
        self._wait_until(0)

    def state(self) -> RowSparseState:
        self.wait()
        check_not_donated(self._state.partitions)
        return self._state

    def params(self) -> PyTree:
        state = self.state()
        rest = None if state.rest is None else jax.tree.map(jnp.array, state.rest.params)
        return self._model.join_rows(read_rows(state, self._prior, self._slots), rest)

    def set_model(self, model: Model) -> None:
        """Use other hyperparameters; in O(V) if the prior of the rows changes."""
        assert isinstance(model, RowSparseModel), "the engine was chosen for such a model"
        checked_model = checked(model, self.template, None)
        check_key(checked_model, self._run_key)
        previous = self._prior
        if not all(map(np.array_equal, partition_prior(checked_model.row_prior()[0], self._state).eta, previous.eta)):
            # The steps that a row has skipped were under the old prior.
            self._state = flush(self.state(), self._kernel, previous, self._workspace, self._slots, self._pool)
        self._set_hyperparameters(checked_model)


class DenseEngine(Engine):
    """Runs any model through its local step and :func:`smoothgrad_jax.global_step`."""

    def __init__(self, model: Model, start: PyTree, options: EngineOptions) -> None:
        window = options.window
        if options.threads not in (None, 1):
            raise OptionError("threads", "has no effect here: the dense engine runs in one thread")
        self._rule: adaptive.DelayedRule | None = start.rule if isinstance(start, DenseAdaptiveState) else None
        if isinstance(start, svi.SVIState | DenseAdaptiveState):
            self._state = start.state if isinstance(start, DenseAdaptiveState) else start
            check_not_donated(self._state.params)
            model = checked(model, self._state.params, options.num_words)
        else:
            start = jax.tree.map(np.asarray, start)
            model = checked(model, start, options.num_words)
            self._state = svi.init(start, window_kind(options))
            if isinstance(window, Adaptive):
                self._rule = adaptive.init_delayed(window, jax.eval_shape(adaptive.sketch, self._state.params))
        check_rule(self._rule, window)
        check_window(self._state.window, options)
        self._model, self._warmup, self._run_key = model, options.warmup, options.key
        self._platform = options.platform
        self._key = _key_for(model, options.key)
        if isinstance(window, Adaptive):
            self.check_lengths(window.longest)

    @property
    def step(self) -> int:
        return int(self._state.step)

    @property
    def template(self) -> PyTree:
        return jax.eval_shape(lambda: self._state.params)

    def prepared(self, batches: Iterable[PyTree]) -> Generator[PreparedBatch, None, None]:
        return prefetch(lambda batch: PreparedBatch(batch, batch_size(batch)), batches)

    def check_lengths(self, lengths: ArrayLike) -> None:
        with option_names():
            self._state.window.kind.check_lengths(lengths)

    def advance(self, batch: PyTree, rho: float, length: float | None) -> None:
        key = None if self._key is None else jax.random.fold_in(self._key, self.step)
        stats, is_finite = _local_step(self._model, self._state.params, batch, key)
        if not is_finite:
            self._restart()
            raise not_finite_error(self.step)
        self.length = length
        if self._rule is not None:
            chosen, rule = adaptive.next_length(self._rule, rho)
            self._rule = adaptive.delay(rule, (_sketch(stats),), 1.0)
            self.length = length = float(chosen)
        self._state = svi.global_step(
            self._state, stats, self._model.prior, rho, length, warmup=self._warmup, donate=True
        )

    def _restart(self) -> None:
        """Empty the window, and start the rule that chooses its length again; the parameters and the step remain."""
        params, window, step = self._state
        self._state = svi.init(params, window.kind)._replace(step=step)
        self._rule = None if self._rule is None else adaptive.restart(self._rule)

    def wait(self) -> None:
        jax.block_until_ready(self._state)

    def state(self) -> PyTree:
        check_not_donated(self._state.params)
        return self._state if self._rule is None else DenseAdaptiveState(self._state, self._rule)

    def params(self) -> PyTree:
        """Return a copy of the parameters, because the next step donates the state."""
        check_not_donated(self._state.params)
        return jax.tree.map(jnp.array, self._state.params)

    def set_model(self, model: Model) -> None:
        checked_model = checked(for_platform(model, self._platform), self._state.params, None)
        check_key(checked_model, self._run_key)
        self._model, self._key = checked_model, _key_for(checked_model, self._run_key)


def batch_size(batch: PyTree) -> int:
    """Return the number of documents of a minibatch; of other batches the length of their first axis, or 1."""
    shape = (batch.size,) if hasattr(batch, "offsets") else next(map(np.shape, jax.tree.leaves(batch)), ())
    return shape[0] if shape else 1


@jax.jit
def _local_step(model, params, batch, key):
    """Return the statistics, and whether they are finite; hyperparameters of the model are inputs."""
    stats, _ = local_step(model, params, batch, key)
    return stats, jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(stats)]).all()


_sketch = jax.jit(adaptive.sketch)


def _key_for(model, key):
    """Return the key of the run for a model that samples; another program is compiled without a key."""
    return key if uses_key(model) else None


def _init_rows(model, params, options):
    """Return the state of the row-sparse engine before the first step."""
    matrix, rest = model.split_rows(params)
    matrix = np.asarray(matrix)
    most = _max_threads(model, matrix, options.threads)
    threads = min(options.threads or _num_threads(options.entries_per_batch * matrix.shape[1]), most)
    window = options.window
    if rest is not None:
        rest = svi.init(rest, window_kind(options))
    return init_rows(
        matrix,
        threads,
        infinite=longest_length(window) == math.inf,
        window=window if isinstance(window, Adaptive) else None,
        rest=rest,
    )


def _max_threads(model, matrix, threads):
    """Return the largest number of threads for a matrix of this shape; raise an error if more are asked for."""
    most = model.row_kernel(matrix.shape[1], matrix.dtype).max_threads
    if most is not None and (threads or 1) > most:
        raise OptionError("threads", f"must be at most {most} for {type(model).__name__}")
    return min(matrix.shape[0], most or matrix.shape[0])


def _with_threads(model, state, threads):
    """Return a state for this number of threads; None keeps that of the run that is continued."""
    shape = jax.ShapeDtypeStruct((state.num_words, state.num_columns), state.dtype)
    number = min(threads or len(state.partitions), _max_threads(model, shape, threads))
    return state if number == len(state.partitions) else repartition(state, number)


def window_kind(options: EngineOptions) -> Window:
    """Return the window kind for dense statistics; a schedule starts with its longest window."""
    window = options.window
    if isinstance(window, Window):
        if options.slots is not None:
            raise OptionError("slots", f"has no effect with the window {window}")
        # The run gives every step its length: a kind whose state keeps no length has none.
        kept = window.init(jax.ShapeDtypeStruct((), np.float32)).kind
        return kept if kept.length is None else window
    return Moving(longest_length(window), dtype=slot_dtype(options.slots))


def longest_length(window: WindowSpec) -> float:
    """Return the longest length of a moving window, with which a schedule starts."""
    if isinstance(window, Adaptive):
        return window.longest
    return float(np.asarray(window(0) if callable(window) else window))


def check_rows(state: RowSparseState, options: EngineOptions) -> None:
    """Raise an error unless a row-sparse run with this state can continue with the window of these options."""
    if isinstance(options.window, Window):
        raise ValueError(f"this state has row-sparse statistics; it cannot continue with window={options.window}")
    slots = slot_dtype(options.slots)
    if slots is not None and state.slot_dtype not in (None, slots):
        raise OptionError("slots", f"must be {state.slot_dtype}, as in the run that is continued")


def check_window(window: WindowState, options: EngineOptions) -> None:
    """Raise an error unless a dense run with this window state can continue with these options."""
    if type(window_kind(options)) is not type(window.kind):
        raise ValueError(f"this state has the window {window.kind}; it cannot continue with window={options.window}")
    slots = slot_dtype(options.slots)
    if slots is not None and isinstance(window, MovingState) and window.capacity:
        stored = _xla.value_dtype(jax.tree.leaves(window.buffer)[0].dtype)
        if stored != slots:
            raise OptionError("slots", f"must be {stored}, as in the run that is continued")


def check_not_donated(arrays: PyTree) -> None:
    """Raise an error if a step of another run has overwritten these arrays of a state."""
    if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(arrays)):
        raise ValueError(
            "a later run continued from this state and overwrote it; take the state and parameters of that run"
        )


def check_rule(rule: adaptive.DelayedRule | None, window: WindowSpec) -> None:
    """Raise an error unless a state with this adaptive rule, or without one, can continue with this window."""
    previous = None if rule is None else adaptive.spec_of(rule.state)
    if previous != (window if isinstance(window, Adaptive) else None):
        was = "with given window lengths" if previous is None else f"with window={previous}"
        raise ValueError(f"this state is of a run {was}; it cannot continue with window={window}")


def slot_dtype(slots: str | None) -> np.dtype | None:
    """Return the dtype of a window slot; raise an error for one that cannot store statistics."""
    if slots is None:
        return None
    try:
        dtype = jnp.dtype(slots)
    except TypeError:
        dtype = None
    if dtype is None or dtype.name not in _SLOT_DTYPES:
        raise OptionError("slots", f"must be one of {', '.join(_SLOT_DTYPES)}; got {slots}")
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise OptionError("slots", f"must be at most float32 here: {slots} needs jax.enable_x64(True)")
    return dtype


def _is_number(value):
    return isinstance(value, int | float | np.number) or (isinstance(value, np.ndarray | jax.Array) and not value.ndim)


def not_finite_error(step: int) -> NotFiniteError:
    """Return the error about statistics that are not finite."""
    return NotFiniteError(
        f"step {step}: the statistics are not finite. The parameters before this step are kept in .params. Look for "
        "parameters or counts of extreme size, or use a smaller step size"
    )


def negative_error(step: int, model: Model) -> NotFiniteError:
    """Return the error about statistics of rows that are negative."""
    return NotFiniteError(
        f"step {step}: {type(model).__name__} returned negative statistics of rows, and the row-sparse engine needs "
        "statistics of at least 0. The parameters before this step are kept in .params. Keep such statistics in dense "
        "leaves, or leave row_kernel out, so that the model runs on the dense engine"
    )


def _num_threads(work):
    """Return one thread per core, fewer if a minibatch of ``work`` entries × columns has little for each."""
    return max(1, round(min(num_threads(), work / _MIN_WORK)))
