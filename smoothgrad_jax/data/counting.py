"""Count a source in one pass and in bounded memory, then select the vocabulary.

The counts of documents are written to a *spool*, a temporary file, with provisional word numbers. At the end of the
source, words are chosen by their document frequencies, and the final counts are computed from the spools.

    source ──count──▶ spool: documents × (word numbers, counts)       frequency, total, largest count of each word
                                                  │                                          │
                                                  ▼                                          ▼
    final counts ◀── number → id, sorted ◀── number → alphabetical rank ──▶ which words are kept, and their ids

| kind of source         | word numbers                                       | words that are kept                 |
|------------------------|----------------------------------------------------|-------------------------------------|
| text                   | in order of appearance, per spool of a million     | by min_df, max_df and max_features  |
| text, vocabulary given | ids of the vocabulary                              | all of the vocabulary               |
| counts                 | ids of the source                                  | all, or by the options that are set |
| counts, vocabulary     | ids of the vocabulary, matched by name             | all of the vocabulary               |

Memory: the words of one spool, a few numbers per word of the earlier spools, the words that are kept, and the chunk or
block of documents that is being counted. Nothing grows with the number of documents.
"""

import contextlib
import heapq
import itertools
import os
import tempfile
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import itemgetter
from typing import IO, Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import scipy.sparse

from smoothgrad_jax.data import text
from smoothgrad_jax.data.collocations import collocations
from smoothgrad_jax.data.documents import Metadata
from smoothgrad_jax.data.errors import CorpusError, OptionName
from smoothgrad_jax.data.scripts import check_script
from smoothgrad_jax.data.sources import Source

_SPOOL_BYTES = 8 << 20  # size up to which a temporary file stays in memory
_SPOOL_WORDS = 1_000_000  # distinct words per spool
_MAX_INTEGER = 1 << 32  # larger counts are stored as floats

OnProgress = Callable[[int], None]  # called with the number of documents so far
OnMetadata = Callable[[Metadata], None]  # called with the metadata of each document
Arrays = tuple[npt.NDArray, npt.NDArray, npt.NDArray]  # indptr, indices and data of some documents
Words = list[str] | IO[bytes]  # words, or a file with one word per line
NewFile = Callable[[], IO[bytes]]


class Counted(NamedTuple):
    """A source that has been counted.

    ``dropped`` has the numbers of ``empty_documents`` (without words after the choice of words), of those the
    ``documents_that_lost_all_words``, and of ``tokens_outside_vocabulary``, ``pruned_words`` and ``pruned_tokens``.
    """

    num_docs: int  # documents without words included
    num_words: int
    num_entries: int
    num_tokens: float  # the sum of all counts
    vocabulary: list[str] | None  # None if the words have no names
    types: tuple[np.dtype, np.dtype, np.dtype]  # of offsets, ids and counts
    limits: dict[str, Any] | None  # the options by which words were chosen, or None if there was no choice
    dropped: dict[str, float]  # complete after all blocks have been read
    blocks: Callable[[], Iterator[Arrays]]  # CSR arrays of consecutive documents, once; no initial zero in the offsets


