"""Fitted priors: the gradient vanishes, true priors come back, and extreme data stay in bounds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import psi
from scipy.stats import dirichlet_multinomial

from smoothgrad_jax.models.lda import priors

POSITIVE = st.floats(1e-3, 1e3)


@settings(max_examples=50, deadline=None)
@given(st.lists(POSITIVE, min_size=2, max_size=8), POSITIVE)
def test_the_prior_behind_exact_means_comes_back(alpha, start):
    alpha = np.array(alpha)
    found = priors.fit_dirichlet(psi(alpha) - psi(alpha.sum()), start)
    np.testing.assert_allclose(found, alpha, rtol=1e-4)


@settings(max_examples=50, deadline=None)
@given(POSITIVE, st.integers(2, 100_000), POSITIVE)
def test_a_symmetric_prior_comes_back(eta, size, start):
    found = priors.fit_symmetric(psi(eta) - psi(size * eta), size, start)
    assert found == pytest.approx(eta, rel=1e-3)


def test_samples(rng):
    alpha = np.array([0.1, 0.5, 2.0, 0.3])
    theta = np.maximum(rng.dirichlet(alpha, 20_000), 1e-300)
    np.testing.assert_allclose(priors.fit_dirichlet(np.log(theta).mean(0), 1.0), alpha, rtol=0.1)


def test_mean_log(rng):
    parameters = rng.gamma(1, 1, (9_000, 3)).astype(np.float32)
    wide = parameters.astype(float)
    expected = (psi(wide) - psi(wide.sum(1, keepdims=True))).mean(0)
    np.testing.assert_allclose(priors.mean_log(parameters, 1), expected, rtol=1e-6)
    expected = (psi(wide) - psi(wide.sum(0, keepdims=True))).mean()
    np.testing.assert_allclose(priors.mean_log(parameters, 0), expected, rtol=1e-6)


def test_a_topic_that_nobody_uses_stops_at_the_bound():
    found = priors.fit_dirichlet(np.array([-0.01, -1e6]), 1.0)
    assert np.isfinite(found).all()
    assert found[1] == pytest.approx(1e-4)


def test_alpha_is_found_from_token_counts():
    rng, alpha = np.random.default_rng(0), np.array([0.05, 0.2, 0.5, 1.0])
    counts = np.stack([rng.multinomial(60, p) for p in rng.dirichlet(alpha, 20_000)])
    found = np.full(4, 0.3)
    for _ in range(20):
        found = priors.fit_counts(counts, found)
    np.testing.assert_allclose(found, alpha, rtol=0.05)


def test_no_other_alpha_near_the_fixed_point_has_a_higher_likelihood():
    rng, start = np.random.default_rng(0), np.array([0.3, 0.7])
    counts = np.stack([rng.multinomial(9, p) for p in rng.dirichlet(start, 300)])
    found = start
    for _ in range(50):
        found = priors.fit_counts(counts, found)

    def likelihood(alpha):
        return dirichlet_multinomial.logpmf(counts, alpha, counts.sum(1)).sum()

    for change in ([1.05, 1], [0.95, 1], [1, 1.05], [1, 0.95]):
        assert likelihood(found) > likelihood(found * np.array(change))
