"""Quality of topics: closed forms, a slow transcription, invariances, and gensim where it is installed."""

import json
import math

import numpy as np
import pytest
import scipy.sparse

from smoothgrad_jax.data.corpus import Corpus
from smoothgrad_jax.models import topic_quality as quality
from smoothgrad_jax.models.topic_quality import TopicQuality

EPSILON = 1e-12


def random_case(rng, D=80, V=40, K=6):
    """Return counts [D, V] with an empty document, and λ [V, K]; every word occurs, and none in every document."""
    X = rng.poisson(0.4, (D, V))
    X[0] = 0
    X[1 + np.arange(V) % (D - 1), np.arange(V)] += 1
    return X, rng.gamma(0.2, 5, (V, K)) + 0.01


def slow_npmi(topics, X):
    """Transcribe the definition with loops over documents and Python numbers."""
    documents = [{w for w, count in enumerate(row) if count > 0} for row in np.asarray(X).tolist()]
    values = []
    for words in np.asarray(topics).tolist():
        pairs = []
        for i, v in enumerate(words):
            for w in words[i + 1 :]:
                p_v, p_w, p_vw = (sum(part <= d for d in documents) / len(documents) for part in ({v}, {w}, {v, w}))
                if p_v * p_w == 0 or p_vw == 1:
                    pairs.append(0.0)
                else:
                    pairs.append(math.log((p_vw + EPSILON) / (p_v * p_w)) / -math.log(p_vw + EPSILON))
        values.append(math.fsum(pairs) / len(pairs))
    return values


# ---- NPMI ----


def test_words_that_occur_only_together_have_an_npmi_of_one():
    X = np.array([[1, 2, 0], [3, 1, 0], [0, 0, 1], [0, 0, 0]])
    assert quality.npmi([[0, 1]], X) == pytest.approx([1])


def test_independent_words_have_an_npmi_of_zero():
    X = np.array([[1, 1], [1, 0], [0, 1], [0, 0]])
    assert quality.npmi([[0, 1]], X) == pytest.approx([0], abs=1e-9)


def test_words_that_never_occur_together_have_the_npmi_of_the_smoothed_formula():
    X = np.array([[1, 0], [0, 1]])
    expected = math.log(EPSILON / 0.25) / -math.log(EPSILON)
    assert quality.npmi([[0, 1]], X) == pytest.approx([expected])
    assert -1 < expected < -0.9


def test_a_pair_with_known_counts():
    # p(v) = 3/8, p(w) = 4/8, p(v, w) = 2/8
    X = np.array([[1, 1], [1, 1], [1, 0], [0, 1], [0, 1], [0, 0], [0, 0], [0, 0]])
    assert quality.npmi([[0, 1]], X) == pytest.approx([math.log(4 / 3) / math.log(4)])


def test_undefined_pairs_count_zero():
    X = np.array([[1, 1, 0, 1], [1, 1, 0, 0], [2, 5, 0, 0]])
    # Words 0 and 1 occur in all documents; word 2 in none.
    np.testing.assert_array_equal(quality.npmi([[0, 1], [0, 2], [2, 3]], X), [0, 0, 0])


def test_a_topic_of_one_word_has_an_npmi_of_zero():
    np.testing.assert_array_equal(quality.npmi([[1], [0]], np.eye(2)), [0, 0])


def test_npmi_equals_the_slow_transcription(rng):
    for _ in range(5):
        X, lam = random_case(rng)
        X[:, 3] = 0
        X[:, 4:6] = 1
        words = quality.top_words(lam, 7)
        np.testing.assert_allclose(quality.npmi(words, X), slow_npmi(words, X), rtol=1e-10, atol=1e-12)


def test_every_form_of_the_documents_gives_the_same_npmi(rng, monkeypatch):
    X, lam = random_case(rng)
    words = quality.top_words(lam)
    expected = quality.npmi(words, X)
    csr = scipy.sparse.csr_array(X)
    twice = scipy.sparse.csr_array(  # every entry is listed two times, and once more with a count of zero
        (np.tile([1, 1, 0], csr.nnz), np.repeat(csr.indices, 3), 3 * csr.indptr), csr.shape
    )
    stacked = Corpus.of(scipy.sparse.vstack([csr, csr], format="csr"))
    for form in (csr, csr.astype(np.float32), csr.tocoo(), Corpus.of(csr), twice, stacked.part(len(X), 2 * len(X))):
        np.testing.assert_array_equal(quality.npmi(words, form), expected)
    monkeypatch.setattr(quality, "MAX_DOCS", 7)  # the size of the parts in which a corpus is read
    np.testing.assert_array_equal(quality.npmi(words, Corpus.of(csr)), expected)


