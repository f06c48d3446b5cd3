"""The moving mean of any pytree over its last L values.

    S̄_t = (1/n_t) Σ_{i = f_t … t} S_i        f_t = max(t + 1 − L, 0)

One push costs one addition and one subtraction, whatever L is: a ring of ``capacity + 1`` slots remembers the values, a
running sum follows them.

| letter | name           | meaning                                                                     |
|--------|----------------|-----------------------------------------------------------------------------|
| S_i    | ``value``      | the value of push i, a pytree of arrays                                     |
| L      | ``length``     | how many values the mean spans; traced, 1 … capacity, or ∞                  |
| C      | ``capacity``   | the longest finite L; the ring has C + 1 slots; 0 keeps no ring (L = ∞)     |
| t      | ``index``      | pushes so far; value i lives in slot i mod (C + 1)                          |
| f      | ``first``      | index of the oldest value inside the sum                                    |
| Σ      | ``total``      | the sum rounded to one float, and                                           |
| δ      | ``residue``    | what that rounding left out: Σ + δ carries twice the digits                 |
| n      |                | what the sum is divided by: the number stored (``warmup="mean"``) or L      |

Three things are less obvious than they look, and each was measured:

- The ring has one slot more than the window is long, is written *first*, and the value that leaves is read from the
  *written* ring. XLA on CPU then updates it in place; reading before writing copies the whole ring, every step.
- A plain float32 running sum drifts, below zero too. Here every addition is a TwoSum whose error is carried along, the
  sum is rebuilt from the slots once in sixteen turns of the ring, and a window that holds no negative value never
  returns one. It is also rebuilt when a value that was not finite has left, and when fewer values stay than leave.
- The slot does not depend on L. Runs with different L under ``vmap`` therefore write the same slot, which is one copy
  of the new values and not a scatter.

Reference: Mandt and Blei, *Smoothed Gradients for Stochastic Variational Inference*, NIPS 2014, Algorithm 1.
"""

import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Warmup = Literal["mean", "zeros"]

_TURNS = 16  # turns of the ring between two rebuilds of the sum: 1/16 of a read per push, and no drift


class WindowState(NamedTuple):
    """A ring of the last values and their sum.

    Attributes:
      buffer: The ring; every leaf is ``[capacity + 1, ...]`` (``[0, ...]`` for capacity 0).
      index: t, the number of values pushed, int32.
      first: f, the index of the oldest value in the sum, int32.
      total: Σ, the sum of the values f … t − 1, rounded.
      residue: δ, what the rounding of ``total`` left out.
      negative: For each leaf the index of its latest value with a negative entry, −1 if there was none.
      broken: The index of the latest value that was not finite, −1 if there was none.
    """

    buffer: Any
    index: jax.Array
    first: jax.Array
    total: Any
    residue: Any
    negative: jax.Array
    broken: jax.Array


class ExponentialState(NamedTuple):
    """The exponential sibling: weights that fade by ``decay`` a push, one slot instead of L.

    Attributes:
      mean: Σ_i decay^(t−i) S_i / weight.
      weight: w = Σ_i decay^(t−i).
    """

    mean: Any
    weight: jax.Array


def runs() -> WindowState:
    """``in_axes`` and ``out_axes`` for a ``vmap`` of :func:`push` over runs that are pushed in step.

    The index is the same for all of them and stays unbatched, so that the write is one copy and not a scatter.
    """
    return WindowState(buffer=0, index=None, first=0, total=0, residue=0, negative=0, broken=0)


def init(template: Any, capacity: int | float, *, dtype: Any = None) -> WindowState:
    """An empty window.

    Allocates ``capacity + 1`` slots of the template's size, and two more for the sum.

    Args:
      template: A pytree with the structure, shapes and dtypes of the values (arrays or ``ShapeDtypeStruct``).
      capacity: The longest window that will be asked for. 0 or ∞: no ring, the mean of everything.
      dtype: Floating dtype of the slots; by default the template's, or float32 for integers. bfloat16 halves the
        memory: values are rounded before they are added, so that what is added is exactly what is later subtracted.
        (Before jax 0.12 the state keeps bfloat16 slots as their bits, uint16, which carry no derivative.)

    Returns:
      A :class:`WindowState`.
    """
    slots = _slots(capacity)

    def ring(leaf):
        leaf = _zeros(leaf, _stored_as(_slot_dtype(leaf, dtype)))
        return jnp.broadcast_to(leaf, (slots, *leaf.shape))  # broadcast keeps a sharding that zeros(shape) would lose

    template = jax.tree.map(_as_leaf, template)
    zeros = jax.tree.map(lambda leaf: _zeros(leaf, _sum_dtype(leaf.dtype)), template)
    return WindowState(
        buffer=jax.tree.map(ring, template),
        index=jnp.zeros((), jnp.int32),
        first=jnp.zeros((), jnp.int32),
        total=zeros,
        residue=jax.tree.map(jnp.zeros_like, zeros),  # its own memory, so that both can be donated
        negative=jnp.full(len(jax.tree.leaves(template)), -1, jnp.int32),
        broken=jnp.full((), -1, jnp.int32),
    )


