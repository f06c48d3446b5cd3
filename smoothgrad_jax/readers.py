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

What is promised about counts: a document's word ids are different and increasing, counts are positive and finite. Pairs
that come twice are added, counts of zero are left out, documents without words are kept. Triplets (uci, mm, coo) that
do not come in the order of documents are sorted in temporary files, sixteen bytes an entry; this is decided by the
first hundred thousand, and a file that is out of order only later is refused with the advice to say ``sort=True``.

What is promised about memory: a few blocks of a million entries, whatever the size of the file and whatever a header
says. A header is believed only as far as the entries bear it out. Hence the limits below: the longest line, the most
different words of one document, the most empty documents for the entries there are.
"""

import bz2
import codecs
import csv
import gzip
import itertools
import json
import lzma
import os
import re
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import scipy.sparse

TEXT_FORMATS = ("text", "files", "jsonl", "csv", "tsv")
COUNT_FORMATS = ("uci", "ldac", "mm", "svmlight", "npz")
FORMATS = (*TEXT_FORMATS, *COUNT_FORMATS, "folder")

_BLOCK = 2**20  # entries, or documents, that are gathered before they are handed out
_LOOK = 2**17  # triplets that are looked at, to see whether they come by document
_PIECE = 2**22  # bytes that are read at once
_HEAD = 2**16  # bytes that a format is recognised by
_LONGEST_TEXT = 2**26  # bytes of a line, or of a file, that is one plain text
_LONGEST_RECORD = 2**24  # bytes of a line that is taken apart: its parts take many times the room
_WIDEST = 2**22  # different words of one document
_MOST_WORDS = 2**31 - 1  # word ids are int32
_MOST_COUNT = 1e30  # as much as a document may hold in all, in documents.py
_LARGEST_VOCABULARY = 2**28  # characters
_UNPACKING = 2**28  # bytes that xz may take for itself: level 9 takes a quarter of that
_FIELDS = ("text", "body", "abstract", "content")  # where a record's text stands if nothing is said
_MANIFEST = "smoothgrad corpus"

_NUMBER = re.compile(rb"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_LABEL = re.compile(rb"[-+]?[0-9.][-+0-9.,eE]*")
_BLANKS = bytes.maketrans(b"\t\r\v\f", b"    ")
_FOREIGN = {
    b"(\xb5/\xfd": "packed by zstd; unpack it first",
    b"\x1f\x9d": "packed by compress; unpack it first",
    b"7z\xbc\xaf": "a 7z archive; unpack it first",
    b"%PDF-": "a PDF; extract its text first",
    b"PAR1": "a Parquet file; write its text as JSON lines first",
    b"\x89HDF": "an HDF5 file; save its matrix by scipy.sparse.save_npz first",
    b"\x93NUMPY": "a single array; save a sparse matrix by scipy.sparse.save_npz",
}


class CorpusError(ValueError):
    """A file is not what it should be: which file, which line, what was expected, what came, what to do."""


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
            raise _wrong(self.paths[0], f"holds {self.format}, not text")
        return _some(self, itertools.chain.from_iterable(_texts(path, self) for path in self.paths))

    def blocks(self) -> Iterator[Block]:
        """The documents in order, some at a time: about a million entries, or a million documents.

        Raises:
          CorpusError: Not a format of counts; an entry that cannot be read, or is not what a header said; no documents.
        """
        if self.format not in COUNT_FORMATS:
            raise _wrong(self.paths[0], f"holds {self.format}, not counts")
        return _some(self, _blocks(self))


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
            raise _wrong(
                path, f"expected {formats[0]} as in {paths[0]}, got {other}; if that is wrong, say which format it is"
            )
    source = Source(tuple(paths), formats[0], None, None, field, encoding, first_id, sort)
    if source.format == "folder":
        if len(paths) > 1:
            raise _wrong(paths[1], "a converted corpus is opened by itself")
        _manifest(paths[0])
        return source
    if field is not None and source.format not in ("jsonl", "csv", "tsv"):
        raise _wrong(paths[0], f"has no field {field!r}: it is recognised as {source.format}")
    if first_id is not None and source.format not in ("uci", "mm", "ldac", "svmlight"):
        raise _wrong(paths[0], f"first_id has no meaning for {source.format}")
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


def _wrong(path, what, line=None):
    return CorpusError(f"{path}: {what}" if line is None else f"{path}, line {line}: {what}")


def _number(count, noun):
    if count != 1:
        noun = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{count:,} {noun}"


def _some(source, documents):
    """Documents, of which there have to be some."""
    found = False
    for document in documents:
        found = True
        yield document
    if not found:
        raise _wrong(source.paths[0], "expected documents, got none")


def _shown(data):
    """Some bytes or text of a file, short enough for a message."""
    text = data.decode("utf-8", "replace") if isinstance(data, bytes) else str(data)
    return repr(text if len(text) <= 60 else text[:60] + "…")


def _check_encoding(encoding):
    try:
        "".encode(encoding)
    except (LookupError, UnicodeError, ValueError):
        raise ValueError(f"encoding: expected the name of a text encoding, got {encoding!r}") from None


# Bytes: unpacked, in UTF-8, in pieces that end with a line.


def _unpacked(path, size=None):
    """The bytes of a file, unpacked if it is packed, in pieces of at most ``size``."""
    size = size or _PIECE
    try:
        if path.is_dir():
            raise _wrong(path, "expected a file, got a folder")
        if not path.exists():
            raise _wrong(path, "there is no such file")
        if not path.is_file():
            raise _wrong(path, "expected a regular file: it is read more than once")
        with open(path, "rb") as file:
            magic = file.read(10)
            file.seek(0)
            if magic.startswith(b"\x1f\x8b"):
                yield from _read(gzip.GzipFile(fileobj=file), size)
            elif re.match(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)", magic):
                yield from _read(bz2.BZ2File(file), size)
            elif magic.startswith(b"\xfd7zXZ\0"):
                yield from _read_xz(file, size)
            else:
                yield from _read(file, size)
    except EOFError:
        raise _wrong(path, "the packed file is truncated: its end is missing") from None
    except (zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise _wrong(path, f"the packed file is damaged: {error}") from None
    except OSError as error:
        # bzip2 has no exception of its own for damaged data
        raise _wrong(path, f"cannot be read: {error.strerror or error}") from None


def _read(file, size):
    while piece := file.read(size):
        yield piece


def _read_xz(file, size):
    """As lzma.LZMAFile, which cannot be told how much memory the file may ask for."""
    data, decoder = b"", lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_UNPACKING)
    while True:
        if decoder.needs_input and not data:
            data = file.read(size)
            if not data:
                raise EOFError
        piece = decoder.decompress(data, size)
        data = b""
        if piece:
            yield piece
        if decoder.eof:
            # Streams may follow one another, with zeros between.
            data = decoder.unused_data.lstrip(b"\0")
            while not data:
                data = file.read(size)
                if not data:
                    return
                data = data.lstrip(b"\0")
            decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_UNPACKING)


def _utf8(path, encoding="utf-8", size=None):
    """The bytes of a file in UTF-8, without a mark of the byte order. What is said to be UTF-8 is not checked."""
    pieces = _unpacked(path, size)
    if codecs.lookup(encoding).name not in ("utf-8", "utf-8-sig", "ascii"):
        yield from _recoded(path, pieces, encoding)
        return
    start = b""
    for piece in pieces:
        start += piece
        if len(start) >= 3:
            break
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise _wrong(path, 'expected utf-8, got UTF-16; pass encoding="utf-16"', 1)
    start = start.removeprefix(codecs.BOM_UTF8)
    if start:
        yield start
    yield from pieces


def _recoded(path, pieces, encoding):
    decoder, line = codecs.getincrementaldecoder(encoding)(), 1
    for piece in itertools.chain(pieces, [b""]):
        try:
            text = decoder.decode(piece, final=not piece)
        except UnicodeError as error:
            start = error.object[: error.start] if isinstance(error, UnicodeDecodeError) else b""
            line += start.decode(encoding, "ignore").count("\n")
            raise _wrong(path, f"expected {encoding}, got bytes that are not; pass another encoding", line) from None
        line += text.count("\n")
        if text:
            yield text.encode("utf-8", "replace")


def _whole_lines(path, longest, encoding="utf-8", skip=0):
    """Pieces of a file that end with the end of a line, each with the number of its first line."""
    line, kept, length = 1, [], 0
    for piece in itertools.chain(_utf8(path, encoding), [None]):
        if piece is None:
            whole, kept = b"".join([*kept, b"\n"]) if length else b"", []
        else:
            cut = piece.rfind(b"\n") + 1
            if not cut:
                kept.append(piece)
                length += len(piece)
                if length > longest:
                    raise _wrong(path, f"expected a line of at most {longest:,} bytes, got a longer one", line)
                continue
            whole, kept, length = b"".join([*kept, piece[:cut]]), [piece[cut:]], len(piece) - cut
        while skip and whole:
            whole, skip, line = whole[whole.index(b"\n") + 1 :], skip - 1, line + 1
        if whole:
            yield line, whole
            line += whole.count(b"\n")


def _lines(path, encoding, longest):
    """Number and text of each line."""
    for first, piece in _whole_lines(path, longest, encoding):
        if b"\0" in piece:
            raise _binary(path, first + piece.count(b"\n", 0, piece.index(b"\0")))
        try:
            text = piece.decode()
        except UnicodeDecodeError as error:
            line, byte = first + piece.count(b"\n", 0, error.start), piece[error.start]
            hint = 'pass its encoding, for example encoding="latin-1"'
            raise _wrong(path, f"expected utf-8, got the byte 0x{byte:02x}; {hint}", line) from None
        yield from enumerate((line.removesuffix("\r") for line in text[:-1].split("\n")), first)


def _binary(path, line=None):
    hint = 'for text in UTF-16 pass encoding="utf-16"'
    return _wrong(path, f"expected text or a known format, got a binary file (a zero byte); {hint}", line)


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
        raise _wrong(folder, f"cannot be read: {error.strerror}") from None

    for root, folders, names in os.walk(folder, onerror=unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(root, name) for name in names if not name.startswith(".")]
    if not found:
        raise _wrong(folder, "expected files in the folder, got none")
    return sorted(found)


def _manifest(folder):
    path = folder / "manifest.json"
    if not os.path.exists(path):
        raise _wrong(folder, "expected a converted corpus, got a folder without manifest.json")
    data = b"".join(itertools.islice(_unpacked(path, _LONGEST_RECORD), 1))
    try:
        manifest = json.loads(data)
    except (ValueError, RecursionError):
        manifest = None
    if not isinstance(manifest, dict) or manifest.get("format") != _MANIFEST:
        raise _wrong(path, f'expected a JSON object with "format": "{_MANIFEST}"')
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
            raise _wrong(path, f'{what}; pass the files themselves, or format="{inside}", or format="files"')
        return "files"
    return _recognise_file(path, field, encoding)


def _recognise_file(path, field, encoding, empty=None):
    raw = b""
    for piece in _unpacked(path, _HEAD):
        raw += piece
        if len(raw) >= _HEAD:
            break
    if not raw:
        if empty is None:
            raise _wrong(path, "expected documents, got an empty file")
        return empty
    if raw.startswith(b"PK"):
        return "npz"
    for magic, what in _FOREIGN.items():
        if raw.startswith(magic):
            raise _wrong(path, f"is {what}")
    if raw[257:262] == b"ustar":
        raise _wrong(path, "is a tar archive; unpack it first")
    head = b""
    for piece in _utf8(path, encoding, _HEAD):
        head += piece
        if len(head) >= _HEAD:
            break
    if b"\0" in head:
        raise _binary(path)
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
        and (len(lines) == 3 or [bool(_NUMBER.fullmatch(token)) for token in lines[3].split()] == [True] * 3)
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
        raise _wrong(path, 'expected JSON lines, got an array; write an object a line, or pass format="text"')
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
        if not _LABEL.fullmatch(label) or not all(re.fullmatch(rb"[0-9]+:[^:]+", pair) for pair in pairs):
            return None
        found = found or bool(pairs)
        enough = label.isdigit() and len(label) < 10 and (int(label) == len(pairs) or not whole)
        numbered = numbered and enough and b"#" not in line
    return ("ldac" if numbered else "svmlight") if found else None


# Texts.


def _texts(path, source):
    if source.format == "text":
        return (text for _, text in _lines(path, source.encoding, _LONGEST_TEXT) if text and not text.isspace())
    if source.format == "files":
        files = _files(path) if os.path.isdir(path) else [path]
        return (_file_text(file, source.encoding) for file in files)
    if source.format == "jsonl":
        return _json_texts(path, source)
    return _table_texts(path, source)


def _file_text(path, encoding):
    pieces, length = [], 0
    for piece in _utf8(path, encoding):
        pieces.append(piece)
        length += len(piece)
        if length > _LONGEST_TEXT:
            raise _wrong(path, f"expected a document of at most {_LONGEST_TEXT:,} bytes, got a longer one")
    data = b"".join(pieces)
    if b"\0" in data:
        raise _binary(path, 1 + data.count(b"\n", 0, data.index(b"\0")))
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        hint = 'pass its encoding, for example encoding="latin-1"'
        what = f"expected utf-8, got the byte 0x{data[error.start]:02x}; {hint}"
        raise _wrong(path, what, 1 + data.count(b"\n", 0, error.start)) from None


def _records(path, encoding):
    """Number and object of each line that is not blank."""
    for number, line in _lines(path, encoding, _LONGEST_RECORD):
        if not line or line.isspace():
            continue
        try:
            record = json.loads(line)
        except RecursionError:
            raise _wrong(path, "expected a JSON object, got one nested too deeply", number) from None
        except ValueError as error:
            raise _wrong(path, f"expected a JSON object: {error}; got {_shown(line)}", number) from None
        if not isinstance(record, dict):
            raise _wrong(path, f"expected a JSON object, got {_shown(line)}", number)
        yield number, record


def _json_texts(path, source):
    for number, record in _records(path, source.encoding):
        if source.field not in record:
            raise _wrong(path, f"expected the field {source.field!r}, got {_listed(record)}", number)
        text = record[source.field]
        if text is None:
            text = ""  # there is a document, and nothing is known of it
        if not isinstance(text, str):
            raise _wrong(path, f"expected text in the field {source.field!r}, got {_shown(text)}", number)
        # An escape in JSON can stand for half a character, which no file can hold.
        yield text.encode("utf-8", "replace").decode() if not text.isascii() else text


def _rows(path, source):
    """Last line and fields of each record of a table, the header included."""
    fed = 0

    def lines():
        nonlocal fed
        for number, line in _lines(path, source.encoding, _LONGEST_RECORD):
            fed += len(line) + 1
            if fed > _LONGEST_TEXT:
                what = f"expected a record of at most {_LONGEST_TEXT:,} characters, got a longer one; is a quote open?"
                raise _wrong(path, what, number)
            yield line + "\n"

    # The module's own limit is 128 KiB for all tables of the process; ours is the one above.
    csv.field_size_limit(max(csv.field_size_limit(), 2 * _LONGEST_TEXT))
    reader = csv.reader(lines(), delimiter="\t" if source.format == "tsv" else ",")
    try:
        for row in reader:
            fed = 0
            if row:
                yield reader.line_num, row
    except csv.Error as error:
        raise _wrong(path, f"expected {source.format}: {error}", reader.line_num) from None


def _table_texts(path, source):
    rows = _rows(path, source)
    number, header = next(rows, (1, []))
    if header.count(source.field) != 1:
        raise _wrong(path, f"expected one column {source.field!r}, got {_listed(header)}", number)
    place = header.index(source.field)
    for number, row in rows:
        if len(row) != len(header):
            raise _wrong(path, f"expected {_number(len(header), 'column')} as in the header, got {len(row)}", number)
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
            raise _wrong(path, f"{what}; pass field= with the one that holds the text", number)
        field = (likely or texts)[0]
    elif field not in names:
        raise _wrong(path, f"expected the field {field!r}, got {_listed(names)}", number)
    return source._replace(field=field)


def _listed(names):
    names = [_shown(name) for name in names]
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "") if names else "none"


# Words.


def _with_words(source, vocabulary):
    """The source with its vocabulary and the number of its words."""
    declared = None
    for path in source.paths if source.format in ("uci", "mm", "npz") else ():
        header = _header(path, source)
        if declared is not None and header.num_words != declared:
            raise _wrong(
                path, f"expected {_number(declared, 'word')} as in {source.paths[0]}, got {header.num_words:,}"
            )
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
        raise _wrong(name, "expected one word a line, got none")
    if declared is not None and count != declared:
        raise _wrong(name, f"expected V = {_number(declared, 'word')} for {source.paths[0]}, got {count:,}")
    return source._replace(vocabulary=words, num_words=len(words))


def _vocabulary(path, encoding, expected):
    """The words of a file, one a line. If it is known how many there should be, no more are kept, only counted."""
    words, count, length, blank = [], 0, 0, None
    for number, line in _lines(path, encoding, _LONGEST_RECORD):
        word = line.strip()
        if not word:
            blank = blank or number
            continue
        if blank:
            raise _wrong(path, "expected a word, got a blank line", blank)
        count, length = count + 1, length + len(word)
        if length > _LARGEST_VOCABULARY:
            raise _wrong(path, f"expected words of at most {_LARGEST_VOCABULARY:,} characters in all, got more", number)
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


# Counts.


class _Header(NamedTuple):
    """What a file says of itself. ``columns`` of a line of triplets, 2 without counts; ``lines`` before the first."""

    num_docs: int
    num_words: int
    num_entries: int
    columns: int = 3
    lines: int = 0


def _blocks(source):
    if source.format in ("ldac", "svmlight"):
        base = _pair_base(source)
        for path in source.paths:
            yield from _pair_blocks(path, source, base)
    elif source.format == "npz":
        for path in source.paths:
            yield from _npz_blocks(path, source)
    else:
        base = 1 if source.first_id is None else source.first_id
        for path in source.paths:
            header = _header(path, source)
            yield from _triplet_blocks(path, header, partial(_triplets, path, header, base), source.sort)


def _header(path, source):
    """Of uci, mm and npz, believed as far as can be known before the entries are read."""
    if source.format == "npz":
        with _archive(path) as archive:
            return _npz_header(path, archive)[1]
    header = _uci_header(path) if source.format == "uci" else _mm_header(path)
    with open(path, "rb") as file:
        packed = file.read(2) in (b"\x1f\x8b", b"BZ", b"\xfd7")
    # "1 1\n" is the shortest entry, and its end may be missing.
    if not packed and header.num_entries > (path.stat().st_size + 1) // (2 * header.columns):
        what = f"{header.num_entries:,} entries, more than a file of {path.stat().st_size:,} bytes can hold"
        raise _wrong(path, f"the header declares {what}", header.lines)
    return _check_header(path, header)


def _check_header(path, header):
    if header.num_words > _MOST_WORDS or header.num_words > 2**24 + 100 * header.num_entries:
        what = f"{header.num_words:,} words for {_number(header.num_entries, 'entry')}"
    elif header.num_docs > 2**20 + 100 * header.num_entries:
        what = f"{header.num_docs:,} documents for {_number(header.num_entries, 'entry')}"
    else:
        return header
    raise _wrong(path, f"the header declares {what}: expected numbers of a corpus", header.lines or None)


def _uci_header(path):
    numbers = []
    for number, line in itertools.islice(_head_lines(path), 3):
        numbers.append(_whole(path, number, line.strip(), ("documents", "words", "entries")[number - 1]))
    if len(numbers) < 3:
        raise _wrong(path, "expected three lines with the numbers of documents, words and entries, got fewer")
    return _Header(*numbers, lines=3)


def _mm_header(path):
    lines = _head_lines(path)
    _, first = next(lines, (1, b""))
    words = first.lower().split()
    expected = "%%MatrixMarket matrix coordinate integer|real|pattern general"
    if len(words) != 5 or words[:2] != [b"%%matrixmarket", b"matrix"]:
        raise _wrong(path, f"expected {expected}, got {_shown(first)}", 1)
    if words[2] != b"coordinate" or words[3] not in (b"integer", b"real", b"pattern") or words[4] != b"general":
        raise _wrong(path, f"can read only {expected}, got {_shown(first)}", 1)
    for number, line in lines:
        if line.lstrip()[:1] in (b"", b"%"):
            continue
        sizes = line.split()
        if len(sizes) != 3:
            raise _wrong(path, f"expected documents, words and entries, got {_shown(line)}", number)
        names = ("documents", "words", "entries")
        numbers = [_whole(path, number, size, name) for size, name in zip(sizes, names, strict=True)]
        return _Header(*numbers, columns=2 if words[3] == b"pattern" else 3, lines=number)
    raise _wrong(path, "expected a line with the numbers of documents, words and entries, got none")


def _head_lines(path):
    for first, piece in _whole_lines(path, _LONGEST_RECORD):
        yield from enumerate(piece[:-1].split(b"\n"), first)


def _whole(path, line, token, what):
    if not token.isdigit() or len(token) > 19:
        raise _wrong(path, f"expected the number of {what}, got {_shown(token)}", line)
    return int(token)


def _tidied(piece, colon):
    """Lines whose tokens are followed by one separator each, and where those are; None if they cannot be had so."""
    if any(blank in piece for blank in (b"\t", b"\r", b"\v", b"\f")):
        piece = piece.translate(_BLANKS)
    for tidy in (None, _without_ends, _without_blanks):
        piece = tidy(piece) if tidy else piece
        data = np.frombuffer(piece, np.uint8)
        separators = np.flatnonzero((data <= 32) | (data == 58) if colon else data <= 32)
        if not len(separators) or (separators[0] > 0 and (separators[1:] - separators[:-1]).min(initial=2) > 1):
            return piece, separators, data[separators]
    return None


def _without_ends(piece):
    """Without the blank at the end of lines, which is common and quickly mended."""
    return piece.replace(b" \n", b"\n")


def _without_blanks(piece):
    """With one blank between words, none elsewhere, and no blank lines."""
    lines = (b" ".join(line.split()) for line in piece.split(b"\n"))
    return b"".join(line + b"\n" for line in lines if line)


def _numbers(piece):
    """The numbers of a piece in one array, int64 or float64; None if something in it is no plain number."""
    rest = piece.translate(None, b"0123456789 \n")
    if not rest:
        # The quickest parser there is: 15 to 20 million numbers a second. It stops at the largest int64.
        numbers = np.fromstring(piece, np.int64, sep=" ") if piece else np.zeros(0, np.int64)
        return numbers if numbers.max(initial=0) < 2**62 else None
    if rest.translate(None, b".eE+-"):
        return None
    try:
        return np.array(piece.split(), np.float64)
    except ValueError:
        return None


def _count(path, line, token):
    """A count, token by token: where a piece could not be read at once."""
    number = float(token) if _NUMBER.fullmatch(token) else np.nan
    if not 0 <= number <= _MOST_COUNT:
        raise _wrong(path, f"expected a count from 0 to {_MOST_COUNT:.0e}, got {_shown(token)}", line)
    return number


def _id(path, line, token, what, first, last, hint):
    number = float(token) if _NUMBER.fullmatch(token) else np.nan
    if not first <= number <= last or number != int(number):
        raise _wrong(path, f"expected a {what} from {first} to {last}, got {_shown(token)}{hint}", line)
    return int(number)


# Triplets.


def _triplets(path, header, base, ordered):
    """Documents, words (from 0) and counts of the lines of uci and mm; checked, and that documents do not go back."""
    ranges = ((base, base + header.num_docs - 1), (base, base + header.num_words - 1), (0, _MOST_COUNT))
    read, latest = 0, base
    for line, piece in _whole_lines(path, _LONGEST_RECORD, skip=header.lines):
        table = _table(piece, header.columns)
        if (
            table is None
            or read + len(table[0]) > header.num_entries
            or not all(_within(column, *limits) for column, limits in zip(table, ranges, strict=False))
            or not (_is_whole(table[0]) and _is_whole(table[1]))
            or (ordered and not _rises(table[0], latest))
        ):
            table = _table_slowly(path, line, piece, header, base, read, latest if ordered else base)
        if not len(table[0]):
            continue
        read, latest = read + len(table[0]), int(table[0][-1])
        counts = table[2].astype(np.float64) if header.columns == 3 else np.ones(len(table[0]))
        yield table[0].astype(np.int64) - base, table[1].astype(np.int64) - base, counts
    if read != header.num_entries:
        raise _wrong(path, f"the header declares {_number(header.num_entries, 'entry')}, the file has {read:,}")


def _within(numbers, first, last):
    return not len(numbers) or bool(first <= numbers.min() and numbers.max() <= last)


def _is_whole(numbers):
    return numbers.dtype.kind == "i" or not (numbers % 1).any()


def _rises(numbers, latest):
    return not len(numbers) or (numbers[0] >= latest and not (numbers[1:] < numbers[:-1]).any())


def _table(piece, columns):
    """Columns of numbers; None if something in the piece is not as it should be."""
    tidied = _tidied(piece, colon=False)
    if tidied is None:
        return None
    piece, _, kinds = tidied
    if len(kinds) % columns:
        return None
    kinds = kinds.reshape(-1, columns)
    numbers = _numbers(piece)
    if numbers is None or (kinds[:, -1] != 10).any() or (kinds[:, :-1] != 32).any() or len(numbers) != kinds.size:
        return None
    return [np.ascontiguousarray(numbers[place::columns]) for place in range(columns)]


def _table_slowly(path, first, piece, header, base, read, latest):
    """What _table and the checks after it do, line by line, to say in which line something is wrong."""
    rows = []
    hint = "; if the ids of this file count from 0, pass first_id=0" if base else ""
    for line, text in enumerate(piece[:-1].split(b"\n"), first):
        tokens = text.split()
        if not tokens:
            continue
        if len(tokens) != header.columns:
            shape = "document word count" if header.columns == 3 else "document word"
            raise _wrong(path, f"expected {shape}, got {_shown(text)}", line)
        if read + len(rows) == header.num_entries:
            raise _wrong(path, f"the header declares {_number(header.num_entries, 'entry')}, the file has more", line)
        doc = _id(path, line, tokens[0], "document", base, base + header.num_docs - 1, hint)
        if doc < latest:
            what = f"expected documents in order, got {doc} after {latest}"
            raise _wrong(path, f"{what}; pass sort=True, or sort the file by its first number", line)
        latest = doc
        word = _id(path, line, tokens[1], "word", base, base + header.num_words - 1, hint)
        rows.append((doc, word, *(_count(path, line, token) for token in tokens[2:])))
    return list(np.array(rows, np.float64).reshape(-1, header.columns).T)


def _triplet_blocks(path, header, read, sort):
    """Blocks from triplets; ``read(ordered)`` begins to read them."""
    if sort or not _in_order(read(False)):
        return _assembled(path, _sorted(path, read(False)), header)
    return _assembled(path, read(True), header)


def _in_order(triplets):
    """Whether the first triplets come by document. If they come by word as well, they are taken to come by word."""
    seen, latest, word, words_in_order, docs_differ = 0, -1, -1, True, False
    for docs, words, _ in triplets:
        if not _rises(docs, latest):
            return False
        words_in_order = words_in_order and _rises(words, word)
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
            for run in _gathered(triplets, 2 * _BLOCK):
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
        raise _wrong(path, f"cannot be sorted in {tempfile.gettempdir()}: {error.strerror}") from None


def _merged(columns, ends):
    docs = columns[0]
    runs = [[first, last] for first, last in itertools.pairwise(ends)]
    while runs:
        share = max(1, _BLOCK // len(runs))
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
                for start in range(first, last, _BLOCK):
                    yield tuple(np.array(column[start : min(start + _BLOCK, last)]) for column in columns)
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
            raise _wrong(path, f"expected the documents of a corpus, got {what}")
        while following < stop:
            last = min(stop, following + _BLOCK)
            ends = np.searchsorted(docs, np.arange(following, last + 1))
            inside = slice(ends[0], ends[-1])
            yield _block(path, ends - ends[0], words[inside], counts[inside])
            following = last

    kept, most = None, _BLOCK
    for part in _gathered(triplets, _BLOCK // 2):
        seen += len(part[0])
        kept = part if kept is None else tuple(np.concatenate(pair) for pair in zip(kept, part, strict=True))
        docs, words, counts = kept
        cut = int(np.searchsorted(docs, docs[-1]))
        if cut:
            yield from documents(int(docs[-1]), docs[:cut], words[:cut], counts[:cut])
            kept, most = (docs[cut:], words[cut:], counts[cut:]), _BLOCK
        elif len(docs) > most:
            # One document so far: the same words again and again, or more different ones than we hold.
            block = _block(path, np.array([0, len(docs)]), words, counts)
            kept = (docs[: len(block.data)], block.indices.astype(np.int64), block.data.astype(np.float64))
            most = 2 * len(block.data) + _BLOCK
    if kept is None:
        kept = (np.zeros(0, np.int64),) * 2 + (np.zeros(0),)
    yield from documents(header.num_docs, *kept)


def _block(path, indptr, words, counts):
    """A Block, with words sorted, the same words added and zeros left out."""
    indptr, data = np.asarray(indptr, np.int64), np.asarray(counts, np.float32)
    indices = np.asarray(words, np.int32)
    rising = np.diff(indices, append=0) > 0
    rising[indptr[1:][np.diff(indptr) > 0] - 1] = True  # the last word of a document may be any
    if not rising.all() or not (data > 0).all():
        shape = (len(indptr) - 1, int(indices.max()) + 1)
        table = scipy.sparse.csr_array((np.array(counts, np.float64), indices.copy(), indptr), shape=shape)
        table.sum_duplicates()
        if table.data.max() > _MOST_COUNT:
            raise _wrong(path, f"expected counts of at most {_MOST_COUNT:.0e} for a word of a document, got more")
        table.data = table.data.astype(np.float32)
        table.eliminate_zeros()
        indptr, indices, data = (
            np.asarray(a, t) for a, t in ((table.indptr, np.int64), (table.indices, np.int32), (table.data, np.float32))
        )
    if len(data) > _WIDEST and np.diff(indptr).max() > _WIDEST:
        raise _wrong(path, f"expected at most {_WIDEST:,} different words in a document, got more")
    return Block(indptr, indices, data)


# Pairs.


def _pair_blocks(path, source, base):
    last = base + (_MOST_WORDS if source.num_words is None else source.num_words) - 1
    lengths, words, counts, held = [], [], [], 0
    for parts in itertools.chain(_pairs(path, source, base, last), [None]):
        if parts is not None:
            for column, part in zip((lengths, words, counts), parts, strict=True):
                column.append(part)
            held += len(parts[0]) + len(parts[1])
        if lengths and (parts is None or held >= _BLOCK):
            indptr = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
            yield _block(path, indptr, np.concatenate(words) - base, np.concatenate(counts))
            lengths, words, counts, held = [], [], [], 0


def _pair_base(source):
    """The id of the first word: 0, unless it is given or the vocabulary speaks against it."""
    if source.first_id is not None or source.num_words is None:
        return source.first_id or 0
    found = False
    for path in source.paths:
        for _, words, _ in _pairs(path, source, 0, _MOST_WORDS):
            if words.min(initial=1) == 0:
                return 0
            found = found or bool((words == source.num_words).any())
    return int(found)


def _pairs(path, source, base, last):
    """Number of pairs of each line; all ids; all counts. Ids are as in the file."""
    for line, piece in _whole_lines(path, _LONGEST_RECORD):
        parts = _pairs_at_once(piece, source.format == "ldac")
        if parts is None or not (_within(parts[1], base, last) and _within(parts[2], 0, _MOST_COUNT)):
            parts = _pairs_slowly(path, line, piece, source, base, last)
        yield parts


def _pairs_at_once(piece, numbered):
    """Of a piece of lines; None if something in it is not as it should be, or not as usual."""
    if not numbered:
        piece = re.sub(rb"#[^\n]*", b"", piece) if b"#" in piece else piece
        piece = re.sub(rb"(?m)^([^\s:]+[ \t]+)qid:[0-9]+(?=\s)", rb"\1", piece) if b"qid:" in piece else piece
        piece = re.sub(rb"(?m)^[-+]?[0-9.][-+0-9.,eE]*(?=\s)", b"0", piece)
    tidied = _tidied(piece, colon=True)
    if tidied is None:
        return None
    piece, separators, kinds = tidied
    numbers = _numbers(piece.replace(b":", b" "))
    if numbers is None or len(numbers) != len(separators):
        return None
    stops = np.flatnonzero(kinds == 10)
    lengths = np.diff(stops, prepend=-1)
    # A line is label, id:count, id:count, …: after an id stands a colon, and nowhere else.
    place = np.arange(len(numbers)) - np.repeat(stops + 1 - lengths, lengths)
    if ((kinds == 58) != place % 2).any() or (lengths % 2 == 0).any():
        return None
    lengths = (lengths - 1) // 2
    if numbered and (numbers[place == 0] != lengths).any():
        return None
    pairs = numbers[place > 0].reshape(-1, 2)
    if not (_within(pairs[:, 0], 0, _MOST_WORDS) and _is_whole(pairs[:, 0])):
        return None
    return lengths, pairs[:, 0].astype(np.int64), pairs[:, 1].astype(np.float64)


def _pairs_slowly(path, first, piece, source, base, last):
    """What _pairs_at_once and the checks after it do, line by line, to say in which line something is wrong."""
    lengths, words, counts = [], [], []
    numbered = source.format == "ldac"
    expected = "N id:count …" if numbered else "label id:count …"
    if source.num_words is None:
        hint = "; if the ids of this file count from 0, pass first_id=0" if base else ""
    else:
        hint = f" for a vocabulary of {_number(source.num_words, 'word')}; is it the one of this file? If its ids "
        hint += f"count from {1 - base}, pass first_id={1 - base}"
    for line, text in enumerate(piece[:-1].split(b"\n"), first):
        label, *pairs = (text if numbered else text.partition(b"#")[0]).split() or [b""]
        if not label:
            continue
        if pairs and not numbered and re.fullmatch(rb"qid:[0-9]+", pairs[0]):
            pairs = pairs[1:]
        if not (_NUMBER if numbered else _LABEL).fullmatch(label):
            raise _wrong(path, f"expected {expected}, got {_shown(text)}", line)
        if numbered and float(label) != len(pairs):
            raise _wrong(path, f"expected as many pairs as the line says, {_shown(label)}; got {len(pairs)}", line)
        for pair in pairs:
            word, colon, count = pair.partition(b":")
            if not colon:
                raise _wrong(path, f"expected {expected}, got {_shown(pair)}", line)
            words.append(_id(path, line, word, "word id", base, last, hint))
            counts.append(_count(path, line, count))
        lengths.append(len(pairs))
    return np.array(lengths, np.int64), np.array(words, np.int64), np.array(counts, np.float64)


# Archives of arrays.


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
                piece = self.stream.read(min(size, _PIECE))
            if not piece:
                raise _wrong(self.path, f"{self.name} is truncated")
            pieces.append(piece)
            size -= len(piece)
        return np.frombuffer(b"".join(pieces), self.dtype)

    def close(self):
        """The end, where the archive's checksum is compared."""
        with _damage(self.path):
            longer = self.stream.read(1)
        if longer:
            raise _wrong(self.path, f"{self.name} is longer than it says")


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
        raise _wrong(path, f"expected scipy.sparse.save_npz, got a damaged archive: {error}") from None


