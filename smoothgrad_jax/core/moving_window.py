"""The moving window: the mean of the last L values.

    S̄_t = (1/n_t) Σ_{i = f_t … t} S_i        f_t = max(f_t−1, t + 1 − L),  f_0 = 0

A value that has left does not return: where L grows, the window grows with the values to come.
One push costs one addition and one subtraction, whatever L is: a ring of ``capacity + 1`` slots stores the values, and
a running sum follows them.

| letter | name           | meaning                                                                     |
|--------|----------------|-----------------------------------------------------------------------------|
| S_i    | ``value``      | the value of push i, a pytree of arrays                                     |
| L      | ``length``     | number of values in the mean; traced, 1 … capacity, or ∞                    |
| C      | ``capacity``   | the longest finite L; the ring has C + 1 slots; 0: no ring, L = ∞           |
| t      | ``num_pushed`` | number of pushes so far; value i is in slot i mod (C + 1)                   |
| f      | ``first``      | index of the oldest value in the sum                                        |
| Σ, δ   | ``total``,     | the sum in two floats; see :mod:`smoothgrad_jax.core.compensated`           |
|        | ``residue``    |                                                                             |
| n      |                | the divisor: the number of values in the sum (``warmup="mean"``) or L       |

Three choices need a reason:

- The ring has one slot more than the longest window. The new value is written first, and the value that leaves is
  read from the written ring. XLA on CPU then updates the ring in place; a read before the write makes it copy the
  whole ring at every step.
- A float32 running sum drifts, also below zero. So the sum is compensated, it is rebuilt from the slots once per
  sixteen turns of the ring, and a window without negative values never returns a negative mean. The sum is also rebuilt
  when a value that was not finite has left, and when fewer values stay than leave.
- The slot does not depend on L. Runs with different L under ``vmap`` therefore write to the same slot, which is one
  copy of the new values and not a scatter.

Reference: Mandt and Blei, *Smoothed Gradients for Stochastic Variational Inference*, NIPS 2014, Algorithm 1.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from smoothgrad_jax.core import _xla, compensated, window_kind
from smoothgrad_jax.core.errors import OptionError
from smoothgrad_jax.core.types import ArrayLike, DTypeLike, Numeric, PyTree, Warmup

_REBUILD_TURNS = 16  # turns of the ring between two rebuilds of the sum: 1/16 of a read per push, and no drift


class MovingState(NamedTuple):
    """State of a moving window: a ring of the last values, and their sum.

    Attributes:
      buffer: The ring; every leaf is ``[capacity + 1, ...]`` (``[0, ...]`` for capacity 0).
      num_pushed: t, the number of values pushed, int32.
      first: f, the index of the oldest value in the sum, int32.
      total: Σ, the sum of the values f … t − 1, rounded.
      residue: δ, the rounding errors of ``total``.
      negative: For each leaf the index of its latest value with a negative entry, −1 if there was none.
      nonfinite: The index of the latest value that was not finite, −1 if there was none.
    """

    buffer: PyTree
    num_pushed: jax.Array
    first: jax.Array
    total: PyTree
    residue: PyTree
    negative: jax.Array
    nonfinite: jax.Array

    @property
    def capacity(self) -> int:
        """The longest finite window that this state can serve, read off its shape; 0 if there is no ring."""
        buffers = jax.tree.leaves(self.buffer)
        return max(buffers[0].shape[0] - 1, 0) if buffers else 0

    @property
    def kind(self) -> "Moving":
        """The kind of this state, with the capacity and the dtype of the slots read off the ring."""
        dtypes = {_xla.value_dtype(leaf.dtype) for leaf in jax.tree.leaves(self.buffer)}
        # Slots of several dtypes have those of the values, which is the default.
        return Moving(self.capacity, dtypes.pop() if len(dtypes) == 1 else None)


@dataclass(frozen=True)
class Moving:
    """The mean of the last values; needs memory for ``capacity + 1`` slots and two sums.

    Attributes:
      capacity: The longest window that will be used. 0 or ∞: no slots, the mean of everything; stored as 0.
      dtype: Floating dtype of the slots; by default that of the values, or float32 for integers. bfloat16 needs half
        the memory: values are rounded before they are added, so that what is added is exactly what is later subtracted.
        (Before jax 0.12 the state keeps bfloat16 slots as their bits, uint16, which carry no derivative.)
    """

    capacity: float
    dtype: DTypeLike | None = None

    def __post_init__(self) -> None:
        capacity = window_kind.check_number("capacity", self.capacity)
        if capacity != math.inf and not (0 <= capacity < 2**31 - 1 and capacity == np.floor(capacity)):
            raise OptionError("capacity", f"must be a whole number from 0 to 2³¹ − 2, or ∞, got {self.capacity}")
        object.__setattr__(self, "capacity", 0 if capacity == math.inf else int(capacity))
        object.__setattr__(self, "dtype", None if self.dtype is None else jnp.dtype(self.dtype))

    @property
    def length(self) -> float:
        """L of a push that is given no length: the capacity, or ∞ without slots."""
        return self.capacity or math.inf

    def init(self, template: PyTree) -> MovingState:
        """Return an empty window for values like ``template`` (arrays or ``ShapeDtypeStruct``)."""
        slots = int(self.capacity) + 1 if self.capacity else 0

        def ring(leaf):
            leaf = window_kind.zeros_like(leaf, _xla.stored_dtype(_slot_dtype(leaf, self.dtype)))
            return jnp.broadcast_to(leaf, (slots, *leaf.shape))  # keeps a sharding that zeros(shape) would lose

        template = window_kind.as_arrays(template)
        zeros = jax.tree.map(lambda leaf: window_kind.zeros_like(leaf, window_kind.sum_dtype(leaf.dtype)), template)
        return MovingState(
            buffer=jax.tree.map(ring, template),
            num_pushed=jnp.zeros((), jnp.int32),
            first=jnp.zeros((), jnp.int32),
            total=zeros,
            residue=jax.tree.map(jnp.zeros_like, zeros),  # its own memory, so that both can be donated
            negative=jnp.full(len(jax.tree.leaves(template)), -1, jnp.int32),
            nonfinite=jnp.full((), -1, jnp.int32),
        )

    def push(
        self, state: MovingState, value: PyTree, length: Numeric | None = None, *, warmup: Warmup = "mean"
    ) -> tuple[PyTree, MovingState]:
        """Add a value; return the mean of the last ``length`` values and the new state.

        See :func:`smoothgrad_jax.core.window.push`.
        """
        window_kind.check_warmup(warmup)
        given = window_kind.as_arrays(value)
        window_kind.check_value(state.total, given)
        if not jax.tree.leaves(given):
            return value, state
        self.check_lengths(length)
        value = jax.tree.map(lambda v, s: v.astype(s.dtype), given, state.total)
        state = _push_ring(state, value, length) if state.capacity else _push_everything(state, value)
        return window_kind.cast_mean(self.mean(state, length, warmup=warmup), given), state

    def mean(self, state: MovingState, length: Numeric | None = None, *, warmup: Warmup = "mean") -> PyTree:
        """Return the mean that the last push returned, in the dtype of the sum."""
        count = state.num_pushed - state.first
        if warmup == "zeros" and state.capacity:
            length, infinite = _integer_length(length, state.capacity)
            count = jnp.where(infinite, count, length)

        # (Σ + δ) / n
        totals, structure = jax.tree.flatten(jax.tree.map(jnp.add, state.total, state.residue))
        for i, total in enumerate(totals):
            if not jnp.iscomplexobj(total):
                # A sum of non-negative values may come out slightly negative; the exact sum is never below 0.
                total = jnp.where(state.negative[i] < state.first, jnp.maximum(total, 0), total)
            totals[i] = total / count.astype(total.dtype)
        return jax.tree.unflatten(structure, totals)

    def check_lengths(self, lengths: ArrayLike | None) -> None:
        """Raise an error for a length that is known now and is neither 1 … capacity nor ∞."""
        if lengths is not None:
            window_kind.check_lengths(lengths, int(self.capacity))

    def vmap_axes(self) -> MovingState:
        """Return ``in_axes`` for the state of several runs that are pushed in step.

        All runs have the same number of pushes, which has no axis, so that the write is one copy and not a scatter.
        """
        return MovingState._make(None if name == "num_pushed" else 0 for name in MovingState._fields)


def _push_everything(state, value):
    # L = ∞ without a ring: Σ ← Σ + S_t, nothing ever leaves.
    total, residue = compensated.accumulate(state.total, state.residue, value)
    return _advance(state, value, state.buffer, state.first, total, residue)


def _push_ring(state, value, length):
    capacity = state.capacity
    slots = capacity + 1
    pushes_per_rebuild = min(_REBUILD_TURNS * slots, 2**31 - 1)  # int32, as t
    t = state.num_pushed
    length, infinite = _integer_length(length, capacity)

    # Round to the slot's dtype before adding: what is added is exactly what is later subtracted.
    value = jax.tree.map(_round_to_slot, value, state.buffer)
    buffer = jax.tree.map(lambda ring, v: _write(ring, v, t % slots), state.buffer, value)

    # f_t = max(f_t−1, t + 1 − L); for L = ∞ nothing leaves.
    stored = jnp.maximum(t - capacity, 0)
    first = jnp.where(infinite, state.first, jnp.maximum(state.first, t + 1 - length))

    # Rebuild the sum from the slots, instead of updating it: where values that must leave are not stored any more (L
    # was ∞), where fewer values stay than leave, where one that is not finite leaves, and once per sixteen turns.
    overwritten = (first > state.first) & (state.first < stored)
    fewer = t + 1 - first <= first - state.first
    recovered = (state.first <= state.nonfinite) & (state.nonfinite < first)
    rebuild = overwritten | fewer | recovered | ((first >= stored) & (t % pushes_per_rebuild == 0))
    total, residue = _update_sum(buffer, (), state.total, state.residue, _Move(t, state.first, first, rebuild))
    return _advance(state, value, buffer, first, total, residue)


class _Move(NamedTuple):
    """The range of values in the sum, before and after a push.

    Attributes:
      newest: t, the index of the value that enters.
      edge: Index of the oldest value in the sum before the push.
      first: Index of the oldest value in the sum after the push.
      rebuild: Whether the sum is computed again from the slots.
    """

    newest: jax.Array
    edge: jax.Array
    first: jax.Array
    rebuild: jax.Array


@jax.custom_batching.custom_vmap
def _update_sum(ring, run, total, residue, move):
    """Turn the sum of the values edge … t − 1 into that of first … t; ``run`` holds the ring's leading indices."""
    t, edge, first, rebuild = move
    slots = jax.tree.leaves(ring)[0].shape[len(run)]

    def read(i):
        return jax.tree.map(lambda rows, s: _xla.from_stored(_read(rows, (*run, i % slots)), s.dtype), ring, total)

    # A rebuild starts from an empty sum at t that grows to the left.
    edge = jnp.where(rebuild, t, edge)

    # Σ ← (Σ − S_f) + S_t, the first term only if a value leaves. In this order L = 1 is exact.
    leaves = first > edge
    old = jax.tree.map(lambda v: jnp.where(leaves, v, 0), read(edge))
    total, residue = compensated.exchange(total, residue, ~rebuild, old, read(t))
    edge = jnp.where(leaves, edge + 1, edge)

    # L became shorter, or the sum is rebuilt: move the left edge to f_t, value by value. Usually no iteration.
    def shift(carry):
        edge, total, residue = carry
        shrink = edge < first
        change = jax.tree.map(lambda v: jnp.where(shrink, -v, v), read(jnp.where(shrink, edge, edge - 1)))
        return jnp.where(shrink, edge + 1, edge - 1), *compensated.accumulate(total, residue, change)

    _, total, residue = lax.while_loop(lambda carry: carry[0] != first, shift, (edge, total, residue))
    return total, residue


