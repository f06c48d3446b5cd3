"""Report of a fitted model: one HTML file with the topics, their words, a map of the topics and the held-out curve.

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

The template ``report.html`` contains the style sheet and the script of the page. The page sends no network request, and
its content security policy allows only this style sheet and this script, by their hashes. The data are embedded as JSON
and displayed as text only. They contain, per topic, the most relevant words at every position of the slider for μ. The
map is classical scaling of the Jensen–Shannon distances between topics.
"""

import base64
import hashlib
import html
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import scipy.linalg
from scipy.spatial.distance import pdist, squareform

from smoothgrad_jax.app.saved_models import SavedModel, checked
from smoothgrad_jax.data.durable_files import replacing
from smoothgrad_jax.models.topic_quality import TopicQuality, effective_topics, largest

_TEMPLATE = Path(__file__).with_name("report.html")
_TOP_WORDS = 60  # words per topic and position of the slider
_POSITIONS = 20  # of the slider: μ = 0, 1/20, …, 1
_MAX_TOPICS_PER_WORD = 12  # largest entries of p(k|w) that the page contains
_MIN_TOPIC_PROBABILITY = 0.005  # smallest p(k|w) that the page contains
_MAX_POINTS = 400  # of the held-out curve
_BLOCK_SIZE = 1 << 22  # numbers per block of λ: 32 MB
_MAX_DISTANCE_TERMS = 150_000_000  # of all Jensen–Shannon distances: one or two seconds
_MAX_TEXT_LENGTH = 1_200
_MAX_WORD_LENGTH = 120


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


def write_report(
    path: str | os.PathLike,
    model: SavedModel,
    *,
    documents: Mapping[int, Sequence[Excerpt | tuple]] | None = None,
    title: str | None = None,
) -> Path:
    """Write the report of a model atomically. Equal inputs give equal bytes.

    Args:
      path: The HTML file; its folder must exist.
      model: The model.
      documents: Typical documents by topic, best first: (proportion, text) or :class:`Excerpt`; see
        :func:`typical_documents`.
      title: The heading.

    Returns:
      The path.

    Raises:
      ValueError: If the parts of the model do not match; the message names the part.
      FileNotFoundError: If the folder does not exist.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent}: expected a folder to write {path.name} into; create it first")
    if path.is_dir():
        raise IsADirectoryError(f"{path}: expected a file to write, got a folder")
    page = _page(_content(model, documents, title or "Topics"))
    with replacing(path) as temporary:
        temporary.write_bytes(page)
    return path


def typical_documents(
    theta: npt.ArrayLike, texts: Iterable[str], ids: Iterable[str | None] | None = None, *, most: int = 5
) -> dict[int, list[Excerpt]]:
    """Return the documents with the largest proportions of each topic, for :func:`write_report`.

    Args:
      theta: Topic proportions of the documents [D, K].
      texts: The D documents in the same order; they are read once, one at a time.
      ids: Their ids, which become the titles; by default, or for None, a document is named by its number from 0.
      most: Largest number of documents per topic.

    Returns:
      Excerpts by topic, largest proportion first, ties in the order of the documents. Empty documents are skipped.

    Raises:
      ValueError: If the number of texts or of ids differs from the number of rows of θ.
    """
    theta = np.asarray(theta)
    if theta.ndim != 2:
        raise ValueError(f"theta must have shape documents × topics, got {theta.shape}")
    # More candidates than needed, because empty documents are skipped.
    order = [largest(column, 2 * most + 10) for column in theta.T]
    candidates, excerpts, number = set(np.concatenate(order).tolist()) if order else set(), {}, 0
    named = zip(texts, itertools.repeat(None) if ids is None else ids, strict=ids is not None)
    for number, (text, name) in enumerate(named, start=1):
        if number - 1 in candidates and text.strip():
            title = _truncated(name or f"document {number - 1}", _MAX_WORD_LENGTH)
            excerpts[number - 1] = _truncated(text.strip(), _MAX_TEXT_LENGTH), title
    if number != len(theta):
        raise ValueError(f"expected one text per row of theta: {len(theta)} rows, got {number} texts")
    return {
        k: [Excerpt(float(theta[d, k]), *excerpts[d]) for d in rows.tolist() if d in excerpts][:most]
        for k, rows in enumerate(order)
    }


def ranked_words(log_p: npt.NDArray, log_marginal: npt.NDArray, top: int, positions: int) -> npt.NDArray:
    """Return the words that are among the ``top`` most relevant words of a topic at some position of the slider.

    The positions are μ = 0, 1/positions, …, 1. Most words are excluded without a ranking at every position: relevance
    is linear in μ, so the smallest relevance of any ``top`` words is concave in μ and bounded below by the line through
    its values at μ = 0 and μ = 1. A word below this line at both ends is below it at every μ.

    Args:
      log_p: log p(w|k) [V]; −∞ excludes a word.
      log_marginal: log p(w) [V].
      top: Words per position.
      positions: Number of steps from μ = 0 to μ = 1.

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


