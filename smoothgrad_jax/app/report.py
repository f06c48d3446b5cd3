"""A fitted model as one HTML file that opens anywhere, offline: topics, their words, a map, the held-out curve.

| letter    | meaning                                                                                              |
|-----------|------------------------------------------------------------------------------------------------------|
| λ         | [V, K], Dirichlet parameters of the topics, one row a word                                           |
| p(w|k)    | λ_wk / Σ_w λ_wk, the mean of topic k                                                                 |
| π_k       | prevalence, the share of the corpus that topic k explains: as saved, else ∝ Σ_w λ_wk                 |
| p(w)      | Σ_k π_k p(w|k), what the model expects of a word                                                     |
| lift      | p(w|k) / p(w); at most 1 / π_k                                                                       |
| p(k|w)    | π_k p(w|k) / p(w), where a word lives                                                                |
| n_w       | how often a word occurs: as saved, else p(w) Σ_wk max(λ_wk − η, 0), which the statistics add up to   |
| relevance | μ log p(w|k) + (1 − μ) log lift, μ ∈ [0, 1]: Sievert and Shirley, *LDAvis* (2014), where μ is λ      |

The page (``report.html``, a template) holds all of its style and program and asks for nothing from the network; its
content security policy names the hash of both, so that no other program can run in it. The numbers enter as JSON that
is only ever shown as text. Of the words it holds those that the slider can bring up: the top words of each topic at
every position of the slider. The map is classical scaling of the Jensen–Shannon distances between topics.
"""

import base64
import hashlib
import html
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.linalg
from scipy.spatial.distance import pdist, squareform

from smoothgrad_jax.data.durable_files import replacing

_TEMPLATE = Path(__file__).with_name("report.html")
_TOP = 60  # words of a topic that can be shown at any position of the slider
_POSITIONS = 20  # of the slider: μ = 0, 1/20, …, 1
_HOMES = 12  # topics that are kept for a word, and the least share that is worth keeping
_LEAST_HOME = 0.005
_POINTS = 400  # of the held-out curve
_BLOCK = 1 << 22  # numbers that are looked at together: 32 MB
_BUDGET = 150_000_000  # terms of all Jensen–Shannon distances: one or two seconds
_LONGEST_TEXT = 1_200
_LONGEST_WORD = 120


class Excerpt(NamedTuple):
    """A document that is typical of a topic.

    Attributes:
      share: The topic's share of the document, in [0, 1].
      text: The document; the report shows its beginning.
      title: What to call it.
    """

    share: float
    text: str
    title: str = ""


