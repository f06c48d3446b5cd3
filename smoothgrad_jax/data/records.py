"""Texts in files: a file that is one text, JSON lines, and delimited tables."""

import contextlib
import csv
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from smoothgrad_jax.data import compressed_files
from smoothgrad_jax.data.compressed_files import decode, read_utf8, text_lines, without_suffix
from smoothgrad_jax.data.documents import Document, Metadata
from smoothgrad_jax.data.errors import CorpusError, OptionName, corpus_error, excerpt, plural
from smoothgrad_jax.data.formats import Format
from smoothgrad_jax.data.sources import Head, Source

MAX_TEXT_BYTES = 2**26  # length of one text

OPTIONS = frozenset({"field", "id", "keep"})  # options of formats with fields

_FIELDS = ("text", "body", "abstract", "content")  # the usual names of the text in a record
_INSPECTED = 20  # records from which the delimiter is found
_IDS = ("id", "doi", "url")  # the usual names of the id, also in capital letters


def read_text(path: Path, encoding: str) -> str:
    """Read a file as one text."""
    chunks, length = [], 0
    for chunk in read_utf8(path, encoding):
        chunks.append(chunk)
        length += len(chunk)
        if length > MAX_TEXT_BYTES:
            raise corpus_error(path, f"expected a document of at most {MAX_TEXT_BYTES:,} bytes, got a longer one")
    return decode(path, b"".join(chunks))


