"""LDA by smoothed SVI on the rows that a minibatch uses: a step costs O(words in the minibatch), not O(V).

Every step moves λ of every word. But while no minibatch with word w enters the window or leaves it, the sum Σ_w of its
statistics stays as it is, and many steps are one, in closed form:

    λ_w ← P λ_w + (1 − P) η_w + Q Σ_w                from step i to step j
    P = Π (1 − ρ_t) = exp(A_j − A_i)                 A_t+1 = A_t + log(1 − ρ_t)
    Q = C_j − P C_i                                  C_t+1 = (1 − ρ_t) C_t + ρ_t / n_t

So a row is touched when its word is in the minibatch, and when a minibatch that had it leaves the window; the slots of
the window hold these rows only. The sums over words T_k = Σ_w λ_wk that β̃ needs follow without any of the rows: they
are a row themselves, with Σ_w η_w for a prior and the sum of all statistics for a sum.

| letter  | name          | shape     | meaning                                                                     |
|---------|---------------|-----------|-----------------------------------------------------------------------------|
| S       |               |           | threads; word w is row w // S of shard w mod S, and each thread has a shard |
| λ, Σ, δ | ``shards``    | [V/S,3,K] | topics, sum over the window, what its rounding left out (TwoSum)            |
| T       | ``totals``    | [1,3,K]   | the sums of these over all words, in every thread (of statistics before a   |
|         |               |           | slot of low precision rounds them)                                          |
| A, C    | ``stamps``    | [V/S,4]   | of the step to which a row was brought last, each as a sum of two floats;   |
|         |               |           | and ``clock``, of the step that comes next                                  |
| n       |               |           | what the sum is divided by: the number of values in the window, or L        |

A step is two programs a thread: the first works on the rows of a shard (what left the window, what came into it, β̃ of
the words that come), the second on a share of the documents. Threads are Python's: a program of XLA left to its own
threads hands out pieces of a microsecond, and is slower on two cores than on one.

With L = 1 this is SVI with the lazy updates of Vowpal Wabbit; with any L that does not grow it equals
:func:`smoothgrad_jax.global_step`.
"""

import itertools
import math
import os
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from smoothgrad_jax import adaptive, lda
from smoothgrad_jax.adaptive import Adaptive
from smoothgrad_jax.documents import Batch, Group
from smoothgrad_jax.window import Warmup

_MOST_THREADS = 8
_BLOCK = 64  # rows at a time: what is computed from them stays in the first cache
_NOWHERE = 1 << 30  # a row beyond every shard: reading there is clipped, writing is dropped
_CODE_BIAS = (127 << 3) - 255  # the code 255 is 1.0: exponent 127 and mantissa 0, in the 11 upper bits of a float
ALONE = {"xla_disable_hlo_passes": "cpu-parallel-task-assigner"}  # a program stays on the thread that runs it


