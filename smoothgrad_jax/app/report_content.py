"""Content of the report: the numbers and texts that the page shows, as JSON values.

| symbol    | meaning                                                                                              |
|-----------|------------------------------------------------------------------------------------------------------|
| λ         | Dirichlet parameters of the topics [V, K]                                                            |
| p(w|k)    | λ_wk / Σ_w λ_wk, the expected probability of word w in topic k                                       |
| π_k       | prevalence: expected fraction of the corpus in topic k; if the model has none, ∝ Σ_w λ_wk            |
| p(w)      | Σ_k π_k p(w|k), the marginal probability of word w                                                   |
| lift      | p(w|k) / p(w); at most 1 / π_k                                                                       |
| p(k|w)    | π_k p(w|k) / p(w), the topic distribution of word w                                                  |
| n_w       | occurrences of word w in the corpus; if the model has none, p(w) Σ_wk max(λ_wk − η, 0)               |
| NPMI      | coherence of a topic, if the model stores it; see :mod:`smoothgrad_jax.models.topic_quality`         |
| relevance | μ log p(w|k) + (1 − μ) log lift, μ ∈ [0, 1]: Sievert and Shirley, *LDAvis* (2014), where μ is λ      |
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from smoothgrad_jax.app.model_comparison import Comparison
from smoothgrad_jax.app.saved_models import SavedModel, checked
from smoothgrad_jax.app.topic_blocks import blocks, map_rows, topic_rows
from smoothgrad_jax.app.topic_map import topic_map
from smoothgrad_jax.models.topic_groups import TopicGroups
from smoothgrad_jax.models.topic_quality import TopicQuality, effective_topics, largest

MAX_TEXT_LENGTH = 1_200  # characters of a typical document
MAX_WORD_LENGTH = 120  # characters of a word, a title or a name
_TOP_WORDS = 60  # words per topic and position of the slider
_POSITIONS = 20  # of the slider: μ = 0, 1/20, …, 1
_MAX_TOPICS_PER_WORD = 12  # largest entries of p(k|w) that the page contains
_MIN_TOPIC_PROBABILITY = 0.005  # smallest p(k|w) that the page contains
_MAX_POINTS = 400  # of the held-out curve
_MAX_TEXTS = 1_000_000  # bytes of all typical documents
_MAX_GROUP_NUMBERS = 30_000  # topics × groups
_MIN_GROUPS = 12
_COMPARED_WORDS = 20  # top words per topic of the other model


class Excerpt(NamedTuple):
    """A document that is typical of a topic.

    Attributes:
      proportion: The proportion of the topic in the document, in [0, 1].
      text: The document; the report shows the beginning.
      title: Heading of the document.
    """

    proportion: float
    text: str
    title: str = ""


def page_content(
    model: SavedModel,
    *,
    title: str,
    documents: Mapping[int, Sequence[Excerpt | tuple]] | None = None,
    groups: TopicGroups | None = None,
    comparison: Comparison | None = None,
) -> dict[str, Any]:
    """Return the data of the page as JSON values; for the arguments see :func:`smoothgrad_jax.write_report`."""
    model = checked(model)
    lam, prevalence = np.asarray(model.lam), model.topic_proportions()
    V, K = lam.shape
    sums = lam.sum(0, dtype=np.float64)
    excerpts = _excerpts(documents or {}, K)
    marginal = map_rows(lam, lambda rows: rows @ (prevalence / sums))
    counts = model.word_counts
    if counts is None:
        counts = marginal * _num_tokens(lam, model.eta)
    top_words = _top_words(lam, sums, np.where(counts > 0, marginal, 0))
    shown = np.unique(np.concatenate([words for words, _ in top_words]))
    shown = shown[np.argsort(-counts[shown], kind="stable")]  # the search of the page lists frequent words first
    position = np.zeros(V, int)
    position[shown] = np.arange(len(shown))
    points, explained = topic_map(lam, prevalence)
    names, labels = model.words(), model.labels or {}
    return {
        "title": title,
        "num_words": V,
        "num_docs": int(model.num_docs),
        "counted": model.word_counts is not None,
        "positions": _POSITIONS,
        "words": [truncated(names[w], MAX_WORD_LENGTH) for w in shown.tolist()],
        "counts": _rounded(counts[shown]),
        "marginal": _rounded(marginal[shown]),
        "word_topics": _word_topics(lam, prevalence / sums, marginal, shown),
        "topics": [
            {"prevalence": weight, "at": _rounded(point), "words": position[words].tolist(), "p": _rounded(p)}
            | {"label": labels.get(k)}
            | measured
            for k, (weight, point, (words, p), measured) in enumerate(
                zip(_rounded(prevalence), points, top_words, _coherence(model.quality, K), strict=True)
            )
        ],
        "quality": _quality(model.quality, prevalence),
        "explained": _rounded([explained])[0],
        "curve": _curve(model.history),
        "settings": _settings(model, V, K),
        "documents": excerpts,
        "groups": None if groups is None else _groups(groups, K),
        "comparison": None if comparison is None else _comparison(model, comparison),
    }


def ranked_words(log_p: npt.NDArray, log_marginal: npt.NDArray, top: int, positions: int) -> npt.NDArray:
    """Return the words that are among the ``top`` most relevant words of a topic at some position of the slider.

    The positions are μ = 0, 1/positions, …, 1. Most words are excluded without a ranking at every position: relevance
    is linear in μ, so the smallest relevance of any ``top`` words is concave in μ and bounded below by the line through
    its values at μ = 0 and μ = 1. A word below this line at both ends is below it at every μ.

    Args:
      log_p, log_marginal: log p(w|k), where −∞ excludes a word, and log p(w) [V].

    Returns:
      Word numbers, most probable first.
    """
    words = np.flatnonzero(log_p > -np.inf)
    top = min(top, len(words))
    if top == 0:
        return words
    for mu in (0.5, 0, 1, 0.25, 0.75):
        p, lift = log_p[words], log_p[words] - log_marginal[words]
        best = np.argpartition(mu * p + (1 - mu) * lift, -top)[-top:]
        words = words[(p >= p[best].min()) | (lift >= lift[best].min())]
    mus = np.linspace(0, 1, positions + 1)[:, None]
    # μ log p(w|k) + (1 − μ) log(p(w|k) / p(w)) = log p(w|k) − (1 − μ) log p(w)
    relevance = log_p[words] - (1 - mus) * log_marginal[words]
    words = words[np.unique(np.argpartition(relevance, -top, axis=1)[:, -top:])]
    return words[np.argsort(-log_p[words], kind="stable")]


def _top_words(lam: npt.NDArray, sums: npt.NDArray, marginal: npt.NDArray) -> list[tuple[npt.NDArray, npt.NDArray]]:
    """Return (word numbers, p(w|k)) per topic; words with marginal 0 are excluded."""
    seen, top_words = marginal > 0, []
    log_marginal = np.log(np.where(seen, marginal, 1))
    for row, total in zip(topic_rows(lam), sums, strict=True):
        p = row / total
        log_p = np.full(len(p), -np.inf)
        np.log(p, out=log_p, where=seen & (p > 0))
        words = ranked_words(log_p, log_marginal, _TOP_WORDS, _POSITIONS)
        top_words.append((words, p[words]))
    return top_words


def _word_topics(lam: npt.NDArray, scale: npt.NDArray, marginal: npt.NDArray, words: npt.NDArray) -> list[list[int]]:
    """Return [k, 1000 p(k|w), k, 1000 p(k|w), …] per word, largest p(k|w) = scale_k λ_wk / p(w) first."""
    pairs = []
    for block in blocks(len(words), lam.shape[1]):
        rows = words[block]
        p = lam[rows] * scale / marginal[rows, None]
        order = np.argsort(-p, axis=1, kind="stable")[:, :_MAX_TOPICS_PER_WORD]
        for topics, values in zip(order.tolist(), np.take_along_axis(p, order, axis=1).tolist(), strict=True):
            kept = [(k, round(1000 * v)) for k, v in zip(topics, values, strict=True) if v >= _MIN_TOPIC_PROBABILITY]
            pairs.append([number for pair in kept for number in pair])
    return pairs


def _curve(history: Sequence[Mapping[str, Any]]) -> list[list[float | None]]:
    """Return [passes, score, step or None] of the records with a finite score, thinned to ``_MAX_POINTS``."""
    points: list[list[float | None]] = [
        [
            *_rounded([entry["passes"]]),
            float(f"{entry['score']:.6g}"),
            None if entry.get("step") is None else int(entry["step"]),
        ]
        for entry in history
        if all(entry.get(name) is not None and math.isfinite(entry[name]) for name in ("passes", "score"))
    ]
    kept = np.unique(np.linspace(0, len(points) - 1, min(len(points), _MAX_POINTS)).round().astype(int)).tolist()
    return [points[i] for i in kept]


def _coherence(quality: TopicQuality | None, num_topics: int) -> list[dict[str, Any]]:
    """Return the NPMI of each topic, None if the model does not store it, why it is junk, and its near-duplicates."""
    if quality is None:
        return [{"npmi": None, "junk": None, "duplicates": []}] * num_topics
    return [
        {"npmi": value, "junk": quality.junk.get(k), "duplicates": quality.duplicates_of(k)}
        for k, value in enumerate(_rounded(quality.npmi))
    ]


def _quality(quality: TopicQuality | None, prevalence: npt.NDArray) -> list[list[str]]:
    """Return names and values of the measures of all topics together."""
    effective = f"{effective_topics(prevalence):.1f} of {len(prevalence)}"
    if quality is None:
        return [["effective topics", effective]]
    return [
        ["mean NPMI", f"{quality.mean_npmi:.3f}".replace("-", "−")],
        ["diversity", f"{quality.diversity:.2f}"],
        ["effective topics", effective],
        ["near-duplicate pairs", str(len(quality.near_duplicates))],
        ["junk topics", str(len(quality.junk))],
    ]


def _settings(model: SavedModel, V: int, K: int) -> list[list[str]]:
    values = {"topics": K, "words": V, "documents": model.num_docs, "α": model.alpha, "η": model.eta}
    return [[str(name), _format_value(value)] for name, value in {**values, **model.settings}.items()]


def _format_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} = {_format_value(part)}" for name, part in value.items())
    if value is None or isinstance(value, bool):
        return {None: "–", True: "yes", False: "no"}[value]
    try:
        array = None if isinstance(value, str) else np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        array = None
    if array is None:
        return truncated(str(value), MAX_TEXT_LENGTH)
    if array.size <= 8:
        return ", ".join(map(_format_number, array.ravel().tolist())) or "none"
    return f"{array.size} numbers, {_format_number(array.min())} to {_format_number(array.max())}"


def _format_number(number: float) -> str:
    if math.isinf(number):
        return "∞" if number > 0 else "−∞"
    return f"{int(number):,}" if number == int(number) and abs(number) < 1e15 else f"{number:.4g}".replace("-", "−")


def _excerpts(documents: Mapping[int, Sequence], num_topics: int) -> dict[str, list[list[Any]]]:
    """Return [proportion, title, text] of the documents by topic."""
    excerpts: dict[str, list[list[Any]]] = {}
    for k, entries in documents.items():
        if not 0 <= k < num_topics:
            raise ValueError(f"documents: expected topics from 0 to {num_topics - 1}, got {k}")
        parts = excerpts[str(int(k))] = []
        for proportion, text, title in (Excerpt(*entry) for entry in entries):
            if not 0 <= proportion <= 1:
                raise ValueError(f"documents of topic {k}: expected a proportion between 0 and 1, got {proportion}")
            title, text = truncated(str(title), MAX_WORD_LENGTH), truncated(str(text), MAX_TEXT_LENGTH)
            parts.append([*_rounded([proportion]), title, text])
    _shorten([part for parts in excerpts.values() for part in parts])
    return excerpts


def _shorten(excerpts: Sequence[list[Any]]) -> None:
    """Shorten the longest texts, so that all texts together have at most ``_MAX_TEXTS`` bytes."""
    size = [len(text.encode(errors="replace")) for _, _, text in excerpts]
    if sum(size) <= _MAX_TEXTS:
        return
    # The largest limit per text with Σ min(size, limit) ≤ _MAX_TEXTS.
    ordered = np.sort(size)
    limits = (_MAX_TEXTS - np.concatenate([[0], np.cumsum(ordered)[:-1]])) // np.arange(len(size), 0, -1)
    limit = int(limits[np.argmax(limits < ordered)])
    for excerpt, bytes_of_text in zip(excerpts, size, strict=True):
        if bytes_of_text > limit:
            excerpt[2] = truncated(excerpt[2], max(1, limit * len(excerpt[2]) // bytes_of_text))


def _groups(groups: TopicGroups, num_topics: int) -> dict[str, Any]:
    """Return mean and interval per topic and group; of many groups, those with the most documents."""
    shape, means = (len(groups.values), num_topics), np.shape(groups.prevalence)
    if not groups.values or means != shape:
        raise ValueError(f"groups: expected prevalence of shape (groups, {num_topics}), got {means}")
    shown = np.sort(largest(np.asarray(groups.num_docs), max(_MIN_GROUPS, _MAX_GROUP_NUMBERS // num_topics)))
    parts = [np.asarray(part, np.float64)[shown].T for part in (groups.prevalence, groups.low, groups.high)]
    if not all(np.isfinite(part).all() and part.min() >= 0 and part.max() <= 1 for part in parts):
        raise ValueError("groups: expected a prevalence and an interval between 0 and 1")
    remarks = [
        f"Shown: the {len(shown)} groups with the most documents, of {shape[0]:,}." if len(shown) < shape[0] else "",
        f"Documents without {groups.field}: {groups.num_missing:,}." if groups.num_missing else "",
        f"Documents without a known word: {groups.num_empty:,}." if groups.num_empty else "",
    ]
    values = [str(groups.values[g]) for g in shown.tolist()]
    return {
        "field": truncated(str(groups.field), MAX_WORD_LENGTH),
        "values": [truncated(value, MAX_WORD_LENGTH) for value in values],
        "docs": np.asarray(groups.num_docs)[shown].tolist(),
        "at": _times(values),
        "remark": " ".join(filter(None, remarks)),
        "topics": [[_rounded(numbers, 3) for numbers in each] for each in zip(*parts, strict=True)],
    }


def _times(values: Sequence[str]) -> list[float] | None:
    """Return years, or months as fractions of years, if all values are such and ascend; otherwise None."""
    found = [re.fullmatch(r"(\d{4})(?:-(0[1-9]|1[0-2]))?", value, re.ASCII) for value in values]
    times = [int(match[1]) + (int(match[2] or 1) - 1) / 12 for match in found if match]
    ascends = all(a < b for a, b in itertools.pairwise(times))
    return [round(time, 3) for time in times] if 1 < len(times) == len(values) and ascends else None


def _comparison(model: SavedModel, comparison: Comparison) -> dict[str, Any]:
    """Return the matched topics, and the topics and the quality of the other model."""
    other, match = comparison.model, comparison.match
    prevalence = other.topic_proportions()
    measured, labels = _coherence(other.quality, len(prevalence)), other.labels or {}
    both = [dict(_quality(each.quality, each.topic_proportions())) for each in (model, other)]
    curves = [_curve(each.history) for each in (model, other)]
    if all(curves):
        both = [
            values | {"held-out score": f"{curve[-1][1]:.3f}".replace("-", "−")}
            for values, curve in zip(both, curves, strict=True)
        ]
    return {
        "name": truncated(comparison.name, MAX_WORD_LENGTH),
        "num_common_words": comparison.num_common_words,
        "partner": match.partner.tolist(),
        "similarity": _rounded(match.similarity),
        "mean": _rounded([match.similarity[match.partner >= 0].mean()])[0],
        "quality": [[name, value, both[1].get(name, "–")] for name, value in both[0].items()],
        "topics": [
            {
                "label": labels.get(k),
                "prevalence": weight,
                "npmi": measured[k]["npmi"],
                "words": [truncated(word, MAX_WORD_LENGTH) for word, _ in words],
            }
            for k, (weight, words) in enumerate(
                zip(_rounded(prevalence), other.top_words(_COMPARED_WORDS), strict=True)
            )
        ],
    }


def _num_tokens(lam: npt.NDArray, eta: npt.ArrayLike) -> float:
    """Return Σ max(λ − η, 0), the expected number of tokens in the statistics; at least 1."""
    eta = np.broadcast_to(np.asarray(eta, dtype=np.float64), lam.shape)
    return max(1.0, sum(float(np.maximum(lam[rows] - eta[rows], 0).sum()) for rows in blocks(*lam.shape)))


def truncated(text: str, length: int) -> str:
    """Return at most ``length`` characters of a text, with an ellipsis if some are missing."""
    return text if len(text) <= length else text[: length - 1] + "…"


def _rounded(values: npt.ArrayLike, digits: int = 4) -> list[int | float]:
    """Return the values with a number of significant digits, and integers as such."""
    rounded = (float(f"{value:.{digits}g}") for value in np.asarray(values, np.float64).tolist())
    return [int(value) if value.is_integer() else value for value in rounded]
