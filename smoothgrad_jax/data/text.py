"""Count the tokens of texts, chunk by chunk, in one or several processes; and choose the words that are kept.

scikit-learn's ``CountVectorizer`` defines the tokens. Texts are a stream: a chunk of about a million characters is
counted at a time, and its words are numbered for that chunk alone, so that any process can count any chunk.

| option            | default                             | why                                                       |
|-------------------|-------------------------------------|-----------------------------------------------------------|
| ``lowercase``     | True                                | *Star* and *star* are one word                            |
| ``token_pattern`` | three or more letters or digits,    | shorter words are mostly grammar, formulas and initials;  |
|                   | the first a letter                  | numbers belong to no topic                                |
| ``stop_words``    | ``"english"``                       | words like *the* and *which* fill every topic             |
| ``ngram_range``   | (1, 1)                              | single words                                              |
| ``min_df``        | 5 documents; below 500 documents    | rarer words say little about co-occurrence, and they are  |
|                   | one for every 100, at least 1       | the majority of all words                                 |
| ``max_df``        | half of the documents; all below 20 | a word of most documents does not distinguish them        |
| ``max_features``  | 50,000                              | λ has one row per word                                    |

The options have the meaning that they have in ``CountVectorizer``: integers are numbers of documents, floats are
fractions of all documents.
"""

import contextlib
import itertools
import os
import re
import signal
import warnings
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import scipy.sparse

from smoothgrad_jax.data.compressed_files import CorpusError

WORD = r"(?u)\b[^\W\d_][^\W_]{2,}\b"  # three or more letters or digits, the first a letter

_CHUNK = 1 << 20  # characters per chunk
_SERIAL_CHUNKS = 32  # chunks that this process counts before it starts others, each of which imports scikit-learn


class Tokens(NamedTuple):
    """The definition of a token; made and checked by :func:`tokens`, which describes the attributes."""

    lowercase: bool
    token_pattern: str
    stop_words: str | tuple[str, ...] | None
    ngram_range: tuple[int, int]


class Chunk(NamedTuple):
    """Counts of some documents in CSR form.

    Attributes:
      words: The words; entry ``indices[i]`` is the word ``words[indices[i]]``.
      indptr: Document d has the entries indptr[d] … indptr[d + 1] − 1, one per distinct word, in no special order.
      indices: Positions in ``words``.
      data: Counts.
    """

    words: list[str]
    indptr: npt.NDArray
    indices: npt.NDArray
    data: npt.NDArray


class Kept(NamedTuple):
    """CSR arrays from which entries have been removed.

    Attributes:
      indptr, indices, data: The remaining entries.
      outside: The sum of the removed counts.
      lost: Documents that had entries and have none left.
    """

    indptr: npt.NDArray
    indices: npt.NDArray
    data: npt.NDArray
    outside: float
    lost: int


class CountedTexts(NamedTuple):
    """Texts counted with a given vocabulary.

    Attributes:
      counts: [D, V] scipy CSR, as ``CountVectorizer(vocabulary=…).transform`` returns it.
      outside: Tokens that are not in the vocabulary.
      lost: Documents that have tokens, but none of the vocabulary.
    """

    counts: scipy.sparse.csr_array
    outside: float
    lost: int


def tokens(
    lowercase: bool = True,
    token_pattern: str = WORD,
    stop_words: str | os.PathLike | Iterable[str] | None = "english",
    ngram_range: Sequence[int] = (1, 1),
) -> Tokens:
    """Check the definition of a token.

    Args:
      lowercase: Whether *Star* and *star* are one word.
      token_pattern: Regular expression; a token is its match, or its only group.
      stop_words: ``"english"``, None, words, or the path of a file with one word per line.
      ngram_range: The shortest and the longest sequence of tokens that is a word.

    Returns:
      :class:`Tokens`.

    Raises:
      ValueError: If an option is not usable; the message names it.
      CorpusError: If the file of stop words cannot be read.
      ImportError: If scikit-learn is missing.
    """
    try:
        groups = re.compile(token_pattern).groups
    except (re.error, TypeError) as error:
        raise ValueError(f"token_pattern: {token_pattern!r} is not a regular expression: {error}") from None
    if groups > 1:
        raise ValueError(f"token_pattern: expected at most one group in {token_pattern!r}, got {groups}")
    stops: str | tuple[str, ...] | None = None
    if stop_words == "english":
        stops = "english"
    elif stop_words is not None:
        words = read_words(stop_words, "stop words") if isinstance(stop_words, str | os.PathLike) else stop_words
        stops = tuple(sorted(set(_check_words(words, "stop_words"))))
    lengths = tuple(ngram_range)
    if len(lengths) != 2 or not all(isinstance(n, Integral) for n in lengths) or not 1 <= lengths[0] <= lengths[1]:
        raise ValueError(f"ngram_range: expected (shortest, longest), 1 ≤ shortest ≤ longest; got {lengths}")
    result = Tokens(bool(lowercase), token_pattern, stops, (int(lengths[0]), int(lengths[1])))
    _analyzer(result)
    return result


