"""Blocks of documents from the entries of count files, in bounded memory.

- The counts of duplicate pairs of document and word are added, zero counts are dropped, empty documents are kept.
- Triplets (document, word, count) that are not in the order of documents are sorted in temporary files, with sixteen
  bytes per entry. Whether to sort is decided from the first hundred thousand triplets; a file that is unsorted later
  raises an error that names ``sort=True``.
- Memory is bounded by a few blocks of a million entries, whatever the size of the file and its header.
  Hence the limits below: on the distinct words of one document, and on empty documents and words per entry.
"""

import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import scipy.sparse

from smoothgrad_jax.data.batches import MAX_COUNT
from smoothgrad_jax.data.errors import corpus_error, plural

BLOCK_ENTRIES = 2**20  # entries, or documents, per block
MAX_DISTINCT = 2**22  # distinct words of one document
MAX_WORDS = 2**31 - 1  # word ids are int32

_INSPECTED = 2**17  # triplets that are inspected for their order

Triplets = Sequence[npt.NDArray]  # documents and words, from 0, and counts


class Block(NamedTuple):
    """Some documents as counts, in CSR form."""

    indptr: npt.NDArray  # int64 [documents + 1]; document d has the entries indptr[d] … indptr[d + 1] − 1
    indices: npt.NDArray  # int32; word ids from 0, distinct and increasing within a document
    data: npt.NDArray  # float32; counts, positive and finite; fractions are allowed


class Header(NamedTuple):
    """Sizes that a file declares."""

    num_docs: int
    num_words: int
    num_entries: int
    columns: int = 3  # numbers per line of triplets: 2 without counts
    lines: int = 0  # of the header


def max_words(num_entries: int) -> int:
    """Return the largest plausible V for a number of entries: arrays have V elements, and a header may be wrong."""
    return 2**24 + 100 * num_entries


def check_header(path: Path, header: Header) -> Header:
    """Return the header if its numbers are plausible for a corpus."""
    if header.num_words > MAX_WORDS or header.num_words > max_words(header.num_entries):
        declared = f"{plural(header.num_words, 'word')} for {plural(header.num_entries, 'entry')}"
    elif header.num_docs > 2**20 + 100 * header.num_entries:
        declared = f"{plural(header.num_docs, 'document')} for {plural(header.num_entries, 'entry')}"
    else:
        return header
    raise corpus_error(path, f"the header declares {declared}, which is not plausible", header.lines or None)


def triplet_blocks(
    path: Path, header: Header, read: Callable[[bool], Iterator[Triplets]], sort: bool
) -> Iterator[Block]:
    """Return blocks from all triplets, which ``read(check_order)`` returns.

    The triplets are sorted if ``sort`` is set, or if the first of them are not in order.
    """
    if sort or not _is_in_order(read(False)):
        return _assemble(path, _sort(path, read(False)), header)
    return _assemble(path, read(True), header)


def block_of(path: Path, indptr: npt.NDArray, words: npt.NDArray, counts: npt.NDArray) -> Block:
    """Return a block, with the words of a document sorted, duplicates added and zeros dropped."""
    indptr, data = np.asarray(indptr, np.int64), np.asarray(counts, np.float32)
    indices = np.asarray(words, np.int32)
    increasing = np.diff(indices, append=0) > 0
    increasing[indptr[1:][np.diff(indptr) > 0] - 1] = True  # the next word belongs to another document
    if not increasing.all() or not (data > 0).all():
        shape = (len(indptr) - 1, int(indices.max()) + 1)
        matrix = scipy.sparse.csr_array((np.array(counts, np.float64), indices.copy(), indptr), shape=shape)
        matrix.sum_duplicates()
        if matrix.data.max() > MAX_COUNT:
            raise corpus_error(path, f"expected counts of at most {MAX_COUNT:.0e} for a word of a document, got more")
        matrix.data = matrix.data.astype(np.float32)
        matrix.eliminate_zeros()
        indptr, indices = np.asarray(matrix.indptr, np.int64), np.asarray(matrix.indices, np.int32)
        data = np.asarray(matrix.data, np.float32)
    if len(data) > MAX_DISTINCT and np.diff(indptr).max() > MAX_DISTINCT:
        raise corpus_error(path, f"expected at most {MAX_DISTINCT:,} distinct words in a document, got more")
    return Block(indptr, indices, data)


def block_ranges(indptr: npt.NDArray) -> Iterator[tuple[npt.NDArray, slice]]:
    """Yield for each block of CSR arrays its offsets from 0, and the positions of its entries."""
    first = 0
    while first < len(indptr) - 1:
        last = int(np.searchsorted(indptr, indptr[first] + BLOCK_ENTRIES, side="right")) - 1
        last = min(max(last, first + 1), first + BLOCK_ENTRIES, len(indptr) - 1)
        yield np.array(indptr[first : last + 1]) - indptr[first], slice(int(indptr[first]), int(indptr[last]))
        first = last


def is_sorted(numbers: npt.NDArray, latest: float) -> bool:
    """Return whether the sequence of ``latest`` and ``numbers`` does not decrease."""
    return not len(numbers) or bool(numbers[0] >= latest and not (numbers[1:] < numbers[:-1]).any())


