"""One step of row-sparse smoothed SVI.

A step runs two programs per thread. The first updates the rows of a partition
(:func:`smoothgrad_jax.core.row_sparse.program.update_rows`). The second fits a range of documents
(:meth:`smoothgrad_jax.core.row_sparse.kernel.RowKernel.fit`). The statistics of a step enter the rows with the first
program of the next step, so that a row is read once per step.

Threads are Python threads: XLA's own threads exchange tasks of about a microsecond, which makes a step slower on two
cores than on one.
"""

import functools
import math
import operator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from smoothgrad_jax.core import adaptive, svi
from smoothgrad_jax.core._threads import submit
from smoothgrad_jax.core._xla import SINGLE_THREAD_OPTIONS
from smoothgrad_jax.core.compensated import add
from smoothgrad_jax.core.errors import OptionError
from smoothgrad_jax.core.row_sparse import slots
from smoothgrad_jax.core.row_sparse.decay import (
    advance,
    advance_rows,
    combine,
    factors,
    num_columns,
    split_clock,
    split_row,
)
from smoothgrad_jax.core.row_sparse.kernel import KernelResult, RowKernel
from smoothgrad_jax.core.row_sparse.program import (
    Entering,
    Leaving,
    RowUpdate,
    clocks_of,
    remove_slot,
    update_rows,
)
from smoothgrad_jax.core.row_sparse.state import (
    END,
    EnteringStatistics,
    PartitionedBatch,
    RowPrior,
    RowSparseState,
    WindowSlot,
    Workspace,
    init_rows,
    no_statistics,
)
from smoothgrad_jax.core.types import Array, ArrayLike, DTypeLike, PRNGKey, PyTree, Warmup
from smoothgrad_jax.core.window import check_lengths

_CHUNK = 4096  # rows that are advanced at a time when λ is read
_advance_all = jax.jit(advance_rows, donate_argnums=0)


class RowInfo(NamedTuple):
    """What a step found. Reading it waits for the step.

    Attributes:
      step: Number of steps taken before this one.
      clock: (A, C) before this step.
      length: L.
      scale: D/B.
      totals: For each thread the sum of its row statistics [C]; NaN if its statistics of dense leaves were not finite.
      details: For each thread the info of the kernel.
      rest: SVI state of the dense leaves before this step.
    """

    step: np.ndarray
    clock: np.ndarray
    length: float
    scale: float
    totals: tuple[Array, ...]
    details: tuple[PyTree, ...]
    rest: PyTree

    @property
    def is_finite(self) -> bool:
        """Whether the statistics were finite. If not, neither they nor any later statistics are in the rows."""
        with np.errstate(over="ignore", invalid="ignore"):
            total = np.sum([np.asarray(total) for total in self.totals], axis=0)
            return bool(np.isfinite(total.dtype.type(self.scale) * total).all())

    @property
    def is_negative(self) -> bool:
        """Whether the kernel found negative row statistics, by a sum of −∞; ``is_finite`` is then false."""
        return any(np.isneginf(np.asarray(total)).any() for total in self.totals)


class StepOptions(NamedTuple):
    """Options that stay the same from step to step.

    Attributes:
      warmup: As in :func:`smoothgrad_jax.window.push`.
      slot_dtype: Dtype in which the window stores values.
      rest_prior: Prior of the dense leaves.
    """

    warmup: Warmup = "mean"
    slot_dtype: DTypeLike = np.dtype(np.float32)
    rest_prior: PyTree = None


