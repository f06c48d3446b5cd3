"""JSON lines: one object per line, one of whose fields is the text."""

import json
from collections.abc import Iterator

from smoothgrad_jax.data import records
from smoothgrad_jax.data.errors import corpus_error, excerpt
from smoothgrad_jax.data.formats import Format
from smoothgrad_jax.data.sources import Head, Source


def _recognise(head: Head) -> bool:
    first = head.lines[0] if head.lines else b""
    if not first.startswith(b"{"):
        return False
    try:
        return not head.complete or isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def _prepare(source: Source) -> Source:
    number, record = next(records.json_records(source.paths[0], source.encoding), (1, {}))
    texts = [name for name, value in record.items() if isinstance(value, str)]
    return records.with_field(source, number, list(record), texts)


def _texts(source: Source) -> Iterator[str]:
    field = source.field
    for path in source.paths:
        for number, record in records.json_records(path, source.encoding):
            if field not in record:
                raise corpus_error(path, f"expected the field {field!r}, got {records.listed(record)}", number)
            text = record[field]
            if text is None:
                text = ""  # an unknown text is an empty document
            if not isinstance(text, str):
                raise corpus_error(path, f"expected text in the field {field!r}, got {excerpt(text)}", number)
            # A JSON escape can denote half a surrogate pair, which UTF-8 cannot encode.
            yield text.encode("utf-8", "replace").decode() if not text.isascii() else text


FORMAT = Format(50, _recognise, texts=_texts, prepare=_prepare, options=frozenset({"field"}))
