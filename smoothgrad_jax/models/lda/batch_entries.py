"""The entries of a minibatch as arrays for all documents at once, and smaller arrays for unfinished documents.

| letter | meaning                                                                                       |
|--------|-----------------------------------------------------------------------------------------------|
| B, N   | documents, capacity for their entries; an entry is a word of a document with its count        |
| G      | capacity for blocks of eight entries; all entries of a block belong to one document           |
| W      | topics, padded                                                                                |

A loop over rounds ends when its slowest document ends. Finished documents are masked. When few documents are
unfinished, these move to smaller arrays, which have a loop of their own; :func:`sizes` returns the sizes.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from smoothgrad_jax.core.types import Array
from smoothgrad_jax.data.batches import TILE, Batch

# The default precision of a product on GPUs and TPUs has 8 to 10 bits.
PRECISION = lax.Precision.HIGHEST


class Blocks(NamedTuple):
    """Entries in blocks of eight.

    Attributes:
      words: [G, 8] positions in the vocabulary of the batch.
      counts: [G, 8]; 0 in padding.
      document: [G] increasing.
      used: The number of blocks, without the padding.
    """

    words: Array
    counts: Array
    document: Array
    used: Array

    def sums(self, values: Array, num_docs: int) -> Array:
        """Return the sums over the blocks of each document [B, …] of values [G, …]."""
        return jax.ops.segment_sum(values, self.document, num_docs, indices_are_sorted=True)

    def ratios(self, rows: Array, theta: Array) -> Array:
        """Return n_w / (βθ)_w of all entries [G, 8], 0 in padding; ``rows`` are β [G, 8, W] and θ is [B, W]."""
        p = jnp.einsum("gjk,gk->gj", rows, theta[self.document], precision=PRECISION)
        return jnp.where(self.counts > 0, self.counts / p, 0)

    def expected(self, rows: Array, theta: Array) -> Array:
        """Return (n / βθ) β of all documents [B, W]."""
        return self.sums(jnp.einsum("gj,gjk->gk", self.ratios(rows, theta), rows, precision=PRECISION), theta.shape[0])

    def of(self, chosen: Array, capacity: int) -> "Blocks":
        """Return the blocks of the documents that are chosen [B]; there must be at most ``capacity``."""
        wanted = chosen[self.document] & (jnp.arange(len(self.document)) < self.used)
        places = places_of(wanted, capacity, len(self.document) - 1)
        used = wanted.sum(dtype=jnp.int32)
        counts = jnp.where(jnp.arange(capacity)[:, None] < used, self.counts[places], 0)
        return Blocks(self.words[places], counts, self.document[places], used)


def lengths(batch: Batch) -> Array:
    """Return the number of entries of each document [B]."""
    return jnp.asarray(batch.offsets[1:] - batch.offsets[:-1])


def num_blocks(batch: Batch) -> Array:
    """Return the number of blocks of each document [B]."""
    return -(-lengths(batch) // TILE)


def blocks_of(batch: Batch, dtype: jnp.dtype) -> Blocks:
    """Return the entries of a batch in blocks."""
    capacity = (len(batch.words) + (TILE - 1) * batch.size) // TILE
    ends = running_sum(num_blocks(batch))
    document = _containing(ends, capacity)
    within = jnp.arange(capacity) - (ends - num_blocks(batch))[document]
    place = jnp.asarray(batch.offsets)[document][:, None] + TILE * within[:, None] + jnp.arange(TILE)[None]
    is_entry = (place < jnp.asarray(batch.offsets)[document + 1][:, None]) & (within >= 0)[:, None]
    place = jnp.where(is_entry, place, 0)
    counts = jnp.where(is_entry, jnp.asarray(batch.counts, dtype)[place], 0)
    return Blocks(jnp.asarray(batch.words)[place], counts, document, ends[-1])


def document_of(batch: Batch) -> Array:
    """Return the document of each entry [N]; the last document for the padding, whose counts are 0."""
    return _containing(jnp.asarray(batch.offsets[1:]), len(batch.words))


def sizes(total: int, ratio: int, smallest: int) -> tuple[int, ...]:
    """Return the sizes of the arrays for unfinished documents: ``total``, and smaller ones by this ratio."""
    found = [total]
    while found[-1] >= ratio * smallest:
        found.append(-(-found[-1] // ratio))
    return tuple(found)


def places_of(chosen: Array, capacity: int, otherwise: int) -> Array:
    """Return the places at which a vector is true, at most ``capacity`` of them, and ``otherwise`` after the last."""
    target = jnp.where(chosen, running_sum(chosen.astype(jnp.int32)) - 1, capacity)
    return jnp.full(capacity, otherwise).at[target].set(jnp.arange(len(chosen)), mode="drop")


def running_sum(x: Array) -> Array:
    """Return the sums of the first 1, 2, 3, … numbers of a vector; ``jnp.cumsum`` is a loop over them on a GPU."""
    return lax.associative_scan(jnp.add, x)


def _containing(ends, size):
    """Return for 0 … size − 1 the first range whose end lies above it; the last range beyond the last end."""
    starts = jnp.zeros(size, jnp.int32).at[ends].add(1, mode="drop")
    return jnp.minimum(running_sum(starts), len(ends) - 1)