def test_npmi_does_not_depend_on_the_order_of_documents_topics_and_words(rng):
    X, lam = random_case(rng)
    words = quality.top_words(lam)
    expected = quality.npmi(words, X)
    np.testing.assert_array_equal(quality.npmi(words, rng.permutation(X)), expected)
    order = rng.permutation(len(words))
    np.testing.assert_array_equal(quality.npmi(words[order], X), expected[order])
    np.testing.assert_allclose(quality.npmi(rng.permuted(words, axis=1), X), expected, rtol=1e-12)
    np.testing.assert_allclose(quality.npmi(words, np.tile(X, (3, 1))), expected, rtol=1e-9)
    np.testing.assert_array_equal(quality.npmi(words, 9 * X), expected)


def test_npmi_equals_gensim(rng):
    pytest.importorskip("gensim")
    from gensim.corpora import Dictionary
    from gensim.models import CoherenceModel

    X, lam = random_case(rng, D=300, V=60, K=8)
    words = quality.top_words(lam)
    texts = [[f"w{w}" for w in np.repeat(np.arange(60), row)] for row in X]
    topics = [[f"w{w}" for w in topic] for topic in words]
    model = CoherenceModel(
        topics=topics,
        texts=texts,
        dictionary=Dictionary(texts),
        coherence="c_npmi",
        window_size=1 + max(map(len, texts)),
        processes=1,
    )
    np.testing.assert_allclose(quality.npmi(words, X), model.get_coherence_per_topic(), rtol=1e-9)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([[0, 3]], "from 0 to 2; got 0 to 3"),
        ([[-1, 0]], "got -1 to 0"),
        ([[0, 1], [1, 1]], "topic 1: top_words must be distinct"),
        ([0, 1], r"shape \[K, n\]"),
        ([[0.5, 1]], "word numbers"),
    ],
)
def test_wrong_words_are_refused(words, message):
    with pytest.raises(ValueError, match=message):
        quality.npmi(words, np.eye(3))


# ---- diversity, effective topics, top words ----


def test_diversity_is_the_fraction_of_distinct_words():
    assert quality.diversity([[0, 1], [2, 3]]) == 1
    assert quality.diversity([[0, 1], [1, 0]]) == 0.5
    assert quality.diversity([[0, 1], [1, 2]]) == 0.75


def test_effective_topics_in_closed_form():
    assert quality.effective_topics(np.full(7, 3.0)) == pytest.approx(7)
    assert quality.effective_topics([0, 5, 0]) == 1
    assert quality.effective_topics([0.5, 0.25, 0.25]) == pytest.approx(2**1.5)
    assert quality.effective_topics([1, 1, 1e-12]) == pytest.approx(2)


@pytest.mark.parametrize("prevalence", [[], [[1.0]], [0, 0], [-1, 2], [math.nan, 1], [math.inf, 1]])
def test_wrong_shares_are_refused(prevalence):
    with pytest.raises(ValueError, match="prevalence must be"):
        quality.effective_topics(prevalence)


def test_top_words_are_sorted_with_ties_in_the_order_of_the_vocabulary(rng):
    lam = rng.integers(1, 6, (50, 9)).astype(np.float32)
    expected = np.argsort(-lam, axis=0, kind="stable")[:10].T
    np.testing.assert_array_equal(quality.top_words(lam), expected)
    assert quality.top_words(lam[:4]).shape == (9, 4)


def test_topic_prevalence_leaves_out_the_prior():
    lam = np.array([[2.5, 0.5], [0.5, 1.5]])
    np.testing.assert_allclose(quality.topic_prevalence(lam, 0.5), [2 / 3, 1 / 3])
    assert quality.topic_prevalence(np.full((3, 2), 0.5), 0.5) is None


# ---- matching ----


@pytest.mark.parametrize("measure", ["cosine", "overlap"])
def test_a_permutation_of_topics_is_found(rng, measure):
    lam = rng.gamma(0.1, 1, (200, 12)) + 1e-6
    order = rng.permutation(12)
    match = quality.match_topics(lam, 3 * lam[:, order], measure=measure)
    np.testing.assert_array_equal(order[match.partner], np.arange(12))
    np.testing.assert_allclose(match.similarity, 1)


