"""Loops over rows that the machine runs as one function.

On a CPU XLA makes a task of every operation, and a scheduler hands them out: about a microsecond each, in which a
document's γ could have been updated once more. Of a loop it makes one function, with the loops and branches inside.
:func:`whole` puts all of a computation into such a loop, which has one round. In it, single rows of large arrays are
read and written in place.

Three things make XLA copy the whole array in every round, or give up; tests look for them in the compiled programs:

- a row is read and then overwritten with something that does not depend on what was read (write what does, or keep the
  reading apart by a barrier);
- a branch returns several arrays that it wrote to (give each a branch of its own);
- a scatter, a sort, or the sum of a large array, for which XLA calls a library (write and add row by row).
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from smoothgrad_jax.core._xla import ALONE, BEFORE_JAX_0_12

__all__ = ["ALONE", "row", "set_row", "whole"]


def whole(function: Callable) -> Callable:
    """A function ``(arrays, *given) -> arrays``, for use in compiled ones, as one function of the machine.

    The arrays are changed in place, and keep their types; what is given is only read (and some of it must be).

    Example:
      >>> @jax.jit
      ... @whole
      ... def count(counts, ids):
      ...     return lax.fori_loop(0, len(ids), lambda i, n: set_row(n, ids[i], row(n, ids[i]) + 1), counts)
      >>> count(jax.numpy.zeros(3, int), jax.numpy.array([0, 2, 0])).tolist()
      [2, 0, 1]
    """

    @wraps(function)
    def call(arrays: Any, *given: Any) -> Any:
        if jax.default_backend() != "cpu":
            return function(arrays, *given)
        leaves, tree = jax.tree.flatten(given)
        full = [i for i, leaf in enumerate(leaves) if np.size(leaf)]  # the others hold nothing but a shape

        def loop(arrays, given):
            def only_round(i, arrays):
                # The barriers hide that there is one round, and that in every round the same would be given: XLA would
                # take out of the loop what does not change in it.
                _, hidden = lax.optimization_barrier((i, given))
                inside = dict(enumerate(leaves)) | dict(zip(full, hidden, strict=True))
                return function(arrays, *tree.unflatten(inside.values()))

            return lax.fori_loop(0, lax.optimization_barrier(jnp.int32(1)), only_round, arrays)

        given = [leaves[i] for i in full]
        if not BEFORE_JAX_0_12:
            return loop(arrays, given)
        # Before jax 0.12 XLA does it by itself only for loops that touch less than a kilobyte. The attributes go to the
        # operation that the values come from, which is the call. XLA ends the process if a call does not use what it
        # is given: the barrier, which takes all of it, is a use.
        return set_xla_metadata(jax.jit(loop)(arrays, given), xla_cpu_small_call="true", inlineable="false")

    return call


def row(array: jax.Array, i: Any) -> jax.Array:
    """array[i : i + 1]"""
    return lax.dynamic_slice_in_dim(array, i, 1)


def set_row(array: jax.Array, i: Any, new: jax.Array) -> jax.Array:
    """The array with array[i : i + 1] set; in a loop, in place."""
    return lax.dynamic_update_slice_in_dim(array, new, i, 0)
