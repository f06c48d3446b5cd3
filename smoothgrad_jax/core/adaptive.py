"""A window that chooses its length: as long as the noise requires, as short as the drift allows.

The mean of the last L statistics has the noise of one minibatch divided by L. It also has a bias, as S has changed
since the old statistics were computed. But λ is a moving average itself: of the noise σ² in Ŝ, only σ² ρ/(2 − ρ)
reaches λ without any window, and with ρ L ≪ 1 a window removes little of that. The rule minimises the noise that
reaches λ plus the squared bias. Both follow from the noisy statistics alone:

    L = argmin  bias²(L) + σ² v_ρ(L)                  over L = 1, 2, 4, … longest
    v_ρ(L)   = Σ squared weights of the minibatches in λ, by the last L and then by ρ: ρ/(2 − ρ) for L = 1, and 1/L for
               ρ = 1, where the rule minimises the error of the gradient

Divide the steps into blocks of l, and let a and b be the means of two neighbouring blocks (the mean of ½ ‖a − b‖² is
the Allan variance):

    V_l      = mean of ½ ‖a − b‖²                      = σ²/l + ½ ‖drift from block to block‖²
    σ²       = mean of ⅙ ‖z_i − 2 z_i−1 + z_i−2‖²      in which a steady drift cancels; in V_1 it does not
    D_l      = ½ (V_l − σ²/l), not below 0             = ‖E[z^2l − z^l]‖², where z^l is the mean of the last l
    bias²(L) = ((2l − 1)/l)² D_l                       with 2l = L; bias²(1) = 0

The last line holds for a steady drift d, where bias(L) = d (L − 1)/2 and D_l = (d l/2)². If S moves by a random walk
instead, the line holds approximately for every l. A longer window is not less biased, and long blocks measure a drift
most precisely: bias²(L) is lowered to the smallest bias² of the lengths from L on.

| letter | name               | meaning                                                                            |
|--------|--------------------|------------------------------------------------------------------------------------|
| z_i    | ``sketched``       | sketch of the statistics Ŝ_i: a short vector that keeps squared distances, see     |
|        |                    | :func:`sketch`                                                                     |
| L      | ``length``         | window length                                                                      |
| C      | ``longest``        | the longest window; J = log₂ C, and the blocks have l = 1, 2, … C/2 steps          |
| M      |                    | size of a sketch                                                                   |
| t      | ``num_sketches``   | number of sketches so far                                                          |
| σ²     | ``noise``          | squared noise of one sketch                                                        |
| v_ρ    |                    | fraction of σ² that reaches λ                                                      |
| V_l    | ``allan_variance`` | half the squared distance of the means a, b of neighbouring blocks of l steps, [J] |
| D_l    |                    | squared distance between z^2l and z^l                                              |
| m      | ``memory``         | number of steps over which σ² and V_l are averaged                                 |

Precision: with ν directions in which a minibatch is noisy, ½ ‖a − b‖² is σ²/l within √(2/ν), and m/l blocks are
averaged; m = 2 C leaves four of the longest. The error of bias²(C) is then about 4 √(2/(4 ν)) σ²/C. All means extend
over the same m steps, as σ² changes along a run and its change must not count as drift.

That is for ρ = 1. With ρ C ≲ 1 a window gains less than this error. Where a drift cannot be distinguished from it, the
rule chooses a short window, and all lengths leave nearly the same noise in λ. The lag of λ itself, about drift/ρ, is
not part of the rule, nor is its product with the lag of the window.

The first 128 steps (C, if that is less) use L = 8. In them λ leaves its random start; the drift there is large and says
nothing about later steps. A window also gains most there, for another reason (``experiments/mechanism.py``).
``experiments/beyond.py`` compares this rule with windows of fixed length, and with ρ = 1 in the rule.

The state has J sums of M numbers, twice, and no ring: a push costs O(J M), and no sum is older than C steps.

Reference: Allan, *Statistics of atomic frequency standards*, Proceedings of the IEEE 54, 1966; Charikar, Chen and
Farach-Colton, *Finding frequent items in data streams*, 2002, for the sketch.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from smoothgrad_jax.core._xla import SINGLE_THREAD_OPTIONS
from smoothgrad_jax.core.errors import OptionError
from smoothgrad_jax.core.types import Array, Numeric, PyTree

_Rows = TypeVar("_Rows", jax.Array, np.ndarray)

_NUM_BUCKETS = 64  # squared distances are kept within √(2/64) along one direction of a column, and there are K columns
_FIRST_LENGTH, _FIRST_STEPS = 8, 128  # the window of the first steps, and their number
_MIN_GAIN = 0.1  # the least gain for which L changes: the cost is flat around its minimum, and a window refills slowly


class Adaptive(NamedTuple):
    """A window that chooses its length, for ``fit(window=Adaptive())``.

    Attributes:
      longest: C, the longest window, a power of two. It limits the memory of the run.
      memory: m, the number of steps over which noise and drift are measured, at least ``longest``; by default twice
        that. With fewer steps the length follows a change sooner, and varies more.
    """

    longest: int = 128
    memory: int | None = None


class AdaptiveState(NamedTuple):
    """State of the rule.

    Attributes:
      sums: [J, M], for each block length the sum of the incomplete block.
      blocks: [J, M], the sum of the last complete block.
      previous: [2, M], the last two sketches, the newer one first.
      num_sketches: t, int32.
      noise: σ².
      allan_variance: V_l [J].
      memory: m.
      length: L for the next step, int32.
    """

    sums: jax.Array
    blocks: jax.Array
    previous: jax.Array
    num_sketches: jax.Array
    noise: jax.Array
    allan_variance: jax.Array
    memory: jax.Array
    length: jax.Array


class DelayedRule(NamedTuple):
    """The rule of a run that computes ahead: the length of a step does not depend on the sketch of the step before it.

    Attributes:
      state: The rule, with all sketches but the last.
      pending: Parts of the last sketch, which is ``scale`` times their sum; empty before the first step.
      scale: D/B, a scalar.
    """

    state: AdaptiveState
    pending: tuple[jax.Array, ...]
    scale: Array


def init(spec: Adaptive, template: Array | jax.ShapeDtypeStruct) -> AdaptiveState:
    """Return the rule before the first sketch, with L = 8, or C if that is less. Allocates 2 log₂ C + 2 sketches.

    Args:
      spec: The longest window and the memory.
      template: A sketch, for example of the parameters, or its ``ShapeDtypeStruct``: only shape and dtype are used.
    """
    longest, memory = check(spec)
    (size,), dtype = template.shape, template.dtype
    levels = jnp.zeros((longest.bit_length() - 1, size), dtype)
    return AdaptiveState(
        sums=levels,
        blocks=jnp.zeros_like(levels),
        previous=jnp.zeros((2, size), dtype),
        num_sketches=jnp.zeros((), jnp.int32),
        noise=jnp.zeros((), dtype),
        allan_variance=jnp.zeros(len(levels), dtype),
        memory=jnp.asarray(memory, dtype),
        length=jnp.full((), min(longest, _FIRST_LENGTH), jnp.int32),
    )


def check(spec: Adaptive) -> Adaptive:
    """Return the specification with its memory filled in; raise an error if it cannot be used."""
    longest, memory = spec
    if not isinstance(longest, int | np.integer) or longest < 1 or longest & (longest - 1):
        raise OptionError("longest", f"must be a power of two, as the lengths tried are 1, 2, 4, …; got {longest}")
    memory = 2 * longest if memory is None else memory
    if not isinstance(memory, int | np.integer) or memory < longest:
        raise OptionError(
            "memory", f"must be a whole number of steps, at least the longest window {longest}; got {memory}"
        )
    return Adaptive(int(longest), int(memory))


def spec_of(state: AdaptiveState) -> Adaptive:
    """Return the specification that a state was made for; the longest window is read off its shape."""
    return Adaptive(2 ** len(state.allan_variance), int(state.memory))


def sketch(stats: PyTree) -> jax.Array:
    """Return a short vector z [M] such that ‖z − z′‖² is that of the statistics, on average over hashes.

    The longest axis of every array, for example of V words, is hashed into 64 buckets. With a bucket h and a sign s for
    each word, the same in every sketch,

        z[h, k] = Σ_{w in h} s_w S_wk

    An axis of at most 64 entries is not hashed: arrays with only such axes, and numbers, are kept exactly.

    Args:
      stats: A pytree of arrays of any rank.
    """
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(stats)]
    if not leaves:
        raise ValueError("there are no statistics: the pytree is empty")
    dtype = jnp.result_type(jnp.float32, *leaves)
    parts = [_sketch_leaf(leaf.astype(dtype), number) for number, leaf in enumerate(leaves)]
    return jnp.concatenate(parts)


def num_buckets(num_rows: int) -> int:
    """Return H, the number of buckets of an array with this many rows."""
    return min(num_rows, _NUM_BUCKETS)


def bucket_of(rows: _Rows, num_rows: int, leaf: int = 0) -> _Rows:
    """Return the buckets of some rows of an array, from a hash of their numbers.

    A row with the sign −1 has its bucket H later: buckets 0 … 2H − 1 are summed without a sign, and then the second
    half is subtracted from the first, as in :func:`sum_buckets`.

    Args:
      rows: Numbers of the rows, uint32.
      num_rows: Number of rows of the array.
      leaf: The number of the array among the leaves: each array has another hash.
    """
    x = rows
    if num_rows > _NUM_BUCKETS:
        # The finaliser of MurmurHash3: every bit of the number reaches every bit of the hash.
        x = x + np.uint32((leaf * 0x9E3779B1 + 0x7F4A7C15) & 0xFFFFFFFF)
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
        x = (x ^ (x >> np.uint32(16))) % np.uint32(2 * _NUM_BUCKETS)
    return x.astype(np.int32)


def sketch_rows(stats: jax.Array, rows: Array, num_rows: int, leaf: int = 0) -> jax.Array:
    """Return the sketch of some rows of an array; the sketch of the array is the sum over all of its rows.

    Args:
      stats: The rows [n, K].
      rows, num_rows, leaf: As in :func:`bucket_of`.
    """
    zeros = jnp.zeros((2 * num_buckets(num_rows), stats.shape[1]), stats.dtype)
    return sum_buckets(zeros, stats, bucket_of(rows, num_rows, leaf)).ravel()


def sum_buckets(zeros: jax.Array, rows: jax.Array, bucket: Array) -> jax.Array:
    """Return z[h, k] = Σ_{w in h} s_w S_wk for rows S and their buckets; ``zeros`` has 2H rows."""
    plus, minus = jnp.split(zeros.at[bucket].add(rows), 2)
    return plus - minus


def push(state: AdaptiveState, sketched: jax.Array, rho: Numeric = 1.0) -> tuple[jax.Array, AdaptiveState]:
    """Add the sketch of a step; return the best length now, and the new state.

    The length changes first after sketch 128, or C if that is less. Only lengths up to the number of sketches are
    tried, and the length changes only if that reduces the cost by a tenth: the cost is flat around its minimum, and a
    window that shrinks drops values that it has to collect again when it grows.

    Args:
      state: From :func:`init`.
      sketched: z, from :func:`sketch`.
      rho: ρ of the step that uses the length.

    Returns:
      ``(L, state)``; L is an int32 scalar, 1 … longest. With ρ = 1 it minimises the error of the gradient.

    Example, for any model, also under ``jit`` and ``scan``:

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
    if sketched.shape != state.previous.shape[1:]:
        raise ValueError(f"the rule was made for sketches {state.previous.shape[1:]}, got {sketched.shape}")
    z, dtype = sketched.astype(state.previous.dtype), state.previous.dtype
    sizes, t = _sizes(state), state.num_sketches + 1
    size = sizes.astype(dtype)  # l

    # σ² ≈ ⅙ ‖z_i − 2 z_i−1 + z_i−2‖²
    change = z - 2 * state.previous[0] + state.previous[1]
    noise = _update_mean(state.noise, jnp.sum(change * change) / 6, t - 2, 1 / state.memory)

    # V_l ≈ ½ ‖a − b‖², whenever a block is complete and has a neighbour
    sums = state.sums + z[None]
    full = t % sizes == 0
    distance = jnp.sum((sums - state.blocks) ** 2, 1) / (2 * size * size)
    updated = _update_mean(state.allan_variance, distance, t // sizes - 1, size / state.memory)

    state = AdaptiveState(
        sums=jnp.where(full[:, None], 0, sums),
        blocks=jnp.where(full[:, None], sums, state.blocks),
        previous=jnp.stack([z, state.previous[0]]),
        num_sketches=t,
        noise=noise,
        allan_variance=jnp.where(full, updated, state.allan_variance),
        memory=state.memory,
        length=state.length,
    )
    best = _best(state, rho)
    return best, state._replace(length=best)


def errors(state: AdaptiveState, rho: Numeric = 1.0) -> tuple[jax.Array, jax.Array]:
    """Return the measured bias² and σ² v_ρ of the windows 1, 2, 4, … longest, [J + 1] each.

    For windows longer than the run, bias² is ∞. With ρ = 1 the second is σ²/L, the variance of the gradient.
    """
    dtype = state.allan_variance.dtype
    size = _sizes(state).astype(dtype)  # l
    # D_l = ½ (V_l − σ²/l),   bias²(2l) = ((2l − 1)/l)² D_l
    drift = jnp.maximum(state.allan_variance - state.noise / size, 0) / 2
    squared_bias = jnp.concatenate([jnp.zeros(1, dtype), ((2 * size - 1) / size) ** 2 * drift])
    # It takes three sketches to distinguish noise from drift.
    lengths = _lengths(state)
    known = (lengths == 1) | (np.maximum(lengths, 3) <= state.num_sketches)
    squared_bias = jnp.where(known, squared_bias, jnp.inf)
    return jax.lax.cummin(squared_bias, reverse=True), state.noise * _noise_fraction(lengths, rho, dtype)


def _noise_fraction(lengths, rho, dtype):
    """Return v_ρ(L), the fraction of the noise of a minibatch that reaches λ."""
    rho = jnp.asarray(rho, dtype)
    # c_j = 1 − (1 − ρ)^j: L times the weight in λ of a minibatch of j steps ago, while it is in the window
    j = np.arange(1, int(np.max(lengths)) + 1)
    weight = -jnp.expm1(jnp.asarray(j, dtype) * jnp.log1p(-jnp.minimum(rho, 1 - jnp.finfo(dtype).eps)))
    # v_ρ(L) = (Σ_{j ≤ L} c_j² + c_L² (1 − ρ)² / (ρ (2 − ρ))) / L²: the second term is for those that have left it
    rest = jnp.maximum(rho * (2 - rho), jnp.finfo(dtype).tiny)
    inside, c = jnp.cumsum(weight**2)[lengths - 1], weight[lengths - 1]
    return (inside + c**2 * (1 - rho) ** 2 / rest) / jnp.asarray(lengths, dtype) ** 2


def init_delayed(spec: Adaptive, template: Array | jax.ShapeDtypeStruct) -> DelayedRule:
    """Return the rule of a run before its first step; arguments as in :func:`init`."""
    return delay(init(spec, template), (), 0.0)


def restart(rule: DelayedRule) -> DelayedRule:
    """Return the same rule before its first step."""
    return init_delayed(spec_of(rule.state), rule.state.previous[0])


def next_length(rule: DelayedRule, rho: float) -> tuple[int, AdaptiveState]:
    """Return the length for the next step, and the rule with the pending sketch added.

    The rule then chooses the length of the step after the next, from the pending sketch and ρ of the next step. So the
    length of step i + 1 follows from the sketches up to step i − 1. It is known while step i is still being computed,
    and does not depend on when a caller reads the state of the run. The state of ``rule`` is donated.
    """
    length = int(rule.state.length)
    return length, _push_pending(rule.state, rule.pending, rule.scale, rho) if rule.pending else rule.state


def delay(state: AdaptiveState, pending: Sequence[jax.Array], scale: float) -> DelayedRule:
    """Return the rule with the sketch of the last step pending; it is ``scale`` times the sum of its parts."""
    return DelayedRule(state, tuple(pending), np.asarray(scale, np.float64))


@partial(jax.jit, donate_argnames="state", compiler_options=SINGLE_THREAD_OPTIONS)
def _push_pending(state, parts, scale, rho):
    dtype = state.previous.dtype
    return push(state, jnp.asarray(scale, dtype) * sum(part.astype(dtype) for part in parts), rho)[1]


def _best(state, rho):
    squared_bias, variance = errors(state, rho)
    cost, lengths = squared_bias + variance, jnp.asarray(_lengths(state))
    best = jnp.argmin(cost)  # the shortest of equal ones
    now = jnp.min(jnp.where(lengths == state.length, cost, jnp.inf))
    needed = max(min(_FIRST_STEPS, 2 ** len(state.allan_variance)), 3)  # three distinguish noise from drift
    better = (state.num_sketches >= needed) & (cost[best] < (1 - _MIN_GAIN) * now)
    return jnp.where(better, lengths[best], state.length)


def _sizes(state):
    """Return the block lengths l = 1, 2, … C/2."""
    return jnp.asarray(2 ** np.arange(len(state.allan_variance)), jnp.int32)


def _lengths(state):
    """Return the window lengths 1, 2, … C."""
    return 2 ** np.arange(len(state.allan_variance) + 1, dtype=np.int32)


def _update_mean(mean, value, number, least):
    """Return the mean after value ``number`` = 1, 2, …, whose weight is 1/number, and at least ``least``."""
    weight = jnp.maximum(1 / jnp.maximum(number, 1).astype(mean.dtype), least)
    return jnp.where(number > 0, mean + weight * (value - mean), mean)


def _sketch_leaf(leaf, number):
    if leaf.ndim == 0:
        return leaf[None]
    axis = int(np.argmax(leaf.shape))
    rows = jnp.moveaxis(leaf, axis, 0).reshape(leaf.shape[axis], -1)
    if len(rows) <= _NUM_BUCKETS:
        return rows.ravel()
    return sketch_rows(rows, np.arange(len(rows), dtype=np.uint32), len(rows), number)
