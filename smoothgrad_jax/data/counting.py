"""A source is counted in one pass and in bounded memory, and then it is known which words are kept.

Counts of documents wait in a *spool*, a temporary file, with numbers for the words as they came. When the source has
come to its end, the document frequencies decide; the spools are read again, and give the counts in their last form.

    source ──count──▶ spool: documents × (numbers of words, counts)      frequency, total, largest count of each word
                                                  │                                          │
                                                  ▼                                          ▼
    last form ◀── number → id, sorted ◀── number → place in the alphabet ──▶ which words are kept, and their ids

| kind of source         | numbers of the words                          | words that are kept                      |
|------------------------|-----------------------------------------------|------------------------------------------|
| text                   | as they come; afresh when there are a million | by min_df, max_df and max_features       |
| text, vocabulary given | those of the vocabulary                       | all of the vocabulary                    |
| counts                 | those of the source                           | all, or by these options if they are set |
| counts, vocabulary     | those of the vocabulary, by the words' names  | all of the vocabulary                    |

Memory: the words of one spool, about 150 bytes each; for the words of earlier spools 70 bytes each; the words that are
kept; and the chunks or the block of documents that are being counted. Nothing grows with the number of documents.
"""

import contextlib
import heapq
import itertools
import tempfile
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse

from smoothgrad_jax.data import text
from smoothgrad_jax.data.unpacking import CorpusError

_SPOOL = 8 << 20  # bytes of a temporary file that stay in memory
_WORDS = 1_000_000  # words in memory at a time
_WHOLE = 1 << 32  # counts from here on are floats

OnProgress = Callable[[int, int | None], None]


class Counted(NamedTuple):
    """A source that has been counted.

    Attributes:
      num_docs: D, documents without words included.
      num_words: V.
      num_entries: Entries of the sparse array.
      num_tokens: The sum of all counts.
      vocabulary: The V words, or None if they have no names.
      types: Of the offsets, the ids and the counts.
      limits: The options by which words were chosen, or None if there was no choice.
      dropped: What is missing; complete when all blocks have been taken. ``empty_documents`` have no word now;
        ``documents_that_lost_all_words`` are those of them that had one.
      blocks: Gives the CSR arrays in pieces of some documents, once: offsets (all but the zero that they begin with),
        ids and counts.
    """

    num_docs: int
    num_words: int
    num_entries: int
    num_tokens: float
    vocabulary: list[str] | None
    types: tuple[np.dtype, np.dtype, np.dtype]
    limits: dict[str, Any] | None
    dropped: dict[str, float]
    blocks: Callable[[], Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]]


@contextlib.contextmanager
def count(
    source: Any,
    what: text.Tokens | None,
    limits: dict[str, Any],
    vocabulary: list[str] | None = None,
    jobs: int | None = None,
    progress: OnProgress | None = None,
    folder: Any = None,
) -> Iterator[Counted]:
    """Count a source.

    Args:
      source: A :class:`smoothgrad_jax.data.readers.Source`, or what has the same attributes; trusted to keep its
      promises.
      what: What a token is, if the source is text.
      limits: ``min_df``, ``max_df`` and ``max_features`` of :func:`smoothgrad_jax.data.text.choose_words`, or
      ``"auto"``.
      vocabulary: The words to count, if they are not to be chosen.
      jobs: Processes that count text.
      progress: Called with (documents so far, bytes read or None if that is not known), at most five times a
        second, and at the end.
      folder: Where the counts wait, by default where the system keeps temporary files.

    Returns:
      A context with :class:`Counted`, whose blocks can be taken inside it.

    Raises:
      CorpusError: There is no document, or no word is left; or what the source itself says.
    """
    dropped = dict.fromkeys(("empty_documents", "documents_that_lost_all_words", "tokens_outside_vocabulary"), 0)
    watch = _Watch(progress)
    with contextlib.ExitStack() as stack:

        def new_file():
            return stack.enter_context(_temporary(folder))

        choose = source.is_text or any(value != "auto" for value in limits.values())
        if vocabulary is not None:
            known, spools, places = _count_known(source, what, vocabulary, jobs, dropped, new_file, watch)
            choose = False
        elif source.is_text:
            known, spools, places = _count_words(source, what, jobs, new_file, watch)
        else:
            known, spools, places = _count_numbers(source, new_file, watch)
        if watch.documents == 0:
            raise CorpusError(f"{_name(source)}: expected documents, got none")
        kept = np.ones(len(known.frequency), bool)
        if choose:
            limits = text.set_limits(watch.documents, **limits) if source.is_text else _only_asked(limits)
            kept = text.choose_words(known.frequency, known.total, watch.documents, **limits)
            ids = np.where(kept, np.cumsum(kept) - 1, -1).astype(np.int32)
            places = [ids if place is None else ids[place] for place in places]
        num_words, num_tokens = int(np.count_nonzero(kept)), _number(known.total[kept].sum())
        dropped["pruned_words"] = int(np.count_nonzero(known.frequency[~kept]))
        dropped["pruned_tokens"] = _number(known.total[~kept].sum())
        types = (
            np.dtype("<i8"),
            np.dtype("<u2" if num_words <= 1 << 16 else "<i4"),
            _type_for(known.largest[kept].max(initial=1)).newbyteorder("<"),
        )
        names = None if known.words is None else zip(_lines(known.words), kept, strict=True)
        yield Counted(
            num_docs=watch.documents,
            num_words=num_words,
            num_entries=int(known.frequency[kept].sum()),
            num_tokens=num_tokens,
            vocabulary=None if names is None else [word for word, keep in names if keep],
            types=types,
            limits=limits if choose else None,
            dropped=dropped,
            blocks=lambda: _last_form(spools, places, num_words, types, dropped),
        )
        watch.tell()


