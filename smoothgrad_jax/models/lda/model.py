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
| Ŝ      | ``stats``      | [V, K]  | (D/B) Σ_d n_dw φ_dw: expected counts, scaled to the corpus             |

References: Blei, Ng and Jordan, *Latent Dirichlet Allocation*, JMLR 2003; Hoffman, Blei and Bach, *Online Learning for
Latent Dirichlet Allocation*, NIPS 2010.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jax import lax

from smoothgrad_jax.core.errors import OptionError
from smoothgrad_jax.core.fused_loops import fused, row, set_row
from smoothgrad_jax.core.model import HeldOut, check_key
from smoothgrad_jax.core.platforms import platform_of
from smoothgrad_jax.core.types import Array, ArrayLike, Numeric, PRNGKey
from smoothgrad_jax.data import batches
from smoothgrad_jax.data.batches import Batch, DocumentsLike
from smoothgrad_jax.models import dirichlet
from smoothgrad_jax.models.lda import local_steps
from smoothgrad_jax.models.lda.batch_entries import PRECISION, document_of
from smoothgrad_jax.models.lda.document_fit import (
    LocalInfo,
    pad,
    padded,
    scaled_proportions,
    scaled_topics,
    topic_normalisers,
)
from smoothgrad_jax.models.lda.document_sampling import SampledInfo
from smoothgrad_jax.models.lda.execution import Batched, Execution, choose, for_platform
from smoothgrad_jax.models.lda.methods import Method, Sampled, Variational, check_method, deterministic
from smoothgrad_jax.models.lda.row_kernel import LDAKernel, seed_numbers, without_tokens

HeldOutData = Any  # documents, or a pair of their halves


class LDA(NamedTuple):
    """The model and its hyperparameters.

    Attributes:
      alpha: α > 0, one number or one per topic.
      eta: η > 0, one number or anything that broadcasts to λ [V, K].
      num_docs: D, the number of documents in the corpus that minibatches represent.
      tol: The fit of a document stops when an update moves its γ by less, on average over the topics.
      max_iter: The fit of a document stops after this many updates.
      method: The local step, see :mod:`smoothgrad_jax.models.lda.methods`; by default that of the paper.
      execution: ``Sequential()``, one document after the other; or ``Batched()``, all documents of a minibatch at once;
        by default the first on a CPU, and the second elsewhere. See :mod:`smoothgrad_jax.models.lda.execution`.
    """

    alpha: ArrayLike
    eta: ArrayLike
    num_docs: Numeric
    tol: Numeric = 1e-3
    max_iter: Numeric = 100
    method: Method = Variational()
    execution: Execution = None

    @property
    def uses_key(self) -> bool:
        """Whether the local step samples."""
        return isinstance(self.method, Sampled)

    @property
    def uses_documents(self) -> bool:
        """Minibatches are drawn from a corpus of documents."""
        return True

    @property
    def prior(self) -> ArrayLike:
        """η."""
        return self.eta

    def local_step(
        self, params: Array, batch: Batch, key: PRNGKey | None = None
    ) -> tuple[Array, LocalInfo | SampledInfo]:
        """Fit the documents of a minibatch; see :func:`local_step`."""
        return local_step(self, params, batch, key=key)

    @property
    def is_batched(self) -> bool:
        """Whether the local step is for accelerators."""
        return isinstance(self.execution, Batched)

    def for_platform(self, platform: str) -> "LDA":
        """Return the model with its execution on a platform."""
        return self._replace(execution=for_platform(self.execution, platform))

    def check(self, params: Array, num_words: int | None = None) -> "LDA":
        """Return the model as arrays of the dtype of λ, if λ can start a run on documents of so many words."""
        model = check(self, params, num_words)
        if num_words is not None and num_words < params.shape[0]:
            raise ValueError(f"lam has {params.shape[0]} rows, but the documents have only {num_words} words")
        if isinstance(params, np.ndarray) and not (np.isfinite(params).all() and (params > 0).all()):
            raise ValueError("λ must be positive and finite to start from")
        eta = np.asarray(self.eta)
        if eta.ndim == 2 and not eta.min() > 0:  # once per run, and not at every step
            raise OptionError("eta", f"must be positive, got {eta.min()}")
        return model

    def split_held_out(self, data: HeldOutData, key: PRNGKey | None, params: Array) -> HeldOut:
        """Prepare held-out documents for :meth:`held_out_score`; see :func:`split_held_out`."""
        return split_held_out(data, key, params.shape[0])

    def held_out_score(self, params: Array, held_out: HeldOut) -> float:
        """Return the mean log probability of a held-out word, in nats; see :func:`log_predictive`."""
        return float(log_predictive(self, params, held_out.observed, held_out.held_out))

    def split_rows(self, params: Array) -> tuple[Array, None]:
        """Return λ: all parameters are row-sparse."""
        return params, None

    def join_rows(self, matrix: Array, rest: None) -> Array:
        """Return λ."""
        del rest
        return matrix

    def row_prior(self) -> tuple[ArrayLike, None]:
        """Return η."""
        return self.eta, None

    def row_kernel(self, num_columns: int, dtype: np.dtype) -> LDAKernel:
        """Return the kernel for the row-sparse engine and for a mesh."""
        alpha, tol = np.broadcast_to(np.asarray(self.alpha, dtype), (num_columns,)), np.asarray(self.tol, dtype)
        method = jax.tree.map(int, self.method)
        # In the types of a compiled program, so that other numbers compile nothing again.
        return LDAKernel(alpha, float(self.num_docs), tol, int(self.max_iter), method, self.execution)


