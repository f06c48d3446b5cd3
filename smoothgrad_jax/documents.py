"""Bags of words as arrays of fixed shape.

Documents are ragged; compiled programs are not. A :class:`Batch` keeps the words of all its documents end to end, and
groups the documents by length: the program walks over a group and cuts a tile of the group's width at each document.
The number of documents in a group is data and not shape, so that minibatches of one size share one compiled program.

| name        | shape     | meaning                                                                       |
|-------------|-----------|-------------------------------------------------------------------------------|
| ``words``   | [N]       | word ids of the documents, one after the other; N is rounded up               |
| ``counts``  | [N]       | how often; 0 beyond the last document                                         |
| ``offsets`` | [B + 1]   | document at position i has the entries offsets[i] … offsets[i + 1] − 1        |
| ``rows``    | [B]       | position i holds the row rows[i] of the input                                 |
| ``groups``  |           | :class:`Group`: positions first … last − 1, tiles of the width of ``span``    |

The tile widths come from one fixed ladder (16, 32, 48, 64, 96, 128, 192, …). A document therefore gets the same tile,
and the same arithmetic, whatever else is in the batch.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse


class Group(NamedTuple):
    """Documents of similar length: at most ``len(span)`` different words each."""

    span: np.ndarray
    first: np.ndarray
    last: np.ndarray


class Batch(NamedTuple):
    """B documents over a vocabulary of ``num_words``; made by :func:`pack`."""

    words: np.ndarray
    counts: np.ndarray
    offsets: np.ndarray
    rows: np.ndarray
    groups: tuple[Group, ...]
    num_words: np.ndarray

    @property
    def size(self) -> int:
        """B, the number of documents, empty ones included."""
        return self.rows.shape[-1]


def pack(X: Any, rows: Any = None, *, num_words: int | None = None) -> Batch:
    """Pack documents for the compiled steps.

    Args:
      X: Documents × words: a scipy sparse array or matrix of any format, a dense array, or a list with
        ``(word ids, counts)`` for each document. Counts may be fractional, not negative. Documents may be empty.
      rows: Which documents, in which order, by default all: ``[B]`` indices; or ``[T, B]`` for a stack of T minibatches
        of one shape, as :func:`smoothgrad_jax.run` and :func:`smoothgrad_jax.sweep` take them.
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
    table = csr(X, num_words)
    if rows is None:
        rows = np.arange(table.shape[0])
    rows = np.asarray(rows)
    if rows.ndim not in (1, 2) or rows.size == 0 or not np.issubdtype(rows.dtype, np.integer):
        raise ValueError(f"rows must be whole numbers of shape [B] or [T, B]; got {rows.dtype} of shape {rows.shape}")
    if rows.min() < 0 or rows.max() >= table.shape[0]:
        raise ValueError(f"rows must lie in 0 … {table.shape[0] - 1}; got {rows.min()} … {rows.max()}")

    lengths = np.diff(table.indptr)[rows]
    widths = _widths(lengths)
    room = _round_up(int(lengths.sum(-1).max()) + (widths[-1] if widths else 1))
    batches = [_pack(table, each, widths, room) for each in np.atleast_2d(rows)]
    return batches[0] if rows.ndim == 1 else _stack(batches)


