"""Parse count files: triplets (uci, mm) have one entry per line, pairs (ldac, svmlight) one document per line.

A chunk of lines is parsed by columns. If the chunk has an error, its lines are parsed one by one to find the line.
"""

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from smoothgrad_jax.data import compressed_files, count_blocks
from smoothgrad_jax.data.batches import MAX_COUNT
from smoothgrad_jax.data.compressed_files import line_chunks
from smoothgrad_jax.data.count_blocks import MAX_WORDS, Block, Header, Triplets, block_of, is_sorted
from smoothgrad_jax.data.errors import OptionName, Pieces, corpus_error, excerpt, plural
from smoothgrad_jax.data.formats import Format
from smoothgrad_jax.data.sources import Head, Source

NUMBER = re.compile(rb"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")

_LABEL = re.compile(rb"[-+]?[0-9.][-+0-9.,eE]*")
_COUNTS = f"expected a count from 0 to {MAX_COUNT:.0e}"
_QUERY_ID = re.compile(rb"qid:[0-9]+")
_BLANKS = bytes.maketrans(b"\t\r\v\f", b"    ")
_NEWLINE, _SPACE, _COLON = b"\n :"
_SIZES = ("documents", "words", "entries")
_FROM_0 = ("; if the ids of this file count from 0, pass ", OptionName("first_id", 0))

Columns = list[npt.NDArray]  # documents, words and perhaps counts, as in the file
Parsed = TypeVar("Parsed")
Pairs = tuple[npt.NDArray, npt.NDArray, npt.NDArray]  # pairs per line; all word ids, as in the file; all counts


def triplet_format(priority: int, recognise: Callable[[Head], bool], read_header: Callable[[Path], Header]) -> Format:
    """Return a format whose files have a header, and then lines ``document word count``."""

    def prepare(source: Source) -> Source:
        for path in source.paths:
            source = source.with_num_words(path, _check_size(path, read_header(path)).num_words)
        return source

    def blocks(source: Source) -> Iterator[Block]:
        first_id = 1 if source.first_id is None else source.first_id
        for path in source.paths:
            header = _check_size(path, read_header(path))
            read = partial(_read_triplets, path, header, first_id)
            yield from count_blocks.triplet_blocks(path, header, read, source.sort)

    return Format(priority, recognise, blocks=blocks, prepare=prepare, options=frozenset({"first_id", "sort"}))


def pair_format(name: str, priority: int) -> Format:
    """Return a format with one document per line: ``ldac`` with the number of pairs, ``svmlight`` with a label."""

    def blocks(source: Source) -> Iterator[Block]:
        first_id = _first_pair_id(source, name == "ldac")
        for path in source.paths:
            yield from _pair_blocks(path, source, name == "ldac", first_id)

    return Format(priority, lambda head: _pair_kind(head) == name, blocks=blocks, options=frozenset({"first_id"}))


def read_uci_header(path: Path) -> Header:
    """Read three lines with the numbers of documents, words and entries."""
    lines = zip(_SIZES, _head_lines(path), strict=False)
    sizes = [_parse_size(path, number, line.strip(), name) for name, (number, line) in lines]
    if len(sizes) < 3:
        raise corpus_error(path, "expected three lines with the numbers of documents, words and entries, got fewer")
    return Header(sizes[0], sizes[1], sizes[2], lines=3)


def read_mm_header(path: Path) -> Header:
    """Read the banner, the comments and the line of sizes of a Matrix Market file."""
    lines = _head_lines(path)
    _, first = next(lines, (1, b""))
    banner = first.lower().split()
    expected = "%%MatrixMarket matrix coordinate integer|real|pattern general"
    if len(banner) != 5 or banner[:2] != [b"%%matrixmarket", b"matrix"]:
        raise corpus_error(path, f"expected {expected}, got {excerpt(first)}", 1)
    if banner[2] != b"coordinate" or banner[3] not in (b"integer", b"real", b"pattern") or banner[4] != b"general":
        raise corpus_error(path, f"can read only {expected}, got {excerpt(first)}", 1)
    for number, line in lines:
        if line.lstrip()[:1] in (b"", b"%"):
            continue
        if len(line.split()) != 3:
            raise corpus_error(path, f"expected documents, words and entries, got {excerpt(line)}", number)
        sizes = [_parse_size(path, number, *size) for size in zip(line.split(), _SIZES, strict=True)]
        return Header(sizes[0], sizes[1], sizes[2], 2 if banner[3] == b"pattern" else 3, number)
    raise corpus_error(path, "expected a line with the numbers of documents, words and entries, got none")


