"""LDA on the row-sparse engine: features are β̃, the kernel fits a range of documents."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from smoothgrad_jax.core.fused_loops import fused
from smoothgrad_jax.core.row_sparse.kernel import KernelResult
from smoothgrad_jax.core.types import Array, ArrayLike, Numeric, PRNGKey, PyTree
from smoothgrad_jax.data.batches import Batch
from smoothgrad_jax.models.lda.document_fit import fit_documents, padded, scaled_topics, topic_normalisers
from smoothgrad_jax.models.lda.document_sampling import mean_normalisers, mean_topics, sample_documents, sampling_width
from smoothgrad_jax.models.lda.methods import Maximum, Method, Sampled, Variational


class FitInfo(NamedTuple):
    """What the kernel found.

    Attributes:
      iterations: Evaluations of the fixed point, or sweeps, summed over documents.
      change: The largest final mean |Δγ| over documents; 0 for the sampled method.
    """

    iterations: Array
    change: Array


class LDAKernel(NamedTuple):
    """The kernel of LDA; see :class:`smoothgrad_jax.core.row_sparse.kernel.RowKernel`.

    Attributes:
      alpha: α [K].
      num_docs: D.
      tol, max_iter: When the fit of a document stops.
      method: The local step.
    """

    alpha: Any
    num_docs: Any
    tol: Any
    max_iter: Any
    method: Method

    @property
    def max_threads(self) -> None:
        """No limit: documents are independent."""

    def width(self) -> int:
        """Return the number of topics, padded."""
        num_topics = self.alpha.shape[0]
        return sampling_width(num_topics) if isinstance(self.method, Sampled) else padded(num_topics)

    def scale(self, batch_size: int) -> float:
        """Return D/B."""
        return float(self.num_docs) / batch_size

    def normalisers(self, totals: Array) -> PyTree:
        """Return what the rows of β̃ have in common."""
        if isinstance(self.method, Variational):
            return topic_normalisers(totals)
        return mean_normalisers(totals, self.width())

    def features(self, rows: Array, normalisers: PyTree) -> Array:
        """Return β̃ of rows, or E[β]."""
        if isinstance(self.method, Variational):
            return scaled_topics(rows, normalisers)[0]
        return mean_topics(rows, normalisers)

    def fit(
        self,
        features: tuple[Array, ...],
        totals: Array,
        rest: PyTree,
        batch: Batch,
        bounds: tuple[Numeric, Numeric],
        memory: Array,
        key: PRNGKey | None,
    ) -> KernelResult:
        """Fit or sample the documents in a range."""
        del totals, rest
        start = memory, jnp.zeros_like(self.alpha), jnp.zeros((), jnp.int32), jnp.zeros((), self.alpha.dtype)
        if isinstance(self.method, Sampled):
            sums, total, *info = _sample(start, self.alpha, features, batch, bounds, seed_words(key), *self.method)
        else:
            options = self.tol, self.max_iter, self.method
            sums, total, *info = _fit(start, self.alpha, features, without_tokens(batch), bounds, *options)
        return KernelResult(sums, total, None, FitInfo(*info))


@fused
def _fit(_, alpha, beta, batch, bounds, tol, max_iter, method):
    sums, total, info = fit_documents(alpha, beta, batch, tol, max_iter, *bounds, proportions=proportions_of(method))
    return sums, total, info.iterations.sum(dtype=jnp.int32), info.change


@fused
def _sample(_, alpha, beta, batch, bounds, seed, sweeps, counted):
    sums, total, info = sample_documents(alpha, beta, batch, seed, sweeps, counted, *bounds)
    return sums, total, info.iterations.sum(dtype=jnp.int32), jnp.zeros_like(total[0])


def proportions_of(method: Method) -> Callable[[Array], Array] | None:
    """Return how :func:`fit_documents` computes θ̃ from γ; None is its default."""
    return (lambda gamma: gamma) if isinstance(method, Maximum) else None


def seed_words(key: PRNGKey) -> Array:
    """Return two 32-bit numbers of a random key."""
    return jax.random.key_data(key).ravel()[:2] if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key.ravel()[:2]


def without_tokens(batch: Batch) -> Batch:
    """Return the batch for a local step that does not sample; its program does not depend on the longest document."""
    return batch._replace(documents=np.zeros((0,), np.int32), tokens=np.zeros((0, 0), np.float32))


def make_kernel(
    alpha: ArrayLike,
    num_docs: Numeric,
    tol: Numeric,
    max_iter: Numeric,
    method: Method,
    num_topics: int,
    dtype: np.dtype,
) -> LDAKernel:
    """Return the kernel with hyperparameters in the dtype of λ, so that other numbers compile nothing again."""
    alpha = np.broadcast_to(np.asarray(alpha, dtype), (num_topics,))
    method = jax.tree.map(int, method)
    return LDAKernel(alpha, float(num_docs), np.asarray(tol, dtype), int(max_iter), method)