@contextlib.contextmanager
def count(
    source: Source,
    tokens: text.Tokens | None,
    limits: dict[str, Any],
    vocabulary: list[str] | None = None,
    jobs: int | None = None,
    progress: OnProgress | None = None,
    folder: str | os.PathLike | None = None,
    record: OnMetadata | None = None,
) -> Iterator[Counted]:
    """Count a source.

    Args:
      source: The source.
      tokens: The definition of a token, if the source is text.
      limits: ``min_df``, ``max_df`` and ``max_features``, and if sequences of words are counted ``min_npmi``, as in
        :class:`smoothgrad_jax.data.corpus_folder.WordOptions`.
      vocabulary: The words to count; by default they are selected by ``limits``.
      jobs, progress: As in :func:`smoothgrad_jax.data.corpus_folder.convert`.
      folder: The folder of the spools, by default the system's folder for temporary files.
      record: Called with the metadata of each document in order, which the source must have.

    Yields:
      The counts, whose blocks can be read inside the context.
    """
    names = ("empty_documents", "documents_that_lost_all_words", "tokens_outside_vocabulary")
    dropped: dict[str, float] = dict.fromkeys(names, 0)
    tally = _Tally(progress)
    with contextlib.ExitStack() as stack:

        def new_file() -> IO[bytes]:
            parent = None if folder is None else os.fspath(folder)
            return cast(IO[bytes], stack.enter_context(tempfile.SpooledTemporaryFile(_SPOOL_BYTES, dir=parent)))

        choose = vocabulary is None and (source.is_text or any(value != "auto" for value in limits.values()))
        chunks = None
        if tokens is not None:
            texts, counted = _texts(source, record), tokens
            if vocabulary is None and tokens.tokenizer is None and tokens.token_pattern == text.WORD:
                texts = check_script(texts)
            if vocabulary is None and limits.get("min_npmi", -1) != -1:  # the scores need the counts of single words
                counted = tokens._replace(ngram_range=(1, tokens.ngram_range[1]))
            stream = text.count_stream(texts, counted, jobs)
            chunks = stack.enter_context(contextlib.closing(stream))
        if vocabulary is not None:
            statistics, spools, ranks = _count_vocabulary(source, chunks, vocabulary, dropped, new_file, tally)
        elif chunks is not None:
            statistics, spools, ranks = _count_text(chunks, new_file, tally)
        else:
            statistics, spools, ranks = _count_ids(source, new_file, tally)
        if record is not None and chunks is None:
            for metadata in source.metadata():
                record(metadata)
        if tally.documents == 0:
            raise CorpusError(f"{_name(source)}: expected documents, got none")
        kept = np.ones(len(statistics.frequency), bool)
        if choose:
            limits = text.set_limits(tally.documents, **limits) if source.is_text else _set_count_limits(limits)
            kept = _choose_words(statistics, tally.documents, tokens, **limits)
            ids = np.where(kept, np.cumsum(kept) - 1, -1).astype(np.int32)
            ranks = [ids if rank is None else ids[rank] for rank in ranks]
        dropped["pruned_words"] = int(np.count_nonzero(statistics.frequency[~kept]))
        dropped["pruned_tokens"] = _as_int(statistics.total[~kept].sum())
        num_words = int(np.count_nonzero(kept))
        largest = _count_type(statistics.largest[kept].max(initial=1)).newbyteorder("<")
        types = np.dtype("<i8"), np.dtype("<u2" if num_words <= 1 << 16 else "<i4"), largest
        words = None if statistics.words is None else list(itertools.compress(_read_words(statistics.words), kept))
        yield Counted(
            num_docs=tally.documents,
            num_words=num_words,
            num_entries=int(statistics.frequency[kept].sum()),
            num_tokens=_as_int(statistics.total[kept].sum()),
            vocabulary=words,
            types=types,
            limits=limits if choose else None,
            dropped=dropped,
            blocks=lambda: _final_blocks(spools, ranks, num_words, types, dropped),
        )
        tally.report()


class _WordStatistics(NamedTuple):
    """Statistics per word."""

    frequency: npt.NDArray  # the number of documents that contain the word
    total: npt.NDArray  # the sum of its counts
    largest: npt.NDArray  # its largest count in a document
    words: Words | None = None  # if they have names