def _check_size(path: Path, header: Header) -> Header:
    """Return the header if its numbers are plausible for the size of the file."""
    with open(path, "rb") as file:
        compressed = file.read(2) in (b"\x1f\x8b", b"BZ", b"\xfd7")
    size = path.stat().st_size
    # "1 1\n" is the shortest entry, and the last line break can be missing.
    if not compressed and header.num_entries > (size + 1) // (2 * header.columns):
        declared = f"{header.num_entries:,} entries, more than a file of {size:,} bytes can hold"
        raise corpus_error(path, f"the header declares {declared}", header.lines)
    return count_blocks.check_header(path, header)


def _head_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    for first, chunk in line_chunks(path, compressed_files.MAX_RECORD_BYTES):
        yield from enumerate(chunk[:-1].split(b"\n"), first)


def _parse_size(path: Path, line: int, token: bytes, name: str) -> int:
    if not token.isdigit() or len(token) > 19:
        raise corpus_error(path, f"expected the number of {name}, got {excerpt(token)}", line)
    return int(token)


def _tokenize(chunk: bytes, colon: bool) -> tuple[bytes, npt.NDArray, npt.NDArray] | None:
    """Return lines in which one separator follows each token, the positions of the separators, and the separators.

    Return None if the separators cannot be normalised.
    """
    if any(blank in chunk for blank in (b"\t", b"\r", b"\v", b"\f")):
        chunk = chunk.translate(_BLANKS)
    for attempt in range(3):
        if attempt == 1:  # a blank at the end of lines is frequent, and cheap to remove
            chunk = chunk.replace(b" \n", b"\n")
        elif attempt == 2:  # one blank between tokens, no other blanks, no blank lines
            chunk = b"".join(b" ".join(line.split()) + b"\n" for line in chunk.split(b"\n") if line.strip())
        data = np.frombuffer(chunk, np.uint8)
        separators = np.flatnonzero((data <= _SPACE) | (data == _COLON) if colon else data <= _SPACE)
        if not len(separators) or (separators[0] > 0 and (separators[1:] - separators[:-1]).min(initial=2) > 1):
            return chunk, separators, data[separators]
    return None


def _parse_numbers(chunk: bytes) -> npt.NDArray | None:
    """Return the numbers of a chunk, in int64 or float64; None if a token is not a plain number."""
    rest = chunk.translate(None, b"0123456789 \n")
    if not rest:
        # The fastest parser of NumPy. It saturates at the largest int64.
        numbers = np.fromstring(chunk, np.int64, sep=" ") if chunk else np.zeros(0, np.int64)
        if numbers.max(initial=0) < 2**62:
            return numbers
    if rest.translate(None, b".eE+-"):
        return None
    try:
        return np.array(chunk.split(), np.float64)
    except ValueError:
        return None


def _first_outside(numbers: npt.NDArray, first: float, last: float, integers: bool = True) -> str | None:
    """Return the first number that is not in a range, or not an integer; None if there is none."""
    fractional = integers and numbers.dtype.kind != "i" and (numbers != np.floor(numbers)).any()
    if not len(numbers) or (first <= numbers.min() and numbers.max() <= last and not fractional):
        return None
    valid = (numbers >= first) & (numbers <= last)
    if fractional:
        valid &= numbers == np.floor(numbers)
    return f"{numbers[np.argmin(valid)]:.17g}"


def _parsed(
    path: Path,
    skip: int,
    parse: Callable[[bytes], Parsed | None],
    problem_of: Callable[[Parsed | None, bytes], Pieces | None],
) -> Iterator[Parsed]:
    """Parse the chunks of a file, after some lines; in a chunk with a problem, parse line by line to name the line.

    ``parse`` returns None if lines have another form; ``problem_of`` always has a problem with None.
    """
    for first, chunk in line_chunks(path, compressed_files.MAX_RECORD_BYTES, skip=skip):
        parsed = parse(chunk)
        if parsed is not None and not problem_of(parsed, chunk):
            yield parsed
            continue
        for line, text in enumerate(chunk[:-1].split(b"\n"), first):
            parsed = parse(text + b"\n")
            if (problem := problem_of(parsed, text)) or parsed is None:
                raise corpus_error(path, problem or (), line)
            yield parsed


