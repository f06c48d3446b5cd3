"""LDA by smoothed SVI on the rows that a minibatch uses: a step costs O(words in the minibatch), not O(V).

Every step moves λ of every word. But while no minibatch with word w enters the window or leaves it, the sum Σ_w of its
statistics stays as it is, and many steps are one, in closed form:

    λ_w ← P λ_w + (1 − P) η_w + Q Σ_w                from step i to step j
    P = Π (1 − ρ_t) = exp(A_j − A_i)                 A_t+1 = A_t + log(1 − ρ_t)
    Q = C_j − P C_i                                  C_t+1 = (1 − ρ_t) C_t + ρ_t / n_t

So a row is read when its word is in the minibatch, and written when statistics of it enter the window or leave it; the
slots of the window hold these rows only. The sums over words T_k = Σ_w λ_wk that β̃ needs follow without any of the
rows: they are a row themselves, with Σ_w η_w for a prior and the sum of all statistics for a sum.

| letter  | name          | shape     | meaning                                                                     |
|---------|---------------|-----------|-----------------------------------------------------------------------------|
| S       |               |           | threads; word w is row w // S of shard w mod S, and each thread has a shard |
| λ, Σ, δ | ``shards``    | [V/S,3K+4]| topics, sum over the window, what its rounding left out (TwoSum); and A, C  |
|         |               |           | of the step at which the row was written last, each as a sum of two floats  |
| T       | ``totals``    | [1,3K+4]  | the sums of these over all words, in every thread (of statistics before a   |
|         |               |           | slot of low precision rounds them)                                          |
| A, C    | ``clock``     |           | of the step that comes next                                                 |
| n       |               |           | what the sum is divided by: the number of values in the window, or L        |

A step is two programs a thread: the first works on the rows of a shard (what left the window, what came into it, β̃ of
the words that come), the second on a share of the documents. Threads are Python's: a program of XLA left to its own
threads hands out pieces of a microsecond, and is slower on two cores than on one.

The programs are loops over rows, each read and written in place (:mod:`smoothgrad_jax.core.fused_loops`). A row lies
in one piece
and is written in pieces, as XLA computes what is put together from several arrays number by number.

With L = 1 this is SVI with the lazy updates of Vowpal Wabbit; with any L that does not grow it equals
:func:`smoothgrad_jax.global_step`.
"""

import itertools
import math
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from smoothgrad_jax.core import adaptive
from smoothgrad_jax.core._threads import submit
from smoothgrad_jax.core.adaptive import Adaptive
from smoothgrad_jax.core.fused_loops import ALONE, row, set_row, whole
from smoothgrad_jax.core.window import Warmup
from smoothgrad_jax.data.batches import Batch
from smoothgrad_jax.models import lda

_END = 1 << 28  # stands after the last word of a list; less than 2³¹ by _BITS
_STAMP = 4  # numbers of a stamp: (A, C) as a + a′ and c + c′
_LINE = 16  # every so many numbers of a row are looked at to have all of it in the cache: 64 bytes of float32
_GROUP = 8  # rows that are looked at together, so that they come from memory together
_CHUNK = 4096  # rows that are brought up to date at a time to be looked at
_LEAVES, _ENTERS, _USED, _BITS = 1, 2, 4, 3  # what is to do with the row of a word
_CODE_BIAS = (127 << 3) - 255  # the code 255 is 1.0: exponent 127 and mantissa 0, in the 11 upper bits of a float


class Share(NamedTuple):
    """A minibatch dealt out to S threads; made by :func:`share`.

    Attributes:
      words: [S, U] row in its shard of each word of the minibatch, increasing; then at least one _END.
      batch: The documents, with the words as positions in [S · U].
      bounds: [S + 1], thread s has the documents bounds[s] … bounds[s + 1] − 1.
      hashed: Bucket of each word [S · U], where the window is adaptive.
    """

    words: np.ndarray
    batch: Batch | None
    bounds: np.ndarray | None
    hashed: np.ndarray | None = None


class Model(NamedTuple):
    """The model as the threads need it; made by :func:`deal`.

    Attributes:
      alpha: α [K].
      eta: η of each shard, [V/S or 1, K or 1].
      eta_total: Σ_w η_w [1, K].
      num_docs: D.
    """

    alpha: np.ndarray
    eta: tuple[np.ndarray, ...]
    eta_total: np.ndarray
    num_docs: float


class Slot(NamedTuple):
    """The statistics of one minibatch.

    Attributes:
      words: As in :class:`Share`.
      values: For each shard its rows, as :func:`_store` keeps them.
      total: Their sum over words [K].
    """

    words: np.ndarray
    values: tuple[Any, ...]
    total: jax.Array


class Pending(NamedTuple):
    """The statistics of the last step as they come from the threads.

    Attributes:
      words: As in :class:`Share`.
      sums: For each thread, Σ_d n_dw φ_dwk over its documents [S · U, K padded].
      scale: D/B.
      totals: For each thread, the sum over words [K].
    """

    words: np.ndarray
    sums: tuple[jax.Array, ...]
    scale: float
    totals: tuple[jax.Array, ...]


