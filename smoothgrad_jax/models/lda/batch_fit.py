"""The variational distributions of all documents of a minibatch at once; letters as in ``document_fit``.

A document makes the same updates as in :func:`smoothgrad_jax.models.lda.document_fit.fit_documents`, until it has
converged. A loop over rounds updates all documents; a round is two products of β̃ [G, 8, W] with vectors, and sums over
the blocks of each document. Most documents need few rounds and some need many: when half of the blocks, a quarter and
an eighth are left, they move to arrays of that size, and the next loop goes on with them. The loops follow each other,
and none contains another one.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from smoothgrad_jax.core.types import Array, Numeric
from smoothgrad_jax.data.batches import Batch
from smoothgrad_jax.models.lda.batch_entries import blocks_of, lengths, num_blocks, sizes
from smoothgrad_jax.models.lda.document_fit import LocalInfo, add_momentum, pad, scaled_proportions

_RATIO, _SMALLEST = 2, 64  # of the arrays for documents that have not converged, in blocks
_MOST_SIZES = 4  # each size is a loop to compile


class _Iteration(NamedTuple):
    """The state of the fixed-point iteration: one row per document, and the number of rounds."""

    previous: Array
    point: Array
    gamma: Array
    moved: Array
    number: Array
    rounds: Array


def fit_together(
    alpha: Array,
    beta: Array,
    batch: Batch,
    tol: Numeric,
    max_iter: Numeric,
    proportions: Callable[[Array], Array] | None = None,
) -> tuple[Array, Array, LocalInfo]:
    """Fit γ of all documents of a batch.

    Args:
      alpha: α [K].
      beta: β̃ [U, K padded].
      batch, tol, max_iter, proportions: As in :func:`smoothgrad_jax.models.lda.document_fit.fit_documents`.

    Returns:
      As :func:`smoothgrad_jax.models.lda.document_fit.fit_documents`.
    """
    num_topics, dtype = alpha.shape[0], beta.dtype
    theta_of = jax.vmap(proportions or (lambda gamma: scaled_proportions(gamma)[0]))
    padded_alpha, is_topic = pad(alpha, jnp.finfo(dtype).tiny)[None], pad(jnp.ones_like(alpha))[None]
    blocks, size = blocks_of(batch, dtype), num_blocks(batch)
    tokens = blocks.sums(blocks.counts.sum(1), batch.size)

    def unfinished(state):
        return (state.moved >= tol) & (state.rounds < max_iter) & (size > 0)

    def more_than(smaller, state):
        return jnp.where(unfinished(state), size, 0).sum() > smaller

    def update(blocks, rows, state):
        active = unfinished(state)
        point = add_momentum(state.previous, state.point, state.gamma, state.rounds, padded_alpha)
        # F(γ) = α + θ̃ ∘ ((n / β̃θ̃) β̃)
        theta = theta_of(point)
        gamma = padded_alpha + theta * blocks.expected(rows, theta)
        moved = (is_topic * jnp.abs(gamma - point)).sum(1) / num_topics
        return _Iteration(
            state.point,
            point,
            jnp.where(active[:, None], gamma, state.gamma),
            jnp.where(active, moved, state.moved),
            state.number + active.astype(jnp.int32),
            state.rounds + 1,
        )

    gamma = padded_alpha + is_topic * (tokens / num_topics)[:, None]
    none = jnp.zeros(batch.size, jnp.int32)
    state = _Iteration(gamma, gamma, gamma, jnp.full(batch.size, jnp.inf, dtype), none, jnp.int32(0))
    capacities = sizes(len(blocks.document), _RATIO, _SMALLEST)[:_MOST_SIZES]
    for capacity, smaller in zip(capacities, (*capacities[1:], 0), strict=True):
        left = blocks if capacity == capacities[0] else blocks.of(unfinished(state), capacity)
        state = lax.while_loop(partial(more_than, smaller), partial(update, left, beta[left.words]), state)
    theta, rows = theta_of(state.gamma), beta[blocks.words]
    # n_w φ_wk = (n_w / (β̃θ̃)_w) β̃_wk θ̃_k; in this order no factor can overflow
    expected = (blocks.ratios(rows, theta)[..., None] * rows) * theta[blocks.document][:, None]
    stats = jnp.zeros_like(beta).at[blocks.words].add(expected)
    gamma = jnp.where((lengths(batch) > 0)[:, None], state.gamma[:, :num_topics], alpha[None])
    change = jnp.where(size > 0, state.moved, 0).max()
    return stats, stats.sum(0)[:num_topics], LocalInfo(gamma, state.number, change)