def local_step(
    model: LDA,
    lam: Array,
    batch: Batch,
    tol: Numeric | None = None,
    max_iter: Numeric | None = None,
    *,
    key: PRNGKey | None = None,
) -> tuple[Array, LocalInfo | SampledInfo]:
    """Fit the documents of a minibatch with the topics held fixed; compiled once per shape.

    γ of a document depends on no other document. With ``Variational`` and ``Mean`` it starts from γ = α + N/K, where N
    is the number of tokens, and stops when an update moves γ by less than ``tol`` on average over the topics. The
    updates have momentum, see :func:`smoothgrad_jax.models.lda.document_fit.fit_documents`.

    Allocates, besides the result, a few arrays [U, K] for the U different words of the batch, and tiles [M, K] for the
    M words of the longest document.

    Args:
      model: Priors and corpus size.
      lam: λ [V, K], positive.
      batch: From :func:`smoothgrad_jax.pack`.
      tol, max_iter: When the fit of a document stops; by default as the model says.
      key: A random key, for the sampled method.

    Returns:
      ``(stats, info)``: Ŝ [V, K], the expected counts n_dw φ_dwk summed over the documents and scaled by D/B; and
      :class:`LocalInfo`, or :class:`SampledInfo` for the sampled method.

    With B = D this is the E-step of batch variational Bayes.
    """
    model = _checked(model, lam, batch, tol, max_iter)
    check_key(model, key)
    if key is None or not model.uses_key:
        return _local_step(model, lam, without_tokens(batch), None)
    return _local_step(model, lam, batch, seed_numbers(key))


def elbo(model: LDA, lam: Array, batch: Batch, tol: Numeric | None = None, max_iter: Numeric | None = None) -> Array:
    """Estimate the evidence lower bound of the corpus from a minibatch.

        (D/B) Σ_d [ Σ_w n_dw log Σ_k exp(E[log θ_dk] + E[log β_wk]) − KL(q(θ_d) ‖ p(θ_d)) ] − Σ_k KL(q(β_k) ‖ p(β_k))

    with φ at its optimum. The term of the documents is scaled to the corpus, the term of the topics is counted once. On
    held-out documents the bound is therefore *not* a score per word; :func:`log_predictive` is.

    Args:
      model, lam, batch, tol, max_iter: As in :func:`local_step`. The bound is that of ``Variational()``, whatever the
        method of the model.

    Returns:
      A scalar, in nats. For B = D it is the bound itself.
    """
    model = _checked(model, lam, batch, tol, max_iter)
    return _elbo(model._replace(method=Variational()), lam, without_tokens(batch))


