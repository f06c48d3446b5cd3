"""The variational distribution of one document, as loops over words that XLA fuses into one function.

| letter | name       | shape            | meaning                                                          |
|--------|------------|------------------|------------------------------------------------------------------|
| K      |            |                  | topics; arrays are padded to a multiple of 16 columns            |
| α      | ``alpha``  | [K]              | prior of the topic proportions                                   |
| γ      | ``gamma``  | [K]              | q(θ_d) = Dirichlet(γ)                                            |
| n      | ``counts`` |                  | counts of the document's words                                   |
| θ̃      | ``theta``  | [K padded]       | exp E[log θ], up to a factor that cancels                        |
| β̃      | ``beta``   | [U, K padded]    | exp E[log β] of the minibatch's words, up to a factor per word   |
| T      | ``total``  | [1, K]           | column sums of λ                                                 |

The coordinate updates φ_wk ∝ θ̃_k β̃_wk and γ_k = α_k + Σ_w n_w φ_wk combine into

    γ ← F(γ) = α + θ̃ ∘ ((n / β̃θ̃) β̃)

Float32 suffices for any prior, because β̃ is scaled so that the largest entry of each word is 1, and θ̃ so that the
largest γ of the document gets a number near 1. All these factors cancel in φ.

The functions are meant to be called inside :func:`smoothgrad_jax.core.fused_loops.fused`.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from smoothgrad_jax.core.fused_loops import row, set_row
from smoothgrad_jax.core.types import Array, Numeric
from smoothgrad_jax.data.batches import Batch
from smoothgrad_jax.models import dirichlet

_LANES = 16  # topics are padded to a multiple of 16: AVX-512 handles 16 at a time, and XLA a remainder one by one
_PARTIAL_SUM = 64  # rows per partial sum
_MOMENTUM, _RAMP = 0.25, 40  # b_t = min(t/40, 1/4)


class LocalInfo(NamedTuple):
    """What the local step found.

    Attributes:
      gamma: γ [B, K], in the order of the documents in the input.
      iterations: [B], evaluations of F per document; 0 for an empty document.
      change: The largest final mean |Δγ| over all documents; below ``tol`` unless a document stopped at ``max_iter``.
    """

    gamma: Array
    iterations: Array
    change: Array


def fit_documents(
    alpha: Array,
    beta: tuple[Array, ...],
    batch: Batch,
    tol: Numeric,
    max_iter: Numeric,
    first: Numeric = 0,
    last: Numeric | None = None,
    *,
    proportions: Callable[[Array], Array] | None = None,
) -> tuple[Array, Array, LocalInfo]:
    """Fit γ of the documents of a batch.

    The fixed point γ = F(γ) is found with momentum (Polyak's heavy ball):

        γ_t+1 = max(γ_t + a_t (F(γ_t) − γ_t) + b_t (γ_t − γ_t−1), α),    b_t = min(t/40, 1/4),  a_t = (1 + √b_t)²

    The iteration stops where mean |F(γ) − γ| < tol, and returns F(γ). F is a step of coordinate ascent: at a maximum of
    the bound its Jacobian has eigenvalues in [0, 1). Any b < 1 with this a converges to the maximum, asymptotically by
    a factor of √b per step along all directions with eigenvalues up to 4√b / (1 + √b)². Directions with eigenvalues
    below √b converge more slowly than plain updates, and short documents have few others, so b increases slowly. The
    fixed point lies above α, hence the maximum in the update moves no topic away from it. The stopping rule is that of
    plain updates, so the result is as close to the fixed point. Where α is small a document can have several fixed
    points.

    Args:
      alpha: α [K].
      beta: β̃ [U, K padded] from :func:`scaled_topics` for the words of the batch. With several arrays, the first holds
        positions 0 … U − 1, the second U … 2U − 1, and so on.
      batch: The documents.
      tol: Stop a document when mean |F(γ) − γ| is below this value.
      max_iter: Stop a document after this many evaluations.
      first, last: Fit only the documents first … last − 1.
      proportions: θ̃ of γ [K padded]; by default that of :func:`scaled_proportions`, exp ψ(γ).

    Returns:
      Σ_d n_dw φ_dwk for the words of all arrays [S · U, K padded], its sum over words [K], and :class:`LocalInfo`, in
      which documents outside the range have γ = α.
    """
    num_topics, dtype = alpha.shape[0], beta[0].dtype
    width = padded(num_topics)
    counts = batch.counts.astype(dtype)
    theta_of = proportions or (lambda gamma: scaled_proportions(gamma)[0])
    # Padding is inert: its β̃ is at most 1 and its θ̃ is the floor.
    padded_alpha, is_topic = pad(alpha, jnp.finfo(dtype).tiny), pad(jnp.ones_like(alpha))

    def fit(d, carry):
        stats, tiles, gammas, iterations, change = carry
        start, length = batch.offsets[d], batch.offsets[d + 1] - batch.offsets[d]
        document = _Document(batch, counts, start, length, *_tile_parts(length, batch.tiles))
        # Rows of earlier documents stay where this document has none: they are finite, and their counts are 0.
        tiles = tuple(
            copy_rows(tile, beta, batch.words, document.begin(j), document.used[j]) for j, tile in enumerate(tiles)
        )
        gamma, moved, number = _fixed_point(
            document, tiles, padded_alpha, is_topic, num_topics, tol, max_iter, theta_of
        )
        theta = theta_of(gamma)
        for j, tile in enumerate(tiles):
            add = partial(document.add_statistics, j, tile, theta)
            stats = lax.cond(document.wanted[j], add, lambda stats: stats, stats)
        moved = jnp.where(document.length > 0, moved, 0)
        return (
            stats,
            tiles,
            set_row(gammas, d, gamma[None, :num_topics]),
            set_row(iterations, d, number[None]),
            jnp.maximum(change, moved),
        )

    carry = (
        jnp.zeros((len(beta) * beta[0].shape[0], width), dtype),
        tuple(jnp.ones((size, width), dtype) for size in batch.tiles),
        jnp.broadcast_to(alpha, (batch.size, num_topics)),
        jnp.zeros(batch.size, jnp.int32),
        jnp.zeros((), dtype),
    )
    stats, _, *info = lax.fori_loop(first, batch.size if last is None else last, fit, carry)
    return stats, _sum_rows(stats)[:num_topics], LocalInfo(*info)


class _Document(NamedTuple):
    """One document of a batch, whose words are spread over tiles of 8, 16, 32, … rows.

    Attributes:
      batch, counts: All documents.
      start, length: The first entry of this document, and its number of entries.
      wanted: For each tile, whether the document uses it.
      offset: For each tile, the first of the document's words in it.
      used: For each tile, how many of the document's words it holds.
    """

    batch: Batch
    counts: Array
    start: Array
    length: Array
    wanted: tuple[Array, ...]
    offset: tuple[Array, ...]
    used: tuple[Array, ...]

    def begin(self, j):
        """Return the entry at which tile j begins."""
        return self.start + self.offset[j]

    def tile_counts(self, j):
        """Return n for the words of tile j. Called inside a branch for wanted tiles, so that others cost nothing."""
        size = self.batch.tiles[j]
        some = lax.dynamic_slice_in_dim(self.counts, self.begin(j), size)
        return jnp.where(jnp.arange(size) < self.used[j], some, 0)

    def expected(self, tiles, theta):
        """Return (n / β̃θ̃) β̃."""
        total = jnp.zeros_like(theta)
        for j, tile in enumerate(tiles):

            def add(total, j=j, tile=tile):
                return total + (self.tile_counts(j) / (tile @ theta)) @ tile

            total = lax.cond(self.wanted[j], add, lambda total: total, total)
        return total

    def add_statistics(self, j, tile, theta, stats):
        """Add n_w φ_w of the words of tile j to the rows of these words."""
        # n_w φ_wk = (n_w / (β̃θ̃)_w) β̃_wk θ̃_k; in this order no factor can overflow
        ratio = self.tile_counts(j) / (tile @ theta)

        def add(i, stats):
            w = self.batch.words[self.begin(j) + i]
            return set_row(stats, w, row(stats, w) + (ratio[i] * row(tile, i)) * theta[None])

        return lax.fori_loop(0, self.used[j], add, stats)


def _fixed_point(document, tiles, alpha, is_topic, num_topics, tol, max_iter, theta_of):
    """Return γ of a document, its last mean |Δγ|, and the number of evaluations."""
    dtype = alpha.dtype

    def unfinished(state):
        *_, moved, i = state
        return (moved >= tol) & (i < jnp.where(document.length > 0, max_iter, 0))

    def update(state):
        previous, point, gamma, _, i = state
        previous, point = point, add_momentum(previous, point, gamma, i, alpha)
        # F(γ) = α + θ̃ ∘ ((n / β̃θ̃) β̃)
        theta = theta_of(point)
        gamma = alpha + theta * document.expected(tiles, theta)
        return previous, point, gamma, sum_by_halves(is_topic * jnp.abs(gamma - point)) / num_topics, i + 1

    start, zero = document.start, jnp.zeros((), dtype)
    tokens = lax.fori_loop(start, start + document.length, lambda i, total: total + document.counts[i], zero)
    gamma = alpha + is_topic * (tokens / num_topics)
    begin = (gamma, gamma, gamma, jnp.full((), jnp.inf, dtype), jnp.zeros((), jnp.int32))
    *_, gamma, moved, number = lax.while_loop(unfinished, update, begin)
    return gamma, moved, number


def add_momentum(previous: Array, point: Array, gamma: Array, i: Array, alpha: Array) -> Array:
    """Return γ_i+1 from γ_i−1, γ_i and F(γ_i); see :func:`fit_documents`."""
    # γ_t+1 = max(γ_t + a_t (F(γ_t) − γ_t) + b_t (γ_t − γ_t−1), α)
    b = jnp.minimum(i.astype(gamma.dtype) / _RAMP, _MOMENTUM)
    a = (1 + jnp.sqrt(b)) ** 2
    return jnp.maximum(point + a * (gamma - point) + b * (point - previous), alpha)


def _tile_parts(length, sizes):
    """Return for each tile whether a document of this length uses it, its first word in the tile, and how many."""
    parts, blocks, at = [], (length + sizes[0] - 1) // sizes[0], jnp.zeros_like(length)
    for j, size in reversed(list(enumerate(sizes))):  # the largest first: the last words are in the smallest
        bit = (blocks >> j) & 1
        parts.append((bit > 0, at, bit * jnp.minimum(length - at, size)))
        at = at + bit * size
    return zip(*parts[::-1], strict=True)


def copy_rows(tile: Array, beta: tuple[Array, ...], words: Array, start: Array, used: Array) -> Array:
    """Copy the rows β of the words start … start + used − 1 into a tile."""

    def copy(j, tile):
        w = words[start + j]
        if len(beta) == 1:
            return set_row(tile, j, row(beta[0], w))
        which, w = jnp.divmod(w, beta[0].shape[0])
        return set_row(tile, j, lax.switch(which, [partial(row, part) for part in beta], w))

    return lax.fori_loop(0, used, copy, tile)


def _sum_rows(x):
    """Return the sum over the first axis as a sum of partial sums, which rounds less."""
    nothing = jnp.zeros((1, x.shape[1]), x.dtype)

    def add(i, total):
        end = jnp.minimum((i + 1) * _PARTIAL_SUM, len(x))
        return total + lax.fori_loop(i * _PARTIAL_SUM, end, lambda w, some: some + row(x, w), nothing)

    return lax.fori_loop(0, -(-len(x) // _PARTIAL_SUM), add, nothing)[0]


def topic_normalisers(total: Array) -> tuple[Array, Array]:
    """Return e(T) and 1/(T + c) [1, K padded] of the column sums T [1, K], for :func:`scaled_topics`."""
    total = pad(jnp.maximum(total, jnp.finfo(total.dtype).tiny), 1)
    return lax.optimization_barrier((dirichlet.exponent(total), 1 / (total + dirichlet.SHIFT)))


def scaled_topics(rows: Array, normalisers: tuple[Array, Array]) -> tuple[Array, Array]:
    """Return β̃ of some words: exp E[log β] with the topics padded, scaled to max_k β̃_wk = 1.

    exp E[log β_wk] = (λ_wk + c)/(T_k + c) · exp(e(λ_wk) − e(T_k)),   T_k = Σ_w λ_wk

    Args:
      rows: λ_w [n, K].
      normalisers: From :func:`topic_normalisers`.

    Returns:
      β̃ [n, K padded] and the log of the scale [n].
    """
    tiny = jnp.finfo(rows.dtype).tiny
    # Pad first: XLA computes the columns beyond a multiple of eight one by one. β̃ of the padding is nearly zero.
    rows = jnp.maximum(pad(rows, tiny), tiny)
    # A barrier keeps XLA from computing the expression above it twice, once for the maximum and once for its use.
    # The largest e(λ) is subtracted first: for λ = 1e-6 it is −1e6, and would absorb the digits of e(T).
    exponent = lax.optimization_barrier(dirichlet.exponent(rows))
    largest = _largest(exponent)
    exponent = lax.optimization_barrier((exponent - largest) - normalisers[0])
    shift = _largest(exponent)
    scaled = lax.optimization_barrier((rows + dirichlet.SHIFT) * normalisers[1] * dirichlet.exp(exponent - shift))
    peak = _largest(scaled)
    return scaled / peak, (largest + shift + jnp.log(peak))[:, 0]


def scaled_proportions(gamma: Array) -> tuple[Array, Array]:
    """Return θ̃ = exp ψ(γ) · exp(−shift), and the shift, with which the exponent of the largest γ is 0.

    θ̃ is bounded below, so that β̃θ̃ stays positive, and φ a distribution, where all its terms underflow.
    """
    exponent = dirichlet.exponent(gamma)
    shift = _largest(exponent)[0]
    floor = jnp.finfo(gamma.dtype).tiny ** 0.8
    return jnp.maximum((gamma + dirichlet.SHIFT) * dirichlet.exp(exponent - shift), floor), shift


def padded(num_topics: int) -> int:
    """Return K rounded up to a multiple of 16."""
    return -(-num_topics // _LANES) * _LANES


def pad(x: Array, value: Numeric = 0) -> Array:
    """Pad the last axis from K to K padded."""
    extra = padded(x.shape[-1]) - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, extra)], constant_values=value)


def _largest(x):
    """Return the maximum over the last axis, which is kept."""
    # By halves, which overlap if their number is odd: XLA vectorises these, and compares a row number by number.
    while x.shape[-1] > 8:
        half = (x.shape[-1] + 1) // 2
        x = jnp.maximum(x[..., :half], x[..., -half:])
    return x.max(-1, keepdims=True)


def sum_by_halves(x: Array) -> Array:
    """Return the sum of a vector. XLA vectorises the sum of two halves, and adds a vector number by number."""
    while x.shape[0] > 8 and x.shape[0] % 2 == 0:
        x = x[: x.shape[0] // 2] + x[x.shape[0] // 2 :]
    return x.sum()
