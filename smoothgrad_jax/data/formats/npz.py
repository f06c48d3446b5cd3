"""A sparse matrix of ``scipy.sparse.save_npz``: csr, csc or coo; one document per row.

The matrix was in memory when it was saved, so that it is loaded at once.
"""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import scipy.sparse

from smoothgrad_jax.data import batches, count_blocks
from smoothgrad_jax.data.compressed_files import decompress
from smoothgrad_jax.data.count_blocks import Block, Header, block_of, check_header
from smoothgrad_jax.data.errors import corpus_error
from smoothgrad_jax.data.formats import Format
from smoothgrad_jax.data.sources import Source

_EXPECTED = "expected a matrix of scipy.sparse.save_npz in the format csr, csc or coo"


def _prepare(source: Source) -> Source:
    matrices = [_load(path) for path in source.paths]
    for path, matrix in zip(source.paths, matrices, strict=True):
        source = source.with_num_words(path, matrix.shape[1])
    return source._replace(loaded=matrices)


def _blocks(source: Source) -> Iterator[Block]:
    assert isinstance(source.loaded, list)
    for path, matrix in zip(source.paths, source.loaded, strict=True):
        for offsets, entries in count_blocks.block_ranges(matrix.indptr):
            yield block_of(path, offsets, matrix.indices[entries], matrix.data[entries])


def _load(path: Path) -> scipy.sparse.csr_array:
    file = io.BytesIO(b"".join(decompress(path)))
    try:
        matrix: Any = scipy.sparse.load_npz(file)
        if matrix.format in ("csr", "csc"):  # scipy checks the indices of coo when it is made
            matrix.check_format(full_check=True)
    except Exception as error:  # zipfile, NumPy and scipy raise many types of errors for a damaged archive
        raise corpus_error(path, f"{_EXPECTED}, got a damaged or another archive: {error}") from None
    if matrix.format not in ("csr", "csc", "coo"):
        raise corpus_error(path, f"{_EXPECTED}, got {matrix.format}")
    num_docs, num_words = matrix.shape
    check_header(path, Header(num_docs, num_words, matrix.data.size))
    try:
        return batches.canonical_csr(matrix)
    except ValueError as error:
        raise corpus_error(path, str(error)) from None


FORMAT = Format(10, lambda head: head.raw.startswith(b"PK"), blocks=_blocks, prepare=_prepare)