def test_the_matching_maximises_the_sum_of_similarities():
    # The greedy choice pairs topic 0 with topic 0 (cosine 1) and leaves topic 1 the cosine 0.
    a = np.array([[1.0, 1.0], [0.0, 0.0], [0.0, 2.0]])
    b = np.array([[1.0, 1.0], [0.0, 2.0], [0.0, 0.0]])
    cosine = [[1, 1 / math.sqrt(5)], [1 / math.sqrt(5), 1 / 5]]
    match = quality.match_topics(a, b)
    total = max(cosine[0][0] + cosine[1][1], cosine[0][1] + cosine[1][0])
    assert match.similarity.sum() == pytest.approx(total)


def test_topics_without_a_partner_have_similarity_zero(rng):
    lam = rng.gamma(0.1, 1, (50, 5)) + 1e-6
    match = quality.match_topics(lam, lam[:, [4, 1]])
    np.testing.assert_array_equal(match.partner, [-1, 1, -1, -1, 0])
    np.testing.assert_allclose(match.similarity, [0, 1, 0, 0, 1])
    np.testing.assert_array_equal(quality.match_topics(lam[:, [4, 1]], lam).partner, [4, 1])


def test_overlap_is_the_fraction_of_common_top_words():
    a, b = np.zeros((2, 20, 1))
    a[[0, 1, 2, 3], 0] = b[[2, 3, 4, 5], 0] = [4, 3, 2, 1]
    assert quality.match_topics(a, b, measure="overlap", num_words=4).similarity == pytest.approx([0.5])


def test_topics_that_cannot_be_matched_are_refused():
    with pytest.raises(ValueError, match="got 3 and 4 words"):
        quality.match_topics(np.ones((3, 2)), np.ones((4, 2)))
    with pytest.raises(ValueError, match="measure must be 'cosine' or 'overlap', got 'l2'"):
        quality.match_topics(np.ones((3, 2)), np.ones((3, 2)), measure="l2")


# ---- near-duplicates and junk ----


def distinct_topics(K=4, size=20):
    """Return λ [K · size, K] in which every topic has words of its own, with decreasing probabilities."""
    return np.kron(np.eye(K), (50.0 / np.arange(1, size + 1))[:, None]) + 0.01


def test_near_duplicates_are_found():
    lam = distinct_topics()
    assert quality.near_duplicates(lam) == []
    copies = np.column_stack([lam, 7 * lam[:, 2], lam[:, 0] + 0.001 * lam[:, 1]])
    assert quality.near_duplicates(copies) == [(2, 4), (0, 5)]


def test_topics_with_half_of_their_top_words_in_common_are_near_duplicates():
    lam = np.full((100, 3), 0.01)
    lam[:10, 0], lam[5:15, 1], lam[11:21, 2] = 5, 5, 5
    assert quality.near_duplicates(lam) == [(0, 1)]


def test_a_small_vocabulary_makes_no_duplicates():
    assert quality.near_duplicates(np.array([[9, 1], [1, 9.0]])) == []


def test_junk_topics_have_a_reason():
    lam = np.column_stack([distinct_topics(), np.ones(80)])
    prevalence = [1, 1, 0.01, 1, 1]
    junk = quality.junk_topics(lam, [0.2, -0.1, 0.3, 0.0, 0.2], prevalence)
    assert junk == {1: "incoherent", 2: "almost empty", 3: "incoherent", 4: "flat"}
    assert quality.junk_topics(lam[:, :4], np.full(4, 0.1), np.ones(4)) == {}


# ---- everything together ----


def test_topic_quality_is_the_sum_of_its_parts(rng):
    X, lam = random_case(rng)
    words, prevalence = quality.top_words(lam), rng.random(6)
    found = quality.topic_quality(lam, X, prevalence=prevalence)
    np.testing.assert_array_equal(found.npmi, quality.npmi(words, X))
    assert found.diversity == quality.diversity(words)
    assert found.effective_topics == quality.effective_topics(prevalence)
    assert found.near_duplicates == quality.near_duplicates(lam)
    assert found.junk == quality.junk_topics(lam, found.npmi, prevalence)
    assert found.num_docs == len(X)
    assert quality.topic_quality(lam, X).effective_topics == quality.effective_topics(lam.sum(0))
    assert found.summary()["npmi"] == pytest.approx(found.npmi.mean())