def step(
    state: RowSparseState,
    batch: PartitionedBatch,
    kernel: RowKernel,
    prior: RowPrior,
    rho: float,
    length: float | None,
    workspace: Workspace,
    pool: ThreadPoolExecutor | None = None,
    *,
    options: StepOptions,
    key: PRNGKey | None = None,
) -> tuple[RowSparseState, RowInfo]:
    """Fit a minibatch, average its statistics with those in the window, and move λ.

    Allocates one slot while the window fills. After that a step reuses the memory of the slot that leaves.

    Args:
      state: From :func:`smoothgrad_jax.core.row_sparse.state.init_rows` or the last step; its arrays are donated.
      batch: A minibatch with as many partitions as the state.
      kernel: Of the model.
      prior: Partitioned like the state.
      rho: ρ in [0, 1].
      length: L ≥ 1. If it is shorter than at the last step, the oldest values leave; if it is longer, the window grows
        with the values to come. Ignored by a state for L = ∞ or with an adaptive rule.
      workspace: Scratch memory of the run.
      pool: Where the threads other than the caller's run, and a compilation at the first step.
      options: See :class:`StepOptions`.
      key: A random key of this step, for a kernel that samples.

    Returns:
      The next state and :class:`RowInfo`. Both may still be in progress, so that the caller can prepare the next step.
    """
    rule, length, sketching = _choose_length(state, batch, kernel, rho, length)
    scratch = _sums_scratch(state, batch, kernel)

    def fit(s: int, updates: list[RowUpdate]) -> tuple[KernelResult, Array | None]:
        features = tuple(update.features for update in updates)
        bounds = batch.bounds[s], batch.bounds[s + 1]
        rest = None if state.rest is None else state.rest.params
        return _fit(kernel, features, updates[s].total, rest, batch.batch, bounds, scratch[s], key, sketching)

    if not workspace.slots and pool is not None:
        # At the first step of a run, compile the second program while the first one compiles and runs.
        submit(pool, _compile_fit, kernel, batch, state, key, sketching)
    state, fitted = _update_partitions(state, batch, kernel, prior, workspace, options.slot_dtype, pool, fit)
    results, sketches = zip(*fitted, strict=True)
    scale = kernel.scale(batch.batch.size)
    totals = tuple(result.total for result in results)
    info = RowInfo(
        state.step, state.clock, float(length), scale, totals, tuple(result.info for result in results), state.rest
    )
    sums = tuple(result.sums for result in results)
    entering = EnteringStatistics(batch.words, sums, np.asarray(scale, np.float64), totals)
    return end_step(state, entering, rho, length, options.warmup)._replace(
        rule=None if rule is None else adaptive.delay(rule, sketches, scale),
        rest=_step_rest(state.rest, results, options, rho, length),
    ), info


def end_step(
    state: RowSparseState, entering: EnteringStatistics, rho: float, length: float, warmup: Warmup
) -> RowSparseState:
    """Return the state after a step: with other clocks, and with the statistics about to enter the window.

    Args:
      state: The state, with no statistics that are about to enter or leave.
      entering: The statistics of the step.
      rho: ρ.
      length: L.
      warmup: As in :func:`smoothgrad_jax.window.push`.
    """
    held = state.slots
    num_leaving = 0 if held is None else max(0, math.ceil(int(state.num_values) + 1 - length))
    num_values = int(state.num_values) + 1 - num_leaving
    divisor = length if warmup == "zeros" and held is not None else num_values
    # A ← A + log(1 − ρ),   C ← (1 − ρ) C + ρ/n;   exp(−1e5) is 0, and unlike −∞ it can be added to
    decay, gain = state.clock.tolist()
    clock = np.array([decay + (math.log1p(-rho) if rho < 1 else -1e5), (1 - rho) * gain + rho / divisor])
    return state._replace(
        previous_clock=state.clock,
        clock=clock,
        step=np.asarray(state.step + 1),
        num_values=np.asarray(num_values),
        slots=None if held is None else held[num_leaving:],
        leaving=() if held is None else held[:num_leaving],
        entering=entering,
    )


def restart(state: RowSparseState, info: RowInfo, prior: RowPrior, slot_dtype: DTypeLike) -> RowSparseState:
    """Return the state before a step whose statistics were not finite, with an empty window."""
    # The rows are those before that step: neither it nor a later step has changed any.
    lam = read_rows(state._replace(clock=info.clock, entering=None, leaving=()), prior, slot_dtype)
    rest = None if info.rest is None else svi.init(info.rest.params, info.rest.window.kind)
    fresh = init_rows(lam, len(state.partitions), infinite=state.slots is None, rest=rest)
    return fresh._replace(step=info.step, rule=None if state.rule is None else adaptive.restart(state.rule))


def read_rows(state: RowSparseState, prior: RowPrior, slot_dtype: DTypeLike) -> np.ndarray:
    """Return λ [V, C] after the last step. The state does not change.

    Works in NumPy on some rows at a time: allocates the result and the rows whose sums are about to change, and
    compiles nothing (except once for slots of uint8).
    """
    num_partitions = len(state.partitions)
    out = np.empty((state.num_words, state.num_columns), state.dtype)
    clock, previous_clock = (split_clock(each, out.dtype) for each in (state.clock, state.previous_clock))
    for s, partition in enumerate(map(np.asarray, state.partitions)):
        lam, eta = out[s::num_partitions], np.broadcast_to(prior.eta[s], (len(partition), out.shape[1]))
        for start in range(0, len(partition), _CHUNK):
            part = slice(start, start + _CHUNK)
            lam[part] = advance(partition[part], clock, eta[part])
        if state.entering is not None:
            words, total = _changed_sums(state, partition, s, slot_dtype)
            previous = advance(partition[words], previous_clock, eta[words])
            lam[words] = combine(factors(previous_clock[None], clock), previous, eta[words], total)
    return out


