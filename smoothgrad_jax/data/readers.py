"""Files of documents: which format they are in, and a stream of their texts or counts in bounded memory.

| format       | a document is                | recognised by                                                          |
|--------------|------------------------------|------------------------------------------------------------------------|
| ``text``     | a line that is not blank     | being none of the others                                               |
| ``files``    | a file of a folder           | being a folder                                                         |
| ``jsonl``    | a line, a JSON object        | a first line that is one                                               |
| ``csv``      | a record (quoted newlines)   | a header with the given column, or text, body, abstract or content     |
| ``tsv``      | the same between tabs        | the same; also by names that end in ``.csv`` or ``.tsv``               |
| ``uci``      | all lines ``d w count``      | three lines of one number: D, W, entries. d and w count from 1         |
| ``mm``       | a row: lines ``d w count``   | ``%%MatrixMarket``; coordinate, integer, real or pattern, general      |
| ``ldac``     | a line ``N w:count …``       | N pairs on a line. w counts from 0 (or 1, see :func:`open_source`)     |
| ``svmlight`` | a line ``label w:count … #`` | any number before pairs; label and qid are passed over. w as in ldac   |
| ``npz``      | a row                        | a zip archive; ``scipy.sparse.save_npz`` of csr, csc or coo            |
| ``folder``   |                              | a folder with a manifest of ours, which the room ``store`` opens       |

Every file may be packed by gzip, bzip2 or xz, which its first bytes tell and not its name. Several files are one
corpus, in the order given.

What is promised about counts, and how much memory they take, says the room ``blocks``; texts take the memory of the
longest. Hence the limits below: the longest line, or file, that is one text.
"""

import csv
import itertools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from smoothgrad_jax.data import counts, unpacking
from smoothgrad_jax.data.blocks import Block
from smoothgrad_jax.data.unpacking import CorpusError, binary, plural, shown, text_lines, unpacked, utf8, wrong

TEXT_FORMATS = ("text", "files", "jsonl", "csv", "tsv")
COUNT_FORMATS = ("uci", "ldac", "mm", "svmlight", "npz")
FORMATS = (*TEXT_FORMATS, *COUNT_FORMATS, "folder")

_HEAD = 2**16  # bytes that a format is recognised by
_LONGEST_TEXT = 2**26  # bytes of a line, or of a file, that is one plain text
_LARGEST_VOCABULARY = 2**28  # characters
_FIELDS = ("text", "body", "abstract", "content")  # where a record's text stands if nothing is said
_MANIFEST = "smoothgrad corpus"
_FOREIGN = {
    b"(\xb5/\xfd": "packed by zstd; unpack it first",
    b"\x1f\x9d": "packed by compress; unpack it first",
    b"7z\xbc\xaf": "a 7z archive; unpack it first",
    b"%PDF-": "a PDF; extract its text first",
    b"PAR1": "a Parquet file; write its text as JSON lines first",
    b"\x89HDF": "an HDF5 file; save its matrix by scipy.sparse.save_npz first",
    b"\x93NUMPY": "a single array; save a sparse matrix by scipy.sparse.save_npz",
}


class Source(NamedTuple):
    """Files that are one corpus, recognised but not yet read; made by :func:`open_source`.

    It can be read any number of times. Reading checks every line: it raises :class:`CorpusError` where the file is
    wrong, after the documents before.

    Attributes:
      paths: The files; for "files" these may be folders, and for "folder" it is one.
      format: One of ``FORMATS``.
      vocabulary: The words, if they came with the counts or were given.
      num_words: V if it is known before the counts are read: by a header or a vocabulary.
      field: The name of the text in jsonl, csv and tsv.
      encoding: Of texts.
      first_id: The id of the first word (uci and mm: and of the first document), if given.
      sort: Sort triplets without a look at them.
    """

    paths: tuple[Path, ...]
    format: str
    vocabulary: list[str] | None = None
    num_words: int | None = None
    field: str | None = None
    encoding: str = "utf-8"
    first_id: int | None = None
    sort: bool = False

    @property
    def is_text(self) -> bool:
        """Whether there are :meth:`texts`; otherwise there are :meth:`blocks`, but for a "folder"."""
        return self.format in TEXT_FORMATS

    def texts(self) -> Iterator[str]:
        """The documents, one at a time. A blank line of "text" is none; an empty record, or file, is an empty one.

        Raises:
          CorpusError: Not a text format; a line that cannot be read; no documents at all.
        """
        if not self.is_text:
            raise wrong(self.paths[0], f"holds {self.format}, not text")
        return _some(self, itertools.chain.from_iterable(_texts(path, self) for path in self.paths))

    def blocks(self) -> Iterator[Block]:
        """The documents in order, some at a time: about a million entries, or a million documents.

        Raises:
          CorpusError: Not a format of counts; an entry that cannot be read, or is not what a header said; no documents.
        """
        if self.format not in COUNT_FORMATS:
            raise wrong(self.paths[0], f"holds {self.format}, not counts")
        return _some(self, counts.read_blocks(self))