def log_predictive(
    model: LDA,
    lam: Array,
    observed: DocumentsLike | Batch,
    held_out: DocumentsLike | Batch,
    tol: Numeric | None = None,
    max_iter: Numeric | None = None,
) -> Array:
    """Return the mean log probability of a held-out word by document completion.

        Σ_d Σ_w n_dw log Σ_k E[θ_dk | observed] E[β_wk]  /  Σ_d Σ_w n_dw

    γ is fitted to the observed half of each document with λ fixed; the sums run over the other half.

    Args:
      model: Priors; ``num_docs`` has no effect.
      lam: λ [V, K].
      observed: The observed halves from :func:`split_documents`, or a :class:`smoothgrad_jax.Batch` of them.
      held_out: The halves to score: the same documents in the same order.
      tol, max_iter: As in :func:`local_step`.

    Returns:
      A scalar, in nats per word; exp(−score) is a perplexity. NaN if no token is held out.
    """
    observed, held_out = (X if isinstance(X, Batch) else batches.pack(X) for X in (observed, held_out))
    model = _checked(model, lam, observed, tol, max_iter)
    _checked(model, lam, held_out)
    _check_pairs(observed, held_out)
    model = model._replace(method=deterministic(model.method))
    return _log_predictive(model, lam, without_tokens(observed), without_tokens(held_out))


def split_documents(X: DocumentsLike, key: PRNGKey) -> tuple[scipy.sparse.csr_array, scipy.sparse.csr_array]:
    """Split the tokens of each document into two random halves, for :func:`log_predictive`.

    Args:
      X: Documents × words, as in :func:`smoothgrad_jax.pack`.
      key: A random key.

    Returns:
      ``(observed, held_out)``, two CSR arrays of the shape of X that sum to it. The odd token is observed, so that a
      document of one token has nothing held out.
    """
    seed = np.asarray(jax.random.key_data(key)).ravel()
    return batches.split_tokens(X, np.random.default_rng(seed))


def split_held_out(data: HeldOutData, key: PRNGKey | None, num_words: int) -> HeldOut:
    """Return held-out documents as two packed halves.

    Args:
      data: Documents, or a pair ``(observed, held_out)`` from :func:`split_documents`.
      key: Decides which tokens are observed; needed unless ``data`` is a pair.
      num_words: V of the model.

    Raises:
      ValueError: The documents have more words than the model, or the halves do not belong together.
    """
    if not (isinstance(data, tuple) and len(data) == 2):
        if key is None:
            raise ValueError("held-out documents are split at random: give key=jax.random.key(0)")
        data = split_documents(data, jax.random.fold_in(key, 1))
    observed, held_out = (half if isinstance(half, Batch) else batches.pack(half) for half in data)
    for half in (observed, held_out):
        if half.num_words > num_words:
            raise ValueError(f"held-out documents have {half.num_words} words, but λ has {num_words} rows")
    _check_pairs(observed, held_out)
    return HeldOut(observed, held_out)


@jax.jit
def _local_step(model, lam, batch, seed):
    stats, info = fit_local(model, lam, batch, seed)
    return _scatter(model, lam, batch, stats), info


def _scatter(model, lam, batch, stats):
    # Ŝ_wk = (D/B) Σ_d n_dw φ_dwk, 0 for words that the batch does not contain
    scale = model.num_docs / batch.size
    return jnp.zeros_like(lam).at[batch.vocabulary].add(scale * stats[:, : lam.shape[1]])


@jax.jit
def _elbo(model, lam, batch):
    _, info = fit_local(model, lam, batch, None)
    operands = lam, lam.sum(0, keepdims=True), batch, info.gamma
    likelihood = choose(model.execution, _log_likelihoods, _log_likelihoods_batched, *operands).sum()
    local = dirichlet.kl_divergence(info.gamma, model.alpha).sum()
    topic = dirichlet.kl_divergence(lam, model.eta, axis=0).sum()
    return model.num_docs / batch.size * (likelihood - local) - topic


def _log_likelihoods(lam, total, batch, gammas):
    """Return Σ_w n_dw log Σ_k exp(E[log θ_dk] + E[log β_wk]) [B]."""
    return _log_likelihoods_fused(jnp.zeros(batch.size, lam.dtype), lam, total, batch, gammas)


@fused
def _log_likelihoods_fused(_, lam, total, batch, gammas):
    normalisers = topic_normalisers(total)

    def fill(i, carry):
        return tuple(map(set_row, carry, (i, i), scaled_topics(row(lam, batch.vocabulary[i]), normalisers)))

    num_rows = batch.vocabulary.shape[0]
    empty = jnp.zeros((num_rows, padded(lam.shape[1])), lam.dtype), jnp.zeros(num_rows, lam.dtype)
    beta, log_scale = lax.fori_loop(0, batch.num_used, fill, empty)

    def one(d):
        theta, shift = scaled_proportions(gammas[d])
        # Restore the factors that θ̃ and β̃ omit.
        shift = shift - dirichlet.digamma(gammas[d].sum())
        return _sum_log(beta, pad(theta), batch, d, lambda w: log_scale[w] + shift)

    return lax.map(one, jnp.arange(batch.size))