# Triplets.


def _read_triplets(path: Path, header: Header, first_id: int, ordered: bool) -> Iterator[Triplets]:
    """Yield checked triplets; if ``ordered``, also check that documents do not decrease."""
    read, latest = 0, first_id

    def problem_of(columns: Columns | None, text: bytes) -> Pieces | None:
        """Return what is wrong with the columns of the next lines, or of the line ``text``."""
        if columns is None:
            return (f"expected document word{' count' * (header.columns == 3)}, got {excerpt(text)}",)
        if read + len(columns[0]) > header.num_entries:
            return (f"the header declares {plural(header.num_entries, 'entry')}, the file has more",)
        for name, numbers, size in zip(("document", "word"), columns, header[:2], strict=False):
            last_id = first_id + size - 1
            if bad := _first_outside(numbers, first_id, last_id):
                return (f"expected a {name} from {first_id} to {last_id}, got {bad}", *(_FROM_0 if first_id else ()))
        if len(columns) == 3 and (bad := _first_outside(columns[2], 0, MAX_COUNT, integers=False)):
            return (f"{_COUNTS}, got {bad}",)
        if ordered and not is_sorted(columns[0], latest):
            remedy = ("; pass ", OptionName("sort", True), ", or sort the file by its first number")
            return (f"expected documents in order, got {columns[0].min():.17g} after {latest}", *remedy)
        return None

    parse = partial(_parse_columns, columns=header.columns)
    for columns in _parsed(path, header.lines, parse, problem_of):
        if not len(columns[0]):
            continue
        read, latest = read + len(columns[0]), int(columns[0][-1])
        counts = columns[2].astype(np.float64) if header.columns == 3 else np.ones(len(columns[0]))
        yield columns[0].astype(np.int64) - first_id, columns[1].astype(np.int64) - first_id, counts
    if read != header.num_entries:
        raise corpus_error(path, f"the header declares {plural(header.num_entries, 'entry')}, the file has {read:,}")


def _parse_columns(chunk: bytes, columns: int) -> Columns | None:
    """Return columns of numbers; None if a line does not have this number of numbers."""
    tokenized = _tokenize(chunk, colon=False)
    if tokenized is None or len(tokenized[1]) % columns:
        return None
    numbers, by_line = _parse_numbers(tokenized[0]), tokenized[2].reshape(-1, columns)
    if numbers is None or len(numbers) != by_line.size:
        return None
    if (by_line[:, -1] != _NEWLINE).any() or (by_line[:, :-1] != _SPACE).any():
        return None
    return [np.ascontiguousarray(numbers[column::columns]) for column in range(columns)]


# Pairs.


def _pair_kind(head: Head) -> str | None:
    """Return "ldac", "svmlight" or None."""
    counted, found = True, False
    for line in head.lines:
        label, *pairs = line.partition(b"#")[0].split() or [b""]
        if not label:
            counted = False
            continue
        if pairs and _QUERY_ID.fullmatch(pairs[0]):
            counted, pairs = False, pairs[1:]
        if not _LABEL.fullmatch(label) or not all(re.fullmatch(rb"[0-9]+:[^:]+", pair) for pair in pairs):
            return None
        found = found or bool(pairs)
        matches = label.isdigit() and len(label) < 10 and (int(label) == len(pairs) or not head.complete)
        counted = counted and matches and b"#" not in line
    return ("ldac" if counted else "svmlight") if found else None