def open_source(
    paths: Any,
    *,
    field: str | None = None,
    vocabulary: Any = None,
    first_id: int | None = None,
    encoding: str = "utf-8",
    sort: bool = False,
    format: str | None = None,
) -> Source:
    """Recognise files as one corpus, and read what stands at their head.

    Args:
      paths: A file or folder, or several. Several are one corpus in the order given, all in one format.
      format: One of ``FORMATS``; recognised from the content if not given. A folder in a format other than "files" and
        "folder" stands for the files in it.
      field: Which field of jsonl, or column of csv and tsv, is the text. If not given: the first of "text", "body",
        "abstract", "content" that is there, or the only one that holds text.
      vocabulary: A file with one word a line, or the words. If not given, counts take ``vocab.X.txt`` beside
        ``docword.X.txt``, and ``vocab.txt`` or ``vocabulary.txt`` beside other files; False takes none.
      first_id: Whether the ids in the file count from 0 or from 1. If not given: 1 for uci and mm. For ldac and
        svmlight 0, unless there is a vocabulary of V words, no id 0, and an id V.
      encoding: Of texts.
      sort: Triplets are in no order; sort them by document.

    Returns:
      A :class:`Source`.

    Raises:
      CorpusError: A file is missing, empty, binary, in another format than the others; a header is wrong; the
        vocabulary has the wrong length.
      ValueError: An argument is none of those above.
    """
    kind = format
    if kind is not None and kind not in FORMATS:
        raise ValueError(f"format: expected one of {', '.join(FORMATS)}; got {kind!r}")
    if first_id not in (None, 0, 1):
        raise ValueError(f"first_id: expected 0 or 1; got {first_id!r}")
    _check_encoding(encoding)
    paths = [Path(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)]
    if not paths:
        raise ValueError("expected at least one file")
    if kind is not None:
        paths = [part for path in paths for part in _parts(path, kind)]
    formats = [kind or _recognise(path, field, encoding) for path in paths]
    for path, other in zip(paths, formats, strict=True):
        if other != formats[0]:
            raise wrong(
                path, f"expected {formats[0]} as in {paths[0]}, got {other}; if that is wrong, say which format it is"
            )
    source = Source(tuple(paths), formats[0], None, None, field, encoding, first_id, sort)
    if source.format == "folder":
        if len(paths) > 1:
            raise wrong(paths[1], "a converted corpus is opened by itself")
        _manifest(paths[0])
        return source
    if field is not None and source.format not in ("jsonl", "csv", "tsv"):
        raise wrong(paths[0], f"has no field {field!r}: it is recognised as {source.format}")
    if first_id is not None and source.format not in ("uci", "mm", "ldac", "svmlight"):
        raise wrong(paths[0], f"first_id has no meaning for {source.format}")
    if source.is_text:
        source = _with_field(source)
    return _with_words(source, vocabulary)


def recognise(path: Any, field: str | None = None, encoding: str = "utf-8") -> str:
    """The format of a file or folder, from its content.

    Args:
      path: A file or folder.
      field: A column that a table has to have.
      encoding: Of texts.

    Returns:
      One of ``FORMATS``.

    Raises:
      CorpusError: It is missing, empty or binary, or packed in a way that is not known here.
    """
    _check_encoding(encoding)
    return _recognise(Path(path), field, encoding)