class _Spool:
    """Counts of documents in a temporary file, and statistics of the words by their numbers."""

    def __init__(self, file: IO[bytes]):
        self.file = file
        self.statistics = _WordStatistics(np.zeros(1024, np.int64), np.zeros(1024, np.int64), np.zeros(1024, np.int64))

    def add(self, indptr: npt.NDArray, numbers: npt.NDArray, counts: npt.NDArray) -> None:
        """Append documents with distinct word numbers and positive counts."""
        if numbers.size:
            capacity, needed = self.statistics.frequency.size, int(numbers.max()) + 1
            dtype = np.result_type(self.statistics.total, counts)
            if needed > capacity or dtype != self.statistics.total.dtype:
                statistics = self.resized(capacity if needed <= capacity else max(2 * capacity, needed))
                self.statistics = _WordStatistics(
                    statistics.frequency, statistics.total.astype(dtype), statistics.largest.astype(dtype)
                )
            np.add.at(self.statistics.frequency, numbers, 1)
            np.add.at(self.statistics.total, numbers, counts)
            np.maximum.at(self.statistics.largest, numbers, counts)
            counts = counts.astype(_count_type(counts.max()))
        for each in (np.diff(indptr), numbers, counts):
            np.lib.format.write_array(self.file, each, allow_pickle=False)

    def resized(self, size: int, words: Words | None = None) -> _WordStatistics:
        """Return the statistics of the numbers below ``size``, with their words."""
        frequency, total, largest = (np.pad(each[:size], (0, max(size - each.size, 0))) for each in self.statistics[:3])
        return _WordStatistics(frequency, total, largest, words)

    def blocks(self) -> Iterator[Arrays]:
        """Yield the documents in the blocks that :meth:`add` wrote."""
        end = self.file.seek(0, 2)
        self.file.seek(0)
        while self.file.tell() < end:
            lengths, numbers, counts = (np.lib.format.read_array(self.file, allow_pickle=False) for _ in range(3))
            yield np.concatenate([[0], np.cumsum(lengths)]), numbers, counts


class _Tally:
    """Count documents and report progress, at most five times per second."""

    def __init__(self, progress: OnProgress | None):
        self.documents, self.progress, self.last = 0, progress, time.monotonic()

    def add(self, indptr: npt.NDArray) -> None:
        self.documents += len(indptr) - 1
        if time.monotonic() - self.last >= 0.2:
            self.report()

    def report(self) -> None:
        self.last = time.monotonic()
        if self.progress is not None:
            self.progress(self.documents)


_Counts = tuple[_WordStatistics, list[_Spool], list[npt.NDArray | None]]  # and per spool the ranks of its word numbers


def _texts(source: Source, record: OnMetadata | None) -> Iterator[str]:
    for document in source.documents():
        if record is not None:
            record(document.metadata)
        yield document.text


def _count_text(chunks: Iterable[text.Chunk], new_file: NewFile, tally: _Tally) -> _Counts:
    """Count text whose words are unknown: each spool numbers them in order of appearance."""
    spools: list[_Spool] = []
    words: list[tuple[Words, npt.NDArray]] = []
    numbers: dict[str, int] = {}
    for chunk in chunks:
        if not spools or len(numbers) >= _SPOOL_WORDS:
            if spools:
                words.append(_sort_words(numbers, new_file()))
                spools[-1].statistics = spools[-1].resized(len(numbers))  # free the unused capacity
            spools.append(_Spool(new_file()))
            numbers = defaultdict(itertools.count().__next__)
        number = np.fromiter(map(numbers.__getitem__, chunk.words), np.int32, len(chunk.words))
        spools[-1].add(chunk.indptr, number[chunk.indices], chunk.data)
        tally.add(chunk.indptr)
    words.append(_sort_words(numbers))
    if not spools:
        nothing = np.zeros(0, np.int64)
        return _WordStatistics(nothing, nothing, nothing, []), [], []
    statistics, ranks = _merge(spools, words, new_file)
    return statistics, spools, [*ranks]


