"""Documents with the topics held fixed: the oracle's γ, each document by itself, the score of log_predictive."""

import jax
import numpy as np
import oracle
import pytest
import scipy.sparse

from smoothgrad_jax import LDA, log_predictive, split_documents
from smoothgrad_jax.models.lda import inference

V, K = 60, 4
MODEL = LDA(np.array([0.1, 0.2, 0.3, 0.4], np.float32), 0.1, 1)


@pytest.fixture(scope="module")
def lam():
    return np.random.default_rng(1).gamma(0.3, 10, (V, K)).astype(np.float32) + 0.1


@pytest.fixture(name="X", scope="module")
def some_documents():
    rng = np.random.default_rng(2)
    X = rng.poisson(rng.gamma(0.2, 1, (700, V)))  # more than one chunk
    X[3] = 0
    return scipy.sparse.csr_array(X)


def test_posteriors_are_the_oracles(lam, X):
    gamma = inference.posteriors(MODEL, lam, X, tol=1e-6)
    some = [0, 3, 511, 512, 699]
    listed = [(X[[d]].indices, X[[d]].data) for d in some]
    _, expected = oracle.local_step(np.asarray(MODEL.alpha, float), lam.astype(float), listed, 1, tol=1e-9)
    np.testing.assert_allclose(gamma[some], expected, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(gamma[3], MODEL.alpha)


def test_a_document_is_fitted_by_itself(lam, X):
    theta = inference.proportions(MODEL, lam, X)
    np.testing.assert_allclose(theta.sum(1), 1, rtol=1e-5)
    for rows in ([5], [690, 1, 5], np.arange(400, 640)):
        np.testing.assert_array_equal(inference.proportions(MODEL, lam, X[rows], threads=1), theta[rows])


@pytest.mark.parametrize(
    "num_topics", [pytest.param(3, marks=pytest.mark.slow), 8, pytest.param(20, marks=pytest.mark.slow)]
)
def test_also_of_many_words_and_long_documents(num_topics):
    rng = np.random.default_rng(3)
    lam = rng.gamma(0.3, 10, (3_000, num_topics)).astype(np.float32) + 0.01
    X = scipy.sparse.random_array((40, 3_000), density=0.01, rng=rng, format="csr")
    X.data = np.ceil(3 * X.data)
    X = scipy.sparse.vstack([X, np.ones((1, 3_000))]).tocsr()  # the last one is long
    model = LDA(0.1, 0.1, 1)
    gamma = inference.posteriors(model, lam, X)
    for d in (0, 1, 7, 20, 40):
        np.testing.assert_array_equal(inference.posteriors(model, lam, X[[d]])[0], gamma[d])


def test_another_number_of_documents_compiles_nothing(lam):
    inference.posteriors(MODEL, lam, np.ones((5, V)))
    number = inference._fit._cache_size()
    assert inference.posteriors(MODEL, lam, np.ones((7, V))).shape == (7, K)
    assert inference._fit._cache_size() == number


def test_completion_is_log_predictive(lam, X):
    found = inference.completion(MODEL, lam, X, jax.random.key(7))
    halves = split_documents(X, jax.random.key(7))
    assert found.score == pytest.approx(float(log_predictive(MODEL, lam, *halves)), rel=1e-5)
    assert found.perplexity == pytest.approx(np.exp(-found.score))
    np.testing.assert_array_equal(found.words, halves[1].sum(1))
    assert inference.completion(MODEL, lam, X).score == inference.completion(MODEL, lam, X).score


def test_nothing_to_predict_is_nan(lam):
    assert np.isnan(inference.completion(MODEL, lam, np.eye(V)[:3]).score)


def test_too_many_words(lam):
    with pytest.raises(ValueError, match="61 words, but lam has 60 rows"):
        inference.posteriors(MODEL, lam, np.ones((2, V + 1)))
