"""Workarounds that depend on the version of jax or on how XLA compiles for CPU, in one place."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

BEFORE_JAX_0_12 = jax.__version_info__ < (0, 12)

# Compiler options of a program that stays on the thread that calls it. Several Python threads run one such program
# each; XLA's own threads would compete with them for the cores.
SINGLE_THREAD_OPTIONS = {"xla_disable_hlo_passes": "cpu-parallel-task-assigner"}

# Before jax 0.12, XLA on CPU widens a whole bfloat16 array to float32 to write one row of it. It leaves an array of
# bits alone, so there bfloat16 is stored as uint16.


def stored_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype of an array that stores values of ``dtype`` and is updated in place."""
    return np.dtype(np.uint16) if BEFORE_JAX_0_12 and dtype == jnp.bfloat16 else dtype


def value_dtype(stored: np.dtype) -> np.dtype:
    """Return the dtype of the values in an array of :func:`stored_dtype`."""
    return jnp.dtype(jnp.bfloat16) if stored == np.uint16 else stored


def to_stored(value: jax.Array, stored: np.dtype) -> jax.Array:
    """Convert values to the dtype of an array that stores them."""
    bits = stored == np.uint16
    return lax.bitcast_convert_type(value.astype(jnp.bfloat16), jnp.uint16) if bits else value.astype(stored)


def from_stored(stored: jax.Array, dtype: np.dtype) -> jax.Array:
    """Convert stored values back to floats of ``dtype``."""
    if stored.dtype == np.uint16:
        stored = lax.bitcast_convert_type(stored, jnp.bfloat16)
    return stored.astype(dtype)