@_update_sum.def_vmap
def _update_sums_in_turn(size, batched, ring, run, total, residue, move):
    """Update one run after the other: the memory of one run stays in the cache, and nothing is gathered."""
    ring_batched, run_batched, *sums_batched, move_batched = batched

    def broadcast(x, is_batched):
        return x if is_batched else jnp.broadcast_to(x, (size, *x.shape))

    def pick(x, is_batched, i):
        return _read(x, (i,)) if is_batched else x

    one_ring = not any(jax.tree.leaves(ring_batched))
    if not one_ring:
        ring = jax.tree.map(broadcast, ring, ring_batched)

    def one(i, sums):
        inner = jax.tree.map(lambda x, b: pick(x, b, i), run, run_batched)
        total, residue = jax.tree.map(lambda x: pick(x, True, i), sums)
        move_i = jax.tree.map(lambda x, b: pick(x, b, i), move, move_batched)
        sum_i = _update_sum(ring, inner if one_ring else (i, *inner), total, residue, move_i)
        return jax.tree.map(lambda x, x_i: _write(x, x_i, i), sums, sum_i)

    sums = jax.tree.map(broadcast, (total, residue), tuple(sums_batched))
    sums = lax.fori_loop(0, size, one, sums)
    return sums, jax.tree.map(lambda _: True, sums)


