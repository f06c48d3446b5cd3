"""The state of row-sparse smoothed SVI, a minibatch partitioned among threads, and scratch memory.

Word w is row w // S of partition w % S. Each of the S threads owns one partition. The letters are those of
:mod:`smoothgrad_jax.core.row_sparse`.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from smoothgrad_jax.core import adaptive
from smoothgrad_jax.core.adaptive import Adaptive
from smoothgrad_jax.core.row_sparse import slots
from smoothgrad_jax.core.row_sparse.decay import CLOCK_SIZE, num_columns
from smoothgrad_jax.core.row_sparse.kernel import RowBatch, RowKernel
from smoothgrad_jax.core.types import Array, ArrayLike, DTypeLike, PyTree

_LARGEST = 1e30  # of the numbers of a state that become float32
END = 1 << 28  # marks the end of a list of words; shifted by three bits it is still below 2³¹


class PartitionedBatch(NamedTuple):
    """A minibatch partitioned among S threads; made by :func:`partition_batch`.

    Attributes:
      words: [S, U], for each partition the row numbers of the minibatch's words, increasing; then at least one END.
      batch: The documents, with words as positions in [S · U]; None for a minibatch without documents.
      bounds: [S + 1]; thread s fits the documents bounds[s] … bounds[s + 1] − 1.
      buckets: [S · U] hash bucket of each word, for an adaptive window; else None.
    """

    words: np.ndarray
    batch: PyTree
    bounds: np.ndarray
    buckets: np.ndarray | None = None


class WindowSlot(NamedTuple):
    """The statistics of one minibatch inside the window.

    Attributes:
      words: [S, U] as in :class:`PartitionedBatch`.
      values: For each partition the stored rows, see :mod:`smoothgrad_jax.core.row_sparse.slots`.
      total: [C], the sum over words.
    """

    words: np.ndarray
    values: tuple[slots.Slot, ...]
    total: Array


class EnteringStatistics(NamedTuple):
    """The statistics of the last step, which enter the window sums with the next one.

    Attributes:
      words: [S, U] as in :class:`PartitionedBatch`.
      sums: For each thread [S · U, W], the unscaled statistics of its documents.
      scale: D/B.
      totals: For each thread [C], the sum over words.
    """

    words: np.ndarray
    sums: tuple[Array, ...]
    scale: np.ndarray
    totals: tuple[Array, ...]


class RowSparseState(NamedTuple):
    """What the next step needs. A step donates the arrays of its input state.

    Attributes:
      partitions: For each thread λ, Σ, δ and clocks [V/S, 3C + 4].
      totals: For each thread a copy of the column sums [1, 3C + 4].
      previous_clock: (A, C) of the last step, float64 [2].
      clock: (A, C) of the next step, float64 [2].
      step: Number of steps taken.
      num_values: Number of values in the window, those of ``entering`` included.
      slots: The values in the window that will leave, oldest first, without ``entering``; None if L = ∞.
      leaving: Slots that left the window at the last step and are still in the row sums.
      entering: The statistics of the last step, not yet in the row sums.
      rule: Adaptive rule for the window length, if the window is adaptive.
      rest: SVI state of the dense leaves; None if the model has none.
    """

    partitions: tuple[Array, ...]
    totals: tuple[Array, ...]
    previous_clock: np.ndarray
    clock: np.ndarray
    step: np.ndarray
    num_values: np.ndarray
    slots: tuple[WindowSlot, ...] | None
    leaving: tuple[WindowSlot, ...]
    entering: EnteringStatistics | None
    rule: adaptive.DelayedRule | None = None
    rest: PyTree = None

    @property
    def num_words(self) -> int:
        """V."""
        return sum(len(partition) for partition in self.partitions)

    @property
    def num_columns(self) -> int:
        """C."""
        return num_columns(self.partitions[0])

    @property
    def dtype(self) -> np.dtype:
        """Dtype of λ."""
        return self.partitions[0].dtype

    @property
    def slot_dtype(self) -> np.dtype | None:
        """Dtype in which the window stores values; None while the window holds none."""
        stored = (*self.leaving, *(self.slots or ()))
        return stored[0].values[0][0].dtype if stored else None

    def check(self) -> None:
        """Check a state that was read from a file: compiled loops follow its numbers without any check.

        Raises:
          ValueError: A part is not as described above; the message names it.
        """
        num_partitions, columns = len(self.partitions), self.num_columns
        for s, partition in enumerate(self.partitions):
            rows = len(range(s, self.num_words, num_partitions))
            _expect_shape(f"partitions[{s}]", partition, (rows, 3 * columns + CLOCK_SIZE))
            _expect_shape(f"totals[{s}]", self.totals[s], (1, 3 * columns + CLOCK_SIZE))
        for name in ("clock", "previous_clock"):
            decay, gain = getattr(self, name).tolist()
            _expect(-_LARGEST < decay <= 0 <= gain < _LARGEST, name, getattr(self, name))
        _expect(self.step.shape == () and self.step >= 0, "step", self.step)
        _expect(self.num_values.shape == () and self.num_values >= 0, "num_values", self.num_values)
        if self.slots is not None:
            held = len(self.slots) + (self.entering is not None)
            _expect(self.num_values == held, "num_values", f"{self.num_values} with {held} values")
        for name in ("slots", "leaving"):
            for i, slot in enumerate(getattr(self, name) or ()):
                self._check_slot(f"{name}[{i}]", slot)
        if self.entering is not None:
            words, sums, scale, totals = self.entering
            self._check_words("entering.words", words)
            _expect(scale.shape == () and 0 < scale < _LARGEST, "entering.scale", scale)
            for s in range(num_partitions):
                _expect(len(sums[s]) == words.size and sums[s].ndim == 2, f"entering.sums[{s}]", sums[s].shape)
                _expect_shape(f"entering.totals[{s}]", totals[s], (columns,))

    def _check_slot(self, name: str, slot: WindowSlot) -> None:
        self._check_words(f"{name}.words", slot.words)
        _expect(len(slot.values) == len(self.partitions), f"{name}.values", len(slot.values))
        for s, stored in enumerate(slot.values):
            num_rows, dtype = slot.words.shape[1], self.slot_dtype
            shapes = [(num_rows, self.num_columns), (num_rows,)][: 2 if dtype == np.uint8 else 1]
            for array, shape in zip(stored, shapes, strict=True):
                _expect_shape(f"{name}.values[{s}]", array, shape)
            _expect(stored[0].dtype == dtype, f"{name}.values[{s}]", stored[0].dtype)
        _expect_shape(f"{name}.total", slot.total, (self.num_columns,))

    def _check_words(self, name: str, words: np.ndarray) -> None:
        """Check lists of words [S, U]: increasing row numbers of the partition, then at least one END."""
        _expect(words.ndim == 2 and len(words) == len(self.partitions) and words.dtype == np.int32, name, words.shape)
        for s, rows in enumerate(words):
            num_used = int(np.count_nonzero(rows != END))
            used, last = rows[:num_used], len(self.partitions[s]) - 1
            in_range = not num_used or 0 <= used[0] <= used[-1] <= last
            is_valid = num_used < len(rows) and (used != END).all() and (np.diff(used) > 0).all() and in_range
            _expect(bool(is_valid), f"{name}[{s}]", f"{rows.min()} … {rows.max()} for {last + 1} rows, or no order")


def _expect(condition: ArrayLike, name: str, got: object) -> None:
    if not np.all(condition):
        raise ValueError(f"the state is not valid: {name} is {got}")


def _expect_shape(name: str, array: Array, shape: tuple[int, ...]) -> None:
    _expect(array.shape == shape, name, f"of shape {array.shape}, expected {shape}")


class RowPrior(NamedTuple):
    """The prior of the matrix, partitioned like the state; made by :func:`partition_prior`.

    Attributes:
      eta: For each partition η [V/S or 1, C or 1].
      total: Σ_w η_w [1, C or 1].
    """

    eta: tuple[Array, ...]
    total: Array


class Workspace:
    """Scratch memory of a run: arrays that a step overwrites and whose content has no meaning between steps.

    Attributes:
      slots: For each partition, memory for a window slot; empty before the first step.
      features: For each partition, memory for features.
      prefetched: Results of reads ahead. A result keeps XLA from removing the reads.
    """

    def __init__(self) -> None:
        self.slots: tuple[slots.Slot, ...] = ()
        self.features: tuple[Array, ...] = ()
        self.prefetched: tuple[Array, ...] = ()

    def reserve(self, num_entering: int, num_used: int, state: RowSparseState, width: int, dtype: DTypeLike) -> None:
        """Allocate memory for this many rows that enter and are used per partition, unless it is there."""
        if self.slots and len(self.slots[0][0]) == num_entering and self.features[0].shape == (num_used, width):
            return
        num_partitions = len(state.partitions)
        self.slots = tuple(slots.empty(num_entering, state.num_columns, dtype) for _ in range(num_partitions))
        self.features = tuple(slots.zeros((num_used, width), state.dtype) for _ in range(num_partitions))


def init_rows(
    matrix: ArrayLike,
    num_partitions: int = 1,
    *,
    infinite: bool = False,
    window: Adaptive | None = None,
    rest: PyTree = None,
) -> RowSparseState:
    """Return the state before the first step; allocates three arrays of the size of λ.

    Args:
      matrix: λ [V, C], which is copied.
      num_partitions: S, one per thread.
      infinite: Whether L = ∞ at every step; the state then stores no slots.
      window: An adaptive window, if the run has one.
      rest: SVI state of the dense leaves.
    """
    lam = np.asarray(matrix)
    total = lam.sum(0, dtype=np.float64, keepdims=True).astype(lam.dtype)
    rule = None
    if window is not None:
        size = adaptive.num_buckets(len(lam)) * lam.shape[1]
        rule = adaptive.init_delayed(window, jax.ShapeDtypeStruct((size,), lam.dtype))
    partitions = tuple(append_columns(lam[s::num_partitions]) for s in range(num_partitions))
    totals = tuple(append_columns(total) for _ in range(num_partitions))
    return first_state(partitions, totals, infinite=infinite, rule=rule, rest=rest)


def first_state(
    partitions: tuple[Array, ...],
    totals: tuple[Array, ...],
    *,
    infinite: bool,
    rule: adaptive.DelayedRule | None = None,
    rest: PyTree = None,
) -> RowSparseState:
    """Return the state before the first step, from its arrays; see :class:`RowSparseState` and :func:`init_rows`."""
    return RowSparseState(
        partitions=partitions,
        totals=totals,
        previous_clock=np.zeros(2),
        clock=np.zeros(2),
        step=np.zeros((), np.int64),
        num_values=np.zeros((), np.int64),
        slots=None if infinite else (),
        leaving=(),
        entering=None,
        rule=rule,
        rest=rest,
    )


@jax.jit
def append_columns(lam: Array) -> Array:
    """Append an empty window sum and a clock of zeros to λ, or to its column sums."""
    return jnp.pad(lam, [(0, 0), (0, 2 * lam.shape[1] + CLOCK_SIZE)])


def repartition(state: RowSparseState, num_partitions: int, chosen: Sequence[int] | None = None) -> RowSparseState:
    """Return the state for another number of partitions, in O(V + L · rows per minibatch).

    Args:
      state: The state.
      num_partitions: Partitions into which the words are divided.
      chosen: Partitions of the result; by default all.
    """
    chosen = range(num_partitions) if chosen is None else chosen
    stored = [*state.leaving, *(state.slots or ())]
    lists = [slot.words for slot in stored] + ([state.entering.words] if state.entering else [])
    new = [_repartition_words(words, num_partitions) for words in lists]
    # One shape for all lists, so that one program serves them.
    capacity = max((words.shape[1] for words, _ in new), default=0)
    moves = [(_pad_words(words, capacity)[chosen], [source[s] for s in chosen]) for words, source in new]
    moved = [_repartition_slot(slot, *move) for slot, move in zip(stored, moves[: len(stored)], strict=True)]
    num_leaving = len(state.leaving)
    return state._replace(
        partitions=tuple(jnp.array(_rows_of_words(state, s, num_partitions)) for s in chosen),
        totals=tuple(jnp.array(state.totals[0]) for _ in chosen),
        leaving=tuple(moved[:num_leaving]),
        slots=None if state.slots is None else tuple(moved[num_leaving:]),
        entering=None if state.entering is None else _repartition_entering(state.entering, *moves[-1]),
    )


def join_partitions(parts: Sequence[RowSparseState], num_words: int) -> RowSparseState:
    """Return the state whose partitions are those of states with one partition each; copies nothing large.

    Args:
      parts: The partitions, in order; each may end with rows of padding.
      num_words: V.
    """
    first, num_partitions = parts[0], len(parts)

    def join(same: Sequence[WindowSlot]) -> WindowSlot:
        words = np.concatenate([np.asarray(slot.words) for slot in same])
        return WindowSlot(words, tuple(slot.values[0] for slot in same), same[0].total)

    entering = first.entering
    if entering is not None:
        present = [part.entering for part in parts if part.entering is not None]
        entering = EnteringStatistics(
            np.concatenate([np.asarray(each.words) for each in present]),
            (np.concatenate([np.asarray(each.sums[0]) for each in present]),),
            entering.scale,
            entering.totals,
        )
    return first._replace(
        partitions=tuple(
            part.partitions[0][: len(range(s, num_words, num_partitions))] for s, part in enumerate(parts)
        ),
        totals=first.totals * num_partitions,
        leaving=tuple(map(join, zip(*(part.leaving for part in parts), strict=True))),
        slots=None
        if first.slots is None
        else tuple(map(join, zip(*(part.slots or () for part in parts), strict=True))),
        entering=entering,
    )


def _rows_of_words(state, s, num_partitions):
    """Return the rows of the words s, s + S, s + 2S, … for another number S of partitions."""
    words, before = np.arange(s, state.num_words, num_partitions), len(state.partitions)
    rows = np.empty((len(words), state.partitions[0].shape[1]), state.dtype)
    for owner, partition in enumerate(state.partitions):
        here = words % before == owner
        rows[here] = np.asarray(partition)[words[here] // before]
    return rows


def _repartition_words(words, num_partitions):
    """Return lists of words for another number of partitions, and for each entry its position in the old lists."""
    number, position = np.nonzero(words < END)
    ids = words[number, position].astype(np.int64) * len(words) + number
    members = [np.flatnonzero(ids % num_partitions == s) for s in range(num_partitions)]
    members = [each[np.argsort(ids[each])] for each in members]
    capacity = -(-max(len(each) + 1 for each in members) // 64) * 64
    new = np.full((num_partitions, capacity), END, np.int32)
    for s, each in enumerate(members):
        new[s, : len(each)] = ids[each] // num_partitions
    return new, [(number[each], position[each]) for each in members]


def _pad_words(words, capacity):
    return np.pad(words, [(0, 0), (0, capacity - words.shape[1])], constant_values=END)


def _repartition_slot(slot, words, source):
    def move(which):
        old = [np.asarray(values[which]) for values in slot.values]
        parts = []
        for number, position in source:
            part = np.zeros((words.shape[1], *old[0].shape[1:]), old[0].dtype)
            for s, values in enumerate(old):
                here = np.flatnonzero(number == s)
                part[here] = values[position[here]]
            parts.append(jnp.array(part))
        return parts

    columns = [move(which) for which in range(len(slot.values[0]))]
    return WindowSlot(words, tuple(zip(*columns, strict=True)), slot.total)


def _repartition_entering(entering, words, source):
    # The first thread gets the sum over all threads.
    capacity = entering.words.shape[1]
    total = np.sum([np.asarray(each) for each in entering.sums], axis=0)
    sums = np.zeros((words.size, total.shape[1]), total.dtype)
    for s, (number, position) in enumerate(source):
        sums[s * words.shape[1] + np.arange(len(number))] = total[number * capacity + position]
    others = range(1, len(words))
    column_sums = np.sum([np.asarray(each) for each in entering.totals], axis=0)
    return EnteringStatistics(
        words,
        (jnp.array(sums), *(slots.zeros(sums.shape, sums.dtype) for _ in others)),
        entering.scale,
        (jnp.array(column_sums), *(slots.zeros(column_sums.shape, column_sums.dtype) for _ in others)),
    )


def partition_prior(prior: ArrayLike, state: RowSparseState) -> RowPrior:
    """Partition η, which broadcasts to [V, C], like the rows of the state."""
    num_partitions = len(state.partitions)
    eta, total = prior_rows(prior, state.num_words, state.dtype)
    parts = [eta[s::num_partitions] if len(eta) > 1 else eta for s in range(num_partitions)]
    # On the device, because every step would transfer arrays of NumPy again.
    return RowPrior(eta=tuple(map(jnp.array, parts)), total=jnp.array(total))


def prior_rows(prior: ArrayLike, num_words: int, dtype: DTypeLike) -> tuple[np.ndarray, np.ndarray]:
    """Return η, which broadcasts to [V, C], with two axes, and Σ_w η_w [1, C or 1]."""
    eta = np.asarray(prior, dtype)
    eta = eta.reshape((1,) * (2 - eta.ndim) + eta.shape)
    total = eta.sum(0, dtype=np.float64, keepdims=True) * (num_words / len(eta))
    return eta, total.astype(dtype)


def partition_batch(
    batch: RowBatch, num_partitions: int, buckets: np.ndarray | None = None, padding: int = 1
) -> PartitionedBatch:
    """Partition a minibatch: words by their rows, documents so that every thread gets about as many entries.

    Args:
      batch: The minibatch.
      num_partitions: S.
      buckets: Hash bucket of every word [V], from :func:`smoothgrad_jax.adaptive.bucket_of`, for an adaptive window.
      padding: How many times each list of words ends with END, at least.
    """
    used = batch.vocabulary[: batch.num_used]
    members = [np.flatnonzero(used % num_partitions == s) for s in range(num_partitions)]
    # The number of words per partition varies around the mean, by a few standard deviations at most.
    planned = len(batch.vocabulary) / num_partitions
    planned += 3 * math.sqrt(len(batch.vocabulary)) / 2 if num_partitions > 1 else 0
    capacity = -int(-max(planned, *(len(each) + padding for each in members)) // 64) * 64
    words = np.full((num_partitions, capacity), END, np.int32)
    position = np.zeros(len(used) + 1, np.int32)  # one more, for the padding of a batch without words
    for s, each in enumerate(members):
        words[s, : len(each)] = used[each] // num_partitions
        position[each] = s * capacity + np.arange(len(each), dtype=np.int32)
    # A single partition has the words in the order of the batch.
    positions = position.take(batch.words) if num_partitions > 1 else batch.words
    bucket_of = None
    if buckets is not None:
        bucket_of = np.zeros(num_partitions * capacity, np.int32)  # padding adds zeros to bucket 0
        bucket_of[position[: len(used)]] = buckets[used]
    # Documents stay in order and are cut at the s-th fraction of the entries.
    cuts = np.searchsorted(batch.offsets, batch.offsets[-1] * np.arange(1, num_partitions) / num_partitions)
    empty = np.zeros(0, np.int32)
    return PartitionedBatch(
        words,
        batch._replace(vocabulary=empty, num_used=empty, words=positions),
        np.array([0, *cuts, batch.size], np.int32),
        bucket_of,
    )


def no_statistics(words: np.ndarray, kernel: RowKernel, state: RowSparseState) -> EnteringStatistics:
    """Return empty statistics for lists of words of this shape [S, U]."""
    num_partitions, capacity = words.shape
    sums = slots.zeros((num_partitions * capacity, kernel.width()), state.dtype)
    total = slots.zeros((state.num_columns,), state.dtype)
    return EnteringStatistics(
        np.full_like(words, END), (sums,) * num_partitions, np.zeros(()), (total,) * num_partitions
    )
