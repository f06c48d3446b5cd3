"""Map of topics: points in the plane, by classical scaling of the Jensen–Shannon distances between topics.

| symbol | meaning                                                  |
|--------|----------------------------------------------------------|
| λ      | Dirichlet parameters of the topics [V, K]                |
| β_k    | λ_k / Σ_w λ_wk, the word probabilities of topic k        |
| π_k    | prevalence of topic k                                    |
| JSD    | Jensen–Shannon divergence of two topics                  |
"""

import math

import numpy as np
import numpy.typing as npt
import scipy.linalg
from scipy.spatial.distance import pdist, squareform

from smoothgrad_jax.app.topic_blocks import map_rows, topic_rows
from smoothgrad_jax.models.topic_quality import largest

_MAX_DISTANCE_TERMS = 150_000_000  # of all Jensen–Shannon distances: one or two seconds


def topic_map(lam: npt.NDArray, prevalence: npt.NDArray) -> tuple[npt.NDArray, float]:
    """Return the points of the topics [K, 2], and the fraction of the squared distances that the plane explains."""
    K = lam.shape[1]
    merged = merged_words(lam, prevalence, max(2 * K, 2 * _MAX_DISTANCE_TERMS // K**2))
    return classical_scaling(jensen_shannon(merged))


def merged_words(lam: npt.NDArray, prevalence: npt.NDArray, most: int) -> npt.NDArray:
    """Return topics over at most ``most`` merged words, which bounds the time to compute distances between topics.

    The most frequent words are not merged. The other words are merged into one word per topic, argmax_k p(k|w).
    Merging never increases a distance.

    Returns:
      Probabilities [K, M] whose rows sum to one; M = V if V ≤ ``most``, which is at least 2K.
    """
    V, K = lam.shape
    scale = 1 / lam.sum(0, dtype=np.float64)
    if most >= V:
        return np.ascontiguousarray((lam * scale).T)
    frequent = np.sort(largest(map_rows(lam, lambda rows: rows @ (scale * prevalence)), most - K))
    column = map_rows(lam, lambda rows: np.argmax(rows * (scale * prevalence), axis=1))
    column[frequent] = K + np.arange(len(frequent))
    size = K + len(frequent)
    return np.stack([np.bincount(column, row * scale[k], minlength=size) for k, row in enumerate(topic_rows(lam))])


def jensen_shannon(beta: npt.NDArray) -> npt.NDArray:
    """Return the distances √JSD(β_i, β_j) [K, K], in √nats, between the rows of β [K, V]; at most √log 2.

    JSD(p, q) = ½ Σ p log p + ½ Σ q log q − Σ m log m,  m = (p + q)/2
    """
    # Rounding makes the divergence of almost equal rows negative, and its square root NaN.
    return squareform(np.nan_to_num(pdist(beta, "jensenshannon")))


def classical_scaling(distances: npt.NDArray) -> tuple[npt.NDArray, float]:
    """Return points in the plane whose distances approximate the given ones (principal coordinates).

    B = −½ J D² J with J = I − 11ᵀ/K. The coordinates are the first two eigenvectors of B, multiplied by the square
    roots of their eigenvalues. The sign of an axis makes its first large coordinate positive.

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