def init_exponential(template: Any) -> ExponentialState:
    """An empty exponential window; allocates one slot."""
    mean = jax.tree.map(lambda leaf: _zeros(leaf, _sum_dtype(leaf.dtype)), jax.tree.map(_as_leaf, template))
    precise = any(leaf.dtype in (jnp.float64, jnp.complex128) for leaf in jax.tree.leaves(mean))
    return ExponentialState(mean, weight=jnp.zeros((), jnp.float64 if precise else jnp.float32))


def push(
    state: WindowState | ExponentialState, value: Any, length: Any = None, *, warmup: Warmup = "mean"
) -> tuple[Any, WindowState | ExponentialState]:
    """Add a value; return the mean of the last ``length`` values, and the new state.

    With the state donated (``jax.jit(push, donate_argnums=0)``) nothing but the mean is allocated.

    Args:
      state: From :func:`init` or :func:`init_exponential`.
      value: A pytree like the template.
      length: L, a number or a traced scalar; by default the capacity. It may change from push to push; a longer window
        takes back the values that are still stored. ∞ drops nothing from now on. Beyond the capacity is an error if
        the number is known, and means the capacity if it is traced. For the exponential window it is the length of a
        box window with the same variance, any real number from 1 on.
      warmup: What the sum is divided by while fewer than L values are stored: their number (``"mean"``), or L as in
        Algorithm 1, which counts the missing ones as zeros (``"zeros"``). L = ∞ always is the mean.

    Returns:
      ``(mean, state)``; the mean has the structure, shapes and (floating) dtypes of ``value``.

    With L = 1 the mean is the value, to the last bit. With capacity 0 it is the mean of all values so far. A value that
    is not finite spoils the mean while it is inside, and not after; a sum beyond the largest float spoils it until the
    sum is next rebuilt. ``jax.jvp`` passes through, also of a ``vmap``; ``jacfwd`` and reverse mode do not.
    """
    if warmup not in ("mean", "zeros"):
        raise ValueError(f"warmup must be 'mean' or 'zeros', got {warmup!r}")
    given = jax.tree.map(_as_leaf, value)
    sums = state.mean if isinstance(state, ExponentialState) else state.total
    _check_like(sums, given)
    if not jax.tree.leaves(given):
        return value, state
    check_length(length, state)
    value = jax.tree.map(lambda v, s: v.astype(s.dtype), given, sums)
    if isinstance(state, ExponentialState):
        state = _push_exponential(state, value, length)
    else:
        state = _push_ring(state, value, length) if capacity_of(state) else _push_forever(state, value)
    return _like(mean(state, length, warmup=warmup), given), state


def mean(state: WindowState | ExponentialState, length: Any = None, *, warmup: Warmup = "mean") -> Any:
    """The mean that the last :func:`push` returned, in the sum's dtype; ``length`` and ``warmup`` as given there."""
    if isinstance(state, ExponentialState):
        if warmup == "mean":
            return state.mean
        # Algorithm 1's zeros: divide by the weight that infinitely many values would have, 1/(1 − d).
        decay = _decay(length, state.weight.dtype)
        shown = jnp.where(decay < 1, state.weight * (1 - decay), 1)
        return jax.tree.map(lambda m: m * shown.astype(m.dtype), state.mean)
    count = state.index - state.first
    if warmup == "zeros" and capacity_of(state):
        length, forever = _whole(length, capacity_of(state))
        count = jnp.where(forever, count, length)

    # (Σ + δ) / n
    totals, structure = jax.tree.flatten(jax.tree.map(jnp.add, state.total, state.residue))
    for i, total in enumerate(totals):
        if not jnp.iscomplexobj(total):
            # A sum of non-negative values may come out at −1e-9; the truth is never below 0.
            total = jnp.where(state.negative[i] < state.first, jnp.maximum(total, 0), total)
        totals[i] = total / count.astype(total.dtype)
    return jax.tree.unflatten(structure, totals)


