"""Where minibatches come from: drawn from a corpus, or supplied by the caller."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from smoothgrad_jax.core.errors import OptionError
from smoothgrad_jax.core.model import Model, data_size, uses_documents
from smoothgrad_jax.core.types import ArrayLike, PRNGKey, PyTree
from smoothgrad_jax.data.batches import Batch, Layout, check_rows, document_numbers
from smoothgrad_jax.data.corpus import Corpus
from smoothgrad_jax.data.sampling import draw, seed_of
from smoothgrad_jax.training.defaults import default_batch_size

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


class Division(NamedTuple):
    """How minibatches are divided among the devices of a mesh.

    Attributes:
      num_devices: P.
      devices: Numbers of the devices for which this process packs documents.
    """

    num_devices: int
    devices: tuple[int, ...]

    def cuts(self, size: int) -> list[tuple[int, int]]:
        """Return the first document of each of these devices, and its last one plus one."""
        cuts = [size * d // self.num_devices for d in range(self.num_devices + 1)]
        return [(cuts[d], cuts[d + 1]) for d in self.devices]


class DividedBatch(NamedTuple):
    """The parts of a minibatch for the devices of this process.

    Attributes:
      parts: One part per device. Parts of documents have the same number of documents; the last may be empty.
      sizes: For each device its number of documents, without such empty ones.
      size: B, the number of documents of all devices.
    """

    parts: tuple[PyTree, ...]
    sizes: tuple[int, ...]
    size: int


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
    from_step: Callable[[int], Iterator[PyTree]]
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
    division: Division | None = None,
) -> Minibatches:
    """Return the source of minibatches for the data of :func:`smoothgrad_jax.fit`.

    With a division, the source yields a :class:`DividedBatch` per step.
    """
    if not isinstance(replace, bool | np.bool_):
        raise OptionError("replace", f"must be True or False, got {replace!r}")
    if not isinstance(data, Corpus) and (_are_batches(data) or not uses_documents(model)):
        return _supplied(data, model, batch_size, replace, documents, division)
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
    seed = seed_of(key)
    layout = corpus.layout(size if division is None else -(-size // division.num_devices))

    def from_step(first: int) -> Iterator[Batch | DividedBatch]:
        for step in itertools.count(first):
            drawn = draw(seed, step, num_docs, size, replace)
            chosen = drawn if rows is None else rows[drawn]
            yield corpus.pack(chosen, layout) if division is None else divide(corpus, chosen, layout, division)

    entries = size * float(corpus.indptr[-1] - corpus.indptr[0]) / corpus.num_docs
    return Minibatches(num_docs, corpus.num_words, entries, from_step, Sampler(seed, num_docs, size, bool(replace)))


def divide(
    corpus: Corpus, rows: npt.NDArray, layout: Layout, division: Division, numbers: npt.NDArray | None = None
) -> DividedBatch:
    """Pack the documents of a minibatch that belong to the devices of this process.

    Args:
      corpus: The counts.
      rows: [B] documents of the minibatch.
      layout: The shape of the part of a device.
      division: The devices.
      numbers: [B] numbers of the documents for local steps that sample; by default those of :func:`pack`.
    """
    numbers, cuts = document_numbers(rows) if numbers is None else numbers, division.cuts(len(rows))
    largest = -(-len(rows) // division.num_devices)
    parts = []
    for first, last in cuts:
        batch = corpus.pack(rows[first:last], layout)
        missing = largest - (last - first)
        parts.append(
            batch._replace(
                offsets=np.pad(batch.offsets, (0, missing), mode="edge"),
                documents=np.pad(numbers[first:last], (0, missing)),
            )
        )
    return DividedBatch(tuple(parts), tuple(last - first for first, last in cuts), len(rows))


def _divide_arrays(batch: PyTree, division: Division) -> DividedBatch:
    """Divide the arrays of a batch along their first axis."""
    sizes = {len(leaf) if np.ndim(leaf) else 0 for leaf in jax.tree.leaves(batch)}
    if len(sizes) != 1 or min(sizes) % division.num_devices:
        raise ValueError(
            f"a batch on a mesh of {division.num_devices} devices must be arrays whose first axis has one length, a "
            f"multiple of {division.num_devices}; got {sorted(sizes)}"
        )
    cuts = division.cuts(min(sizes))
    parts = tuple(jax.tree.map(lambda leaf, a=a, b=b: np.asarray(leaf[a:b]), batch) for a, b in cuts)
    return DividedBatch(parts, tuple(b - a for a, b in cuts), min(sizes))


def _divide_supplied(batch: PyTree, division: Division) -> DividedBatch:
    if not isinstance(batch, Batch):
        return _divide_arrays(batch, division)
    ids = batch.vocabulary[batch.words]
    corpus = Corpus(batch.offsets, ids, batch.counts, batch.num_words)
    rows = np.arange(batch.size)
    layout = Layout(len(batch.longest), len(batch.words), len(batch.vocabulary), max(1, len(batch.tokens)))
    return divide(corpus, rows, layout, division, batch.documents)


def _supplied(data, model, batch_size, replace, documents, division):
    """Return the batches of the caller, in their order."""
    given = {"batch_size": batch_size, "replace": replace or None, "documents": documents}
    for option, value in given.items():
        if value is not None:
            raise OptionError(option, "has no effect on batches that you supply; it selects documents of a corpus")
    if not isinstance(data, Iterable):
        raise ValueError(f"expected an iterable of batches, got {type(data).__name__}")
    batches = data if division is None else (_divide_supplied(batch, division) for batch in data)
    return Minibatches(data_size(model), None, math.inf, lambda _: iter(batches), None)


def _are_batches(data):
    if isinstance(data, Batch):
        raise ValueError("expected many batches, got one: give a list of batches, or the corpus")
    if isinstance(data, list | tuple):
        return bool(data) and isinstance(data[0], Batch)
    return hasattr(data, "__iter__") and not hasattr(data, "shape")