def test_a_permutation_of_topics_permutes_the_quality(rng):
    X, lam = random_case(rng)
    lam[:, 5] = 2 * lam[:, 1]
    order = rng.permutation(6)
    one, other = quality.topic_quality(lam, X), quality.topic_quality(lam[:, order], X)
    np.testing.assert_array_equal(other.npmi, one.npmi[order])
    assert other.diversity == one.diversity
    assert other.effective_topics == pytest.approx(one.effective_topics)
    assert {tuple(sorted(order[list(pair)])) for pair in other.near_duplicates} == set(one.near_duplicates)
    assert {int(order[k]): reason for k, reason in other.junk.items()} == one.junk


def test_only_some_documents_of_a_large_corpus_are_read(rng, monkeypatch):
    X, lam = random_case(rng)
    some = X[np.linspace(0, len(X) - 1, 30).round().astype(int)]
    found = quality.topic_quality(lam, Corpus.of(X), max_docs=30)
    assert found.num_docs == 30
    np.testing.assert_array_equal(found.npmi, quality.topic_quality(lam, some).npmi)


def test_only_the_documents_that_are_named_are_read(rng):
    X, lam = random_case(rng)
    documents = np.arange(5, 60, 2)
    found = quality.topic_quality(lam, X, documents=documents)
    assert found.num_docs == len(documents)
    np.testing.assert_array_equal(found.npmi, quality.topic_quality(lam, X[documents]).npmi)
    assert quality.topic_quality(lam, X, documents=documents, max_docs=9).num_docs == 9


def test_remarks_name_the_reason_and_the_duplicates():
    found = TopicQuality(np.zeros(4), 0.75, 1.9, [(0, 2), (1, 2)], {1: "flat"}, 9)
    assert found.remarks(0) == ["near-duplicate of topic 2"]
    assert found.remarks(1) == ["flat", "near-duplicate of topic 2"]
    assert found.remarks(2) == ["near-duplicate of topic 0", "near-duplicate of topic 1"]
    assert found.remarks(3) == []


def test_quality_survives_json(rng):
    X, lam = random_case(rng)
    lam[:, 5] = 2 * lam[:, 1]
    found = quality.topic_quality(lam, X, prevalence=[1, 1, 1, 1, 0.001, 1])
    back = TopicQuality.from_json(json.loads(json.dumps(found.as_json())))
    np.testing.assert_array_equal(back.npmi, found.npmi)
    assert back._replace(npmi=None) == found._replace(npmi=None)
    assert (1, 5) in back.near_duplicates
    assert back.junk[4] == "almost empty"


def test_the_description_counts_in_the_right_number():
    found = TopicQuality(np.array([0.1, 0.2]), 0.75, 1.9, [(0, 1)], {1: "flat"}, 9)
    assert found.describe() == (
        "NPMI 0.150, diversity 0.75, 1.9 effective topics of 2, 1 near-duplicate pair, 1 junk topic"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"X": np.eye(3)}, "X has 3 words, but λ has 4 rows"),
        ({"lam": np.ones(4)}, r"lam must be numbers of shape \[V, K\]"),
        ({"prevalence": [1.0]}, "prevalence must have one number per topic, 2"),
        ({"num_words": 0}, "num_words must be at least 1"),
        ({"max_docs": 0}, "max_docs must be at least 1"),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    arguments = {"lam": np.ones((4, 2)), "X": np.eye(4)} | change
    with pytest.raises(ValueError, match=message):
        quality.topic_quality(**arguments)


def test_a_hundred_topics_on_twenty_thousand_documents_take_less_than_two_seconds(rng):
    import time

    D, V, K = 20_000, 10_000, 100
    lengths = rng.integers(40, 80, D)
    words = (V * rng.random(lengths.sum()) ** 3).astype(np.int32)  # frequent words first
    X = Corpus(np.concatenate([[0], np.cumsum(lengths)]), words, np.ones(len(words), np.int32), V)
    lam = rng.gamma(0.05, 1000 / np.arange(1, V + 1)[:, None], (V, K)) + 0.05
    start = time.process_time()
    quality.topic_quality(lam, X)
    assert time.process_time() - start < 2
