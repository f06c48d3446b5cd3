"""Text becomes counts: tokens, counted chunk by chunk, in this process or in several; and which words are kept.

scikit-learn's ``CountVectorizer`` says what a token is. Counting is a stream: a chunk of about a million characters is
counted at a time, and its words are numbered for that chunk alone, so that chunks can be counted anywhere.

| option            | default                             | why                                                       |
|-------------------|-------------------------------------|-----------------------------------------------------------|
| ``lowercase``     | True                                | *Star* and *star* are one word                            |
| ``token_pattern`` | three or more letters or digits,    | shorter words are mostly grammar, formulas and initials;  |
|                   | the first a letter                  | numbers belong to no topic                                |
| ``stop_words``    | ``"english"``                       | words like *the* and *which* fill every topic             |
| ``ngram_range``   | (1, 1)                              | single words                                              |
| ``min_df``        | 5 documents; below 500 documents    | a rarer word cannot say which words it goes with, and     |
|                   | one for every 100, at least 1       | such words are most of all words                          |
| ``max_df``        | half of the documents; all below 20 | a word of most documents tells none of them apart         |
| ``max_features``  | 50,000                              | λ has a row for each word                                 |

These are ``CountVectorizer``'s options in its meanings: whole numbers count documents, fractions are shares of them.
"""

import contextlib
import itertools
import os
import re
import signal
import warnings
from array import array
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse

from smoothgrad_jax.data.unpacking import CorpusError

WORD = r"(?u)\b[^\W\d_][^\W_]{2,}\b"  # three or more letters or digits, the first a letter

_CHUNK = 1 << 20  # characters of text that are counted at a time
_ALONE = 32  # chunks that this process counts itself before it pays for others, which import scikit-learn each


class Tokens(NamedTuple):
    """What a token is; made and checked by :func:`tokens`."""

    lowercase: bool
    token_pattern: str
    stop_words: str | tuple[str, ...] | None
    ngram_range: tuple[int, int]


class Chunk(NamedTuple):
    """Counts of some documents. Column i is the word ``words[i]``; a document has a word once, in no special order."""

    words: list[str]
    indptr: np.ndarray
    indices: np.ndarray
    data: np.ndarray


class CountedTexts(NamedTuple):
    """Texts counted with a vocabulary that was given.

    Attributes:
      counts: [D, V] scipy CSR, as ``CountVectorizer(vocabulary=…).transform`` gives it.
      outside: Tokens that are not in the vocabulary.
      lost: Documents that have tokens, but none in the vocabulary.
    """

    counts: scipy.sparse.csr_array
    outside: int
    lost: int


def tokens(
    lowercase: bool = True,
    token_pattern: str = WORD,
    stop_words: str | os.PathLike | Iterable[str] | None = "english",
    ngram_range: Sequence[int] = (1, 1),
) -> Tokens:
    """Check what a token is to be.

    Args:
      lowercase: Whether *Star* and *star* are one word.
      token_pattern: Regular expression; what it matches, or its one group, is a token.
      stop_words: ``"english"``, None, words, or the path of a file with a word on each line.
      ngram_range: (shortest, longest) sequence of tokens that counts as a word.

    Returns:
      :class:`Tokens`.

    Raises:
      ValueError: An option is not usable; it says which and why.
      CorpusError: The file of stop words cannot be read.
      ImportError: scikit-learn is missing.
    """
    try:
        groups = re.compile(token_pattern).groups
    except (re.error, TypeError) as error:
        raise ValueError(f"token_pattern: {token_pattern!r} is not a regular expression: {error}") from None
    if groups > 1:
        raise ValueError(f"token_pattern: expected at most one group in {token_pattern!r}, got {groups}")
    if isinstance(stop_words, str | os.PathLike):
        stop_words = "english" if stop_words == "english" else read_words(stop_words, "stop words")
    if stop_words is not None and stop_words != "english":
        stop_words = tuple(sorted(set(_check_words(stop_words, "stop_words"))))
    lengths = tuple(ngram_range)
    if len(lengths) != 2 or not all(isinstance(n, Integral) for n in lengths) or not 1 <= lengths[0] <= lengths[1]:
        raise ValueError(f"ngram_range: expected (shortest, longest), 1 ≤ shortest ≤ longest; got {lengths}")
    result = Tokens(bool(lowercase), token_pattern, stop_words, (int(lengths[0]), int(lengths[1])))
    _analyzer(result)
    return result


