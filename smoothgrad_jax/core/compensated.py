"""Compensated sums: a running sum as two floats, which together hold twice the digits of one.

    Σ + δ        Σ is the sum rounded to one float, δ the sum of the rounding errors of Σ

A plain float32 running sum drifts, also below zero, when values are added and later subtracted. With the exact error
of every addition carried in δ it does not.

Reference: Knuth, *The Art of Computer Programming*, volume 2, section 4.2.2 (TwoSum, after Møller).
"""

from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from smoothgrad_jax.core.types import PyTree

_Array = TypeVar("_Array", jax.Array, np.ndarray)


def two_sum(a: _Array, b: _Array) -> tuple[_Array, _Array]:
    """Return a + b rounded, and the exact error of that rounding; for NumPy and JAX arrays."""
    total = a + b
    back = total - a
    return total, (a - (total - back)) + (b - back)


def add(total: _Array, residue: _Array, value: _Array) -> tuple[_Array, _Array]:
    """Add to Σ + δ and normalise, so that Σ is the whole sum rounded; for NumPy and JAX arrays.

    Args:
      total: Σ.
      residue: δ.
      value: The value to add.

    Returns:
      The new ``(total, residue)``.
    """
    high, error = two_sum(total, value)
    low = error + residue
    total = high + low
    return total, low - (total - high)


def accumulate(total: PyTree, residue: PyTree, value: PyTree) -> tuple[PyTree, PyTree]:
    """Compute Σ ← Σ + x for pytrees, and add the exact rounding error to δ, without normalising.

    One pass over memory: Σ stays the plain float sum, and Σ + δ is formed where the sum is read.
    """

    def one(s, r, x):
        # The barrier: see `exchange`.
        _, error = two_sum(lax.optimization_barrier(s), x)
        return s + x, r + error

    return _unzip(total, jax.tree.map(one, total, residue, value))


def exchange(total: PyTree, residue: PyTree, keep: jax.Array, old: PyTree, new: PyTree) -> tuple[PyTree, PyTree]:
    """Compute Σ ← (Σ − old) + new for pytrees, and add the exact rounding errors to δ.

    Args:
      total: Σ.
      residue: δ.
      keep: A boolean scalar; where False, the sum starts again from Σ = δ = 0.
      old: The value that leaves.
      new: The value that enters.

    Returns:
      The new ``(total, residue)``.
    """

    def one(s, r, x, y):
        # The barrier hides that both lines compute the same sum. XLA would otherwise keep the intermediate sums in
        # memory for the second use; computing them twice costs nothing in a loop that waits for memory.
        again = lax.optimization_barrier(s)
        less, error_1 = two_sum(jnp.where(keep, again, 0), -x)
        _, error_2 = two_sum(less, y)
        return (jnp.where(keep, s, 0) - x) + y, jnp.where(keep, r, 0) + (error_1 + error_2)

    return _unzip(total, jax.tree.map(one, total, residue, old, new))


def _unzip(like, pairs):
    return jax.tree.transpose(jax.tree.structure(like), jax.tree.structure((0, 0)), pairs)
