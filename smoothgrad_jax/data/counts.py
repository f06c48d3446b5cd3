"""Formats of counts: headers and lines of numbers, checked, as blocks of documents.

Triplets (uci, mm) say the document on every line; pairs (ldac, svmlight) have a line for a document; archives have a
room of their own. A piece of lines is read at once, by columns. Only if something in it is not as it should be is it
read again, line by line, which is slow but tells the line.
"""

import itertools
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from smoothgrad_jax.data import archives, blocks, unpacking
from smoothgrad_jax.data.blocks import Block, Header, block_of, check_header, rises, triplet_blocks
from smoothgrad_jax.data.unpacking import plural, shown, whole_lines, wrong

NUMBER = re.compile(rb"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
LABEL = re.compile(rb"[-+]?[0-9.][-+0-9.,eE]*")

_BLANKS = bytes.maketrans(b"\t\r\v\f", b"    ")


def read_blocks(source: Any) -> Iterator[Block]:
    """The documents of a :class:`smoothgrad_jax.data.readers.Source` of counts in order, some at a time."""
    if source.format in ("ldac", "svmlight"):
        base = _pair_base(source)
        for path in source.paths:
            yield from _pair_blocks(path, source, base)
    elif source.format == "npz":
        for path in source.paths:
            yield from archives.read_blocks(path, source.sort)
    else:
        base = 1 if source.first_id is None else source.first_id
        for path in source.paths:
            header = read_header(path, source)
            yield from triplet_blocks(path, header, partial(_triplets, path, header, base), source.sort)


def read_header(path: Path, source: Any) -> Header:
    """Of uci, mm and npz, believed as far as can be known before the entries are read."""
    if source.format == "npz":
        return archives.read_header(path)
    header = _uci_header(path) if source.format == "uci" else _mm_header(path)
    with open(path, "rb") as file:
        packed = file.read(2) in (b"\x1f\x8b", b"BZ", b"\xfd7")
    # "1 1\n" is the shortest entry, and its end may be missing.
    if not packed and header.num_entries > (path.stat().st_size + 1) // (2 * header.columns):
        what = f"{header.num_entries:,} entries, more than a file of {path.stat().st_size:,} bytes can hold"
        raise wrong(path, f"the header declares {what}", header.lines)
    return check_header(path, header)


def _uci_header(path):
    numbers = []
    for number, line in itertools.islice(_head_lines(path), 3):
        numbers.append(_whole(path, number, line.strip(), ("documents", "words", "entries")[number - 1]))
    if len(numbers) < 3:
        raise wrong(path, "expected three lines with the numbers of documents, words and entries, got fewer")
    return Header(*numbers, lines=3)


def _mm_header(path):
    lines = _head_lines(path)
    _, first = next(lines, (1, b""))
    words = first.lower().split()
    expected = "%%MatrixMarket matrix coordinate integer|real|pattern general"
    if len(words) != 5 or words[:2] != [b"%%matrixmarket", b"matrix"]:
        raise wrong(path, f"expected {expected}, got {shown(first)}", 1)
    if words[2] != b"coordinate" or words[3] not in (b"integer", b"real", b"pattern") or words[4] != b"general":
        raise wrong(path, f"can read only {expected}, got {shown(first)}", 1)
    for number, line in lines:
        if line.lstrip()[:1] in (b"", b"%"):
            continue
        sizes = line.split()
        if len(sizes) != 3:
            raise wrong(path, f"expected documents, words and entries, got {shown(line)}", number)
        names = ("documents", "words", "entries")
        numbers = [_whole(path, number, size, name) for size, name in zip(sizes, names, strict=True)]
        return Header(*numbers, columns=2 if words[3] == b"pattern" else 3, lines=number)
    raise wrong(path, "expected a line with the numbers of documents, words and entries, got none")


def _head_lines(path):
    for first, piece in whole_lines(path, unpacking.LONGEST_RECORD):
        yield from enumerate(piece[:-1].split(b"\n"), first)


def _whole(path, line, token, what):
    if not token.isdigit() or len(token) > 19:
        raise wrong(path, f"expected the number of {what}, got {shown(token)}", line)
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
    number = float(token) if NUMBER.fullmatch(token) else np.nan
    if not 0 <= number <= blocks.MOST_COUNT:
        raise wrong(path, f"expected a count from 0 to {blocks.MOST_COUNT:.0e}, got {shown(token)}", line)
    return number


def _id(path, line, token, what, first, last, hint):
    number = float(token) if NUMBER.fullmatch(token) else np.nan
    if not first <= number <= last or number != int(number):
        raise wrong(path, f"expected a {what} from {first} to {last}, got {shown(token)}{hint}", line)
    return int(number)


# Triplets.


def _triplets(path, header, base, ordered):
    """Documents, words (from 0) and counts of the lines of uci and mm; checked, and that documents do not go back."""
    ranges = ((base, base + header.num_docs - 1), (base, base + header.num_words - 1), (0, blocks.MOST_COUNT))
    read, latest = 0, base
    for line, piece in whole_lines(path, unpacking.LONGEST_RECORD, skip=header.lines):
        table = _table(piece, header.columns)
        if (
            table is None
            or read + len(table[0]) > header.num_entries
            or not all(_within(column, *limits) for column, limits in zip(table, ranges, strict=False))
            or not (_is_whole(table[0]) and _is_whole(table[1]))
            or (ordered and not rises(table[0], latest))
        ):
            table = _table_slowly(path, line, piece, header, base, read, latest if ordered else base)
        if not len(table[0]):
            continue
        read, latest = read + len(table[0]), int(table[0][-1])
        counts = table[2].astype(np.float64) if header.columns == 3 else np.ones(len(table[0]))
        yield table[0].astype(np.int64) - base, table[1].astype(np.int64) - base, counts
    if read != header.num_entries:
        raise wrong(path, f"the header declares {plural(header.num_entries, 'entry')}, the file has {read:,}")


def _within(numbers, first, last):
    return not len(numbers) or bool(first <= numbers.min() and numbers.max() <= last)


def _is_whole(numbers):
    return numbers.dtype.kind == "i" or not (numbers % 1).any()


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
            raise wrong(path, f"expected {shape}, got {shown(text)}", line)
        if read + len(rows) == header.num_entries:
            raise wrong(path, f"the header declares {plural(header.num_entries, 'entry')}, the file has more", line)
        doc = _id(path, line, tokens[0], "document", base, base + header.num_docs - 1, hint)
        if doc < latest:
            what = f"expected documents in order, got {doc} after {latest}"
            raise wrong(path, f"{what}; pass sort=True, or sort the file by its first number", line)
        latest = doc
        word = _id(path, line, tokens[1], "word", base, base + header.num_words - 1, hint)
        rows.append((doc, word, *(_count(path, line, token) for token in tokens[2:])))
    return list(np.array(rows, np.float64).reshape(-1, header.columns).T)


# Pairs.


def _pair_blocks(path, source, base):
    last = base + (blocks.MOST_WORDS if source.num_words is None else source.num_words) - 1
    lengths, words, counts, held, seen = [], [], [], 0, 0
    for parts in itertools.chain(_pairs(path, source, base, last), [None]):
        if parts is not None:
            for column, part in zip((lengths, words, counts), parts, strict=True):
                column.append(part)
            held += len(parts[0]) + len(parts[1])
            seen += len(parts[1])
            largest = int(parts[1].max()) if len(parts[1]) else 0
            if source.num_words is None and largest > blocks.most_words(seen):
                raise wrong(path, f"word id {largest:,} after {seen:,} entries: expected ids that number the words")
        if lengths and (parts is None or held >= blocks.BLOCK):
            indptr = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
            yield block_of(path, indptr, np.concatenate(words) - base, np.concatenate(counts))
            lengths, words, counts, held = [], [], [], 0


def _pair_base(source):
    """The id of the first word: 0, unless it is given or the vocabulary speaks against it."""
    if source.first_id is not None or source.num_words is None:
        return source.first_id or 0
    found = False
    for path in source.paths:
        for _, words, _ in _pairs(path, source, 0, blocks.MOST_WORDS):
            if words.min(initial=1) == 0:
                return 0
            found = found or bool((words == source.num_words).any())
    return int(found)


def _pairs(path, source, base, last):
    """Number of pairs of each line; all ids; all counts. Ids are as in the file."""
    for line, piece in whole_lines(path, unpacking.LONGEST_RECORD):
        parts = _pairs_at_once(piece, source.format == "ldac")
        if parts is None or not (_within(parts[1], base, last) and _within(parts[2], 0, blocks.MOST_COUNT)):
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
    if not (_within(pairs[:, 0], 0, blocks.MOST_WORDS) and _is_whole(pairs[:, 0])):
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
        hint = f" for a vocabulary of {plural(source.num_words, 'word')}; is it the one of this file? If its ids "
        hint += f"count from {1 - base}, pass first_id={1 - base}"
    for line, text in enumerate(piece[:-1].split(b"\n"), first):
        label, *pairs = (text if numbered else text.partition(b"#")[0]).split() or [b""]
        if not label:
            continue
        if pairs and not numbered and re.fullmatch(rb"qid:[0-9]+", pairs[0]):
            pairs = pairs[1:]
        if not (NUMBER if numbered else LABEL).fullmatch(label):
            raise wrong(path, f"expected {expected}, got {shown(text)}", line)
        if numbered and float(label) != len(pairs):
            raise wrong(path, f"expected as many pairs as the line says, {shown(label)}; got {len(pairs)}", line)
        for pair in pairs:
            word, colon, count = pair.partition(b":")
            if not colon:
                raise wrong(path, f"expected {expected}, got {shown(pair)}", line)
            words.append(_id(path, line, word, "word id", base, last, hint))
            counts.append(_count(path, line, count))
        lengths.append(len(pairs))
    return np.array(lengths, np.int64), np.array(words, np.int64), np.array(counts, np.float64)
