"""Collapsed variational inference (CVB0) of all documents of a minibatch at once; letters as in ``document_collapsed``.

Within a document the words are updated one after the other, as in
:func:`smoothgrad_jax.models.lda.document_collapsed.collapse_documents`. One loop updates a word of every document per
iteration. A document that has reached its last word starts its next round, or is finished, without waiting for longer
documents.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from smoothgrad_jax.core.types import Array, Numeric
from smoothgrad_jax.data.batches import Batch
from smoothgrad_jax.models.lda.batch_entries import document_of, lengths, places_of, sizes
from smoothgrad_jax.models.lda.document_collapsed import without_one
from smoothgrad_jax.models.lda.document_fit import LocalInfo, pad

_RATIO, _SMALLEST = 4, 8  # of the arrays for documents that are not finished


class _Documents(NamedTuple):
    """Documents in progress.

    Attributes:
      document: Numbers of the documents.
      first, length: The first entry, and the number of entries.
      position: Position of the next word.
      tokens, before: N, and N before this round.
      moved: Mean change of N in the last round.
      rounds: Number of complete rounds.
    """

    document: Array
    first: Array
    length: Array
    position: Array
    tokens: Array
    before: Array
    moved: Array
    rounds: Array


def collapse_together(
    alpha: Array, beta: Array, batch: Batch, tol: Numeric, max_iter: Numeric
) -> tuple[Array, Array, LocalInfo]:
    """Fit φ of all documents of a batch.

    Args:
      alpha: α [K].
      beta: E[β] [U, W].
      batch, tol, max_iter: As in :func:`smoothgrad_jax.models.lda.document_collapsed.collapse_documents`.

    Returns:
      As :func:`smoothgrad_jax.models.lda.document_collapsed.collapse_documents`.
    """
    num_topics, dtype, size = alpha.shape[0], beta.dtype, batch.size
    words, counts, prior = jnp.asarray(batch.words), jnp.asarray(batch.counts, dtype), pad(alpha)

    def sums(phi):
        return jax.ops.segment_sum(counts[:, None] * phi, document_of(batch), size, indices_are_sorted=True)

    def unfinished(docs):
        return (docs.moved >= tol) & (docs.rounds < max_iter) & (docs.length > 0)

    def more_than(smaller, carry):
        return unfinished(carry[0]).sum() > smaller

    def update(carry):
        docs, phi = carry
        active, entry = unfinished(docs), docs.first + docs.position
        n, old = counts[entry][:, None], phi[entry]
        # φ_wk ∝ (N_k − φ_wk + α_k) β_wk
        new = _normalised(without_one(docs.tokens, old, n, prior) * beta[words[entry]])
        phi = phi.at[jnp.where(active, entry, len(phi))].set(new, mode="drop")
        docs = docs._replace(tokens=jnp.where(active[:, None], docs.tokens + n * (new - old), docs.tokens))
        return _next_word(docs, active, num_topics), phi

    phi = _normalised(prior * beta[words])
    tokens, none = sums(phi), jnp.zeros(size, jnp.int32)
    start = jnp.asarray(batch.offsets[:-1]), lengths(batch), none, tokens, tokens, jnp.full(size, jnp.inf, dtype), none
    docs = _Documents(jnp.arange(size), *start)
    moved, rounds, capacities = docs.moved, docs.rounds, sizes(size, _RATIO, _SMALLEST)
    for smaller in (*capacities[1:], 0):
        docs, phi = lax.while_loop(partial(more_than, smaller), update, (docs, phi))
        moved = moved.at[docs.document].set(docs.moved, mode="drop")
        rounds = rounds.at[docs.document].set(docs.rounds, mode="drop")
        docs = _select(docs, unfinished(docs), smaller, size)
    gamma, change = alpha + sums(phi)[:, :num_topics], jnp.where(lengths(batch) > 0, moved, 0).max()
    stats = jnp.zeros_like(beta).at[words].add(counts[:, None] * phi)
    return stats, stats.sum(0)[:num_topics], LocalInfo(gamma, rounds, change)


def _next_word(docs, active, num_topics):
    """Return the documents at their next word; those that are active and at the last word have ended a round."""
    ends = active & (docs.position + 1 == docs.length)
    moved = jnp.abs(docs.tokens - docs.before).sum(1) / num_topics
    return docs._replace(
        position=jnp.where(ends, 0, docs.position + active),
        before=jnp.where(ends[:, None], docs.tokens, docs.before),
        moved=jnp.where(ends, moved, docs.moved),
        rounds=docs.rounds + ends,
    )


def _select(docs, chosen, capacity, num_docs):
    """Return the chosen documents, at most ``capacity`` of them, and empty ones that stand for no document."""
    places = places_of(chosen, capacity, 0)
    found = jax.tree.map(lambda x: x[places], docs)
    is_document = jnp.arange(capacity) < chosen.sum()
    return found._replace(
        document=jnp.where(is_document, found.document, num_docs), length=jnp.where(is_document, found.length, 0)
    )


def _normalised(p):
    return p / jnp.maximum(p.sum(-1, keepdims=True), jnp.finfo(p.dtype).tiny)
