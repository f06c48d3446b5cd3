"""How each method of LDA is computed; the dense functions and the row-sparse kernel both call these.

A new method is a class in :mod:`smoothgrad_jax.models.lda.methods`, a module with its loops over documents and one with
its operations on all documents at once, and a branch in :func:`fit_batch` and :func:`fit_batched`; also in
:func:`features`, if it uses topics other than E[β].
"""

import jax.numpy as jnp
from jax import lax

from smoothgrad_jax.core.fused_loops import row, set_row
from smoothgrad_jax.core.types import Array, Numeric, PyTree
from smoothgrad_jax.data.batches import Batch
from smoothgrad_jax.models.lda.batch_collapsed import collapse_together
from smoothgrad_jax.models.lda.batch_fit import fit_together
from smoothgrad_jax.models.lda.batch_sampling import sample_together
from smoothgrad_jax.models.lda.document_collapsed import collapse_documents
from smoothgrad_jax.models.lda.document_fit import LocalInfo, fit_documents, padded, scaled_topics, topic_normalisers
from smoothgrad_jax.models.lda.document_sampling import SampledInfo, sample_documents, sampling_width
from smoothgrad_jax.models.lda.methods import Collapsed, Maximum, Method, Sampled, Variational


def width(method: Method, num_topics: int) -> int:
    """Return W, the number of columns of β, which is K rounded up."""
    return sampling_width(num_topics) if isinstance(method, Sampled) else padded(num_topics)


def normalisers(method: Method, totals: Array) -> PyTree:
    """Return what all rows of β have in common, from the column sums T [1, K] of λ."""
    if isinstance(method, Variational):
        return topic_normalisers(totals)
    return _pad_to(1 / jnp.maximum(totals, jnp.finfo(totals.dtype).tiny), width(method, totals.shape[1]))


def features(method: Method, rows: Array, normalisers: PyTree) -> Array:
    """Return β [n, W] of rows λ [n, K]: exp E[log β] up to a factor per word for the variational method, else E[β]."""
    if isinstance(method, Variational):
        return scaled_topics(rows, normalisers)[0]
    return _pad_to(rows, normalisers.shape[1]) * normalisers


def gather(method: Method, lam: Array, totals: Array, batch: Batch) -> Array:
    """Return β [U, W] of the words of a batch."""
    common = normalisers(method, totals)

    def fill(i, beta):
        return set_row(beta, i, features(method, row(lam, batch.vocabulary[i]), common))

    empty = jnp.zeros((batch.vocabulary.shape[0], width(method, lam.shape[1])), lam.dtype)
    return lax.fori_loop(0, batch.num_used, fill, empty)


def fit_batch(
    method: Method,
    alpha: Array,
    beta: tuple[Array, ...],
    batch: Batch,
    tol: Numeric,
    max_iter: Numeric,
    seed: Array | None,
    bounds: tuple[Numeric, Numeric] | None = None,
) -> tuple[Array, Array, LocalInfo | SampledInfo]:
    """Infer the topics of the words of each document.

    Args:
      method: The method.
      alpha: α [K].
      beta: β [U, W] from :func:`features`; with several arrays, the first holds positions 0 … U − 1, and so on.
      batch: The documents.
      tol, max_iter: When the fit of a document stops; the sampled method has a number of sweeps instead.
      seed: [2] uint32, for the sampled method.
      bounds: First document, and last document plus one; by default all.

    Returns:
      Σ_d n_dw φ_dwk for the words of all arrays [S · U, W], its sum over words [K], and the info of the method.
    """
    first, last = (0, batch.size) if bounds is None else bounds
    if isinstance(method, Sampled):
        assert seed is not None, "the sampled method needs a seed"
        return sample_documents(alpha, beta, batch, seed, *method, first, last)
    if isinstance(method, Collapsed):
        return collapse_documents(alpha, beta, batch, tol, max_iter, first, last)
    return fit_documents(alpha, beta, batch, tol, max_iter, first, last, proportions=_proportions(method))


def fit_batched(
    method: Method,
    alpha: Array,
    beta: Array,
    batch: Batch,
    tol: Numeric,
    max_iter: Numeric,
    seed: Array | None,
) -> tuple[Array, Array, LocalInfo | SampledInfo]:
    """Infer the topics of the words of all documents at once; see :mod:`smoothgrad_jax.models.lda.execution`.

    The arguments and the result are those of :func:`fit_batch`, with β as one array.
    """
    if isinstance(method, Sampled):
        assert seed is not None, "the sampled method needs a seed"
        return sample_together(alpha, beta, batch, seed, *method)
    if isinstance(method, Collapsed):
        return collapse_together(alpha, beta, batch, tol, max_iter)
    return fit_together(alpha, beta, batch, tol, max_iter, _proportions(method))


def empty_info(method: Method, num_docs: int, num_topics: int, dtype: jnp.dtype) -> LocalInfo | SampledInfo:
    """Return the info of :func:`fit_batch` filled with zeros, for arrays that a compiled program writes to."""
    gamma, iterations = jnp.zeros((num_docs, num_topics), dtype), jnp.zeros(num_docs, jnp.int32)
    if isinstance(method, Sampled):
        return SampledInfo(gamma, iterations, gamma)
    return LocalInfo(gamma, iterations, jnp.zeros((), dtype))


def _proportions(method):
    """Return θ̃ as a function of γ, where it is not exp ψ(γ)."""
    return (lambda gamma: gamma) if isinstance(method, Maximum) else None


def _pad_to(x, size):
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])