def read_words(path: str | os.PathLike, what: str = "vocabulary") -> list[str]:
    """The words of a file with a word on each line; spaces around a word and empty lines at the end do not count."""
    path = Path(path)
    try:
        lines = path.read_bytes().decode("utf-8-sig").rstrip().split("\n")
    except OSError as error:
        raise CorpusError(f"{path}: expected a file of {what}, a word on each line: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise CorpusError(f"{path}: expected {what} in UTF-8: {error.reason} at byte {error.start}") from None
    return [line.strip() for line in lines] if lines != [""] else []


def check_vocabulary(words: str | os.PathLike | Iterable[str]) -> list[str]:
    """A vocabulary, or the path of a file that has one, as a list of different words, or an error that says why not."""
    path = words if isinstance(words, str | os.PathLike) else None
    words = _check_words(read_words(path) if path is not None else words, "vocabulary")
    name = "vocabulary" if path is None else str(path)
    if not words:
        raise CorpusError(f"{name}: expected at least one word")
    if len(set(words)) < len(words):
        first: dict[str, int] = {}
        for i, word in enumerate(words):
            if first.setdefault(word, i) != i:
                raise CorpusError(f"{name}: word {i + 1} is {word!r}, as word {first[word] + 1} is; expected it once")
    return words


def count_chunk(texts: Sequence[str], what: Tokens) -> Chunk:
    """Count a few texts.

    Args:
      texts: The documents.
      what: What a token is.

    Returns:
      Their :class:`Chunk`; the words are numbered in the order in which they come.
    """
    analyze = _analyzer(what)
    numbers = defaultdict(
        itertools.count().__next__
    )  # numbers.__len__ would be a cycle, which stays in memory for long
    flat, ends = array("i"), np.zeros(len(texts) + 1, np.int64)
    for i, text in enumerate(texts, start=1):
        flat.extend(map(numbers.__getitem__, analyze(text)))
        ends[i] = len(flat)
    # One number for each (document, word), sorted and counted.
    words = list(numbers)
    token = np.repeat(np.arange(len(texts)) * len(words), np.diff(ends))
    token += np.frombuffer(flat, np.int32)
    entry, counts = np.unique(token, return_counts=True)
    document, indices = np.divmod(entry, max(len(words), 1))
    indptr = np.searchsorted(document, np.arange(len(texts) + 1))
    return Chunk(words, indptr, indices.astype(np.int32), counts.astype(np.int32))


def count_stream(texts: Iterable[str], what: Tokens, jobs: int | None = None) -> Iterator[Chunk]:
    """Count any number of texts, a chunk at a time.

    Args:
      texts: The documents, which are taken as they are needed.
      what: What a token is.
      jobs: Processes. By default this one counts the first 32 million characters alone, and then one for each core
        does; 1 starts none. They import no jax and do not run the caller's script again. If they cannot be started, or
        are killed, this process goes on alone.

    Yields:
      A :class:`Chunk` for each part of the texts, in their order. Twice as many chunks as processes exist at a time.
    """
    if jobs is not None and (not isinstance(jobs, Integral) or jobs < 1):
        raise ValueError(f"jobs: expected a whole number of processes, at least 1, or None; got {jobs!r}")
    alone, jobs = (_ALONE, _cores()) if jobs is None else (0, int(jobs))
    pool, waiting, finished = None, deque(), False
    try:
        for number, chunk in enumerate(_cut(texts)):
            if number == alone and jobs > 1:
                pool = _start(jobs)
            waiting.append((chunk, _submit(pool, chunk, what)))
            if pool is None or len(waiting) > 2 * jobs:
                yield _result(*waiting.popleft(), what)
        while waiting:
            yield _result(*waiting.popleft(), what)
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
    """Count texts in memory, with a vocabulary that was given: new documents for topics that exist.

    Args:
      texts: The documents.
      vocabulary: V different words, or the path of a file with a word on each line.
      lowercase: As in :func:`tokens`, like the next three.
      token_pattern: What a token is.
      stop_words: Tokens that are no words. They count as outside only if they are not stop words.
      ngram_range: Sequences of tokens that are words.
      jobs: As in :func:`count_stream`.

    Returns:
      :class:`CountedTexts`.

    Raises:
      ValueError, CorpusError, ImportError: As in :func:`tokens`; or the vocabulary has a word twice.

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
        lengths.append(np.diff(part[0]))
        indices.append(part[1])
        data.append(part[2])
    indptr = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
    shape = (len(indptr) - 1, len(words))
    counts = scipy.sparse.csr_array((np.concatenate(data), np.concatenate(indices), indptr), shape, np.int64)
    counts.sort_indices()
    return CountedTexts(counts, outside=sum(part[3] for part in parts), lost=sum(part[4] for part in parts))


def renumber(chunk: Chunk, numbers: dict[str, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray, int, int]:
    """A chunk with the numbers that its words have in a vocabulary, as :func:`keep_entries` gives it."""
    number = np.fromiter((numbers.get(word, -1) for word in chunk.words), np.int32, len(chunk.words))
    return keep_entries(chunk.indptr, number[chunk.indices], chunk.data)


def keep_entries(indptr: Any, indices: Any, data: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, Any, int]:
    """CSR arrays without the entries whose index is negative; the sum of those, and the rows that they leave empty."""
    keep = indices >= 0
    if keep.all():
        return indptr, indices, data, 0, 0
    ends = np.concatenate([[0], np.cumsum(keep)])[indptr]
    lost = np.count_nonzero((np.diff(indptr) > 0) & (np.diff(ends) == 0))
    return ends, indices[keep], data[keep], data[~keep].sum().item(), int(lost)


def check_limits(min_df: Any, max_df: Any, max_features: Any) -> None:
    """Check the options by which words are chosen, before anything is read."""
    for name, value in (("min_df", min_df), ("max_df", max_df)):
        whole = isinstance(value, Integral) and not isinstance(value, bool) and value >= 1
        share = isinstance(value, Real) and not isinstance(value, Integral) and 0 <= value <= 1
        if value != "auto" and not whole and not share:
            expected = "a whole number of documents (at least 1), a share between 0.0 and 1.0, or 'auto'"
            raise ValueError(f"{name}: expected {expected}; got {value!r}")
    whole = isinstance(max_features, Integral) and not isinstance(max_features, bool) and max_features >= 1
    if max_features is not None and max_features != "auto" and not whole:
        raise ValueError(f"max_features: expected a whole number of words, None or 'auto'; got {max_features!r}")


def set_limits(num_docs: int, min_df: Any, max_df: Any, max_features: Any) -> dict[str, Any]:
    """The options by which words are chosen, where ``"auto"`` has become a number; see the table above."""
    if min_df == "auto":
        min_df = min(max(num_docs // 100, 1), 5)
    if max_df == "auto":
        max_df = 0.5 if num_docs >= 20 else 1.0
    return {"min_df": min_df, "max_df": max_df, "max_features": 50_000 if max_features == "auto" else max_features}


def choose_words(
    frequency: np.ndarray, total: np.ndarray, num_docs: int, min_df: Any, max_df: Any, max_features: Any
) -> np.ndarray:
    """Which words are kept, as ``CountVectorizer`` decides it.

    Args:
      frequency: In how many documents each word is, words in alphabetical order.
      total: How often each word is.
      num_docs: D.
      min_df: The fewest documents of a word: a whole number, or a share of D.
      max_df: The most.
      max_features: The most words, None for any number; the most frequent are kept.

    Returns:
      One boolean for each word.

    Raises:
      CorpusError: No word is left; it says which option to relax.
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
        # The same call on the same numbers as in CountVectorizer: ties fall as they fall there.
        best = (-total[mask]).argsort()[:max_features]
        chosen = np.flatnonzero(mask)[best]
        mask = np.zeros_like(mask)
        mask[chosen] = True
    return mask


def _check_words(words, name):
    words = list(words)
    for i, word in enumerate(words):
        if not isinstance(word, str):
            raise ValueError(f"{name}: expected words, got {word!r} as word {i + 1}")
    return words


def _check_texts(texts):
    if isinstance(texts, str):
        raise ValueError("texts: expected an iterable of documents, got one string")
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"document {i}: expected text, got {type(text).__name__}")
        yield text


