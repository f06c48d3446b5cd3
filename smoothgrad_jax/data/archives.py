"""A sparse matrix that ``scipy.sparse.save_npz`` wrote, as blocks of documents: csr, csc or coo, a row a document.

The arrays of the archive are read side by side, each from its beginning to its end, and are never whole in memory. csr
is documents already; coo is triplets, and so is csc, which has to be sorted.
"""

import itertools
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from smoothgrad_jax.data import blocks, unpacking
from smoothgrad_jax.data.blocks import Block, Header, block_of, check_header, rises, triplet_blocks
from smoothgrad_jax.data.unpacking import CorpusError, unpacked, wrong


def read_blocks(path: Path, sort: bool) -> Iterator[Block]:
    """The documents of an archive in order; ``sort`` sorts the triplets of coo without a look at them."""
    with _archive(path) as archive:
        layout, header = _header(path, archive)
        if layout == "csr":
            yield from _csr_blocks(path, archive, header)
            return

        def read(ordered):
            return (_coo_triplets if layout == "coo" else _csc_triplets)(path, archive, header, ordered)

        yield from triplet_blocks(path, header, read, sort or layout == "csc")


def read_header(path: Path) -> Header:
    """What the archive says of its matrix."""
    with _archive(path) as archive:
        return _header(path, archive)[1]


class _Member(NamedTuple):
    """An array of an archive, read from its beginning to its end."""

    path: Path
    name: str
    stream: IO[bytes]
    dtype: np.dtype
    length: int

    def take(self, number):
        """The next numbers."""
        size, pieces = number * self.dtype.itemsize, []
        while size:
            with _damage(self.path):
                piece = self.stream.read(min(size, unpacking.PIECE))
            if not piece:
                raise wrong(self.path, f"{self.name} is truncated")
            pieces.append(piece)
            size -= len(piece)
        return np.frombuffer(b"".join(pieces), self.dtype)

    def close(self):
        """The end, where the archive's checksum is compared."""
        with _damage(self.path):
            longer = self.stream.read(1)
        if longer:
            raise wrong(self.path, f"{self.name} is longer than it says")


@contextmanager
def _damage(path):
    """Whatever zipfile and numpy find wrong with an archive is a CorpusError."""
    try:
        yield
    except CorpusError:
        raise
    except (
        *(zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, NotImplementedError, RuntimeError),
        *(ValueError, TypeError, KeyError, SyntaxError, OverflowError, MemoryError, Warning),
    ) as error:
        raise wrong(path, f"expected scipy.sparse.save_npz, got a damaged archive: {error}") from None


@contextmanager
def _archive(path):
    """A zip archive. One that is packed itself is unpacked into a temporary file: it is not read in order."""
    with ExitStack() as stack:
        pieces = unpacked(path)
        first = next(pieces, b"")
        with _damage(path):
            file = stack.enter_context(open(path, "rb"))
            if file.read(2) != b"PK":
                file = stack.enter_context(tempfile.TemporaryFile())
                for piece in itertools.chain([first], pieces):
                    file.write(piece)
            archive = stack.enter_context(zipfile.ZipFile(file))
        yield archive


def _member(path, archive, name, kinds, length=None):
    """An array of an archive by its name, checked to be one-dimensional and of one of these kinds of numbers."""
    try:
        info = archive.getinfo(f"{name}.npy")
    except KeyError:
        raise wrong(path, f"expected scipy.sparse.save_npz, got an archive without {name}.npy") from None
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise wrong(path, f"{name}.npy: expected numpy's own compression, got another")
    with _damage(path):
        stream = archive.open(info)
        version = np.lib.format.read_magic(stream)
        if version not in ((1, 0), (2, 0)):
            raise wrong(path, f"{name}.npy: expected version 1 or 2 of the format, got {version}")
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(stream)
    if dtype.kind not in kinds or dtype.hasobject or not dtype.itemsize or len(shape) > 1:
        raise wrong(path, f"{name}.npy: expected one row of numbers, got {dtype} {shape}")
    if length not in (None, *shape) or (shape and not 0 <= shape[0] <= info.file_size):
        raise wrong(path, f"{name}.npy: expected {length} numbers, got {shape}")
    return _Member(path, f"{name}.npy", stream, dtype, shape[0] if shape else 1)