def flush(
    state: RowSparseState,
    kernel: RowKernel,
    prior: RowPrior,
    workspace: Workspace,
    slot_dtype: DTypeLike,
    pool: ThreadPoolExecutor | None = None,
) -> RowSparseState:
    """Apply the statistics that are about to enter or leave, and advance every row to the clock, in O(V).

    Afterwards another prior may hold. The arrays of the state are donated.
    """
    if state.entering is not None:  # otherwise nothing leaves either
        words = np.full_like(state.entering.words, END)  # a shape for which the program is compiled
        nothing = PartitionedBatch(words, None, np.zeros(0, np.int32))
        state, _ = _update_partitions(state, nothing, kernel, prior, workspace, slot_dtype, pool)
    clock = split_clock(state.clock, state.dtype)
    return state._replace(
        partitions=tuple(_advance_all(rows, clock, eta) for rows, eta in zip(state.partitions, prior.eta, strict=True)),
        totals=tuple(_advance_all(total, clock, prior.total) for total in state.totals),
    )


def _choose_length(state, batch, kernel, rho, length):
    """Return the adaptive rule with the last sketch, the window length, and empty buckets for the next sketch."""
    if state.rule is None:
        return None, length, None
    # Before any program is started: the length of the next step must not wait for this step.
    length, rule = adaptive.next_length(state.rule, rho)
    num_buckets = rule.previous.shape[1] // state.num_columns
    empty = np.zeros((2 * num_buckets, kernel.width()), state.dtype)
    return rule, length, (empty, batch.buckets)


def _sums_scratch(state, batch, kernel):
    """Return an array [S · U, W] per thread for the statistics: the arrays of the last step if their shape fits."""
    num_partitions, capacity = batch.words.shape
    shape = (num_partitions * capacity, kernel.width())
    # A kernel with other hyperparameters may have another width.
    if state.entering is not None and state.entering.sums[0].shape == shape:
        return state.entering.sums
    return tuple(slots.zeros(shape, state.dtype) for _ in range(num_partitions))


def check_row_lengths(lengths: ArrayLike, is_infinite: bool, rest: PyTree) -> None:
    """Raise an error unless all lengths are whole numbers, or all are ∞.

    Args:
      lengths: L, or many of them.
      is_infinite: Whether the state is one for L = ∞.
      rest: SVI state of the dense leaves, or None.
    """
    lengths = np.ravel(np.asarray(lengths, float))
    check_lengths(lengths)
    if rest is not None:
        rest.window.kind.check_lengths(lengths)
    if (lengths == math.inf).any() != is_infinite:
        raise OptionError("window", "must be ∞ at every step or at none for row-sparse statistics")
    fractions = lengths[lengths != np.floor(lengths)]
    if fractions.size:
        raise OptionError("window", f"must be a whole number of minibatches, got {fractions[0]}")


def _step_rest(rest, results, options, rho, length):
    """Move the dense leaves."""
    if rest is None:
        return None
    stats = jax.tree.map(lambda *parts: functools.reduce(operator.add, parts), *(result.rest for result in results))
    return svi.global_step(rest, stats, options.rest_prior, rho, length, warmup=options.warmup)


def _update_partitions(state, batch, kernel, prior, workspace, slot_dtype, pool, then=None):
    """Update the rows that change and compute the features of the minibatch, one thread per partition.

    ``then(s, updates)`` is called in thread s as soon as the updates of all partitions are in progress; its results are
    returned with the state, and may be in progress themselves.
    """
    num_partitions, clocks = len(state.partitions), clocks_of(state)
    entering = state.entering or no_statistics(batch.words, kernel, state)
    capacity = entering.words.shape[1]
    earlier, last = _last_leaving(state, entering.words, slot_dtype)
    workspace.reserve(capacity, batch.words.shape[1], state, kernel.width(), slot_dtype)
    left = sum((slot.total for slot in earlier), last.total)
    scale = entering.scale.astype(state.dtype)
    updates: list[Future[RowUpdate]] = [Future() for _ in range(num_partitions)]

    def work(s):
        try:
            rows, eta = state.partitions[s], prior.eta[s]
            for slot in earlier:
                rows = remove_slot(rows, state.totals[s], slot.values[s], slot.words[s], clocks.previous, eta)
            updates[s].set_result(
                update_rows(
                    kernel,
                    rows,
                    workspace.slots[s],
                    workspace.features[s],
                    state.totals[s],
                    Leaving(last.words[s], last.values[s], left),
                    Entering(entering.words[s], entering.sums, np.int32(s * capacity), scale, entering.totals),
                    batch.words[s],
                    clocks,
                    (eta, prior.total),
                )
            )
        except BaseException as error:
            updates[s].set_exception(error)  # the other threads wait for it
            raise
        all_updates = [update.result() for update in updates]
        return then(s, all_updates) if then else None

    others = [submit(pool, work, s) for s in range(1, num_partitions)]
    results = [work(0), *(other.result() for other in others)]
    done = RowUpdate(*zip(*(update.result() for update in updates), strict=True))
    values, window = done.slot, state.slots
    if state.entering and window is not None:
        window = (*window, WindowSlot(entering.words, values, done.entered[0]))
        values = last.values
    workspace.slots, workspace.features, workspace.prefetched = values, done.features, done.prefetched
    state = state._replace(partitions=done.partition, totals=done.total, slots=window, leaving=(), entering=None)
    return state, results