def _some(source, documents):
    """Documents, of which there have to be some."""
    found = False
    for document in documents:
        found = True
        yield document
    if not found:
        raise wrong(source.paths[0], "expected documents, got none")


def _check_encoding(encoding):
    try:
        "".encode(encoding)
    except (LookupError, UnicodeError, ValueError):
        raise ValueError(f"encoding: expected the name of a text encoding, got {encoding!r}") from None


# Which format.


def _parts(path, kind):
    """The files that a folder stands for in a given format."""
    if kind in ("files", "folder") or not os.path.isdir(path):
        return [path]
    return _files(path)


def _files(folder):
    """The files of a folder and the folders in it, in the order of their names, without hidden ones."""
    found = []

    def unreadable(error):
        raise wrong(folder, f"cannot be read: {error.strerror}") from None

    for root, folders, names in os.walk(folder, onerror=unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(root, name) for name in names if not name.startswith(".")]
    if not found:
        raise wrong(folder, "expected files in the folder, got none")
    return sorted(found)


def _manifest(folder):
    path = folder / "manifest.json"
    if not os.path.exists(path):
        raise wrong(folder, "expected a converted corpus, got a folder without manifest.json")
    data = b"".join(itertools.islice(unpacked(path, unpacking.LONGEST_RECORD), 1))
    try:
        manifest = json.loads(data)
    except (ValueError, RecursionError):
        manifest = None
    if not isinstance(manifest, dict) or manifest.get("format") != _MANIFEST:
        raise wrong(path, f'expected a JSON object with "format": "{_MANIFEST}"')
    return manifest


def _recognise(path, field, encoding):
    if os.path.isdir(path):
        try:
            _manifest(path)
            return "folder"
        except CorpusError:
            first = _files(path)[0]
        inside = _recognise_file(first, field, encoding, empty="files")
        if inside in ("jsonl", *COUNT_FORMATS):
            what = f"a folder of documents, a file each, but {first.name} is recognised as {inside}"
            whole = f'for all files of the folder the format "{inside}", or "files" to take each as a text'
            raise wrong(path, f"{what}; pass those that you mean, or {whole}")
        return "files"
    return _recognise_file(path, field, encoding)


def _recognise_file(path, field, encoding, empty=None):
    raw = b""
    for piece in unpacked(path, _HEAD):
        raw += piece
        if len(raw) >= _HEAD:
            break
    if not raw:
        if empty is None:
            raise wrong(path, "expected documents, got an empty file")
        return empty
    if raw.startswith(b"PK"):
        return "npz"
    for magic, what in _FOREIGN.items():
        if raw.startswith(magic):
            raise wrong(path, f"is {what}")
    if raw[257:262] == b"ustar":
        raise wrong(path, "is a tar archive; unpack it first")
    head = b""
    for piece in utf8(path, encoding, _HEAD):
        head += piece
        if len(head) >= _HEAD:
            break
    if b"\0" in head:
        raise binary(path)
    if head[:14].lower() == b"%%matrixmarket":
        return "mm"
    lines = head.split(b"\n")
    if len(head) >= _HEAD:
        # The last line may go on; if it is the only one, its last word may.
        lines = lines[:-1] if len(lines) > 1 else [head[: max(head.rfind(b" "), 0)]]
    whole = len(head) < _HEAD or b"\n" in head
    lines = [line.strip() for line in lines[:200] if line.strip()]
    return _recognise_lines(path, lines, whole, field)


def _recognise_lines(path, lines, whole, field):
    """Of lines that are whole (or of the beginning of one)."""
    if (
        len(lines) >= 3
        and all(line.isdigit() for line in lines[:3])
        and (len(lines) == 3 or [bool(counts.NUMBER.fullmatch(token)) for token in lines[3].split()] == [True] * 3)
    ):
        return "uci"
    if pairs := _recognise_pairs(lines, whole):
        return pairs
    first = lines[0] if lines else b""
    if first.startswith(b"{"):
        try:
            if not whole or isinstance(json.loads(first), dict):
                return "jsonl"
        except (ValueError, RecursionError):
            pass
    if re.match(rb"\[\s*[\[{\"]", first) and path.suffix == ".json":
        raise wrong(path, 'expected JSON lines, got an array; write an object a line, or pass format="text"')
    name = re.sub(r"\.(gz|bz2|xz)$", "", path.name.lower())
    for kind, delimiter in (("tsv", "\t"), ("csv", ",")):
        if name.endswith(f".{kind}"):
            return kind
        try:
            rows = list(csv.reader([line.decode("utf-8", "replace") for line in lines[:2]], delimiter=delimiter))
        except csv.Error:
            continue
        known = [field] if field else _FIELDS
        if rows and any(name in rows[0] for name in known) and (len(rows[0]) > 1 or field):
            return kind
    return "text"


