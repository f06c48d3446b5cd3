"""Learned priors: the Dirichlet with the highest expected likelihood of the inferred proportions.

    α ← argmax Σ_d E[log Dirichlet(θ_d | α)]  =  argmax  log Γ(Σ_k α_k) − Σ_k log Γ(α_k) + Σ_k (α_k − 1) g_k

| letter | name        | meaning                                                                             |
|--------|-------------|-------------------------------------------------------------------------------------|
| g      | ``mean_log``| [K] mean of E[log θ_dk] over documents, or of E[log β_wk] over topics               |
| α, η   |             | the prior; symmetric if all entries are one number                                  |
| n      | ``size``    | number of entries of a symmetric prior                                              |

The likelihood is concave in α. Newton steps, shortened where they would make α negative or lower the likelihood, reach
its only maximum. The Hessian is diagonal plus a constant, so that a step costs O(K).

Reference: Minka, *Estimating a Dirichlet distribution*, 2000.
"""

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import gammaln, polygamma, psi

_SMALLEST, _LARGEST = 1e-4, 1e4  # bounds of a learned prior: the optimum for an unused topic is 0
_MAX_STEPS = 100
_FIXED_POINT_STEPS = 20
_TOLERANCE = 1e-7


def fit_dirichlet(mean_log: np.ndarray, start: ArrayLike) -> np.ndarray:
    """Return α [K], one number per topic, for a mean of E[log θ].

    Args:
      mean_log: g [K], each below 0.
      start: α to start from, one number or [K].

    Returns:
      α, between 1e-4 and 1e4.

    Example:
      >>> from scipy.special import psi
      >>> alpha = np.array([0.1, 0.5, 2.0])
      >>> fit_dirichlet(psi(alpha) - psi(alpha.sum()), 1.0).round(6).tolist()
      [0.1, 0.5, 2.0]
    """
    g = np.asarray(mean_log, np.float64)

    def value(alpha):
        return gammaln(alpha.sum()) - gammaln(alpha).sum() + (alpha - 1) @ g

    def newton(alpha):
        # (H⁻¹ ∇)_k = (∇_k − b) / q_k with q_k = −ψ′(α_k), z = ψ′(Σα), b = Σ(∇/q) / (1/z + Σ 1/q)
        gradient = psi(alpha.sum()) - psi(alpha) + g
        q, z = -polygamma(1, alpha), polygamma(1, alpha.sum())
        return (gradient - (gradient / q).sum() / (1 / z + (1 / q).sum())) / q

    return _maximise(value, newton, np.broadcast_to(np.asarray(start, np.float64), g.shape))


def fit_counts(counts: np.ndarray, start: ArrayLike) -> np.ndarray:
    """Return α [K] with a higher likelihood of the tokens per document and topic, by Minka's fixed point.

        α_k ← α_k Σ_d [ψ(N_dk + α_k) − ψ(α_k)] / Σ_d [ψ(N_d + Σα) − ψ(Σα)]

    Args:
      counts: N [D, K], samples.
      start: α to start from, one number or [K].

    Returns:
      α after 20 updates, between 1e-4 and 1e4.
    """
    alpha = np.broadcast_to(np.asarray(start, np.float64), counts.shape[1])
    lengths = counts.sum(1)
    for _ in range(_FIXED_POINT_STEPS):
        numerator = (psi(counts + alpha) - psi(alpha)).sum(0)
        denominator = (psi(lengths + alpha.sum()) - psi(alpha.sum())).sum()
        alpha = np.clip(alpha * numerator / max(denominator, _TOLERANCE), _SMALLEST, _LARGEST)
    return alpha


def fit_symmetric(mean_log: float, size: int, start: float) -> float:
    """Return η, one number for all n entries, for a mean of E[log β] over entries and topics.

    Args:
      mean_log: g, below 0.
      size: n.
      start: η to start from.
    """
    n, g = float(size), float(mean_log)

    def value(eta):
        return float(gammaln(n * eta[0]) - n * gammaln(eta[0]) + n * (eta[0] - 1) * g)

    def newton(eta):
        gradient = n * (psi(n * eta) - psi(eta) + g)
        return gradient / (n * n * polygamma(1, n * eta) - n * polygamma(1, eta))

    return float(_maximise(value, newton, np.array([start], np.float64))[0])


def mean_log(parameters: np.ndarray, axis: int) -> np.ndarray | np.float64:
    """Return the mean of E[log x] over Dirichlets whose parameters lie along ``axis``, in float64.

    Works on one block of rows at a time, so that it makes no copy of λ.
    """
    total = psi(parameters.sum(axis, dtype=np.float64))
    blocks = [psi(block.astype(np.float64)).sum(0) for block in np.array_split(parameters, -(-len(parameters) // 4096))]
    log = sum(blocks) / len(parameters)  # mean over rows of ψ
    return log - total.mean() if axis == 1 else (log - total).mean()


def _maximise(value, newton, alpha):
    best = value(alpha)
    for _ in range(_MAX_STEPS):
        step, size = newton(alpha), 1.0
        while True:
            moved = np.clip(alpha - size * step, np.maximum(alpha / 10, _SMALLEST), np.minimum(alpha * 10, _LARGEST))
            found = value(moved)
            if found >= best or size < _TOLERANCE:
                break
            size /= 2
        if not found >= best:
            break
        done = np.abs(moved / alpha - 1).max() < _TOLERANCE
        alpha, best = moved, found
        if done:
            break
    return alpha
