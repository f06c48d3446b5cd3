"""Bags of words as arrays of fixed shape.

Documents differ in length; a compiled program has fixed shapes. A :class:`Batch` stores the words of its documents one
document after the other, and the compiled program iterates over them. The numbers of documents and words are data; the
shapes are only capacities. The minibatches of one size that :func:`pack` makes from one corpus therefore use one
compiled program, or a few, if their number of entries or of distinct words passes a power of two.

The program reads a document in tiles of 8, 16, 32, … words, each of which is used or not. Any length is such a sum, up
to 7 words of padding, so that the cost of a document depends on its own length only.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import scipy.sparse

TILE = 8  # words in the smallest tile; XLA's product of a matrix and a vector processes eight rows at a time

_MAX_TOKENS = 1 << 24  # per document for which a batch has a capacity; sampling one more token would take seconds
_MAX_SPLIT = 10**9  # the largest count that is split into tokens, one element of an array per token
MAX_COUNT = 1e30  # the sum of a document's counts must be a float32


class CSRArrays(Protocol):
    """Documents × words in compressed sparse row form: a scipy CSR array, or a :class:`smoothgrad_jax.Corpus`."""

    @property
    def indptr(self) -> npt.NDArray: ...
    @property
    def indices(self) -> npt.NDArray: ...
    @property
    def data(self) -> npt.NDArray: ...
    @property
    def shape(self) -> tuple[int, int]: ...


# Types that `pack` accepts; a sequence has (word ids, counts) per document.
Pair = tuple[npt.ArrayLike, npt.ArrayLike]
DocumentsLike = CSRArrays | scipy.sparse.sparray | scipy.sparse.spmatrix | npt.NDArray | Sequence[Pair]


class Batch(NamedTuple):
    """B documents over V words; made by :func:`pack`.

    Values per word are computed once per entry of ``vocabulary``: a minibatch uses only a few thousand of the V words.

    Attributes:
      vocabulary: [U] ids of the distinct words in the batch, increasing; padded with zeros.
      num_used: The number of these words, without the padding.
      words: [N] the words of the documents, as positions in ``vocabulary``, one document after the other.
      counts: [N] the count of each of these words; 0 after the last document.
      offsets: [B + 1] document d has the entries offsets[d] … offsets[d + 1] − 1.
      documents: [B] the numbers of the documents in the corpus, modulo 2³²; other numbers for the second and later
        copies of a document. A local step that samples depends on them.
      longest: [M, 0] an empty array whose shape is the capacity for words of one document, all tiles together.
      tokens: [T, 0] an empty array whose shape is the capacity for tokens of one document; a fractional count c is ⌈c⌉
        tokens.
      columns: [V, 0] an empty array whose shape is V, so that V is known when a program is compiled.
    """

    vocabulary: npt.NDArray
    num_used: npt.NDArray
    words: npt.NDArray
    counts: npt.NDArray
    offsets: npt.NDArray
    documents: npt.NDArray
    longest: npt.NDArray
    tokens: npt.NDArray
    columns: npt.NDArray

    @property
    def num_words(self) -> int:
        """V, the size of the vocabulary of the corpus."""
        return self.columns.shape[-2]

    @property
    def size(self) -> int:
        """B, the number of documents, empty ones included."""
        return self.offsets.shape[-1] - 1

    @property
    def tiles(self) -> tuple[int, ...]:
        """The sizes of the tiles that hold a document, smallest first."""
        return _tile_sizes(self.longest.shape[-2])


class Layout(NamedTuple):
    """The shape of all minibatches of a corpus; :meth:`smoothgrad_jax.Corpus.layout` chooses one.

    A minibatch that exceeds a capacity is packed into larger arrays, and the program is compiled once more for it.
    """

    longest: int  # distinct words of the longest document
    num_entries: int  # N, the capacity for the entries of all documents of a minibatch
    num_used: int  # U, the capacity for the distinct words of a minibatch
    num_tokens: int  # T, the capacity for the tokens of one document


def pack(X: DocumentsLike, rows: npt.ArrayLike | None = None, *, num_words: int | None = None) -> Batch:
    """Pack documents for the compiled steps. A form other than CSR is converted by every call.

    Args:
      X: Documents × words: a scipy sparse array or matrix of any format, a dense array, or a list with
        ``(word ids, counts)`` for each document. Counts may be fractional, but not negative. Documents may be empty.
      rows: Indices [B] of documents, by default all; or [T, B] for a stack of T minibatches of one shape, as
        :func:`smoothgrad_jax.run` and :func:`smoothgrad_jax.sweep` accept them. Pass the corpus and ``rows`` rather
        than a part of the corpus, so that all batches have one shape.
      num_words: The size of the vocabulary, for a list; by default the largest id plus one.

    Returns:
      A :class:`Batch` of NumPy arrays, with a leading axis T if ``rows`` has one.

    Raises:
      ValueError: If a count is negative, NaN or infinite, or an id is out of range; the message names the document.

    Example:
      >>> batch = pack([([0, 2], [1, 3]), ([], []), ([1], [2])], num_words=3)
      >>> batch.size
      3
    """
    matrix = as_csr(X, num_words)
    chosen = check_rows(np.arange(matrix.shape[0]) if rows is None else rows, matrix.shape[0])
    lengths = _lengths(matrix, chosen)
    layout = round_layout(int(np.diff(matrix.indptr).max()), int(lengths.sum(-1).max()))
    batches = [pack_rows(matrix, each, layout) for each in np.atleast_2d(chosen)]
    capacity = next_power_of_two(max(batch.vocabulary.size for batch in batches))
    batches = [each._replace(vocabulary=np.resize(each.vocabulary, capacity)) for each in batches]
    for each in batches:
        each.vocabulary[int(each.num_used) :] = 0
    tokens = max((batch.tokens for batch in batches), key=len)
    batches = [each._replace(tokens=tokens) for each in batches]
    return batches[0] if chosen.ndim == 1 else Batch(*map(np.stack, zip(*batches, strict=True)))


def round_layout(longest: int, num_entries: int, num_used: int = 0) -> Layout:
    """Return a layout whose capacities are rounded up to powers of two, so that batches of similar size have it."""
    capacity = next_power_of_two(num_entries + TILE)
    return Layout(longest, capacity, min(next_power_of_two(num_used), capacity), 0)


def check_rows(rows: npt.ArrayLike, num_docs: int) -> npt.NDArray[np.int64]:
    """Return row indices as int64 [B] or [T, B], or raise a ``ValueError``."""
    rows = np.asarray(rows)
    if rows.ndim not in (1, 2) or rows.size == 0 or not np.issubdtype(rows.dtype, np.integer):
        raise ValueError(f"rows must be integers of shape [B] or [T, B]; got {rows.dtype} of shape {rows.shape}")
    if rows.min() < 0 or rows.max() >= num_docs:
        raise ValueError(f"rows must lie in 0 … {num_docs - 1}; got {rows.min()} … {rows.max()}")
    return rows.astype(np.int64)  # a smaller type would overflow in rows + 1


def canonical_csr(X: DocumentsLike) -> scipy.sparse.csr_array:
    """Return a checked copy of X in CSR form, without duplicate entries and explicit zeros."""
    matrix = as_csr(X)
    _, counts = check_entries(matrix, slice(0, len(matrix.data)))
    copy = scipy.sparse.csr_array((counts.copy(), matrix.indices.copy(), matrix.indptr.copy()), matrix.shape)
    copy.sum_duplicates()
    copy.eliminate_zeros()
    return copy


def split_tokens(X: DocumentsLike, rng: np.random.Generator) -> tuple[scipy.sparse.csr_array, scipy.sparse.csr_array]:
    """Split the tokens of every document into two random halves; the first half is the larger one if they differ.

    A fractional count c is ⌈c⌉ tokens, of which the last one has a weight below 1. The sum of the two matrices is X.
    """
    matrix = canonical_csr(X)
    # One element per token: the entry of the matrix that it belongs to, and its weight.
    if matrix.nnz and matrix.data.max() > _MAX_SPLIT:
        largest = int(np.argmax(matrix.data))
        place = int(np.searchsorted(matrix.indptr, largest, side="right")) - 1
        count = f"the count of word {matrix.indices[largest]} is {matrix.data[largest]:g}"
        raise ValueError(f"document {place}: {count}; to be split, a count must be at most {_MAX_SPLIT:,}")
    pieces = np.ceil(matrix.data).astype(np.int64)
    entry = np.repeat(np.arange(matrix.nnz), pieces)
    weight = np.ones(entry.size)
    weight[np.cumsum(pieces) - 1] = matrix.data - (pieces - 1)
    document = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))[entry]
    # Shuffle the tokens within each document and cut each document in the middle.
    order = np.lexsort((rng.random(entry.size), document))
    tokens = np.bincount(document, minlength=matrix.shape[0])
    position = np.arange(entry.size) - np.repeat(np.cumsum(tokens) - tokens, tokens)
    first = order[position < np.repeat((tokens + 1) // 2, tokens)]
    observed = np.bincount(entry[first], weights=weight[first], minlength=matrix.nnz)

    def half(data: npt.NDArray) -> scipy.sparse.csr_array:
        result = matrix.copy()
        result.data = data.astype(matrix.dtype)
        result.eliminate_zeros()
        return result

    # The remainder of a fractional count can be a rounding error instead of 0.
    rest = matrix.data - observed
    return half(observed), half(np.where(rest > 1e-6 * matrix.data, rest, 0))


def as_csr(X: DocumentsLike, num_words: int | None = None) -> scipy.sparse.csr_array:
    """Return X as a scipy CSR array or matrix, without a copy if it is one. Its values are not checked."""
    given: Any = X
    if scipy.sparse.issparse(X):
        if given.ndim != 2:
            raise ValueError(f"expected documents × words, got a sparse array of shape {given.shape}")
        matrix = given if given.format == "csr" else _from_coo(given.tocoo())
    elif all(hasattr(given, name) for name in ("indptr", "indices", "data", "shape")):
        first, last = given.indptr[0], given.indptr[-1]  # a part of a corpus does not begin with entry 0
        arrays = given.data[first:last], given.indices[first:last], np.asarray(given.indptr) - first
        matrix = scipy.sparse.csr_array(arrays, given.shape)
    elif isinstance(given, list | tuple):
        matrix = _from_lists(given, num_words)
    else:
        dense = np.asarray(given)
        if dense.ndim != 2 or dense.dtype.kind not in "buif":
            raise ValueError(f"expected documents × words, got an array of {dense.dtype} of shape {dense.shape}")
        matrix = scipy.sparse.csr_array(dense if dense.dtype.kind != "f" or dense.itemsize > 2 else dense.astype("f4"))
    if matrix.shape[0] == 0:
        raise ValueError("there is no document to pack")
    if num_words is not None and matrix.shape[1] != num_words:
        raise ValueError(f"num_words is {num_words}, but the documents have {matrix.shape[1]} columns")
    if matrix.dtype.kind not in "buif":
        raise ValueError(f"counts must be real numbers, got {matrix.dtype}")
    return matrix


def entry_positions(matrix: CSRArrays, rows: npt.NDArray) -> npt.NDArray:
    """Return the positions of the entries of some rows in ``indices`` and ``data``, one row after the other."""
    lengths = _lengths(matrix, rows)
    first = np.cumsum(lengths) - lengths
    return np.arange(lengths.sum()) + np.repeat(matrix.indptr[rows] - first, lengths)


def check_entries(matrix: CSRArrays, positions: npt.NDArray | slice) -> tuple[npt.NDArray, npt.NDArray]:
    """Return the word ids and the counts of some entries, the counts as float32 or float64.

    Raises:
      ValueError: If a count is negative, NaN or too large, or an id is out of range; the message names the document.
    """
    if isinstance(positions, slice):
        counts, ids = matrix.data[positions], matrix.indices[positions]
    else:  # faster than indexing
        counts, ids = np.asarray(matrix.data).take(positions), np.asarray(matrix.indices).take(positions)
    num_words = matrix.shape[1]
    # NaN fails every comparison, and the minimum of an array with NaN is NaN.
    valid = not counts.size or (counts.min() >= 0 and counts.max() <= MAX_COUNT)
    if not valid or (ids.size and not 0 <= ids.min() <= ids.max() < num_words):
        bad = int(np.argmax(~((counts >= 0) & (counts <= MAX_COUNT) & (ids >= 0) & (ids < num_words))))
        position = int(positions.start) + bad if isinstance(positions, slice) else positions[bad]
        document = int(np.searchsorted(matrix.indptr, position, side="right")) - 1
        word, count = ids[bad], counts[bad]
        if not 0 <= word < num_words:
            raise ValueError(f"document {document}: word id {word} is out of range 0 … {num_words - 1}")
        expected = f"counts must be finite (at most {MAX_COUNT:g}) and not negative"
        raise ValueError(f"document {document}: the count of word {word} is {count}; {expected}")
    if counts.dtype not in (np.float32, np.float64):
        counts = counts.astype(np.float64 if counts.dtype.kind == "f" else np.float32)
    return ids, counts


def pack_rows(matrix: CSRArrays, rows: npt.NDArray[np.int64], layout: Layout) -> Batch:
    """Pack some documents in a given layout. Their entries are checked, the rows are not.

    The arrays of the matrix may be memory-mapped: only the entries of the rows are read.
    """
    lengths = np.asarray(_lengths(matrix, rows))
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids, counts = check_entries(matrix, entry_positions(matrix, rows))
    ids = ids.astype(np.int64)  # NumPy converts every other type on each use as an index
    present = np.zeros(matrix.shape[1], bool)
    present[ids] = True
    used = np.flatnonzero(present)
    position = np.empty(matrix.shape[1], np.int32)  # of a used word in the batch's own vocabulary
    position[used] = np.arange(used.size, dtype=np.int32)
    tiles = _tile_sizes(max(layout.longest, int(lengths.max())))
    # The last tile of a document is read in full, so that it reaches beyond the document's entries.
    capacity = max(_capacity(layout.num_entries, ids.size + TILE), tiles[-1])
    words, padded = np.zeros(capacity, np.int32), np.zeros(capacity, counts.dtype)
    words[: ids.size], padded[: ids.size] = position.take(ids), counts
    vocabulary = np.zeros(_capacity(layout.num_used, used.size), np.int32)
    vocabulary[: used.size] = used
    return Batch(
        vocabulary=vocabulary,
        num_used=np.array(used.size, np.int32),
        words=words,
        counts=padded,
        offsets=offsets.astype(np.int32),
        documents=document_numbers(rows),
        longest=np.empty((sum(tiles), 0), np.float32),
        tokens=np.empty((_token_capacity(counts, offsets, layout.num_tokens), 0), np.float32),
        columns=np.empty((matrix.shape[1], 0), np.float32),
    )


def _from_coo(coo: scipy.sparse.coo_array) -> scipy.sparse.csr_array:
    """Convert to CSR and keep duplicates: scipy would add them unchecked, in the type of the counts."""
    order = np.argsort(coo.row, kind="stable")
    indptr = np.concatenate([[0], np.cumsum(np.bincount(coo.row, minlength=coo.shape[0]))])
    return scipy.sparse.csr_array((coo.data[order], coo.col[order], indptr), coo.shape)


def _from_lists(X: Sequence[Any], num_words: int | None) -> scipy.sparse.csr_array:
    if not X:
        raise ValueError("there is no document to pack")
    pairs = [_check_document(number, document, num_words) for number, document in enumerate(X)]
    indptr = np.concatenate([[0], np.cumsum([words.size for words, _ in pairs])])
    words = np.concatenate([words for words, _ in pairs])
    if num_words is None:
        num_words = int(words.max()) + 1 if words.size else 1
    return scipy.sparse.csr_array((np.concatenate([counts for _, counts in pairs]), words, indptr), (len(X), num_words))


def _check_document(number: int, document: Any, num_words: int | None) -> tuple[npt.NDArray, npt.NDArray]:
    """Return the word ids and the counts of one document of a list."""
    pairs = isinstance(document, list) and document and all(isinstance(p, tuple) and len(p) == 2 for p in document)
    if not isinstance(document, list | tuple) or len(document) != 2 or pairs:
        got = "a list of (id, count) pairs" if pairs else f"a {type(document).__name__} of another form"
        raise ValueError(f"document {number}: expected (word ids, counts), two lists of one length; got {got}")
    words, counts = np.asarray(document[0]), np.asarray(document[1])
    if words.size == 0 and counts.size == 0:
        words, counts = np.zeros(0, np.int64), np.zeros(0)
    if words.ndim != 1 or words.shape != counts.shape:
        shapes = f"got shapes {words.shape} and {counts.shape}"
        raise ValueError(f"document {number}: word ids and counts must be two lists of one length, {shapes}")
    if not np.issubdtype(words.dtype, np.integer):
        raise ValueError(f"document {number}: word ids must be integers, got {words.dtype}")
    if counts.dtype.kind not in "buif":
        raise ValueError(f"document {number}: counts must be real numbers, got {counts.dtype}")
    if words.size and (words.min() < 0 or (num_words is not None and words.max() >= num_words)):
        word = words.min() if words.min() < 0 else words.max()
        allowed = "not negative" if num_words is None else f"in 0 … {num_words - 1}"
        raise ValueError(f"document {number}: word id {word} is out of range; ids must be {allowed}")
    return words, counts


def _tile_sizes(longest: int) -> tuple[int, ...]:
    """Return 8, 16, 32, …, until the sum is at least ``longest``."""
    tiles = [TILE]
    while sum(tiles) < longest:
        tiles.append(2 * tiles[-1])
    return tuple(tiles)


def num_tokens(counts: npt.NDArray, offsets: npt.NDArray) -> int:
    """Return the number of tokens of the longest document; a fractional count c is ⌈c⌉ tokens."""
    starts = offsets[:-1][np.diff(offsets) > 0]
    totals = np.add.reduceat(np.ceil(counts), starts) if starts.size else np.zeros(1)
    return int(min(totals.max(), 2 * _MAX_TOKENS))


def _token_capacity(counts: npt.NDArray, offsets: npt.NDArray, planned: int) -> int:
    needed = num_tokens(counts, offsets)
    return 0 if needed > _MAX_TOKENS else _capacity(max(planned, 1), needed)


def document_numbers(rows: npt.NDArray) -> npt.NDArray[np.int32]:
    """Return one number per document of a minibatch, such that copies of a document get different numbers."""
    numbers = rows.astype(np.uint32)
    ordered = np.sort(rows)
    if (ordered[1:] == ordered[:-1]).any():
        order = np.argsort(rows, kind="stable")
        first = np.searchsorted(ordered, ordered)  # the position of the first copy
        numbers[order] ^= (np.arange(rows.size) - first).astype(np.uint32) * np.uint32(0x9E3779B9)
    return numbers.view(np.int32)


def _lengths(matrix: CSRArrays, rows: npt.NDArray) -> npt.NDArray:
    return matrix.indptr[rows + 1] - matrix.indptr[rows]


def _capacity(planned: int, needed: int) -> int:
    """Return the planned capacity, or the next power of two if that is too small."""
    return planned if needed <= planned else next_power_of_two(needed)


def next_power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()
