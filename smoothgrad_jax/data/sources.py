"""Sources of documents: recognise the format of files, and stream their documents in bounded memory.

| format       | a document is                | recognised by                                                          |
|--------------|------------------------------|------------------------------------------------------------------------|
| ``text``     | a line, also a blank one     | no other format                                                        |
| ``files``    | a file in a folder           | a folder                                                               |
| ``jsonl``    | a line, a JSON object        | a first line that is a JSON object                                     |
| ``csv``      | a record                     | a header with the given column, or text, body, abstract or content;    |
|              |                              | the delimiter, of ``,`` ``;`` ``|`` and tab, is that of the header     |
| ``tsv``      | a record                     | as csv; both also by names that end in ``.csv`` or ``.tsv``            |
| ``parquet``  | a row                        | the first four bytes; read by pyarrow                                  |
| ``uci``      | all lines ``d w count``      | three lines of one number: D, V, entries. d and w count from 1         |
| ``mm``       | a row: lines ``d w count``   | ``%%MatrixMarket``; coordinate, integer, real or pattern, general      |
| ``ldac``     | a line ``N w:count …``       | N pairs on each line. w counts from 0 (or 1, see :func:`open_source`)  |
| ``svmlight`` | a line ``label w:count … #`` | a number before the pairs; label and qid are ignored. w as in ldac     |
| ``npz``      | a row                        | a zip archive; ``scipy.sparse.save_npz`` of csr, csc or coo            |
| ``folder``   |                              | a folder that :mod:`smoothgrad_jax.data.corpus_folder` wrote           |

Documents of files, jsonl, csv, tsv, parquet and folder can have ids and kept fields
(:mod:`smoothgrad_jax.data.documents`). The formats are modules of :mod:`smoothgrad_jax.data.formats`. Files may be
compressed by gzip, bzip2 or xz. Several files form one corpus, in the given order.
"""

import codecs
import contextlib
import os
import re
import zipfile
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, TypeVar

from smoothgrad_jax.data import compressed_files, formats, text
from smoothgrad_jax.data.compressed_files import SUFFIXES, decompress, read_utf8, without_suffix
from smoothgrad_jax.data.count_blocks import Block
from smoothgrad_jax.data.documents import Document, Metadata
from smoothgrad_jax.data.errors import CorpusError, OptionName, Pieces, corpus_error, plural
from smoothgrad_jax.data.local_files import regular_file

_HEAD_BYTES = 2**16  # the part of a file from which its format is recognised
_HEAD_LINES = 200
_FOREIGN = {
    b"(\xb5/\xfd": "compressed by zstd; decompress it first",
    b"\x1f\x9d": "compressed by compress; decompress it first",
    b"7z\xbc\xaf": "a 7z archive; unpack it first",
    b"Rar!\x1a\x07": "a rar archive; unpack it first",
    b"%PDF-": "a PDF document; extract its text first, for example by pdftotext",
    b"%!PS": "a PostScript document; extract its text first",
    b"{\\rtf": "an RTF document; save it as plain text first",
    b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": "an Office document (.doc, .xls, .ppt); save it as plain text or CSV first",
    b"\x89HDF": "an HDF5 file; save its matrix by scipy.sparse.save_npz first",
    b"\x93NUMPY": "a single array; save a sparse matrix by scipy.sparse.save_npz",
    b"\x80\x04\x95": "a pickle, which could execute any code; write its texts as JSON lines first",
    b"\x80\x05\x95": "a pickle, which could execute any code; write its texts as JSON lines first",
    b"SQLite format 3\0": "an SQLite database; export its table as CSV first",
    b"ARROW1": "an Arrow (Feather) file; write it as Parquet first",
    **dict.fromkeys((b"\x89PNG", b"\xff\xd8\xff"), "an image; extract its text first"),
}
# Members of zip archives -> what the archive is.
_ARCHIVES = {
    "word/document.xml": "a Word document; save it as plain text first, or convert it: pandoc --to plain",
    "xl/workbook.xml": "an Excel workbook; save the sheet with the texts as CSV first",
    "ppt/presentation.xml": "a PowerPoint presentation; extract its text first",
    "META-INF/container.xml": "an EPUB book; convert it to plain text first: pandoc --to plain",
    "content.xml": "an OpenDocument file; save it as plain text or CSV first",
}

Part = TypeVar("Part", Document, Block)