def _count_vocabulary(
    source: Source,
    chunks: Iterable[text.Chunk] | None,
    vocabulary: list[str],
    dropped: dict[str, float],
    new_file: NewFile,
    tally: _Tally,
) -> _Counts:
    """Count a source with the words of a vocabulary; tokens outside are added to ``dropped``."""
    spool, numbers = _Spool(new_file()), {word: i for i, word in enumerate(vocabulary)}
    if chunks is not None:
        stream = (text.renumber(chunk, numbers) for chunk in chunks)
    elif source.vocabulary is not None:
        number = np.array([numbers.get(word, -1) for word in source.vocabulary], np.int32)
        stream = (_add_duplicates(text.keep_entries(indptr, number[ids], n)) for indptr, ids, n in _blocks(source))
    else:
        raise CorpusError(f"{_name(source)}: its words have no names, by which they could be matched with a vocabulary")
    for part in stream:
        spool.add(part.indptr, part.indices, part.data)
        dropped["tokens_outside_vocabulary"] = _as_int(dropped["tokens_outside_vocabulary"] + part.outside)
        dropped["documents_that_lost_all_words"] += part.lost
        tally.add(part.indptr)
    return spool.resized(len(vocabulary), vocabulary), [spool], [None]


def _count_ids(source: Source, new_file: NewFile, tally: _Tally) -> _Counts:
    """Count a source whose words have ids."""
    spool = _Spool(new_file())
    for indptr, ids, counts in _blocks(source):
        spool.add(indptr, ids, counts)
        tally.add(indptr)
    size = max(int(np.flatnonzero(spool.statistics.frequency).max(initial=0)) + 1, source.num_words or 0)
    if source.vocabulary is not None:
        size = len(source.vocabulary)
    return spool.resized(size, source.vocabulary), [spool], [None]


def _choose_words(
    statistics: _WordStatistics,
    num_docs: int,
    tokens: text.Tokens | None,
    min_df: float,
    max_df: float,
    max_features: int | None,
    min_npmi: float | None = None,
) -> npt.NDArray[np.bool_]:
    """Return whether each word is kept; of sequences of words, those whose words belong together."""
    frequency, total, _, words = statistics
    selected = np.ones(len(frequency), bool)
    if tokens is not None and min_npmi not in (None, -1):
        assert words is not None, "text has words"
        read = partial(_read_words, words)
        low = text.num_documents(min_df, num_docs)
        selected = collocations(read, frequency, total, low, min_npmi, tokens.ngram_range)
        if frequency.any() and not selected.any():
            limits = OptionName("min_df", min_df), " and ", OptionName("min_npmi", min_npmi)
            raise CorpusError("no sequence of words is left after ", *limits, "; lower one of them")
    kept = np.zeros(len(frequency), bool)
    kept[selected] = text.choose_words(frequency[selected], total[selected], num_docs, min_df, max_df, max_features)
    return kept


def _blocks(source: Source) -> Iterator[Arrays]:
    """Yield the blocks of a source, with counts in int64 if they are integers, else in float64."""
    for indptr, ids, counts in source.blocks():
        integers = counts.max(initial=0) < _MAX_INTEGER
        integers = integers and (counts.dtype.kind != "f" or (counts == np.floor(counts)).all())
        yield indptr, ids, counts.astype(np.int64 if integers else np.float64)


def _add_duplicates(part: text.Kept) -> text.Kept:
    """Sum duplicate words of a document: two words of a source can have the same name."""
    indptr, ids, counts, *_ = part
    shape = (len(indptr) - 1, int(ids.max(initial=0)) + 1)
    matrix = scipy.sparse.csr_array((counts, ids, indptr), shape, copy=True)
    matrix.sum_duplicates()
    return part._replace(indptr=matrix.indptr, indices=matrix.indices, data=matrix.data)


def _sort_words(numbers: dict[str, int], file: IO[bytes] | None = None) -> tuple[Words, npt.NDArray]:
    """Return words in alphabetical order, as a list or in a file, and the number of each word."""
    words = sorted(numbers)
    number = np.fromiter(map(numbers.__getitem__, words), np.int32, len(words))
    if file is None:
        return words, number
    file.writelines(map(text.word_line, words))
    return file, number


