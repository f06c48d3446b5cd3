"""Expectations under a Dirichlet, finite for every positive float.

    E[log x_k]     = ψ(a_k) − ψ(Σ_j a_j)
    exp E[log x_k] = exp ψ(a_k) / exp ψ(Σ_j a_j)

| letter | name            | meaning                                              |
|--------|-----------------|------------------------------------------------------|
| a, b   | ``a``, ``b``    | parameters of a Dirichlet along ``axis``, positive   |
| ψ      | ``digamma``     | d/dx log Γ(x)                                        |
| e      | ``exponent``    | what ψ adds to a logarithm: ψ(x) = log(x + 6) + e(x) |

One formula without branches serves all positive x. The recurrence ψ(x) = ψ(x + 6) − Σ_{i<6} 1/(x + i) moves x to where
the asymptotic series of ψ converges:

    e(x)     = −1/(2y) − 1/(12y²) + 1/(120y⁴) − …  −  Σ_{i=0…5} 1/(x + i),          y = x + 6
    exp ψ(x) = (x + 6) exp e(x)

so that exp ψ needs no logarithm, and a *ratio* of two exp ψ, which is all that LDA needs, can be formed in the exponent
where nothing under- or overflows. It is ten times faster than ``exp(jax.scipy.special.digamma(x))`` on CPU.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

SHIFT = 6  # exp ψ(x) = (x + SHIFT) · exp(exponent(x))

# B_2n / 2n: ψ(y) = log y − 1/(2y) − Σ_n B_2n / (2n y^2n)
_SERIES = (1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760, 1 / 12, -3617 / 8160)
# B_2n / (2n (2n − 1)): log Γ(y) = (y − ½) log y − y + ½ log 2π + Σ_n B_2n / (2n (2n − 1) y^(2n − 1))
_STIRLING = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156, -3617 / 122400)


def exponent(x: jax.Array) -> jax.Array:
    """e(x) = ψ(x) − log(x + 6), from −1/x for small x up to 0 for large x; increases with x."""
    x = jnp.maximum(_float(x), _smallest(x))
    return _rest(x) - 1 / x


def exp_digamma(x: jax.Array) -> jax.Array:
    """exp ψ(x) for x > 0, with a relative error below 2e-6 in float32 and 1e-12 in float64.

    It is x − ½ for large x and exp(−1/x) for small x, and 0 where that is too small for a float (x < 0.01 in float32).
    """
    x = _float(x)
    # 1/x may be 100, and half a unit in its last place would then be an error of 4e-6 in exp(−1/x). So 1/x = t + d with
    # t so short that t·x is exact in two halves, and d the rest.
    z = jnp.maximum(x, 1e-3)  # exp(−1000) is 0 in every float
    t = _short(1 / z)
    high = _short(z)
    d = ((1 - t * high) - t * (z - high)) / z
    # exp(e) = exp(s) (1 + r) with s + r = (rest − d) − t exactly; exp(s) as a square, so that it is not lost below the
    # smallest float before it is multiplied by x + 6
    rest = _rest(x) - d
    s = rest - t
    back = s - rest
    r = (rest - (s - back)) - (t + back)
    root = jnp.exp(s / 2)
    return ((x + SHIFT) * root) * (root * (1 + r))


def digamma(x: jax.Array) -> jax.Array:
    """ψ(x) for x > 0; E[log g] of a Gamma(x, 1) variable g."""
    x = _float(x)
    return jnp.log(x + SHIFT) + exponent(x)


def expected_log(a: jax.Array, axis: int = -1) -> jax.Array:
    """E[log x] under Dirichlet(a): ψ(a_k) − ψ(Σ_j a_j)."""
    a = _float(a)
    return digamma(a) - digamma(a.sum(axis, keepdims=True))


def exp_expected_log(a: jax.Array, axis: int = -1) -> jax.Array:
    """exp E[log x] under Dirichlet(a), from 0 to 1; formed as one exponential, so that 0/0 cannot occur.

    The relative error is that of a float the size of the exponent: 1e-6 in float32 unless a is below 0.1, and 1e-3 for
    a = 1e-4, where the last bit of a itself is worth as much.
    """
    a = _float(a)
    total = a.sum(axis, keepdims=True)
    return (a + SHIFT) / (total + SHIFT) * jnp.exp(exponent(a) - exponent(total))


def kl_divergence(a: jax.Array, b: jax.Array, axis: int = -1) -> jax.Array:
    """KL(Dirichlet(a) ‖ Dirichlet(b)), accurate in float32.

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

        (y_b − ½) log(y_b / y_a) + s(y_b) − s(y_a) − log(P(b)/P(a)) − Δ e(a)
    """
    a, b = jnp.maximum(a, _smallest(a)), jnp.maximum(b, _smallest(a))
    y_a, y_b = a + SHIFT, b + SHIFT
    stirling = _power_series(_STIRLING, y_b) - _power_series(_STIRLING, y_a)
    product = sum(_log_ratio(gap, a + i, b + i) for i in range(SHIFT))
    return (y_b - 0.5) * _log_ratio(gap, y_a, y_b) + stirling - product - gap * exponent(a)


def _log_ratio(gap, a, b):
    """log(b/a) for gap = b − a: by log1p where they are close, without overflow where they are not."""
    ratio = gap / a
    close = jnp.abs(ratio) < 0.5
    return jnp.where(close, jnp.log1p(jnp.where(close, ratio, 0)), jnp.log(b) - jnp.log(a))


def _rest(x):
    """e(x) + 1/x: the five other reciprocals and the series."""
    # Σ_{i=1…5} 1/(x + i), as pairs around c = x + 3: with r = 1/c and w = r²,
    #   r + 2r/(1 − w) + 2r/(1 − 4w) = r (5 − 15w + 4w²) / ((1 − w)(1 − 4w)),       w ≤ 1/9
    r = 1 / (x + 3)
    w = r * r
    reciprocals = r * (5 - w * (15 - 4 * w)) / ((1 - w) * (1 - 4 * w))
    y = x + SHIFT
    return -0.5 / y - _power_series(_SERIES, y) / y - reciprocals


def _power_series(coefficients, y):
    """Σ_n c_n y^−(2n − 1); four terms are enough for float32 at y ≥ 6, eight for float64."""
    used = coefficients[: 8 if y.dtype == jnp.float64 else 4]
    z = 1 / y
    w = z * z
    total = jnp.full_like(y, used[-1])
    for c in reversed(used[:-1]):
        total = total * w + c
    return total * z


def _short(x):
    """x with half of its digits, so that a product of two such numbers is exact."""
    kind = jnp.finfo(x.dtype)
    return lax.reduce_precision(x, kind.nexp, math.ceil(kind.nmant / 2) - 1)


def _smallest(x):
    return jnp.finfo(_float(x).dtype).tiny * 8  # its reciprocal is finite


def _float(x):
    x = jnp.asarray(x)
    return x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32)