class Source(NamedTuple):
    """Files that form one corpus, recognised but not yet read; made by :func:`open_source`.

    A source can be read any number of times. Every line is checked when it is read.

    Attributes:
      paths: The files; "files" may be folders, and "folder" is one.
      format: The name of a format.
      vocabulary: The words, if they are given or come with the counts.
      num_words: V, if it is known from a header or a vocabulary.
      field: The name of the text in jsonl, csv, tsv and parquet.
      id: The name of the field with the ids; None if documents are identified by their row numbers.
      keep: The names of the fields that are kept beside the text.
      encoding: The encoding of texts.
      first_id: The id of the first word (in uci and mm also of the first document), if given.
      sort: Whether to sort triplets without inspecting their order.
      words_file: The file that contains the vocabulary of counts, if there is one.
      loaded: What the format has already read when it opened the files.
    """

    paths: tuple[Path, ...]
    format: str
    vocabulary: list[str] | None = None
    num_words: int | None = None
    field: str | None = None
    id: str | None = None
    keep: tuple[str, ...] = ()
    encoding: str = "utf-8"
    first_id: int | None = None
    sort: bool = False
    words_file: Path | None = None
    loaded: object = None

    @property
    def is_text(self) -> bool:
        """Whether the source has :meth:`documents`; otherwise it has :meth:`blocks`."""
        return formats.get(self.format).documents is not None

    @property
    def has_metadata(self) -> bool:
        """Whether documents have ids or kept fields."""
        return self.id is not None or bool(self.keep)

    def documents(self) -> Iterator[Document]:
        """Yield the documents of a source of text with their ids and kept fields, or raise :class:`CorpusError`.

        A blank line of "text" is an empty document, and so is an empty record or file. Blank lines between the records
        of other formats are not documents.
        """
        read = formats.get(self.format).documents
        if read is None:
            raise corpus_error(self.paths[0], f"contains {self.format}, not text")
        return _at_least_one(self, read(self))

    def texts(self) -> Iterator[str]:
        """Yield the texts of :meth:`documents`."""
        return (document.text for document in self.documents())

    def metadata(self) -> Iterator[Metadata]:
        """Yield the ids and kept fields of all documents, of text or of counts; nothing if there are none."""
        if not self.has_metadata:
            return iter(())
        read = formats.get(self.format).metadata
        return read(self) if read else (document.metadata for document in self.documents())

    def blocks(self) -> Iterator[Block]:
        """Yield the documents of a source of counts, in blocks of about a million entries or documents."""
        read = formats.get(self.format).blocks
        if read is None:
            raise corpus_error(self.paths[0], f"contains {self.format}, not counts")
        return _at_least_one(self, read(self))

    def with_num_words(self, path: Path, num_words: int) -> "Source":
        """Return the source with the V that one of its files declares, which must be the same in all files."""
        if self.num_words not in (None, num_words):
            expected = f"expected {plural(self.num_words or 0, 'word')} as in {self.paths[0]}"
            raise corpus_error(path, f"{expected}, got {num_words:,}")
        return self._replace(num_words=num_words)


class Head:
    """The beginning of a file, from which formats recognise it: its first bytes are ``raw``, of a folder none.

    ``field`` is the column that a table must have, if it is given.
    """

    def __init__(self, path: Path, field: str | None, encoding: str):
        self.path, self.field, self.is_folder = path, field, os.path.isdir(path)
        self.raw = b"" if self.is_folder else _first_bytes(decompress(path, _HEAD_BYTES))
        self._encoding = encoding

    @cached_property
    def text(self) -> bytes:
        """The first bytes in UTF-8; an error if the file is binary. Formats of binary files are tried first."""
        text = _first_bytes(read_utf8(self.path, self._encoding, _HEAD_BYTES)) if self.raw else b""
        if b"\0" in text:
            raise compressed_files.binary_error(self.path)
        return text

    @cached_property
    def complete(self) -> bool:
        """Whether :attr:`lines` are complete; False if the first line is longer than the beginning of the file."""
        return len(self.text) < _HEAD_BYTES or b"\n" in self.text

    @cached_property
    def lines(self) -> list[bytes]:
        """The first lines that are not blank, or the complete words of the first line if that is longer."""
        lines = self.text.split(b"\n")
        if len(self.text) >= _HEAD_BYTES:
            lines = lines[:-1] if len(lines) > 1 else [self.text[: max(self.text.rfind(b" "), 0)]]
        return [line.strip() for line in lines[:_HEAD_LINES] if line.strip()]