def _advance(state, value, buffer, first, total, residue):
    # One reduction answers both questions: the smallest entry, −∞ if one is not finite.
    smallest = [jnp.min(jnp.where(jnp.isfinite(v), v.real, -jnp.inf), initial=0) for v in jax.tree.leaves(value)]
    negative = jnp.where(jnp.stack([low < 0 for low in smallest]), state.num_pushed, state.negative)
    nonfinite = jnp.where(jnp.stack([low == -jnp.inf for low in smallest]).any(), state.num_pushed, state.nonfinite)
    return MovingState(buffer, state.num_pushed + 1, first, total, residue, negative, nonfinite)


def _write(array, value, index):
    """Return ``array`` with ``array[index] = value``, in place where ``array`` is not used again."""
    return lax.dynamic_update_slice(array, _xla.to_stored(value, array.dtype)[None], _start((index,), value.ndim))


def _read(array, index):
    """Return ``array[index]`` as one dynamic slice; ``index`` is a tuple."""
    rest = array.shape[len(index) :]
    return lax.dynamic_slice(array, _start(index, len(rest)), (1,) * len(index) + rest).reshape(rest)


def _start(index, more):
    return (*(jnp.asarray(i, jnp.int32) for i in index), *(jnp.zeros((), jnp.int32),) * more)


def _round_to_slot(value, ring):
    dtype = _xla.value_dtype(ring.dtype)
    if dtype == value.dtype or jnp.iscomplexobj(value):
        return value
    # A pair of casts would not do: XLA may drop it as "excess precision" and then add what it does not store.
    return lax.reduce_precision(value, jnp.finfo(dtype).nexp, jnp.finfo(dtype).nmant)


def _slot_dtype(leaf, dtype):
    dtype = jnp.dtype(dtype or leaf.dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        return dtype
    if jnp.issubdtype(leaf.dtype, jnp.inexact):
        raise OptionError("dtype", f"must be a floating dtype, got {dtype}")
    return window_kind.sum_dtype(leaf.dtype)  # the mean of integers is a float


def _integer_length(length, capacity):
    """Return L as an integer within 1 … C, and whether it is ∞."""
    length = jnp.asarray(capacity if length is None else length)
    infinite = length == jnp.inf if jnp.issubdtype(length.dtype, jnp.floating) else jnp.zeros_like(length, bool)
    return jnp.clip(jnp.where(infinite, capacity, length), 1, capacity).astype(jnp.int32), infinite