class RowState(NamedTuple):
    """What the next step needs; the step uses it up. See the table of the module.

    Attributes:
      shards, totals: As above, for each thread.
      last, clock: (A, C) of the last step and of the next one.
      step: Steps taken.
      count: Values in the window.
      slots: Those values that will leave, oldest first, without ``pending``; None for L = ∞.
      dtype: How slots are kept.
      leaving: Slots that left at the last step, still in the rows' sums.
      pending: The statistics of the last step, not yet in the rows' sums.
      rule: What finds the length of the window, if it is adaptive.
      spare: Memory for the values of a slot and for β̃, for each thread; what is in it does not matter.
    """

    shards: tuple[jax.Array, ...]
    totals: tuple[jax.Array, ...]
    last: tuple[float, float]
    clock: tuple[float, float]
    step: int
    count: int
    slots: deque | None
    dtype: Any
    leaving: tuple[Slot, ...]
    pending: Pending | None
    rule: adaptive.Delayed | None = None
    spare: tuple[Any, ...] | None = None

    @property
    def num_words(self) -> int:
        """V."""
        return sum(len(each) for each in self.shards)

    @property
    def num_topics(self) -> int:
        """K."""
        return _num_topics(self.shards[0])


class RowInfo(NamedTuple):
    """What a step found; to look at it is to wait for the step.

    Attributes:
      step: Steps taken before this one.
      clock: (A, C) before this step.
      length: L.
      scale: D/B.
      found: For each thread the sum of its statistics [K], updates of γ, and the largest last mean |Δγ|.
    """

    step: int
    clock: tuple[float, float]
    length: float
    scale: float
    found: tuple[Any, ...]

    @property
    def finite(self) -> bool:
        """Whether the statistics were finite; if not, they and all that follow are not in the rows."""
        total = sum(np.asarray(total) for total, *_ in self.found)
        with np.errstate(over="ignore", invalid="ignore"):
            return bool(np.isfinite(total.dtype.type(self.scale) * total).all())

    @property
    def iterations(self) -> int:
        """Updates of γ, in sum over the documents."""
        return sum(int(iterations) for _, iterations, _ in self.found)

    @property
    def change(self) -> float:
        """The largest last mean |Δγ| of all documents."""
        return max(float(change) for *_, change in self.found)


def init(
    lam: jax.Array, threads: int = 1, *, infinite: bool = False, dtype: Any = None, window: Adaptive | None = None
) -> RowState:
    """The state before the first step; allocates three arrays of the size of λ.

    Args:
      lam: λ [V, K], which is copied.
      threads: S, how many threads share the work.
      infinite: L = ∞ at every step: no slot is kept.
      dtype: How slots are kept: by default in the dtype of λ; ``jnp.bfloat16`` in half the memory; ``jnp.uint8`` in a
        quarter, see :func:`_store`.
      window: A window that finds its length.
    """
    lam = np.asarray(lam)
    total = lam.sum(0, dtype=np.float64, keepdims=True).astype(lam.dtype)
    shards = tuple(_fresh(lam[s::threads]) for s in range(threads))
    return RowState(
        shards=shards,
        totals=tuple(_fresh(total) for _ in range(threads)),
        last=(0.0, 0.0),
        clock=(0.0, 0.0),
        step=0,
        count=0,
        slots=None if infinite else deque(),
        dtype=jnp.dtype(dtype or shards[0].dtype),
        leaving=(),
        pending=None,
        rule=None if window is None else _rule(window, lam),
    )


@jax.jit
def _fresh(lam):
    """Rows with nothing in the window, at the very first step."""
    return jnp.pad(lam, [(0, 0), (0, 2 * lam.shape[1] + _STAMP)])


def _rule(window, lam):
    _, num_buckets = adaptive.buckets(len(lam))
    return adaptive.delayed(window, jax.ShapeDtypeStruct((num_buckets * lam.shape[1],), lam.dtype))


def deal(model: lda.LDA, state: RowState) -> Model:
    """The priors in the form of the state's shards."""
    num_words, num_topics = state.num_words, state.num_topics
    threads, dtype = len(state.shards), state.shards[0].dtype
    eta = np.asarray(model.eta, dtype)
    eta = eta.reshape((1,) * (2 - eta.ndim) + eta.shape)
    return Model(
        alpha=np.broadcast_to(np.asarray(model.alpha, dtype), num_topics),
        eta=tuple(np.ascontiguousarray(eta[s::threads]) if len(eta) > 1 else eta for s in range(threads)),
        eta_total=(eta.sum(0, dtype=np.float64, keepdims=True) * (num_words / len(eta))).astype(dtype),
        num_docs=float(model.num_docs),
    )


