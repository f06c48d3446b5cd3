"""Bags of words as arrays of fixed shape.

Documents are ragged; compiled programs are not. A :class:`Batch` keeps the words of all its documents end to end, and
the program walks over them. How many documents and words there are is data; shape is only the room for them, and for
the longest document: the minibatches of one size that :func:`pack` takes from one corpus share one compiled program, or
a few, where their number of entries or of different words passes a power of two.

| name           | shape   | meaning                                                                             |
|----------------|---------|-------------------------------------------------------------------------------------|
| ``vocabulary`` | [U]     | ids of the different words in the batch, increasing; then zeros                     |
| ``num_used``   |         | how many there are                                                                  |
| ``words``      | [N]     | the documents' words, as positions in ``vocabulary``, one document after the other  |
| ``counts``     | [N]     | how often; 0 beyond the last document                                               |
| ``offsets``    | [B + 1] | document d has the entries offsets[d] … offsets[d + 1] − 1                          |
| ``longest``    | [M, 0]  | holds no number, only M: the program has room for documents of so many words        |
| ``columns``    | [V, 0]  | holds no number, only V: a shape is known when a program is compiled                |

A minibatch uses a few thousand of the words that there are: what depends on a word is computed once per word of
``vocabulary``, and not per document or for all V.

The words of a document stand in tiles of 8, 16, 32, … rows, each used or not: any number of words is such a sum within
7, so that a document gets the tiles, and the arithmetic, of its own length, whatever else is in the batch. (All tiles
are there, and are filled once a batch: M rows.)
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse

_LARGEST = 1e30  # a document's sum of counts must be a float32
TILE = 8  # rows of the smallest tile; XLA's product of a matrix and a vector takes eight at a time


class Batch(NamedTuple):
    """B documents over V words; made by :func:`pack`."""

    vocabulary: np.ndarray
    num_used: np.ndarray
    words: np.ndarray
    counts: np.ndarray
    offsets: np.ndarray
    longest: np.ndarray
    columns: np.ndarray

    @property
    def num_words(self) -> int:
        """V, the number of words that documents could have."""
        return self.columns.shape[-2]

    @property
    def size(self) -> int:
        """B, the number of documents, empty ones included."""
        return self.offsets.shape[-1] - 1

    @property
    def tiles(self) -> tuple[int, ...]:
        """Rows of the tiles that hold a document, smallest first."""
        return _tiles(self.longest.shape[-2])


class Layout(NamedTuple):
    """The shape that the minibatches of a corpus have in common; :meth:`smoothgrad_jax.Corpus.layout` chooses one.

    What does not fit is packed all the same, with more tiles or into a larger array, and is compiled for once more.

    Attributes:
      longest: Different words of the longest document; M is the room that its tiles have.
      num_entries: Room for the entries of all documents of a minibatch, N.
      num_used: Room for its different words, U.
    """

    longest: int
    num_entries: int
    num_used: int


def pack(X: Any, rows: Any = None, *, num_words: int | None = None) -> Batch:
    """Pack documents for the compiled steps.

    Args:
      X: Documents × words: a scipy sparse array or matrix of any format, a dense array, or a list with
        ``(word ids, counts)`` for each document. Counts may be fractional, not negative. Documents may be empty.
      rows: Which documents, in which order, by default all: ``[B]`` indices; or ``[T, B]`` for a stack of T minibatches
        of one shape, as :func:`smoothgrad_jax.run` and :func:`smoothgrad_jax.sweep` take them. Give the corpus and
        ``rows`` rather than a part of the corpus: batches then have one shape. The cost is that of the rows and of one
        look at all lengths if X is CSR; any other form is converted as a whole, every time.
      num_words: The size of the vocabulary, for a list; by default the largest id plus one.

    Returns:
      A :class:`Batch` of NumPy arrays, with a leading axis T if ``rows`` has one.

    Raises:
      ValueError: A count is negative, NaN or infinite, or an id out of range; it names the document.

    Example:
      >>> batch = pack([([0, 2], [1, 3]), ([], []), ([1], [2])], num_words=3)
      >>> batch.size
      3
    """
    table = as_table(X, num_words)
    rows = check_rows(np.arange(table.shape[0]) if rows is None else rows, table.shape[0])
    lengths = _lengths(table, rows)
    layout = round_layout(int(np.diff(table.indptr).max()), int(lengths.sum(-1).max()))
    batches = [pack_rows(table, each, layout) for each in np.atleast_2d(rows)]
    room = _power_of_two(max(batch.vocabulary.size for batch in batches))
    batches = [each._replace(vocabulary=np.resize(each.vocabulary, room)) for each in batches]
    for each in batches:
        each.vocabulary[each.num_used :] = 0
    return batches[0] if rows.ndim == 1 else Batch(*map(np.stack, zip(*batches, strict=True)))


def round_layout(longest: int, num_entries: int, num_used: int = 0) -> Layout:
    """A layout for documents of up to so many words, and so many entries and, at most, different words in all.

    The sizes are rounded up to powers of two, so that batches of similar size have the same.
    """
    room = _power_of_two(num_entries + TILE)
    return Layout(longest, room, min(_power_of_two(num_used), room))


def check_rows(rows: Any, num_docs: int) -> np.ndarray:
    """``rows`` as int64 [B] or [T, B], or an error that says what is wrong with them."""
    rows = np.asarray(rows)
    if rows.ndim not in (1, 2) or rows.size == 0 or not np.issubdtype(rows.dtype, np.integer):
        raise ValueError(f"rows must be whole numbers of shape [B] or [T, B]; got {rows.dtype} of shape {rows.shape}")
    if rows.min() < 0 or rows.max() >= num_docs:
        raise ValueError(f"rows must lie in 0 … {num_docs - 1}; got {rows.min()} … {rows.max()}")
    return rows.astype(np.int64)  # rows + 1 must not wrap


def csr(X: Any) -> scipy.sparse.csr_array:
    """All of X, as in :func:`pack`, checked: CSR without duplicates and explicit zeros. X is not changed."""
    table = as_table(X, None)
    _, counts = _check_entries(table, np.arange(table.nnz))
    table = scipy.sparse.csr_array((counts.copy(), table.indices.copy(), table.indptr.copy()), table.shape)
    table.sum_duplicates()
    table.eliminate_zeros()
    return table


def split(X: Any, rng: np.random.Generator) -> tuple[scipy.sparse.csr_array, scipy.sparse.csr_array]:
    """Deal the tokens of every document into two halves at random; an odd one goes to the first.

    A fractional count is that many whole tokens and a smaller last one.
    """
    table = csr(X)
    # One entry per token: which nonzero it belongs to, and its weight, which is 1 but for a fractional rest.
    pieces = np.ceil(table.data).astype(np.int64)
    entry = np.repeat(np.arange(table.nnz), pieces)
    weight = np.ones(entry.size)
    weight[np.cumsum(pieces) - 1] = table.data - (pieces - 1)
    document = np.repeat(np.arange(table.shape[0]), np.diff(table.indptr))[entry]
    # Shuffle within each document and cut it in the middle.
    order = np.lexsort((rng.random(entry.size), document))
    tokens = np.bincount(document, minlength=table.shape[0])
    position = np.arange(entry.size) - np.repeat(np.cumsum(tokens) - tokens, tokens)
    first = order[position < np.repeat((tokens + 1) // 2, tokens)]
    observed = np.bincount(entry[first], weights=weight[first], minlength=table.nnz)

    def half(data):
        out = scipy.sparse.csr_array((data.astype(table.dtype), table.indices, table.indptr), table.shape, copy=True)
        out.eliminate_zeros()
        return out

    # The rest of a fractional count may come out as 1e-17 instead of 0.
    rest = table.data - observed
    return half(observed), half(np.where(rest > 1e-6 * table.data, rest, 0))


def as_table(X: Any, num_words: int | None = None) -> Any:
    """X, as in :func:`pack`, as CSR, its form checked but not its values; nothing is copied that is CSR already."""
    if scipy.sparse.issparse(X):
        if X.ndim != 2:
            raise ValueError(f"expected documents × words, got a sparse array of shape {X.shape}")
        table = X if X.format == "csr" else _from_triples(X.tocoo())
    elif all(hasattr(X, name) for name in ("indptr", "indices", "data", "shape")):
        first, last = X.indptr[0], X.indptr[-1]  # of a part of a corpus
        arrays = X.data[first:last], X.indices[first:last], np.asarray(X.indptr) - first
        table = scipy.sparse.csr_array(arrays, X.shape)
    elif isinstance(X, list | tuple):
        table = _from_lists(X, num_words)
    else:
        dense = np.asarray(X)
        if dense.ndim != 2 or dense.dtype.kind not in "buif":
            raise ValueError(f"expected documents × words, got an array of {dense.dtype} of shape {dense.shape}")
        table = scipy.sparse.csr_array(dense if dense.dtype.kind != "f" or dense.itemsize > 2 else dense.astype("f4"))
    if table.shape[0] == 0:
        raise ValueError("there is no document to pack")
    if num_words is not None and table.shape[1] != num_words:
        raise ValueError(f"num_words is {num_words}, but the documents have {table.shape[1]} columns")
    if table.dtype.kind not in "buif":
        raise ValueError(f"counts must be real numbers, got {table.dtype}")
    return table


def entries(table: Any, rows: np.ndarray) -> np.ndarray:
    """Where the entries of some rows stand in the arrays of a table, one row after the other."""
    lengths = _lengths(table, rows)
    before = np.cumsum(lengths) - lengths
    return np.arange(lengths.sum()) + np.repeat(table.indptr[rows] - before, lengths)


def _check_entries(table, entries):
    """Ids and counts of some entries, these as floats; refused with the document's name if an entry is not usable."""
    counts, ids = table.data[entries], table.indices[entries]
    # NaN fails every comparison, and is the minimum of what it is in.
    if counts.size and not (
        counts.min() >= 0 and counts.max() <= _LARGEST and ids.min() >= 0 and ids.max() < table.shape[1]
    ):
        bad = ~((counts >= 0) & (counts <= _LARGEST) & (ids >= 0) & (ids < table.shape[1]))
        entry = entries[np.argmax(bad)]
        document = int(np.searchsorted(table.indptr, entry, side="right")) - 1
        word, count = table.indices[entry], table.data[entry]
        if not 0 <= word < table.shape[1]:
            raise ValueError(f"document {document}: word id {word} is out of range 0 … {table.shape[1] - 1}")
        raise ValueError(
            f"document {document}: the count of word {word} is {count}; counts must be finite (at most {_LARGEST:g}) "
            "and not negative"
        )
    if counts.dtype not in (np.float32, np.float64):
        counts = counts.astype(np.float64 if counts.dtype.kind == "f" else np.float32)
    return ids, counts


