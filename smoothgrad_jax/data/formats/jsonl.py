"""JSON lines: one object per line, one of whose fields is the text."""

import itertools
import json
from collections.abc import Iterator

from smoothgrad_jax.data import records
from smoothgrad_jax.data.documents import Document, encodable, metadata_of
from smoothgrad_jax.data.errors import corpus_error, excerpt
from smoothgrad_jax.data.formats import Format
from smoothgrad_jax.data.sources import Head, Source

_INSPECTED = 100  # records that are read to find the fields to keep


def _recognise(head: Head) -> bool:
    first = head.lines[0] if head.lines else b""
    if not first.startswith(b"{"):
        return False
    try:
        return not head.complete or isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def _prepare(source: Source) -> Source:
    # A field that the user names can be missing in the first record.
    inspected = _INSPECTED if source.has_metadata else 1
    first = list(itertools.islice(records.json_records(source.paths[0], source.encoding), inspected))
    number, record = first[0] if first else (1, {})
    texts = [name for name, value in record.items() if isinstance(value, str)]
    source = records.with_field(source, number, list(record), texts)
    return records.with_metadata(source, number, list(dict.fromkeys(name for _, each in first for name in each)))


def _documents(source: Source) -> Iterator[Document]:
    field, id, keep = source.field, source.id, source.keep
    for path in source.paths:
        for number, record in records.json_records(path, source.encoding):
            if field not in record:
                raise corpus_error(path, f"expected the field {field!r}, got {records.listed(record)}", number)
            text = record[field]
            if text is None:
                text = ""  # an unknown text is an empty document
            if not isinstance(text, str):
                raise corpus_error(path, f"expected text in the field {field!r}, got {excerpt(text)}", number)
            # An id or a field that a record does not have is no value.
            metadata = metadata_of(None if id is None else record.get(id), map(record.get, keep))
            yield Document(encodable(text), metadata)


FORMAT = Format(50, _recognise, _documents, prepare=_prepare, options=records.OPTIONS)