def merged_words(lam: npt.NDArray, prevalence: npt.NDArray, most: int) -> npt.NDArray:
    """Return topics over at most ``most`` merged words, which bounds the time to compute distances between topics.

    The most frequent words are not merged. The other words are merged into one word per topic, argmax_k p(k|w).
    Merging never increases a distance.

    Args:
      lam: λ [V, K].
      prevalence: π [K].
      most: Largest number of merged words, at least 2K.

    Returns:
      Probabilities [K, M] whose rows sum to one; M = V if V ≤ ``most``.
    """
    V, K = lam.shape
    scale = 1 / lam.sum(0, dtype=np.float64)
    if most >= V:
        return np.ascontiguousarray((lam * scale).T)
    frequent = np.sort(largest(_map_rows(lam, lambda rows: rows @ (scale * prevalence)), most - K))
    column = _map_rows(lam, lambda rows: np.argmax(rows * (scale * prevalence), axis=1))
    column[frequent] = K + np.arange(len(frequent))
    size = K + len(frequent)
    return np.stack([np.bincount(column, row * scale[k], minlength=size) for k, row in enumerate(_topic_rows(lam))])


def jensen_shannon(beta: npt.NDArray) -> npt.NDArray:
    """Return the distances √JSD(β_i, β_j) [K, K], in √nats, between the rows of β [K, V]; at most √log 2.

    JSD(p, q) = ½ Σ p log p + ½ Σ q log q − Σ m log m,  m = (p + q)/2
    """
    return squareform(pdist(beta, "jensenshannon"))


def classical_scaling(distances: npt.NDArray) -> tuple[npt.NDArray, float]:
    """Return points in the plane whose distances approximate the given ones (principal coordinates).

    B = −½ J D² J with J = I − 11ᵀ/K. The coordinates are the first two eigenvectors of B, multiplied by the square
    roots of their eigenvalues. The sign of an axis makes its first large coordinate positive.

    Args:
      distances: [K, K].

    Returns:
      Points [K, 2], and the fraction of the sum of the squared distances that the plane explains.
    """
    K = len(distances)
    squared = distances**2
    B = -0.5 * (squared - squared.mean(0) - squared.mean(1)[:, None] + squared.mean())
    values, vectors = scipy.linalg.eigh((B + B.T) / 2, subset_by_index=[max(K - 2, 0), K - 1])
    points = np.zeros((K, 2))
    for axis, (value, vector) in enumerate(zip(values[::-1], vectors.T[::-1], strict=True)):
        column = vector * math.sqrt(max(value, 0))
        large = np.argmax(np.abs(column) > 0.5 * np.abs(column).max())
        points[:, axis] = column if column[large] >= 0 else -column
    total = np.trace(B)  # the sum of all eigenvalues; none is negative, because √JSD is a Hilbert space metric
    return points, min(1.0, float(np.maximum(values, 0).sum() / total)) if total > 0 else 1.0


