"""Latent Dirichlet allocation.

    β_k ~ Dirichlet(η),   θ_d ~ Dirichlet(α),   z_dn ~ θ_d,   w_dn ~ β_z

    q(β_k) = Dirichlet(λ_·k),   q(θ_d) = Dirichlet(γ_d),   q(z_dn) = φ_dn

| letter | name           | shape   | meaning                                                                |
|--------|----------------|---------|------------------------------------------------------------------------|
| α      | ``alpha``      | [K]     | prior of the topic proportions; or one number                          |
| η      | ``eta``        | [V, K]  | prior of the topics; or anything that broadcasts to it                 |
| λ      | ``lam``        | [V, K]  | word-major: the words of a document are rows                           |
| γ      | ``gamma``      | [B, K]  | variational parameters of the topic proportions                        |
| φ      |                | [n, K]  | responsibilities of the topics for a document's words; never stored    |
| n_w    | ``counts``     | [n]     | how often a word occurs in the document                                |
| Ŝ      | ``stats``      | [V, K]  | (D/B) Σ_d n_dw φ_dw: expected counts, scaled up to the corpus          |
| θ̃, β̃   |                |         | exp E[log θ], exp E[log β], each up to a factor that cancels in φ      |

The coordinate updates for one document are φ_wk ∝ θ̃_k β̃_wk and γ_k = α_k + Σ_w n_w φ_wk. Together, without φ:

    γ ← α + θ̃ ∘ ((n / β̃θ̃) β̃)

Float32 suffices for any prior, because β̃ is scaled so that the largest entry of each word is 1, and θ̃ is kept within
the range of a float by a factor per document. All factors cancel in φ.

References: Blei, Ng and Jordan, *Latent Dirichlet Allocation*, JMLR 2003; Hoffman, Blei and Bach, *Online Learning for
Latent Dirichlet Allocation*, NIPS 2010.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from smoothgrad_jax import dirichlet, documents
from smoothgrad_jax.documents import Batch

_LANES = 8  # topics are padded to a multiple of this: XLA's dot is 1.5 times faster for K = 104 than for K = 100


class LDA(NamedTuple):
    """The model: what does not change while topics are learned.

    Attributes:
      alpha: α > 0, one number or one per topic.
      eta: η > 0, one number or anything that broadcasts to λ [V, K].
      num_docs: D, the number of documents in the corpus that minibatches stand for.
    """

    alpha: Any
    eta: Any
    num_docs: Any


class LocalInfo(NamedTuple):
    """What the local step found.

    Attributes:
      gamma: γ [B, K], in the order of the documents in the input.
      iterations: [B], updates of γ per document; 0 for an empty one.
      change: The largest last mean |Δγ| of all documents; at most ``tol``, unless some stopped at ``max_iter``.
    """

    gamma: jax.Array
    iterations: jax.Array
    change: jax.Array


def init_topics(key: jax.Array, num_words: int, num_topics: int, dtype: Any = jnp.float32) -> jax.Array:
    """Random λ [V, K] with mean 1 and standard deviation 0.1, near Gamma(100, 1/100), to start from."""
    # Wilson and Hilferty: the cube root of a Gamma variable is nearly normal. Fifty times faster than a Gamma sampler.
    normal = jax.random.normal(key, (num_words, num_topics), dtype)
    return jnp.maximum(1 - 1 / 900 + normal / 30, 0.1) ** 3


def local_step(
    model: LDA, lam: jax.Array, batch: Batch, tol: Any = 1e-3, max_iter: Any = 100
) -> tuple[jax.Array, LocalInfo]:
    """Fit the documents of a minibatch with the topics held fixed; compiled once per shape.

    Each document starts from γ = α + N/K (N its number of tokens) and stops by itself, when mean_k |Δγ_k| < ``tol``;
    its γ depends on nothing else in the batch.

    Allocates two arrays of λ's size besides the result (five with jax 0.10), and one tile [n, K].

    Args:
      model: Priors and corpus size.
      lam: λ [V, K], positive.
      batch: From :func:`smoothgrad_jax.pack`.
      tol: Where to stop.
      max_iter: Where to stop at the latest.

    Returns:
      ``(stats, info)``: Ŝ [V, K], the expected counts n_dw φ_dwk summed over the documents and scaled by D/B; and
      :class:`LocalInfo`.

    With B = D this is the E-step of batch variational Bayes.
    """
    _check(model, lam, batch)
    return _local_step(model, lam, batch, tol, max_iter)


def elbo(model: LDA, lam: jax.Array, batch: Batch, tol: Any = 1e-3, max_iter: Any = 100) -> jax.Array:
    """The evidence lower bound of the corpus, estimated from a minibatch.

        (D/B) Σ_d [ Σ_w n_dw log Σ_k exp(E[log θ_dk] + E[log β_wk]) − KL(q(θ_d) ‖ p(θ_d)) ] − Σ_k KL(q(β_k) ‖ p(β_k))

    with φ at its optimum. The documents' part is scaled to the corpus, the topics' part is counted once: on held-out
    documents it is *not* a score per word of those documents (use :func:`log_predictive` for that).

    Args: as in :func:`local_step`.

    Returns:
      A scalar, in nats. For B = D it is the bound itself.
    """
    _check(model, lam, batch)
    return _elbo(model, lam, batch, tol, max_iter)


def log_predictive(
    model: LDA, lam: jax.Array, observed: Batch, held_out: Batch, tol: Any = 1e-3, max_iter: Any = 100
) -> jax.Array:
    """Document completion: the mean log probability of a held-out word.

        Σ_d Σ_w n_dw log Σ_k E[θ_dk | observed] E[β_wk]  /  Σ_d Σ_w n_dw

    γ is fitted to the observed half of each document with λ fixed; the sums run over the other half.

    Args:
      model: Priors; ``num_docs`` plays no part.
      lam: λ [V, K].
      observed: The halves that are seen, from :func:`split_documents` and :func:`smoothgrad_jax.pack`.
      held_out: The halves that are scored: the same documents in the same order.
      tol, max_iter: as in :func:`local_step`.

    Returns:
      A scalar, in nats per word; exp(−score) is a perplexity. NaN if nothing is held out.
    """
    _check(model, lam, observed)
    _check(model, lam, held_out)
    if observed.size != held_out.size:
        raise ValueError(f"{observed.size} documents are observed, but {held_out.size} are held out")
    return _log_predictive(model, lam, observed, held_out, tol, max_iter)


def split_documents(X: Any, key: jax.Array) -> tuple[Any, Any]:
    """Split the tokens of each document in two halves at random, for :func:`log_predictive`.

    Args:
      X: Documents × words, as in :func:`smoothgrad_jax.pack`.
      key: A random key.

    Returns:
      ``(observed, held_out)``, two CSR arrays of the shape of X that sum to it. The odd token is observed, so that a
      document of one token has nothing held out.
    """
    seed = np.asarray(jax.random.key_data(key)).ravel()
    return documents.split(X, np.random.default_rng(seed))


def topics(lam: jax.Array) -> jax.Array:
    """E[β] as [K, V]: one row a topic, which sums to one."""
    return (lam / lam.sum(0)).T


@jax.jit
def _local_step(model, lam, batch, tol, max_iter):
    table, _ = _topic_table(lam)
    stats, info = _fit(model, lam, batch, table, tol, max_iter)
    # Ŝ_wk = (D/B) Σ_d n_dw φ_dwk
    return jnp.asarray(model.num_docs, lam.dtype) / batch.size * stats, info


@jax.jit
def _elbo(model, lam, batch, tol, max_iter):
    table, log_scale = _topic_table(lam)
    _, info = _fit(model, lam, batch, table, tol, max_iter)

    def visit(total, row, words, counts):
        gamma = info.gamma[row]
        shift = _theta_shift(gamma.mean())
        norm = table[words] @ _pad(_theta(gamma, shift))
        # log Σ_k exp(E[log θ_k] + E[log β_wk]), with the factors put back that θ̃ and β̃ lack
        log_norm = jnp.log(norm) + log_scale[words] + (shift - dirichlet.digamma(gamma.sum()))
        return total + jnp.where(counts > 0, counts * log_norm, 0).sum()

    likelihood = _each_document(batch, jnp.zeros((), lam.dtype), visit)
    local = dirichlet.kl_divergence(info.gamma, _alpha(model, lam)).sum()
    topic = dirichlet.kl_divergence(lam, jnp.broadcast_to(jnp.asarray(model.eta, lam.dtype), lam.shape), axis=0).sum()
    return jnp.asarray(model.num_docs, lam.dtype) / batch.size * (likelihood - local) - topic


@jax.jit
def _log_predictive(model, lam, observed, held_out, tol, max_iter):
    table, _ = _topic_table(lam)
    _, info = _fit(model, lam, observed, table, tol, max_iter)
    theta = info.gamma / info.gamma.sum(1, keepdims=True)
    beta = lam / lam.sum(0)

    def visit(total, row, words, counts):
        log_p = jnp.log(beta[words] @ theta[row])
        return total + jnp.stack([jnp.where(counts > 0, counts * log_p, 0).sum(), counts.sum()])

    score, tokens = _each_document(held_out, jnp.zeros(2, lam.dtype), visit)
    return score / tokens


def _fit(model, lam, batch, table, tol, max_iter):
    """Σ_d n_dw φ_dwk [V, K], and γ of every document."""
    num_topics = lam.shape[1]
    alpha = _alpha(model, lam)
    padded_alpha = _pad(alpha, 1)  # padding is inert: its β̃ is 0
    real = _pad(jnp.ones_like(alpha))

    def visit(carry, row, words, counts):
        stats, gammas, iterations, change = carry
        counts = counts.astype(lam.dtype)
        beta = table[words]
        tokens = counts.sum()
        shift = _theta_shift((alpha.sum() + tokens) / num_topics)

        def unfinished(state):
            _, moved, i = state
            return (moved >= tol) & (i < max_iter)

        def update(state):
            gamma, _, i = state
            # γ ← α + θ̃ ∘ ((n / β̃θ̃) β̃)
            theta = _theta(gamma, shift)
            new = padded_alpha + theta * ((counts / (beta @ theta)) @ beta)
            return new, (jnp.abs(new - gamma) @ real) / num_topics, i + 1

        gamma = padded_alpha + real * (tokens / num_topics)
        start = (gamma, jnp.full((), jnp.inf, lam.dtype), jnp.zeros((), jnp.int32))
        gamma, moved, i = lax.while_loop(unfinished, update, start)
        theta = _theta(gamma, shift)
        # n_w φ_wk = (n_w / (β̃θ̃)_w) β̃_wk θ̃_k; in this order no factor can overflow
        expected_counts = ((counts / (beta @ theta))[:, None] * beta) * theta
        return (
            stats.at[words].add(expected_counts),
            gammas.at[row].set(gamma[:num_topics]),
            iterations.at[row].set(i),
            jnp.maximum(change, moved),
        )

    start = (
        jnp.zeros_like(table),
        jnp.broadcast_to(alpha, (batch.size, num_topics)),  # what an empty document keeps
        jnp.zeros(batch.size, jnp.int32),
        jnp.zeros((), lam.dtype),
    )
    stats, *info = _each_document(batch, start, visit)
    return stats[:, :num_topics], LocalInfo(*info)


def _each_document(batch, carry, visit):
    """Fold ``visit(carry, row, words, counts)`` over the documents; words and counts are tiles of the group's width."""
    for group in batch.groups:
        width = group.span.shape[0]

        def one(i, carry, group=group, width=width):
            start = batch.offsets[i]
            words = lax.dynamic_slice(batch.words, (start,), (width,))
            counts = lax.dynamic_slice(batch.counts, (start,), (width,))
            # what lies beyond the document's end are words of the next one
            counts = jnp.where(group.span < batch.offsets[i + 1] - start, counts, 0)
            return visit(carry, batch.rows[i], words, counts)

        carry = lax.fori_loop(group.first, group.last, one, carry)
    return carry