class _Known(NamedTuple):
    """What is known of each word: in how many documents, how many tokens, the largest count; a list or file of them."""

    frequency: np.ndarray
    total: np.ndarray
    largest: np.ndarray
    words: Any = None


class _Spool:
    """Counts of documents in a temporary file, and what is known of the words by their numbers."""

    def __init__(self, file):
        self.file, self.known = file, _Known(*(np.zeros(1024, np.int64) for _ in range(3)))

    def add(self, indptr, numbers, counts):
        """Documents that have a number once each, with positive counts."""
        if numbers.size:
            room, needed = self.known.frequency.size, int(numbers.max()) + 1
            kind = np.result_type(self.known.total, counts)
            if needed > room or kind != self.known.total.dtype:
                frequency, total, largest = self.fit(room if needed <= room else max(2 * room, needed))
                self.known = _Known(frequency, total.astype(kind), largest.astype(kind))
            np.add.at(self.known.frequency, numbers, 1)
            np.add.at(self.known.total, numbers, counts)
            np.maximum.at(self.known.largest, numbers, counts)
            counts = counts.astype(_type_for(counts.max()))
        for each in (np.diff(indptr), numbers, counts):
            np.lib.format.write_array(self.file, each, allow_pickle=False)

    def fit(self, size):
        """What is known of the numbers below ``size``."""
        return (np.pad(each[:size], (0, max(size - each.size, 0))) for each in self.known[:3])

    def blocks(self):
        """What was added, in the same pieces."""
        end = self.file.seek(0, 2)
        self.file.seek(0)
        while self.file.tell() < end:
            lengths, numbers, counts = (np.lib.format.read_array(self.file, allow_pickle=False) for _ in range(3))
            yield np.concatenate([[0], np.cumsum(lengths)]), numbers, counts


class _Watch:
    """Counts documents and says how far it is, but not too often."""

    def __init__(self, progress):
        self.documents, self.progress, self.last = 0, progress, time.monotonic()

    def add(self, indptr):
        self.documents += len(indptr) - 1
        if time.monotonic() - self.last >= 0.2:
            self.tell()

    def tell(self):
        self.last = time.monotonic()
        if self.progress is not None:
            self.progress(self.documents, None)


def _count_words(source, what, jobs, new_file, watch):
    """Text whose words are to be found: each spool numbers them as they come."""
    spools, words, numbers = [], [], {}
    with contextlib.closing(text.count_stream(source.texts(), what, jobs)) as chunks:
        for chunk in chunks:
            if not spools or len(numbers) >= _WORDS:
                if spools:
                    words.append(_sort(numbers, new_file()))
                    spools[-1].known = _Known(*spools[-1].fit(len(numbers)))  # no room for more
                spools.append(_Spool(new_file()))
                numbers = defaultdict(itertools.count().__next__)
            number = np.fromiter(map(numbers.__getitem__, chunk.words), np.int32, len(chunk.words))
            spools[-1].add(chunk.indptr, number[chunk.indices], chunk.data)
            watch.add(chunk.indptr)
    words.append(_sort(numbers))
    known, places = _merge(spools, words, new_file) if spools else (_Known(*(np.zeros(0, np.int64),) * 3, []), [])
    return known, spools, places


def _count_known(source, what, vocabulary, jobs, dropped, new_file, watch):
    """A source whose words have the numbers of a vocabulary; what is outside is added to ``dropped``."""
    spool, numbers = _Spool(new_file()), {word: i for i, word in enumerate(vocabulary)}
    if source.is_text:
        stream = (text.renumber(chunk, numbers) for chunk in text.count_stream(source.texts(), what, jobs))
    elif source.vocabulary is not None:
        number = np.array([numbers.get(word, -1) for word in source.vocabulary], np.int32)
        stream = (_once(*text.keep_entries(indptr, number[ids], n)) for indptr, ids, n in _blocks(source))
    else:
        raise CorpusError(f"{_name(source)}: its words have no names, so that a vocabulary cannot choose among them")
    with contextlib.closing(stream):
        for indptr, ids, counts, outside, lost in stream:
            spool.add(indptr, ids, counts)
            dropped["tokens_outside_vocabulary"] = _number(dropped["tokens_outside_vocabulary"] + outside)
            dropped["documents_that_lost_all_words"] += lost
            watch.add(indptr)
    return _Known(*spool.fit(len(vocabulary)), vocabulary), [spool], [None]