def equivalent_length(decay: Any) -> Any:
    """The L of a box window whose mean has the variance of an exponential one: (1 + d)/(1 − d)."""
    return (1 + decay) / (1 - decay)


def capacity_of(state: WindowState) -> int:
    """The longest finite window that a state can serve, read off its shape; 0 if it keeps no ring."""
    buffers = jax.tree.leaves(state.buffer)
    return max(buffers[0].shape[0] - 1, 0) if buffers else 0


def check_length(length: Any, state: WindowState | ExponentialState) -> None:
    """Refuse a length, or one of several, that is known now and that this window cannot serve."""
    if isinstance(state, ExponentialState):
        if length is None:
            raise ValueError("an exponential window has no capacity to default to: give a length")
        check_lengths(length, None)
    elif length is not None:
        check_lengths(length, capacity_of(state))


def check_lengths(lengths: Any, capacity: int | None) -> None:
    """Refuse lengths that are known now and that a window of this capacity (None: exponential) cannot serve."""
    if isinstance(lengths, jax.core.Tracer):
        return
    lengths = np.ravel(np.asarray(lengths, float))
    if capacity is None:
        served, fits = "a number from 1 on, or ∞", lengths >= 1
    elif capacity:
        served = f"a whole number from 1 to the capacity {capacity}, or ∞"
        fits = (lengths == math.inf) | ((lengths >= 1) & (lengths <= capacity) & (lengths == np.floor(lengths)))
    else:
        served, fits = "∞: the capacity is 0", lengths == math.inf
    if not fits.all():
        raise ValueError(f"the length of this window must be {served}; got {lengths[~fits][0]:g}")


def nbytes(template: Any, capacity: int | float, *, dtype: Any = None) -> int:
    """Bytes that :func:`init` allocates."""
    leaves = [_as_leaf(leaf) for leaf in jax.tree.leaves(template)]
    slot = sum(math.prod(leaf.shape) * _slot_dtype(leaf, dtype).itemsize for leaf in leaves)
    total = sum(math.prod(leaf.shape) * _sum_dtype(leaf.dtype).itemsize for leaf in leaves)
    return _slots(capacity) * slot + 2 * total


def _push_forever(state, value):
    # L = ∞: Σ ← Σ + S_t, nothing ever leaves.
    total, residue = _add(state.total, state.residue, value)
    return _advance(state, value, state.buffer, state.first, total, residue)


def _push_ring(state, value, length):
    capacity = capacity_of(state)
    slots = capacity + 1
    t = state.index
    length, forever = _whole(length, capacity)

    # Round to the slot's dtype before adding: what is added is exactly what is later subtracted.
    value = jax.tree.map(_round_to_slot, value, state.buffer)
    buffer = jax.tree.map(lambda ring, v: _write(ring, v, t % slots), state.buffer, value)

    # f_t = max(t + 1 − L, 0); for L = ∞ as far back as the sum or the ring reaches.
    stored = jnp.maximum(t - capacity, 0)
    first = jnp.where(forever, jnp.minimum(state.first, stored), jnp.maximum(t + 1 - length, 0))

    # Add the slots up again, instead of following them: where values that must leave are not stored any more (L was ∞),
    # where fewer stay than leave, where one that is not finite leaves, and once in a while.
    gone = (first > state.first) & (state.first < stored)
    fewer = t + 1 - first <= first - state.first
    mended = (state.first <= state.broken) & (state.broken < first)
    rebuild = gone | fewer | mended | ((first >= stored) & (t % (_TURNS * slots) == 0))
    total, residue = _follow(buffer, (), state.total, state.residue, _Move(t, state.first, first, rebuild))
    return _advance(state, value, buffer, first, total, residue)


class _Move(NamedTuple):
    newest: jax.Array  # t
    edge: jax.Array  # the oldest value in the sum now
    first: jax.Array  # the oldest that is to be in it
    rebuild: jax.Array  # forget the sum and add up the slots


