"""Collapsed Gibbs sampling of the topics of each document's tokens, with the topics of words held fixed.

    z_t ~ (N_k + α_k) β_{w_t k},    N_k = Σ_{s ≠ t} [z_s = k]

| letter | name       | shape   | meaning                                                                      |
|--------|------------|---------|------------------------------------------------------------------------------|
| z      | ``topics`` | [T]     | topic of each token of the current document                                  |
| N      | ``tokens`` | [1, W]  | tokens per topic of the current document                                     |
| N + α  | ``weights``| [1, W]  | the same plus the prior                                                      |
| β      | ``beta``   | [U, W]  | E[β_wk] of the words of the batch; K padded to W columns with zeros          |
| u      |            |         | uniform number, a function of (seed, document, token, sweep)                 |

The statistics of a token are the probabilities with which it would be drawn given all other tokens, after each counted
sweep. They have the mean of the drawn topics and less noise (Rao and Blackwell).

The first sweep of a short document draws each token given the tokens before it. A long document would need many sweeps
to leave such a start. Its first sweep draws each token with γ in the place of N + α, where γ is the result of a few
updates of the fixed point

    γ_k ← α_k + Σ_w n_w γ_k β_wk / Σ_j γ_j β_wj

The random numbers of a document depend on the seed and the number of the document alone, and not on the other documents
of the batch, on padding or on threads. Copies of a document in one batch have different numbers.

A draw does not compute K prefix sums. The W products are added in lanes, the lane is drawn, then the topic within the
lane: the first part is vectorised, the second part is a few scalar additions. Wide rows have three levels.
"""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from smoothgrad_jax.core.fused_loops import row, set_row
from smoothgrad_jax.core.types import Array, Numeric
from smoothgrad_jax.data.batches import Batch
from smoothgrad_jax.models.lda.document_fit import copy_rows, padded

_LANES = 16
LONG = 100  # tokens from which a document is long
UPDATES = 5  # of the fixed point from which a long document starts
_WIDE = 512  # columns from which single numbers of N are written
_LONGEST_SUM = 9  # numbers that are added one after the other to draw one of them, where the width allows it


class SampledInfo(NamedTuple):
    """The samples of a batch.

    Attributes:
      gamma: [B, K] α plus the expected number of tokens per topic.
      iterations: [B] sweeps; 0 for an empty document.
      tokens: [B, K] tokens per topic after the last sweep, a sample.
    """

    gamma: Array
    iterations: Array
    tokens: Array