def _count_numbers(source, new_file, watch):
    """Counts, whose words have numbers."""
    spool = _Spool(new_file())
    for indptr, ids, counts in _blocks(source):
        spool.add(indptr, ids, counts)
        watch.add(indptr)
    if source.vocabulary is not None:
        size = len(source.vocabulary)
    else:
        size = max(int(np.flatnonzero(spool.known.frequency).max(initial=0)) + 1, source.num_words or 0)
    return _Known(*spool.fit(size), source.vocabulary), [spool], [None]


def _blocks(source):
    """The blocks of a source; counts that are whole numbers as int64, others as float64."""
    for indptr, ids, counts in source.blocks():
        whole = counts.max(initial=0) < _WHOLE and (counts.dtype.kind != "f" or (counts == np.floor(counts)).all())
        yield indptr, ids, counts.astype(np.int64 if whole else np.float64)


def _once(indptr, ids, counts, *rest):
    """Adds up what a document has of one word: two words of a source may have one name."""
    table = scipy.sparse.csr_array((counts, ids, indptr), (len(indptr) - 1, int(ids.max(initial=0)) + 1), copy=True)
    table.sum_duplicates()
    return table.indptr, table.indices, table.data, *rest


def _sort(numbers, file=None):
    """Words in alphabetical order, as a list or in a file, and the number of each."""
    words = sorted(numbers)
    number = np.fromiter(map(numbers.__getitem__, words), np.int32, len(words))
    if file is not None:
        file.writelines(map(line, words))
    return words if file is None else file, number


def _merge(spools, words, new_file):
    """What is known of all words in alphabetical order, and for each spool the places there of its own numbers."""
    if len(spools) == 1:
        alphabet, number = words[0]
        place = np.empty_like(number)
        place[number] = np.arange(len(number), dtype=np.int32)
        return _Known(*(each[number] for each in spools[0].known[:3]), alphabet), [place]
    streams = [zip(_lines(each), itertools.repeat(i), strict=False) for i, (each, _) in enumerate(words)]
    found, file, size = [array("i") for _ in spools], new_file(), 0
    for word, same in itertools.groupby(heapq.merge(*streams, key=itemgetter(0)), key=itemgetter(0)):
        file.write(line(word))
        for _, i in same:
            found[i].append(size)
        size += 1
    known, places = _Known(*(np.zeros(size, np.int64) for _ in range(3)), file), []
    for spool, (_, number), place in zip(spools, words, (np.frombuffer(each, np.int32) for each in found), strict=True):
        known.frequency[place] += spool.known.frequency[number]
        known.total[place] += spool.known.total[number]
        known.largest[place] = np.maximum(known.largest[place], spool.known.largest[number])
        places.append(np.empty_like(place))
        places[-1][number] = place
    return known, places


def _last_form(spools, places, num_words, types, dropped):
    """Numbers become ids, and increase in each document."""
    before = 0
    for spool, place in zip(spools, places, strict=True):
        for indptr, ids, counts in spool.blocks():
            if place is not None:
                indptr, ids, counts, _, lost = text.keep_entries(indptr, place[ids], counts)
                dropped["documents_that_lost_all_words"] += lost
            dropped["empty_documents"] += int(np.count_nonzero(np.diff(indptr) == 0))
            table = scipy.sparse.csr_array((counts, ids, indptr), (len(indptr) - 1, num_words))
            table.sort_indices()
            pieces = (indptr[1:] + before, table.indices, table.data)
            yield tuple(piece.astype(kind, copy=False) for piece, kind in zip(pieces, types, strict=True))
            before += int(indptr[-1])


def _only_asked(limits):
    """Limits for counts: what is not asked for removes no word."""
    nothing = {"min_df": 0, "max_df": 1.0, "max_features": None}
    return {name: nothing[name] if value == "auto" else value for name, value in limits.items()}


def _type_for(largest):
    """The smallest type for counts up to this one, which is an int or a float as the counts are."""
    return np.dtype(np.float32) if largest.dtype.kind == "f" else np.min_scalar_type(int(largest))


def _number(total):
    return int(total) if float(total).is_integer() else float(total)


def _name(source):
    more = len(source.paths) - 1
    return f"{source.paths[0]}{f' and {more} more' if more else ''}"


@contextlib.contextmanager
def _temporary(folder):
    with tempfile.SpooledTemporaryFile(_SPOOL, dir=folder) as file:
        yield file


def line(word: str) -> bytes:
    """A word as it stands in a file of words."""
    try:
        if "\n" not in word:
            return f"{word}\n".encode()
    except UnicodeEncodeError:
        pass
    raise CorpusError(
        f"the word {word!r} cannot stand on a line of vocabulary.txt; for text, try another token_pattern"
    )


def _lines(words):
    """Words, from a list or a file of them."""
    if not isinstance(words, list):
        words.seek(0)
        words = (each[:-1].decode() for each in words)
    yield from words