def _recognise_pairs(lines, whole):
    """ "ldac", "svmlight" or None."""
    numbered, found = True, False
    for line in lines:
        label, *pairs = line.partition(b"#")[0].split() or [b""]
        if not label:
            numbered = False
            continue
        if pairs and re.fullmatch(rb"qid:[0-9]+", pairs[0]):
            numbered, pairs = False, pairs[1:]
        if not counts.LABEL.fullmatch(label) or not all(re.fullmatch(rb"[0-9]+:[^:]+", pair) for pair in pairs):
            return None
        found = found or bool(pairs)
        enough = label.isdigit() and len(label) < 10 and (int(label) == len(pairs) or not whole)
        numbered = numbered and enough and b"#" not in line
    return ("ldac" if numbered else "svmlight") if found else None


# Texts.


def _texts(path, source):
    if source.format == "text":
        return (text for _, text in text_lines(path, source.encoding, _LONGEST_TEXT) if text and not text.isspace())
    if source.format == "files":
        files = _files(path) if os.path.isdir(path) else [path]
        return (_file_text(file, source.encoding) for file in files)
    if source.format == "jsonl":
        return _json_texts(path, source)
    return _table_texts(path, source)


def _file_text(path, encoding):
    pieces, length = [], 0
    for piece in utf8(path, encoding):
        pieces.append(piece)
        length += len(piece)
        if length > _LONGEST_TEXT:
            raise wrong(path, f"expected a document of at most {_LONGEST_TEXT:,} bytes, got a longer one")
    data = b"".join(pieces)
    if b"\0" in data:
        raise binary(path, 1 + data.count(b"\n", 0, data.index(b"\0")))
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        hint = 'pass its encoding, for example encoding="latin-1"'
        what = f"expected utf-8, got the byte 0x{data[error.start]:02x}; {hint}"
        raise wrong(path, what, 1 + data.count(b"\n", 0, error.start)) from None


def _records(path, encoding):
    """Number and object of each line that is not blank."""
    for number, line in text_lines(path, encoding, unpacking.LONGEST_RECORD):
        if not line or line.isspace():
            continue
        try:
            record = json.loads(line)
        except RecursionError:
            raise wrong(path, "expected a JSON object, got one nested too deeply", number) from None
        except ValueError as error:
            raise wrong(path, f"expected a JSON object: {error}; got {shown(line)}", number) from None
        if not isinstance(record, dict):
            raise wrong(path, f"expected a JSON object, got {shown(line)}", number)
        yield number, record


def _json_texts(path, source):
    for number, record in _records(path, source.encoding):
        if source.field not in record:
            raise wrong(path, f"expected the field {source.field!r}, got {_listed(record)}", number)
        text = record[source.field]
        if text is None:
            text = ""  # there is a document, and nothing is known of it
        if not isinstance(text, str):
            raise wrong(path, f"expected text in the field {source.field!r}, got {shown(text)}", number)
        # An escape in JSON can stand for half a character, which no file can hold.
        yield text.encode("utf-8", "replace").decode() if not text.isascii() else text


def _rows(path, source):
    """Last line and fields of each record of a table, the header included."""
    fed = 0

    def lines():
        nonlocal fed
        for number, line in text_lines(path, source.encoding, unpacking.LONGEST_RECORD):
            fed += len(line) + 1
            if fed > _LONGEST_TEXT:
                what = f"expected a record of at most {_LONGEST_TEXT:,} characters, got a longer one; is a quote open?"
                raise wrong(path, what, number)
            yield line + "\n"

    # The module's own limit is 128 KiB for all tables of the process; ours is the one above.
    csv.field_size_limit(max(csv.field_size_limit(), 2 * _LONGEST_TEXT))
    # Strict: a quote that is never closed would make one document of many.
    reader = csv.reader(lines(), delimiter="\t" if source.format == "tsv" else ",", strict=True)
    try:
        for row in reader:
            fed = 0
            if row:
                yield reader.line_num, row
    except csv.Error as error:
        what = f"expected {source.format}, with quotes in pairs around a field and doubled inside it: {error}"
        raise wrong(path, what, reader.line_num) from None


