"""Expectations under a Dirichlet, against mpmath with forty digits and against scipy."""

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
import scipy.special
import scipy.stats

from smoothgrad_jax.models import dirichlet

mpmath.mp.dps = 40

GRID = np.concatenate([np.logspace(-30, 30, 301), np.logspace(-3, 3, 600), np.linspace(0.0015, 0.02, 150)])
PRECISION = {np.float32: 2e-6, np.float64: 1e-12}


def exact(function, x):
    return np.array([float(function(mpmath.mpf(float(v)))) for v in x])


@pytest.fixture(params=[np.float32, np.float64], ids=["float32", "float64"])
def dtype(request):
    with jax.enable_x64(request.param is np.float64):
        yield request.param


def test_digamma(dtype):
    x = GRID.astype(dtype)
    truth = exact(mpmath.digamma, x)
    np.testing.assert_allclose(jax.jit(dirichlet.digamma)(x), truth, rtol=PRECISION[dtype], atol=PRECISION[dtype])


@pytest.mark.parametrize("coefficients", [dirichlet._SHORT, dirichlet._LONG], ids=["float32", "float64"])
def test_the_polynomial_is_chebyshevs(coefficients):
    """p(z) = (ψ(1/z − c + 1) + log z)/z, interpolated on [0, 1/c]: solved once more with forty digits."""
    c, size = mpmath.mpf(dirichlet.SHIFT), len(coefficients)
    points = [(1 + mpmath.cos(mpmath.pi * (2 * i + 1) / (2 * size))) / (2 * c) for i in range(size)]
    values = [(mpmath.digamma(1 / z - c + 1) + mpmath.log(z)) / z for z in points]
    powers = mpmath.matrix([[z**j for j in range(size)] for z in points])
    solved = mpmath.lu_solve(powers, mpmath.matrix(values))
    np.testing.assert_allclose(coefficients, [float(v) for v in solved], rtol=1e-9)


def test_exponent_increases(dtype):
    """Shifting by the exponent of the mean bounds the largest from below: lda relies on it."""
    x = np.sort(GRID).astype(dtype)
    e = np.asarray(dirichlet.exponent(x), np.float64)
    assert (e <= 0).all()
    assert (np.diff(e) >= -1e-6 * np.abs(e[1:])).all()


def exact_kl(a, b):
    a, b = ([mpmath.mpf(float(v)) for v in x] for x in (a, b))
    total_a, total_b = sum(a), sum(b)
    normalisers = mpmath.loggamma(total_a) - mpmath.loggamma(total_b)
    normalisers += sum(mpmath.loggamma(y) - mpmath.loggamma(x) for x, y in zip(a, b, strict=True))
    slope = sum((x - y) * (mpmath.digamma(x) - mpmath.digamma(total_a)) for x, y in zip(a, b, strict=True))
    return float(normalisers + slope)


@pytest.mark.parametrize("prior", [1e-6, 0.01, 0.5, 1e3])
@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 1e3, 1e6, 1e8])
def test_kl_divergence_is_accurate(dtype, scale, prior, rng):
    """Where log Γ in float32 would leave no digit at all (scale 1e8: terms of 1e10, a result of 500)."""
    a = (prior + rng.gamma(0.5, scale, 50)).astype(dtype)
    b = np.full(50, prior, dtype)
    got = jax.jit(dirichlet.kl_divergence)(a, b)
    # Far below one nat what counts is the absolute error.
    atol = 1e-6 if dtype is np.float32 else 1e-15
    np.testing.assert_allclose(got, exact_kl(a, b), rtol=PRECISION[dtype], atol=atol)


def test_kl_divergence_of_neighbours(dtype, rng):
    a = rng.gamma(2, 10, 30).astype(dtype)
    b = (a * (1 + 0.01 * rng.standard_normal(30))).astype(dtype)
    np.testing.assert_allclose(dirichlet.kl_divergence(a, b), exact_kl(a, b), rtol=PRECISION[dtype] * 100)
    assert float(dirichlet.kl_divergence(a, a)) == 0


def test_kl_divergence_broadcasts_along_an_axis(rng):
    a = rng.gamma(2, 1, (6, 3)).astype(np.float32)
    got = dirichlet.kl_divergence(a, 0.3, axis=0)
    np.testing.assert_allclose(got, [exact_kl(a[:, k], [0.3] * 6) for k in range(3)], rtol=1e-5)
    assert dirichlet.kl_divergence(a, 0.3, axis=1).shape == (6,)


def test_kl_divergence_is_the_mean_log_ratio(rng):
    """Against the definition, by sampling."""
    a, b = np.array([2.0, 3.0, 0.7]), np.array([1.0, 1.5, 2.0])
    x = rng.dirichlet(a, 200_000)
    log_ratio = scipy.stats.dirichlet.logpdf(x.T, a) - scipy.stats.dirichlet.logpdf(x.T, b)
    error = log_ratio.std() / np.sqrt(len(x))
    assert abs(float(dirichlet.kl_divergence(jnp.asarray(a), jnp.asarray(b))) - log_ratio.mean()) < 5 * error


def test_exp_of_what_is_not_positive():
    x = -np.concatenate([np.linspace(0, 86, 100_001), np.logspace(-30, 0, 1_000)]).astype(np.float32)
    got, exact = np.asarray(dirichlet.exp(jnp.asarray(x)), float), np.exp(x.astype(float))
    assert (np.abs(got / exact - 1) <= 4e-7 - 8e-8 * x).all()
    tiny = float(np.finfo(np.float32).tiny)
    far = np.asarray(dirichlet.exp(jnp.array([-1e3, -1e30, -np.inf], np.float32)))
    assert ((tiny <= far) & (far < 4 * tiny)).all()
    assert np.isnan(dirichlet.exp(jnp.array(np.nan, np.float32)))


def test_integers_are_accepted():
    np.testing.assert_allclose(dirichlet.digamma(np.array([1, 2])), scipy.special.psi([1, 2]), rtol=1e-6)
