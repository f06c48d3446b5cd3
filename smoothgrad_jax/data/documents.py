"""Documents of a source: the text, and the metadata that identify it in every output.

Metadata are an id and the values of the fields that the user wants to keep, such as a date or a journal. They pass from
the source to the files with one row per document. A document without an id is identified by its row number, from 0.
"""

import json
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

Value: TypeAlias = str | int | float | bool | None  # None: the document has no value

_encode = json.JSONEncoder(separators=(",", ":")).encode  # `json.dumps` would make an encoder per document


class Metadata(NamedTuple):
    """The id of a document, or None, and the values of its fields in :attr:`smoothgrad_jax.Source.keep`."""

    id: str | None = None
    fields: tuple[Value, ...] = ()


class Document(NamedTuple):
    """A document of a source of text; the text can be empty."""

    text: str
    metadata: Metadata = Metadata()


def metadata_of(id: object, fields: Iterable[object]) -> Metadata:
    """Return metadata from values of a table or of JSON.

    An id is made a string. A number that is not finite is no value; bytes are text; a list or an object is kept as its
    JSON text, in which a date is a string.
    """
    value = _value(id)
    return Metadata(None if value in (None, "") else str(value), tuple(map(_value, fields)))


def encodable(text: str) -> str:
    """Return text that UTF-8 can encode: half of a surrogate pair, which JSON can denote, becomes a question mark."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def metadata_line(metadata: Metadata) -> bytes:
    """Return metadata as a line of JSON: ``[id, field, …]``."""
    return _encode([metadata.id, *metadata.fields]).encode() + b"\n"


def read_metadata(lines: Iterable[bytes], num_fields: int) -> Iterator[Metadata]:
    """Yield the metadata of lines that :func:`metadata_line` returned; raise a ``ValueError`` at another line."""
    for number, line in enumerate(lines, start=1):
        values = json.loads(line)
        if not isinstance(values, list) or len(values) != 1 + num_fields:
            raise ValueError(f"expected a list of {1 + num_fields} values in line {number}")
        yield metadata_of(values[0], values[1:])


def _value(value: object) -> Value:
    if isinstance(value, str):  # the usual type comes first, because this is computed per document
        return encodable(value)
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return encodable(json.dumps(value, ensure_ascii=False, default=str))
