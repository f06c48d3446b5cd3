"""The model: against the float64 transcription, scikit-learn, and invariances that must hold."""

import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import scipy.sparse
from sklearn.decomposition import LatentDirichletAllocation
from sklearn.decomposition._lda import _update_doc_distribution

from smoothgrad_jax import (
    LDA,
    Collapsed,
    Corpus,
    Maximum,
    Mean,
    Sampled,
    elbo,
    init_topics,
    local_step,
    log_predictive,
    pack,
    seed_topics,
    split_documents,
    topics,
)
from smoothgrad_jax.data.batches import canonical_csr
from smoothgrad_jax.models.lda import document_fit, model

V, K, B = 50, 6, 17


def csr_of(corpus):
    return canonical_csr([*corpus, ([V - 1], [1.0])])[:-1]  # one more document, to fix the number of columns


@pytest.fixture
def lam(rng):
    return rng.gamma(0.5, 4, (V, K)) + 0.05


@pytest.fixture
def corpus(make_documents):
    """Lengths from 0 to 50 words: all sums of three tiles, and empty documents."""
    documents = make_documents(B, V, longest=50)
    documents[3] = (np.zeros(0, int), np.zeros(0))
    return documents


@pytest.mark.parametrize("alpha", [0.3, np.linspace(0.05, 2, K)], ids=["one alpha", "alpha per topic"])
def test_local_step_is_the_transcription_in_float64(x64, lam, corpus, alpha):
    stats, info = local_step(LDA(alpha, 0.1, 1000), lam, pack(corpus, num_words=V), tol=1e-3, max_iter=500)
    expected, gamma = oracle.local_step(alpha, lam, corpus, 1000, tol=1e-3, max_iter=500)
    np.testing.assert_allclose(info.gamma, gamma, rtol=1e-10)
    np.testing.assert_allclose(stats, expected, rtol=1e-9, atol=1e-12)
    iterations = [oracle.fit_document(alpha, lam, *document, 1e-3, 500)[2] for document in corpus]
    np.testing.assert_array_equal(info.iterations, iterations)
    assert 0 < float(info.change) < 1e-3


@pytest.mark.parametrize("method", [Mean(), Maximum()])
def test_methods_with_expected_topics_are_the_transcription_in_float64(x64, lam, corpus, method):
    options = {"tol": 1e-6, "max_iter": 500}
    stats, info = local_step(LDA(0.3, 0.1, 1000, method=method, **options), lam, pack(corpus, num_words=V))
    name = type(method).__name__
    expected, gamma = oracle.local_step(0.3, lam, corpus, 1000, method=name, **options)
    np.testing.assert_allclose(info.gamma, gamma, rtol=1e-10)
    np.testing.assert_allclose(stats, expected, rtol=1e-9, atol=1e-12)
    iterations = [oracle.fit_document(0.3, lam, *document, *options.values(), method=name)[2] for document in corpus]
    np.testing.assert_array_equal(info.iterations, iterations)


def test_momentum_changes_the_path_and_not_the_goal(x64, lam, corpus):
    """Plain coordinate ascent arrives at the same γ, and needs more updates to come as close."""
    plain = [oracle.fit_document(0.3, lam, *document, 1e-10, 9000, momentum=0) for document in corpus]
    _, info = local_step(LDA(0.3, 0.1, B), lam, pack(corpus, num_words=V), tol=1e-10, max_iter=9000)
    np.testing.assert_allclose(info.gamma, np.array([gamma for gamma, *_ in plain]), rtol=1e-5, atol=1e-6)
    assert np.sum(info.iterations) < 0.6 * sum(iterations for *_, iterations in plain)


