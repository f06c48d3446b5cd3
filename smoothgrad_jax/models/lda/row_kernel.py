"""LDA on the row-sparse engine: features are β̃, the kernel fits a range of documents."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from smoothgrad_jax.core.fused_loops import fused
from smoothgrad_jax.core.row_sparse.kernel import KernelResult
from smoothgrad_jax.core.types import Array, PRNGKey, PyTree
from smoothgrad_jax.models.lda.document_fit import fit_documents, padded, scaled_topics, topic_normalisers


class FitInfo(NamedTuple):
    """What the kernel found.

    Attributes:
      iterations: Evaluations of the fixed point, summed over documents.
      change: The largest final mean |Δγ| over documents.
    """

    iterations: Array
    change: Array


class LDAKernel(NamedTuple):
    """The kernel of LDA; see :class:`smoothgrad_jax.core.row_sparse.kernel.RowKernel`.

    Attributes:
      alpha: α [K].
      num_docs: D.
      tol, max_iter: When the fit of a document stops.
    """

    alpha: Any
    num_docs: Any
    tol: Any
    max_iter: Any

    @property
    def max_threads(self) -> None:
        """No limit: documents are independent."""

    def width(self) -> int:
        """Return the number of topics, padded."""
        return padded(self.alpha.shape[0])

    def scale(self, batch_size: int) -> float:
        """Return D/B."""
        return float(self.num_docs) / batch_size

    def normalisers(self, totals: Array) -> PyTree:
        """Return what the rows of β̃ have in common."""
        return topic_normalisers(totals)

    def features(self, rows: Array, normalisers: PyTree) -> Array:
        """Return β̃ of rows."""
        return scaled_topics(rows, normalisers)[0]

    def fit(
        self,
        features: tuple[Array, ...],
        totals: Array,
        rest: PyTree,
        batch: Any,
        bounds: tuple[Any, Any],
        memory: Array,
        key: PRNGKey | None,
    ) -> KernelResult:
        """Fit γ of the documents in a range."""
        del totals, rest, key
        empty = jnp.zeros_like(self.alpha), jnp.zeros((), jnp.int32), jnp.zeros((), self.alpha.dtype)
        sums, total, *info = _fit((memory, *empty), self.alpha, features, batch, bounds, self.tol, self.max_iter)
        return KernelResult(sums, total, None, FitInfo(*info))


@fused
def _fit(_, alpha, beta, batch, bounds, tol, max_iter):
    sums, total, info = fit_documents(alpha, beta, batch, tol, max_iter, *bounds)
    return sums, total, info.iterations.sum(dtype=jnp.int32), info.change


def make_kernel(alpha: Any, num_docs: Any, tol: Any, max_iter: Any, num_topics: int, dtype: np.dtype) -> LDAKernel:
    """Return the kernel with hyperparameters in the dtype of λ, so that other numbers compile nothing again."""
    alpha = np.broadcast_to(np.asarray(alpha, dtype), (num_topics,))
    return LDAKernel(alpha, float(num_docs), np.asarray(tol, dtype), int(max_iter))