def open_source(
    paths: str | os.PathLike | Iterable[str | os.PathLike],
    *,
    field: str | None = None,
    id: str | None = None,
    keep: Iterable[str] = (),
    vocabulary: str | os.PathLike | Iterable[str] | bool | None = None,
    first_id: int | None = None,
    encoding: str = "utf-8",
    sort: bool = False,
    format: str | None = None,
) -> Source:
    """Recognise files as one corpus, and read their headers.

    Args:
      paths: A file or folder, or several, which form one corpus in the given order and have one format. A pipe, and
        the standard input ``"-"``, are first copied to a temporary file, because a source is read several times.
      format: The name of a format, by default recognised from the content. A folder in a format other than "files" and
        "folder" stands for the files in it.
      field: The field of jsonl, or column of csv, tsv and parquet, with the text. By default the first of "text",
        "body", "abstract", "content" that exists, or the only one that contains text.
      id: The field of jsonl, or column of csv, tsv and parquet, with the ids. By default the first of "id", "doi",
        "url" that exists, in small or capital letters. The ids of "files" are the names of the files. A document
        without an id is identified by its row number.
      keep: The fields or columns to keep for the outputs that have one row per document. A corpus folder keeps those
        with which it was converted; by default all of them are used.
      vocabulary: A file with one word per line, or the words. By default, counts use ``vocab.X.txt`` in the folder of
        ``docword.X.txt``, and ``vocab.txt`` or ``vocabulary.txt`` in the folder of other files; False uses none.
      first_id: The first id in the file, 0 or 1. By default 1 for uci and mm; for ldac and svmlight 0, unless there is
        a vocabulary of V words, no id 0, and an id V.
      encoding: The encoding of texts and of the vocabulary.
      sort: Sort triplets by document, without inspecting their order first.

    Raises:
      CorpusError: If a file is missing, empty, binary, or of another format than the others; a header is wrong; the
        vocabulary has the wrong length; the format has no such option; or an option has an unknown value.
    """
    if format is not None and format not in formats.NAMES:
        expected = f": expected one of {', '.join(formats.NAMES)}; got {format!r}"
        raise CorpusError(OptionName("format"), expected)
    if first_id not in (None, 0, 1):
        raise CorpusError(OptionName("first_id"), f": expected 0 or 1; got {first_id!r}")
    _check_encoding(encoding)
    found = [regular_file(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)]
    if not found:
        raise CorpusError("expected at least one file")
    if format not in (None, "files", "folder"):
        found = [file for path in found for file in (files_in(path) if os.path.isdir(path) else [path])]
    kinds = [format or recognise(path, field, encoding) for path in found]
    for path, kind in zip(found, kinds, strict=True):
        if kind != kinds[0]:
            problem = f"expected {kinds[0]} as in {found[0]}, got {kind}; if that is wrong, pass "
            raise corpus_error(path, (problem, OptionName("format")))
    keep = tuple(dict.fromkeys([keep] if isinstance(keep, str) else keep))
    source = Source(tuple(found), kinds[0], None, None, field, id, keep, encoding, first_id, sort)
    entry = formats.get(source.format)
    given = {"field": field, "id": id, "keep": ",".join(keep) or None, "first_id": first_id, "sort": sort or None}
    for name, value in given.items():
        if value is not None and name not in entry.options:
            raise corpus_error(found[0], (OptionName(name, value), f" has no meaning for {source.format}"))
    return _with_vocabulary(entry.prepare(source) if entry.prepare else source, vocabulary)


def recognise(path: str | os.PathLike, field: str | None = None, encoding: str = "utf-8") -> str:
    """Return the name of the format of a file or folder, from its content.

    The arguments are those of :func:`open_source`.

    Raises:
      CorpusError: If the file is missing, empty or binary, or of a known format that cannot be read.
    """
    _check_encoding(encoding)
    path = Path(path)
    head = Head(path, field, encoding)
    if not head.raw and not head.is_folder:
        raise corpus_error(path, "expected documents, got an empty file")
    name = _first_format(head)
    if name == "files":
        _check_texts(path, field, encoding)
    elif name == "text" and path.suffix == ".json" and re.match(rb"\[\s*[\[{\"]", b"".join(head.lines[:1])):
        problem = "expected JSON lines, got an array; write one object per line, or pass "
        raise corpus_error(path, (problem, OptionName("format", "text")))
    return name