def csr(X: Any, num_words: int | None = None) -> scipy.sparse.csr_array:
    """Checked documents × words as CSR without explicit zeros; ``X`` as in :func:`pack`, which is not changed."""
    if scipy.sparse.issparse(X):
        table = scipy.sparse.csr_array(X)
        if table.ndim != 2:
            raise ValueError(f"expected documents × words, got a sparse array of shape {table.shape}")
        if not table.has_canonical_format:
            table = table.copy()
            table.sum_duplicates()
    elif isinstance(X, list | tuple):
        table = _from_lists(X, num_words)
    else:
        dense = np.asarray(X)
        if dense.ndim != 2 or dense.dtype.kind not in "buif":
            raise ValueError(f"expected documents × words, got an array of {dense.dtype} of shape {dense.shape}")
        table = scipy.sparse.csr_array(dense)
    if table.shape[0] == 0:
        raise ValueError("there is no document to pack")
    if num_words is not None and table.shape[1] != num_words:
        raise ValueError(f"num_words is {num_words}, but the documents have {table.shape[1]} columns")
    if table.dtype.kind not in "buif":
        raise ValueError(f"counts must be real numbers, got {table.dtype}")
    bad = ~(np.isfinite(table.data) & (table.data >= 0))
    if bad.any():
        where = int(np.argmax(bad))
        document = int(np.searchsorted(table.indptr, where, side="right")) - 1
        raise ValueError(
            f"document {document}: the count of word {table.indices[where]} is {table.data[where]}; "
            "counts must be finite and not negative"
        )
    if (table.data == 0).any():
        table = table.copy()
        table.eliminate_zeros()
    return table if table.dtype.kind == "f" else table.astype(np.float32)


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
    held = np.bincount(entry[first], weights=weight[first], minlength=table.nnz)

    def half(data):
        out = scipy.sparse.csr_array((data.astype(table.dtype), table.indices, table.indptr), table.shape, copy=True)
        out.eliminate_zeros()
        return out

    # The rest of a fractional count may come out as 1e-17 instead of 0.
    rest = table.data - held
    return half(held), half(np.where(rest > 1e-6 * table.data, rest, 0))


def _from_lists(X: Sequence, num_words: int | None) -> scipy.sparse.csr_array:
    ids, counts = [], []
    for document, pair in enumerate(X):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise ValueError(f"document {document}: expected a pair (word ids, counts), got {type(pair).__name__}")
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
    table = scipy.sparse.csr_array((np.concatenate(counts), words, indptr), shape=(len(ids), num_words))
    table.sum_duplicates()
    return table


def _pack(table, rows, widths, room):
    lengths = np.diff(table.indptr)[rows]
    # Sorted by tile width, else in the order given; documents without words come first and belong to no group.
    group = np.searchsorted(widths, lengths) if widths else np.zeros(rows.size, np.int64)
    group[lengths == 0] = -1
    order = np.argsort(group, kind="stable")
    lengths, group = lengths[order], group[order]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    taken = np.arange(offsets[-1]) + np.repeat(table.indptr[rows[order]] - offsets[:-1], lengths)
    words, counts = np.zeros(room, np.int32), np.zeros(room, table.dtype)
    words[: taken.size], counts[: taken.size] = table.indices[taken], table.data[taken]
    bounds = np.searchsorted(group, np.arange(len(widths) + 1)).astype(np.int32)
    return Batch(
        words=words,
        counts=counts,
        offsets=offsets.astype(np.int32),
        rows=order.astype(np.int32),
        groups=tuple(
            Group(np.arange(width, dtype=np.int32), first, last)
            for width, first, last in zip(widths, bounds[:-1], bounds[1:], strict=True)
        ),
        num_words=np.int32(table.shape[1]),
    )


def _stack(batches):
    def stack(*fields):
        return tuple(map(stack, *fields)) if type(fields[0]) is tuple else _stack_one(fields)

    return Batch(*map(stack, *batches))


def _stack_one(fields):
    if isinstance(fields[0], Group):
        return Group(*(np.stack(each) for each in zip(*fields, strict=True)))
    return np.stack(fields)


def _widths(lengths):
    """The rungs of 16, 32, 48, 64, 96, 128, 192, … that some document needs."""
    longest = int(lengths.max(initial=0))
    ladder = [16]
    while ladder[-1] < longest:
        width = ladder[-1]
        ladder.append(width + 16 if width < 64 else width * 3 // 2 if width & (width - 1) == 0 else width * 4 // 3)
    needed = np.searchsorted(ladder, lengths[lengths > 0])
    return [ladder[i] for i in np.unique(needed)]


def _round_up(n):
    """n with three significant bits, so that batches of similar size have the same shape."""
    unit = 1 << max(n.bit_length() - 4, 0)
    return -(-n // unit) * unit
