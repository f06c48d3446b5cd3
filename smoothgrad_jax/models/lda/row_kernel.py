"""LDA on the row-sparse engine and on a mesh: features are β, the kernel fits a range of documents."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from smoothgrad_jax.core.fused_loops import fused
from smoothgrad_jax.core.row_sparse.kernel import KernelResult
from smoothgrad_jax.core.types import Array, Numeric, PRNGKey, PyTree
from smoothgrad_jax.data.batches import Batch
from smoothgrad_jax.models.lda import local_steps
from smoothgrad_jax.models.lda.document_fit import LocalInfo
from smoothgrad_jax.models.lda.execution import Batched, Execution
from smoothgrad_jax.models.lda.methods import Method, Sampled


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
      execution: ``Batched()`` fits the documents of a mesh device at once; otherwise they are fitted one by one.
    """

    alpha: Array | np.ndarray
    num_docs: float
    tol: Array | np.ndarray
    max_iter: int
    method: Method
    execution: Execution = None

    @property
    def max_threads(self) -> None:
        """No limit: documents are independent."""

    def width(self) -> int:
        """Return the number of topics, padded."""
        return local_steps.width(self.method, self.alpha.shape[0])

    def scale(self, batch_size: int) -> float:
        """Return D/B."""
        return float(self.num_docs) / batch_size

    def normalisers(self, totals: Array) -> PyTree:
        """Return what the rows of β have in common."""
        return local_steps.normalisers(self.method, totals)

    def features(self, rows: Array, normalisers: PyTree) -> Array:
        """Return β of rows."""
        return local_steps.features(self.method, rows, normalisers)

    def fit(
        self,
        features: tuple[Array, ...],
        totals: Array,
        rest: PyTree,
        batch: Batch,
        bounds: tuple[Numeric, Numeric],
        scratch: Array,
        key: PRNGKey | None,
    ) -> KernelResult:
        """Infer the topics of the documents in a range."""
        del totals, rest
        if isinstance(self.execution, Batched):
            return self._fit_batched(features, batch, key)
        start = scratch, jnp.zeros_like(self.alpha), jnp.zeros((), jnp.int32), jnp.zeros((), self.alpha.dtype)
        seed = None if key is None else seed_numbers(key)
        batch = batch if isinstance(self.method, Sampled) else without_tokens(batch)
        options = self.tol, self.max_iter, self.method
        sums, total, *info = _fit(start, self.alpha, features, batch, bounds, *options, seed)
        return KernelResult(sums, total, None, FitInfo(*info))

    def _fit_batched(self, features: tuple[Array, ...], batch: Batch, key: PRNGKey | None) -> KernelResult:
        """Infer the topics of all documents at once; a mesh device has no others."""
        seed = None if key is None else seed_numbers(key)
        options = self.tol, self.max_iter, seed
        sums, total, info = local_steps.fit_batched(self.method, self.alpha, jnp.concatenate(features), batch, *options)
        return KernelResult(sums, total, None, _summary(info, total.dtype))


def _summary(info, dtype):
    change = info.change if isinstance(info, LocalInfo) else jnp.zeros((), dtype)
    return FitInfo(info.iterations.sum(dtype=jnp.int32), change)


@fused
def _fit(_, alpha, beta, batch, bounds, tol, max_iter, method, seed):
    sums, total, info = local_steps.fit_batch(method, alpha, beta, batch, tol, max_iter, seed, bounds)
    return sums, total, *_summary(info, total.dtype)


def seed_numbers(key: PRNGKey) -> Array:
    """Return the two 32-bit numbers of a random key."""
    return jax.random.key_data(key).ravel()[:2] if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key.ravel()[:2]


def without_tokens(batch: Batch) -> Batch:
    """Return the batch for a local step that does not sample; its program does not depend on the longest document."""
    return batch._replace(documents=np.zeros((0,), np.int32), tokens=np.zeros((0, 0), np.float32))
