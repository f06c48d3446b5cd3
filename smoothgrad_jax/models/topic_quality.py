"""Quality of topics: coherence, diversity, effective number, near-duplicates, junk, and stability over seeds.

| symbol   | meaning                                                                                             |
|----------|-----------------------------------------------------------------------------------------------------|
| λ        | Dirichlet parameters of the topics [V, K]                                                           |
| β_k      | λ_k / Σ_w λ_wk, the expected word probabilities of topic k                                          |
| π_k      | prevalence of topic k in the corpus                                                                 |
| p(w)     | fraction of the documents that contain word w                                                       |
| p(v, w)  | fraction of the documents that contain both words                                                   |
| n        | top words per topic                                                                                 |

No single number suffices. NPMI favours few large topics, diversity favours rare words, and a model with few effective
topics can be good in both. Read the numbers together, and with a held-out score.

References: Bouma, *Normalized (pointwise) mutual information in collocation extraction* (2009); Röder, Both and
Hinneburg, *Exploring the space of topic coherence measures* (2015); Dieng, Ruiz and Blei, *Topic modeling in embedding
spaces* (2020), for diversity; AlSumait et al., *Topic significance ranking of LDA generative models* (2009), for junk.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import scipy.sparse

from smoothgrad_jax.data.batches import DocumentsLike
from smoothgrad_jax.data.corpus import Corpus

TOP_WORDS = 10  # n, as in gensim and Palmetto
MAX_DOCS = 20_000  # documents from which co-occurrences are counted
_EPSILON = 1e-12  # added to p(v, w), as in gensim, so that the logarithm is finite
_DUPLICATE_SIMILARITY = 0.9  # cosine from which two topics are near-duplicates
_DUPLICATE_OVERLAP = 0.5  # fraction of common top words from which two topics are near-duplicates
_SMALL_PREVALENCE = 0.05  # a topic with less than this fraction of the mean prevalence is almost empty
_FLAT = 0.5  # a topic whose effective words are more than this fraction of the vocabulary is flat
_BLOCK_SIZE = 1 << 22  # numbers per block of λ: 32 MB

Junk = Literal["incoherent", "flat", "almost empty"]
Measure = Literal["cosine", "overlap"]


class TopicQuality(NamedTuple):
    """Quality of K topics; made by :func:`topic_quality`.

    Attributes:
      npmi: Coherence per topic [K], about −1 to 1; see :func:`npmi`.
      diversity: Fraction of distinct words among the top words of all topics, in (0, 1].
      effective_topics: exp of the entropy of the prevalence, in [1, K].
      near_duplicates: Pairs of topics (i, j) with i < j, most similar first; see :func:`near_duplicates`.
      junk: Topics that are incoherent, flat or almost empty, with the reason; see :func:`junk_topics`.
      num_docs: Number of documents from which co-occurrences were counted.
    """

    npmi: npt.NDArray[np.float64]
    diversity: float
    effective_topics: float
    near_duplicates: list[tuple[int, int]]
    junk: dict[int, Junk]
    num_docs: int

    @property
    def mean_npmi(self) -> float:
        """Mean coherence of all topics."""
        return float(np.mean(self.npmi))

    def summary(self) -> dict[str, float]:
        """Return one number per measure, as JSON can represent it."""
        return {
            "npmi": self.mean_npmi,
            "diversity": self.diversity,
            "effective_topics": self.effective_topics,
            "near_duplicates": len(self.near_duplicates),
            "junk_topics": len(self.junk),
        }

    def describe(self) -> str:
        """Return the summary as one line."""
        pairs, junk = len(self.near_duplicates), len(self.junk)
        plural = ["s" if number != 1 else "" for number in (pairs, junk)]
        return (
            f"NPMI {self.mean_npmi:.3f}, diversity {self.diversity:.2f}, "
            f"{self.effective_topics:.1f} effective topics of {len(self.npmi)}, "
            f"{pairs} near-duplicate pair{plural[0]}, {junk} junk topic{plural[1]}"
        )

    def duplicates_of(self, topic: int) -> list[int]:
        """Return the near-duplicates of a topic, most similar first."""
        return [j if i == topic else i for i, j in self.near_duplicates if topic in (i, j)]

    def remarks(self, topic: int) -> list[str]:
        """Return what is wrong with a topic: why it is junk, and which topics nearly duplicate it."""
        reason = [str(self.junk[topic])] if topic in self.junk else []
        return reason + [f"near-duplicate of topic {other}" for other in self.duplicates_of(topic)]

    def as_json(self) -> dict[str, Any]:
        """Return all attributes as JSON can represent them."""
        return self._asdict() | {
            "npmi": self.npmi.tolist(),
            "near_duplicates": [list(pair) for pair in self.near_duplicates],
            "junk": {str(k): reason for k, reason in self.junk.items()},
        }

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "TopicQuality":
        """Return the quality from what :meth:`as_json` returned."""
        return TopicQuality(
            npmi=np.asarray(values["npmi"], np.float64),
            diversity=float(values["diversity"]),
            effective_topics=float(values["effective_topics"]),
            near_duplicates=[(int(i), int(j)) for i, j in values["near_duplicates"]],
            junk={int(k): reason for k, reason in values["junk"].items()},
            num_docs=int(values["num_docs"]),
        )


class TopicMatch(NamedTuple):
    """A one-to-one matching between two sets of topics; made by :func:`match_topics`.

    Attributes:
      partner: For each topic of the first set, its topic in the second set, or −1 for none [K].
      similarity: Similarity of the two, in [0, 1]; 0 without a partner [K]. The mean is the stability.
    """

    partner: npt.NDArray[np.int64]
    similarity: npt.NDArray[np.float64]


def topic_quality(
    lam: npt.ArrayLike,
    X: DocumentsLike,
    *,
    prevalence: npt.ArrayLike | None = None,
    documents: npt.NDArray | None = None,
    num_words: int = TOP_WORDS,
    max_docs: int = MAX_DOCS,
) -> TopicQuality:
    """Compute all measures of quality.

    Args:
      lam: λ [V, K].
      X: Documents × words, CSR or a :class:`smoothgrad_jax.Corpus`; usually the training documents.
      prevalence: π [K], of any positive sum; by default ∝ Σ_w λ_wk, which includes the prior.
      documents: Numbers of the documents of X to use; by default all.
      num_words: n.
      max_docs: Largest number of documents to read. Of more documents, some that are evenly spaced.

    Returns:
      A :class:`TopicQuality`.

    Raises:
      ValueError: If X has a different number of words than λ, or an argument is out of range.

    Example:
      >>> X = np.kron(np.eye(3), [[2, 1], [1, 3]])  # six documents; three pairs of words that occur together
      >>> lam = np.kron(np.eye(3), [[9], [8]]) + 0.1
      >>> topic_quality(lam, X, num_words=2).describe()
      'NPMI 1.000, diversity 1.00, 3.0 effective topics of 3, 0 near-duplicate pairs, 0 junk topics'
    """
    lam = _checked_topics("lam", lam)
    weights = lam.sum(0, dtype=np.float64) if prevalence is None else np.asarray(prevalence, np.float64)
    if weights.shape != (lam.shape[1],):
        raise ValueError(f"prevalence must have one number per topic, {lam.shape[1]}; got shape {weights.shape}")
    if max_docs < 1:
        raise ValueError(f"max_docs must be at least 1, got {max_docs}")
    corpus = X if isinstance(X, Corpus) else Corpus.of(X)
    if corpus.num_words != len(lam):
        raise ValueError(f"X has {corpus.num_words} words, but λ has {len(lam)} rows")
    size = corpus.num_docs if documents is None else len(documents)
    if size > max_docs or documents is not None:
        spaced = np.linspace(0, size - 1, min(size, max_docs)).round().astype(np.int64)
        corpus = Corpus.of(corpus.select(spaced if documents is None else np.asarray(documents)[spaced]))
    words = top_words(lam, num_words)
    coherence = npmi(words, corpus)
    return TopicQuality(
        npmi=coherence,
        diversity=diversity(words),
        effective_topics=effective_topics(weights),
        near_duplicates=near_duplicates(lam, num_words),
        junk=junk_topics(lam, coherence, weights),
        num_docs=corpus.num_docs,
    )


def top_words(lam: npt.ArrayLike, num_words: int = TOP_WORDS) -> npt.NDArray[np.int64]:
    """Return the most probable words of each topic [K, n], most probable first, ties in the order of the vocabulary.

    Args:
      lam: λ [V, K].
      num_words: n; at most V words are returned.
    """
    lam = _checked_topics("lam", lam)
    if num_words < 1:
        raise ValueError(f"num_words must be at least 1, got {num_words}")
    return np.stack([largest(column, num_words) for column in _columns(lam)])


def npmi(top_words: npt.ArrayLike, X: DocumentsLike) -> npt.NDArray[np.float64]:
    """Return the coherence of topics [K]: the mean NPMI of all pairs of their top words.

        NPMI(v, w) = log[(p(v, w) + ε) / (p(v) p(w))] / −log(p(v, w) + ε),  ε = 10⁻¹²

    1: the words occur only together; 0: together as often as by chance; negative: less often. The values equal those
    of gensim's ``CoherenceModel(coherence="c_npmi")`` with documents as windows, except for two cases in which gensim's
    result is no number or a rounding error. Here such a pair counts 0: a word that no document contains, and two words
    that all documents contain.

    Args:
      top_words: Word numbers [K, n], n distinct words per topic; see :func:`top_words`.
      X: Documents × words, CSR or a :class:`smoothgrad_jax.Corpus`. Only whether a count is positive matters.

    Returns:
      [K]; 0 for topics of one word.

    Raises:
      ValueError: If a word number is out of range, or a topic repeats a word.
    """
    words, corpus = _checked_words(top_words), X if isinstance(X, Corpus) else Corpus.of(X)
    if words.size and not 0 <= words.min() <= words.max() < corpus.num_words:
        raise ValueError(f"top_words must be from 0 to {corpus.num_words - 1}; got {words.min()} to {words.max()}")
    number = words.shape[1]
    if number < 2:
        return np.zeros(len(words))
    used, position = np.unique(words, return_inverse=True)
    occurs = _occurrences(corpus, used)
    first, second = np.triu_indices(number, 1)
    together = np.empty((len(words), len(first)))
    for k, columns in enumerate(position.reshape(words.shape)):
        part = occurs[:, columns]
        together[k] = (part.T @ part).toarray()[first, second]
    p = occurs.sum(0)[position.reshape(words.shape)] / corpus.num_docs
    joint, independent = together / corpus.num_docs, p[:, first] * p[:, second]
    is_defined = (independent > 0) & (joint < 1)
    ratio = np.where(is_defined, (joint + _EPSILON) / np.where(is_defined, independent, 1), 1)
    return (np.log(ratio) / -np.log(np.where(is_defined, joint, 0) + _EPSILON)).mean(1)


def diversity(top_words: npt.ArrayLike) -> float:
    """Return the fraction of distinct words among the top words of all topics: 1 if no two topics have one in common.

    Args:
      top_words: Word numbers [K, n].
    """
    words = _checked_words(top_words)
    return len(np.unique(words)) / words.size


def effective_topics(prevalence: npt.ArrayLike) -> float:
    """Return exp(−Σ_k π_k log π_k): K for equal prevalence, 1 if one topic has everything.

    Args:
      prevalence: π [K], of any positive sum.

    Raises:
      ValueError: If a number is negative or not finite, or all are 0.
    """
    weights = np.asarray(prevalence, np.float64)
    if weights.ndim != 1 or not weights.size:
        raise ValueError(f"prevalence must be one number per topic, got shape {weights.shape}")
    if not (np.isfinite(weights).all() and weights.min() >= 0 and weights.sum() > 0):
        raise ValueError("prevalence must be finite and not negative, with a positive sum")
    positive = weights[weights > 0] / weights.sum()
    return float(np.exp(-(positive * np.log(positive)).sum()))


def topic_prevalence(lam: npt.ArrayLike, eta: npt.ArrayLike) -> npt.NDArray[np.float64] | None:
    """Return π_k ∝ Σ_w max(λ_wk − η, 0), the fraction of the tokens in topic k [K]; None if λ is the prior.

    Args:
      lam: λ [V, K].
      eta: η, one number or an array that broadcasts to λ.
    """
    learned = np.maximum(np.asarray(lam) - np.asarray(eta), 0).sum(0, dtype=np.float64)
    return learned / learned.sum() if learned.sum() else None


def match_topics(
    lam_a: npt.ArrayLike, lam_b: npt.ArrayLike, *, measure: Measure = "cosine", num_words: int = TOP_WORDS
) -> TopicMatch:
    """Match the topics of two runs one to one, so that the sum of the similarities is largest.

    Runs that differ only in the seed find the same topics in another order, as far as topics are stable.

    Args:
      lam_a: λ [V, K] or β of the first run, one column per topic.
      lam_b: λ of the second run over the same vocabulary. The numbers of topics may differ.
      measure: ``"cosine"`` of the word probabilities, or ``"overlap"``, the fraction of common top words.
      num_words: n, for ``"overlap"``.

    Returns:
      A :class:`TopicMatch` with one entry per topic of the first run.

    Raises:
      ValueError: If the vocabularies differ in size, or the measure is unknown.

    Example:
      >>> lam = np.array([[9, 1, 1], [1, 9, 1], [1, 1, 9]])
      >>> match_topics(lam, lam[:, [2, 0, 1]]).partner
      array([1, 2, 0])
    """
    from scipy.optimize import linear_sum_assignment  # slow to import, and only needed here

    a, b = _checked_topics("lam_a", lam_a), _checked_topics("lam_b", lam_b)
    if len(a) != len(b):
        raise ValueError(f"expected topics over one vocabulary, got {len(a)} and {len(b)} words")
    if measure == "cosine":
        similarity = _cosine(a, b)
    elif measure == "overlap":
        similarity = _overlap(top_words(a, num_words), top_words(b, num_words), len(a))
    else:
        raise ValueError(f"measure must be 'cosine' or 'overlap', got {measure!r}")
    rows, columns = linear_sum_assignment(similarity, maximize=True)
    partner, matched = np.full(len(similarity), -1), np.zeros(len(similarity))
    partner[rows], matched[rows] = columns, similarity[rows, columns]
    return TopicMatch(partner, matched)


def near_duplicates(lam: npt.ArrayLike, num_words: int = TOP_WORDS) -> list[tuple[int, int]]:
    """Return pairs of near-duplicates: a cosine of β of at least 0.9, or half of the top words in common.

    Args:
      lam: λ [V, K].
      num_words: n.

    Returns:
      Pairs (i, j) with i < j, most similar first.
    """
    lam = _checked_topics("lam", lam)
    words = top_words(lam, num_words)
    cosine, overlap = _cosine(lam, lam), _overlap(words, words, len(lam))
    # A vocabulary of hardly more than n words gives every two topics the same top words.
    is_informative = 2 * words.shape[1] <= len(lam)
    is_duplicate = (cosine >= _DUPLICATE_SIMILARITY) | (is_informative & (overlap >= _DUPLICATE_OVERLAP))
    first, second = np.nonzero(np.triu(is_duplicate, 1))
    order = np.argsort(-cosine[first, second], kind="stable")
    return list(zip(first[order].tolist(), second[order].tolist(), strict=True))


def junk_topics(lam: npt.ArrayLike, coherence: npt.ArrayLike, prevalence: npt.ArrayLike) -> dict[int, Junk]:
    """Return the topics that describe nothing, with the reason.

    | reason         | criterion                                                                                   |
    |----------------|---------------------------------------------------------------------------------------------|
    | almost empty   | π_k is less than a twentieth of the mean prevalence                                         |
    | flat           | exp of the entropy of β_k, the effective number of words, is more than half of V            |
    | incoherent     | NPMI ≤ 0: the top words occur together no more often than by chance                         |

    The first criterion that applies is the reason.

    Args:
      lam: λ [V, K].
      coherence: NPMI [K].
      prevalence: π [K], of any positive sum.
    """
    lam, weights = _checked_topics("lam", lam), np.asarray(prevalence, np.float64)
    effective_words = np.array([effective_topics(column) for column in _columns(lam)])
    is_small, is_flat = weights < _SMALL_PREVALENCE * weights.mean(), effective_words > _FLAT * len(lam)
    junk: dict[int, Junk] = {}
    for k, value in enumerate(np.asarray(coherence).tolist()):
        if is_small[k]:
            junk[k] = "almost empty"
        elif is_flat[k]:
            junk[k] = "flat"
        elif value <= 0:
            junk[k] = "incoherent"
    return junk


def largest(values: npt.NDArray, number: int) -> npt.NDArray[np.int64]:
    """Return the indices of the largest values, largest first, ties in index order."""
    number = min(number, len(values))
    if number == 0:
        return np.zeros(0, np.int64)
    smallest = np.partition(values, len(values) - number)[len(values) - number]
    candidates = np.flatnonzero(values >= smallest)
    return candidates[np.argsort(-values[candidates], kind="stable")][:number]


def _checked_topics(name: str, lam: npt.ArrayLike) -> npt.NDArray:
    topics = np.asarray(lam)
    if topics.ndim != 2 or not topics.size or topics.dtype.kind not in "fiu":
        raise ValueError(f"{name} must be numbers of shape [V, K], got {topics.dtype} of shape {topics.shape}")
    return topics


def _checked_words(top_words: npt.ArrayLike) -> npt.NDArray[np.int64]:
    words = np.asarray(top_words)
    if words.ndim != 2 or not words.size or words.dtype.kind not in "iu":
        raise ValueError(f"top_words must be word numbers of shape [K, n], got {words.dtype} of shape {words.shape}")
    ordered = np.sort(words, axis=1)
    repeats = (ordered[:, 1:] == ordered[:, :-1]).any(1)
    if repeats.any():
        raise ValueError(f"topic {int(np.argmax(repeats))}: top_words must be distinct within a topic")
    return words.astype(np.int64)


def _occurrences(corpus: Corpus, words: npt.NDArray[np.int64]) -> scipy.sparse.csc_array:
    """Return documents × some words as 0 and 1. Reads the corpus in parts."""
    column = np.full(corpus.num_words, -1)
    column[words] = np.arange(len(words))
    rows, columns = [], []
    for number, part in enumerate(corpus.parts(MAX_DOCS)):
        entries = slice(int(part.indptr[0]), int(part.indptr[-1]))
        found = column[np.asarray(part.indices[entries])]
        kept = np.flatnonzero((found >= 0) & (np.asarray(part.data[entries]) > 0))
        documents = np.repeat(np.arange(part.num_docs), np.diff(part.indptr)) + number * MAX_DOCS
        rows.append(documents[kept])
        columns.append(found[kept])
    row, col = np.concatenate(rows), np.concatenate(columns)
    shape = corpus.num_docs, len(words)
    occurs = scipy.sparse.coo_array((np.ones(len(row), np.int32), (row, col)), shape).tocsc()
    occurs.sum_duplicates()  # a document may list a word twice
    occurs.data[:] = 1
    return occurs


def _columns(lam: npt.NDArray) -> Iterator[npt.NDArray]:
    """Yield the columns of λ as contiguous float64 arrays, in blocks that bound the memory."""
    step = max(1, _BLOCK_SIZE // len(lam))
    for first in range(0, lam.shape[1], step):
        yield from np.ascontiguousarray(lam[:, first : first + step].T, dtype=np.float64)


def _cosine(a: npt.NDArray, b: npt.NDArray) -> npt.NDArray[np.float64]:
    """Return the cosines between the columns of two matrices [K_a, K_b]; 0 for a column of zeros."""
    products, squares_a, squares_b = np.zeros((a.shape[1], b.shape[1])), np.zeros(a.shape[1]), np.zeros(b.shape[1])
    step = max(1, _BLOCK_SIZE // max(a.shape[1], b.shape[1]))
    # Columns that sum to one, so that squares neither overflow nor vanish.
    scale_a, scale_b = (1 / np.maximum(each.sum(0, dtype=np.float64), 1e-300) for each in (a, b))
    for first in range(0, len(a), step):
        block_a, block_b = a[first : first + step] * scale_a, b[first : first + step] * scale_b
        products += block_a.T @ block_b
        squares_a += np.einsum("vk,vk->k", block_a, block_a)
        squares_b += np.einsum("vk,vk->k", block_b, block_b)
    norms = np.sqrt(squares_a)[:, None] * np.sqrt(squares_b)
    return np.clip(products / np.where(norms > 0, norms, 1), 0, 1)


def _overlap(a: npt.NDArray[np.int64], b: npt.NDArray[np.int64], num_words: int) -> npt.NDArray[np.float64]:
    """Return the fraction of common top words [K_a, K_b]."""
    sets = [
        scipy.sparse.csr_array(
            (np.ones(words.size), words.ravel(), np.arange(0, words.size + 1, words.shape[1])), (len(words), num_words)
        )
        for words in (a, b)
    ]
    return (sets[0] @ sets[1].T).toarray() / a.shape[1]
