"""Loops over rows that XLA for CPU compiles into one function.

Only for programs that run on a CPU: on an accelerator every operation of a loop would be a kernel of its own, and the
callers choose other programs.

On a CPU, XLA makes a task of every operation, and a scheduler runs the tasks: about a microsecond each. XLA compiles a
loop into one function, with the loops and branches inside it. :func:`fused` puts a computation into a loop of one
iteration. Inside it, single rows of large arrays are read and written in place.

Three things make XLA copy a whole array per iteration, or not fuse the loop; tests look for them in the compiled
programs:

- A row is read and then overwritten with something that does not depend on it. Write something that does, or separate
  the read from the write by a barrier.
- A branch returns several arrays that it writes to. Give each array its own branch.
- A scatter, a sort, or the sum of a large array, for which XLA calls a library. Write and add row by row.
"""

from collections.abc import Callable
from functools import wraps

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from smoothgrad_jax.core._xla import BEFORE_JAX_0_12
from smoothgrad_jax.core.types import Array, Numeric, PyTree


def fused(function: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Make a function ``(arrays, *inputs) -> arrays`` compile into one function, inside ``jax.jit``.

    The arrays are updated in place, and keep their types. The inputs are only read; at least one is needed.

    Example:
      >>> @jax.jit
      ... @fused
      ... def count(counts, ids):
      ...     return lax.fori_loop(0, len(ids), lambda i, n: set_row(n, ids[i], row(n, ids[i]) + 1), counts)
      >>> count(jax.numpy.zeros(3, int), jax.numpy.array([0, 2, 0])).tolist()
      [2, 0, 1]
    """

    @wraps(function)
    def call(arrays: PyTree, *inputs: PyTree) -> PyTree:
        leaves, tree = jax.tree.flatten(inputs)
        nonempty = [i for i, leaf in enumerate(leaves) if np.size(leaf)]  # the others carry only a shape

        def loop(arrays, inputs):
            def only_iteration(i, arrays):
                # The barriers hide that there is one iteration, and that the inputs are the same in each: XLA would
                # move out of the loop what does not change in it.
                _, hidden = lax.optimization_barrier((i, inputs))
                inside = dict(enumerate(leaves)) | dict(zip(nonempty, hidden, strict=True))
                return function(arrays, *jax.tree.unflatten(tree, inside.values()))

            return lax.fori_loop(0, lax.optimization_barrier(jnp.int32(1)), only_iteration, arrays)

        used = [leaves[i] for i in nonempty]
        if not BEFORE_JAX_0_12:
            return loop(arrays, used)
        # Before jax 0.12, XLA fuses by itself only loops that touch less than a kilobyte. The attributes belong to the
        # operation that the values come from, which is the call. XLA ends the process if a call does not use one of its
        # inputs; the barrier uses all of them.
        return set_xla_metadata(jax.jit(loop)(arrays, used), xla_cpu_small_call="true", inlineable="false")

    return call


def row(array: Array, i: Numeric) -> Array:
    """Return array[i : i + 1]."""
    return lax.dynamic_slice_in_dim(array, i, 1)


def set_row(array: Array, i: Numeric, new: Array) -> Array:
    """Return the array with array[i : i + 1] set; inside a loop, in place."""
    return lax.dynamic_update_slice_in_dim(array, new, i, 0)