def _header(path, archive):
    """The layout, "csr", "csc" or "coo", and the header."""
    layout = _member(path, archive, "format", "SU")
    layout = layout.take(1)[0] if layout.length == 1 and layout.dtype.itemsize <= 64 else b""
    layout = layout.decode("ascii", "replace") if isinstance(layout, bytes) else str(layout)
    if layout not in ("csr", "csc", "coo"):
        raise wrong(path, f"expected a matrix in the format csr, csc or coo, got {layout!r}")
    num_docs, num_words = _member(path, archive, "shape", "iu", 2).take(2).tolist()
    entries = _member(path, archive, "data", "biuf").length
    if num_docs < 0 or num_words < 0:
        raise wrong(path, f"expected a shape of documents × words, got {num_docs} × {num_words}")
    return layout, check_header(path, Header(num_docs, num_words, entries))


def _entries(path, header, docs, words, counts):
    """Checked columns of an archive, as numbers of one kind."""
    counts = counts.astype(np.float64)
    for what, ids, number in (("document", docs, header.num_docs), ("word", words, header.num_words)):
        if len(ids) and not (ids.min() >= 0 and ids.max() < number):
            raise wrong(path, f"expected a {what} from 0 to {number - 1}, got {ids.min()} to {ids.max()}")
    bad = ~((counts >= 0) & (counts <= blocks.MOST_COUNT))
    if bad.any():
        at = int(np.argmax(bad))
        where = f"document {docs[at]}, word {words[at]}"
        raise wrong(path, f"expected a count from 0 to {blocks.MOST_COUNT:.0e}, got {counts[at]} ({where}, from 0)")
    return docs.astype(np.int64), words.astype(np.int64), counts


def _compressed(path, archive, header, rows):
    """Numbers and lengths of the rows of csr (or columns of csc), in groups; and their entries."""
    entries = header.num_entries
    indptr = _member(path, archive, "indptr", "iu", rows + 1)
    indices = _member(path, archive, "indices", "iu", entries)
    data = _member(path, archive, "data", "biuf", entries)
    first, before = 0, int(indptr.take(1)[0])
    if before:
        raise wrong(path, f"indptr.npy: expected 0 at first, got {before}")
    while first < rows:
        ends = indptr.take(min(rows - first, blocks.BLOCK // 4)).astype(np.int64)
        if not rises(ends, before) or ends[-1] > entries:
            raise wrong(path, f"indptr.npy: expected numbers that rise to {entries}, got others")
        start = 0
        while start < len(ends):
            stop = max(int(np.searchsorted(ends, before + blocks.BLOCK, side="right")), start + 1)
            number = int(ends[stop - 1]) - before
            yield first + start, np.diff(ends[start:stop], prepend=before), number, indices, data
            start, before = stop, int(ends[stop - 1])
        first += len(ends)
    if before != entries:
        raise wrong(path, f"indptr.npy: expected {entries} at last, got {before}")
    for member in (indptr, indices, data):
        member.close()


def _csr_blocks(path, archive, header):
    for first, lengths, number, indices, data in _compressed(path, archive, header, header.num_docs):
        if number > max(blocks.WIDEST, blocks.BLOCK):
            raise wrong(
                path, f"expected at most {blocks.WIDEST:,} words in a document, got {number:,} in document {first}"
            )
        docs = np.repeat(np.arange(first, first + len(lengths)), lengths)
        _, words, counts = _entries(path, header, docs, indices.take(number), data.take(number))
        yield block_of(path, np.concatenate([[0], np.cumsum(lengths)]), words, counts)


def _csc_triplets(path, archive, header, ordered):
    for first, lengths, number, indices, data in _compressed(path, archive, header, header.num_words):
        # A column may be as long as there are documents: in parts.
        ends = np.cumsum(lengths)
        for start in range(0, number, blocks.BLOCK):
            stop = min(start + blocks.BLOCK, number)
            words = first + np.searchsorted(ends, np.arange(start, stop), side="right")
            yield _entries(path, header, indices.take(stop - start), words, data.take(stop - start))


def _coo_triplets(path, archive, header, ordered):
    names = (("row", "iu"), ("col", "iu"), ("data", "biuf"))
    members = [_member(path, archive, name, kinds, header.num_entries) for name, kinds in names]
    latest = 0
    for start in range(0, header.num_entries, blocks.BLOCK):
        number = min(blocks.BLOCK, header.num_entries - start)
        docs, words, counts = _entries(path, header, *(member.take(number) for member in members))
        if ordered and not rises(docs, latest):
            raise wrong(path, "expected documents in order; pass sort=True, or save the matrix as csr")
        latest = docs[-1]
        yield docs, words, counts
    for member in members:
        member.close()