def _is_in_order(triplets: Iterator[Triplets]) -> bool:
    """Return whether the first triplets are sorted by document, and not by word as well."""
    seen, latest, word, words_in_order, docs_differ = 0, -1, -1, True, False
    for docs, words, _ in triplets:
        if not is_sorted(docs, latest):
            return False
        words_in_order = words_in_order and is_sorted(words, word)
        docs_differ = docs_differ or docs[-1] != docs[0] or latest not in (-1, docs[0])
        seen, latest, word = seen + len(docs), docs[-1], words[-1]
        if seen >= _INSPECTED:
            return not (words_in_order and docs_differ)
    return True


def _sort(path: Path, triplets: Iterator[Triplets]) -> Iterator[Triplets]:
    """Sort triplets by document: write sorted runs to temporary files, then merge the runs."""
    try:
        with tempfile.TemporaryFile() as docs, tempfile.TemporaryFile() as words, tempfile.TemporaryFile() as counts:
            files, ends = ((docs, np.int64), (words, np.int32), (counts, np.float32)), [0]
            for run in _gather(triplets, 2 * BLOCK_ENTRIES):
                order = np.lexsort(run[1::-1])
                for (file, dtype), column in zip(files, run, strict=True):
                    file.write(column[order].astype(dtype).tobytes())
                ends.append(ends[-1] + len(order))
            if ends[-1]:
                for file, _ in files:
                    file.flush()
                columns = [np.memmap(file, dtype, "r", shape=(ends[-1],)) for file, dtype in files]
                yield from _merge(columns, ends)
    except OSError as error:
        raise corpus_error(path, f"cannot be sorted in {tempfile.gettempdir()}: {error.strerror}") from None


def _merge(columns: Sequence[npt.NDArray], ends: list[int]) -> Iterator[Triplets]:
    """Merge sorted runs, which are the entries ends[i] … ends[i + 1] − 1, in bounded memory."""
    docs = columns[0]
    runs = [[first, last] for first, last in itertools.pairwise(ends)]
    while runs:
        quota = max(1, BLOCK_ENTRIES // len(runs))
        # No run has more entries than its quota below the limit, unless a single document has.
        low = min(docs[first] for first, _ in runs)
        limit = min((docs[first + quota] for first, last in runs if first + quota < last), default=None)
        alone = limit is not None and limit == low
        parts = []
        for run in runs:
            first, last = run
            if limit is not None:
                last = first + int(np.searchsorted(docs[first:last], limit, side="right" if alone else "left"))
            parts.append((first, last))
            run[0] = last
        if alone:
            for first, last in parts:
                for start in range(first, last, BLOCK_ENTRIES):
                    part = slice(start, min(start + BLOCK_ENTRIES, last))
                    yield [np.array(column[part]) for column in columns]
        else:
            joined = [np.concatenate([column[first:last] for first, last in parts]) for column in columns]
            order = np.argsort(joined[0], kind="stable")
            yield [column[order] for column in joined]
        runs = [run for run in runs if run[0] < run[1]]


def _gather(triplets: Iterator[Triplets], number: int) -> Iterator[Triplets]:
    """Concatenate triplets to groups of at least ``number``, except for the last group."""
    kept: list[Triplets] = []
    length = 0
    for part in triplets:
        kept.append(part)
        length += len(part[0])
        if length >= number:
            yield [np.concatenate(column) for column in zip(*kept, strict=True)]
            kept, length = [], 0
    if kept:
        yield [np.concatenate(column) for column in zip(*kept, strict=True)]


def _assemble(path: Path, triplets: Iterator[Triplets], header: Header) -> Iterator[Block]:
    """Make blocks of complete documents from triplets that are sorted by document."""
    following, seen, empty = 0, 0, 0  # the next document to yield; entries read; documents without entries

    def documents(stop: int, docs: npt.NDArray, words: npt.NDArray, counts: npt.NDArray) -> Iterator[Block]:
        nonlocal following, empty
        present = int(np.count_nonzero(np.diff(docs, prepend=-1)))
        empty += stop - following - present
        if empty > 2**20 + 100 * seen:
            got = f"at least {plural(empty, 'document')} without words after {plural(seen, 'entry')}"
            raise corpus_error(path, f"got {got}, which is not plausible for a corpus")
        while following < stop:
            last = min(stop, following + BLOCK_ENTRIES)
            ends = np.searchsorted(docs, np.arange(following, last + 1))
            inside = slice(ends[0], ends[-1])
            yield block_of(path, ends - ends[0], words[inside], counts[inside])
            following = last

    kept: Triplets = np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0)
    max_entries = BLOCK_ENTRIES
    for part in _gather(triplets, BLOCK_ENTRIES // 2):
        seen += len(part[0])
        kept = [np.concatenate(pair) for pair in zip(kept, part, strict=True)]
        docs, words, counts = kept
        cut = int(np.searchsorted(docs, docs[-1]))
        if cut:
            yield from documents(int(docs[-1]), docs[:cut], words[:cut], counts[:cut])
            kept, max_entries = (docs[cut:], words[cut:], counts[cut:]), BLOCK_ENTRIES
        elif len(docs) > max_entries:
            # All entries belong to one document: add duplicates, and check the number of distinct words.
            block = block_of(path, np.array([0, len(docs)]), words, counts)
            kept = (docs[: len(block.data)], block.indices.astype(np.int64), block.data.astype(np.float64))
            max_entries = 2 * len(block.data) + BLOCK_ENTRIES
    yield from documents(header.num_docs, *kept)
