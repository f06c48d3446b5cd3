"""Similarities of documents against transcriptions in NumPy."""

import numpy as np
import pytest

from smoothgrad_jax.models.topic_similarity import nearest, similarity, word_proportions


def test_similarity_is_one_minus_the_hellinger_distance():
    rng = np.random.default_rng(0)
    theta, query = rng.dirichlet(np.full(6, 0.2), 40), rng.dirichlet(np.full(6, 0.2))
    distance = np.sqrt(((np.sqrt(theta) - np.sqrt(query)) ** 2).sum(1) / 2)
    np.testing.assert_allclose(similarity(theta, query), 1 - distance, atol=1e-7)
    assert similarity(query[None], query)[0] == pytest.approx(1, abs=1e-7)
    assert similarity(np.eye(2)[:1], np.eye(2)[1])[0] == 0
    single = theta.astype(np.float32)  # rows sum to one within a rounding error
    assert (similarity(single, single[0]) <= 1).all()


def test_the_prior_has_no_part_in_the_proportions():
    rng = np.random.default_rng(2)
    alpha, tokens = rng.gamma(1, 1, 5), rng.multinomial(40, np.full(5, 0.2), 30).astype(float)
    tokens[3] = 0
    p = word_proportions((alpha + tokens).astype(np.float32), alpha.astype(np.float32))
    expected = np.delete(tokens, 3, axis=0) / 40
    np.testing.assert_allclose(np.delete(p, 3, axis=0), expected, atol=1e-6)
    assert np.isnan(p[3]).all()
    # Three words and three hundred words with the same fractions are the same.
    short, long = word_proportions(alpha + np.array([[1, 2, 0, 0, 0], [100, 200, 0, 0, 0]]), alpha)
    assert similarity(short[None], long)[0] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("size", [1, 7, 100])
def test_the_nearest_documents_are_found_in_parts(size):
    theta = np.random.default_rng(1).dirichlet(np.full(4, 0.5), 100)
    theta[50] = theta[20]  # a tie
    theta[[3, 99]] = np.nan
    query = theta[20]
    found = nearest((theta[first : first + size] for first in range(0, 100, size)), query, 10)
    distance = np.nan_to_num(1 - similarity(theta, query), nan=2)
    np.testing.assert_array_equal(found.documents, np.argsort(distance, kind="stable")[:10])
    np.testing.assert_array_equal(found.similarity, 1 - distance[found.documents])
    assert found.documents[:2].tolist() == [20, 50]
    assert len(nearest([theta], query, 1_000).documents) == 98
