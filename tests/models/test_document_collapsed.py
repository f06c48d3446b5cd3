"""Collapsed variational inference against a token-by-token transcription, and limit cases."""

import numpy as np
import pytest

from smoothgrad_jax import LDA, Collapsed, local_step, pack

K, V = 4, 9
LAM = np.random.default_rng(0).gamma(0.6, 1.0, (V, K)).astype(np.float32) + 0.05
BETA = LAM.astype(np.float64) / LAM.sum(0, dtype=np.float64)
ALPHA = np.array([0.2, 0.5, 0.1, 0.3])


def model(tol=1e-6, max_iter=5_000, num_docs=1, alpha=ALPHA):
    return LDA(alpha.astype(np.float32), 0.1, num_docs, tol, max_iter, Collapsed())


def reference(words, rounds, counts=1.0):
    """Update φ of one word after the other in float64, without one token of the word; return φ [n, K].

    With all counts 1 and a word per token this is CVB0 token by token.
    """
    n = np.broadcast_to(counts, len(words))
    phi = ALPHA * BETA[words]
    phi /= phi.sum(1, keepdims=True)
    for _ in range(rounds):
        for i, w in enumerate(words):
            others = n @ phi - min(n[i], 1) * phi[i]
            p = (others + ALPHA) * BETA[w]
            phi[i] = p / p.sum()
    return phi


def counts_of(tokens):
    return np.bincount(tokens, minlength=V)[None].astype(np.float32)


@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_distinct_words_follow_the_transcription_round_by_round(rounds):
    tokens = np.array([0, 2, 3, 5, 8])
    stats, info = local_step(model(tol=1e-30, max_iter=rounds), LAM, pack(counts_of(tokens)))
    phi = reference(tokens, rounds)
    np.testing.assert_allclose(np.asarray(stats)[tokens], phi, rtol=1e-4)
    np.testing.assert_allclose(info.gamma[0], ALPHA + phi.sum(0), rtol=1e-4)
    assert info.iterations[0] == rounds


@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_counts_follow_the_transcription_round_by_round(rounds):
    words, counts = np.array([0, 2, 3, 5, 8]), np.array([3, 1, 0.5, 2.25, 1])
    X = np.zeros((1, V), np.float32)
    X[0, words] = counts
    stats, _ = local_step(model(tol=1e-30, max_iter=rounds), LAM, pack(X))
    np.testing.assert_allclose(
        np.asarray(stats)[words], counts[:, None] * reference(words, rounds, counts), rtol=1e-4, atol=1e-6
    )


def test_repeated_words_reach_the_fixed_point_of_their_tokens(x64):
    tokens = np.array([1, 1, 1, 4, 6, 6, 7])
    lda = LDA(ALPHA, 0.1, 1, 1e-10, 5_000, Collapsed())
    stats, info = local_step(lda, LAM.astype(np.float64), pack(counts_of(tokens)))
    phi = reference(tokens, 3_000)
    expected = np.zeros((V, K))
    np.add.at(expected, tokens, phi)
    np.testing.assert_allclose(stats, expected, atol=1e-6)
    assert info.change < 1e-10


def test_documents_are_independent_and_every_token_is_counted():
    X = np.random.default_rng(1).poisson(0.7, (12, V)).astype(np.float32)
    stats, info = local_step(model(num_docs=24), LAM, pack(X))
    np.testing.assert_allclose(stats.sum(1), 2 * X.sum(0), rtol=1e-5)
    _, some = local_step(model(num_docs=24), LAM, pack(X, [7, 2]))
    np.testing.assert_array_equal(some.gamma, np.asarray(info.gamma)[[7, 2]])


def test_a_document_of_one_token_has_the_prior_times_the_word():
    stats, _ = local_step(model(), LAM, pack(counts_of(np.array([3]))))
    np.testing.assert_allclose(stats[3], ALPHA * BETA[3] / (ALPHA * BETA[3]).sum(), rtol=1e-5)


def test_one_topic_takes_everything():
    stats, _ = local_step(LDA(0.3, 0.1, 1, method=Collapsed()), LAM[:, :1], pack(counts_of(np.array([1, 1, 5]))))
    np.testing.assert_allclose(stats[:, 0], counts_of(np.array([1, 1, 5]))[0], rtol=1e-6)


def test_a_large_prior_makes_tokens_independent():
    tokens = np.array([1, 4, 4])
    stats, _ = local_step(model(alpha=1e6 * np.ones(K)), LAM, pack(counts_of(tokens)))
    np.testing.assert_allclose(stats[1], BETA[1] / BETA[1].sum(), rtol=1e-4)


def test_fractional_counts_keep_their_mass():
    X = np.zeros((1, V), np.float32)
    X[0, [2, 5]] = 0.5, 2.25
    stats, _ = local_step(model(), LAM, pack(X))
    np.testing.assert_allclose(stats.sum(1), X[0], rtol=1e-5)
    assert np.isfinite(stats).all()
