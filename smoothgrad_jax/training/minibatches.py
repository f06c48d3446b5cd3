"""Where minibatches come from: drawn from a corpus, or supplied by the caller."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from smoothgrad_jax.core.errors import OptionError
from smoothgrad_jax.core.model import Model, data_size, uses_documents
from smoothgrad_jax.core.types import ArrayLike, PRNGKey, PyTree
from smoothgrad_jax.data.batches import Batch, check_rows
from smoothgrad_jax.data.corpus import Corpus
from smoothgrad_jax.data.sampling import draw, seed_of
from smoothgrad_jax.training.settings import default_batch_size

_OFFSET_OF_SUPPLIED_BATCHES = 10  # τ where the number of minibatches per pass is not known


class Sampler(NamedTuple):
    """What decides, with the step number, which documents a minibatch contains.

    Attributes:
      seed: Numbers of the random key.
      num_docs: D.
      batch_size: B.
      replace: Whether documents are drawn with replacement.
    """

    seed: tuple[int, ...]
    num_docs: int
    batch_size: int
    replace: bool


class Minibatches(NamedTuple):
    """A source of minibatches.

    Attributes:
      num_docs: D, the number of documents that the minibatches represent; NaN if not known.
      num_words: V of the corpus; None if the caller supplies batches.
      entries_per_batch: Expected number of entries of a minibatch; ∞ if not known.
      from_step: ``from_step(t)`` iterates over the minibatches from step t on.
      sampler: How documents are drawn; None if the caller supplies batches.
    """

    num_docs: float
    num_words: int | None
    entries_per_batch: float
    from_step: Callable[[int], Iterator[Any]]
    sampler: Sampler | None

    @property
    def batches_per_pass(self) -> float:
        """Number of minibatches per pass over the corpus; a small constant if it is not known."""
        if self.sampler is None:
            return _OFFSET_OF_SUPPLIED_BATCHES
        return self.sampler.num_docs / self.sampler.batch_size


def open_minibatches(
    data: PyTree,
    model: Model,
    batch_size: int | None,
    key: PRNGKey | None,
    replace: bool,
    documents: ArrayLike | None,
) -> Minibatches:
    """Return the source of minibatches for the data of :func:`smoothgrad_jax.fit`."""
    if not isinstance(replace, bool | np.bool_):
        raise OptionError("replace", f"must be True or False, got {replace!r}")
    if not isinstance(data, Corpus) and (_are_batches(data) or not uses_documents(model)):
        return _supplied(data, model, batch_size, replace, documents)
    corpus = Corpus.of(data)
    if key is None:
        raise OptionError("key", "is needed to draw the documents of each minibatch: key=jax.random.key(0)")
    rows = None if documents is None else check_rows(np.ravel(documents), corpus.num_docs)
    num_docs = corpus.num_docs if rows is None else len(rows)
    lengths = np.diff(corpus.indptr)
    if not (lengths if rows is None else lengths[rows]).any():
        raise ValueError(f"no document has a word: all {num_docs:,} documents are empty")
    if batch_size is None:
        batch_size = default_batch_size(num_docs)
    elif not isinstance(batch_size, int | np.integer) or isinstance(batch_size, bool) or batch_size < 1:
        raise OptionError("batch_size", f"must be a whole number of at least 1, got {batch_size}")
    size = min(int(batch_size), num_docs)
    layout, seed = corpus.layout(size), seed_of(key)

    def from_step(first: int) -> Iterator[Batch]:
        for step in itertools.count(first):
            drawn = draw(seed, step, num_docs, size, replace)
            yield corpus.pack(drawn if rows is None else rows[drawn], layout)

    entries = size * float(corpus.indptr[-1] - corpus.indptr[0]) / corpus.num_docs
    return Minibatches(num_docs, corpus.num_words, entries, from_step, Sampler(seed, num_docs, size, bool(replace)))


def _supplied(data, model, batch_size, replace, documents):
    """Return the batches of the caller, in their order."""
    given = {"batch_size": batch_size, "replace": replace or None, "documents": documents}
    for option, value in given.items():
        if value is not None:
            raise OptionError(option, "has no effect on batches that you supply; it selects documents of a corpus")
    if not isinstance(data, Iterable):
        raise ValueError(f"expected an iterable of batches, got {type(data).__name__}")
    return Minibatches(data_size(model), None, math.inf, lambda _: iter(data), None)


def _are_batches(data):
    if isinstance(data, Batch):
        raise ValueError("expected many batches, got one: give a list of batches, or the corpus")
    if isinstance(data, list | tuple):
        return bool(data) and isinstance(data[0], Batch)
    return hasattr(data, "__iter__") and not hasattr(data, "shape")