def json_records(path: Path, encoding: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the line number and the JSON object of each line that is not blank."""
    for number, line in text_lines(path, encoding, compressed_files.MAX_RECORD_BYTES):
        if not line or line.isspace():
            continue
        try:
            record = json.loads(line)
        except RecursionError:
            raise corpus_error(path, "expected a JSON object, got one nested too deeply", number) from None
        except ValueError as error:
            # The text of the error has the line within this line, which is 1.
            reason = f"{error.msg} in column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
            raise corpus_error(path, f"expected a JSON object: {reason}; got {excerpt(line)}", number) from None
        if not isinstance(record, dict):
            raise corpus_error(path, f"expected a JSON object, got {excerpt(line)}", number)
        yield number, record


def table_format(name: str, delimiters: str, priority: int) -> Format:
    """Return the format of tables with one of some delimiters, whose files are named ``*.name`` or have a known column.

    Several files of one table can have different delimiters.
    """

    def records_of(source: Source, path: Path) -> Iterator[tuple[int, list[str]]]:
        delimiter = _delimiter(path, source, name, delimiters)
        return _table_records(path, source.encoding, name, delimiter)

    def recognise(head: Head) -> bool:
        if without_suffix(head.path.name.lower()).endswith(f".{name}"):
            return not head.is_folder
        try:
            lines = [line.decode("utf-8", "replace") for line in head.lines[:2]]
            headers = [next(csv.reader(lines, delimiter=delimiter), []) for delimiter in delimiters]
        except csv.Error:
            return False
        known = {head.field} if head.field else {*_FIELDS}
        return any(known & {*header} and (len(header) > 1 or bool(head.field)) for header in headers)

    def prepare(source: Source) -> Source:
        number, names = next(records_of(source, source.paths[0]), (1, []))
        return with_metadata(with_field(source, number, names, names), number, names)

    def documents(source: Source) -> Iterator[Document]:
        for path in source.paths:
            records = records_of(source, path)
            number, header = next(records, (1, []))
            for field in (source.field, *source.keep):
                if field is None or header.count(field) != 1:
                    raise corpus_error(path, f"expected one column {field!r}, got {listed(header)}", number)
            column, *keep = (header.index(str(field)) for field in (source.field, *source.keep))
            id = header.index(source.id) if source.id in header else None  # other files can have no ids
            for number, record in records:
                if len(record) != len(header):
                    expected = f"expected {plural(len(header), 'column')} as in the header"
                    raise corpus_error(path, f"{expected}, got {len(record)}", number)
                metadata = Metadata(None if id is None else record[id] or None, tuple([record[i] for i in keep]))
                yield Document(record[column], metadata)

    return Format(priority, recognise, documents, prepare=prepare, options=OPTIONS)


def with_field(source: Source, line: int | None, names: list[str], texts: list[str]) -> Source:
    """Return the source with the name of the field that is the text: the one that the user requires, or a usual one.

    Args:
      source: The source.
      line: The line of the first record, if the file has lines; for messages.
      names, texts: The fields of the first record, and those that can be the text.
    """
    path, field = source.paths[0], source.field
    if field is None:
        likely = [name for name in _FIELDS if name in texts]
        if not likely and len(texts) != 1:
            problem = f"expected a field {', '.join(_FIELDS[:-1])} or {_FIELDS[-1]}, got {listed(names)}"
            raise corpus_error(path, (f"{problem}; pass the one with the text as ", OptionName("field")), line)
        field = (likely or texts)[0]
    elif field not in names:
        raise corpus_error(path, f"expected the field {field!r}, got {listed(names)}", line)
    return source._replace(field=field)


def with_metadata(source: Source, line: int | None, names: list[str]) -> Source:
    """Return the source with the name of the field that is the id: the one that the user requires, or a usual one.

    The fields to keep must be among the ``names`` of the first records, too.
    """
    required = [("id", source.id)] if source.id is not None else []
    for option, name in (*required, *(("keep", name) for name in source.keep)):
        if name not in names:
            problem = OptionName(option, name), f": there is no such field; expected one of {listed(names)}"
            raise corpus_error(source.paths[0], problem, line)
    if source.id is not None:
        return source
    likely = (name for id in _IDS for name in names if name.lower() == id and names.count(name) == 1)
    return source._replace(id=next((name for name in likely if name != source.field), None))


def listed(names: Iterable[str]) -> str:
    """Return names as a list for a message."""
    names = [excerpt(name) for name in names]
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "") if names else "none"


def _delimiter(path: Path, source: Source, name: str, delimiters: str) -> str:
    """Return the delimiter for which the header has a known column, then the records its length, then most columns."""
    known = {source.field} if source.field else {*_FIELDS}

    def score(delimiter: str) -> tuple[bool, bool, int]:
        rows: list[list[str]] = []
        with contextlib.suppress(CorpusError):  # it is raised again if this is the best delimiter
            for _, row in itertools.islice(_table_records(path, source.encoding, name, delimiter), _INSPECTED):
                rows.append(row)
        header = rows[0] if rows else []
        return bool(known & {*header}), all(len(row) == len(header) for row in rows), len(header)

    return delimiters if len(delimiters) == 1 else max(delimiters, key=score)


def _table_records(path: Path, encoding: str, name: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the last line and the fields of each record of a table, the header included."""
    length = 0

    def lines() -> Iterator[str]:
        nonlocal length
        for number, line in text_lines(path, encoding, compressed_files.MAX_RECORD_BYTES):
            length += len(line) + 1
            if length > MAX_TEXT_BYTES:
                expected = f"expected a record of at most {MAX_TEXT_BYTES:,} characters"
                raise corpus_error(path, f"{expected}, got a longer one; is a quote not closed?", number)
            yield line + "\n"

    # The csv module has one limit of 128 KiB for the whole process; the limit above replaces it.
    csv.field_size_limit(max(csv.field_size_limit(), 2 * MAX_TEXT_BYTES))
    # Without `strict`, a quote that is never closed would join many documents into one.
    reader = csv.reader(lines(), delimiter=delimiter, strict=True)
    try:
        for record in reader:
            length = 0
            if record:
                yield reader.line_num, record
    except csv.Error as error:
        expected = f"expected {name}, with quotes in pairs around a field and doubled inside it"
        raise corpus_error(path, f"{expected}: {error}", reader.line_num) from None