def _merge(
    spools: list[_Spool], words: list[tuple[Words, npt.NDArray]], new_file: NewFile
) -> tuple[_WordStatistics, list[npt.NDArray]]:
    """Return the statistics of all words in alphabetical order, and for each spool the ranks of its word numbers."""
    if len(spools) == 1:
        alphabet, number = words[0]
        rank = np.empty_like(number)
        rank[number] = np.arange(len(number), dtype=np.int32)
        frequency, total, largest = (each[number] for each in spools[0].statistics[:3])
        return _WordStatistics(frequency, total, largest, alphabet), [rank]
    streams = [zip(_read_words(each), itertools.repeat(i), strict=False) for i, (each, _) in enumerate(words)]
    found, file, size = [array("i") for _ in spools], new_file(), 0
    for word, same in itertools.groupby(heapq.merge(*streams, key=itemgetter(0)), key=itemgetter(0)):
        file.write(text.word_line(word))
        for _, i in same:
            found[i].append(size)
        size += 1
    statistics = _WordStatistics(np.zeros(size, np.int64), np.zeros(size, np.int64), np.zeros(size, np.int64), file)
    ranks = []
    for spool, (_, number), rank in zip(spools, words, (np.frombuffer(each, np.int32) for each in found), strict=True):
        statistics.frequency[rank] += spool.statistics.frequency[number]
        statistics.total[rank] += spool.statistics.total[number]
        statistics.largest[rank] = np.maximum(statistics.largest[rank], spool.statistics.largest[number])
        ranks.append(np.empty_like(rank))
        ranks[-1][number] = rank
    return statistics, ranks


def _final_blocks(
    spools: list[_Spool],
    ranks: list[npt.NDArray | None],
    num_words: int,
    types: tuple[np.dtype, np.dtype, np.dtype],
    dropped: dict[str, float],
) -> Iterator[Arrays]:
    """Yield the documents with the final ids, which increase in each document."""
    offset = 0
    for spool, rank in zip(spools, ranks, strict=True):
        for indptr, ids, counts in spool.blocks():
            if rank is not None:
                indptr, ids, counts, _, lost = text.keep_entries(indptr, rank[ids], counts)
                dropped["documents_that_lost_all_words"] += lost
            dropped["empty_documents"] += int(np.count_nonzero(np.diff(indptr) == 0))
            matrix = scipy.sparse.csr_array((counts, ids, indptr), (len(indptr) - 1, num_words))
            matrix.sort_indices()
            final = (indptr[1:] + offset, matrix.indices, matrix.data)
            offsets, ids, counts = (each.astype(dtype, copy=False) for each, dtype in zip(final, types, strict=True))
            yield offsets, ids, counts
            offset += int(indptr[-1])


def _set_count_limits(limits: dict[str, Any]) -> dict[str, Any]:
    """Return the limits for counts, where ``"auto"`` removes no word."""
    unlimited = {"min_df": 0, "max_df": 1.0, "max_features": None}
    return {name: unlimited[name] if value == "auto" else value for name, value in limits.items()}


def _count_type(largest: np.generic) -> np.dtype:
    """Return the smallest dtype for counts up to ``largest``: unsigned integers, or float32 for floats."""
    return np.dtype(np.float32) if largest.dtype.kind == "f" else np.min_scalar_type(int(cast(Any, largest)))


def _as_int(total: float) -> float:
    return int(total) if float(total).is_integer() else float(total)


def _name(source: Source) -> str:
    more = len(source.paths) - 1
    return f"{source.paths[0]}{f' and {more} more' if more else ''}"


def _read_words(words: Words) -> Iterator[str]:
    if isinstance(words, list):
        yield from words
    else:
        words.seek(0)
        for line in words:
            yield line[:-1].decode()
