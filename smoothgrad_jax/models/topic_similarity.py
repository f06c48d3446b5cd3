"""Similar documents by their topic proportions: one minus the Hellinger distance.

    p_dk = (γ_dk − α_k) / Σ_k (γ_dk − α_k)              H(p, q) = √(1 − Σ_k √(p_k q_k)),        similarity = 1 − H

with q(θ_d) = Dirichlet(γ_d) and the prior α: p_dk is the expected fraction of the words of document d that are from
topic k. With E[θ] = γ / Σ γ instead, a short text would be similar to all other short texts, whose E[θ] is near that of
the prior. H is a metric. The similarity is between 0, no topic in common, and 1, equal proportions.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Nearest(NamedTuple):
    """Documents that are similar to a given one, the most similar first; made by :func:`nearest`.

    Attributes:
      documents: Their row numbers [n].
      similarity: Their similarities [n], in [0, 1].
    """

    documents: npt.NDArray[np.int64]
    similarity: npt.NDArray[np.float64]


def word_proportions(gamma: npt.ArrayLike, alpha: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return p [D, K] for γ [D, K] and α, one number or [K]; NaN for a document without words, whose γ is α.

    Example:
      >>> word_proportions([[3.1, 1.1], [0.1, 0.1]], 0.1).round(3).tolist()
      [[0.75, 0.25], [nan, nan]]
    """
    both = np.asarray(gamma, np.float64)
    words = np.maximum(both - np.asarray(alpha), 0)
    total = words.sum(1, keepdims=True)
    is_known = total > 1e-6 * both.sum(1, keepdims=True)  # otherwise the difference is a rounding error
    return np.divide(words, total, out=np.full_like(words, np.nan), where=is_known)


def similarity(p: npt.ArrayLike, query: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return the similarities [D] of topic proportions [D, K] to the proportions of one document [K].

    Example:
      >>> similarity([[1, 0], [0.5, 0.5], [0, 1]], [1, 0]).round(3).tolist()
      [1.0, 0.459, 0.0]
    """
    common = np.sqrt(np.asarray(p, np.float64)) @ np.sqrt(np.asarray(query, np.float64))
    return 1 - np.sqrt(np.clip(1 - common, 0, None))


def nearest(parts: Iterable[npt.NDArray], query: npt.ArrayLike, n: int) -> Nearest:
    """Return the ``n`` documents whose topic proportions are most similar to those of one document.

    Args:
      parts: Topic proportions of all documents in parts [·, K], read once; a row that contains NaN is left out.
      query: Topic proportions [K].
      n: The largest number of documents; ties in the order of the documents.
    """
    best, first = Nearest(np.zeros(0, np.int64), np.zeros(0)), 0
    for part in parts:
        found = similarity(part, query)
        rows = np.flatnonzero(~np.isnan(found))
        documents = np.concatenate([best.documents, first + rows])
        values = np.concatenate([best.similarity, found[rows]])
        order = np.argsort(-values, kind="stable")[:n]
        best, first = Nearest(documents[order], values[order]), first + len(part)
    return best