def _from_triples(coo):
    """CSR that keeps duplicates apart: scipy would add them in the dtype of the counts, and before they are checked."""
    order = np.argsort(coo.row, kind="stable")
    indptr = np.concatenate([[0], np.cumsum(np.bincount(coo.row, minlength=coo.shape[0]))])
    return scipy.sparse.csr_array((coo.data[order], coo.col[order], indptr), coo.shape)


def _from_lists(X: Sequence, num_words: int | None) -> scipy.sparse.csr_array:
    ids, counts = [], []
    for document, pair in enumerate(X):
        pairs = isinstance(pair, list) and bool(pair) and all(isinstance(p, tuple) and len(p) == 2 for p in pair)
        if not isinstance(pair, list | tuple) or len(pair) != 2 or pairs:
            what = "a list of (id, count) pairs" if pairs else f"a {type(pair).__name__} of another form"
            raise ValueError(f"document {document}: expected (word ids, counts), two lists of one length; got {what}")
        words, values = np.asarray(pair[0]), np.asarray(pair[1])
        if words.size == 0 and values.size == 0:
            words, values = np.zeros(0, np.int64), np.zeros(0)
        if words.ndim != 1 or words.shape != values.shape:
            raise ValueError(
                f"document {document}: word ids and counts must be two lists of one length, "
                f"got shapes {words.shape} and {values.shape}"
            )
        if not np.issubdtype(words.dtype, np.integer):
            raise ValueError(f"document {document}: word ids must be whole numbers, got {words.dtype}")
        if values.dtype.kind not in "buif":
            raise ValueError(f"document {document}: counts must be real numbers, got {values.dtype}")
        if words.size and (words.min() < 0 or (num_words is not None and words.max() >= num_words)):
            wrong = words.min() if words.min() < 0 else words.max()
            allowed = "not negative" if num_words is None else f"in 0 … {num_words - 1}"
            raise ValueError(f"document {document}: word id {wrong} is out of range; ids must be {allowed}")
        ids.append(words)
        counts.append(values)
    if not ids:
        raise ValueError("there is no document to pack")
    indptr = np.concatenate([[0], np.cumsum([words.size for words in ids])])
    words = np.concatenate(ids)
    if num_words is None:
        num_words = int(words.max()) + 1 if words.size else 1
    return scipy.sparse.csr_array((np.concatenate(counts), words, indptr), shape=(len(ids), num_words))