def _topic_table(lam):
    """β̃ [V, K padded], scaled to max_k β̃_wk = 1, and log of the scale [V].

    exp E[log β_wk] = (λ_wk + 6)/(T_k + 6) · exp(e(λ_wk) − e(T_k)),   T_k = Σ_w λ_wk
    """
    lam = jnp.maximum(lam, jnp.finfo(lam.dtype).tiny)
    total = lam.sum(0)
    exponent = dirichlet.exponent(lam) - dirichlet.exponent(total)
    shift = exponent.max(1, keepdims=True)
    table = (lam + dirichlet.SHIFT) / (total + dirichlet.SHIFT) * jnp.exp(exponent - shift)
    peak = table.max(1, keepdims=True)
    return _pad(table / peak), (shift + jnp.log(peak))[:, 0]


def _theta(gamma, shift):
    """θ̃ = exp ψ(γ) · exp(−shift), and not below a floor that keeps β̃θ̃ positive where all its terms underflow."""
    floor = jnp.finfo(gamma.dtype).tiny ** 0.8
    return jnp.maximum((gamma + dirichlet.SHIFT) * jnp.exp(dirichlet.exponent(gamma) - shift), floor)


def _theta_shift(mean):
    """A factor per document that keeps θ̃ within range.

    The mean of γ does not change in the iteration (Σγ = Σα + N), so that the largest γ is never below it. θ̃ is then at
    least 1 there, and at most exp(−shift).
    """
    return jnp.maximum(dirichlet.exponent(mean), -0.65 * jnp.log(jnp.finfo(mean.dtype).max))


