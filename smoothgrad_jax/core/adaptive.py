"""A window that finds its length: as long as the noise asks for, as short as the drift allows.

The mean of the last L statistics has the noise of one minibatch divided by L, and a bias, as S has moved on since the
old ones were computed. But λ is a moving average itself: of the noise σ² in Ŝ it takes σ² ρ/(2 − ρ) without any window,
and with ρ L ≪ 1 hardly less with one. What counts is the noise that reaches λ. Which L is best follows from the
statistics themselves, without a look at the whole data:

    L = argmin  bias²(L) + σ² v_ρ(L)                  over L = 1, 2, 4, … longest
    v_ρ(L)   = Σ squared weights of the minibatches in λ, by the last L and then by ρ: ρ/(2 − ρ) for L = 1, and 1/L for
               ρ = 1, where L makes the error of the gradient small

Cut the steps into blocks of l, and let a and b be the means of two neighbours (half of ‖a − b‖² is Allan's variance):

    V_l      = mean of ½ ‖a − b‖²                      = σ²/l + ½ ‖drift from block to block‖²
    σ²       = mean of ⅙ ‖z_i − 2 z_i−1 + z_i−2‖²      in which a steady drift cancels; in V_1 it does not
    D_l      = ½ (V_l − σ²/l), not below 0             = ‖E[z^2l − z^l]‖², where z^l is the mean of the last l
    bias²(L) = ((2l − 1)/l)² D_l                       with 2l = L; bias²(1) = 0

The last line holds for a steady drift d, where bias(L) = d (L − 1)/2 and D_l = (d l/2)². Under a random walk, the other
way in which S can move, it is within 4 % for every l. A longer window is not less biased, and the long blocks are those
that see a drift clearly: bias²(L) is lowered to the smallest of those from L on.

| letter | name         | meaning                                                                                  |
|--------|--------------|------------------------------------------------------------------------------------------|
| z_i    | ``sketched`` | sketch of the statistics Ŝ_i: few numbers, with the squared distances of the many, see   |
|        |              | :func:`sketch`                                                                           |
| L      | ``length``   | the window                                                                               |
| C      | ``longest``  | the longest one; J = log₂ C, and the blocks have l = 1, 2, … C/2 steps                   |
| M      |              | size of a sketch                                                                         |
| t      | ``index``    | sketches so far                                                                          |
| σ²     | ``noise``    | squared noise of one sketch                                                              |
| v_ρ    |              | share of it that is left in λ                                                            |
| V_l    | ``spread``   | half the squared distance of the means a, b of neighbouring blocks of l steps, [J]       |
| D_l    |              | squared distance by which z^2l lags behind z^l; the D of D/B are documents               |
| m      | ``memory``   | steps over which the means of both reach                                                 |

How sure is it? With ν directions in which a minibatch is noisy (70 to 700 on abstracts, B = 300), ½ ‖a − b‖² is σ²/l
within √(2/ν), and m/l blocks are averaged: m = 2 C leaves four of the longest. The error of bias²(C) is then about
4 √(2/(4 ν)) σ²/C, at most a third of what the last doubling gains. All means reach over the same m steps, as σ² changes
along a run and its change must not be taken for drift.

That is for ρ = 1. With ρ C ≲ 1 a window gains less than this error; where a drift cannot be told from it the choice is
a short window, and all lengths leave λ nearly the same noise. The lag of λ itself, about drift/ρ, is not in the rule,
nor its product with that of the window.

The first 128 steps (C, if that is less) go by with L = 8. In them λ leaves its random start, which is all drift and no
guide for what follows; and a window is worth most there, for a reason of its own (``experiments/mechanism.py``).

What it scores beside L = 1, 10 and 100 stands in ``experiments/README.md``, from ``experiments/beyond.py``. The error
of the gradient (ρ = 1) would be the wrong thing to make small: at ρ = 0.001 that rule chose L = 128 and lost 0.07 to
0.11 nats a word to all three (1,000 steps on 99,000 abstracts, one seed).

Only J sums of M numbers are kept, twice, and no ring: a push costs O(J M), and no sum is ever older than C steps.

Reference: Allan, *Statistics of atomic frequency standards*, Proceedings of the IEEE 54, 1966; Charikar, Chen and
Farach-Colton, *Finding frequent items in data streams*, 2002, for the sketch.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from smoothgrad_jax.core._xla import ALONE

_BUCKETS = 64  # squared distances are kept within √(2/64) along one direction of a column, and there are K columns
_START, _PATIENCE = 8, 128  # the window before anything is known, and the steps until then
_RELUCTANCE = 0.1  # what another length must gain: the cost is flat around its minimum, and a window refills slowly


class Adaptive(NamedTuple):
    """A window that finds its length, for ``fit(window=Adaptive())``.

    Attributes:
      longest: C, the longest window, a power of two: the memory that the run may take.
      memory: m, steps over which noise and drift are measured, from ``longest`` on; by default twice that. Fewer follow
        a change sooner, and the choice is more restless.
    """

    longest: int = 128
    memory: int | None = None


class AdaptiveState(NamedTuple):
    """What was measured so far.

    Attributes:
      sums: [J, M], of each level the sum of the block that is not complete.
      blocks: [J, M], the sum of the last complete block.
      before: [2, M], the last two sketches, the newer one first.
      index: t, int32.
      noise: σ².
      spread: V_l [J].
      memory: m.
      length: L for the steps to come, int32.
    """

    sums: jax.Array
    blocks: jax.Array
    before: jax.Array
    index: jax.Array
    noise: jax.Array
    spread: jax.Array
    memory: jax.Array
    length: jax.Array


class Delayed(NamedTuple):
    """The rule of a run that works ahead: the last sketch waits while the length without it is used.

    Attributes:
      state: The rule, with all sketches but the last.
      waiting: Parts of the last sketch, which is ``scale`` times their sum; none before the first step.
      scale: D/B.
    """

    state: AdaptiveState
    waiting: tuple[jax.Array, ...]
    scale: float


def init(spec: Adaptive, template: Any) -> AdaptiveState:
    """Nothing is known yet: L = 8, or C if that is less. Allocates 2 log₂ C + 2 sketches.

    Args:
      spec: The longest window and the memory.
      template: A sketch, of the parameters say, or its ``ShapeDtypeStruct``: what is used is shape and dtype.
    """
    longest, memory = check(spec)
    (size,), dtype = template.shape, template.dtype
    levels = jnp.zeros((longest.bit_length() - 1, size), dtype)
    return AdaptiveState(
        sums=levels,
        blocks=jnp.zeros_like(levels),
        before=jnp.zeros((2, size), dtype),
        index=jnp.zeros((), jnp.int32),
        noise=jnp.zeros((), dtype),
        spread=jnp.zeros(len(levels), dtype),
        memory=jnp.asarray(memory, dtype),
        length=jnp.full((), min(longest, _START), jnp.int32),
    )


def check(spec: Adaptive) -> Adaptive:
    """The same with its memory filled in, if it can be served."""
    longest, memory = spec
    if not isinstance(longest, int | np.integer) or longest < 1 or longest & (longest - 1):
        raise ValueError(f"longest must be a power of two, as the lengths tried are 1, 2, 4, …; got {longest}")
    memory = 2 * longest if memory is None else memory
    if not isinstance(memory, int | np.integer) or memory < longest:
        raise ValueError(f"memory must be a whole number of steps, at least the longest window {longest}; got {memory}")
    return Adaptive(int(longest), int(memory))


def spec_of(state: AdaptiveState) -> Adaptive:
    """What the state was made for; the longest window is read off its shape."""
    return Adaptive(2 ** len(state.spread), int(state.memory))


def sketch(stats: Any) -> jax.Array:
    """Statistics as a short vector z [M], such that ‖z − z′‖² is that of the statistics on average over hashes.

    The longest axis of every array, say of V words, goes into 64 buckets. With a bucket h and a sign s for each word,
    fixed for all time,

        z[h, k] = Σ_{w in h} s_w S_wk

    An axis of 64 or fewer is left as it is, and so is a number; what has only such axes is kept exactly.

    Args:
      stats: A pytree of arrays of any rank.
    """
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(stats)]
    if not leaves:
        raise ValueError("there are no statistics to look at: the pytree is empty")
    dtype = jnp.result_type(jnp.float32, *leaves)
    parts = [_sketch_leaf(leaf.astype(dtype), number) for number, leaf in enumerate(leaves)]
    return jnp.concatenate(parts)


def buckets(num_rows: int, leaf: int = 0) -> tuple[np.ndarray, int]:
    """Bucket of every row of an array, from a hash of its number, and how many there are, H.

    A row with the sign −1 has its bucket H later: buckets 0 … 2H − 1 are filled without a sign, and then subtracted
    from each other, as in :func:`fill`.

    Args:
      num_rows: How many rows.
      leaf: The number of the array among the leaves: each has a hash of its own.
    """
    if num_rows <= _BUCKETS:
        return np.arange(num_rows, dtype=np.int32), num_rows
    # The finaliser of MurmurHash3: every bit of the number reaches every bit of the hash.
    x = np.arange(num_rows, dtype=np.uint32) + np.uint32((leaf * 0x9E3779B1 + 0x7F4A7C15) & 0xFFFFFFFF)
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    x = x ^ (x >> 16)
    return (x % (2 * _BUCKETS)).astype(np.int32), _BUCKETS


def fill(empty: jax.Array, rows: jax.Array, bucket: Any) -> jax.Array:
    """z[h, k] = Σ_{w in h} s_w S_wk for rows S and their buckets; ``empty`` are 2H rows of zeros."""
    plus, minus = jnp.split(empty.at[bucket].add(rows), 2)
    return plus - minus


def push(state: AdaptiveState, sketched: jax.Array, rho: Any = 1.0) -> tuple[jax.Array, AdaptiveState]:
    """Take the sketch of a step; return the length that is best now, and the new state.

    The first choice is that of sketch 128, or C if that is less. Only lengths up to the number of sketches are tried,
    and another one than before must be better by a tenth: the cost is flat around its minimum, and a window that went
    back and forth would forget what it has to collect again.

    Args:
      state: From :func:`init`.
      sketched: z, of :func:`sketch`.
      rho: ρ of the step that uses the length.

    Returns:
      ``(L, state)``; L is an int32 scalar, 1 … longest. With ρ = 1 it makes the error of the gradient small.

    With any model, and under ``jit`` or ``scan``:

    >>> from smoothgrad_jax import adaptive, global_step, init
    >>> def step(carry, stats):
    ...     state, rule = carry
    ...     length, rule = adaptive.push(rule, adaptive.sketch(stats), rho=0.5)
    ...     return (global_step(state, stats, 1.0, 0.5, length), rule), length
    >>> stats = jax.random.poisson(jax.random.key(0), 20.0, (100, 3)).astype(float)
    >>> start = init(jnp.ones(3), 16), adaptive.init(adaptive.Adaptive(16), adaptive.sketch(jnp.ones(3)))
    >>> (state, rule), lengths = jax.lax.scan(step, start, stats)
    >>> print(lengths[0], lengths[-1])
    8 16
    """
    if sketched.shape != state.before.shape[1:]:
        raise ValueError(f"the rule was made for sketches {state.before.shape[1:]}, got {sketched.shape}")
    z, dtype = sketched.astype(state.before.dtype), state.before.dtype
    sizes, t = _sizes(state), state.index + 1
    length = sizes.astype(dtype)  # l

    # σ² ≈ ⅙ ‖z_i − 2 z_i−1 + z_i−2‖²
    bend = z - 2 * state.before[0] + state.before[1]
    noise = _follow(state.noise, jnp.sum(bend * bend) / 6, t - 2, 1 / state.memory)

    # V_l ≈ ½ ‖a − b‖², whenever a block is complete that has a neighbour
    sums = state.sums + z[None]
    full = t % sizes == 0
    apart = jnp.sum((sums - state.blocks) ** 2, 1) / (2 * length * length)
    spread = jnp.where(full, _follow(state.spread, apart, t // sizes - 1, length / state.memory), state.spread)

    state = AdaptiveState(
        sums=jnp.where(full[:, None], 0, sums),
        blocks=jnp.where(full[:, None], sums, state.blocks),
        before=jnp.stack([z, state.before[0]]),
        index=t,
        noise=noise,
        spread=spread,
        memory=state.memory,
        length=state.length,
    )
    best = _best(state, rho)
    return best, state._replace(length=best)


def errors(state: AdaptiveState, rho: Any = 1.0) -> tuple[jax.Array, jax.Array]:
    """bias² and σ² v_ρ of the windows 1, 2, 4, … longest as they were measured, [J + 1] each.

    Of windows longer than the run bias² is ∞. With ρ = 1 the second is σ²/L, the variance of the gradient.
    """
    dtype = state.spread.dtype
    length = _sizes(state).astype(dtype)  # l
    # D_l = ½ (V_l − σ²/l),   bias²(2l) = ((2l − 1)/l)² D_l
    drift = jnp.maximum(state.spread - state.noise / length, 0) / 2
    squared_bias = jnp.concatenate([jnp.zeros(1, dtype), ((2 * length - 1) / length) ** 2 * drift])
    # Three sketches are the first that tell noise from drift.
    lengths = _lengths(state)
    known = (lengths == 1) | (np.maximum(lengths, 3) <= state.index)
    squared_bias = jnp.where(known, squared_bias, jnp.inf)
    return jax.lax.cummin(squared_bias, reverse=True), state.noise * _noise_left(lengths, rho, dtype)


def _noise_left(lengths, rho, dtype):
    """v_ρ(L), the share of the noise of a minibatch that λ has."""
    rho = jnp.asarray(rho, dtype)
    # c_j = 1 − (1 − ρ)^j: how far a minibatch of j steps ago has come into λ, times L, while it is in the window
    j = np.arange(1, int(np.max(lengths)) + 1)
    come = -jnp.expm1(jnp.asarray(j, dtype) * jnp.log1p(-jnp.minimum(rho, 1 - jnp.finfo(dtype).eps)))
    # v_ρ(L) = (Σ_{j ≤ L} c_j² + c_L² (1 − ρ)² / (ρ (2 − ρ))) / L²: the second sum are those that have left it
    last = jnp.maximum(rho * (2 - rho), jnp.finfo(dtype).tiny)
    inside, c = jnp.cumsum(come**2)[lengths - 1], come[lengths - 1]
    return (inside + c**2 * (1 - rho) ** 2 / last) / jnp.asarray(lengths, dtype) ** 2


def delayed(spec: Adaptive, template: Any) -> Delayed:
    """The rule of a run before its first step; arguments as for :func:`init`."""
    return Delayed(init(spec, template), (), 0.0)


def restart(rule: Delayed) -> Delayed:
    """The same rule, as before its first step."""
    return delayed(spec_of(rule.state), rule.state.before[0])


def take(rule: Delayed, rho: float) -> tuple[int, AdaptiveState]:
    """The length for the next step, chosen before; and the rule with the sketch that waited, which may be under way.

    With that, and ρ of the next step, it chooses the length of the step after the next.

    So the length of step i + 1 follows from the sketches up to step i − 1, whoever looks at the run in between: it is
    there when step i has just been handed out. The rule is used up.
    """
    length = int(rule.state.length)
    return length, _absorb(rule.state, rule.waiting, rule.scale, rho) if rule.waiting else rule.state


def export(rule: Delayed) -> dict[str, np.ndarray]:
    """The rule as arrays, with at least one axis each."""
    arrays = {f"rule_{name}": np.asarray(leaf)[None] for name, leaf in rule.state._asdict().items()}
    if rule.waiting:
        arrays["rule_waiting"] = np.stack([np.asarray(part) for part in rule.waiting])
    return arrays | {"rule_scale": np.array([rule.scale], np.float64)}


def restore(arrays: Mapping[str, np.ndarray]) -> Delayed | None:
    """The rule of which :func:`export` made these; None if there was none."""
    if "rule_length" not in arrays:
        return None

    def copy(array):
        return jnp.array(np.asarray(array))

    return Delayed(
        AdaptiveState(*(copy(arrays[f"rule_{name}"][0]) for name in AdaptiveState._fields)),
        tuple(copy(part) for part in arrays.get("rule_waiting", ())),
        float(arrays["rule_scale"][0]),
    )


@partial(jax.jit, donate_argnames="state", compiler_options=ALONE)
def _absorb(state, parts, scale, rho):
    dtype = state.before.dtype
    return push(state, jnp.asarray(scale, dtype) * sum(part.astype(dtype) for part in parts), rho)[1]


def _best(state, rho):
    squared_bias, variance = errors(state, rho)
    cost, lengths = squared_bias + variance, jnp.asarray(_lengths(state))
    best = jnp.argmin(cost)  # the first, and so the shortest, of equals
    now = jnp.min(jnp.where(lengths == state.length, cost, jnp.inf))
    patient = max(min(_PATIENCE, 2 ** len(state.spread)), 3)  # three sketches tell noise from drift
    better = (state.index >= patient) & (cost[best] < (1 - _RELUCTANCE) * now)
    return jnp.where(better, lengths[best], state.length)


def _sizes(state):
    """The blocks' lengths l = 1, 2, … C/2."""
    return jnp.asarray(2 ** np.arange(len(state.spread)), jnp.int32)


def _lengths(state):
    """The windows' lengths 1, 2, … C."""
    return 2 ** np.arange(len(state.spread) + 1, dtype=np.int32)


def _follow(mean, value, number, least):
    """The mean with value ``number`` = 1, 2, … in it, which fades once its share would be less than ``least``."""
    share = jnp.maximum(1 / jnp.maximum(number, 1).astype(mean.dtype), least)
    return jnp.where(number > 0, mean + share * (value - mean), mean)


def _sketch_leaf(leaf, number):
    if leaf.ndim == 0:
        return leaf[None]
    axis = int(np.argmax(leaf.shape))
    rows = jnp.moveaxis(leaf, axis, 0).reshape(leaf.shape[axis], -1)
    bucket, num_buckets = buckets(len(rows), number)
    if len(rows) == num_buckets:
        return rows.ravel()
    return fill(jnp.zeros((2 * num_buckets, rows.shape[1]), rows.dtype), rows, bucket).ravel()