@lru_cache(maxsize=8)
def _analyzer(what):
    try:
        from sklearn.feature_extraction.text import CountVectorizer
    except ImportError:
        raise ImportError('text is counted with scikit-learn: pip install "smoothgrad_jax[sklearn]"') from None
    return CountVectorizer(**what._asdict()).build_analyzer()


def _cut(texts):
    """Lists of texts, of about _CHUNK characters each."""
    chunk, size = [], 0
    for text in texts:
        chunk.append(text)
        size += len(text) + 16  # an empty document takes room too
        if size >= _CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def _deaf():
    """Processes that are started in here never hear Ctrl-C, which is the business of this one."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _quiet():
    """In a new process: where signals cannot be blocked they are ignored; warnings have been given already."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")


def _start(jobs):
    """Processes, or None where there can be none."""
    # loky's processes, unlike those of the standard library, do not import the caller's script.
    try:
        from joblib.externals.loky import ProcessPoolExecutor

        if hasattr(signal, "pthread_sigmask"):
            # If it were started later, that would unblock what _deaf has blocked.
            from multiprocessing import resource_tracker

            resource_tracker.ensure_running()
        return ProcessPoolExecutor(jobs, initializer=_quiet)
    except (ImportError, OSError, NotImplementedError):
        return None


def _submit(pool, chunk, what):
    """The future counts of a chunk, or None if this process has to count it."""
    try:
        with _deaf():
            return pool and pool.submit(count_chunk, chunk, what)
    except (BrokenProcessPool, OSError):
        return None


def _result(chunk, future, what):
    try:
        return count_chunk(chunk, what) if future is None else future.result()
    except BrokenProcessPool:
        return count_chunk(chunk, what)
