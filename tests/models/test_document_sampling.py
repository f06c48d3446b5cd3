"""Sampled local steps against a NumPy transcription, exact posteriors by enumeration, and limit cases."""

import itertools

import jax
import numpy as np
import pytest
import scipy.sparse
from scipy.special import gammaln
from scipy.stats import chisquare, kstest

from smoothgrad_jax import (
    LDA,
    Collapsed,
    Mean,
    Sampled,
    fit,
    global_step,
    init,
    local_step,
    pack,
    robbins_monro,
    sample,
)
from smoothgrad_jax.core.errors import OptionError
from smoothgrad_jax.models.lda import document_sampling
from smoothgrad_jax.models.lda.document_sampling import _fold_sizes, sampling_width

K, V = 5, 12
KEY = jax.random.key(3)


@pytest.fixture
def lam():
    return np.random.default_rng(1).gamma(0.5, 1.0, (V, K)).astype(np.float32) + 0.05


@pytest.fixture
def documents():
    return scipy.sparse.csr_array(np.random.default_rng(2).poisson(0.6, (20, V)).astype(np.float32))


def model(alpha=0.3, sweeps=4, counted=2, num_docs=20):
    return LDA(alpha, 0.1, num_docs, method=Sampled(sweeps, counted))


def mix(x):
    x = np.uint32(x)
    x = np.uint32((int(x ^ (x >> np.uint32(16))) * 0x85EBCA6B) % 2**32)
    x = np.uint32((int(x ^ (x >> np.uint32(13))) * 0xC2B2AE35) % 2**32)
    return x ^ (x >> np.uint32(16))


def uniform(words, token, sweep):
    bits = mix((int(words[0]) + token * 0x9E3779B9) % 2**32)
    bits = mix(int(bits) ^ ((int(words[1]) + sweep * 0x7FEB352D) % 2**32))
    return int(bits >> np.uint32(8)) / 2**24


def reference(alpha, beta, words, number, seed, sweeps, counted):
    """Sample one document token by token in float64.

    Returns the expectation of every token given the others, for each counted sweep [counted, n, K], and the last z.
    """
    num_topics = beta.shape[1]
    # Topics in the order of the search: by lanes of the last fold, then of the one before, …
    k = np.arange(num_topics)
    lanes = np.lexsort([k, *(k % size for size in _fold_sizes(sampling_width(num_topics)))])
    seeds = mix((number + int(seed[0])) % 2**32), mix(number ^ int(seed[1]))
    z, weights = [None] * len(words), np.full(num_topics, alpha, np.float64)
    gamma = np.ones(num_topics)
    for _ in range(5):
        phi = gamma * beta[words]
        gamma = alpha + (phi / phi.sum(1, keepdims=True)).sum(0)
    results = []
    for sweep in range(sweeps):
        for t, w in enumerate(words):
            if z[t] is not None:
                weights[z[t]] -= 1
            p = ((gamma if sweep == 0 and len(words) >= 100 else weights) * beta[w])[lanes]
            z[t] = lanes[np.searchsorted(np.cumsum(p), uniform(seeds, t, sweep) * p.sum(), side="right")]
            weights[z[t]] += 1
        p = np.stack([(weights - np.eye(num_topics)[k]) * beta[w] for w, k in zip(words, z, strict=True)] or [weights])
        results.append((p / p.sum(1, keepdims=True))[: len(words)])
    return np.stack(results[-counted:]), np.array(z, int)


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("num_topics", [1, 5, 16, 40, 200, 600])
def test_the_same_random_numbers_give_the_same_topics_as_numpy(documents, num_topics, long):
    if long:
        documents = scipy.sparse.csr_array(np.random.default_rng(5).poisson(9, (6, V)).astype(np.float32))
        assert {bool(n) for n in documents.sum(1) >= 100} == {True, False}
    lam = np.random.default_rng(1).gamma(0.5, 1.0, (V, num_topics)).astype(np.float32) + 0.05
    stats, info = local_step(model(num_docs=documents.shape[0]), lam, pack(documents), key=KEY)
    seed, beta = np.asarray(jax.random.key_data(KEY)), lam.astype(np.float64) / lam.sum(0, dtype=np.float64)
    expected = np.zeros((V, num_topics))
    for d in range(documents.shape[0]):
        row = documents[[d]]
        words = np.repeat(row.indices, row.data.astype(int))
        p, z = reference(0.3, beta, words, d, seed, 4, 2)
        np.add.at(expected, words, p.mean(0))
        np.testing.assert_allclose(info.tokens[d], np.bincount(z, minlength=num_topics), atol=1e-4)
        np.testing.assert_allclose(info.gamma[d], 0.3 + p.mean(0).sum(0), rtol=1e-4)
    np.testing.assert_allclose(stats, expected, rtol=1e-4, atol=1e-5)