@jax.custom_batching.custom_vmap
def _follow(ring, run, total, residue, move):
    """Turn the sum of the values edge … t − 1 into the sum of first … t; ``run`` are the ring's leading indices."""
    t, edge, first, rebuild = move
    slots = jax.tree.leaves(ring)[0].shape[len(run)]

    def read(i):
        return jax.tree.map(lambda rows, s: _unpack(_read(rows, (*run, i % slots)), s.dtype), ring, total)

    # A rebuild forgets the sum: it starts from nothing at t and grows to the left.
    edge = jnp.where(rebuild, t, edge)

    # Σ ← (Σ − S_f) + S_t, the first term only if the window moves on. In this order L = 1 is exact.
    leaves = first > edge
    old = jax.tree.map(lambda v: jnp.where(leaves, v, 0), read(edge))
    total, residue = _slide(total, residue, ~rebuild, old, read(t))
    edge = jnp.where(leaves, edge + 1, edge)

    # The length changed, or the sum is rebuilt: move the left edge to f_t, value by value. As a rule no iteration.
    def shift(carry):
        edge, total, residue = carry
        shrink = edge < first
        change = jax.tree.map(lambda v: jnp.where(shrink, -v, v), read(jnp.where(shrink, edge, edge - 1)))
        return jnp.where(shrink, edge + 1, edge - 1), *_add(total, residue, change)

    _, total, residue = lax.while_loop(lambda carry: carry[0] != first, shift, (edge, total, residue))
    return total, residue


@_follow.def_vmap
def _follow_runs(size, batched, ring, run, total, residue, move):
    """Several runs, one after the other: what one of them touches stays in the cache, and nothing is gathered."""
    ring_batched, run_batched, *sums_batched, move_batched = batched

    def spread(x, is_batched):
        return x if is_batched else jnp.broadcast_to(x, (size, *x.shape))

    def pick(x, is_batched, i):
        return _read(x, (i,)) if is_batched else x

    shared = not any(jax.tree.leaves(ring_batched))
    if not shared:
        ring = jax.tree.map(spread, ring, ring_batched)

    def one(i, sums):
        inner = jax.tree.map(lambda x, b: pick(x, b, i), run, run_batched)
        total, residue = jax.tree.map(lambda x: pick(x, True, i), sums)
        moved = jax.tree.map(lambda x, b: pick(x, b, i), move, move_batched)
        sum_i = _follow(ring, inner if shared else (i, *inner), total, residue, moved)
        return jax.tree.map(lambda x, x_i: _write(x, x_i, i), sums, sum_i)

    sums = jax.tree.map(spread, (total, residue), tuple(sums_batched))
    sums = lax.fori_loop(0, size, one, sums)
    return sums, jax.tree.map(lambda _: True, sums)


def _push_exponential(state, value, length):
    # w ← d w + 1,   m ← (1 − 1/w) m + S/w: a convex combination, so it stays within the values
    weight = _decay(length, state.weight.dtype) * state.weight + 1
    share = 1 / weight
    mean = jax.tree.map(lambda m, v: (1 - share).astype(m.dtype) * m + share.astype(m.dtype) * v, state.mean, value)
    return ExponentialState(mean, weight)


def _decay(length, dtype):
    """d = (L − 1)/(L + 1), written so that L = ∞ gives 1 and not ∞/∞."""
    return 1 - 2 / (jnp.asarray(length, dtype) + 1)


def _advance(state, value, buffer, first, total, residue):
    # One reduction tells both: the smallest entry, −∞ if one is not finite.
    smallest = [jnp.min(jnp.where(jnp.isfinite(v), v.real, -jnp.inf), initial=0) for v in jax.tree.leaves(value)]
    negative = jnp.where(jnp.stack([low < 0 for low in smallest]), state.index, state.negative)
    broken = jnp.where(jnp.stack([low == -jnp.inf for low in smallest]).any(), state.index, state.broken)
    return WindowState(buffer, state.index + 1, first, total, residue, negative, broken)


def _like(mean, value):
    """The mean in the value's own dtype, if that is a floating one."""

    def cast(m, v):
        return m.astype(v.dtype) if jnp.issubdtype(v.dtype, jnp.inexact) else m

    return jax.tree.map(cast, mean, value)


def _two_sum(a, b):
    """a + b rounded, and exactly what the rounding left out (Møller and Knuth)."""
    total = a + b
    back = total - a
    return total, (a - (total - back)) + (b - back)


def _slide(total, residue, keep, old, new):
    """Σ ← (Σ − old) + new, and into δ goes exactly what the two roundings left out; from 0 unless ``keep``."""

    def slide(s, r, x, y):
        # The barrier hides that both lines compute the same sum. XLA would otherwise keep the intermediate sums in
        # memory for the second use; computing them again costs nothing in a loop that waits for memory.
        again = lax.optimization_barrier(s)
        less, error_1 = _two_sum(jnp.where(keep, again, 0), -x)
        _, error_2 = _two_sum(less, y)
        return (jnp.where(keep, s, 0) - x) + y, jnp.where(keep, r, 0) + (error_1 + error_2)

    return _unzip(total, jax.tree.map(slide, total, residue, old, new))


