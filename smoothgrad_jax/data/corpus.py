"""A corpus of any size, and minibatches of it that are ready before they are needed.

| letter | name                    | meaning                                                                       |
|--------|-------------------------|-------------------------------------------------------------------------------|
| D      | ``num_docs``            | documents                                                                     |
| V      | ``num_words``           | words that documents could have                                               |
| B      | ``batch_size``          | documents in a minibatch                                                      |
| t      | ``step``                | number of the minibatch: with the key it says which documents are in it       |

A :class:`Corpus` is a view of three arrays, which may be memory-mapped: nothing is copied but the documents of a
minibatch. Which documents those are is a function of the key and the step alone, :func:`sample`: a run can go on from
any step without a state of the sampler.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
import scipy.sparse

from smoothgrad_jax.data import batches as documents
from smoothgrad_jax.data.batches import Batch, Layout

_LOOKS = 16  # minibatches that are looked at to choose a layout
_MARGIN = 6  # standard deviations of room above the mean minibatch

Item = TypeVar("Item")
Result = TypeVar("Result")


class Corpus(NamedTuple):
    """Documents × words as CSR arrays, in memory or memory-mapped; made by :meth:`of`, or directly from arrays.

    Attributes:
      indptr: [D + 1]; document d has the entries indptr[d] … indptr[d + 1] − 1.
      indices: Word ids of the entries.
      data: Counts of the entries. They are checked when they are packed.
      num_words: V.

    Example:
      >>> corpus = Corpus.of(np.array([[2, 0, 1], [0, 0, 0], [0, 3, 0]]))
      >>> corpus.num_docs, corpus.num_words, corpus.part(1, 3).num_docs
      (3, 3, 2)
    """

    indptr: Any
    indices: Any
    data: Any
    num_words: int

    @staticmethod
    def of(X: Any, num_words: int | None = None) -> "Corpus":
        """A view of CSR; a copy of what is not CSR. ``X`` and ``num_words`` are as in :func:`smoothgrad_jax.pack`."""
        if isinstance(X, Corpus):
            return X
        table = documents.as_table(X, num_words)
        return Corpus(table.indptr, table.indices, table.data, table.shape[1])

    @property
    def shape(self) -> tuple[int, int]:
        """(D, V)."""
        return len(self.indptr) - 1, self.num_words

    @property
    def num_docs(self) -> int:
        """D."""
        return len(self.indptr) - 1

    def part(self, first: int, last: int) -> "Corpus":
        """The documents first … last − 1, as a view."""
        if not 0 <= first < last <= self.num_docs:
            raise ValueError(f"expected 0 ≤ first < last ≤ {self.num_docs}; got {first} and {last}")
        return self._replace(indptr=self.indptr[first : last + 1])

    def parts(self, size: int = 8_192) -> Iterator["Corpus"]:
        """The corpus in parts of that many documents, one after the other, as views."""
        for first in range(0, self.num_docs, size):
            yield self.part(first, min(first + size, self.num_docs))

    def select(self, rows: Any) -> scipy.sparse.csr_array:
        """Some documents, copied into memory."""
        rows = documents.check_rows(rows, self.num_docs)
        places = documents.entries(self, rows)
        indptr = np.concatenate([[0], np.cumsum(self.indptr[rows + 1] - self.indptr[rows])])
        arrays = np.asarray(self.data[places]), np.asarray(self.indices[places], np.int32), indptr
        return scipy.sparse.csr_array(arrays, (len(rows), self.num_words))

    def word_counts(self) -> np.ndarray:
        """How often each word occurs [V]; reads all of the corpus, a part at a time."""
        counts = np.zeros(self.num_words)
        for part in self.parts(1 << 16):
            entries = slice(part.indptr[0], part.indptr[-1])
            counts += np.bincount(part.indices[entries], part.data[entries], self.num_words)
        return counts

    def layout(self, batch_size: int) -> Layout:
        """The shape of minibatches of this size (at most D), from the lengths of all documents and a few minibatches.

        Room for the longest document, and for the entries and the different words of a minibatch six standard
        deviations above the mean.
        """
        lengths = np.diff(self.indptr)
        rng = np.random.default_rng(0)
        # Minibatches of a small corpus hold no document twice; of a large one, hardly ever.
        few = self.num_docs < 100 * batch_size
        looks = [rng.choice(self.num_docs, batch_size, replace=not few) for _ in range(_LOOKS)]
        longest = int(lengths.max())
        used = np.array([self._num_used(rows) for rows in looks])
        entries = batch_size * lengths.mean() + _MARGIN * np.sqrt(batch_size) * lengths.std()
        return Layout(
            longest,
            num_entries=_round(min(entries, batch_size * longest), 1024) + documents.TILE,
            num_used=_round(min(used.mean() + _MARGIN * used.std() + 16, self.num_words), 64),
        )

    def _num_used(self, rows):
        """Different words in some documents; ids are not checked here."""
        present = np.zeros(self.num_words, bool)
        present[np.clip(self.indices[documents.entries(self, rows)], 0, self.num_words - 1).astype(np.int64)] = True
        return np.count_nonzero(present)

    def pack(self, rows: Any, layout: Layout) -> Batch:
        """Documents as a :class:`smoothgrad_jax.Batch` in a given layout."""
        return documents.pack_rows(self, documents.check_rows(rows, self.num_docs), layout)


def sample(key: jax.Array, step: int, num_docs: int, batch_size: int, *, replace: bool = False) -> np.ndarray:
    """The documents of minibatch ``step``, a function of its arguments alone.

    Args:
      key: A random key.
      step: t ≥ 0.
      num_docs: D.
      batch_size: B.
      replace: Draw uniformly with replacement, as in the paper. Otherwise every pass over the corpus has an order of
        its own, and the minibatches cut the sequence of passes in pieces of B; a minibatch may hold the end of one pass
        and the beginning of the next. The order of a pass takes 4 bytes a document (8 beyond 2³¹).

    Returns:
      [B] document numbers.
    """
    return draw(seed_of(key), step, num_docs, batch_size, replace)


def default_batch_size(num_docs: int) -> int:
    """B where nothing is said: a 32nd of the documents, between 32 and 256; see ``experiments/defaults.py``."""
    return min(max(int(num_docs) // 32, 32), 256)


def seed_of(key: jax.Array) -> tuple[int, ...]:
    """A key as numbers, which a thread can draw from without jax."""
    return tuple(np.asarray(jax.random.key_data(key)).ravel().tolist())


def draw(seed: tuple[int, ...], step: int, num_docs: int, batch_size: int, replace: bool) -> np.ndarray:
    """:func:`sample`, from :func:`seed_of` a key."""
    if replace:
        return np.random.default_rng([*seed, step]).integers(0, num_docs, batch_size)
    places = step * batch_size + np.arange(batch_size)
    passes = places // num_docs
    return np.concatenate(
        [_order(seed, int(p), num_docs)[places[passes == p] % num_docs] for p in range(passes[0], passes[-1] + 1)]
    )


def prefetch(function: Callable[[Item], Result], items: Iterable[Item], depth: int = 2) -> Iterator[Result]:
    """``map(function, items)``, computed in a background thread up to ``depth`` results ahead.

    An exception of the function, or of the iterable, is raised here in its turn, after the results before it.
    """
    items, end = iter(items), object()

    def compute():
        item = next(items, end)
        return end if item is end else function(item)

    pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
    try:
        ready = deque(pool.submit(compute) for _ in range(depth))
        while True:
            result = ready.popleft().result()
            if result is end:
                return
            ready.append(pool.submit(compute))
            yield result
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


@lru_cache(maxsize=2)
def _order(seed, number, num_docs):
    order = np.arange(num_docs, dtype=np.int32 if num_docs < 2**31 else np.int64)
    np.random.default_rng([*seed, number]).shuffle(order)
    return order


def _round(number, multiple):
    return -int(-number // multiple) * multiple
