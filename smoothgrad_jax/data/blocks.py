"""Entries of counts, as files give them, become blocks of whole documents, in bounded memory.

What is promised about counts: a document's word ids are different and increasing, counts are positive and finite. Pairs
that come twice are added, counts of zero are left out, documents without words are kept. Triplets (uci, mm, coo) that
do not come in the order of documents are sorted in temporary files, sixteen bytes an entry; this is decided by the
first hundred thousand, and a file that is out of order only later is refused with the advice to say ``sort=True``.

What is promised about memory: a few blocks of a million entries, whatever the size of the file and whatever a header
says. A header is believed only as far as the entries bear it out. Hence the limits below: the most different words of
one document, the most empty documents for the entries there are.
"""

import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse

from smoothgrad_jax.data.unpacking import plural, wrong

BLOCK = 2**20  # entries, or documents, that are gathered before they are handed out
WIDEST = 2**22  # different words of one document
MOST_WORDS = 2**31 - 1  # word ids are int32
MOST_COUNT = 1e30  # as much as a document may hold in all, in documents.py

_LOOK = 2**17  # triplets that are looked at, to see whether they come by document

Triplets = Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]  # documents and words, from 0, and counts


class Block(NamedTuple):
    """Some documents as counts, in CSR form.

    Attributes:
      indptr: int64 [documents + 1]; document d has the entries indptr[d] … indptr[d + 1] − 1.
      indices: int32; word ids from 0, different and increasing within a document.
      data: float32; counts, positive and finite. Fractions are allowed.
    """

    indptr: np.ndarray
    indices: np.ndarray
    data: np.ndarray


class Header(NamedTuple):
    """What a file says of itself. ``columns`` of a line of triplets, 2 without counts; ``lines`` before the first."""

    num_docs: int
    num_words: int
    num_entries: int
    columns: int = 3
    lines: int = 0


def most_words(num_entries: int) -> int:
    """As many words as this number of entries bears out: arrays are as long as the vocabulary, and files may lie."""
    return 2**24 + 100 * num_entries


def check_header(path: Path, header: Header) -> Header:
    """The header, if its numbers can be those of a corpus."""
    if header.num_words > MOST_WORDS or header.num_words > most_words(header.num_entries):
        what = f"{header.num_words:,} words for {plural(header.num_entries, 'entry')}"
    elif header.num_docs > 2**20 + 100 * header.num_entries:
        what = f"{header.num_docs:,} documents for {plural(header.num_entries, 'entry')}"
    else:
        return header
    raise wrong(path, f"the header declares {what}: expected numbers of a corpus", header.lines or None)


def triplet_blocks(path: Path, header: Header, read: Callable[[bool], Triplets], sort: bool) -> Iterator[Block]:
    """Blocks from triplets; ``read(ordered)`` begins to read them."""
    if sort or not _in_order(read(False)):
        return _assembled(path, _sorted(path, read(False)), header)
    return _assembled(path, read(True), header)


def block_of(path: Path, indptr: Any, words: Any, counts: Any) -> Block:
    """A Block, with words sorted, the same words added and zeros left out."""
    indptr, data = np.asarray(indptr, np.int64), np.asarray(counts, np.float32)
    indices = np.asarray(words, np.int32)
    rising = np.diff(indices, append=0) > 0
    rising[indptr[1:][np.diff(indptr) > 0] - 1] = True  # the last word of a document may be any
    if not rising.all() or not (data > 0).all():
        shape = (len(indptr) - 1, int(indices.max()) + 1)
        table = scipy.sparse.csr_array((np.array(counts, np.float64), indices.copy(), indptr), shape=shape)
        table.sum_duplicates()
        if table.data.max() > MOST_COUNT:
            raise wrong(path, f"expected counts of at most {MOST_COUNT:.0e} for a word of a document, got more")
        table.data = table.data.astype(np.float32)
        table.eliminate_zeros()
        indptr, indices, data = (
            np.asarray(a, t) for a, t in ((table.indptr, np.int64), (table.indices, np.int32), (table.data, np.float32))
        )
    if len(data) > WIDEST and np.diff(indptr).max() > WIDEST:
        raise wrong(path, f"expected at most {WIDEST:,} different words in a document, got more")
    return Block(indptr, indices, data)


def rises(numbers: np.ndarray, latest: Any) -> bool:
    """Whether numbers do not go back, neither among themselves nor behind the latest before them."""
    return not len(numbers) or (numbers[0] >= latest and not (numbers[1:] < numbers[:-1]).any())