def _last_leaving(state, words, slot_dtype):
    """Return the slots to remove beforehand, and the one that leaves in the same loop in which statistics enter.

    The memory of that one is reused for the entering statistics, so its shape must be theirs.
    """
    if state.leaving and state.leaving[-1].words.shape == words.shape:
        return state.leaving[:-1], state.leaving[-1]
    capacity, columns = words.shape[1], state.num_columns
    empty = tuple(slots.empty(capacity, columns, slot_dtype) for _ in state.partitions)
    return state.leaving, WindowSlot(np.full_like(words, END), empty, slots.zeros((columns,), state.dtype))


def _changed_sums(state, partition, s, slot_dtype):
    """Return the words of a partition whose sums are about to change, and these sums after the change."""
    lists = [slot.words[s][slot.words[s] < END] for slot in (*state.leaving, state.entering)]
    words = np.unique(np.concatenate(lists))
    _, total, residue, _ = (part.copy() for part in split_row(partition[words]))
    stored = [slots.decode(tuple(np.asarray(part) for part in slot.values[s]), total.dtype) for slot in state.leaving]
    for which, values in zip(lists, (*(-each for each in stored), _entering_values(state, s, slot_dtype)), strict=True):
        at = np.searchsorted(words, which)
        total[at], residue[at] = add(total[at], residue[at], values[: len(which)])
    return words, total


def _entering_values(state, s, slot_dtype):
    """Return the values that enter the sums of a partition, as a slot gives them back."""
    entering, capacity = state.entering, state.entering.words.shape[1]
    rows = slice(s * capacity, (s + 1) * capacity)
    sums = functools.reduce(np.add, [np.asarray(each)[rows, : state.num_columns] for each in entering.sums])
    return slots.round_trip(entering.scale.astype(sums.dtype) * sums, slot_dtype)


@functools.partial(jax.jit, donate_argnames="scratch", compiler_options=SINGLE_THREAD_OPTIONS)
def _fit(kernel, features, total, rest, batch, bounds, scratch, key, sketching):
    """Fit a range of documents, and sketch the statistics if ``sketching`` has empty buckets and buckets of words."""
    columns = num_columns(total)
    result = kernel.fit(features, total[:, :columns], rest, batch, bounds, scratch, key)
    if jax.tree.leaves(result.rest):
        # The rows of this step and of the steps in progress must not change either: update_rows reads the totals. The
        # sum over S threads is finite if S times each part is.
        finite = [jnp.isfinite(len(features) * leaf).all() for leaf in jax.tree.leaves(result.rest)]
        result = result._replace(total=jnp.where(jnp.stack(finite).all(), result.total, jnp.nan))
    sketch = None
    if sketching is not None:
        empty, bucket = sketching
        sketch = adaptive.sum_buckets(empty, result.sums, bucket)[:, :columns].ravel()
    return result, sketch


def _compile_fit(kernel, batch, state, key, sketching):
    """Compile the program for documents by calling it; drop the result, or the error, which the step raises again.

    A compilation without a call would not reach the cache that the step's call looks into, and the step would not wait
    for it. The range of documents is empty; a kernel that ignores its range, such as
    :class:`smoothgrad_jax.core.row_sparse.kernel.GatheredKernel`, computes all documents once more.
    """
    num_partitions, capacity = batch.words.shape
    width = kernel.width()
    features = (slots.zeros((capacity, width), state.dtype),) * num_partitions
    total = slots.zeros(state.totals[0].shape, state.dtype)
    rest = None if state.rest is None else state.rest.params
    scratch = slots.zeros((num_partitions * capacity, width), state.dtype)
    _fit(kernel, features, total, rest, batch.batch, (batch.bounds[0],) * 2, scratch, key, sketching)
