"""The compiled loops over the rows of one partition.

:func:`update_rows` merges three sorted lists of words: those whose statistics leave the window, those whose statistics
enter it, and those that the next minibatch uses. It reads each row once, and writes it once if its sum changed. The
loops run as one function (:mod:`smoothgrad_jax.core.fused_loops`), and read and write rows in place.

A row is contiguous, and is written in parts: XLA would compute a concatenation element by element.
"""

import itertools
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from smoothgrad_jax.core._xla import SINGLE_THREAD_OPTIONS
from smoothgrad_jax.core.compensated import add
from smoothgrad_jax.core.fused_loops import fused, row, set_row
from smoothgrad_jax.core.row_sparse.decay import (
    advance,
    change_sum,
    combine,
    factors,
    num_columns,
    split_clock,
    split_row,
)
from smoothgrad_jax.core.row_sparse.kernel import RowFeatures
from smoothgrad_jax.core.row_sparse.slots import Slot, decode_row, encode
from smoothgrad_jax.core.row_sparse.state import END, RowSparseState
from smoothgrad_jax.core.types import Array

_CACHE_LINE = 16  # a read of every 16th number of a row loads all of it into the cache: 64 bytes of float32
_GROUP = 8  # rows that are read ahead together, so that their cache misses overlap
_LEAVES, _ENTERS, _USED, _BITS = 1, 2, 4, 3  # flags: what to do with the row of a word


class Leaving(NamedTuple):
    """Statistics that leave the window: words [U] of one partition, their values, and the sum over all words [C]."""

    words: Array
    values: Slot
    total: Array


class Entering(NamedTuple):
    """Statistics that enter the window.

    Attributes:
      words: [U] of one partition.
      sums: For each thread [S · U, W], unscaled.
      first: Where the partition begins in ``sums``.
      scale: D/B.
      totals: For each thread [C], unscaled.
    """

    words: Array
    sums: tuple[Array, ...]
    first: Array
    scale: Array
    totals: tuple[Array, ...]


class Clocks(NamedTuple):
    """The clock at which values left and entered, and the clock of the next step, [4] each."""

    previous: Array
    current: Array


def clocks_of(state: RowSparseState) -> Clocks:
    """Return the clocks for the next update of the rows."""
    clock = split_clock(state.clock, state.dtype)
    return Clocks(split_clock(state.previous_clock, state.dtype) if state.entering else clock, clock)


class RowUpdate(NamedTuple):
    """The result of :func:`update_rows`.

    Attributes:
      partition: The rows.
      slot: The values that entered, as the window stores them.
      features: [U, W] of the words that are used.
      total: Column sums [1, 3C + 4].
      entered: [C], the sum over words of the values that entered.
      prefetched: The sum of numbers that were read ahead. It only keeps XLA from removing the reads.
    """

    partition: Array
    slot: Slot
    features: Array
    total: Array
    entered: Array
    prefetched: Array


@partial(jax.jit, donate_argnames=("partition", "slot", "features"), compiler_options=SINGLE_THREAD_OPTIONS)
def update_rows(
    kernel: RowFeatures,
    partition: Array,
    slot: Slot,
    features: Array,
    total: Array,
    leaving: Leaving,
    entering: Entering,
    used: Array,
    clocks: Clocks,
    eta: tuple[Array, Array],
) -> RowUpdate:
    """Remove what left the window, add what entered it, and compute the features of the words in use.

    If the entering statistics are not finite, no row changes; the column sums and the features become NaN, so that no
    later step changes a row either.

    Args:
      kernel: Of the model.
      partition: Rows [V/S, 3C + 4].
      slot: Memory for the values that enter.
      features: Memory [U, W] for the features.
      total: Column sums [1, 3C + 4].
      leaving: Statistics that leave.
      entering: Statistics that enter.
      used: [U] words of the next minibatch.
      clocks: See :class:`Clocks`.
      eta: η of the partition, and its sum over all words.
    """
    start = RowUpdate(
        partition, slot, features, total, jnp.zeros_like(leaving.total), jnp.zeros((), leaving.total.dtype)
    )
    return merge_and_update(start, kernel, leaving, entering, used, clocks, eta)


