"""Parquet: one document per row, one of whose columns is the text. Row groups are read one after the other."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from smoothgrad_jax.data import records
from smoothgrad_jax.data.compressed_files import decompress
from smoothgrad_jax.data.documents import Document, encodable, metadata_of
from smoothgrad_jax.data.errors import corpus_error, excerpt
from smoothgrad_jax.data.formats import Format
from smoothgrad_jax.data.sources import Source

_ROWS = 1_000  # rows per read
_BUFFER_BYTES = 1 << 20  # a column of a row group is not read at once


def _open(path: Path) -> Any:
    """Return a ``pyarrow.parquet.ParquetFile``."""
    start = next(decompress(path, 4), b"")  # raises an error for a file that cannot be read
    if not start:
        raise corpus_error(path, "expected a Parquet file, got an empty file")
    with open(path, "rb") as raw:
        if raw.read(4) != start:
            raise corpus_error(path, "expected a Parquet file, got a compressed one; decompress it first")
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise ImportError('Parquet is read with pyarrow: pip install "smoothgrad_jax[parquet]"') from None
    try:
        return parquet.ParquetFile(path, buffer_size=_BUFFER_BYTES)
    except (ArrowException, OSError) as error:
        raise corpus_error(path, f"expected a Parquet file, got a damaged or another file: {error}") from None


def _prepare(source: Source) -> Source:
    with _open(source.paths[0]) as file:
        schema = file.schema_arrow
    from pyarrow import types

    texts = [field.name for field in schema if types.is_string(field.type) or types.is_large_string(field.type)]
    return records.with_metadata(records.with_field(source, None, schema.names, texts), None, schema.names)


def _values(column: Any) -> list[Any]:
    """Return the values of a column as numbers, strings, lists or dictionaries; dates and decimals as strings."""
    from pyarrow import string, types

    if types.is_temporal(column.type) or types.is_decimal(column.type):
        column = column.cast(string())
    return column.to_pylist()


def _rows(path: Path, source: Source) -> Iterator[tuple[Any, ...]]:
    """Yield the text, the id and the fields to keep of each row."""
    with _open(path) as file:
        from pyarrow import ArrowException

        names = file.schema_arrow.names
        for name in (source.field, *source.keep):
            if names.count(name) != 1:
                raise corpus_error(path, f"expected one column {name!r}, got {records.listed(names)}")
        id = source.id if source.id in names else None  # other files can have no ids
        used = [name for name in (source.field, id, *source.keep) if name is not None]
        try:
            for batch in file.iter_batches(_ROWS, columns=used):
                columns = [_values(batch.column(name)) for name in used]
                yield from zip(columns[0], *([] if id else [[None] * len(batch)]), *columns[1:], strict=True)
        except (ArrowException, OSError) as error:
            raise corpus_error(path, f"the Parquet file is damaged: {error}") from None


def _documents(source: Source) -> Iterator[Document]:
    for path in source.paths:
        for number, (text, id, *keep) in enumerate(_rows(path, source)):
            if text is not None and not isinstance(text, str):
                problem = f"expected text in the column {source.field!r}, got {excerpt(text)} in row {number}"
                raise corpus_error(path, problem)
            yield Document(encodable(text or ""), metadata_of(id, keep))


FORMAT = Format(11, lambda head: head.raw.startswith(b"PAR1"), _documents, prepare=_prepare, options=records.OPTIONS)