def test_draws_follow_the_exact_posterior_of_a_tiny_document():
    number, words, alpha = 100_000, [0, 1, 1], np.array([0.3, 0.7, 1.1])
    lam = np.array([[3, 1, 0.5], [0.2, 2, 1]], np.float32)
    beta = lam / lam.sum(0)
    # P(z | w) ∝ Π_t β_{w_t z_t} Π_k Γ(α_k + N_k), enumerated
    exact = {}
    for z in itertools.product(range(3), repeat=3):
        N = np.bincount(z, minlength=3)
        p = np.exp(gammaln(alpha + N).sum()) * np.prod([beta[w, k] for w, k in zip(words, z, strict=True)])
        exact[tuple(N)] = exact.get(tuple(N), 0) + p
    X = np.tile(np.array([[1, 2]], np.float32), (number, 1))
    _, info = local_step(model(alpha.astype(np.float32), 12, 1, number), lam, pack(X), key=KEY)
    found, counts = np.unique(np.rint(info.tokens).astype(int), axis=0, return_counts=True)
    observed = dict(zip(map(tuple, found), counts, strict=True))
    assert set(observed) <= set(exact)
    total = sum(exact.values())
    pairs = [(observed.get(N, 0), number * p / total) for N, p in exact.items()]
    assert chisquare(*zip(*pairs, strict=True)).pvalue > 1e-3
    mean = sum(np.array(N) * p for N, p in exact.items()) / total
    np.testing.assert_allclose(info.gamma.mean(0) - alpha, mean, atol=0.01)


@pytest.mark.parametrize("num_topics", [3, 100, 160, 1000])
def test_one_token_has_a_topic_in_proportion_to_the_prior_and_the_word(num_topics):
    number = 40_000
    rng = np.random.default_rng(0)
    lam, alpha = rng.gamma(1, 1, (2, num_topics)).astype(np.float32), rng.gamma(1, 1, num_topics).astype(np.float32)
    X = np.tile(np.array([[1, 0]], np.float32), (number, 1))
    _, info = local_step(model(alpha, 2, 1, number), lam, pack(X), key=KEY)
    p = alpha * lam[0].astype(np.float64) / lam.sum(0, dtype=np.float64)
    observed = np.asarray(info.tokens, np.float64).sum(0)
    assert observed.sum() == pytest.approx(number, rel=1e-3)
    keep = number * p / p.sum() > 5
    expected = np.append((number * p / p.sum())[keep], (number * p / p.sum())[~keep].sum() + 1e-9)
    counts = np.append(observed[keep], observed[~keep].sum())
    assert chisquare(counts * number / counts.sum(), expected * number / expected.sum()).pvalue > 1e-3


def test_a_document_does_not_depend_on_order_padding_or_other_documents(documents, lam):
    _, info = local_step(model(), lam, pack(documents), key=KEY)
    rows = np.array([7, 3, 11])
    _, some = local_step(model(), lam, pack(documents, rows), key=KEY)
    np.testing.assert_array_equal(some.gamma, np.asarray(info.gamma)[rows])


def test_copies_of_a_document_are_sampled_independently(documents, lam):
    _, info = local_step(model(), lam, pack(documents, np.full(50, 7)), key=KEY)
    assert len(np.unique(info.tokens, axis=0)) > 3
    _, alone = local_step(model(), lam, pack(documents, [7]), key=KEY)
    np.testing.assert_array_equal(info.tokens[0], alone.tokens[0])


def test_random_numbers_of_neighbours_are_uncorrelated():
    """Of documents, tokens, sweeps and steps that follow each other, and of all lags between tokens."""
    words = [
        [document_sampling.mix(np.uint32(d) + s), document_sampling.mix(np.uint32(d) ^ s)]
        for s in jax.random.key_data(jax.vmap(lambda t: jax.random.fold_in(KEY, t))(np.arange(4)))[:, 0]
        for d in range(8)
    ]
    words = np.array(words, np.uint32).reshape(4, 8, 2)
    tokens, sweeps = np.arange(4_000, dtype=np.uint32), np.arange(4, dtype=np.uint32)
    grid = np.meshgrid(np.arange(4), np.arange(8), sweeps, tokens, indexing="ij")
    u = document_sampling.uniform(
        (words[grid[0], grid[1], 0], words[grid[0], grid[1], 1]), grid[3], grid[2], np.float32
    )
    u = np.asarray(u, np.float64)
    assert kstest(u.ravel()[::7], "uniform").pvalue > 1e-3
    u = (u - 0.5) * np.sqrt(12)
    for axis in range(4):
        a, b = np.take(u, range(u.shape[axis] - 1), axis), np.take(u, range(1, u.shape[axis]), axis)
        assert abs((a * b).mean()) < 5 / np.sqrt(a.size)
    # A document whose stream is a shifted copy of another one would have a correlation of 1 at that lag.
    spectrum = np.fft.rfft(u[:, :, 0], axis=-1)
    for i, j in itertools.combinations(range(8), 2):
        lags = np.fft.irfft(spectrum[0, i] * spectrum[0, j].conj(), 4_000) / 4_000
        assert abs(lags).max() < 7 / np.sqrt(4_000)