class Share(NamedTuple):
    """A minibatch dealt out to S threads; made by :func:`share`.

    Attributes:
      words: [S, U] row in its shard of each word of the minibatch, increasing; beyond the last a row that no shard has.
      num_used: [S], how many there are.
      batches: S batches with the words as positions in [S · U], each with its share of the documents in the groups.
      size: B.
      hashed: Bucket of each word [S · U], where the window is adaptive.
    """

    words: np.ndarray
    num_used: np.ndarray
    batches: tuple[Batch, ...]
    size: int
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
      words, num_used: As in :class:`Share`.
      values: For each shard its rows, as :func:`_store` keeps them.
      total: Their sum over words [K].
    """

    words: np.ndarray
    num_used: np.ndarray
    values: tuple[Any, ...]
    total: jax.Array


class Pending(NamedTuple):
    """The statistics of the last step as they come from the threads.

    Attributes:
      words, num_used: As in :class:`Share`.
      sums: For each thread, Σ_d n_dw φ_dwk over its documents [S · U, K padded].
      scale: D/B.
      totals: For each thread, the sum over words [K].
    """

    words: np.ndarray
    num_used: np.ndarray
    sums: tuple[jax.Array, ...]
    scale: float
    totals: tuple[jax.Array, ...]


class RowState(NamedTuple):
    """What the next step needs; the step uses it up. See the table of the module.

    Attributes:
      shards, stamps: As above.
      totals: For each thread, the totals and their stamp.
      last, clock: (A, C) of the last step and of the next one.
      step: Steps taken.
      count: Values in the window.
      slots: Those values that will leave, oldest first, without ``pending``; None for L = ∞.
      dtype: How slots are kept.
      leaving: Slots that left at the last step, still in the rows' sums.
      pending: The statistics of the last step, not yet in the rows' sums.
      rule: What finds the length of the window, if it is adaptive.
    """

    shards: tuple[jax.Array, ...]
    stamps: tuple[jax.Array, ...]
    totals: tuple[tuple[jax.Array, jax.Array], ...]
    last: tuple[float, float]
    clock: tuple[float, float]
    step: int
    count: int
    slots: deque | None
    dtype: Any
    leaving: tuple[Slot, ...]
    pending: Pending | None
    rule: adaptive.Delayed | None = None

    @property
    def num_words(self) -> int:
        """V."""
        return sum(len(each) for each in self.shards)

    @property
    def num_topics(self) -> int:
        """K."""
        return self.shards[0].shape[2]


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
    rows = np.stack([lam, np.zeros_like(lam), np.zeros_like(lam)], 1)
    return RowState(
        shards=tuple(jnp.array(rows[s::threads]) for s in range(threads)),
        stamps=tuple(jnp.zeros((len(rows[s::threads]), 4), lam.dtype) for s in range(threads)),
        totals=tuple(
            (jnp.array(rows.sum(0, dtype=np.float64)[None], lam.dtype), jnp.zeros((1, 4), lam.dtype))
            for _ in range(threads)
        ),
        last=(0.0, 0.0),
        clock=(0.0, 0.0),
        step=0,
        count=0,
        slots=None if infinite else deque(),
        dtype=jnp.dtype(dtype or lam.dtype),
        leaving=(),
        pending=None,
        rule=None if window is None else _rule(window, lam),
    )


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
    """Deal a minibatch out: rows by word, documents by group, so that every thread gets as many of each length.

    Args:
      batch: The minibatch.
      threads: S.
      buckets: Of every word [V], from :func:`smoothgrad_jax.adaptive.buckets`, for an adaptive window.
    """
    used = batch.vocabulary[: batch.num_used]
    mine = [np.flatnonzero(used % threads == s) for s in range(threads)]
    # A shard's part of the words varies a little around the mean.
    planned = len(batch.vocabulary) / threads + (3 * math.sqrt(len(batch.vocabulary)) / 2 if threads > 1 else 0)
    room = -int(-max(planned, 1, *map(len, mine)) // _BLOCK) * _BLOCK
    words = np.full((threads, room), _NOWHERE, np.int32)
    position = np.zeros(len(used) + 1, np.int32)  # one more, for the padding of a batch without words
    for s, each in enumerate(mine):
        words[s, : len(each)] = used[each] // threads
        position[each] = s * room + np.arange(len(each), dtype=np.int32)
    hashed = None
    if buckets is not None:
        hashed = np.zeros(threads * room, np.int32)  # beyond the last word there is nothing to add
        hashed[position[: len(used)]] = buckets[used]
    common = batch._replace(vocabulary=np.zeros(threads * room, np.int32), words=position[batch.words])

    # Each thread gets a stretch of every group; the odd documents go to another thread in the next group.
    first = np.array([group.first for group in batch.groups], np.int32)
    number = np.array([group.last for group in batch.groups], np.int32) - first
    shift = np.arange(len(first)) % threads
    bounds = [first + np.minimum((number * k + shift) // threads, number) for k in range(1, threads)]
    bounds = np.array([first, *bounds, first + number], np.int32)

    def documents(p):
        spans = (group.span for group in batch.groups)
        return common._replace(groups=tuple(map(Group, spans, bounds[p], bounds[p + 1])))

    num_used = np.array([len(each) for each in mine], np.int32)
    return Share(words, num_used, tuple(documents(p) for p in range(threads)), batch.size, hashed)


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
      pool: Where all threads but the caller's run.
      warmup: As in :func:`smoothgrad_jax.window.push`.
      tol, max_iter: As in :func:`smoothgrad_jax.local_step`.

    Returns:
      The next state and :class:`RowInfo`; both may still be under way, so that the next step can be prepared meanwhile.
    """
    threads, room = share.words.shape
    spare = state.pending.sums if state.pending and state.pending.words.shape == share.words.shape else None
    if spare is None:
        shape = (threads * room, lda.padded(state.num_topics))
        spare = tuple(jnp.zeros(shape, model.alpha.dtype) for _ in range(threads))
    tol = np.asarray(tol, model.alpha.dtype)
    rule, hashed = state.rule, None
    if rule is not None:
        # Before anything else is handed out: the next step's length is not to wait for this one.
        length, chosen = adaptive.take(rule, rho)
        num_buckets = chosen.before.shape[1] // state.num_topics
        hashed = (np.zeros((2 * num_buckets, lda.padded(state.num_topics)), tol.dtype), share.hashed)

    def fit(p, tables):
        return _documents(model.alpha, tables, share.batches[p], tol, max_iter, spare[p], hashed)

    state, fitted = _touch(state, model, share, pool, fit)
    leaving = []
    while state.slots is not None and state.count + 1 - len(leaving) > length:
        leaving.append(state.slots.popleft())
    count = state.count + 1 - len(leaving)
    n = length if warmup == "zeros" and state.slots is not None else count
    sums, *found, sketches = zip(*fitted, strict=True)
    decay, gain = state.clock
    scale = model.num_docs / share.size
    info = RowInfo(state.step, state.clock, length, scale, tuple(zip(*found, strict=True)))
    return state._replace(
        last=state.clock,
        # exp(−1e5) is 0, and unlike −∞ it leaves room for the logarithms to come
        clock=(decay + (math.log1p(-rho) if rho < 1 else -1e5), (1 - rho) * gain + rho / n),
        step=state.step + 1,
        count=count,
        leaving=tuple(leaving),
        pending=Pending(share.words, share.num_used, sums, scale, found[0]),
        rule=None if rule is None else adaptive.Delayed(chosen, sketches, scale),
    ), info


