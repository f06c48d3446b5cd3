"""Collapsed Gibbs sampling in all documents of a minibatch at once; letters as in ``document_sampling``.

Within a document the tokens are drawn one after the other, with the random numbers of
:func:`smoothgrad_jax.models.lda.document_sampling.sample_documents`, so that the topics are the same. One iteration
draws token t of every document. The documents are sorted, those with most tokens first: the documents that still have a
token t are the first ones. For large t there are loops over the first quarter of the documents, over a sixteenth, …

Loops in the compiled program: one over sweeps; in it, loops over t, for draws and for counted tokens; and one over the
updates from which long documents start. Topics are stored as an array [T, B], one row of which an iteration writes.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from smoothgrad_jax.core.types import Array, Numeric
from smoothgrad_jax.data.batches import Batch
from smoothgrad_jax.models.lda.batch_entries import blocks_of, document_of, lengths, sizes
from smoothgrad_jax.models.lda.document_sampling import (
    LONG,
    UPDATES,
    SampledInfo,
    check_capacity,
    document_hashes,
    draw_topic,
    split_counts,
    uniform,
    without_one,
)

_RATIO, _SMALLEST = 4, 8  # of the numbers of documents in the loops over t


class _Entries(NamedTuple):
    """Entries [N]: position of the word, tokens, weight of a token, and the next entry that has tokens."""

    words: Array
    pieces: Array
    weights: Array
    following: Array


class _Documents(NamedTuple):
    """Documents, those with most tokens first: number of tokens, first entry, hashes, and γ if the document is long."""

    number: Array
    first: Array
    hashes: tuple[Array, Array]
    gamma: Array


class _Cursor(NamedTuple):
    """Where each document is: the entry of the token, and how many tokens of this entry are left."""

    entry: Array
    left: Array


def sample_together(
    alpha: Array, beta: Array, batch: Batch, seed: Array, sweeps: Numeric, counted: Numeric
) -> tuple[Array, Array, SampledInfo]:
    """Sample the topics of the tokens of a batch.

    Args:
      alpha: α [K].
      beta: E[β] [U, W].
      batch, seed, sweeps, counted: As in :func:`smoothgrad_jax.models.lda.document_sampling.sample_documents`.

    Returns:
      As :func:`smoothgrad_jax.models.lda.document_sampling.sample_documents`.
    """
    check_capacity(batch)
    num_topics, (_, width), dtype = alpha.shape[0], beta.shape, beta.dtype
    prior = jnp.pad(alpha, (0, width - num_topics))
    entries = _entries(batch, dtype)
    order, documents = _sort_documents(batch, beta, entries, prior, num_topics, seed)
    per_sweep, columns = 1 / jnp.asarray(counted, dtype), jnp.arange(width)

    def draw(sweep, t, some, cursor, tokens, topics):
        weight, old = entries.weights[cursor.entry][:, None], topics[t, : len(tokens), None]
        others = without_one(tokens, (columns == old) & (sweep > 0), weight)
        from_gamma = (some.number >= LONG) & (sweep == 0)
        weights = jnp.where(from_gamma[:, None], some.gamma, others + prior)
        u, rows = uniform(some.hashes, t, sweep, dtype), beta[entries.words[cursor.entry]]
        new = jax.vmap(partial(draw_topic, num_topics=num_topics))(weights[:, None], rows[:, None], u)
        topics = lax.dynamic_update_slice(topics, new[None], (t, jnp.zeros_like(t)))
        drawn = jnp.where(columns == new[:, None], others + weight, others)
        return jnp.where((t < some.number)[:, None], drawn, tokens), topics

    def count(tokens, topics, t, some, cursor, mean, stats):
        weight, w, tokens = entries.weights[cursor.entry][:, None], entries.words[cursor.entry], tokens[: len(mean)]
        # The expectation of this token given all others has less noise than the topic that was drawn.
        p = (without_one(tokens, columns == topics[t, : len(mean), None], weight) + prior) * beta[w]
        scale = per_sweep * weight / p.sum(1, keepdims=True)
        expected = jnp.where((t < some.number)[:, None], scale * p, 0)
        return mean + expected, stats.at[w].add(expected)

    def sweep(number, carry):
        tokens, topics, mean, stats = carry
        tokens, topics = _each_token(partial(draw, number), documents, entries, tokens, topics)
        counts = documents._replace(number=jnp.where(number >= sweeps - counted, documents.number, 0))
        mean, stats = _each_token(partial(count, tokens, topics), counts, entries, mean, stats)
        return tokens, topics, mean, stats

    none = jnp.zeros((batch.size, width), dtype)
    topics = jnp.zeros((batch.tokens.shape[-2], batch.size), jnp.int32)
    tokens, _, mean, stats = lax.fori_loop(0, sweeps, sweep, (none, topics, none, jnp.zeros_like(beta)))
    mean, tokens = (none.at[order].set(x)[:, :num_topics] for x in (mean, tokens))
    number = jnp.where(lengths(batch) > 0, sweeps, 0).astype(jnp.int32)
    return stats, stats.sum(0)[:num_topics], SampledInfo(alpha + mean, number, tokens)


def _each_token(visit, documents, entries, local, shared):
    """Call ``visit`` for token t of all documents that have one, for t = 0, 1, …

    Args:
      visit: ``(t, documents, cursor, local, shared) -> (local, shared)``; ``local`` has a row per document.
      documents: :class:`_Documents`.
      entries: :class:`_Entries`.
      local, shared: What the visits change.
    """

    def step(t, carry, some):
        cursor, local, shared = carry
        return _next_token(cursor, entries), *visit(t, some, cursor, local, shared)

    cursor, begin = _Cursor(documents.first, entries.pieces[documents.first]), 0
    capacities = sizes(len(documents.number), _RATIO, _SMALLEST)
    for size, smaller in zip(capacities, (*capacities[1:], 0), strict=True):
        some, *state = jax.tree.map(lambda x, size=size: x[:size], (documents, cursor, local))
        # From token number[smaller] on, only the first ``smaller`` documents have more tokens.
        end = documents.number[smaller]
        *state, shared = lax.fori_loop(begin, end, partial(step, some=some), (*state, shared))
        cursor, local = jax.tree.map(
            lambda new, old: jnp.concatenate([new, old[len(new) :]]), tuple(state), (cursor, local)
        )
        begin = end
    return local, shared


def _next_token(cursor, entries):
    """Return where each document is after one token."""
    ends = cursor.left <= 1
    entry = jnp.where(ends, entries.following[cursor.entry + 1], cursor.entry)
    return _Cursor(entry, jnp.where(ends, entries.pieces[entry], cursor.left - 1))


def _entries(batch, dtype):
    """Return the entries of a batch; beyond the last token follows the last entry."""
    pieces, weights = split_counts(jnp.asarray(batch.counts, dtype))
    last = len(pieces) - 1
    with_tokens = jnp.where(pieces > 0, jnp.arange(len(pieces)), last)
    following = jnp.append(lax.associative_scan(jnp.minimum, with_tokens, reverse=True), last)
    return _Entries(jnp.asarray(batch.words), pieces, weights, following)


def _sort_documents(batch, beta, entries, prior, num_topics, seed):
    """Return the numbers of the documents in decreasing order of their tokens, and the documents."""
    number = jax.ops.segment_sum(entries.pieces, document_of(batch), batch.size, indices_are_sorted=True)
    order = jnp.argsort(-number)
    # γ_k ← α_k + Σ_w n_w γ_k β_wk / Σ_j γ_j β_wj
    blocks = blocks_of(batch, beta.dtype)
    rows, is_topic = beta[blocks.words], (jnp.arange(beta.shape[1]) < num_topics).astype(beta.dtype)
    gamma = lax.fori_loop(
        0,
        jnp.where((number >= LONG).any(), UPDATES, 0),
        lambda _, gamma: prior + gamma * blocks.expected(rows, gamma),
        jnp.tile(is_topic, (batch.size, 1)),
    )
    first = entries.following[jnp.asarray(batch.offsets[:-1])]
    hashes = document_hashes(jnp.asarray(batch.documents), seed)
    return order, jax.tree.map(lambda x: x[order], _Documents(number, first, hashes, gamma))