@pytest.mark.parametrize("max_iter", [0, 1, 7])
def test_max_iter(x64, lam, corpus, max_iter):
    stats, info = local_step(LDA(0.3, 0.1, B), lam, pack(corpus, num_words=V), tol=0.0, max_iter=max_iter)
    expected, _ = oracle.local_step(0.3, lam, corpus, B, tol=0.0, max_iter=max_iter)
    assert set(np.asarray(info.iterations).tolist()) <= {max_iter, 0}
    np.testing.assert_allclose(stats, expected, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(info.gamma[3], 0.3)


def test_float32_follows_float64(lam, corpus):
    # A tolerance that both reach by far, so that no document stops one update apart.
    stats, info = local_step(LDA(0.3, 0.1, 1000), lam.astype(np.float32), pack(corpus, num_words=V), 1e-5, 1000)
    expected, gamma = oracle.local_step(0.3, lam, corpus, 1000, 1e-12, 5000)
    np.testing.assert_allclose(info.gamma, gamma, rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(stats, expected, rtol=2e-3, atol=2e-3 * expected.max())


def test_scikit_learns_e_step(x64, lam, corpus):
    """They start elsewhere, and have to arrive at the same fixed point."""
    X = csr_of(corpus)
    log_beta = oracle.expected_log(lam, 0)
    gamma, weights = _update_doc_distribution(X, np.exp(log_beta).T, 0.3, 5000, 1e-10, True, None)
    stats, info = local_step(LDA(0.3, 0.1, B), lam, pack(X), 1e-10, 5000)
    np.testing.assert_allclose(info.gamma, gamma, rtol=1e-6)
    np.testing.assert_allclose(stats, (weights * np.exp(log_beta).T).T, rtol=1e-5, atol=1e-9)


def test_scikit_learns_bound(x64, lam, corpus):
    X = csr_of(corpus)
    theirs = LatentDirichletAllocation(K, doc_topic_prior=0.3, topic_word_prior=0.1, total_samples=B).fit(X[:2])
    theirs.components_ = lam.T
    theirs.exp_dirichlet_component_ = np.exp(oracle.expected_log(lam, 0)).T
    gamma = np.asarray(local_step(LDA(0.3, 0.1, B), lam, pack(X), 1e-10, 5000)[1].gamma)
    bound = theirs._approx_bound(X, gamma, sub_sampling=False)
    assert float(elbo(LDA(0.3, 0.1, B), lam, pack(X), 1e-10, 5000)) == pytest.approx(bound, rel=1e-9)


def test_elbo_is_the_transcription(x64, lam, corpus, rng):
    eta = rng.gamma(1, 1, (V, K))
    model = LDA(np.linspace(0.1, 1, K), eta, 300)
    got = elbo(model, lam, pack(corpus, num_words=V))
    assert float(got) == pytest.approx(oracle.elbo(model.alpha, eta, lam, corpus, 300), rel=1e-10)


def test_the_slope_of_the_bound_in_eta(x64, lam, corpus):
    """The documents do not depend on η: only the topics' part of the bound does, and can be differentiated."""
    batch = pack(corpus, num_words=lam.shape[0])

    def bound(eta):
        return elbo(LDA(0.3, eta, len(corpus)), jnp.asarray(lam), batch)

    h = 1e-5
    slope = (bound(0.2 + h) - bound(0.2 - h)) / (2 * h)
    np.testing.assert_allclose(jax.grad(bound)(0.2), slope, rtol=1e-6)


@pytest.mark.parametrize("prior", [0.01, 0.5])
@pytest.mark.parametrize("scale", [1.0, 1e5], ids=["small lambda", "large lambda"])
def test_elbo_is_accurate_in_float32(prior, scale, corpus, rng):
    lam = (prior + scale * rng.gamma(0.3, 1, (V, K))).astype(np.float32)
    got = elbo(LDA(prior, prior, 300), lam, pack(corpus, num_words=V), 1e-5, 1000)
    expected = oracle.elbo(prior, prior, lam, corpus, 300, 1e-9, 3000)
    assert float(got) == pytest.approx(expected, rel=3e-6)


@pytest.mark.slow
def test_elbo_of_all_minibatches_averages_to_the_whole(x64, lam, corpus):
    """An unbiased estimate: the mean over the parts of the corpus is the bound of the whole."""
    X = csr_of(corpus)
    model = LDA(0.3, 0.1, 16)
    whole = elbo(model, lam, pack(X, np.arange(16)))
    parts = [float(elbo(model, lam, pack(X, rows))) for rows in np.arange(16).reshape(2, 8)]
    assert np.mean(parts) == pytest.approx(float(whole), rel=1e-10)
    assert np.std(parts) > 1


def test_log_predictive_is_the_transcription(x64, lam, corpus):
    X = csr_of(corpus)
    observed, held_out = split_documents(X, jax.random.key(1))
    halves = [[(half[[d]].indices, half[[d]].data) for d in range(B)] for half in (observed, held_out)]
    got = log_predictive(LDA(0.3, 0.1, B), lam, pack(observed), pack(held_out))
    assert float(got) == float(log_predictive(LDA(0.3, 0.1, B), lam, observed, held_out))
    assert float(got) == pytest.approx(oracle.log_predictive(0.3, lam, *halves), rel=1e-10)
    # One scorer for all methods that use E[β].
    expected = oracle.log_predictive(0.3, lam, *halves, method="Maximum")
    for method in (Mean(), Collapsed(), Maximum(), Sampled()):
        got = log_predictive(LDA(0.3, 0.1, B, method=method), lam, observed, held_out)
        assert float(got) == pytest.approx(expected, rel=1e-10)


def test_log_predictive_of_uniform_topics_is_known():
    """All words equally likely: −log V, whatever is observed."""
    X = np.array([[3, 0, 1, 2], [0, 2, 2, 0]])
    observed, held_out = split_documents(X, jax.random.key(0))
    got = log_predictive(LDA(0.5, 0.5, 2), jnp.ones((4, 3)), pack(observed), pack(held_out))
    assert float(got) == pytest.approx(-np.log(4), rel=1e-6)


def test_a_document_does_not_depend_on_the_rest_of_the_batch(lam, corpus, rng):
    """Bit by bit: other documents, their order, and how much padding there is."""
    X = csr_of(corpus)
    lam = lam.astype(np.float32)
    model = LDA(0.3, 0.1, B)
    _, whole = local_step(model, lam, pack(X))
    order = rng.permutation(B)
    _, shuffled = local_step(model, lam, pack(X, order))
    np.testing.assert_array_equal(shuffled.gamma, whole.gamma[order])
    np.testing.assert_array_equal(shuffled.iterations, whole.iterations[order])
    for d in range(0, B, 4):
        _, alone = local_step(model, lam, pack(X, [d]))
        np.testing.assert_array_equal(alone.gamma[0], whole.gamma[d])


def test_statistics_do_not_depend_on_the_order(lam, corpus, rng):
    X = csr_of(corpus)
    lam = lam.astype(np.float32)
    stats, _ = local_step(LDA(0.3, 0.1, B), lam, pack(X))
    shuffled, _ = local_step(LDA(0.3, 0.1, B), lam, pack(X, rng.permutation(B)))
    np.testing.assert_allclose(shuffled, stats, rtol=1e-5, atol=1e-6)


def test_words_and_topics_may_be_renamed(x64, lam, corpus, rng):
    X = csr_of(corpus)
    words, names = rng.permutation(V), rng.permutation(K)
    alpha = np.linspace(0.1, 1, K)
    stats, info = local_step(LDA(alpha, 0.1, B), lam, pack(X), 1e-10, 5000)
    renamed, other = local_step(LDA(alpha[names], 0.1, B), lam[words][:, names], pack(X[:, words]), 1e-10, 5000)
    np.testing.assert_allclose(renamed, np.asarray(stats)[words][:, names], rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(other.gamma, np.asarray(info.gamma)[:, names], rtol=1e-6)


PRIORS = [1e-6, 1e-3, 0.012, 0.1, 1.0, 1e3]


@pytest.mark.parametrize("alpha", PRIORS)
@pytest.mark.parametrize("eta", PRIORS)
def test_any_prior_in_float32(alpha, eta, corpus, rng):
    """λ = η + counts, some words of which no topic has seen, topics that are empty, documents that are tiny."""
    X = csr_of(corpus).copy()
    lam = np.full((V, K), eta, np.float32)
    lam[: V // 2, : K - 1] += rng.gamma(0.2, 50, (V // 2, K - 1)).astype(np.float32)
    model = LDA(alpha, eta, 10 * B)
    for counts in (X, X * 1e-3):
        batch = pack(counts)
        stats, info = local_step(model, jnp.asarray(lam), batch)
        stats = np.asarray(stats, np.float64)
        assert np.isfinite(stats).all()
        assert np.isfinite(info.gamma).all()
        assert (stats >= 0).all()
        assert (np.asarray(info.gamma) >= alpha * 0.999999).all()
        # Mass: every token is in some topic, and γ holds what the prior and the document have.
        np.testing.assert_allclose(stats.sum(1), 10 * counts.sum(0), rtol=1e-4)
        np.testing.assert_allclose(info.gamma.sum(1), K * alpha + counts.sum(1), rtol=1e-4)
        assert np.isfinite(elbo(model, jnp.asarray(lam), batch))
        assert np.isfinite(log_predictive(model, jnp.asarray(lam), batch, batch))


@pytest.mark.parametrize("prior", [1e-6, 1e-3, 0.01])
def test_small_priors_agree_with_the_log_domain(prior, corpus, rng):
    """What underflows in a product of two exponentials must not change the answer."""
    lam = (prior + rng.gamma(0.3, 20, (V, K)) * (rng.random((V, K)) < 0.5)).astype(np.float32)
    stats, info = local_step(LDA(prior, prior, B), lam, pack(corpus, num_words=V), 1e-5, 1000)
    expected, gamma = oracle.local_step(prior, lam, corpus, B, 1e-9, 5000)
    np.testing.assert_allclose(info.gamma, gamma, rtol=5e-3, atol=5e-3)
    assert np.abs(np.asarray(stats) - expected).sum() < 2e-3 * expected.sum()


@pytest.mark.parametrize(("K", "alpha", "tokens"), [(500, 1 / 500, 2), (1000, 1 / 1000, 4), (200, 1e-6, 1)])
def test_short_documents_with_many_topics_agree_with_the_log_domain(K, alpha, tokens, rng):
    """γ of a few thousandths: exp ψ(γ) is far below the smallest float, and its ratios still decide."""
    lam = rng.gamma(100, 0.01, (V, K)).astype(np.float32)
    documents = [(rng.choice(V, n, replace=False), np.ones(n)) for n in rng.integers(1, tokens + 1, 12)]
    stats, info = local_step(LDA(alpha, 0.1, 12), lam, pack(documents, num_words=V))
    expected, gamma = oracle.local_step(alpha, lam, documents, 12)
    assert np.abs(np.asarray(stats) - expected).sum() < 2e-2 * expected.sum()
    np.testing.assert_allclose(info.gamma, gamma, atol=2e-2)


@pytest.mark.parametrize("eta", [1e-3, 1e-4, 1e-5, 1e-6])
def test_words_that_no_topic_has_seen(eta):
    """λ = η in every topic: only the sizes of the topics decide, and e(η) = −1/η must not swallow them."""
    lam = np.array([[eta] * 3, [20, 1, 5], [1, 30, 2], [3, 4, 50]], np.float32)
    documents = [(np.array([0, 1]), np.array([2.0, 1.0]))]
    stats, _ = local_step(LDA(0.5, eta, 1), lam, pack(documents, num_words=4), 1e-6, 1000)
    expected, _ = oracle.local_step(0.5, lam, documents, 1, 1e-10, 5000)
    np.testing.assert_allclose(stats, expected, rtol=1e-3, atol=1e-5)


def test_no_topic_is_lost_to_underflow(rng):
    """Topics that share no word, with the smallest prior: each keeps the words that are its own."""
    K, per_topic = 8, 5
    lam = np.full((K * per_topic, K), 1e-6, np.float32)
    for k in range(K):
        lam[k * per_topic : (k + 1) * per_topic, k] = 3.0
    documents = [(np.arange(k * per_topic, (k + 1) * per_topic), np.ones(per_topic)) for k in range(K)]
    stats, _ = local_step(LDA(1e-6, 1e-6, K), lam, pack(documents, num_words=len(lam)))
    np.testing.assert_allclose(np.asarray(stats).sum(0), per_topic, rtol=1e-5)


@pytest.mark.slow
def test_a_very_long_document(x64, rng):
    V = 5000
    lam = rng.gamma(0.5, 4, (V, 3)) + 0.1
    documents = [(np.arange(V), rng.integers(1, 9, V).astype(float)), ([7], [2.0])]
    stats, info = local_step(LDA(0.5, 0.1, 2), lam, pack(documents, num_words=V))
    expected, gamma = oracle.local_step(0.5, lam, [(np.array(w), np.array(c)) for w, c in documents], 2)
    np.testing.assert_allclose(stats, expected, rtol=1e-9)
    np.testing.assert_allclose(info.gamma, gamma, rtol=1e-10)


def test_one_topic_is_counting():
    X = np.array([[3, 0, 1], [0, 2, 2]])
    stats, info = local_step(LDA(0.5, 0.5, 20), jnp.ones((3, 1)), pack(X))
    np.testing.assert_allclose(stats[:, 0], 10 * X.sum(0), rtol=1e-6)
    np.testing.assert_allclose(info.gamma[:, 0], 0.5 + X.sum(1), rtol=1e-6)


def test_batch_variational_bayes_climbs(lam, corpus):
    """The limit B = D, L = 1, ρ = 1: λ ← η + S must raise the bound at every step."""
    lam = jnp.asarray(lam, jnp.float32)
    model = LDA(0.3, 0.1, B)
    batch = pack(corpus, num_words=V)
    bounds = []
    for _ in range(20):
        bounds.append(float(elbo(model, lam, batch, 1e-5, 1000)))
        lam = model.eta + local_step(model, lam, batch, 1e-5, 1000)[0]
    gains = np.diff(bounds)
    assert (gains > -1e-6 * np.abs(bounds[0])).all()
    assert bounds[-1] > bounds[0] + 100


def test_topics_are_distributions(lam):
    beta = topics(jnp.asarray(lam))
    assert beta.shape == (K, V)
    np.testing.assert_allclose(beta.sum(1), 1, rtol=1e-6)
    np.testing.assert_allclose(beta, (lam / lam.sum(0)).T, rtol=1e-6)


@pytest.mark.parametrize("width", [1, 2, 7, 8, 9, 13, 100, 101])
def test_the_largest_of_a_row(width):
    rows = np.random.default_rng(width).random((width, width), np.float32) + np.eye(width, dtype=np.float32)
    np.testing.assert_array_equal(document_fit._largest(rows), rows.max(1, keepdims=True))
    rows[0, width // 2] = np.nan
    assert np.isnan(document_fit._largest(rows)[0, 0])


def test_init_topics():
    lam = init_topics(jax.random.key(0), 300, 200)
    assert lam.shape == (300, 200)
    assert lam.dtype == jnp.float32
    assert float(lam.min()) > 0
    assert float(lam.mean()) == pytest.approx(1, abs=1e-3)
    assert float(lam.std()) == pytest.approx(0.1, abs=1e-3)
    assert not np.array_equal(lam, init_topics(jax.random.key(1), 300, 200))


def test_everything_can_be_swept_by_vmap(lam, corpus):
    """Hyperparameters are traced: α, η, tolerance."""
    lam = jnp.asarray(lam, jnp.float32)
    batch = pack(corpus, num_words=V)
    alphas = jnp.array([0.1, 1.0, 5.0])
    together = jax.vmap(lambda a: local_step(LDA(a, 0.1, B), lam, batch)[1].gamma)(alphas)
    for alpha, gamma in zip(alphas, together, strict=True):
        alone = local_step(LDA(alpha, 0.1, B), lam, batch)[1].gamma
        np.testing.assert_allclose(gamma, alone, rtol=1e-4, atol=1e-4)


def test_nothing_is_compiled_twice(lam, corpus, rng):
    lam = jnp.asarray(lam, jnp.float32)
    X = csr_of(corpus)
    for alpha in (0.3, jnp.ones(())):  # an array of jax is another entry of the cache, and not another program
        local_step(LDA(alpha, 0.1, B), lam, pack(X))
    before = model._local_step._cache_size()
    local_step(LDA(0.7, 0.2, 99), 2 * lam, pack(X, rng.permutation(B)), tol=1e-4, max_iter=50)
    for other in (LDA(1, 1, 3_000_000_000), LDA(np.float64(0.1), np.float32(0.1), 7.5), LDA(jnp.ones(()), 0.1, 3)):
        local_step(other, lam, pack(X))
    assert model._local_step._cache_size() == before


def test_no_hidden_copies_of_the_statistics():
    """The sum over documents is accumulated in place, for the words of the batch: nothing is kept per document."""
    V, K = 4000, 64
    X = np.eye(300, V)
    X[:, :20] = 1
    hyperparameters = LDA(*np.float32([0.1, 0.1, 300]))
    compiled = model._local_step.lower(hyperparameters, jnp.ones((V, K)), pack(X), None).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * V * K * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lam": jnp.ones((V - 1, K))}, "the documents have 50 words, but lam has 49 rows"),
        ({"lam": jnp.ones(V)}, r"lam must be float32 or float64 of shape \[V, K\], got float32 of shape \(50,\)"),
        ({"lam": jnp.ones((V, K), int)}, "lam must be float32 or float64"),
        ({"lam": jnp.ones((V, K), jnp.bfloat16)}, "lam must be float32 or float64"),
        ({"lam": [[1.0]]}, "got list"),
        ({"model": (0.1, 0.1, B)}, "expected an LDA"),
        ({"model": LDA(np.array([0.1] * (K - 1) + [-1.0]), 0.1, B)}, "alpha must be positive"),
        ({"model": LDA(0.1, 0.1, -5)}, "num_docs must be positive, got -5"),
        ({"model": LDA(0.1, 0.1, np.ones(3))}, "num_docs must be one number"),
        ({"model": LDA(np.ones(K + 1), 0.1, B)}, r"alpha must be one number or broadcast to \(6,\), got shape \(7,\)"),
        ({"model": LDA(0.1, np.ones((2, 2)), B)}, r"eta must be one number or broadcast to \(50, 6\)"),
        ({"model": LDA(0.0, 0.1, B)}, "alpha must be positive, got 0"),
        ({"model": LDA(0.1, float("nan"), B)}, "eta must be positive, got nan"),
        ({"model": LDA(0.1, 0.1, B, tol=float("nan"))}, "tol must be positive or 0, got nan"),
        ({"max_iter": -5}, "max_iter must be positive or 0, got -5"),
        ({"batch": np.eye(3)}, r"expected a Batch, got ndarray; pack\(X\) makes one"),
        ({"batch": pack(np.eye(3, V), [[0, 1], [1, 2]])}, "expected one batch, got a stack of 2"),
    ],
)
def test_bad_arguments_are_named(change, message):
    arguments = {"model": LDA(0.1, 0.1, B), "lam": jnp.ones((V, K)), "batch": pack(np.eye(3, V))} | change
    with pytest.raises(ValueError, match=message):
        local_step(**arguments)


def test_the_vocabulary_is_checked_inside_jit_too():
    with pytest.raises(ValueError, match="the documents have 50 words, but lam has 49 rows"):
        jax.jit(lambda lam, batch: local_step(LDA(0.1, 0.1, B), lam, batch)[0])(
            jnp.ones((V - 1, K)), pack(np.eye(3, V))
        )


def test_float32_topics_with_float64_counts(x64):
    batch = pack(np.eye(3, V))
    assert batch.counts.dtype == np.float64
    lam = jnp.ones((V, K), jnp.float32)
    assert elbo(LDA(0.1, 0.1, 3), lam, batch).dtype == jnp.float32
    assert log_predictive(LDA(0.1, 0.1, 3), lam, batch, batch).dtype == jnp.float32


def test_log_predictive_needs_the_same_documents():
    with pytest.raises(ValueError, match="2 documents are observed, but 3 are held out"):
        log_predictive(LDA(0.1, 0.1, B), jnp.ones((V, K)), pack(np.eye(2, V)), pack(np.eye(3, V)))


def test_seeded_topics_lean_to_documents(rng):
    X = scipy.sparse.csr_array(rng.poisson(0.2, (500, 60)))
    lam = seed_topics(jax.random.key(3), X, 5)
    assert lam.shape == (60, 5)
    assert lam.dtype == np.float32
    # What is above the noise is 0.3 of the words that a topic would have, were all equal.
    noise = np.asarray(init_topics(jax.random.key(3), 60, 5))
    np.testing.assert_allclose((lam - noise).sum(0), 0.3 * X.sum() / 5, rtol=0.1)
    assert (lam - noise).min() > -1e-5
    part = seed_topics(jax.random.key(3), Corpus.of(X).part(100, 200), 5, num_docs=500)
    np.testing.assert_allclose((part - noise).sum(0), 0.3 * X.sum() / 5, rtol=0.2)
    assert not np.allclose(part, lam, rtol=0.2)
    few = seed_topics(jax.random.key(3), X[:3], 5)  # documents are drawn more than once
    assert np.isfinite(few).all()


def test_seeded_topics_are_the_only_array_of_their_size(rng):
    num_words = 100_000
    X = scipy.sparse.csr_array(rng.poisson(0.2, (500, 60)))
    X.resize((500, num_words))
    tracemalloc.start()
    lam = seed_topics(jax.random.key(3), X, 5)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert lam.nbytes <= peak < 1.7 * lam.nbytes


def test_topics_of_a_large_vocabulary_sum_to_one():
    """The rows are added in float64: in float32 a sum of 50,000 hardly grows by 0.05."""
    lam = np.full((300_000, 2), 0.05, np.float32)
    lam[0] = 50_000
    found = topics(lam)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found.sum(1, dtype=np.float64), 1, rtol=1e-6)