def _add(total, residue, value):
    """Σ ← Σ + x, and into δ goes exactly what the rounding left out."""

    def add(s, r, x):
        _, error = _two_sum(lax.optimization_barrier(s), x)
        return s + x, r + error

    return _unzip(total, jax.tree.map(add, total, residue, value))


def _unzip(like, pairs):
    return jax.tree.transpose(jax.tree.structure(like), jax.tree.structure((0, 0)), pairs)


def _write(array, value, index):
    """``array[index] = value`` as one dynamic update slice, in place where the array is not needed any more."""
    return lax.dynamic_update_slice(array, _stored(value, array.dtype)[None], _start((index,), value.ndim))


def _read(array, index):
    """``array[index]`` as one dynamic slice; ``index`` is a tuple."""
    rest = array.shape[len(index) :]
    return lax.dynamic_slice(array, _start(index, len(rest)), (1,) * len(index) + rest).reshape(rest)


def _start(index, more):
    return (*(jnp.asarray(i, jnp.int32) for i in index), *(jnp.zeros((), jnp.int32),) * more)


def _round_to_slot(value, ring):
    kind = jnp.bfloat16 if ring.dtype == jnp.uint16 else ring.dtype
    if kind == value.dtype or jnp.iscomplexobj(value):
        return value
    # A pair of casts would not do: XLA may drop it as "excess precision" and then add what it does not store.
    return lax.reduce_precision(value, jnp.finfo(kind).nexp, jnp.finfo(kind).nmant)


# Before jax 0.12, XLA on CPU widens a whole bfloat16 ring to float32 to write one slot of it: a hundred times the time
# of the push, and three times the memory. A ring of bits it leaves alone.
_BITS = jax.__version_info__ < (0, 12)


def _stored_as(dtype):
    return jnp.dtype(jnp.uint16) if _BITS and dtype == jnp.bfloat16 else dtype


def _stored(value, dtype):
    bits = dtype == jnp.uint16
    return lax.bitcast_convert_type(value.astype(jnp.bfloat16), jnp.uint16) if bits else value.astype(dtype)


def _unpack(slot, dtype):
    if slot.dtype == jnp.uint16:
        slot = lax.bitcast_convert_type(slot, jnp.bfloat16)
    return slot.astype(dtype)


def _slot_dtype(leaf, dtype):
    dtype = jnp.dtype(dtype or leaf.dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        return dtype
    if jnp.issubdtype(leaf.dtype, jnp.inexact):
        raise ValueError(f"slots must be of a floating dtype, got {dtype}")
    return _sum_dtype(leaf.dtype)  # integers have no mean among them


def _as_leaf(leaf):
    return leaf if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) else jnp.asarray(leaf)


def _zeros(leaf, dtype):
    return jnp.zeros(leaf.shape, dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else jnp.zeros_like(leaf, dtype)


def _sum_dtype(dtype):
    return jnp.promote_types(dtype, jnp.float32)


def _slots(capacity):
    if capacity == math.inf:
        return 0
    if not 0 <= capacity < 2**31 - 1 or int(capacity) != capacity:  # NaN fails the first test
        raise ValueError(f"capacity must be a whole number from 0 to 2³¹ − 2, or ∞, got {capacity}")
    return int(capacity) + 1 if capacity else 0


def _check_like(known, value):
    if jax.tree.structure(known) != jax.tree.structure(value):
        raise ValueError(
            f"the window was made for values like {jax.tree.structure(known)}, got {jax.tree.structure(value)}"
        )
    for path, (a, b) in zip(
        (path for path, _ in jax.tree_util.tree_leaves_with_path(known)),
        zip(jax.tree.leaves(known), jax.tree.leaves(value), strict=True),
        strict=True,
    ):
        if a.shape != b.shape:
            where = jax.tree_util.keystr(path) or "the value"
            raise ValueError(f"{where}: the window was made for shape {a.shape}, got {b.shape}")


def _whole(length, capacity):
    """L as an integer within 1 … C, and whether it is ∞."""
    length = jnp.asarray(capacity if length is None else length)
    forever = length == jnp.inf if jnp.issubdtype(length.dtype, jnp.floating) else jnp.zeros_like(length, bool)
    return jnp.clip(jnp.where(forever, capacity, length), 1, capacity).astype(jnp.int32), forever