def sampling_width(num_topics: int) -> int:
    """Return W ≥ K, a multiple of 16 that has small factors."""
    blocks = padded(num_topics) // _LANES
    return _LANES * (blocks if blocks <= _LONGEST_SUM else -(-blocks // 4) * 4)


def sample_documents(
    alpha: Array,
    beta: tuple[Array, ...],
    batch: Batch,
    seed: Array,
    sweeps: Numeric,
    counted: Numeric,
    first: Numeric = 0,
    last: Numeric | None = None,
) -> tuple[Array, Array, SampledInfo]:
    """Sample the topics of the tokens of a batch.

    Args:
      alpha: α [K].
      beta: E[β] [U, W] of the words of the batch; several arrays as in
        :func:`smoothgrad_jax.models.lda.document_fit.fit_documents`.
      batch: The documents.
      seed: [2] uint32.
      sweeps, counted: See :class:`smoothgrad_jax.models.lda.methods.Sampled`.
      first, last: Sample only the documents first … last − 1.

    Returns:
      The expected number of tokens per word and topic, mean over the counted sweeps [S · U, W]; its sum over words
      [K]; and :class:`SampledInfo`.
    """
    num_topics, dtype, width = alpha.shape[0], beta[0].dtype, beta[0].shape[1]
    check_capacity(batch)
    counts = batch.counts.astype(dtype)
    pieces, weights_of = split_counts(counts)
    prior = jnp.pad(alpha[None], [(0, 0), (0, width - num_topics)])
    per_sweep, columns = 1 / jnp.asarray(counted, dtype), jnp.arange(width)[None]

    def sample_document(d, carry):
        stats, rows, entries, topics, total, info = carry
        start, length = batch.offsets[d], batch.offsets[d + 1] - batch.offsets[d]
        rows = copy_rows(rows, beta, batch.words, start, length)
        num_tokens, entries = _expand(entries, pieces, start, length)
        hashes = document_hashes(batch.documents[d], seed)
        is_long = num_tokens >= LONG
        gamma = _fixed_point(rows, counts, start, length, prior, columns < num_topics, jnp.where(is_long, UPDATES, 0))

        def sweep(number, carry):
            tokens, topics, stats, mean = carry
            from_gamma = is_long & (number == 0)
            leave_out, add = _token_changes(prior, gamma, from_gamma, number > 0)

            def draw_token(t, carry):
                tokens, weights, topics = carry
                entry = entries[t]
                # The barrier separates the read of the old topic from the write of the new one; see fused_loops.
                weight, old = lax.optimization_barrier((weights_of[start + entry], topics[t]))
                others, weights = leave_out(tokens, weights, old, weight)
                new = draw_topic(weights, row(rows, entry), uniform(hashes, t, number, dtype), num_topics)
                tokens, weights = add(*lax.optimization_barrier((others, weights, new)), weight)
                return tokens, weights, set_row(topics, t, new[None])

            def count_token(t, carry):
                stats, mean = carry
                entry, w = entries[t], batch.words[start + entries[t]]
                weight = weights_of[start + entry]
                # The expectation of this token given all others has less noise than the topic that was drawn.
                others = without_one(tokens, columns == topics[t], weight)
                p = lax.optimization_barrier((others + prior) * row(rows, entry))
                scale = lax.optimization_barrier(per_sweep * weight / _fold(p[0], _LANES).sum())
                return set_row(stats, w, row(stats, w) + scale * p), mean + scale * p

            weights = jnp.where(from_gamma, gamma, tokens + prior)
            tokens, _, topics = lax.fori_loop(0, num_tokens, draw_token, (tokens, weights, topics))
            number_counted = jnp.where(number >= sweeps - counted, num_tokens, 0)
            stats, mean = lax.fori_loop(0, number_counted, count_token, (stats, mean))
            return tokens, topics, stats, mean

        none = jnp.zeros_like(prior)
        tokens, topics, stats, mean = lax.fori_loop(0, sweeps, sweep, (none, topics, stats, none))
        number = jnp.where(length > 0, sweeps, 0).astype(jnp.int32)
        found = (prior + mean)[:, :num_topics], number[None], tokens[:, :num_topics]
        info = SampledInfo(*(set_row(x, d, new) for x, new in zip(info, found, strict=True)))
        return stats, rows, entries, topics, total + mean, info

    bounds = first, batch.size if last is None else last
    stats, *_, total, info = lax.fori_loop(*bounds, sample_document, _memory(alpha, beta, batch))
    return stats, total[0, :num_topics], info


def check_capacity(batch: Batch) -> None:
    """Raise an error if a document has too many tokens to draw each of them."""
    if batch.tokens.shape[-2] == 0:
        raise ValueError("a document has more than 16,777,216 tokens; the sampled method draws each of them")


def split_counts(counts: Array) -> tuple[Array, Array]:
    """Return the number of tokens of each entry, and the weight of one; 1 unless the count is fractional."""
    pieces = jnp.ceil(counts)
    return pieces.astype(jnp.int32), counts / jnp.maximum(pieces, 1)


def without_one(tokens: Array, is_topic: Array, weight: Array) -> Array:
    """Return N without a token of this weight, whose topic is marked; rounding may leave N below the weight."""
    return jnp.where(is_topic, jnp.maximum(tokens - weight, 0), tokens)


def document_hashes(documents: Array, seed: Array) -> tuple[Array, Array]:
    """Return two hashes per document, from the numbers of the documents and the seed."""
    documents = documents.astype(jnp.uint32)
    return mix(documents + seed[0]), mix(documents ^ seed[1])


def _memory(alpha, beta, batch):
    """Return the arrays that sampling writes to: statistics, rows, entries and topics of tokens, sum, and info."""
    dtype, width, capacity = beta[0].dtype, beta[0].shape[1], batch.tokens.shape[-2]
    per_topic = batch.size, alpha.shape[0]
    return (
        jnp.zeros((len(beta) * beta[0].shape[0], width), dtype),
        jnp.zeros((batch.longest.shape[-2], width), dtype),
        jnp.zeros(capacity, jnp.int32),
        jnp.zeros(capacity, jnp.int32),
        jnp.zeros((1, width), dtype),
        SampledInfo(jnp.broadcast_to(alpha, per_topic), jnp.zeros(batch.size, jnp.int32), jnp.zeros(per_topic, dtype)),
    )


def _fixed_point(rows, counts, start, length, prior, is_topic, updates):
    """Return γ [1, W] of a document after some updates, which start from equal proportions."""

    def add(gamma, i, total):
        beta = row(rows, i)
        ratio = lax.optimization_barrier(counts[start + i] / _fold((gamma * beta)[0], _LANES).sum())
        return total + ratio * beta

    def update(_, gamma):
        return prior + gamma * lax.fori_loop(0, length, partial(add, gamma), jnp.zeros_like(prior))

    return lax.fori_loop(0, updates, update, is_topic.astype(prior.dtype))


def _expand(entries, pieces, start, length):
    """Return the number of tokens of a document, and for each token its entry, as an offset in the document."""

    def append(i, carry):
        number, entries = carry
        end = number + pieces[start + i]
        return end, lax.fori_loop(number, end, lambda t, entries: set_row(entries, t, i[None]), entries)

    return lax.fori_loop(0, length, append, (jnp.int32(0), entries))


def _token_changes(prior, gamma, from_gamma, was_drawn):
    """Return a function that leaves a token out of N and of the weights, and one that adds a token.

    A narrow N is written as a whole: a processor that reads a vector has to wait for a number that was just written in
    it. Of a wide N only the number that changes is written. Weights that are γ stay as they are.

    Args:
      prior: α [1, W].
      gamma: γ [1, W].
      from_gamma: Whether this sweep draws with γ in the place of N + α.
      was_drawn: Whether the tokens have topics; before the first sweep there is nothing to leave out.
    """
    columns, is_wide = jnp.arange(prior.shape[1])[None], prior.shape[1] >= _WIDE

    def set_number(tokens, weights, k, n):
        weight = jnp.where(from_gamma, _at(weights, k), n + _at(prior, k))
        at = partial(lax.dynamic_update_slice, start_indices=(jnp.zeros_like(k), k))
        return lax.optimization_barrier((at(tokens, n[None, None]), at(weights, weight[None, None])))

    def leave_out(tokens, weights, k, weight):
        if is_wide:
            n = _at(tokens, k)
            return set_number(tokens, weights, k, jnp.where(was_drawn, jnp.maximum(n - weight, 0), n))
        others = without_one(tokens, (columns == k) & was_drawn, weight)
        return others, lax.optimization_barrier(jnp.where(from_gamma, gamma, others + prior))

    def add(tokens, weights, k, weight):
        if is_wide:
            return set_number(tokens, weights, k, _at(tokens, k) + weight)
        return jnp.where(columns == k, tokens + weight, tokens), weights

    return leave_out, add


def _at(x, k):
    """Return x[0, k]."""
    return lax.dynamic_slice(x, (jnp.zeros_like(k), k), (1, 1))[0, 0]


def draw_topic(weights: Array, beta: Array, u: Array, num_topics: int) -> Array:
    """Return k with probability proportional to weights_k β_k, from a uniform number u."""
    # Add the products in lanes, and these in fewer lanes, down to 16. The barriers keep XLA from computing sums again.
    products, sizes = weights * beta, _fold_sizes(weights.shape[1])
    folds = [lax.optimization_barrier(_fold(products[0], sizes[0]))]
    for size in sizes[1:]:
        folds.append(lax.optimization_barrier(_fold(folds[-1], size)))
    lanes = [folds[-1][i] for i in range(_LANES)]
    # u ≤ 1 − 2⁻²⁴, so that the target lies below the sum, and lanes that hold only padding are never drawn.
    k, rest = lax.optimization_barrier(_search(lanes, u * sum(lanes[1:], lanes[0])))
    for size, fold in zip(sizes[:0:-1], folds[-2::-1], strict=True):
        number, rest = _search(
            [lax.dynamic_index_in_dim(fold, k + i, 0, False) for i in range(0, len(fold), size)], rest
        )
        k, rest = lax.optimization_barrier((k + size * number, rest))
    at = partial(lax.dynamic_slice, slice_sizes=(1, 1))
    zero, places = jnp.zeros_like(k), range(0, weights.shape[1], sizes[0])
    number, _ = _search([(at(weights, (zero, k + i)) * at(beta, (zero, k + i)))[0, 0] for i in places], rest)
    # Rounding may leave a rest that exceeds the sum of a lane, whose last numbers may be padding.
    return k + sizes[0] * jnp.minimum(number, (num_topics - 1 - k) // sizes[0])


def _search(values, target):
    """Return how many prefix sums of the values are at most the target, and the target less the largest of these."""
    total, number, passed = jnp.zeros_like(target), jnp.int32(0), jnp.zeros_like(target)
    for value in values[:-1]:
        total = total + value
        below = total <= target
        number, passed = number + below, jnp.where(below, total, passed)
    return number, target - passed


def _fold(x, size):
    """Return the sum of the slices of a vector that have this size."""
    parts = [x[i : i + size] for i in range(0, x.shape[0], size)]
    return sum(parts[1:], parts[0])


def _fold_sizes(width):
    """Return the widths to which a row is folded, from the largest down to 16."""
    sizes, blocks = [], width // _LANES
    while True:
        divisors = [r for r in range(2, _LONGEST_SUM + 1) if blocks % r == 0]
        blocks = 1 if blocks <= _LONGEST_SUM or not divisors else blocks // max(divisors)
        sizes.append(blocks * _LANES)
        if blocks == 1:
            return sizes


def uniform(hashes: tuple[Array, Array], token: Array, sweep: Array, dtype: jnp.dtype) -> Array:
    """Return a number in [0, 1) with 24 random bits, from the two hashes of a document."""
    bits = mix(hashes[0] + token.astype(jnp.uint32) * jnp.uint32(0x9E3779B9))
    bits = mix(bits ^ (hashes[1] + sweep.astype(jnp.uint32) * jnp.uint32(0x7FEB352D)))
    return (bits >> 8).astype(jnp.int32).astype(dtype) * jnp.asarray(2**-24, dtype)


def mix(x: Array) -> Array:
    """Return a random-looking permutation of 32-bit numbers: the last step of MurmurHash3."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
