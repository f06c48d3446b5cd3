"""The equations once more, slowly, in float64 NumPy and in the log domain: what the package is tested against."""

from collections import deque

import numpy as np
from scipy.special import gammaln, logsumexp, psi


def expected_log(a, axis=-1):
    """E[log x] under Dirichlet(a)."""
    return psi(a) - psi(a.sum(axis, keepdims=True))


def kl_divergence(a, b):
    """KL(Dirichlet(a) ‖ Dirichlet(b)) of vectors."""
    b = np.broadcast_to(b, a.shape)
    normalisers = gammaln(a.sum()) - gammaln(a).sum() - gammaln(b.sum()) + gammaln(b).sum()
    return normalisers + ((a - b) * expected_log(a)).sum()


def fit_document(alpha, lam, words, counts, tol, max_iter, momentum=0.25, method="Variational"):
    """γ, the responsibilities φ under it, and the number of updates; plain coordinate ascent with momentum=0.

    ``"Mean"`` has log E[β] in the place of E[log β], and ``"Maximum"`` also log E[θ] in the place of E[log θ].
    """
    lam, counts = np.asarray(lam, np.float64), np.asarray(counts, np.float64)
    num_topics = lam.shape[1]
    alpha = np.broadcast_to(np.asarray(alpha, np.float64), num_topics)
    log_beta = (expected_log(lam, 0) if method == "Variational" else np.log(lam / lam.sum(0)))[words]

    def responsibilities(gamma):
        log_theta = np.log(gamma / gamma.sum()) if method == "Maximum" else expected_log(gamma)
        log_phi = log_theta + log_beta
        return np.exp(log_phi - logsumexp(log_phi, axis=1, keepdims=True))

    before = point = gamma = alpha + counts.sum() / num_topics
    iterations, change = 0, np.inf
    while len(words) and change >= tol and iterations < max_iter:
        b = min(iterations / 40, momentum)
        step = (1 + np.sqrt(b)) ** 2 * (gamma - point) + b * (point - before)
        before, point = point, np.maximum(point + step, alpha)
        gamma = alpha + counts @ responsibilities(point)
        change, iterations = np.abs(gamma - point).mean(), iterations + 1
    if not len(words):
        gamma = alpha
    return gamma, responsibilities(gamma), iterations


def local_step(alpha, lam, documents, num_docs, tol=1e-3, max_iter=100, method="Variational"):
    """Ŝ [V, K] and γ [B, K] for a list of (words, counts)."""
    stats = np.zeros(np.shape(lam))
    gammas = []
    for words, counts in documents:
        gamma, phi, _ = fit_document(alpha, lam, words, counts, tol, max_iter, method=method)
        np.add.at(stats, words, np.asarray(counts, np.float64)[:, None] * phi)
        gammas.append(gamma)
    return num_docs / len(documents) * stats, np.array(gammas)


def elbo(alpha, eta, lam, documents, num_docs, tol=1e-3, max_iter=100):
    """The bound term by term, as in Blei, Ng and Jordan: nothing is simplified."""
    lam = np.asarray(lam, np.float64)
    alpha = np.broadcast_to(np.asarray(alpha, np.float64), lam.shape[1])
    log_beta = expected_log(lam, 0)
    local = 0.0
    for words, counts in documents:
        gamma, phi, _ = fit_document(alpha, lam, words, counts, tol, max_iter)
        log_theta = expected_log(gamma)
        with np.errstate(divide="ignore", invalid="ignore"):
            entropy = -np.where(phi > 0, phi * np.log(phi), 0).sum(1)
        per_word = (phi * (log_theta + log_beta[words])).sum(1) + entropy
        local += (np.asarray(counts, np.float64) * per_word).sum() - kl_divergence(gamma, alpha)
    eta = np.broadcast_to(np.asarray(eta, np.float64), lam.shape)
    topic = sum(kl_divergence(lam[:, k], eta[:, k]) for k in range(lam.shape[1]))
    return num_docs / len(documents) * local - topic


def log_predictive(alpha, lam, observed, held_out, tol=1e-3, max_iter=100, method="Variational"):
    """Document completion, per held-out word."""
    lam = np.asarray(lam, np.float64)
    beta = lam / lam.sum(0)
    score = tokens = 0.0
    for (words, counts), (unseen, unseen_counts) in zip(observed, held_out, strict=True):
        gamma, _, _ = fit_document(alpha, lam, words, counts, tol, max_iter, method=method)
        unseen_counts = np.asarray(unseen_counts, np.float64)
        score += unseen_counts @ np.log(beta[unseen] @ (gamma / gamma.sum()))
        tokens += unseen_counts.sum()
    return score / tokens


def algorithm_1(lam, minibatches, alpha, eta, rho, length, num_docs, warmup="mean", tol=1e-3, max_iter=100):
    """Mandt and Blei's Algorithm 1 with a real queue: λ after every step.

    ``minibatches`` yields lists of documents; ``rho`` is a function of the step; ``length`` may be infinite.
    """
    lam = np.asarray(lam, np.float64)
    queue = deque(maxlen=None if length == np.inf else length)
    path = []
    for i, documents in enumerate(minibatches):
        stats, _ = local_step(alpha, lam, documents, num_docs, tol, max_iter)
        queue.append(stats)
        divisor = length if warmup == "zeros" and length != np.inf else len(queue)
        smoothed = np.sum(queue, axis=0) / divisor
        lam = lam + rho(i) * ((eta - lam) + smoothed)
        path.append(lam)
    return np.array(path)