def _table_texts(path, source):
    rows = _rows(path, source)
    number, header = next(rows, (1, []))
    if header.count(source.field) != 1:
        raise wrong(path, f"expected one column {source.field!r}, got {_listed(header)}", number)
    place = header.index(source.field)
    for number, row in rows:
        if len(row) != len(header):
            raise wrong(path, f"expected {plural(len(header), 'column')} as in the header, got {len(row)}", number)
        yield row[place]


def _with_field(source):
    """The source with the name of its text, where it needs one."""
    path = source.paths[0]
    if source.format == "jsonl":
        number, record = next(_records(path, source.encoding), (1, {}))
        texts = [name for name, value in record.items() if isinstance(value, str)]
        names = list(record)
    elif source.format in ("csv", "tsv"):
        number, names = next(_rows(path, source), (1, []))
        texts = names
    else:
        return source
    field = source.field
    if field is None:
        likely = [name for name in _FIELDS if name in texts]
        if not likely and len(texts) != 1:
            what = f"expected a field {', '.join(_FIELDS[:-1])} or {_FIELDS[-1]}, got {_listed(names)}"
            raise wrong(path, f"{what}; pass field= with the one that holds the text", number)
        field = (likely or texts)[0]
    elif field not in names:
        raise wrong(path, f"expected the field {field!r}, got {_listed(names)}", number)
    return source._replace(field=field)


def _listed(names):
    names = [shown(name) for name in names]
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "") if names else "none"


# Words.


def _with_words(source, vocabulary):
    """The source with its vocabulary and the number of its words."""
    declared = None
    for path in source.paths if source.format in ("uci", "mm", "npz") else ():
        header = counts.read_header(path, source)
        if declared is not None and header.num_words != declared:
            raise wrong(path, f"expected {plural(declared, 'word')} as in {source.paths[0]}, got {header.num_words:,}")
        declared = header.num_words
    if vocabulary is None and not source.is_text:
        vocabulary = _beside(source.paths)
    if vocabulary is None or vocabulary is False:
        return source._replace(num_words=declared)
    if isinstance(vocabulary, str | os.PathLike):
        (words, count), name = _vocabulary(Path(vocabulary), source.encoding, declared), vocabulary
    else:
        words, name = [str(word) for word in vocabulary], "the vocabulary"
        count = len(words)
    if not words:
        raise wrong(name, "expected one word a line, got none")
    if declared is not None and count != declared:
        raise wrong(name, f"expected V = {plural(declared, 'word')} for {source.paths[0]}, got {count:,}")
    return source._replace(vocabulary=words, num_words=len(words))


def _vocabulary(path, encoding, expected):
    """The words of a file, one a line. If it is known how many there should be, no more are kept, only counted."""
    words, count, length, blank = [], 0, 0, None
    for number, line in text_lines(path, encoding, unpacking.LONGEST_RECORD):
        word = line.strip()
        if not word:
            blank = blank or number
            continue
        if blank:
            raise wrong(path, "expected a word, got a blank line", blank)
        count, length = count + 1, length + len(word)
        if length > _LARGEST_VOCABULARY:
            raise wrong(path, f"expected words of at most {_LARGEST_VOCABULARY:,} characters in all, got more", number)
        if expected is None or count <= expected:
            words.append(word)
    return words, count


def _beside(paths):
    """The vocabulary that lies beside the first of some files."""
    path = paths[0]
    name = re.sub(r"\.(gz|bz2|xz)$", "", path.name)
    known = [f"vocab.{name[8:]}"] if name.startswith("docword.") else ["vocab.txt", "vocabulary.txt"]
    for candidate in (path.with_name(name + packed) for name in known for packed in ("", ".gz", ".bz2", ".xz")):
        if os.path.isfile(candidate) and candidate not in paths:
            return candidate
    return None