def before(state: RowState, info: RowInfo, model: Model) -> RowState:
    """The state before a step whose statistics were not finite, with an empty window."""
    lam = params(state._replace(clock=info.clock, pending=None, leaving=()), model)
    fresh = init(lam, len(state.shards), infinite=state.slots is None, dtype=state.dtype)
    return fresh._replace(step=info.step, rule=None if state.rule is None else adaptive.restart(state.rule))


def settle(state: RowState, model: Model, pool: ThreadPoolExecutor | None = None) -> RowState:
    """Put into the rows' sums what still waits, without a step. The state is used up."""
    if state.pending is None:  # then nothing is leaving either
        return state
    words = state.pending.words  # any of this shape will do, and the program is there already
    nothing = Share(words, np.zeros(len(words), np.int32), (), 0)
    return _touch(state, model, nothing, pool)[0]


def params(state: RowState, model: Model, pool: ThreadPoolExecutor | None = None) -> np.ndarray:
    """λ [V, K] after the last step; the state stays as it is.

    Allocates a copy of the shards if something is pending: to look at a run must not change it.
    """
    if state.pending is not None:
        copied = (tuple(map(_copy, each)) for each in (state.shards, state.stamps))
        leaving = (
            slot._replace(values=tuple(tuple(map(_copy, each)) for each in slot.values)) for slot in state.leaving
        )
        shards, stamps = copied
        # The slots that stay are not needed, and the new one goes into a window of its own.
        alone = state._replace(shards=shards, stamps=stamps, leaving=tuple(leaving), slots=deque())
        state = settle(alone, model, pool)
    threads = len(state.shards)
    out = np.empty((state.num_words, state.num_topics), state.shards[0].dtype)
    for s, (shard, stamps) in enumerate(zip(state.shards, state.stamps, strict=True)):
        out[s::threads] = _whole(shard, stamps, _split(state.clock, out.dtype), model.eta[s])
    return out