def _pair_blocks(path: Path, source: Source, counted: bool, first_id: int) -> Iterator[Block]:
    last_id = first_id + (MAX_WORDS if source.num_words is None else source.num_words) - 1
    kept: list[Pairs] = []
    held, seen = 0, 0
    for pairs in _read_pairs(path, source, counted, first_id, last_id):
        lengths, words, _ = pairs
        kept.append(pairs)
        held += len(lengths) + len(words)
        seen += len(words)
        largest = int(words.max(initial=0))
        if source.num_words is None and largest > count_blocks.max_words(seen):
            reason = "which is not plausible for ids that number the words"
            raise corpus_error(path, f"got the word id {largest:,} after {plural(seen, 'entry')}, {reason}")
        if held >= count_blocks.BLOCK_ENTRIES:
            yield _join_pairs(path, kept, first_id)
            kept, held = [], 0
    if kept:
        yield _join_pairs(path, kept, first_id)


def _join_pairs(path: Path, kept: list[Pairs], first_id: int) -> Block:
    lengths, words, counts = (np.concatenate(column) for column in zip(*kept, strict=True))
    return block_of(path, np.concatenate([[0], np.cumsum(lengths)]), words - first_id, counts)


def _first_pair_id(source: Source, counted: bool) -> int:
    """Return the id of the first word: as given, or 1 if there is a vocabulary of V words, an id V, and no id 0."""
    if source.first_id is not None or source.num_words is None:
        return source.first_id or 0
    found = False
    for path in source.paths:
        for _, words, _ in _read_pairs(path, source, counted, 0, MAX_WORDS):
            if words.min(initial=1) == 0:
                return 0
            found = found or bool((words == source.num_words).any())
    return int(found)


def _read_pairs(path: Path, source: Source, counted: bool, first_id: int, last_id: int) -> Iterator[Pairs]:
    """Yield checked pairs."""

    def problem_of(pairs: Pairs | None, text: bytes) -> Pieces | None:
        """Return what is wrong with the pairs of some lines, or of the line ``text``."""
        if pairs is None:
            expected = "N id:count …, with N pairs" if counted else "label id:count …"
            return (f"expected {expected}, got {excerpt(text)}",)
        if bad := _first_outside(pairs[1], first_id, last_id):
            hint: Pieces = _FROM_0 if first_id else ()
            if source.num_words is not None:
                words = f" for a vocabulary of {plural(source.num_words, 'word')}; is it the one of this file? If its "
                hint = (words, f"ids count from {1 - first_id}, pass ", OptionName("first_id", 1 - first_id))
            if source.words_file is not None:
                hint = (*hint, f"; to ignore {source.words_file}, pass ", OptionName("vocabulary", False))
            return (f"expected a word id from {first_id} to {last_id}, got {bad}", *hint)
        bad = _first_outside(pairs[2], 0, MAX_COUNT, integers=False)
        return (f"{_COUNTS}, got {bad}",) if bad else None

    for lengths, words, counts in _parsed(path, 0, partial(_parse_pairs, counted=counted), problem_of):
        yield lengths, words.astype(np.int64), counts.astype(np.float64)


def _parse_pairs(chunk: bytes, counted: bool) -> Pairs | None:
    """Return the pairs of a chunk; None if a line has another form, or another number of pairs than it declares."""
    if not counted:
        chunk = re.sub(rb"#[^\n]*", b"", chunk) if b"#" in chunk else chunk
        chunk = re.sub(rb"(?m)^([ \t]*[^\s:]+[ \t]+)qid:[0-9]+(?=\s)", rb"\1", chunk) if b"qid:" in chunk else chunk
        chunk = re.sub(rb"(?m)^[ \t]*[-+]?[0-9.][-+0-9.,eE]*(?=\s)", b"0", chunk)
    tokenized = _tokenize(chunk, colon=True)
    if tokenized is None:
        return None
    chunk, positions, separators = tokenized
    numbers = _parse_numbers(chunk.replace(b":", b" "))
    if numbers is None or len(numbers) != len(positions):
        return None
    stops = np.flatnonzero(separators == _NEWLINE)
    lengths = np.diff(stops, prepend=-1)
    # A line is label, id:count, id:count, …: a colon follows an id, and nothing else.
    place = np.arange(len(numbers)) - np.repeat(stops + 1 - lengths, lengths)
    if ((separators == _COLON) != place % 2).any() or (lengths % 2 == 0).any():
        return None
    lengths = (lengths - 1) // 2
    if counted and (numbers[place == 0] != lengths).any():
        return None
    pairs = numbers[place > 0].reshape(-1, 2)
    return lengths, pairs[:, 0], pairs[:, 1]