def pack_rows(table: Any, rows: np.ndarray, layout: Layout) -> Batch:
    """Some documents in a given layout; ``rows`` [B] are trusted, the entries are checked.

    Args:
      table: Anything with ``indptr``, ``indices``, ``data`` and ``shape`` as scipy's CSR has them; memory-mapped arrays
        will do, only the entries of the rows are read.
      rows: Which documents.
      layout: The shape; see :class:`Layout` for what does not fit.

    Returns:
      A :class:`Batch`. Costs the entries of the rows and a look at a byte for each word there is.
    """
    lengths = np.asarray(_lengths(table, rows))
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids, counts = _check_entries(table, entries(table, rows))
    ids = ids.astype(np.int64)  # as NumPy wants them: with others it takes twice as long
    present = np.zeros(table.shape[1], bool)
    present[ids] = True
    used = np.flatnonzero(present)
    position = np.empty(table.shape[1], np.int32)  # of a word in the batch's own vocabulary, where it has one
    position[used] = np.arange(used.size, dtype=np.int32)
    tiles = _tiles(max(layout.longest, int(lengths.max())))
    # A tile is cut from the counts at the document's last words, and its rest from whatever comes then.
    room = max(_room(layout.num_entries, ids.size + TILE), tiles[-1])
    words, padded = np.zeros(room, np.int32), np.zeros(room, counts.dtype)
    words[: ids.size], padded[: ids.size] = position[ids], counts
    vocabulary = np.zeros(_room(layout.num_used, used.size), np.int32)
    vocabulary[: used.size] = used
    return Batch(
        vocabulary=vocabulary,
        num_used=np.int32(used.size),
        words=words,
        counts=padded,
        offsets=offsets.astype(np.int32),
        longest=np.empty((sum(tiles), 0), np.float32),
        columns=np.empty((table.shape[1], 0), np.float32),
    )


def _tiles(longest):
    """8, 16, 32, … rows, until together they have room for so many words."""
    tiles = [TILE]
    while sum(tiles) < longest:
        tiles.append(2 * tiles[-1])
    return tuple(tiles)


def _lengths(table, rows):
    return table.indptr[rows + 1] - table.indptr[rows]


def _room(planned, needed):
    """The planned size, or if that is too small the next power of two."""
    return planned if needed <= planned else _power_of_two(needed)


def _power_of_two(n):
    """n rounded up, so that batches of similar size have the same shape."""
    return 1 << max(n - 1, 0).bit_length()
