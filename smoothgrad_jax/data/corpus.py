"""A corpus of any size: documents × words as CSR arrays, in memory or memory-mapped.

A :class:`Corpus` is a view of three arrays. Nothing is copied except the documents of a minibatch. D (``num_docs``) is
the number of documents, V (``num_words``) the size of the vocabulary.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import scipy.sparse

from smoothgrad_jax.data import batches
from smoothgrad_jax.data.batches import Batch, DocumentsLike, Layout

_TRIAL_BATCHES = 16  # random minibatches from which a layout is estimated
_MARGIN = 6  # standard deviations above the mean that a layout has capacity for


class Corpus(NamedTuple):
    """Documents × words as CSR arrays; made by :meth:`of`, or directly from arrays.

    Attributes:
      indptr: [D + 1]; document d has the entries indptr[d] … indptr[d + 1] − 1.
      indices: Word ids of the entries.
      data: Counts of the entries. Memory-mapped ones are checked when they are packed.
      num_words: V.

    Example:
      >>> corpus = Corpus.of(np.array([[2, 0, 1], [0, 0, 0], [0, 3, 0]]))
      >>> corpus.num_docs, corpus.num_words, corpus.part(1, 3).num_docs
      (3, 3, 2)
    """

    indptr: npt.NDArray
    indices: npt.NDArray
    data: npt.NDArray
    num_words: int

    @staticmethod
    def of(X: DocumentsLike, num_words: int | None = None) -> "Corpus":
        """Return a view of CSR arrays, or a copy of any other form, and check all counts that are in memory.

        The arguments and the errors are those of :func:`smoothgrad_jax.pack`; X can also be a corpus.
        """
        if isinstance(X, Corpus) and num_words in (None, X.num_words):
            corpus = X
        else:
            matrix = batches.as_csr(X, num_words)
            corpus = Corpus(matrix.indptr, matrix.indices, matrix.data, matrix.shape[1])
        if not isinstance(corpus.data, np.memmap):  # reading a corpus from disk to check it could take minutes
            batches.check_entries(corpus, slice(int(corpus.indptr[0]), int(corpus.indptr[-1])))
        return corpus

    @property
    def shape(self) -> tuple[int, int]:
        """(D, V)."""
        return len(self.indptr) - 1, self.num_words

    @property
    def num_docs(self) -> int:
        """D."""
        return len(self.indptr) - 1

    def part(self, first: int, last: int) -> "Corpus":
        """Return the documents first … last − 1 as a view."""
        if not 0 <= first < last <= self.num_docs:
            raise ValueError(f"expected 0 ≤ first < last ≤ {self.num_docs}; got {first} and {last}")
        return self._replace(indptr=self.indptr[first : last + 1])

    def parts(self, size: int = 8_192) -> Iterator["Corpus"]:
        """Yield consecutive parts of ``size`` documents as views."""
        for first in range(0, self.num_docs, size):
            yield self.part(first, min(first + size, self.num_docs))

    def select(self, rows: npt.ArrayLike) -> scipy.sparse.csr_array:
        """Copy some documents into memory."""
        chosen = batches.check_rows(rows, self.num_docs)
        positions = batches.entry_positions(self, chosen)
        batches.check_entries(self, positions)
        indptr = np.concatenate([[0], np.cumsum(self.indptr[chosen + 1] - self.indptr[chosen])])
        arrays = np.asarray(self.data[positions]), np.asarray(self.indices[positions], np.int32), indptr
        return scipy.sparse.csr_array(arrays, (len(chosen), self.num_words))

    def word_counts(self) -> npt.NDArray[np.float64]:
        """Return how often each word occurs [V]. Reads the corpus in parts."""
        counts = np.zeros(self.num_words)
        for part in self.parts(1 << 16):
            entries = slice(int(part.indptr[0]), int(part.indptr[-1]))
            batches.check_entries(part, entries)
            counts += np.bincount(part.indices[entries], part.data[entries], self.num_words)
        return counts

    def lengths(self) -> npt.NDArray[np.float64]:
        """Return the number of words of each document [D], repetitions included."""
        entries = slice(self.indptr[0], self.indptr[-1])
        total = np.concatenate([[0.0], np.cumsum(self.data[entries], dtype=np.float64)])
        return np.diff(total[self.indptr - self.indptr[0]])

    def layout(self, batch_size: int) -> Layout:
        """Return a shape for minibatches of ``batch_size`` ≤ D documents.

        The layout has capacity for the longest document, and for the mean plus six standard deviations of the numbers
        of entries and of distinct words, estimated from all lengths and from a few random minibatches.
        """
        lengths = np.diff(self.indptr)
        rng = np.random.default_rng(0)
        # In a small corpus a document is never drawn twice for one minibatch; in a large one hardly ever.
        small = self.num_docs < 100 * batch_size
        trials = [rng.choice(self.num_docs, batch_size, replace=not small) for _ in range(_TRIAL_BATCHES)]
        longest = int(lengths.max())
        used = np.array([self._num_used(rows) for rows in trials])
        entries = batch_size * lengths.mean() + _MARGIN * np.sqrt(batch_size) * lengths.std()
        return Layout(
            longest,
            num_entries=_round_up(min(entries, batch_size * longest), 1024) + batches.TILE,
            num_used=_round_up(min(used.mean() + _MARGIN * used.std() + 16, self.num_words), 64),
            num_tokens=_round_up(4 * max(map(self._num_tokens, trials)), 64),
        )

    def _num_used(self, rows: npt.NDArray) -> int:
        """Count the distinct words in some documents. Ids out of range are reported later, by :meth:`pack`."""
        present = np.zeros(self.num_words, bool)
        ids = self.indices[batches.entry_positions(self, rows)]
        present[np.clip(ids, 0, self.num_words - 1).astype(np.int64)] = True
        return int(np.count_nonzero(present))

    def _num_tokens(self, rows: npt.NDArray) -> int:
        """Return the number of tokens of the longest of some documents; bad counts are reported by :meth:`pack`."""
        counts = np.clip(np.nan_to_num(self.data[batches.entry_positions(self, rows)]), 0, 1e6)
        offsets = np.concatenate([[0], np.cumsum(self.indptr[rows + 1] - self.indptr[rows])])
        return batches.num_tokens(counts, offsets)

    def pack(self, rows: npt.ArrayLike, layout: Layout) -> Batch:
        """Pack some documents as a :class:`smoothgrad_jax.Batch` in a given layout."""
        return batches.pack_rows(self, batches.check_rows(rows, self.num_docs), layout)


def _round_up(number: float, multiple: int) -> int:
    return -int(-number // multiple) * multiple