def export(state: RowState) -> tuple[dict[str, list[np.ndarray]], dict[str, Any]]:
    """The state as arrays and as facts that JSON can hold; it stays as it is, pending statistics and all.

    Nothing is copied on a CPU: the arrays are views. While one is held, the step that would write there copies first.

    Returns:
      ``(arrays, facts)``: each array in pieces, to be joined along the first axis; names without pieces are left out.
    """
    kept = (*state.leaving, *(state.slots or ()))
    pending = state.pending
    values = [each for slot in kept for each in slot.values]
    arrays = {
        "shards": state.shards,  # [V, 3, K], shard after shard
        "stamps": state.stamps,  # [V, 4]
        "totals": [total for total, _ in state.totals],  # [S, 3, K]
        "total_stamps": [stamp for _, stamp in state.totals],  # [S, 4]
        "slot_words": [slot.words.ravel() for slot in kept],  # [Σ S U]
        "slot_used": [slot.num_used for slot in kept],  # [slots · S]
        "slot_values": [each[0] for each in values],  # [Σ S U, K]
        "slot_scales": [each[1] for each in values if len(each) > 1],  # [Σ S U]
        "slot_totals": [np.asarray(slot.total)[None] for slot in kept],  # [slots, K]
        "pending_words": [pending.words.ravel()] if pending else [],  # [S U]
        "pending_used": [pending.num_used] if pending else [],  # [S]
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
        return [_copy(arrays[name][a:b]) for a, b in itertools.pairwise(ends)]

    def words(name, rooms):
        ends = np.cumsum([0, *rooms]) * threads
        return [np.array(arrays[name][a:b]).reshape(threads, -1) for a, b in itertools.pairwise(ends.tolist())]

    lengths = [len(range(s, facts["num_words"], threads)) for s in range(threads)]
    rooms, slots = facts["rooms"], []
    if rooms:
        each = [room for room in rooms for _ in range(threads)]
        values = [(value,) for value in cut("slot_values", each)]
        if "slot_scales" in arrays:
            values = [(*value, scale) for value, scale in zip(values, cut("slot_scales", each), strict=True)]
        used = np.array(arrays["slot_used"]).reshape(-1, threads)
        values = [tuple(values[i * threads : (i + 1) * threads]) for i in range(len(rooms))]
        slots = list(map(Slot, words("slot_words", rooms), used, values, map(_copy, arrays["slot_totals"])))
    pending, room = None, facts["pending_room"]
    if room is not None:
        pending = Pending(
            words=words("pending_words", [room])[0],
            num_used=np.array(arrays["pending_used"]),
            sums=tuple(cut("pending_sums", [threads * room] * threads)),
            scale=facts["pending_scale"],
            totals=tuple(map(_copy, arrays["pending_totals"])),
        )
    leaving = facts["num_leaving"]
    return RowState(
        shards=tuple(cut("shards", lengths)),
        stamps=tuple(cut("stamps", lengths)),
        totals=tuple(zip(cut("totals", [1] * threads), cut("total_stamps", [1] * threads), strict=True)),
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


def _copy(array):
    return jnp.array(np.asarray(array))  # jnp.array copies what numpy owns, without a program


@jax.jit
def _whole(shard, stamps, clock, eta):
    return _bring(shard, *_factors(stamps, clock), eta)


def catch_up(state: RowState, model: Model) -> RowState:
    """Bring every row up to date, in O(V): from here another η may hold. Of a settled state, which is used up."""
    clock = _split(state.clock, state.shards[0].dtype)
    brought = [_catch_up(*each, clock, eta) for *each, eta in zip(state.shards, state.stamps, model.eta, strict=True)]
    totals = tuple(_catch_up(*each, clock, model.eta_total) for each in state.totals)
    shards, stamps = zip(*brought, strict=True)
    return state._replace(shards=shards, stamps=stamps, totals=totals)


@partial(jax.jit, donate_argnames=("shard", "stamps"))
def _catch_up(shard, stamps, clock, eta):
    lam = _bring(shard, *_factors(stamps, clock), eta)
    return shard.at[:, 0].set(lam), jnp.broadcast_to(clock, stamps.shape)


def num_cores() -> int:
    """How many threads are worth having: the cores of this process, up to 8; one where XLA works on another device."""
    if jax.default_backend() != "cpu":
        return 1
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(available, _MOST_THREADS)


def submit(pool: ThreadPoolExecutor, function: Callable, *args: Any) -> Future:
    """``pool.submit``, in the float64 mode of the caller: jax keeps that for each thread."""

    def call(x64):
        with jax.enable_x64(x64):
            return function(*args)

    return pool.submit(call, jax.config.jax_enable_x64)


def _touch(state, model, share, pool, then=None):
    """The rows that changed at the last step, then those of the new minibatch, for which there are β̃ [U, K] a shard.

    ``then(s, tables)`` is called in every thread as soon as the tables of all are under way; what it returns comes back
    with the state, and may be under way itself.
    """
    threads, dtype, num_topics = len(state.shards), state.shards[0].dtype, state.num_topics
    none = np.zeros(threads, np.int32)
    pending = state.pending or _no_statistics(share, num_topics, dtype)
    room = pending.words.shape[1]
    clock = _split(state.clock, dtype)
    last_clock = _split(state.last, dtype) if state.pending else clock
    # One slot that leaves goes with the rest, and its memory becomes that of the slot that comes; others go before.
    earlier = list(state.leaving)
    last = earlier.pop() if earlier and earlier[-1].words.shape[1] == room else None
    if last is None:
        empty = tuple(_empty_slot(room, num_topics, state.dtype) for _ in range(threads))
        last = Slot(pending.words, none, empty, jnp.zeros(num_topics, dtype))
    left = sum((slot.total for slot in earlier), last.total)
    scale = np.asarray(pending.scale, dtype)
    touched = [Future() for _ in range(threads)]

    def work(s):
        try:
            shard, stamps, eta = state.shards[s], state.stamps[s], model.eta[s]
            for slot in earlier:
                leave = (slot.words[s], slot.num_used[s], last_clock)
                shard, stamps = _leave(shard, stamps, slot.values[s], leave, eta)
            leave = (last.words[s], last.num_used[s], last_clock)
            enter = (pending.words[s], pending.num_used[s], pending.sums, np.int32(s * room // _BLOCK), scale)
            use = (share.words[s], share.num_used[s], clock)
            totals = (*state.totals[s], left, pending.totals, model.eta_total)
            touched[s].set_result(_rows(shard, stamps, last.values[s], totals, leave, enter, use, eta))
        except BaseException as error:
            touched[s].set_exception(error)  # the other threads wait for it
            raise
        tables = tuple(each.result()[-1] for each in touched)
        return then(s, tables) if then else tables[s]

    others = [submit(pool, work, s) for s in range(1, threads)]
    results = [work(0), *(other.result() for other in others)]
    shards, stamps, values, totals, entered, _ = zip(*(each.result() for each in touched), strict=True)
    if state.pending and state.slots is not None:
        state.slots.append(Slot(pending.words, pending.num_used, values, entered[0]))
    return state._replace(shards=shards, stamps=stamps, totals=totals, leaving=(), pending=None), results


def _no_statistics(share, num_topics, dtype):
    """What is pending before the first step, and after the state was settled."""
    threads, room = share.words.shape
    sums = jnp.zeros((threads * room, lda.padded(num_topics)), dtype)
    total = jnp.zeros(num_topics, dtype)
    return Pending(share.words, np.zeros(threads, np.int32), (sums,) * threads, 0.0, (total,) * threads)


def _split(clock, dtype):
    """(A, C) as A = a + a′ and C = c + c′ in floats: what the first leaves out, the second has."""
    high = np.array(clock, dtype)
    low = (np.array(clock) - high).astype(dtype)
    return np.array([high[0], low[0], high[1], low[1]], dtype)


def _leave_rows(shard, stamps, slot, leave, eta):
    """Take the values of a slot out of the sums."""
    words, num_used, clock = leave

    def block(i, carry):
        shard, stamps = carry
        rows, ids = _get(shard, words, i)
        old, places = _get(stamps, words, i)
        lam = _bring(rows, *_factors(old, clock), _eta(eta, ids))
        values = _load(tuple(_block(each, i) for each in slot), shard.dtype)
        return _set(shard, ids, lam, *_add(rows, -values)), _stamp(stamps, places, clock)

    return lax.fori_loop(0, _num_blocks(num_used), block, (shard, stamps))


_leave = jax.jit(_leave_rows, donate_argnames=("shard", "stamps"), compiler_options=ALONE)


@partial(jax.jit, donate_argnames=("shard", "stamps", "slot"), compiler_options=ALONE)
def _rows(shard, stamps, slot, totals, leave, enter, use, eta):
    """What left the window goes, what entered it comes, and the rows of the next minibatch are brought up to date.

    Where the statistics that enter are not finite, nothing is touched, and the table is 0.
    """
    total, stamp, left, entered, eta_total = totals
    entered = enter[4] * sum(entered)
    good = jnp.isfinite(entered).all()
    leave, enter, use = ((words, jnp.where(good, num, 0), *rest) for words, num, *rest in (leave, enter, use))
    # The totals are a row like the others.
    old, last_clock, clock = total, leave[2], use[2]
    lam = _bring(total, *_factors(stamp, last_clock), eta_total)
    total = jnp.stack([lam, *_add(total, -left[None])], 1)
    total = jnp.stack([lam, *_add(total, entered[None])], 1)
    lam = _bring(total, *_factors(last_clock[None], clock), eta_total)
    total = jnp.where(good, total.at[:, 0].set(lam), old)
    stamp = jnp.where(good, clock[None], stamp)

    # The barrier: the slot is read to the end before the new one is written over it.
    shard, stamps, slot = lax.optimization_barrier((*_leave_rows(shard, stamps, slot, leave, eta), slot))

    words, num_used, sums, first, scale = enter
    num_topics = shard.shape[2]

    def come(i, carry):
        shard, slot = carry
        rows, ids = _get(shard, words, i)
        # Ŝ_w = (D/B) Σ_d n_dw φ_dw
        values = scale * sum(_block(each, i + first)[:, :num_topics] for each in sums)
        stored, values = _store(values, slot[0].dtype)
        slot = jax.tree.map(lambda x, y: lax.dynamic_update_slice_in_dim(x, y, i * _BLOCK, 0), slot, stored)
        return _set(shard, ids, rows[:, 0], *_add(rows, values)), slot

    shard, slot = lax.fori_loop(0, _num_blocks(num_used), come, (shard, slot))

    words, num_used, clock = use

    def bring(i, carry):
        shard, stamps, table = carry
        rows, ids = _get(shard, words, i)
        old, places = _get(stamps, words, i)
        lam = lax.optimization_barrier(_bring(rows, *_factors(old, clock), _eta(eta, ids)))
        table = lax.dynamic_update_slice_in_dim(table, lda.scaled_topics(lam, total[:, 0])[0], i * _BLOCK, 0)
        return shard.at[ids, 0].set(lam, mode="drop"), _stamp(stamps, places, clock), table

    table = jnp.zeros((words.shape[0], lda.padded(num_topics)), shard.dtype)
    shard, stamps, table = lax.fori_loop(0, _num_blocks(num_used), bring, (shard, stamps, table))
    return shard, stamps, slot, (total, stamp), entered, table


@partial(jax.jit, donate_argnames="spare", keep_unused=True, compiler_options=ALONE)
def _documents(alpha, tables, batch, tol, max_iter, spare, hashed=None):
    """The sums of a share of the documents, into the memory of ``spare``; and what the reader wants to know.

    ``hashed`` are empty buckets and those of the words, where a sketch of the sums is wanted.
    """
    table = tables[0] if len(tables) == 1 else jnp.concatenate(tables)
    sums, info = lda.fit_documents(alpha, table, batch, tol, max_iter)
    sketch = None
    if hashed is not None:
        empty, bucket = hashed
        sketch = adaptive.fill(empty, sums, bucket)[:, : alpha.shape[0]].ravel()
    return sums, sums.sum(0)[: alpha.shape[0]], info.iterations.sum(), info.change, sketch


def _get(array, words, i):
    """Some rows and their numbers; beyond the last word it is the last row, not to be written back."""
    ids = _block(words, i)
    # The barrier keeps the reading in one place, and before any writing that uses these numbers: without it every use
    # reads again, and the array is copied first.
    return lax.optimization_barrier((array.at[ids].get(mode="clip"), ids))


def _set(shard, ids, lam, total, residue):
    return shard.at[ids].set(jnp.stack([lam, total, residue], 1), mode="drop")


def _stamp(stamps, ids, clock):
    return stamps.at[ids].set(jnp.broadcast_to(clock, (len(ids), 4)), mode="drop")


def _factors(stamps, clock):
    """P, 1 − P and Q [n, 1] that bring rows from their stamps to a clock."""
    a, a_rest, c, c_rest = (stamps[:, j, None] for j in range(4))
    # P = exp(A_j − A_i),   Q = C_j − P C_i = (C_j − C_i) + (1 − P) C_i
    log_P = (clock[0] - a) + (clock[1] - a_rest)
    lost = -jnp.expm1(log_P)
    return jnp.exp(log_P), lost, ((clock[2] - c) + (clock[3] - c_rest)) + lost * c


def _bring(rows, P, lost, Q, eta):
    # λ ← P λ + (1 − P) η + Q Σ, where rounding may have left a sum of nothing below 0
    return P * rows[:, 0] + lost * eta + Q * jnp.maximum(rows[:, 1], 0)


def _add(rows, values):
    """Σ and δ with the values added: the error of every addition is carried along."""
    total, residue = rows[:, 1], rows[:, 2]
    high = total + values
    back = high - total
    low = ((total - (high - back)) + (values - back)) + residue
    total = high + low
    return total, low - (total - high)


def _eta(eta, ids):
    return eta if eta.shape[0] == 1 else eta.at[ids].get(mode="clip")


def _block(x, i):
    return lax.dynamic_slice_in_dim(x, i * _BLOCK, _BLOCK)


def _num_blocks(num_used):
    return (num_used + _BLOCK - 1) // _BLOCK


def _store(values, dtype):
    """Values [n, K] ≥ 0 as a slot keeps them, and as they come out again: what is added is what will be subtracted.

    As uint8 a value is a float of 5 bits of exponent and 3 of mantissa, relative to the row: within a tenth of what it
    was, 2 % on average, and down to 2^−31 of the largest. The sum of the row is kept, by its scale.
    """
    if dtype != jnp.uint8:
        stored = values.astype(dtype)
        return (stored,), stored.astype(values.dtype)
    values = values.astype(jnp.float32)
    largest = jnp.maximum(values.max(1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    bits = lax.bitcast_convert_type(values / largest, jnp.int32)
    codes = jnp.clip(((bits + (1 << 19)) >> 20) - _CODE_BIAS, 0, 255).astype(jnp.uint8)
    share = _decode(codes)
    scale = values.sum(1) / jnp.maximum(share.sum(1), jnp.finfo(jnp.float32).tiny)
    return (codes, scale), share * scale[:, None]


def _empty_slot(room, num_topics, dtype):
    codes = jnp.zeros((room, num_topics), dtype)
    return (codes, jnp.zeros(room, jnp.float32)) if dtype == jnp.uint8 else (codes,)


def _load(slot, dtype):
    values = _decode(slot[0]) * slot[1][:, None] if slot[0].dtype == jnp.uint8 else slot[0]
    return values.astype(dtype)


def _decode(codes):
    bits = (codes.astype(jnp.int32) + _CODE_BIAS) << 20
    return jnp.where(codes > 0, lax.bitcast_convert_type(bits, jnp.float32), 0)
