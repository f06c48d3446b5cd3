"""What a model provides to run on the row-sparse engine.

A model with row-sparse statistics implements :class:`RowSparseModel`: it splits its parameters into one matrix
[V, C] and the remaining, dense leaves, and it returns a :class:`RowKernel`. Several row-sparse leaves with the same row
index are columns of one matrix.

:class:`GatheredKernel` makes a kernel from one function on gathered rows. A model for which speed matters most
writes a kernel of its own, with loops that XLA fuses (:mod:`smoothgrad_jax.core.fused_loops`).

| letter | meaning                                                                                   |
|--------|-------------------------------------------------------------------------------------------|
| V, C   | rows and columns of the parameter matrix λ                                                |
| U      | words of the minibatch that one partition holds, padded                                   |
| S      | partitions, one per thread                                                                |
| W      | columns of a feature row, W ≥ C                                                           |
| T      | column sums of λ [1, C]                                                                   |
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from smoothgrad_jax.core.model import Model
from smoothgrad_jax.core.types import Array, ArrayLike, Numeric, PRNGKey, PyTree


class KernelResult(NamedTuple):
    """What a kernel computes for a range of documents.

    Attributes:
      sums: [S · U, W], statistics per word of the minibatch, not scaled to the corpus; the first C columns count. They
        must not be negative: a window sum below 0 counts as 0, because only rounding can have left it there.
      total: [C], the sum of ``sums`` over words. −∞ says that statistics are negative, and stops the run.
      rest: Statistics of the dense leaves from these documents, scaled to the corpus: the sum over the ranges of
        all threads is that of the minibatch. None if the model has none.
      info: Anything for the reader, a pytree of arrays.
    """

    sums: Array
    total: Array
    rest: PyTree
    info: PyTree


class RowBatch(Protocol):
    """A minibatch of documents over rows, as :class:`smoothgrad_jax.Batch` is one.

    Attributes:
      vocabulary: [U] row numbers that the minibatch contains, increasing; zeros after ``num_used`` entries.
      num_used: How many different rows the minibatch contains.
      words: [N] entries of all documents, as positions in ``vocabulary``.
      offsets: [B + 1]; document d has the entries offsets[d] … offsets[d + 1] − 1.
    """

    @property
    def vocabulary(self) -> np.ndarray: ...
    @property
    def num_used(self) -> np.ndarray: ...
    @property
    def words(self) -> np.ndarray: ...
    @property
    def offsets(self) -> np.ndarray: ...

    @property
    def num_words(self) -> int:
        """V, the number of rows of λ that the documents need at least."""

    @property
    def size(self) -> int:
        """B, the number of documents."""

    def _replace(self, **changes: Any) -> "RowBatch": ...


class RowFeatures(Protocol):
    """What a local step needs of the rows of λ; a pytree, so that hyperparameters are traced."""

    def normalisers(self, totals: Array) -> PyTree:
        """Compute from T [1, C] what :meth:`features` needs for every row; called once per step."""

    def features(self, rows: Array, normalisers: PyTree) -> Array:
        """Compute what the local step needs of rows λ [n, C]: an array [n, W]."""


class RowKernel(RowFeatures, Protocol):
    """The computations of a model on the rows of a minibatch; a pytree, so that hyperparameters are traced."""

    @property
    def max_threads(self) -> int | None:
        """Largest number of threads that can work on one minibatch; None means any number."""

    def width(self) -> int:
        """Return W, the number of columns of a feature row."""

    def scale(self, batch_size: int) -> float:
        """Return D/B, the factor from statistics of a minibatch to statistics of the corpus."""

    def fit(
        self,
        features: tuple[Array, ...],
        totals: Array,
        rest: PyTree,
        batch: PyTree,
        bounds: tuple[Numeric, Numeric],
        scratch: Array,
        key: PRNGKey | None,
    ) -> KernelResult:
        """Fit the local variables of the documents bounds[0] … bounds[1] − 1.

        Args:
          features: [U, W] for each partition; position p of ``batch.words`` is row p % U of partition p // U.
          totals: T [1, C].
          rest: The dense leaves of the parameters.
          batch: The minibatch.
          bounds: First document, and last document plus one.
          scratch: An array [S · U, W] that the kernel may overwrite for its result.
          key: A random key of this step, for a model that samples; else None. All threads of a step get the same key.
            A kernel derives the randomness of a document from the key and the number of the document, so that the
            documents of two threads are independent and the result does not depend on the number of threads.
        """


@runtime_checkable
class RowSparseModel(Model, Protocol):
    """A model whose statistics touch few rows of a parameter matrix, and are not negative in these rows.

    Statistics that may be negative, for example those of a Gaussian, belong to the dense leaves.
    """

    def split_rows(self, params: PyTree) -> tuple[Array, PyTree]:
        """Split parameters into the matrix λ [V, C] and the dense leaves (None if there are none)."""

    def join_rows(self, matrix: Array, rest: PyTree) -> PyTree:
        """Invert :meth:`split_rows`."""

    def row_prior(self) -> tuple[ArrayLike, PyTree]:
        """Return the prior of the matrix, broadcastable to [V, C], and the prior of the dense leaves."""

    def row_kernel(self, num_columns: int, dtype: np.dtype) -> RowKernel:
        """Return the kernel for C columns of this dtype; for accelerators, if the model is told to use them."""


RowLocalStep = Callable[[PyTree, Array, Array, PyTree, PyTree, PRNGKey | None], tuple[Array, PyTree, PyTree]]


@jax.tree_util.register_pytree_node_class
class GatheredKernel(RowKernel):
    """A kernel from one function on the gathered rows of a minibatch; runs in one thread.

    Args:
      model: The model, a pytree, which is passed on to the function.
      function: ``(model, rows [U, C], totals [C], rest, batch, key) -> (statistics [U, C], rest statistics, info)``.
        Entries of ``batch.words`` are positions in ``rows``. Row statistics are not negative and not scaled to the
        corpus, rest statistics are scaled. A column of row statistics with a negative sum stops the run.
      num_columns: C.
      num_docs: D, the number of documents in the corpus.
    """

    max_threads: int = 1

    def __init__(self, model: PyTree, function: RowLocalStep, num_columns: int, num_docs: Numeric) -> None:
        self._model, self._function, self._num_columns, self._num_docs = model, function, num_columns, num_docs

    def width(self) -> int:
        return self._num_columns

    def scale(self, batch_size: int) -> float:
        return float(self._num_docs) / batch_size

    def normalisers(self, totals: Array) -> PyTree:
        del totals  # the function gets them

    def features(self, rows: Array, normalisers: PyTree) -> Array:
        del normalisers
        return rows

    def fit(
        self,
        features: tuple[Array, ...],
        totals: Array,
        rest: PyTree,
        batch: PyTree,
        bounds: tuple[Numeric, Numeric],
        scratch: Array,
        key: PRNGKey | None,
    ) -> KernelResult:
        """Call the function on all documents; one thread has all of them."""
        del bounds, scratch
        sums, rest_stats, info = self._function(self._model, jnp.concatenate(features), totals[0], rest, batch, key)
        total = sums.sum(0)
        return KernelResult(sums, jnp.where((total < 0).any(), -jnp.inf, total), rest_stats, info)

    def tree_flatten(self) -> tuple[tuple[PyTree, Numeric], tuple[RowLocalStep, int]]:
        return (self._model, self._num_docs), (self._function, self._num_columns)

    @classmethod
    def tree_unflatten(cls, static: tuple[RowLocalStep, int], children: tuple[PyTree, Numeric]) -> "GatheredKernel":
        return cls(children[0], static[0], static[1], children[1])