def write_report(
    path: str | os.PathLike,
    model: Any,
    *,
    documents: Mapping[int, Sequence[Excerpt | tuple]] | None = None,
    title: str | None = None,
) -> Path:
    """Write a report of a model: one HTML file, written beside and renamed. Same input, same bytes.

    Args:
      path: The file; its folder exists.
      model: A ``SavedModel``, or anything with its attributes: ``lam`` [V, K], ``alpha``, ``eta``, ``num_docs``,
        ``vocabulary`` (None: words are called by their number), ``settings``, ``history`` (dictionaries; those with
        ``passes`` and ``score`` make the curve), ``prevalence`` [K] and ``word_counts`` [V] (None: from λ).
      documents: For some topics their typical documents, best first: (share, text) or :class:`Excerpt`; see
        :func:`typical_documents`.
      title: The heading.

    Returns:
      The path.

    Raises:
      ValueError: If the parts of the model do not fit together; the message says which.
      FileNotFoundError: If the folder does not exist.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent}: expected a folder to write {path.name} into; make it first")
    if path.is_dir():
        raise IsADirectoryError(f"{path}: expected a file to write; got a folder")
    contents = _page(_content(model, documents, title or "Topics"))
    with replacing(path) as temporary:
        temporary.write_bytes(contents)
    return path


def typical_documents(theta: Any, texts: Iterable[str], *, most: int = 5) -> dict[int, list[Excerpt]]:
    """For each topic the documents with the largest share of it, for :func:`write_report`.

    Args:
      theta: [D, K], topic proportions of the documents.
      texts: The D documents in the same order; read once, one at a time.
      most: Documents for each topic.

    Returns:
      Topic → excerpts, largest share first; of equal shares the earlier document. Empty documents are left out.

    Raises:
      ValueError: If there are more or fewer texts than rows of θ.
    """
    theta = np.asarray(theta)
    if theta.ndim != 2:
        raise ValueError(f"theta: expected documents × topics; got shape {theta.shape}")
    # Some more than needed, as some may turn out to be empty.
    order = [_largest(column, 2 * most + 10) for column in theta.T]
    wanted, chosen, number = set(np.concatenate(order).tolist()) if order else set(), {}, 0
    for number, text in enumerate(texts, start=1):
        if number - 1 in wanted and text.strip():
            chosen[number - 1] = _cut(text.strip(), _LONGEST_TEXT)
    if number != len(theta):
        raise ValueError(f"expected a text for each of the {len(theta)} rows of theta; got {number} texts")
    return {
        k: [Excerpt(float(theta[d, k]), chosen[d], f"document {d}") for d in rows.tolist() if d in chosen][:most]
        for k, rows in enumerate(order)
    }


def relevance(log_p: np.ndarray, log_marginal: np.ndarray, mu: Any) -> np.ndarray:
    """μ log p(w|k) + (1 − μ) log(p(w|k) / p(w)) = log p(w|k) − (1 − μ) log p(w)."""
    return log_p - (1 - mu) * log_marginal


def ranked_words(log_p: np.ndarray, log_marginal: np.ndarray, top: int, positions: int) -> np.ndarray:
    """Words that are among the ``top`` most relevant of a topic at μ = 0, 1/positions, …, or 1, most probable first.

    Relevance is linear in μ. So is the line under the least relevant of any ``top`` words, drawn between its values at
    μ = 0 and 1; the least of linear functions is concave and lies nowhere below that line. A word that is below it at
    both ends is below it everywhere, and cannot be among the first ``top``: few words have to be ranked at every μ.

    Args:
      log_p: [V], log p(w|k); −∞ for words that are not to be shown.
      log_marginal: [V], log p(w).
      top: Number of words at one μ.
      positions: Steps from μ = 0 to 1.

    Returns:
      Word numbers.
    """
    words = np.flatnonzero(log_p > -np.inf)
    top = min(top, len(words))
    if top == 0:
        return words
    for mu in (0.5, 0, 1, 0.25, 0.75):
        p, lift = log_p[words], log_p[words] - log_marginal[words]
        some = np.argpartition(mu * p + (1 - mu) * lift, -top)[-top:]
        words = words[(p >= p[some].min()) | (lift >= lift[some].min())]
    weights = np.linspace(0, 1, positions + 1)[:, None]
    ranks = np.argpartition(relevance(log_p[words], log_marginal[words], weights), -top, axis=1)[:, -top:]
    words = words[np.unique(ranks)]
    return words[np.argsort(-log_p[words], kind="stable")]


def merged_words(lam: np.ndarray, prevalence: np.ndarray, most: int) -> np.ndarray:
    """Topics as probabilities of at most ``most`` words, for the map: K²V terms may be more than one wants to wait for.

    The most frequent words stay as they are. The others are merged into one for each topic, that which they are most
    probably from. Merging makes distances smaller, never larger, and by little where the words are of one topic.

    Args:
      lam: [V, K].
      prevalence: [K], π.
      most: At least 2K.

    Returns:
      [K, M], rows sum to one; all V words if they are no more than ``most``.
    """
    V, K = lam.shape
    scale = 1 / lam.sum(0, dtype=np.float64)
    if most >= V:
        return np.ascontiguousarray((lam * scale).T)
    frequent = np.sort(_largest(_by_rows(lam, lambda rows: rows @ (scale * prevalence)), most - K))
    place = _by_rows(lam, lambda rows: np.argmax(rows * (scale * prevalence), axis=1))
    place[frequent] = K + np.arange(len(frequent))
    merged = np.zeros((K, K + len(frequent)))
    width = max(1, _BLOCK // V)
    for first in range(0, K, width):
        for k, row in enumerate(np.ascontiguousarray(lam[:, first : first + width].T, dtype=np.float64), first):
            merged[k] = np.bincount(place, row * scale[k], minlength=merged.shape[1])
    return merged


def jensen_shannon(beta: np.ndarray) -> np.ndarray:
    """Distances √JSD(β_i, β_j), in √nats, between the rows of β.

    JSD(p, q) = ½ Σ p log p + ½ Σ q log q − Σ m log m,  m = (p + q)/2

    Args:
      beta: [K, V], rows sum to one.

    Returns:
      [K, K]; at most √log 2.
    """
    return squareform(pdist(beta, "jensenshannon"))


def plane(distances: np.ndarray) -> tuple[np.ndarray, float]:
    """Points in the plane whose distances are near the given ones: classical scaling (principal coordinates).

    B = −½ J D² J with J = I − 11ᵀ/K; the points are the first two eigenvectors of B, times the roots of the
    eigenvalues. The sign of an axis makes its first large coordinate positive. Three points keep their distances.

    Args:
      distances: [K, K].

    Returns:
      [K, 2] points, and the share of the squared distances that the plane holds.
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
    total = np.trace(B)  # Σ of all eigenvalues; √JSD is a distance in a Hilbert space, and none of them is negative
    return points, min(1.0, float(np.maximum(values, 0).sum() / total)) if total > 0 else 1.0


