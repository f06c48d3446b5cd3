"""Expectations under a Dirichlet, finite for every positive float.

    E[log x_k]     = ψ(a_k) − ψ(Σ_j a_j)
    exp E[log x_k] = exp ψ(a_k) / exp ψ(Σ_j a_j)

| letter | name            | meaning                                                |
|--------|-----------------|--------------------------------------------------------|
| a, b   | ``a``, ``b``    | parameters of a Dirichlet along ``axis``, positive     |
| ψ      | ``digamma``     | d/dx log Γ(x)                                          |
| c      | ``SHIFT``       | 5/4                                                    |
| e      | ``exponent``    | what ψ adds to a logarithm: ψ(x) = log(x + c) + e(x)   |
| p      |                 | a polynomial; of degree 5 in float32 and 16 in float64 |

One formula without branches serves all positive x. By the recurrence ψ(x) = ψ(x + 1) − 1/x, and with the pole gone the
rest is smooth in z = 1/(x + c), from z = 0 where x is infinite up to z = 1/c where x is 0:

    e(x)     = z p(z) − 1/x,                 p(z) ≈ (ψ(x + 1) − log(x + c)) / z
    exp ψ(x) = (x + c) exp e(x)

so that exp ψ needs two divisions and no logarithm, and a *ratio* of two exp ψ, which is all that LDA needs, can be
formed in the exponent where nothing under- or overflows. p interpolates at the points of Chebyshev (a test computes it
again with forty digits); c was chosen so that its degree is small, and its error is the rounding of e.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

SHIFT = 1.25  # exp ψ(x) = (x + SHIFT) · exp(exponent(x))

# p(z), the constant first
_SHORT = (-0.7500000281, -0.2395809426, -0.07814922965, -0.01608147587, 0.001688221914, -0.003743154615)
_LONG = (
    -0.7499999999999978,
    -0.2395833333349572,
    -0.07812499981420394,
    -0.016080737185484105,
    0.0009767316106837312,
    -0.0009183692430089836,
    -0.003958335671706354,
    -4.459091163924056e-05,
    0.00445277520386657,
    0.0062182869672745954,
    -0.040132430297075944,
    0.08120650915565161,
    -0.09867647480962327,
    0.07912367931330212,
    -0.041400072250330947,
    0.012907499771811638,
    -0.0018270387395955146,
)
# 2^f for |f| ≤ ½, interpolated in the same way
_POWERS = (1.0000000755, 0.69314718803, 0.24022107485, 0.05550357114, 0.009676031918, 0.001339086336)
# B_2n / (2n (2n − 1)): log Γ(y) = (y − ½) log y − y + ½ log 2π + Σ_n B_2n / (2n (2n − 1) y^(2n − 1))
_FAR = 6  # log Γ(x) by Stirling's formula at x + 6
_STIRLING = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156, -3617 / 122400)


def exponent(x: jax.Array) -> jax.Array:
    """Return e(x) = ψ(x) − log(x + 5/4), from −1/x for small x up to 0 for large x; increases with x."""
    x = jnp.maximum(_float(x), _smallest(x))
    return _rest(x) - 1 / x


def exp(x: jax.Array) -> jax.Array:
    """Return exp(x) for x ≤ 0, in half the time of ``jnp.exp`` in float32; not below the smallest float.

    The relative error is below 4e-7 + 8e-8 |x|: the second part is the rounding of x / log 2.
    """
    if x.dtype != jnp.float32:
        return jnp.exp(x)
    # exp(x) = 2^i 2^f with x / log 2 = i + f and |f| ≤ ½; 2^i is i added to the exponent of 2^f
    y = jnp.maximum(x, math.log(jnp.finfo(x.dtype).tiny) + 1) * (1 / math.log(2))
    i = lax.round(y, lax.RoundingMethod.TO_NEAREST_EVEN)
    power = lax.bitcast_convert_type(_polynomial(_POWERS, y - i), jnp.int32)
    return lax.bitcast_convert_type(power + (i.astype(jnp.int32) << 23), jnp.float32)


def digamma(x: jax.Array) -> jax.Array:
    """Return ψ(x) for x > 0: E[log g] of a Gamma(x, 1) variable g."""
    x = _float(x)
    return jnp.log(x + SHIFT) + exponent(x)


def kl_divergence(a: jax.Array, b: jax.Array, axis: int = -1) -> jax.Array:
    """Return KL(Dirichlet(a) ‖ Dirichlet(b)), accurate in float32.

    Written with log Γ it is a small difference of large numbers (log Γ(10⁶) ≈ 10⁷). With the Bregman divergence of
    log Γ,

        B(b, a) = log Γ(b) − log Γ(a) − ψ(a) (b − a),        KL = Σ_k B(b_k, a_k) − B(Σ b, Σ a),

    Stirling's formula cancels on paper: what is left of B has the size of a logarithm, but for a − b, and that cancels
    in the sum over k.

    Args:
      a: Parameters of the first distribution.
      b: Parameters of the second, or anything that broadcasts to them.
      axis: The axis along which one distribution lies.

    Returns:
      The divergence, with ``axis`` removed; 0 for a = b.
    """
    a = _float(a)
    b = jnp.broadcast_to(jnp.asarray(b, a.dtype), a.shape)
    gap = b - a
    return _bregman(a, b, gap).sum(axis) - _bregman(a.sum(axis), b.sum(axis), gap.sum(axis))


def _bregman(a, b, gap):
    """B(b, a) + Δ. The ``gap`` Δ = b − a is an argument, as a difference of two sums would have lost it.

    With y = x + 6 and P(x) = Π_{i<6} (x + i):

        (y_b − ½) log(y_b / y_a) + s(y_b) − s(y_a) − log(P(b)/P(a)) − Δ (ψ(a) − log y_a)
    """
    a, b = jnp.maximum(a, _smallest(a)), jnp.maximum(b, _smallest(a))
    y_a, y_b = a + _FAR, b + _FAR
    stirling = _stirling(y_b) - _stirling(y_a)
    product = sum(_log_ratio(gap, a + i, b + i) for i in range(_FAR))
    slope = exponent(a) - jnp.log1p((_FAR - SHIFT) / (a + SHIFT))
    return (y_b - 0.5) * _log_ratio(gap, y_a, y_b) + stirling - product - gap * slope


def _log_ratio(gap, a, b):
    """log(b/a) for gap = b − a: by log1p where they are close, without overflow where they are not."""
    ratio = gap / a
    close = jnp.abs(ratio) < 0.5
    return jnp.where(close, jnp.log1p(jnp.where(close, ratio, 0)), jnp.log(b) - jnp.log(a))


def _rest(x):
    """e(x) + 1/x."""
    z = 1 / (x + SHIFT)
    return z * _polynomial(_LONG if x.dtype == jnp.float64 else _SHORT, z)


def _stirling(y):
    """Σ_n c_n y^−(2n − 1); four terms are enough for float32 at y ≥ 6, eight for float64."""
    z = 1 / y
    return z * _polynomial(_STIRLING[: 8 if y.dtype == jnp.float64 else 4], z * z)


def _polynomial(coefficients, x):
    total = jnp.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        total = total * x + c
    return total


def _smallest(x):
    return jnp.finfo(_float(x).dtype).tiny * 8  # its reciprocal is finite


def _float(x):
    x = jnp.asarray(x)
    return x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32)
