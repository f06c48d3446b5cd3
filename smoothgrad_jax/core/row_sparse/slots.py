"""How a window slot stores its values: as floats, as bfloat16, or as bytes.

A slot is a tuple of arrays with one entry per row of the minibatch. Values are rounded when they are stored, and the
rounded values enter the window sum. What leaves the sum later is therefore exactly what entered it.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from smoothgrad_jax.core.fused_loops import row
from smoothgrad_jax.core.types import Array, DTypeLike

Slot = tuple[Array, ...]

_CODE_BIAS = (127 << 3) - 255  # the code 255 is 1.0: exponent 127 and mantissa 0, in the 11 upper bits of a float


def encode(values: Array, dtype: DTypeLike) -> Slot:
    """Return values [n, C] ≥ 0 as a slot stores them.

    For uint8 a value is a float with 5 bits of exponent and 3 of mantissa, relative to the largest value of its row:
    the relative error is below 1/10, and values down to 2^−31 of the largest are kept. The row sum is exact, because
    each row has a scale.
    """
    if dtype != jnp.uint8:
        return (values.astype(dtype),)
    values = values.astype(jnp.float32)
    largest = jnp.maximum(values.max(1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    bits = lax.bitcast_convert_type(values / largest, jnp.int32)
    codes = jnp.clip(((bits + (1 << 19)) >> 20) - _CODE_BIAS, 0, 255).astype(jnp.uint8)
    scale = values.sum(1) / jnp.maximum(_decode_codes(codes).sum(1), jnp.finfo(jnp.float32).tiny)
    # The scale has 20 bits, so that its product with a code is exact. The value that leaves is then the value that
    # entered, even where XLA fuses the multiplication and the addition.
    return codes, lax.reduce_precision(scale, 8, 19)


def decode(slot: Slot, dtype: DTypeLike) -> Array:
    """Return the values [n, C] of a slot, or of some rows of it; works on NumPy and on JAX arrays."""
    values = _decode_codes(slot[0]) * slot[1][:, None] if slot[0].dtype == jnp.uint8 else slot[0]
    return values.astype(dtype)


def decode_row(slot: Slot, i: Array, dtype: DTypeLike) -> Array:
    """Return the values [1, C] of row i."""
    return decode(tuple(row(part, i) for part in slot), dtype)


def round_trip(values: np.ndarray, dtype: DTypeLike) -> np.ndarray:
    """Return values [n, C] as a slot of this dtype gives them back."""
    if dtype == jnp.uint8:
        return np.asarray(_round_trip_bytes(values))
    return values.astype(dtype).astype(values.dtype)


def empty(num_rows: int, num_columns: int, dtype: DTypeLike) -> Slot:
    """Return a slot of zeros."""
    values = zeros((num_rows, num_columns), dtype)
    return (values, zeros((num_rows,), jnp.float32)) if dtype == jnp.uint8 else (values,)


def zeros(shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Return zeros by copying from NumPy, which compiles nothing; ``jnp.zeros`` compiles once per shape."""
    return jnp.array(np.zeros(shape, dtype))


def _decode_codes(codes):
    bits = (codes.astype(np.int32) + _CODE_BIAS) << 20
    return bits.view(np.float32) * (codes > 0)


@jax.jit
def _round_trip_bytes(values):
    return decode(encode(values, jnp.uint8), values.dtype)