def files_in(folder: Path) -> list[Path]:
    """Return the files of a folder and its subfolders, in the order of their names, without hidden ones."""
    found: list[Path] = []

    def unreadable(error: OSError) -> None:
        raise corpus_error(folder, f"cannot be read: {error.strerror}") from None

    for root, folders, names in os.walk(folder, onerror=unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(root, name) for name in names if not name.startswith(".")]
    if not found:
        raise corpus_error(folder, "expected files in the folder, got none")
    return sorted(found)


def _at_least_one(source: Source, parts: Iterator[Part]) -> Iterator[Part]:
    found = False
    for part in parts:
        found = True
        yield part
    if not found:
        raise corpus_error(source.paths[0], "expected documents, got none")


def _check_encoding(encoding: str) -> None:
    try:
        "".encode(encoding)
    except (LookupError, UnicodeError, ValueError):
        problem = f": expected the name of a text encoding, got {encoding!r}"
        raise CorpusError(OptionName("encoding"), problem) from None


def _refuse_foreign(head: Head) -> None:
    """Raise an error that names the kind of a file that no format reads."""
    kind = next((kind for magic, kind in _FOREIGN.items() if head.raw.startswith(magic)), None)
    if head.raw[257:262] == b"ustar":
        kind = "a tar archive; unpack it first"
    if head.raw.startswith(b"PK"):
        with contextlib.suppress(zipfile.BadZipFile, OSError, NotImplementedError, ValueError):
            with zipfile.ZipFile(head.path) as archive:
                names = archive.namelist()
            kind = next((kind for name, kind in _ARCHIVES.items() if name in names), None)
            if not kind and not any(name.endswith(".npy") for name in names):
                kind = "a zip archive; unpack it first"
    if kind:
        raise corpus_error(head.path, f"is {kind}")


def _first_format(head: Head) -> str:
    _refuse_foreign(head)
    return next(name for name in formats.by_priority() if formats.get(name).recognise(head))


def _check_texts(folder: Path, field: str | None, encoding: str) -> None:
    """Raise an error if the first file of a folder is not plain text."""
    first = files_in(folder)[0]
    head = Head(first, field, encoding)
    inside = _first_format(head) if head.raw else "text"
    if inside != "text":
        problem = f"expected a folder with one text per file, but {first.name} is recognised as {inside}; pass "
        options = (
            OptionName("format", inside),
            " to read all files in that format, or ",
            OptionName("format", "files"),
        )
        raise corpus_error(folder, (problem, *options, " to read each file as one text"))


def _first_bytes(chunks: Iterator[bytes]) -> bytes:
    head = b""
    for chunk in chunks:
        head += chunk
        if len(head) >= _HEAD_BYTES:
            break
    return head


def _with_vocabulary(source: Source, given: str | os.PathLike | Iterable[str] | bool | None) -> Source:
    """Return the source with its vocabulary, whose length must be V if that is declared."""
    if source.format == "folder" and given not in (None, False):
        raise corpus_error(source.paths[0], "a corpus folder contains its words; omit other words")
    remedy: Pieces = ()
    if given is None and not source.is_text and source.format != "folder":
        given, remedy = _find_vocabulary(source.paths), ("; to ignore the file, pass ", OptionName("vocabulary", False))
    path = Path(given) if isinstance(given, str | os.PathLike) else None
    if path is None and not source.is_text and codecs.lookup(source.encoding).name != "utf-8":
        reason = f" has no meaning for {source.format} without a file of its words"
        raise corpus_error(source.paths[0], (OptionName("encoding", source.encoding), reason))
    if isinstance(given, str | os.PathLike):
        words = text.read_words(given, source.encoding)
    elif given is None or isinstance(given, bool):
        return source
    else:
        words = [str(word) for word in given]
    name, declared = path or "the vocabulary", source.num_words
    if not words:
        raise corpus_error(name, ("expected one word per line, got none", *remedy))
    if declared is not None and len(words) != declared:
        problem = f"expected V = {plural(declared, 'word')} for {source.paths[0]}, got {len(words):,}"
        raise corpus_error(name, (problem, *remedy))
    return source._replace(vocabulary=words, num_words=len(words), words_file=path)


def _find_vocabulary(paths: tuple[Path, ...]) -> Path | None:
    """Return the vocabulary in the folder of the first file, if there is one."""
    path = paths[0]
    name = without_suffix(path.name)
    known = [f"vocab.{name[8:]}"] if name.startswith("docword.") else ["vocab.txt", "vocabulary.txt"]
    for candidate in (path.with_name(each + suffix) for each in known for suffix in ("", *SUFFIXES)):
        if os.path.isfile(candidate) and candidate not in paths:
            return candidate
    return None
