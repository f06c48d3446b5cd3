"""Collapsed variational inference of one document (CVB0), with the topics of words held fixed.

    φ_wk ∝ (N_k − φ_wk + α_k) β_wk,    N_k = Σ_w n_w φ_wk

| letter | name        | shape   | meaning                                                                       |
|--------|-------------|---------|-------------------------------------------------------------------------------|
| φ      | ``phi``     | [M, W]  | responsibilities of the topics for the words of the current document          |
| N      | ``tokens``  | [1, W]  | expected tokens per topic of the current document                             |
| β      | ``beta``    | [U, W]  | E[β_wk] of the words of the batch; K padded to W columns with zeros           |
| n_w    | ``counts``  |         | how often a word occurs in the document; its n_w tokens share one φ_w         |

The update of a word leaves one of its own tokens out of N, or all of its count if that is below 1.

Reference: Asuncion, Welling, Smyth and Teh, *On smoothing and inference for topic models*, UAI 2009.
"""

import jax.numpy as jnp
from jax import lax

from smoothgrad_jax.core.fused_loops import row, set_row
from smoothgrad_jax.core.types import Array, Numeric
from smoothgrad_jax.data.batches import Batch
from smoothgrad_jax.models.lda.document_fit import LocalInfo, copy_rows, pad, sum_by_halves


def collapse_documents(
    alpha: Array,
    beta: tuple[Array, ...],
    batch: Batch,
    tol: Numeric,
    max_iter: Numeric,
    first: Numeric = 0,
    last: Numeric | None = None,
) -> tuple[Array, Array, LocalInfo]:
    """Fit φ of the documents of a batch.

    Args:
      alpha: α [K].
      beta: E[β] [U, W] of the words of the batch; several arrays as in
        :func:`smoothgrad_jax.models.lda.document_fit.fit_documents`.
      batch: The documents.
      tol: Stop a document when a round over its words moves N by less on average over the topics.
      max_iter: Stop a document after this many rounds.
      first, last: Fit only the documents first … last − 1.

    Returns:
      Σ_d n_dw φ_dwk for the words of all arrays [S · U, W], its sum over words [K], and :class:`LocalInfo`, whose γ is
      α + N.
    """
    num_topics, dtype, width = alpha.shape[0], beta[0].dtype, beta[0].shape[1]
    counts, prior = batch.counts.astype(dtype), pad(alpha[None])

    def fit(d, carry):
        stats, rows, phi, total, info = carry
        start, length = batch.offsets[d], batch.offsets[d + 1] - batch.offsets[d]
        rows = copy_rows(rows, beta, batch.words, start, length)

        def initialise(i, carry):
            phi, tokens = carry
            new = _normalised(prior * row(rows, i))
            return set_row(phi, i, new), tokens + counts[start + i] * new

        def update(i, carry):
            phi, tokens = carry
            # The barrier separates the read of the old row from the write of the new one; see fused_loops.
            n, old = lax.optimization_barrier((counts[start + i], row(phi, i)))
            # φ_wk ∝ (N_k − φ_wk + α_k) β_wk
            new = _normalised(without_one(tokens, old, n, prior) * row(rows, i))
            return set_row(phi, i, new), tokens + n * (new - old)

        def unfinished(state):
            *_, moved, number = state
            return (moved >= tol) & (number < jnp.where(length > 0, max_iter, 0))

        def iterate(state):
            phi, tokens, _, number = state
            phi, new = lax.fori_loop(0, length, update, (phi, tokens))
            return phi, new, sum_by_halves(jnp.abs(new - tokens)[0]) / num_topics, number + 1

        def count(i, carry):
            stats, tokens = carry
            w, expected = batch.words[start + i], counts[start + i] * row(phi, i)
            return set_row(stats, w, row(stats, w) + expected), tokens + expected

        phi, tokens = lax.fori_loop(0, length, initialise, (phi, jnp.zeros_like(prior)))
        begin = phi, tokens, jnp.full((), jnp.inf, dtype), jnp.zeros((), jnp.int32)
        phi, _, moved, number = lax.while_loop(unfinished, iterate, begin)
        stats, tokens = lax.fori_loop(0, length, count, (stats, jnp.zeros_like(prior)))
        info = LocalInfo(
            set_row(info.gamma, d, (prior + tokens)[:, :num_topics]),
            set_row(info.iterations, d, number[None]),
            jnp.maximum(info.change, jnp.where(length > 0, moved, 0)),
        )
        return stats, rows, phi, total + tokens, info

    empty = jnp.zeros((batch.longest.shape[-2], width), dtype)
    sums = jnp.zeros((len(beta) * beta[0].shape[0], width), dtype)
    gamma = jnp.broadcast_to(alpha, (batch.size, num_topics))
    info = LocalInfo(gamma, jnp.zeros(batch.size, jnp.int32), jnp.zeros((), dtype))
    carry = sums, empty, empty, jnp.zeros_like(prior), info
    stats, *_, total, info = lax.fori_loop(first, batch.size if last is None else last, fit, carry)
    return stats, total[0, :num_topics], info


def without_one(tokens: Array, phi: Array, count: Array, prior: Array) -> Array:
    """Return N − φ_w + α, all tokens of the document but one of the word, plus the prior."""
    # Rounding may leave N below φ.
    return jnp.maximum(tokens - jnp.minimum(count, 1) * phi, 0) + prior


def _normalised(p):
    # The barrier keeps XLA from computing the products twice, once for the sum and once for the quotient.
    p = lax.optimization_barrier(p)
    return p * (1 / jnp.maximum(sum_by_halves(p[0]), jnp.finfo(p.dtype).tiny))
