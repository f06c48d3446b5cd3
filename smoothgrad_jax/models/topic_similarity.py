"""Similar documents by their topic proportions: one minus the Hellinger distance.

    H(p, q) = √(1 − Σ_k √(p_k q_k)),        similarity = 1 − H,

between 0, no topic in common, and 1, equal proportions. H is a metric, and it weights small proportions less than the
Kullback–Leibler or the Jensen–Shannon divergence: a topic with little of a document has little influence.
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


def similarity(theta: npt.ArrayLike, query: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return the similarities [D] of topic proportions θ [D, K] to the proportions of one document [K].

    Example:
      >>> similarity([[1, 0], [0.5, 0.5], [0, 1]], [1, 0]).round(3).tolist()
      [1.0, 0.459, 0.0]
    """
    common = np.sqrt(np.asarray(theta, np.float64)) @ np.sqrt(np.asarray(query, np.float64))
    return 1 - np.sqrt(np.clip(1 - common, 0, None))


def nearest(parts: Iterable[npt.NDArray], query: npt.ArrayLike, n: int) -> Nearest:
    """Return the ``n`` documents whose topic proportions are most similar to those of one document.

    Args:
      parts: θ of all documents in parts [·, K], which are read once; a row that contains NaN is left out.
      query: Topic proportions [K].
      n: The largest number of documents; ties in the order of the documents.
    """
    best, first = Nearest(np.zeros(0, np.int64), np.zeros(0)), 0
    for theta in parts:
        found = similarity(theta, query)
        rows = np.flatnonzero(~np.isnan(found))
        documents = np.concatenate([best.documents, first + rows])
        values = np.concatenate([best.similarity, found[rows]])
        order = np.argsort(-values, kind="stable")[:n]
        best, first = Nearest(documents[order], values[order]), first + len(theta)
    return best