def share(batch: Batch, threads: int, buckets: np.ndarray | None = None) -> Share:
    """Deal a minibatch out: rows by word, documents so that every thread gets as many entries.

    Args:
      batch: The minibatch.
      threads: S.
      buckets: Of every word [V], from :func:`smoothgrad_jax.core.adaptive.buckets`, for an adaptive window.
    """
    used = batch.vocabulary[: batch.num_used]
    mine = [np.flatnonzero(used % threads == s) for s in range(threads)]
    # A shard's part of the words varies a little around the mean.
    planned = len(batch.vocabulary) / threads + (3 * math.sqrt(len(batch.vocabulary)) / 2 if threads > 1 else 0)
    room = -int(-max(planned, *(len(each) + 1 for each in mine)) // 64) * 64
    words = np.full((threads, room), _END, np.int32)
    position = np.zeros(len(used) + 1, np.int32)  # one more, for the padding of a batch without words
    for s, each in enumerate(mine):
        words[s, : len(each)] = used[each] // threads
        position[each] = s * room + np.arange(len(each), dtype=np.int32)
    placed = position[batch.words] if threads > 1 else batch.words  # one shard has the words in the batch's order
    hashed = None
    if buckets is not None:
        hashed = np.zeros(threads * room, np.int32)  # beyond the last word there is nothing to add
        hashed[position[: len(used)]] = buckets[used]
    # Documents as they come, cut where the entries are halved, thirded, …
    cuts = np.searchsorted(batch.offsets, batch.offsets[-1] * np.arange(1, threads) / threads)
    return Share(
        words,
        batch._replace(vocabulary=np.zeros(0, np.int32), num_used=np.zeros(0, np.int32), words=placed),
        np.array([0, *cuts, batch.size], np.int32),
        hashed,
    )


def step(
    state: RowState,
    share: Share,
    model: Model,
    rho: float,
    length: float | None,
    pool: ThreadPoolExecutor | None = None,
    *,
    warmup: Warmup = "mean",
    tol: float = 1e-3,
    max_iter: int = 100,
) -> tuple[RowState, RowInfo]:
    """One step of smoothed SVI: fit the minibatch, average its statistics with those of the window, move λ.

    Allocates one slot while the window fills; after that, nothing that stays.

    Args:
      state: From :func:`init` or the last step; used up.
      share: From :func:`share`, with as many threads.
      model: From :func:`deal`.
      rho: ρ in [0, 1].
      length: L ≥ 1; if it is shorter than at the last step, the oldest values leave, and if it is longer, the window
        grows with the values to come. A state made for L = ∞ or for an adaptive window takes no notice of it.
      pool: Where all threads but the caller's run, and at the first step of a run a compilation.
      warmup: As in :func:`smoothgrad_jax.core.window.push`.
      tol, max_iter: As in :func:`smoothgrad_jax.local_step`.

    Returns:
      The next state and :class:`RowInfo`; both may still be under way, so that the next step can be prepared meanwhile.
    """
    threads, room = share.words.shape
    spare = state.pending.sums if state.pending and state.pending.words.shape == share.words.shape else None
    if spare is None:
        shape = (threads * room, lda.padded(state.num_topics))
        spare = tuple(_zeros(shape, model.alpha.dtype) for _ in range(threads))
    tol = np.asarray(tol, model.alpha.dtype)
    rule, hashed = state.rule, None
    if rule is not None:
        # Before anything else is handed out: the next step's length is not to wait for this one.
        length, chosen = adaptive.take(rule, rho)
        num_buckets = chosen.before.shape[1] // state.num_topics
        hashed = (np.zeros((2 * num_buckets, lda.padded(state.num_topics)), tol.dtype), share.hashed)

    def fit(p, tables):
        bounds = share.bounds[p], share.bounds[p + 1]
        return _documents(model.alpha, tables, share.batch, bounds, tol, max_iter, spare[p], hashed)

    if state.spare is None and pool is not None:
        # At the first step of a run the second program is compiled beside the first.
        submit(pool, _compile, partial(_documents, model.alpha), share, spare[0].shape[1], (tol, max_iter), hashed)
    state, fitted = _touch(state, model, share, pool, fit)
    leaving = []
    while state.slots is not None and state.count + 1 - len(leaving) > length:
        leaving.append(state.slots.popleft())
    count = state.count + 1 - len(leaving)
    n = length if warmup == "zeros" and state.slots is not None else count
    sums, *found, sketches = zip(*fitted, strict=True)
    decay, gain = state.clock
    scale = model.num_docs / share.batch.size
    info = RowInfo(state.step, state.clock, length, scale, tuple(zip(*found, strict=True)))
    return state._replace(
        last=state.clock,
        # exp(−1e5) is 0, and unlike −∞ it leaves room for the logarithms to come
        clock=(decay + (math.log1p(-rho) if rho < 1 else -1e5), (1 - rho) * gain + rho / n),
        step=state.step + 1,
        count=count,
        leaving=tuple(leaving),
        pending=Pending(share.words, sums, scale, found[0]),
        rule=None if rule is None else adaptive.Delayed(chosen, sketches, scale),
    ), info


def before(state: RowState, info: RowInfo, model: Model) -> RowState:
    """The state before a step whose statistics were not finite, with an empty window."""
    # The rows are as they were: no step after that one has touched any.
    lam = params(state._replace(clock=info.clock, pending=None, leaving=()), model)
    fresh = init(lam, len(state.shards), infinite=state.slots is None, dtype=state.dtype)
    return fresh._replace(step=info.step, rule=None if state.rule is None else adaptive.restart(state.rule))


def settle(state: RowState, model: Model, pool: ThreadPoolExecutor | None = None) -> RowState:
    """Put into the rows' sums what still waits, without a step. The state is used up."""
    if state.pending is None:  # then nothing is leaving either
        return state
    nothing = Share(np.full_like(state.pending.words, _END), None, None)  # of a shape for which the program is there
    return _touch(state, model, nothing, pool)[0]


def params(state: RowState, model: Model) -> np.ndarray:
    """λ [V, K] after the last step; the state stays as it is: to look at a run must not change it.

    In NumPy, some rows at a time: on a CPU it allocates the result and the rows for which something waits, and it
    compiles nothing (but once for slots of uint8).
    """
    threads = len(state.shards)
    out = np.empty((state.num_words, state.num_topics), state.shards[0].dtype)
    clock, last_clock = (_split(each, out.dtype) for each in (state.clock, state.last))
    for s, shard in enumerate(map(np.asarray, state.shards)):
        lam, eta = out[s::threads], np.broadcast_to(model.eta[s], (len(shard), out.shape[1]))
        for start in range(0, len(shard), _CHUNK):
            part = slice(start, start + _CHUNK)
            lam[part] = _bring(shard[part], clock, eta[part], np)
        if state.pending is not None:
            # As _rows will do it: at the last clock something left or entered.
            words, total = _waiting(state, shard, s)
            P, lost, Q = _factors(last_clock[None], clock, np)
            before = _bring(shard[words], last_clock, eta[words], np)
            lam[words] = P * before + lost * eta[words] + Q * np.maximum(total, 0)
    return out


def _waiting(state, shard, s):
    """The words of a shard for which statistics wait to leave the sums or to enter them; and their sums after that."""
    num_topics = state.num_topics
    lists = [slot.words[s][slot.words[s] < _END] for slot in (*state.leaving, state.pending)]
    touched = np.unique(np.concatenate(lists))
    # Σ + δ
    total = shard[touched, num_topics : 2 * num_topics].astype(np.float64)
    total += shard[touched, 2 * num_topics : 3 * num_topics]
    for slot, words in zip(state.leaving, lists[:-1], strict=True):
        values = _decoded([np.asarray(part)[: len(words)] for part in slot.values[s]], total.dtype)
        total[np.searchsorted(touched, words)] -= values
    total[np.searchsorted(touched, lists[-1])] += _entering(state, s)[: len(lists[-1])]
    return touched, total.astype(shard.dtype)


def _entering(state, s):
    """The values that will enter the sums of a shard, as a slot gives them back."""
    pending, room = state.pending, state.pending.words.shape[1]
    sums = sum(np.asarray(each)[s * room : (s + 1) * room, : state.num_topics] for each in pending.sums)
    values = sums.dtype.type(pending.scale) * sums
    if state.dtype == jnp.uint8:
        return np.asarray(_coarse(values))
    return values.astype(state.dtype).astype(values.dtype)


def export(state: RowState) -> tuple[dict[str, list[np.ndarray]], dict[str, Any]]:
    """The state as arrays and as facts that JSON can hold; it stays as it is, pending statistics and all.

    Nothing is copied on a CPU: the arrays are views. While one is held, the step that would write there copies first.

    Returns:
      ``(arrays, facts)``: each array in pieces, to be joined along the first axis; names without pieces are left out.
    """
    kept = (*state.leaving, *(state.slots or ()))
    pending = state.pending
    values = [
        [np.asarray(part)[:used] for part in each]  # what lies beyond the last word is of an earlier slot
        for slot in kept
        for each, used in zip(slot.values, _num_used(slot.words), strict=True)
    ]
    arrays = {
        "shards": state.shards,  # [V, 3 K + 4], shard after shard
        "totals": state.totals,  # [S, 3 K + 4]
        "slot_words": [slot.words.ravel() for slot in kept],  # [Σ S U]
        "slot_values": [each[0] for each in values],  # [words used in all slots, K]
        "slot_scales": [each[1] for each in values if len(each) > 1],  # [words used in all slots]
        "slot_totals": [np.asarray(slot.total)[None] for slot in kept],  # [slots, K]
        "pending_words": [pending.words.ravel()] if pending else [],  # [S U]
        "pending_sums": pending.sums if pending else [],  # [S S U, K padded]
        "pending_totals": [np.asarray(total)[None] for total in pending.totals] if pending else [],  # [S, K]
    }
    if state.rule is not None:
        arrays |= {name: [array] for name, array in adaptive.export(state.rule).items()}
    facts = {
        "threads": len(state.shards),
        "num_words": state.num_words,
        "last": list(state.last),
        "clock": list(state.clock),
        "step": state.step,
        "count": state.count,
        "infinite": state.slots is None,
        "dtype": state.dtype.name,
        "num_leaving": len(state.leaving),
        "rooms": [slot.words.shape[1] for slot in kept],
        "pending_room": pending.words.shape[1] if pending else None,
        "pending_scale": pending.scale if pending else None,
    }
    return {name: [np.asarray(piece) for piece in pieces] for name, pieces in arrays.items() if len(pieces)}, facts


def restore(arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> RowState:
    """The state of which :func:`export` made these, its pieces joined; a run goes on from it to the same bits.

    Allocates the state; of arrays that are memory-mapped, a piece at a time is read.
    """
    threads = facts["threads"]
    if arrays["shards"].dtype == np.float64 and not jax.config.jax_enable_x64:
        raise ValueError("this state is of a run in float64: go on under jax.enable_x64(True)")

    def cut(name, sizes):
        ends = np.cumsum([0, *sizes]).tolist()
        return [arrays[name][a:b] for a, b in itertools.pairwise(ends)]

    def words(name, rooms):
        return [np.array(each).reshape(threads, -1) for each in cut(name, np.multiply(rooms, threads))]

    lengths = [len(range(s, facts["num_words"], threads)) for s in range(threads)]
    slots = []
    if facts["rooms"]:
        lists = words("slot_words", facts["rooms"])
        used = [number for each in lists for number in _num_used(each)]
        rooms = np.repeat(facts["rooms"], threads).tolist()
        names = [name for name in ("slot_values", "slot_scales") if name in arrays]
        values = zip(*(map(_padded, cut(name, used), rooms) for name in names), strict=True)
        values = zip(*[values] * threads, strict=True)  # the shards of a slot together
        slots = list(map(Slot, lists, values, map(_copy, arrays["slot_totals"])))
    pending, room = None, facts["pending_room"]
    if room is not None:
        pending = Pending(
            words=words("pending_words", [room])[0],
            sums=tuple(map(_copy, cut("pending_sums", [threads * room] * threads))),
            scale=facts["pending_scale"],
            totals=tuple(map(_copy, arrays["pending_totals"])),
        )
    leaving = facts["num_leaving"]
    return RowState(
        shards=tuple(map(_copy, cut("shards", lengths))),
        totals=tuple(map(_copy, cut("totals", [1] * threads))),
        last=tuple(facts["last"]),
        clock=tuple(facts["clock"]),
        step=facts["step"],
        count=facts["count"],
        slots=None if facts["infinite"] else deque(slots[leaving:]),
        dtype=jnp.dtype(facts["dtype"]),
        leaving=tuple(slots[:leaving]),
        pending=pending,
        rule=adaptive.restore(arrays),
    )


def _num_used(words):
    """How many words there are in each list."""
    return (words < _END).sum(1).tolist()


def _padded(array, room):
    return jnp.array(np.pad(array, [(0, room - len(array)), *[(0, 0)] * (array.ndim - 1)]))


def _zeros(shape, dtype):
    return jnp.array(np.zeros(shape, dtype))  # a copy: compiled in less time than jnp.zeros, for every shape


def _copy(array):
    return jnp.array(np.asarray(array))  # jnp.array copies what numpy owns


def catch_up(state: RowState, model: Model) -> RowState:
    """Bring every row up to date, in O(V): from here another η may hold. Of a settled state, which is used up."""
    clock = _split(state.clock, state.shards[0].dtype)
    return state._replace(
        shards=tuple(_catch_up(shard, clock, eta) for shard, eta in zip(state.shards, model.eta, strict=True)),
        totals=tuple(_catch_up(total, clock, model.eta_total) for total in state.totals),
    )


@partial(jax.jit, donate_argnames="shard")
def _catch_up(shard, clock, eta):
    lam = _bring(shard, clock, eta)
    return shard.at[:, : lam.shape[1]].set(lam).at[:, -_STAMP:].set(clock)


def _touch(state, model, share, pool, then=None):
    """The rows that changed at the last step and those of the new minibatch, for which there are β̃ [U, K] a shard.

    ``then(s, tables)`` is called in every thread as soon as the tables of all are under way; what it returns comes back
    with the state, and may be under way itself.
    """
    threads, dtype, num_topics = len(state.shards), state.shards[0].dtype, state.num_topics
    pending = state.pending or _no_statistics(share, num_topics, dtype)
    room = pending.words.shape[1]
    clock = _split(state.clock, dtype)
    last_clock = _split(state.last, dtype) if state.pending else clock
    # One slot that leaves goes with the rest, and its memory is that of the slot that comes next; others go before.
    earlier = list(state.leaving)
    last = earlier.pop() if earlier and earlier[-1].words.shape[1] == room else None
    if last is None:
        empty = tuple(_empty_slot(room, num_topics, state.dtype) for _ in range(threads))
        last = Slot(np.full_like(pending.words, _END), empty, _zeros(num_topics, dtype))
    spare = state.spare
    if spare is None or spare[0][0][0].shape[0] != room or spare[0][1].shape[0] != share.words.shape[1]:
        table = (share.words.shape[1], lda.padded(num_topics))
        spare = tuple((_empty_slot(room, num_topics, state.dtype), _zeros(table, dtype)) for _ in range(threads))
    left = sum((slot.total for slot in earlier), last.total)
    scale = np.asarray(pending.scale, dtype)
    touched = [Future() for _ in range(threads)]

    def work(s):
        try:
            shard, eta = state.shards[s], model.eta[s]
            for slot in earlier:
                shard = _leave(shard, state.totals[s], slot.values[s], slot.words[s], last_clock, eta)
            leave = (last.words[s], last.values[s])
            enter = (pending.words[s], pending.sums, np.int32(s * room), scale)
            totals = (state.totals[s], left, pending.totals, model.eta_total)
            touched[s].set_result(
                _rows(shard, *spare[s], totals, leave, enter, share.words[s], (last_clock, clock), eta)
            )
        except BaseException as error:
            touched[s].set_exception(error)  # the other threads wait for it
            raise
        tables = tuple(each.result()[2] for each in touched)
        return then(s, tables) if then else tables[s]

    others = [submit(pool, work, s) for s in range(1, threads)]
    results = [work(0), *(other.result() for other in others)]
    shards, values, tables, totals, entered, _ = zip(*(each.result() for each in touched), strict=True)
    if state.pending and state.slots is not None:
        state.slots.append(Slot(pending.words, values, entered[0]))
        values = last.values
    spare = tuple(zip(values, tables, strict=True))
    return state._replace(shards=shards, totals=totals, leaving=(), pending=None, spare=spare), results


def _no_statistics(share, num_topics, dtype):
    """What is pending before the first step, and after the state was settled."""
    threads, room = share.words.shape
    sums = _zeros((threads * room, lda.padded(num_topics)), dtype)
    total = _zeros(num_topics, dtype)
    return Pending(np.full_like(share.words, _END), (sums,) * threads, 0.0, (total,) * threads)


def _split(clock, dtype):
    """(A, C) as A = a + a′ and C = c + c′ in floats: what the first leaves out, the second has."""
    high = np.array(clock, dtype)
    low = (np.array(clock) - high).astype(dtype)
    return np.array([high[0], low[0], high[1], low[1]], dtype)


@partial(jax.jit, donate_argnums=0, compiler_options=ALONE)
@whole
def _leave(shard, total, slot, words, clock, eta):
    """Take the values of a slot out of the sums, at this clock; nothing, if the totals are not finite."""
    good = jnp.isfinite(total).all()

    def one(carry):
        i, shard = carry
        w = words[i]
        old = row(shard, w)
        new = _bring(old, clock, _eta(eta, w)), *_add(*_split_row(old)[1:3], -_load(slot, i, shard.dtype)), clock[None]
        return i + 1, _put(shard, w, lax.optimization_barrier(new))

    return lax.while_loop(lambda carry: good & (words[carry[0]] < _END), one, (jnp.int32(0), shard))[1]


@partial(jax.jit, donate_argnames=("shard", "slot", "table"), compiler_options=ALONE)
def _rows(shard, slot, table, totals, leave, enter, use, clocks, eta):
    """What left the window goes, what entered it comes, and the rows of the next minibatch are brought up to date.

    The three lists of words are walked together, so that a row is read once, and written once if something left or
    entered. Where the statistics that enter are not finite, no row is touched; T and β̃ are NaN, so that no step to
    come touches a row either.

    Args:
      shard: Rows [V/S, 3 K + 4].
      slot, table: Memory for the values that enter and for β̃.
      totals: T, the sums over words of what leaves and, for each thread, of what enters; η of the totals.
      leave: Words and values.
      enter: Words, for each thread the sums of which these are (D/B) times a part, where that begins, and D/B.
      use: Words.
      clocks: Of the last step, when values left and entered, and of the next one.
      eta: η of the shard.

    Returns:
      shard, slot, table, T, the sum over words of what entered; and a number without meaning, for which rows were read
      ahead.
    """
    total, left, entered, eta_total = totals
    arrays = shard, slot, table, total, jnp.zeros_like(left), jnp.zeros((), left.dtype)
    return _walk(arrays, left, entered, eta_total, leave, enter, use, clocks, eta)


@whole
def _walk(arrays, left, entered, eta_total, leave, enter, use, clocks, eta):
    shard, slot, table, old_total, _, seen = arrays
    leave, left_values = leave
    enter, sums, first, scale = enter
    last_clock, clock = clocks
    num_topics = _num_topics(shard)

    entered = scale * sum(entered)
    # Totals that are not finite are of an earlier step that failed: that is known when some more are under way.
    good = jnp.isfinite(entered).all() & jnp.isfinite(old_total).all()
    P, lost, Q = (each[0, 0] for each in _factors(last_clock[None], clock))

    def next_word(i, j, k):
        return jnp.minimum(jnp.minimum(leave[i], enter[j]), use[k])

    def change(old, eta, left, entered):
        """A row at the clock, its sum changed at the last one by what left and entered."""
        total, residue = _add(*_add(*_split_row(old)[1:3], -left), entered)
        lam = P * _bring(old, last_clock, eta) + lost * eta + Q * jnp.maximum(total, 0)
        return lax.optimization_barrier((lam, total, residue, clock[None]))

    # The totals are a row like the others.
    total = jnp.concatenate(change(old_total, eta_total, left[None], entered[None]), 1)
    total = jnp.where(good, total, jnp.nan)
    sizes = lda.topic_sizes(total[:, :num_topics])

    def merge(state):
        """The next word, and what is to do with its row."""
        i, j, k, n, order = state
        w = next_word(i, j, k)
        leaves, enters, used = leave[i] == w, enter[j] == w, use[k] == w
        todo = (w << _BITS) + _LEAVES * leaves + _ENTERS * enters + _USED * used
        return i + leaves, j + enters, k + used, n + 1, set_row(order, n, todo[None])

    order = jnp.zeros(leave.shape[0] + enter.shape[0] + use.shape[0] + 2 * _GROUP, jnp.int32)
    start = (*[jnp.int32(0)] * 4, order)
    *_, number, order = lax.while_loop(lambda state: good & (next_word(*state[:3]) < _END), merge, start)

    def one(n, state):
        i, j, k, shard, slot, table = state
        w, leaves, enters, used = order[n] >> _BITS, *((order[n] & bit) > 0 for bit in (_LEAVES, _ENTERS, _USED))
        # Where the word is not in a list, the row that the list has next is multiplied by 0, and written again in
        # its turn: that is less than a branch. The barrier: these are computed once, and not for every topic.
        w, factor, sign = lax.optimization_barrier((w, scale * enters, leaves.astype(shard.dtype)))
        # Ŝ_w = (D/B) Σ_d n_dw φ_dw
        values = factor * sum(row(each, j + first)[:, :num_topics] for each in sums)
        slot = jax.tree.map(lambda x, y: set_row(x, j, y), slot, _store(values, slot[0].dtype))
        # What is added is what was stored, and will be subtracted: a product that is added in one operation is
        # rounded only then.
        entering = _load(lax.optimization_barrier(slot), j, shard.dtype)
        new = change(row(shard, w), _eta(eta, w), sign * _load(left_values, i, shard.dtype), entering)
        table = lax.cond(
            used,
            lambda table: set_row(table, k, lda.scaled_topics(new[0], sizes)[0]),
            lambda table: table,
            table,
        )
        # A row that was only read is left as it was: the next time it is brought from there.
        shard = lax.cond(leaves | enters, lambda shard: _put(shard, w, new), lambda shard: shard, shard)
        return i + leaves, j + enters, k + used, shard, slot, table

    def group(state):
        """Some rows; and a look at those that come next, which then come from memory together, and not in turn."""
        n, seen, *state = state
        end = n + _GROUP
        *_, shard, _, _ = state = lax.fori_loop(n, jnp.minimum(end, number), one, tuple(state))
        seen = lax.fori_loop(end, end + _GROUP, lambda n, x: x + row(shard, order[n] >> _BITS)[0, ::_LINE].sum(), seen)
        return end, seen, *state

    start = (jnp.int32(0), seen, *[jnp.int32(0)] * 3, shard, slot, table)
    _, seen, *_, shard, slot, table = lax.while_loop(lambda state: state[0] < number, group, start)
    unknown = jnp.full((1, table.shape[1]), jnp.nan, table.dtype)
    table = lax.fori_loop(0, jnp.where(good, 0, table.shape[0]), lambda i, table: set_row(table, i, unknown), table)
    return shard, slot, table, total, entered, seen


@partial(jax.jit, donate_argnames="spare", compiler_options=ALONE)
def _documents(alpha, tables, batch, bounds, tol, max_iter, spare, hashed=None):
    """The sums of a share of the documents, into the memory of ``spare``; and what the reader wants to know.

    ``hashed`` are empty buckets and those of the words, where a sketch of the sums is wanted.
    """
    nothing = jnp.zeros_like(alpha), jnp.zeros((), jnp.int32), jnp.zeros((), alpha.dtype)
    sums, *found = _fit((spare, *nothing), alpha, tables, batch, bounds, tol, max_iter)
    sketch = None
    if hashed is not None:
        empty, bucket = hashed
        sketch = adaptive.fill(empty, sums, bucket)[:, : alpha.shape[0]].ravel()
    return sums, *found, sketch


def _compile(program, share, width, options, hashed):
    """Have the program for the documents of a minibatch, by a call for none of them."""
    (threads, room), dtype = share.words.shape, options[0].dtype
    tables, none = (_zeros((room, width), dtype),) * threads, (share.bounds[0], share.bounds[0])
    program(tables, share.batch, none, *options, _zeros((threads * room, width), dtype), hashed)


@whole
def _fit(_, alpha, tables, batch, bounds, tol, max_iter):
    sums, total, info = lda.fit_documents(alpha, tables, batch, tol, max_iter, *bounds)
    return sums, total, info.iterations.sum(dtype=jnp.int32), info.change


def _num_topics(shard):
    return (shard.shape[1] - _STAMP) // 3


def _split_row(rows):
    """λ, Σ, δ [n, K] and the stamps [n, 4]."""
    num_topics = _num_topics(rows)
    columns = itertools.pairwise((0, num_topics, 2 * num_topics, 3 * num_topics, rows.shape[1]))
    return tuple(rows[:, a:b] for a, b in columns)


def _put(shard, w, new):
    """Write a row, given in parts; these have to be computed before (a barrier), as they are read from the row."""
    columns = itertools.accumulate((part.shape[1] for part in new[:-1]), initial=0)
    for part, column in zip(new, columns, strict=True):
        shard = lax.dynamic_update_slice(shard, part, (w, jnp.int32(column)))
    return shard


def _factors(stamps, clock, numpy=jnp):
    """P, 1 − P and Q [n, 1] that bring rows from their stamps to a clock."""
    a, a_rest, c, c_rest = (stamps[:, j, None] for j in range(_STAMP))
    # P = exp(A_j − A_i),   Q = C_j − P C_i = (C_j − C_i) + (1 − P) C_i
    log_P = (clock[0] - a) + (clock[1] - a_rest)
    lost = -numpy.expm1(log_P)
    return numpy.exp(log_P), lost, ((clock[2] - c) + (clock[3] - c_rest)) + lost * c


def _bring(rows, clock, eta, numpy=jnp):
    """λ [n, K] of rows at a clock."""
    lam, total, _, stamps = _split_row(rows)
    P, lost, Q = _factors(stamps, clock, numpy)
    # λ ← P λ + (1 − P) η + Q Σ, where rounding may have left a sum of nothing below 0
    return P * lam + lost * eta + Q * numpy.maximum(total, 0)


def _add(total, residue, values):
    """Σ and δ with the values added: the error of every addition is carried along."""
    high = total + values
    back = high - total
    low = ((total - (high - back)) + (values - back)) + residue
    total = high + low
    return total, low - (total - high)


def _eta(eta, w):
    return eta if eta.shape[0] == 1 else row(eta, w)


def _store(values, dtype):
    """Values [n, K] ≥ 0 as a slot keeps them.

    As uint8 a value is a float of 5 bits of exponent and 3 of mantissa, relative to the row: within a tenth of what it
    was, 2 % on average, and down to 2^−31 of the largest. The sum of the row is kept, by its scale.
    """
    if dtype != jnp.uint8:
        return (values.astype(dtype),)
    values = values.astype(jnp.float32)
    largest = jnp.maximum(values.max(1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    bits = lax.bitcast_convert_type(values / largest, jnp.int32)
    codes = jnp.clip(((bits + (1 << 19)) >> 20) - _CODE_BIAS, 0, 255).astype(jnp.uint8)
    scale = values.sum(1) / jnp.maximum(_decode(codes).sum(1), jnp.finfo(jnp.float32).tiny)
    # Of 20 bits, so that its product with a code is exact: what is subtracted is then what was added, even where XLA
    # multiplies and adds in one operation.
    return codes, lax.reduce_precision(scale, 8, 19)


def _empty_slot(room, num_topics, dtype):
    codes = _zeros((room, num_topics), dtype)
    return (codes, _zeros(room, jnp.float32)) if dtype == jnp.uint8 else (codes,)


def _load(slot, i, dtype):
    """Values [1, K] of row i of a slot."""
    return _decoded([row(each, i) for each in slot], dtype)


def _decoded(slot, dtype):
    """Values [n, K] of rows as :func:`_store` keeps them; of NumPy's arrays as well."""
    values = _decode(slot[0]) * slot[1][:, None] if slot[0].dtype == jnp.uint8 else slot[0]
    return values.astype(dtype)


def _decode(codes):
    bits = (codes.astype(np.int32) + _CODE_BIAS) << 20
    return bits.view(np.float32) * (codes > 0)


@jax.jit
def _coarse(values):
    """Values [n, K] as a slot of bytes gives them back."""
    return _decoded(_store(values, jnp.uint8), values.dtype)
