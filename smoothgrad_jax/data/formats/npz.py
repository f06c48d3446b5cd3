"""A sparse matrix of ``scipy.sparse.save_npz``: csr, csc or coo; one document per row.

The matrix was in memory when it was saved, so that it is loaded at once.
"""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse

from smoothgrad_jax.data import count_blocks
from smoothgrad_jax.data.compressed_files import decompress
from smoothgrad_jax.data.count_blocks import Block, Header, block_of, check_header
from smoothgrad_jax.data.errors import CorpusError, corpus_error
from smoothgrad_jax.data.formats import Format
from smoothgrad_jax.data.sources import Source

_EXPECTED = "expected a matrix of scipy.sparse.save_npz in the format csr, csc or coo"


def _prepare(source: Source) -> Source:
    for path in source.paths:
        source = source.with_num_words(path, _load_shape(path)[1])
    return source


def _blocks(source: Source) -> Iterator[Block]:
    for path in source.paths:
        matrix = _load(path)
        for offsets, entries in count_blocks.block_ranges(matrix.indptr):
            yield block_of(path, offsets, matrix.indices[entries], matrix.data[entries])


def _load_shape(path: Path) -> tuple[int, int]:
    file = io.BytesIO(b"".join(decompress(path)))
    try:
        with np.load(file, allow_pickle=False) as archive:  # reads only the requested arrays
            num_docs, num_words = (int(number) for number in archive["shape"])
    except Exception as error:  # zipfile and NumPy raise many types of errors for a damaged archive
        raise corpus_error(path, f"{_EXPECTED}, got a damaged or another archive: {error}") from None
    if num_docs < 0 or num_words < 0:
        raise corpus_error(path, f"expected a shape of documents × words, got {num_docs} × {num_words}")
    return num_docs, num_words


def _load(path: Path) -> scipy.sparse.csr_array:
    """Load a matrix as CSR with counts in float64, all of it checked."""
    file = io.BytesIO(b"".join(decompress(path)))
    try:
        matrix: Any = scipy.sparse.load_npz(file)
        if matrix.format not in ("csr", "csc", "coo"):
            raise corpus_error(path, f"{_EXPECTED}, got {matrix.format}")
        if matrix.data.dtype.kind not in "biuf":
            raise corpus_error(path, f"expected counts that are real numbers, got {matrix.data.dtype}")
        num_docs, num_words = matrix.shape
        check_header(path, Header(num_docs, num_words, matrix.data.size))
        if matrix.format != "coo":  # scipy checks the indices of coo when it is made
            matrix.check_format(full_check=True)
        _check_counts(path, matrix)
        # Duplicates are added by the conversion: a small type of integers could overflow.
        return scipy.sparse.csr_array(matrix.astype(np.float64))
    except CorpusError:
        raise
    except Exception as error:
        raise corpus_error(path, f"{_EXPECTED}, got a damaged or another archive: {error}") from None


def _check_counts(path: Path, matrix: scipy.sparse.csr_array) -> None:
    counts = matrix.data
    if counts.size and not (counts.min() >= 0 and counts.max() <= count_blocks.MAX_COUNT):
        entry = int(np.argmax(~((counts >= 0) & (counts <= count_blocks.MAX_COUNT))))
        coo = matrix.tocoo()
        where = f"document {coo.row[entry]}, word {coo.col[entry]}, from 0"
        expected = f"expected a count from 0 to {count_blocks.MAX_COUNT:.0e}"
        raise corpus_error(path, f"{expected}, got {counts[entry]} ({where})")


FORMAT = Format(10, lambda head: head.raw.startswith(b"PK"), blocks=_blocks, prepare=_prepare)
