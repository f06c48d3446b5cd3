"""A file as a stream: of bytes, unpacked; of UTF-8, whatever its encoding; of whole lines; of lines of text.

Every file may be packed by gzip, bzip2 or xz, which its first bytes tell and not its name. A stream takes the memory of
a piece, and of the longest line where lines are asked for: a longer one is refused, and so is xz that asks for much.

What is wrong with a file is said here in one form, for every room that reads: which file, which line, what was
expected, what came.
"""

import bz2
import codecs
import gzip
import itertools
import lzma
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PIECE = 2**22  # bytes that are read at once
LONGEST_RECORD = 2**24  # bytes of a line that is taken apart: its parts take many times the room

_UNPACKING = 2**28  # bytes that xz may take for itself: level 9 takes a quarter of that


class CorpusError(ValueError):
    """A file is not what it should be: which file, which line, what was expected, what came, what to do."""


def unpacked(path: Path, size: int | None = None) -> Iterator[bytes]:
    """The bytes of a file, unpacked if it is packed, in pieces of at most ``size``."""
    size = size or PIECE
    try:
        if path.is_dir():
            raise wrong(path, "expected a file, got a folder")
        if not path.exists():
            raise wrong(path, "there is no such file")
        if not path.is_file():
            raise wrong(path, "expected a regular file: it is read more than once")
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
        raise wrong(path, "the packed file is truncated: its end is missing") from None
    except (zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise wrong(path, f"the packed file is damaged: {error}") from None
    except OSError as error:
        # bzip2 has no exception of its own for damaged data
        raise wrong(path, f"cannot be read: {error.strerror or error}") from None


def utf8(path: Path, encoding: str = "utf-8", size: int | None = None) -> Iterator[bytes]:
    """The bytes of a file in UTF-8, without a mark of the byte order. What is said to be UTF-8 is not checked."""
    pieces = unpacked(path, size)
    if codecs.lookup(encoding).name not in ("utf-8", "utf-8-sig", "ascii"):
        yield from _recoded(path, pieces, encoding)
        return
    start = b""
    for piece in pieces:
        start += piece
        if len(start) >= 3:
            break
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise wrong(path, 'expected utf-8, got UTF-16; pass encoding="utf-16"', 1)
    start = start.removeprefix(codecs.BOM_UTF8)
    if start:
        yield start
    yield from pieces


def whole_lines(path: Path, longest: int, encoding: str = "utf-8", skip: int = 0) -> Iterator[tuple[int, bytes]]:
    """Pieces of a file that end with the end of a line, each with the number of its first line."""
    line, kept, length = 1, [], 0
    for piece in itertools.chain(utf8(path, encoding), [None]):
        if piece is None:
            whole, kept = b"".join([*kept, b"\n"]) if length else b"", []
        else:
            cut = piece.rfind(b"\n") + 1
            if not cut:
                kept.append(piece)
                length += len(piece)
                if length > longest:
                    raise wrong(path, f"expected a line of at most {longest:,} bytes, got a longer one", line)
                continue
            whole, kept, length = b"".join([*kept, piece[:cut]]), [piece[cut:]], len(piece) - cut
        while skip and whole:
            whole, skip, line = whole[whole.index(b"\n") + 1 :], skip - 1, line + 1
        if whole:
            yield line, whole
            line += whole.count(b"\n")


def text_lines(path: Path, encoding: str, longest: int) -> Iterator[tuple[int, str]]:
    """Number and text of each line."""
    for first, piece in whole_lines(path, longest, encoding):
        if b"\0" in piece:
            raise binary(path, first + piece.count(b"\n", 0, piece.index(b"\0")))
        try:
            text = piece.decode()
        except UnicodeDecodeError as error:
            line, byte = first + piece.count(b"\n", 0, error.start), piece[error.start]
            hint = 'pass its encoding, for example encoding="latin-1"'
            raise wrong(path, f"expected utf-8, got the byte 0x{byte:02x}; {hint}", line) from None
        yield from enumerate((line.removesuffix("\r") for line in text[:-1].split("\n")), first)


def wrong(path: Any, what: str, line: int | None = None) -> CorpusError:
    """The error that says what is wrong with a file, and in which line."""
    return CorpusError(f"{path}: {what}" if line is None else f"{path}, line {line}: {what}")


def binary(path: Path, line: int | None = None) -> CorpusError:
    """The error for a zero byte, which no text has."""
    hint = 'for text in UTF-16 pass encoding="utf-16"'
    return wrong(path, f"expected text or a known format, got a binary file (a zero byte); {hint}", line)


def shown(data: Any) -> str:
    """Some bytes or text of a file, short enough for a message."""
    text = data.decode("utf-8", "replace") if isinstance(data, bytes) else str(data)
    return repr(text if len(text) <= 60 else text[:60] + "…")


def plural(count: int, noun: str) -> str:
    """A number of things for a message: "1 word", "2,000 words", "0 entries"."""
    if count != 1:
        noun = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{count:,} {noun}"


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


def _recoded(path, pieces, encoding):
    decoder, line = codecs.getincrementaldecoder(encoding)(), 1
    for piece in itertools.chain(pieces, [b""]):
        try:
            text = decoder.decode(piece, final=not piece)
        except UnicodeError as error:
            start = error.object[: error.start] if isinstance(error, UnicodeDecodeError) else b""
            line += start.decode(encoding, "ignore").count("\n")
            raise wrong(path, f"expected {encoding}, got bytes that are not; pass another encoding", line) from None
        line += text.count("\n")
        if text:
            yield text.encode("utf-8", "replace")