def _in_order(triplets):
    """Whether the first triplets come by document. If they come by word as well, they are taken to come by word."""
    seen, latest, word, words_in_order, docs_differ = 0, -1, -1, True, False
    for docs, words, _ in triplets:
        if not rises(docs, latest):
            return False
        words_in_order = words_in_order and rises(words, word)
        docs_differ = docs_differ or docs[-1] != docs[0] or latest not in (-1, docs[0])
        seen, latest, word = seen + len(docs), docs[-1], words[-1]
        if seen >= _LOOK:
            return not (words_in_order and docs_differ)
    return True


def _sorted(path, triplets):
    """Triplets by document: sorted runs in temporary files, then all runs together, some documents at a time."""
    try:
        with tempfile.TemporaryFile() as docs, tempfile.TemporaryFile() as words, tempfile.TemporaryFile() as counts:
            files, ends = ((docs, np.int64), (words, np.int32), (counts, np.float32)), [0]
            for run in _gathered(triplets, 2 * BLOCK):
                order = np.lexsort(run[1::-1])
                for (file, dtype), column in zip(files, run, strict=True):
                    file.write(column[order].astype(dtype).tobytes())
                ends.append(ends[-1] + len(order))
            if ends[-1]:
                for file, _ in files:
                    file.flush()
                columns = [np.memmap(file, dtype, "r", shape=(ends[-1],)) for file, dtype in files]
                yield from _merged(columns, ends)
    except OSError as error:
        raise wrong(path, f"cannot be sorted in {tempfile.gettempdir()}: {error.strerror}") from None


def _merged(columns, ends):
    docs = columns[0]
    runs = [[first, last] for first, last in itertools.pairwise(ends)]
    while runs:
        share = max(1, BLOCK // len(runs))
        # No run has more than its share of documents before the limit, unless one document alone has.
        low = min(docs[first] for first, _ in runs)
        limit = min((docs[first + share] for first, last in runs if first + share < last), default=None)
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
                for start in range(first, last, BLOCK):
                    yield tuple(np.array(column[start : min(start + BLOCK, last)]) for column in columns)
        else:
            together = [np.concatenate([column[first:last] for first, last in parts]) for column in columns]
            order = np.argsort(together[0], kind="stable")
            yield tuple(column[order] for column in together)
        runs = [run for run in runs if run[0] < run[1]]


def _gathered(triplets, number):
    """Triplets in pieces of at least ``number``, but for the last."""
    kept, length = [], 0
    for part in triplets:
        kept.append(part)
        length += len(part[0])
        if length >= number:
            yield tuple(np.concatenate(column) for column in zip(*kept, strict=True))
            kept, length = [], 0
    if kept:
        yield tuple(np.concatenate(column) for column in zip(*kept, strict=True))


def _assembled(path, triplets, header):
    """Blocks of whole documents from triplets that come by document."""
    following, seen, empty = 0, 0, 0  # the next document to hand out; entries read; documents without any

    def documents(stop, docs, words, counts):
        nonlocal following, empty
        present = np.count_nonzero(np.diff(docs, prepend=-1))
        empty += stop - following - present
        if empty > 2**20 + 100 * seen:
            what = f"at least {empty:,} documents without words, and {seen:,} entries in the file so far"
            raise wrong(path, f"expected the documents of a corpus, got {what}")
        while following < stop:
            last = min(stop, following + BLOCK)
            ends = np.searchsorted(docs, np.arange(following, last + 1))
            inside = slice(ends[0], ends[-1])
            yield block_of(path, ends - ends[0], words[inside], counts[inside])
            following = last

    kept, most = None, BLOCK
    for part in _gathered(triplets, BLOCK // 2):
        seen += len(part[0])
        kept = part if kept is None else tuple(np.concatenate(pair) for pair in zip(kept, part, strict=True))
        docs, words, counts = kept
        cut = int(np.searchsorted(docs, docs[-1]))
        if cut:
            yield from documents(int(docs[-1]), docs[:cut], words[:cut], counts[:cut])
            kept, most = (docs[cut:], words[cut:], counts[cut:]), BLOCK
        elif len(docs) > most:
            # One document so far: the same words again and again, or more different ones than we hold.
            block = block_of(path, np.array([0, len(docs)]), words, counts)
            kept = (docs[: len(block.data)], block.indices.astype(np.int64), block.data.astype(np.float64))
            most = 2 * len(block.data) + BLOCK
    if kept is None:
        kept = (np.zeros(0, np.int64),) * 2 + (np.zeros(0),)
    yield from documents(header.num_docs, *kept)