def _content(model: SavedModel, documents: Mapping[int, Sequence] | None, title: str) -> dict[str, Any]:
    """Return the data of the page as JSON values."""
    model = checked(model)
    lam, prevalence = np.asarray(model.lam), model.topic_proportions()
    V, K = lam.shape
    sums = lam.sum(0, dtype=np.float64)
    excerpts = _excerpts(documents or {}, K)
    marginal = _map_rows(lam, lambda rows: rows @ (prevalence / sums))
    counts = model.word_counts
    if counts is None:
        counts = marginal * _num_tokens(lam, model.eta)
    top_words = _top_words(lam, sums, np.where(counts > 0, marginal, 0))
    shown = np.unique(np.concatenate([words for words, _ in top_words]))
    shown = shown[np.argsort(-counts[shown], kind="stable")]  # the search of the page lists frequent words first
    position = np.zeros(V, int)
    position[shown] = np.arange(len(shown))
    merged = merged_words(lam, prevalence, max(2 * K, 2 * _MAX_DISTANCE_TERMS // K**2))
    points, explained = classical_scaling(jensen_shannon(merged))
    names = model.words()
    return {
        "title": title,
        "num_words": V,
        "num_docs": int(model.num_docs),
        "counted": model.word_counts is not None,
        "positions": _POSITIONS,
        "words": [_truncated(names[w], _MAX_WORD_LENGTH) for w in shown.tolist()],
        "counts": _rounded(counts[shown]),
        "marginal": _rounded(marginal[shown]),
        "word_topics": _word_topics(lam, prevalence / sums, marginal, shown),
        "topics": [
            {"prevalence": weight, "at": _rounded(point), "words": position[words].tolist(), "p": _rounded(p)}
            | measured
            for weight, point, (words, p), measured in zip(
                _rounded(prevalence), points, top_words, _coherence(model.quality, K), strict=True
            )
        ],
        "quality": _quality(model.quality, prevalence),
        "explained": _rounded([explained])[0],
        "curve": _curve(model.history),
        "settings": _settings(model, V, K),
        "documents": excerpts,
    }


def _page(content: dict[str, Any]) -> bytes:
    """Return the template with the content inserted."""
    data = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # The HTML parser must not find a tag in the data, nor the JavaScript parser a line break.
    for character in "<>&\u2028\u2029":
        data = data.replace(character, f"\\u{ord(character):04x}")
    template = _TEMPLATE.read_text(encoding="utf-8")
    style, script = (re.findall(f"<{tag}>(.*?)</{tag}>", template, re.DOTALL)[0] for tag in ("style", "script"))
    policy = (
        f"default-src 'none'; script-src {_source_hash(script)}; style-src {_source_hash(style)}; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {"policy": policy, "title": html.escape(content["title"]), "data": data}
    # One pass over the template, so that placeholders inside the inserted data are not replaced.
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)
    # UTF-8 cannot encode a lone surrogate (from a file name or a badly decoded word); its JSON escape can be stored.
    return page.encode("utf-8", errors="backslashreplace")


def _source_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _top_words(lam: npt.NDArray, sums: npt.NDArray, marginal: npt.NDArray) -> list[tuple[npt.NDArray, npt.NDArray]]:
    """Return (word numbers, p(w|k)) per topic; words with marginal 0 are excluded."""
    seen, top_words = marginal > 0, []
    log_marginal = np.log(np.where(seen, marginal, 1))
    for row, total in zip(_topic_rows(lam), sums, strict=True):
        p = row / total
        log_p = np.full(len(p), -np.inf)
        np.log(p, out=log_p, where=seen & (p > 0))
        words = ranked_words(log_p, log_marginal, _TOP_WORDS, _POSITIONS)
        top_words.append((words, p[words]))
    return top_words


def _word_topics(lam: npt.NDArray, scale: npt.NDArray, marginal: npt.NDArray, words: npt.NDArray) -> list[list[int]]:
    """Return [k, 1000 p(k|w), k, 1000 p(k|w), …] per word, largest p(k|w) = scale_k λ_wk / p(w) first."""
    pairs = []
    for block in _blocks(len(words), lam.shape[1]):
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
    """Return the NPMI of each topic, None if the model does not store it, and the remarks on the topic."""
    if quality is None:
        return [{"npmi": None, "remarks": []}] * num_topics
    return [{"npmi": value, "remarks": quality.remarks(k)} for k, value in enumerate(_rounded(quality.npmi))]


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
        return _truncated(str(value), _MAX_TEXT_LENGTH)
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
            title, text = _truncated(str(title), _MAX_WORD_LENGTH), _truncated(str(text), _MAX_TEXT_LENGTH)
            parts.append([*_rounded([proportion]), title, text])
    return excerpts


def _num_tokens(lam: npt.NDArray, eta: npt.ArrayLike) -> float:
    """Return Σ max(λ − η, 0), the expected number of tokens in the statistics; at least 1."""
    eta = np.broadcast_to(np.asarray(eta, dtype=np.float64), lam.shape)
    return max(1.0, sum(float(np.maximum(lam[rows] - eta[rows], 0).sum()) for rows in _blocks(*lam.shape)))


def _blocks(num_rows: int, row_size: int) -> Iterator[slice]:
    """Yield slices of rows with at most ``_BLOCK_SIZE`` numbers each."""
    step = max(1, _BLOCK_SIZE // row_size)
    return (slice(first, first + step) for first in range(0, num_rows, step))


def _map_rows(lam: npt.NDArray, function: Callable[[npt.NDArray], npt.NDArray]) -> npt.NDArray:
    """Return ``function(rows)``, one number per row of λ, computed in blocks."""
    return np.concatenate([function(lam[rows]) for rows in _blocks(*lam.shape)])


def _topic_rows(lam: npt.NDArray) -> Iterator[npt.NDArray]:
    """Yield the columns of λ as contiguous float64 arrays, which are faster to read several times."""
    for columns in _blocks(lam.shape[1], lam.shape[0]):
        yield from np.ascontiguousarray(lam[:, columns].T, dtype=np.float64)


def _truncated(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _rounded(values: npt.ArrayLike) -> list[int | float]:
    """Return the values with four significant digits, and integers as such."""
    rounded = (float(f"{value:.4g}") for value in np.asarray(values, np.float64).tolist())
    return [int(value) if value.is_integer() else value for value in rounded]
