"""Files as streams of bytes, of UTF-8, or of lines, decompressed if they are compressed by gzip, bzip2 or xz.

The compression is recognised from the first bytes of a file, not from its name. A stream needs memory for one chunk, or
for the longest line. A line above a limit, or an xz file with too large a dictionary, raises an error.
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
from typing import BinaryIO

from smoothgrad_jax.data.errors import CorpusError, OptionName, corpus_error

SUFFIXES = (".gz", ".bz2", ".xz")
CHUNK_BYTES = 2**22  # bytes per read
MAX_RECORD_BYTES = 2**24  # maximum length of a line that is parsed into fields

_XZ_MEMORY = 2**28  # bytes that an xz decoder may allocate; the highest standard level needs a quarter of it


def decompress(path: Path, size: int | None = None) -> Iterator[bytes]:
    """Yield the bytes of a file in chunks of at most ``size``, decompressed if the file is compressed."""
    size = size or CHUNK_BYTES
    try:
        if path.is_dir():
            raise corpus_error(path, "expected a file, got a folder")
        if not path.exists():
            raise corpus_error(path, "there is no such file")
        if not path.is_file():
            raise corpus_error(path, "expected a regular file, because it is read more than once")
        with open(path, "rb") as file:
            magic = file.read(10)
            file.seek(0)
            if magic.startswith(b"\x1f\x8b"):
                yield from chunks_of(gzip.GzipFile(fileobj=file), size)
            elif re.match(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)", magic):
                yield from chunks_of(bz2.BZ2File(file), size)
            elif magic.startswith(b"\xfd7zXZ\0"):
                yield from _xz_chunks(file, size)
            else:
                yield from chunks_of(file, size)
    except EOFError:
        raise corpus_error(path, "the compressed file is truncated: its end is missing") from None
    except (zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise corpus_error(path, f"the compressed file is damaged: {error}") from None
    except OSError as error:  # bz2 raises OSError for damaged data, too
        raise corpus_error(path, f"cannot be read: {error.strerror or error}") from None


def chunks_of(file: BinaryIO | gzip.GzipFile | bz2.BZ2File, size: int = CHUNK_BYTES) -> Iterator[bytes]:
    """Yield the content of an open file in chunks."""
    while chunk := file.read(size):
        yield chunk


def without_suffix(name: str) -> str:
    """Return the name of a file without the suffix of a compression."""
    return next((name.removesuffix(suffix) for suffix in SUFFIXES if name.endswith(suffix)), name)


def read_utf8(path: Path, encoding: str = "utf-8", size: int | None = None) -> Iterator[bytes]:
    """Yield the content of a file in UTF-8, without a byte order mark. A file in UTF-8 is not validated here."""
    chunks = decompress(path, size)
    if codecs.lookup(encoding).name not in ("utf-8", "utf-8-sig", "ascii"):
        yield from _transcode(path, chunks, encoding)
        return
    start = b""
    for chunk in chunks:
        start += chunk
        if len(start) >= 3:
            break
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise corpus_error(path, ("expected utf-8, got UTF-16; pass ", OptionName("encoding", "utf-16")), 1)
    start = start.removeprefix(codecs.BOM_UTF8)
    if start:
        yield start
    yield from chunks


def line_chunks(path: Path, max_bytes: int, encoding: str = "utf-8", skip: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield chunks of complete lines after the first ``skip`` lines, each with the number of its first line."""
    line, rest, length = 1, [b""], 0
    for chunk in itertools.chain(read_utf8(path, encoding), [None]):
        if chunk is None:
            lines = b"".join([*rest, b"\n"]) if length else b""
        else:
            cut = chunk.rfind(b"\n") + 1
            if not cut:
                rest.append(chunk)
                length += len(chunk)
                if length > max_bytes:
                    raise corpus_error(path, f"expected a line of at most {max_bytes:,} bytes, got a longer one", line)
                continue
            lines, rest, length = b"".join([*rest, chunk[:cut]]), [chunk[cut:]], len(chunk) - cut
        while skip and lines:
            lines, skip, line = lines[lines.index(b"\n") + 1 :], skip - 1, line + 1
        if lines:
            yield line, lines
            line += lines.count(b"\n")


def text_lines(path: Path, encoding: str, max_bytes: int) -> Iterator[tuple[int, str]]:
    """Yield the number and the text of each line, without its line break."""
    for first, chunk in line_chunks(path, max_bytes, encoding):
        text = decode(path, chunk, first)
        yield from enumerate((line.removesuffix("\r") for line in text[:-1].split("\n")), first)


def decode(path: Path, data: bytes, first_line: int = 1) -> str:
    """Decode UTF-8 without zero bytes that begins at a given line of a file."""
    if b"\0" in data:
        raise binary_error(path, first_line + data.count(b"\n", 0, data.index(b"\0")))
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line, byte = first_line + data.count(b"\n", 0, error.start), data[error.start]
        problem = f"expected utf-8, got the byte 0x{byte:02x}; pass its encoding, for example "
        raise corpus_error(path, (problem, OptionName("encoding", "latin-1")), line) from None


def binary_error(path: Path, line: int | None = None) -> CorpusError:
    """Return the error for a zero byte, which does not occur in text."""
    problem = "expected text or a known format, got a binary file (a zero byte); for text in UTF-16 pass "
    return corpus_error(path, (problem, OptionName("encoding", "utf-16")), line)


def _xz_chunks(file: BinaryIO, size: int) -> Iterator[bytes]:
    """Decompress like lzma.LZMAFile, with a limit on the memory of the decoder."""
    data, decoder = b"", lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY)
    while True:
        if decoder.needs_input and not data:
            data = file.read(size)
            if not data:
                raise EOFError
        chunk = decoder.decompress(data, size)
        data = b""
        if chunk:
            yield chunk
        if decoder.eof:
            # A file can consist of several streams, with zero bytes between them.
            data = decoder.unused_data.lstrip(b"\0")
            while not data:
                data = file.read(size)
                if not data:
                    return
                data = data.lstrip(b"\0")
            decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY)


def _transcode(path: Path, chunks: Iterator[bytes], encoding: str) -> Iterator[bytes]:
    decoder, line = codecs.getincrementaldecoder(encoding)(), 1
    for chunk in itertools.chain(chunks, [b""]):
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeError as error:
            start = error.object[: error.start] if isinstance(error, UnicodeDecodeError) else b""
            line += start.decode(encoding, "ignore").count("\n")
            problem = f"the bytes are not valid {encoding}; pass another ", OptionName("encoding")
            raise corpus_error(path, problem, line) from None
        line += text.count("\n")
        if text:
            yield text.encode("utf-8", "replace")