def _content(model, documents, title):
    """Everything the page shows, as JSON values."""
    lam = np.asarray(model.lam)
    if lam.ndim != 2 or 0 in lam.shape:
        raise ValueError(f"lam: expected words × topics, at least one of each; got shape {lam.shape}")
    V, K = lam.shape
    sums = lam.sum(0, dtype=np.float64)
    if not (np.isfinite(sums).all() and lam.min() >= 0 and sums.min() > 0):
        raise ValueError("lam: expected finite numbers ≥ 0, and no topic without any words")
    vocabulary = model.vocabulary
    if vocabulary is not None and len(vocabulary) != V:
        raise ValueError(f"vocabulary: expected {V} words, as lam has rows; got {len(vocabulary)}")
    prevalence = _weights("prevalence", model.prevalence, K, sums)
    prevalence = prevalence / prevalence.sum()
    excerpts = _excerpts(documents, K)

    marginal = _by_rows(lam, lambda rows: rows @ (prevalence / sums))
    counted = model.word_counts is not None
    counts = _weights("word_counts", model.word_counts, V, marginal * _expected_tokens(lam, model.eta))

    chosen = _topic_words(lam, sums, np.where(counts > 0, marginal, 0))
    shown = np.unique(np.concatenate([words for words, _ in chosen]))
    shown = shown[np.argsort(-counts[shown], kind="stable")]  # the most frequent first: so they are found first
    place = np.zeros(V, int)
    place[shown] = np.arange(len(shown))
    points, held = plane(jensen_shannon(merged_words(lam, prevalence, max(2 * K, 2 * _BUDGET // K**2))))
    D = model.num_docs
    return {
        "title": title,
        "num_words": V,
        "num_docs": None if D is None else int(D),
        "counted": counted,
        "positions": _POSITIONS,
        "words": [str(w) if vocabulary is None else _cut(str(vocabulary[w]), _LONGEST_WORD) for w in shown.tolist()],
        "counts": _shorts(counts[shown]),
        "marginal": _shorts(marginal[shown]),
        "homes": _homes(lam, sums, prevalence, marginal, shown),
        "topics": [
            {"prevalence": _short(share), "at": _shorts(point), "words": place[words].tolist(), "p": _shorts(p)}
            for share, point, (words, p) in zip(prevalence, points, chosen, strict=True)
        ],
        "held": _short(held),
        "curve": _curve(model.history),
        "settings": _settings(model, V, K),
        "documents": excerpts,
    }


def _page(content):
    """The template with everything in its place."""
    data = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # The parser of HTML must not see a tag, and no parser an end of line, in what is data.
    for character in "<>&\u2028\u2029":
        data = data.replace(character, f"\\u{ord(character):04x}")
    template = _TEMPLATE.read_text(encoding="utf-8")
    style, program = (re.findall(f"<{tag}>(.*?)</{tag}>", template, re.DOTALL)[0] for tag in ("style", "script"))
    policy = (
        f"default-src 'none'; script-src {_fingerprint(program)}; style-src {_fingerprint(style)}; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {"policy": policy, "title": html.escape(content["title"]), "data": data}
    # One pass over the template: what is put in is not searched again.
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)
    # A lone surrogate (a file name, a badly decoded word) is no UTF-8; its escape is what JSON writes for it.
    return page.encode("utf-8", errors="backslashreplace")


def _fingerprint(text):
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _topic_words(lam, sums, marginal):
    """For each topic (word numbers, p(w|k)); words with marginal 0 are not shown."""
    V, K = lam.shape
    seen = marginal > 0
    log_marginal = np.log(np.where(seen, marginal, 1))
    chosen = []
    width = max(1, _BLOCK // V)
    for first in range(0, K, width):
        # Topics as rows: a column of λ is strided, and is read several times.
        block = np.ascontiguousarray(lam[:, first : first + width].T, dtype=np.float64)
        for p, total in zip(block, sums[first : first + width], strict=True):
            p /= total
            log_p = np.full(V, -np.inf)
            np.log(p, out=log_p, where=seen & (p > 0))
            words = ranked_words(log_p, log_marginal, _TOP, _POSITIONS)
            chosen.append((words, p[words]))
    return chosen


def _homes(lam, sums, prevalence, marginal, words):
    """For each word [topic, share in 1/1000, topic, share, …], largest p(k|w) first."""
    K = lam.shape[1]
    homes = []
    for first in range(0, len(words), max(1, _BLOCK // K)):
        rows = words[first : first + max(1, _BLOCK // K)]
        shares = lam[rows] * (prevalence / sums) / marginal[rows, None]
        order = np.argsort(-shares, axis=1, kind="stable")[:, :_HOMES]
        largest = np.take_along_axis(shares, order, axis=1)
        for topics, values in zip(order.tolist(), largest.tolist(), strict=True):
            kept = [(k, round(1000 * s)) for k, s in zip(topics, values, strict=True) if s >= _LEAST_HOME]
            homes.append([number for pair in kept for number in pair])
    return homes


def _curve(history):
    """[passes, score, step or None] for what was scored; thinned if there is much of it."""
    points = [
        [_short(entry["passes"]), float(f"{entry['score']:.6g}"), _step(entry.get("step"))]
        for entry in history or []
        if all(entry.get(name) is not None and math.isfinite(entry[name]) for name in ("passes", "score"))
    ]
    keep = np.unique(np.linspace(0, len(points) - 1, min(len(points), _POINTS)).round().astype(int)).tolist()
    return [points[i] for i in keep]


def _step(number):
    return None if number is None else int(number)


def _settings(model, V, K):
    facts = {"topics": K, "words": V, "documents": model.num_docs, "α": model.alpha, "η": model.eta}
    return [[str(name), _shown(value)] for name, value in {**facts, **(model.settings or {})}.items()]


def _shown(value):
    """A setting as text."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} = {_shown(part)}" for name, part in value.items())
    if value is None or isinstance(value, bool):
        return {None: "–", True: "yes", False: "no"}[value]
    if isinstance(value, str):
        return _cut(value, _LONGEST_TEXT)
    try:
        numbers = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        return _cut(str(value), _LONGEST_TEXT)
    if numbers.size == 1:
        return _figure(numbers.item())
    if 0 < numbers.size <= 8:
        return ", ".join(map(_figure, numbers.ravel().tolist()))
    return f"{numbers.size} numbers, {_figure(numbers.min())} to {_figure(numbers.max())}" if numbers.size else "none"


def _figure(number):
    if math.isinf(number):
        return "∞" if number > 0 else "−∞"
    return f"{int(number):,}" if number == int(number) and abs(number) < 1e15 else f"{number:.4g}".replace("-", "−")


def _excerpts(documents, K):
    """Topic → [[share, title, text], …]."""
    excerpts = {}
    for k, some in (documents or {}).items():
        if not 0 <= k < K:
            raise ValueError(f"documents: expected topics from 0 to {K - 1}; got {k}")
        for share, *_ in some:
            if not 0 <= share <= 1:
                raise ValueError(f"documents of topic {k}: expected a share between 0 and 1; got {share}")
        excerpts[str(int(k))] = [
            [_short(share), _cut(str(title), _LONGEST_WORD), _cut(str(text), _LONGEST_TEXT)]
            for share, text, title in (Excerpt(*entry) for entry in some)
        ]
    return excerpts


def _weights(name, given, size, default):
    """The given non-negative numbers, checked, or the default if there are none."""
    if given is None:
        return default
    given = np.asarray(given, dtype=np.float64)
    if given.shape != (size,):
        raise ValueError(f"{name}: expected {size} numbers, to fit lam; got shape {given.shape}")
    if not (np.isfinite(given).all() and given.min() >= 0 and given.sum() > 0):
        raise ValueError(f"{name}: expected finite numbers ≥ 0, not all of them 0")
    return given


def _expected_tokens(lam, eta):
    """Σ max(λ − η, 0), the statistics in λ; at least 1."""
    eta = np.broadcast_to(np.asarray(eta, dtype=np.float64), lam.shape)
    width = max(1, _BLOCK // lam.shape[1])
    blocks = (slice(first, first + width) for first in range(0, len(lam), width))
    return max(1.0, sum(float(np.maximum(lam[block] - eta[block], 0).sum()) for block in blocks))


def _by_rows(lam, function):
    """function(rows of λ) → one number a row, a block at a time."""
    width = max(1, _BLOCK // lam.shape[1])
    return np.concatenate([function(lam[first : first + width]) for first in range(0, len(lam), width)])


def _largest(values, number):
    """Indices of the largest values, largest first; of equal ones the first."""
    number = min(number, len(values))
    if number == 0:
        return np.zeros(0, int)
    least = np.partition(values, len(values) - number)[len(values) - number]
    candidates = np.flatnonzero(values >= least)
    return candidates[np.argsort(-values[candidates], kind="stable")][:number]


def _cut(text, longest):
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _short(number):
    """Four significant digits; whole numbers as such."""
    number = float(f"{number:.4g}")
    return int(number) if number.is_integer() else number


def _shorts(numbers):
    return [_short(number) for number in np.asarray(numbers).tolist()]