def read_words(path: str | os.PathLike, what: str = "vocabulary") -> list[str]:
    """Read a file with one word per line; blanks around words and empty lines at the end are ignored."""
    path = Path(path)
    try:
        lines = path.read_bytes().decode("utf-8-sig").rstrip().split("\n")
    except OSError as error:
        raise CorpusError(f"{path}: expected a file of {what}, one word per line: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise CorpusError(f"{path}: expected {what} in UTF-8: {error.reason} at byte {error.start}") from None
    return [line.strip() for line in lines] if lines != [""] else []


def check_vocabulary(words: str | os.PathLike | Iterable[str]) -> list[str]:
    """Return a vocabulary, given as words or as the path of a file, as a list of distinct words.

    Raises:
      CorpusError: If the vocabulary is empty, or contains a word twice.
      ValueError: If it contains something that is not a string.
    """
    path = words if isinstance(words, str | os.PathLike) else None
    name = "vocabulary" if path is None else str(path)
    vocabulary = _check_words(read_words(words) if isinstance(words, str | os.PathLike) else words, "vocabulary")
    if not vocabulary:
        raise CorpusError(f"{name}: expected at least one word")
    if len(set(vocabulary)) < len(vocabulary):
        first: dict[str, int] = {}
        for i, word in enumerate(vocabulary):
            if first.setdefault(word, i) != i:
                raise CorpusError(f"{name}: word {i + 1} is {word!r}, as word {first[word] + 1} is; expected it once")
    return vocabulary


def count_chunk(texts: Sequence[str], what: Tokens) -> Chunk:
    """Count the tokens of a few texts; the words are numbered in order of appearance."""
    analyze = _analyzer(what)
    # As a factory, numbers.__len__ would be a reference cycle, which delays the release of the memory.
    numbers: defaultdict[str, int] = defaultdict(itertools.count().__next__)
    flat, ends = array("i"), np.zeros(len(texts) + 1, np.int64)
    for i, text in enumerate(texts, start=1):
        flat.extend(map(numbers.__getitem__, analyze(text)))
        ends[i] = len(flat)
    # One integer per token, document × number of words + word: sorted and counted.
    words = list(numbers)
    token = np.repeat(np.arange(len(texts)) * len(words), np.diff(ends))
    token += np.frombuffer(flat, np.int32)
    entry, counts = np.unique(token, return_counts=True)
    document, indices = np.divmod(entry, max(len(words), 1))
    indptr = np.searchsorted(document, np.arange(len(texts) + 1))
    return Chunk(words, indptr, indices.astype(np.int32), counts.astype(np.int32))


def count_stream(texts: Iterable[str], what: Tokens, jobs: int | None = None) -> Generator[Chunk]:
    """Count any number of texts, one chunk at a time.

    Args:
      texts: The documents, which are read when they are needed.
      what: The definition of a token.
      jobs: The number of processes. By default this process counts the first 32 million characters alone, and then one
        process per core is started; 1 starts none. The processes do not import JAX and do not run the caller's script.
        If they cannot be started, or are killed, this process continues alone.

    Yields:
      A :class:`Chunk` per part of the texts, in order. At most twice as many chunks as processes exist at a time.
    """
    if jobs is not None and (not isinstance(jobs, Integral) or jobs < 1):
        raise ValueError(f"jobs: expected an integer number of processes, at least 1, or None; got {jobs!r}")
    serial, workers = (_SERIAL_CHUNKS, _num_cores()) if jobs is None else (0, int(jobs))
    pool, finished = None, False
    waiting: deque[tuple[list[str], Future[Chunk] | None]] = deque()
    try:
        for number, texts_of_chunk in enumerate(_cut(texts)):
            if number == serial and workers > 1:
                pool = _start(workers)
            waiting.append((texts_of_chunk, _submit(pool, texts_of_chunk, what)))
            if pool is None or len(waiting) > 2 * workers:
                yield _result(waiting.popleft(), what)
        while waiting:
            yield _result(waiting.popleft(), what)
        finished = True
    finally:
        if pool is not None:
            pool.shutdown(wait=True, kill_workers=not finished)


def count_texts(
    texts: Iterable[str],
    vocabulary: Sequence[str],
    *,
    lowercase: bool = True,
    token_pattern: str = WORD,
    stop_words: str | os.PathLike | Iterable[str] | None = "english",
    ngram_range: Sequence[int] = (1, 1),
    jobs: int | None = None,
) -> CountedTexts:
    """Count texts in memory with a given vocabulary, for example new documents for an existing model.

    Args:
      texts: The documents.
      vocabulary: V distinct words, or the path of a file with one word per line.
      lowercase: As in :func:`tokens`, like the next three.
      token_pattern: The regular expression of a token.
      stop_words: Tokens that are ignored, and are not counted as outside of the vocabulary.
      ngram_range: The lengths of sequences of tokens that are words.
      jobs: As in :func:`count_stream`.

    Returns:
      :class:`CountedTexts`.

    Raises:
      ValueError, CorpusError, ImportError: As in :func:`tokens` and :func:`check_vocabulary`.

    Example:
      >>> counted = count_texts(["A star, a brighter star", "the moon"], ["planet", "star"])
      >>> counted.counts.toarray().tolist(), counted.outside, counted.lost
      ([[0, 2], [0, 0]], 2, 1)
    """
    what = tokens(lowercase, token_pattern, stop_words, ngram_range)
    words = check_vocabulary(vocabulary)
    numbers = {word: i for i, word in enumerate(words)}
    parts = [renumber(chunk, numbers) for chunk in count_stream(_check_texts(texts), what, jobs)]
    lengths, indices, data = [np.zeros(0, np.int64)], [np.zeros(0, np.int32)], [np.zeros(0, np.int64)]
    for part in parts:
        lengths.append(np.diff(part.indptr))
        indices.append(part.indices)
        data.append(part.data)
    indptr = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
    shape = (len(indptr) - 1, len(words))
    counts = scipy.sparse.csr_array((np.concatenate(data), np.concatenate(indices), indptr), shape, np.int64)
    counts.sort_indices()
    return CountedTexts(counts, outside=sum(part.outside for part in parts), lost=sum(part.lost for part in parts))


def renumber(chunk: Chunk, numbers: dict[str, int]) -> Kept:
    """Return a chunk with the numbers that its words have in a vocabulary, without the other words."""
    number = np.fromiter((numbers.get(word, -1) for word in chunk.words), np.int32, len(chunk.words))
    return keep_entries(chunk.indptr, number[chunk.indices], chunk.data)


def keep_entries(indptr: npt.NDArray, indices: npt.NDArray, data: npt.NDArray) -> Kept:
    """Return CSR arrays without the entries whose index is negative."""
    keep = indices >= 0
    if keep.all():
        return Kept(indptr, indices, data, 0, 0)
    ends = np.concatenate([[0], np.cumsum(keep)])[indptr]
    lost = np.count_nonzero((np.diff(indptr) > 0) & (np.diff(ends) == 0))
    return Kept(ends, indices[keep], data[keep], data[~keep].sum().item(), int(lost))


def check_limits(min_df: Any, max_df: Any, max_features: Any) -> None:
    """Check the options by which words are chosen, before anything is read."""
    for name, value in (("min_df", min_df), ("max_df", max_df)):
        number = isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1
        fraction = isinstance(value, Real) and not isinstance(value, Integral) and 0 <= float(value) <= 1
        if value != "auto" and not number and not fraction:
            expected = "an integer number of documents (at least 1), a fraction from 0.0 to 1.0, or 'auto'"
            raise ValueError(f"{name}: expected {expected}; got {value!r}")
    number = isinstance(max_features, Integral) and not isinstance(max_features, bool) and int(max_features) >= 1
    if max_features is not None and max_features != "auto" and not number:
        raise ValueError(f"max_features: expected an integer number of words, None or 'auto'; got {max_features!r}")


def set_limits(num_docs: int, min_df: Any, max_df: Any, max_features: Any) -> dict[str, Any]:
    """Return the options by which words are chosen, with numbers instead of ``"auto"``; see the table above."""
    if min_df == "auto":
        min_df = min(max(num_docs // 100, 1), 5)
    if max_df == "auto":
        max_df = 0.5 if num_docs >= 20 else 1.0
    return {"min_df": min_df, "max_df": max_df, "max_features": 50_000 if max_features == "auto" else max_features}


def choose_words(
    frequency: npt.NDArray,
    total: npt.NDArray,
    num_docs: int,
    min_df: float,
    max_df: float,
    max_features: int | None,
) -> npt.NDArray[np.bool_]:
    """Choose the words that are kept, as ``CountVectorizer`` does.

    Args:
      frequency: The document frequency of each word, words in alphabetical order.
      total: The number of tokens of each word.
      num_docs: D.
      min_df: The minimal document frequency: an integer, or a fraction of D.
      max_df: The maximal document frequency.
      max_features: The maximal number of words, of which the most frequent are kept; None for any number.

    Returns:
      Whether each word is kept.

    Raises:
      CorpusError: If no word is left; the message says which option to relax.
    """
    low = min_df if isinstance(min_df, Integral) else min_df * num_docs
    high = max_df if isinstance(max_df, Integral) else max_df * num_docs
    asked = f"min_df={min_df} asks for {low:g} documents or more, max_df={max_df} for {high:g} or fewer, of {num_docs}"
    if high < low:
        change = "lower min_df" if high >= num_docs else "lower min_df or raise max_df"
        raise CorpusError(f"no word can be left: {asked}; {change}")
    if not frequency.any():
        raise CorpusError(
            f"none of the {num_docs} documents has a word: try another token_pattern, or fewer stop_words"
        )
    mask = (frequency >= low) & (frequency <= high)
    if not mask.any():
        if not (frequency >= low).any():
            change = f"lower min_df: the most common word is in {frequency.max()}"
        elif not (frequency <= high).any():
            change = f"raise max_df: the rarest word is in {frequency[frequency > 0].min()}"
        else:
            change = "lower min_df or raise max_df"
        raise CorpusError(f"none of {np.count_nonzero(frequency)} different words is left: {asked}; {change}")
    if max_features is not None and np.count_nonzero(mask) > max_features:
        # The same call on the same numbers as in CountVectorizer, so that ties are resolved in the same way.
        best = (-total[mask]).argsort()[:max_features]
        chosen = np.flatnonzero(mask)[best]
        mask = np.zeros_like(mask)
        mask[chosen] = True
    return mask


def _check_words(words: Iterable[str], name: str) -> list[str]:
    words = list(words)
    for i, word in enumerate(words):
        if not isinstance(word, str):
            raise ValueError(f"{name}: expected words, got {word!r} as word {i + 1}")
    return words


def _check_texts(texts: Iterable[str]) -> Iterator[str]:
    if isinstance(texts, str):
        raise ValueError("texts: expected an iterable of documents, got one string")
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"document {i}: expected text, got {type(text).__name__}")
        yield text


@lru_cache(maxsize=8)
def _analyzer(what: Tokens) -> Callable[[str], list[str]]:
    try:
        from sklearn.feature_extraction.text import CountVectorizer
    except ImportError:
        raise ImportError('text is counted with scikit-learn: pip install "smoothgrad_jax[sklearn]"') from None
    return CountVectorizer(**what._asdict()).build_analyzer()


def _cut(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yield lists of texts of about _CHUNK characters."""
    chunk: list[str] = []
    size = 0
    for text in texts:
        chunk.append(text)
        size += len(text) + 16  # an empty document needs memory, too
        if size >= _CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block Ctrl-C in processes that are started here: this process handles it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _initialize_worker() -> None:
    """Ignore Ctrl-C where it cannot be blocked, and warnings, which this process has already shown."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")


def _start(jobs: int) -> Any:
    """Return a pool of processes, or None if the system cannot start any."""
    # loky's processes, unlike those of the standard library, do not import the caller's script.
    try:
        from joblib.externals.loky import ProcessPoolExecutor

        if hasattr(signal, "pthread_sigmask"):
            # If the tracker were started later, it would unblock the signals that _interrupts_blocked blocks.
            from multiprocessing import resource_tracker

            resource_tracker.ensure_running()
        return ProcessPoolExecutor(jobs, initializer=_initialize_worker)
    except (ImportError, OSError, NotImplementedError):
        return None


def _submit(pool: Any, chunk: list[str], what: Tokens) -> Future[Chunk] | None:
    """Return the future counts of a chunk, or None if this process has to count it."""
    try:
        with _interrupts_blocked():
            return pool and pool.submit(count_chunk, chunk, what)
    except (BrokenProcessPool, OSError):
        return None


def _result(submitted: tuple[list[str], Future[Chunk] | None], what: Tokens) -> Chunk:
    chunk, future = submitted
    try:
        return count_chunk(chunk, what) if future is None else future.result()
    except BrokenProcessPool:
        return count_chunk(chunk, what)