def _alpha(model, lam):
    return jnp.broadcast_to(jnp.asarray(model.alpha, lam.dtype), lam.shape[1:])


def _pad(x, value=0):
    extra = -x.shape[-1] % _LANES
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, extra)], constant_values=value)


def _check(model, lam, batch):
    if not isinstance(batch, Batch):
        raise ValueError(f"expected a Batch, got {type(batch).__name__}; pack(X) makes one")
    if np.ndim(batch.rows) != 1:
        raise ValueError(
            f"expected one batch, got a stack of {len(batch.rows)}; run and sweep take stacks, and "
            "jax.tree.map(lambda x: x[0], batches) is the first of them"
        )
    if np.ndim(lam) != 2 or not jnp.issubdtype(lam.dtype, jnp.floating):
        raise ValueError(f"lam must be floats of shape [V, K], got {lam.dtype} of shape {np.shape(lam)}")
    num_words, num_topics = lam.shape
    if not isinstance(batch.num_words, jax.core.Tracer) and batch.num_words > num_words:
        raise ValueError(f"the documents have {batch.num_words} words, but lam has {num_words} rows")
    _check_prior("alpha", model.alpha, (num_topics,))
    _check_prior("eta", model.eta, (num_words, num_topics))


def _check_prior(name, prior, shape):
    try:
        fits = np.broadcast_shapes(np.shape(prior), shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"{name} must be one number or broadcast to {shape}, got shape {np.shape(prior)}")
    if isinstance(prior, int | float) and not prior > 0:
        raise ValueError(f"{name} must be positive, got {prior}")