@jax.jit
def _log_predictive(model, lam, observed, held_out):
    _, info = fit_local(model, lam, observed, None)
    theta = info.gamma / info.gamma.sum(1, keepdims=True)
    beta = lam[held_out.vocabulary] / lam.sum(0, keepdims=True)
    log_p = choose(model.execution, _log_probabilities, _sum_log_batched, beta, theta, held_out)
    return log_p.sum() / held_out.counts.astype(lam.dtype).sum()


def _log_likelihoods_batched(lam, total, batch, gammas):
    """Return Σ_w n_dw log Σ_k exp(E[log θ_dk] + E[log β_wk]) [B]."""
    beta, log_scale = scaled_topics(lam[batch.vocabulary], topic_normalisers(total))
    theta, shift = jax.vmap(scaled_proportions)(gammas)
    # Restore the factors that θ̃ and β̃ omit.
    shift = shift - dirichlet.digamma(gammas.sum(1))
    return _sum_log_batched(beta, pad(theta), batch, log_scale, shift)


def _sum_log_batched(beta, theta, batch, log_scale=None, shift=None):
    """Return Σ_w n_dw (log (βθ_d)_w + log_scale_w + shift_d) [B]."""
    words, document = jnp.asarray(batch.words), document_of(batch)
    log_p = jnp.log(jnp.einsum("ek,ek->e", beta[words], theta[document], precision=PRECISION))
    if log_scale is not None:
        log_p = log_p + log_scale[words] + shift[document]
    log_p = jnp.where(jnp.asarray(batch.counts) > 0, batch.counts.astype(theta.dtype) * log_p, 0)
    return jax.ops.segment_sum(log_p, document, batch.size, indices_are_sorted=True)


def _log_probabilities(beta, theta, batch):
    """Return Σ_w n_dw log Σ_k θ_dk β_wk [B]."""
    return _log_probabilities_fused(jnp.zeros(batch.size, beta.dtype), beta, theta, batch)


@fused
def _log_probabilities_fused(_, beta, theta, batch):
    return lax.map(lambda d: _sum_log(beta, theta[d], batch, d, lambda _: 0), jnp.arange(batch.size))


def _sum_log(beta, theta, batch, d, extra):
    """Return Σ_w n_dw (log (βθ)_w + extra(w)) of document d."""

    def add(i, total):
        w = batch.words[i]
        return total + batch.counts[i].astype(total.dtype) * (jnp.log(beta[w] @ theta) + extra(w))

    return lax.fori_loop(batch.offsets[d], batch.offsets[d + 1], add, jnp.zeros((), theta.dtype))


def fit_local(model: LDA, lam: Array, batch: Batch, seed: Array | None) -> tuple[Array, LocalInfo | SampledInfo]:
    """Infer the topics of the words of each document; called inside ``jax.jit``.

    Args:
      model: The model, from :func:`check`.
      lam: λ [V, K].
      batch: The documents.
      seed: [2] uint32, for the sampled method; else None.

    Returns:
      Σ_d n_dw φ_dwk of the words of the batch [U, W], and the info of the method.
    """
    # Without η, so that the bound can be differentiated by it: a function with a rule for vmap has no gradient.
    return _fit(model.alpha, lam, batch, model.tol, model.max_iter, model.method, model.execution, seed)


@jax.custom_batching.sequential_vmap
def _fit(alpha, lam, batch, tol, max_iter, method, execution, seed):
    """Compute the result of :func:`fit_local`.

    Runs under ``vmap`` execute one after the other: together each document would take as long as in the slowest run,
    and a row written for several runs at once would not be written in place.
    """
    alpha = jnp.broadcast_to(alpha, lam.shape[1])
    operands = method, alpha, lam, lam.sum(0, keepdims=True), batch, tol, max_iter, seed
    return choose(execution, _fit_sequential, _fit_batched, *operands)