@contextmanager
def _archive(path):
    """A zip archive. One that is packed itself is unpacked into a temporary file: it is not read in order."""
    with ExitStack() as stack:
        pieces = _unpacked(path)
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
        raise _wrong(path, f"expected scipy.sparse.save_npz, got an archive without {name}.npy") from None
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise _wrong(path, f"{name}.npy: expected numpy's own compression, got another")
    with _damage(path):
        stream = archive.open(info)
        version = np.lib.format.read_magic(stream)
        if version not in ((1, 0), (2, 0)):
            raise _wrong(path, f"{name}.npy: expected version 1 or 2 of the format, got {version}")
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(stream)
    if dtype.kind not in kinds or dtype.hasobject or not dtype.itemsize or len(shape) > 1:
        raise _wrong(path, f"{name}.npy: expected one row of numbers, got {dtype} {shape}")
    if length not in (None, *shape) or (shape and not 0 <= shape[0] <= info.file_size):
        raise _wrong(path, f"{name}.npy: expected {length} numbers, got {shape}")
    return _Member(path, f"{name}.npy", stream, dtype, shape[0] if shape else 1)


def _npz_header(path, archive):
    """The layout, "csr", "csc" or "coo", and the header."""
    layout = _member(path, archive, "format", "SU")
    layout = layout.take(1)[0] if layout.length == 1 and layout.dtype.itemsize <= 64 else b""
    layout = layout.decode("ascii", "replace") if isinstance(layout, bytes) else str(layout)
    if layout not in ("csr", "csc", "coo"):
        raise _wrong(path, f"expected a matrix in the format csr, csc or coo, got {layout!r}")
    num_docs, num_words = _member(path, archive, "shape", "iu", 2).take(2).tolist()
    entries = _member(path, archive, "data", "biuf").length
    if num_docs < 0 or num_words < 0:
        raise _wrong(path, f"expected a shape of documents × words, got {num_docs} × {num_words}")
    return layout, _check_header(path, _Header(num_docs, num_words, entries))