@fused
def merge_and_update(
    start: RowUpdate,
    kernel: RowFeatures,
    leaving: Leaving,
    entering: Entering,
    used: Array,
    clocks: Clocks,
    eta: tuple[Array, Array],
) -> RowUpdate:
    """Update the arrays of ``start`` in place; see :func:`update_rows`."""
    eta_rows, eta_total = eta
    columns = num_columns(start.partition)
    entered = entering.scale * sum(entering.totals)
    # Column sums that are not finite come from an earlier step that failed; the driver learns of it a few steps later.
    is_finite = jnp.isfinite(entered).all() & jnp.isfinite(start.total).all()
    step_factors = tuple(factor[0, 0] for factor in factors(clocks.previous[None], clocks.current))

    def change(old, eta, left, entered):
        """Return the parts of a row at the current clock, after its sum changed at the previous one."""
        total, residue = change_sum(old, left, entered)
        lam = combine(step_factors, advance(old, clocks.previous, eta), eta, total)
        return lax.optimization_barrier((lam, total, residue, clocks.current[None]))

    # The column sums obey the recursion of a row.
    total = jnp.concatenate(change(start.total, eta_total, leaving.total[None], entered[None]), 1)
    total = jnp.where(is_finite, total, jnp.nan)
    normalisers = kernel.normalisers(total[:, :columns])
    number, order = _merge(leaving.words, entering.words, used, is_finite)

    def update(n, state):
        i, j, k, partition, slot, features = state
        w, leaves, enters, is_used = order[n] >> _BITS, *((order[n] & bit) > 0 for bit in (_LEAVES, _ENTERS, _USED))
        # Where the word is not in a list, the next row of that list is multiplied by 0 and written again in its turn:
        # cheaper than a branch. The barrier computes these numbers once, and not once per column.
        w, factor, sign = lax.optimization_barrier((w, entering.scale * enters, leaves.astype(partition.dtype)))
        # Ŝ_w = (D/B) Σ_d statistics of document d
        values = factor * sum(row(each, j + entering.first)[:, :columns] for each in entering.sums)
        slot = jax.tree.map(lambda x, y: set_row(x, j, y), slot, encode(values, slot[0].dtype))
        # Read the value back from the slot: a product fused with the addition would be rounded only afterwards, and
        # then the value that leaves later would not be the value that entered.
        stored = decode_row(lax.optimization_barrier(slot), j, partition.dtype)
        new = change(
            row(partition, w), _row_or_all(eta_rows, w), sign * decode_row(leaving.values, i, partition.dtype), stored
        )
        features = lax.cond(
            is_used,
            lambda features: set_row(features, k, kernel.features(new[0], normalisers)),
            lambda features: features,
            features,
        )
        # A row that was only read keeps its old clock, and is advanced from there the next time.
        partition = lax.cond(leaves | enters, lambda rows: _write_row(rows, w, new), lambda rows: rows, partition)
        return i + leaves, j + enters, k + is_used, partition, slot, features

    def update_group(state):
        """Update some rows, then read the next rows ahead: their cache misses then overlap."""
        n, prefetched, *state = state
        end = n + _GROUP
        *_, partition, _, _ = state = lax.fori_loop(n, jnp.minimum(end, number), update, tuple(state))

        def read_ahead(n, total):
            return total + row(partition, order[n] >> _BITS)[0, ::_CACHE_LINE].sum()

        return end, lax.fori_loop(end, end + _GROUP, read_ahead, prefetched), *state

    state = (jnp.int32(0), start.prefetched, *[jnp.int32(0)] * 3, start.partition, start.slot, start.features)
    _, prefetched, *_, partition, slot, features = lax.while_loop(lambda state: state[0] < number, update_group, state)
    return RowUpdate(partition, slot, _keep_or_nan(features, is_finite), total, entered, prefetched)


def _keep_or_nan(features, is_finite):
    """Return the features, all NaN unless ``is_finite``; in place."""
    unknown = jnp.full((1, features.shape[1]), jnp.nan, features.dtype)
    num_unknown = jnp.where(is_finite, 0, features.shape[0])
    return lax.fori_loop(0, num_unknown, lambda i, features: set_row(features, i, unknown), features)


def _merge(leaving, entering, used, is_finite):
    """Merge three sorted lists of words: how many different words there are, and each with flags for its lists."""

    def next_word(i, j, k):
        return jnp.minimum(jnp.minimum(leaving[i], entering[j]), used[k])

    def append(state):
        i, j, k, n, order = state
        w = next_word(i, j, k)
        leaves, enters, is_used = leaving[i] == w, entering[j] == w, used[k] == w
        flags = (w << _BITS) + _LEAVES * leaves + _ENTERS * enters + _USED * is_used
        return i + leaves, j + enters, k + is_used, n + 1, set_row(order, n, flags[None])

    # Rows are read ahead up to two groups beyond the last word.
    order = jnp.zeros(leaving.shape[0] + entering.shape[0] + used.shape[0] + 2 * _GROUP, jnp.int32)
    start = (*[jnp.int32(0)] * 4, order)
    *_, number, order = lax.while_loop(lambda state: is_finite & (next_word(*state[:3]) < END), append, start)
    return number, order


@partial(jax.jit, donate_argnums=0, compiler_options=SINGLE_THREAD_OPTIONS)
def remove_slot(partition: Array, total: Array, slot: Slot, words: Array, clock: Array, eta: Array) -> Array:
    """Remove the values of a slot from the row sums at a clock; change nothing if the column sums are not finite."""
    return remove_rows(partition, total, slot, words, clock, eta)


@fused
def remove_rows(partition: Array, total: Array, slot: Slot, words: Array, clock: Array, eta: Array) -> Array:
    """Update the partition in place; see :func:`remove_slot`."""
    is_finite = jnp.isfinite(total).all()

    def remove(carry):
        i, partition = carry
        w = words[i]
        old = row(partition, w)
        _, sums, residue, _ = split_row(old)
        changed = add(sums, residue, -decode_row(slot, i, partition.dtype))
        new = advance(old, clock, _row_or_all(eta, w)), *changed, clock[None]
        return i + 1, _write_row(partition, w, lax.optimization_barrier(new))

    return lax.while_loop(lambda carry: is_finite & (words[carry[0]] < END), remove, (jnp.int32(0), partition))[1]


def _write_row(partition, w, parts):
    """Write a row given in parts. The parts are read from the row, so a barrier must have computed them before."""
    columns = itertools.accumulate((part.shape[1] for part in parts[:-1]), initial=0)
    for part, column in zip(parts, columns, strict=True):
        partition = lax.dynamic_update_slice(partition, part, (w, jnp.int32(column)))
    return partition


def _row_or_all(eta, w):
    return eta if eta.shape[0] == 1 else row(eta, w)