def _fit_batched(method, alpha, lam, total, batch, *options):
    beta = local_steps.features(method, lam[batch.vocabulary], local_steps.normalisers(method, total))
    stats, _, info = local_steps.fit_batched(method, alpha, beta, batch, *options)
    return stats, info


def _fit_sequential(method, alpha, lam, *operands):
    batch = operands[1]
    empty = (
        jnp.zeros((batch.vocabulary.shape[0], local_steps.width(method, lam.shape[1])), lam.dtype),
        local_steps.empty_info(method, batch.size, lam.shape[1], lam.dtype),
    )
    return _fit_fused(empty, method, alpha, lam, *operands)


@fused
def _fit_fused(_, method, alpha, lam, total, batch, tol, max_iter, seed):
    beta = local_steps.gather(method, lam, total, batch)
    stats, _, info = local_steps.fit_batch(method, alpha, (beta,), batch, tol, max_iter, seed)
    return stats, info


def _checked(model, lam, batch, tol=None, max_iter=None):
    """Return the model as arrays of the dtype of λ, so that 1, 1.0 and np.float64(1) are one program."""
    if not isinstance(batch, Batch):
        raise ValueError(f"expected a Batch, got {type(batch).__name__}; pack(X) makes one")
    if np.ndim(batch.offsets) != 1:
        raise ValueError(
            f"expected one batch, got a stack of {len(batch.offsets)}; run and sweep take stacks, and "
            "jax.tree.map(lambda x: x[0], batches) is the first of them"
        )
    given = {name: value for name, value in (("tol", tol), ("max_iter", max_iter)) if value is not None}
    model = check(model._replace(**given) if isinstance(model, LDA) else model, lam, batch.num_words)
    return model._replace(execution=for_platform(model.execution, platform_of(lam)))


def check(model: LDA, lam: Array, num_words: int | None = None) -> LDA:
    """Return the model as arrays of the dtype of λ.

    Args:
      model: The model.
      lam: λ, or anything with its shape and dtype.
      num_words: Number of words that the documents can have, if known.

    Raises:
      ValueError: The model does not fit λ, or λ does not fit the documents.
    """
    if not hasattr(lam, "dtype") or lam.ndim != 2 or lam.dtype not in (np.float32, np.float64):
        what = f"{lam.dtype} of shape {lam.shape}" if hasattr(lam, "dtype") else type(lam).__name__
        raise ValueError(f"lam must be float32 or float64 of shape [V, K], got {what}")
    if not isinstance(model, LDA):
        raise ValueError(f"expected an LDA(alpha, eta, num_docs), got {type(model).__name__}")
    check_method(model.method)
    for_platform(model.execution, None)
    num_rows, num_topics = lam.shape
    if num_words is not None and num_words > num_rows:
        raise ValueError(f"the documents have {num_words} words, but lam has {num_rows} rows")
    return model._replace(
        alpha=_positive("alpha", model.alpha, (num_topics,), lam.dtype),
        eta=_positive("eta", model.eta, (num_rows, num_topics), lam.dtype),
        num_docs=_positive("num_docs", model.num_docs, (), lam.dtype),
        tol=_positive("tol", model.tol, (), lam.dtype, or_zero=True),
        max_iter=_positive("max_iter", model.max_iter, (), np.dtype(np.int32), or_zero=True),
    )


def _check_pairs(observed, held_out):
    if observed.size != held_out.size:
        raise ValueError(f"{observed.size} documents are observed, but {held_out.size} are held out")


def _positive(name, value, shape, dtype, or_zero=False):
    try:
        fits = np.broadcast_shapes(np.shape(value), shape) == shape
    except ValueError:
        fits = False
    if not fits:
        wanted = f"one number or broadcast to {shape}" if shape else "one number"
        raise OptionError(name, f"must be {wanted}, got shape {np.shape(value)}")
    if isinstance(value, jax.core.Tracer):
        return value.astype(dtype)
    # A matrix is trusted: checking all of it would cost as much as the step.
    if np.ndim(value) < 2:
        numbers = np.asarray(value)
        if not ((numbers > 0) | (or_zero & (numbers == 0))).all():
            raise OptionError(name, f"must be positive{' or 0' if or_zero else ''}, got {value}")
    return value.astype(dtype) if isinstance(value, jax.Array) else np.asarray(value, dtype)