def _npz_blocks(path, source):
    with _archive(path) as archive:
        layout, header = _npz_header(path, archive)
        if layout == "csr":
            yield from _csr_blocks(path, archive, header)
            return

        def read(ordered):
            return (_coo_triplets if layout == "coo" else _csc_triplets)(path, archive, header, ordered)

        yield from _triplet_blocks(path, header, read, source.sort or layout == "csc")


def _entries(path, header, docs, words, counts):
    """Checked columns of an archive, as numbers of one kind."""
    counts = counts.astype(np.float64)
    for what, ids, number in (("document", docs, header.num_docs), ("word", words, header.num_words)):
        if len(ids) and not (ids.min() >= 0 and ids.max() < number):
            raise _wrong(path, f"expected a {what} from 0 to {number - 1}, got {ids.min()} to {ids.max()}")
    wrong = ~((counts >= 0) & (counts <= _MOST_COUNT))
    if wrong.any():
        at = int(np.argmax(wrong))
        where = f"document {docs[at]}, word {words[at]}"
        raise _wrong(path, f"expected a count from 0 to {_MOST_COUNT:.0e}, got {counts[at]} ({where}, from 0)")
    return docs.astype(np.int64), words.astype(np.int64), counts


def _compressed(path, archive, header, rows):
    """Numbers and lengths of the rows of csr (or columns of csc), in groups; and their entries."""
    entries = header.num_entries
    indptr = _member(path, archive, "indptr", "iu", rows + 1)
    indices = _member(path, archive, "indices", "iu", entries)
    data = _member(path, archive, "data", "biuf", entries)
    first, before = 0, int(indptr.take(1)[0])
    if before:
        raise _wrong(path, f"indptr.npy: expected 0 at first, got {before}")
    while first < rows:
        ends = indptr.take(min(rows - first, _BLOCK // 4)).astype(np.int64)
        if not _rises(ends, before) or ends[-1] > entries:
            raise _wrong(path, f"indptr.npy: expected numbers that rise to {entries}, got others")
        start = 0
        while start < len(ends):
            stop = max(int(np.searchsorted(ends, before + _BLOCK, side="right")), start + 1)
            number = int(ends[stop - 1]) - before
            yield first + start, np.diff(ends[start:stop], prepend=before), number, indices, data
            start, before = stop, int(ends[stop - 1])
        first += len(ends)
    if before != entries:
        raise _wrong(path, f"indptr.npy: expected {entries} at last, got {before}")
    for member in (indptr, indices, data):
        member.close()


def _csr_blocks(path, archive, header):
    for first, lengths, number, indices, data in _compressed(path, archive, header, header.num_docs):
        if number > max(_WIDEST, _BLOCK):
            raise _wrong(path, f"expected at most {_WIDEST:,} words in a document, got {number:,} in document {first}")
        docs = np.repeat(np.arange(first, first + len(lengths)), lengths)
        _, words, counts = _entries(path, header, docs, indices.take(number), data.take(number))
        yield _block(path, np.concatenate([[0], np.cumsum(lengths)]), words, counts)


def _csc_triplets(path, archive, header, ordered):
    for first, lengths, number, indices, data in _compressed(path, archive, header, header.num_words):
        # A column may be as long as there are documents: in parts.
        ends = np.cumsum(lengths)
        for start in range(0, number, _BLOCK):
            stop = min(start + _BLOCK, number)
            words = first + np.searchsorted(ends, np.arange(start, stop), side="right")
            yield _entries(path, header, indices.take(stop - start), words, data.take(stop - start))


def _coo_triplets(path, archive, header, ordered):
    names = (("row", "iu"), ("col", "iu"), ("data", "biuf"))
    members = [_member(path, archive, name, kinds, header.num_entries) for name, kinds in names]
    latest = 0
    for start in range(0, header.num_entries, _BLOCK):
        number = min(_BLOCK, header.num_entries - start)
        docs, words, counts = _entries(path, header, *(member.take(number) for member in members))
        if ordered and not _rises(docs, latest):
            raise _wrong(path, "expected documents in order; pass sort=True, or save the matrix as csr")
        latest = docs[-1]
        yield docs, words, counts
    for member in members:
        member.close()