def test_the_prior_of_an_emptied_topic_survives_a_long_document():
    """In float32, 0.001 + 200,000 − 200,000 is 0: the topic could not be drawn again."""
    lam = np.array([[1.0, 1.0], [1.0, 1.0]], np.float32)
    X = np.array([[200_000, 0]], np.float32)
    _, info = local_step(model(np.float32(1e-3), 3, 1, 1), lam, pack(X), key=KEY)
    assert np.asarray(info.tokens).sum() == 200_000
    assert (np.asarray(info.gamma) >= 1e-3).all()


def test_a_batch_of_empty_documents_has_no_statistics(lam):
    stats, info = local_step(model(), lam, pack(np.zeros((3, V))), key=KEY)
    assert not np.asarray(stats).any()
    assert not np.asarray(info.iterations).any()


def test_another_key_gives_other_samples(documents, lam):
    first, second = (local_step(model(), lam, pack(documents), key=jax.random.key(i))[0] for i in (0, 1))
    assert not np.array_equal(first, second)


def test_every_token_is_counted_once(documents, lam):
    stats, info = local_step(model(num_docs=40), lam, pack(documents), key=KEY)
    np.testing.assert_allclose(stats.sum(1), 2 * documents.sum(0), rtol=1e-5)
    np.testing.assert_allclose(info.gamma.sum(1), 0.3 * K + documents.sum(1), rtol=1e-5)
    assert (np.asarray(info.iterations) == 4 * (documents.sum(1) > 0)).all()


def test_fractional_counts_keep_their_mass(lam):
    X = np.array([[0.5, 2.25] + [0] * (V - 2)], np.float32)
    stats, _ = local_step(model(num_docs=1), lam, pack(X), key=KEY)
    np.testing.assert_allclose(stats.sum(1), X[0], rtol=1e-5)


def test_a_large_prior_makes_tokens_independent(lam):
    X = np.tile(np.array([[3] + [0] * (V - 1)], np.float32), (20_000, 1))
    stats, _ = local_step(model(1e5, 3, 1, 20_000), lam, pack(X), key=KEY)
    p = (lam / lam.sum(0))[0]
    np.testing.assert_allclose(stats[0] / 60_000, p / p.sum(), atol=0.01)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("method", [Sampled(3, 2), Mean(), Collapsed()])
def test_the_row_sparse_engine_takes_the_steps_of_the_dense_functions(documents, lam, method, threads):
    # The tolerance is small, so that a document that stops one iteration earlier has nearly the same γ.
    lda, rho = LDA(0.3, 0.1, 20, tol=1e-6, max_iter=1_000, method=method), robbins_monro(4, 0.7)
    got = fit(documents, lda, lam, window=3, rho=rho, steps=6, batch_size=8, key=KEY, threads=threads).finish().params
    state = init(lam, 3)
    for t in range(6):
        batch = pack(documents, sample(KEY, t, 20, 8))
        stats, _ = local_step(lda, state.params, batch, key=jax.random.fold_in(KEY, t))
        state = global_step(state, stats, 0.1, rho(t))
    np.testing.assert_allclose(got, state.params, rtol=2e-4)


def test_a_run_that_continues_has_the_same_bits(documents, lam):
    options = {"window": 3, "rho": 0.1, "batch_size": 8, "key": KEY, "threads": 2}
    whole = fit(documents, model(), lam, steps=6, **options).finish().params
    half = fit(documents, model(), lam, steps=3, **options).finish()
    np.testing.assert_array_equal(fit(documents, model(), half.state, steps=3, **options).finish().params, whole)


def test_a_number_is_not_a_key(documents, lam):
    with pytest.raises(OptionError, match=r"key must be a random key such as jax.random.key\(0\), got 0"):
        local_step(model(), lam, pack(documents), key=0)
    with pytest.raises(OptionError, match="key must be a random key"):
        fit(documents, model(), lam, key=0)


def test_sampling_without_a_key_is_refused(documents, lam):
    with pytest.raises(OptionError, match="key"):
        local_step(model(), lam, pack(documents))


@pytest.mark.parametrize(
    "method",
    [
        Sampled(0, 0),
        Sampled(2, 3),
        Sampled(np.int64(0), np.int64(0)),
        Sampled(2, np.int64(3)),
        Sampled(5.0, 2),
        Sampled(True, True),
        "sampled",
    ],
)
def test_a_method_that_cannot_be_used_is_refused(documents, lam, method):
    with pytest.raises(OptionError):
        local_step(LDA(0.1, 0.1, 20, method=method), lam, pack(documents), key=KEY)


@pytest.mark.parametrize("num_topics", [1, 16, 17, 100, 150, 333, 1000])
def test_rows_are_folded_in_steps_that_divide_their_width(num_topics):
    sizes = [sampling_width(num_topics), *_fold_sizes(sampling_width(num_topics))]
    assert sizes[0] >= num_topics
    assert sizes[-1] == 16
    assert all(a % b == 0 for a, b in itertools.pairwise(sizes))
