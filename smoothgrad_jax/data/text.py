"""Tokenize and count texts in chunks, in one or several processes, and select the vocabulary.

scikit-learn's ``CountVectorizer`` defines the tokens. A chunk has about a million characters. Word numbers are local to
a chunk, so that processes count chunks independently.

| option            | default                             | why                                                       |
|-------------------|-------------------------------------|-----------------------------------------------------------|
| ``lowercase``     | True                                | *Star* and *star* are one word                            |
| ``token_pattern`` | three or more letters or digits,    | shorter words are mostly grammar, formulas and initials;  |
|                   | the first a letter                  | numbers belong to no topic                                |
| ``stop_words``    | ``"english"``                       | words like *the* and *which* fill every topic             |
| ``ngram_range``   | (1, 1)                              | single words                                              |
| ``min_npmi``      | 0.4                                 | most sequences are frequent only because their words are  |
| ``min_df``        | 5 documents; below 500 documents    | rarer words say little about co-occurrence, and they are  |
|                   | one for every 100, at least 1       | the majority of all words                                 |
| ``max_df``        | half of the documents; all below 20 | a word of most documents does not distinguish them        |
| ``max_features``  | 50,000                              | λ has one row per word                                    |

The options have the meaning that they have in ``CountVectorizer``: integers are numbers of documents, floats are
fractions of all documents. Three options differ:

- ``stop_words`` adds words to scikit-learn's English list; ``stop_words_only`` replaces the list. For text in another
  language, pass a file with one word per line as ``stop_words_only``: https://github.com/stopwords-iso has lists for
  more than fifty languages, and ``nltk.corpus.stopwords.words("german")`` returns one.
- A sequence of words is kept if its words occur together more often than they would by chance; see
  :func:`smoothgrad_jax.data.collocations.collocations`.
- ``tokenizer`` splits a text into words, for scripts without spaces, or returns lemmas. It is called with the text as
  it is; then the words are converted to lower case. Its name is saved with a model, and it must be passed again when
  the model is applied to text: a model never imports code.

The regular expression of a saved model is applied in other processes, which are killed if they need more than a minute
for a million characters: matching can take exponential time, and Python cannot interrupt it.
"""

import contextlib
import itertools
import os
import pickle
import re
import warnings
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache
from numbers import Integral, Real
from typing import Any, NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt

from smoothgrad_jax.data import schema, tokenizers
from smoothgrad_jax.data.compressed_files import MAX_RECORD_BYTES, text_lines
from smoothgrad_jax.data.errors import CorpusError, CorpusWarning, OptionName, Pieces, corpus_error, excerpt, plural
from smoothgrad_jax.data.local_files import regular_file
from smoothgrad_jax.data.tokenizers import Tokenizer
from smoothgrad_jax.data.worker_processes import signals_blocked, start_pool

WORD = r"(?u)\b[^\W\d_][^\W_]{2,}\b"  # three or more letters or digits, the first a letter

_CHUNK = 1 << 20  # characters per chunk
_MAX_VOCABULARY = 1 << 28  # characters of all words of a file
_SERIAL_CHUNKS = 32  # chunks counted before worker processes start, because each worker imports scikit-learn
_MAX_NGRAM = 10  # words
_MIN_NPMI = 0.4  # of a sequence of words
_MAX_PATTERN = 1_000  # characters of a regular expression in a saved model
_PATTERN_SECONDS = 60  # for a chunk of _CHUNK characters and a regular expression of a saved model
_PATTERN_WORKERS = 4  # processes that apply a regular expression of a saved model

# What `Tokens.as_json` returns. All stop words are stored: the name of a file would be that of a file of the reader.
STORED_TOKENS = schema.record(
    {},
    {
        "lowercase": schema.boolean,
        "token_pattern": schema.string,
        "stop_words": schema.either(schema.one_of(None, "english"), schema.list_of(schema.string)),
        "ngram_range": schema.list_of(schema.integer(1), 2),
        "tokenizer": schema.optional(schema.string),
    },
)


class TokenOptions(TypedDict, total=False):
    """Options that define a token; :func:`tokens` describes them."""

    lowercase: bool
    token_pattern: str
    stop_words: str | os.PathLike | Iterable[str] | None
    stop_words_only: str | os.PathLike | Iterable[str] | None
    ngram_range: Sequence[int]
    tokenizer: Tokenizer | str | None


class Tokens(NamedTuple):
    """The definition of a token; made and checked by :func:`tokens`, which describes the attributes.

    Attributes:
      stop_words: ``"english"``, or all words that are removed, or None.
      trusted: False if the definition comes from a saved model; see the module.
    """

    lowercase: bool
    token_pattern: str
    stop_words: str | tuple[str, ...] | None
    ngram_range: tuple[int, int]
    tokenizer: Tokenizer | str | None = None
    trusted: bool = True

    def as_json(self) -> dict[str, Any]:
        """Return the values that are stored with a corpus or a model; a tokenizer is stored as its name."""
        values = {
            "lowercase": self.lowercase,
            "token_pattern": self.token_pattern,
            "stop_words": list(self.stop_words) if isinstance(self.stop_words, tuple) else self.stop_words,
            "ngram_range": list(self.ngram_range),
        }
        return values if self.tokenizer is None else values | {"tokenizer": tokenizers.name_of(self.tokenizer)}


class Chunk(NamedTuple):
    """Counts of some documents in CSR form, with one entry per document and distinct word, in any order."""

    words: list[str]
    indptr: npt.NDArray
    indices: npt.NDArray  # positions in `words`
    data: npt.NDArray


class Kept(NamedTuple):
    """CSR arrays from which entries have been removed."""

    indptr: npt.NDArray
    indices: npt.NDArray
    data: npt.NDArray
    outside: float  # the sum of the removed counts
    lost: int  # documents that had entries and have none left


def tokens(
    lowercase: bool = True,
    token_pattern: str = WORD,
    stop_words: str | os.PathLike | Iterable[str] | None = "english",
    stop_words_only: str | os.PathLike | Iterable[str] | None = None,
    ngram_range: Sequence[int] = (1, 1),
    tokenizer: Tokenizer | str | None = None,
    encoding: str = "utf-8",
) -> Tokens:
    """Return a checked definition of a token.

    Args:
      lowercase: Whether *Star* and *star* are one word; stop words are converted, too.
      token_pattern: Regular expression; a token is its match, or its only group.
      stop_words: Words to remove in addition to the English list, or the path of a file with one word per line;
        ``"english"`` for the list alone, None to remove no word.
      stop_words_only: Words to remove instead of the English list, or the path of a file.
      ngram_range: The shortest and the longest sequence of tokens that is a word.
      tokenizer: A function that takes a text and returns its words, instead of ``token_pattern``; or its name
        ``"package.module:function"``, which every process imports. Worker processes get a copy of a function with
        each chunk, so pass the name of a function that holds a large model.
      encoding: The encoding of the files of stop words.

    Raises:
      CorpusError: If an option is not usable, or a file of stop words cannot be read.
      ImportError: If scikit-learn is missing.
    """
    _check_pattern(token_pattern)
    if tokenizer is not None and token_pattern != WORD:
        raise _option_error("token_pattern", "has no effect beside a tokenizer")
    if stop_words_only is not None and stop_words != "english":
        raise _option_error("stop_words", "has no effect beside stop_words_only")
    stops: str | tuple[str, ...] | None = stop_words if stop_words == "english" and stop_words_only is None else None
    if stop_words_only is not None:
        stops = _stop_words(stop_words_only, "stop_words_only", lowercase, encoding)
    elif stop_words not in ("english", None):
        from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS

        added = _stop_words(stop_words, "stop_words", lowercase, encoding)
        stops = tuple(sorted({*added, *ENGLISH_STOP_WORDS}))
    if isinstance(tokenizer, str):
        tokenizers.load(tokenizer)
    elif tokenizer is not None and not callable(tokenizer):
        raise _option_error("tokenizer", f"expected a function or 'module:function', got {tokenizer!r}")
    result = Tokens(bool(lowercase), token_pattern, stops, _check_lengths(ngram_range), tokenizer)
    if isinstance(stops, tuple):
        single = _analyzer(result._replace(ngram_range=(1, 1)))
        split = sorted({word for stop in stops for word in single(stop)})
        if split:
            listed = ", ".join(map(excerpt, split[:5])) + (", …" if len(split) > 5 else "")
            problem = f"some stop words are split into words that are kept; add them to the list: {listed}"
            warnings.warn(CorpusWarning(problem), stacklevel=2)
    _analyzer(result)
    return result


def stored_tokens(stored: schema.Json, tokenizer: Tokenizer | str | None = None) -> Tokens:
    """Return the definition of a token that :meth:`Tokens.as_json` stored, without trust in the values.

    Values that are missing have the defaults. No file is read because of the values and nothing is imported. The name
    of the tokenizer must be the stored one, if there is one.
    """
    try:
        STORED_TOKENS(stored, "")
        stored = {**Tokens(True, WORD, "english", (1, 1)).as_json(), **stored}
        pattern, stops, lengths = stored["token_pattern"], stored["stop_words"], _check_lengths(stored["ngram_range"])
        if len(pattern) > _MAX_PATTERN:
            raise ValueError(f"expected a token_pattern of at most {_MAX_PATTERN:,} characters")
        _check_pattern(pattern)
    except ValueError as error:
        raise CorpusError(f"the stored definition of a word is damaged: {error}") from None
    name, given = stored.get("tokenizer"), None if tokenizer is None else tokenizers.name_of(tokenizer)
    if given != name and name is None:
        raise CorpusError(OptionName("tokenizer"), ": has no effect, because the words were found without one")
    if given != name:
        problem = f"the words were found with the tokenizer {excerpt(name)}; if you trust it, pass its name as "
        raise CorpusError(problem, OptionName("tokenizer"), f", got {given!r}" if given else "")
    stops = tuple(stops) if isinstance(stops, list) else stops
    trusted = tokenizer is not None or pattern == WORD
    return Tokens(stored["lowercase"], pattern, stops, lengths, tokenizer, trusted)


def read_words(path: str | os.PathLike, encoding: str = "utf-8") -> list[str]:
    """Read a file with one word per line, optionally compressed; blanks around words and at the end are ignored."""
    path, words, length, blank = regular_file(path), [], 0, 0
    for number, line in text_lines(path, encoding, MAX_RECORD_BYTES):
        word = line.strip()
        length += len(word)
        if not word:
            blank = blank or number
        elif blank:
            raise corpus_error(path, "expected a word, got a blank line", blank)
        elif length > _MAX_VOCABULARY:
            problem = f"expected words of at most {_MAX_VOCABULARY:,} characters in all, got more"
            raise corpus_error(path, problem, number)
        else:
            words.append(word)
    return words


def word_line(word: str) -> bytes:
    """Return a word, which must have no line break, as a line of a file of words."""
    try:
        if "\n" not in word:
            return f"{word}\n".encode()
    except UnicodeEncodeError:
        pass
    problem = f"the word {word!r} cannot be a line of vocabulary.txt; for text, try another "
    raise CorpusError(problem, OptionName("token_pattern"))


def check_vocabulary(words: str | os.PathLike | Iterable[str], encoding: str = "utf-8") -> list[str]:
    """Return a vocabulary as a list of distinct words, from words or from the path of a file of :func:`read_words`."""
    name = str(words) if isinstance(words, str | os.PathLike) else "vocabulary"
    words = read_words(words, encoding) if isinstance(words, str | os.PathLike) else words
    vocabulary = _check_words(words, "vocabulary")
    if not vocabulary:
        raise CorpusError(f"{name}: expected at least one word")
    first: dict[str, int] = {}
    for i, word in enumerate(vocabulary, start=1):
        if first.setdefault(word, i) != i:
            raise CorpusError(f"{name}: words {first[word]} and {i} are both {word!r}; expected distinct words")
    return vocabulary


def count_chunk(texts: Sequence[str], definition: Tokens) -> Chunk:
    """Count the tokens of a few texts; the words are numbered in order of appearance."""
    analyze = _analyzer(definition)
    # numbers.__len__ as the factory would create a reference cycle and delay the release of memory.
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


def count_stream(texts: Iterable[str], definition: Tokens, jobs: int | None = None) -> Generator[Chunk]:
    """Count any number of texts, one chunk at a time.

    Args:
      texts: The documents.
      definition: The definition of a token.
      jobs: The number of processes; 1 starts no worker. By default one worker per core, started after 32 million
        characters, or one million with a tokenizer. Workers import neither JAX nor the caller's script. If workers
        cannot start or are killed, this process counts the remaining texts, unless the definition is not trusted.

    Yields:
      Counts of consecutive texts, in order. About two chunks per process are in memory.

    Raises:
      CorpusError: If ``jobs`` is not usable, the tokenizer fails, or a stored regular expression takes too long.
    """
    if jobs is not None and (not isinstance(jobs, Integral) or jobs < 1):
        raise _option_error("jobs", f"expected an integer number of processes, at least 1, or None; got {jobs!r}")
    serial, workers = (_SERIAL_CHUNKS, _num_cores()) if jobs is None else (0, int(jobs))
    if jobs is None and not definition.trusted:
        serial, workers = 0, min(workers, _PATTERN_WORKERS)
    elif jobs is None and definition.tokenizer is not None:
        serial = 1  # a tokenizer can be slow
    pool, finished = None, False
    waiting: deque[Callable[[], Chunk]] = deque()
    try:
        for number, chunk in enumerate(_chunks(texts)):
            if number == serial and (workers > 1 or not definition.trusted):
                pool = start_pool(workers)
            waiting.append(_submit(pool, chunk, definition))
            if pool is None or len(waiting) > 2 * workers:
                yield waiting.popleft()()
        while waiting:
            yield waiting.popleft()()
        finished = True
    finally:
        if pool is not None:
            pool.shutdown(wait=True, kill_workers=not finished)


def renumber(chunk: Chunk, numbers: dict[str, int]) -> Kept:
    """Replace the word numbers of a chunk by ids of a vocabulary, and drop words outside the vocabulary."""
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


def check_limits(
    min_df: float | str, max_df: float | str, max_features: int | str | None, min_npmi: float | str = "auto"
) -> None:
    """Raise a :class:`CorpusError` if a vocabulary limit is not usable."""

    def is_number(value: object) -> bool:
        return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1

    for name, value in (("min_df", min_df), ("max_df", max_df)):
        fraction = isinstance(value, Real) and not isinstance(value, Integral) and 0 <= float(value) <= 1
        if value != "auto" and not is_number(value) and not fraction:
            expected = "an integer number of documents (at least 1), a fraction from 0.0 to 1.0, or 'auto'"
            raise _option_error(name, f"expected {expected}; got {value!r}")
    if max_features not in (None, "auto") and not is_number(max_features):
        raise _option_error(
            "max_features", f"expected an integer number of words, None or 'auto'; got {max_features!r}"
        )
    if min_npmi != "auto" and not (isinstance(min_npmi, Real) and -1 <= float(min_npmi) <= 1):
        raise _option_error("min_npmi", f"expected a number from -1 to 1, or 'auto'; got {min_npmi!r}")


def set_limits(
    num_docs: int, min_df: float | str, max_df: float | str, max_features: int | str | None, **min_npmi: float | str
) -> dict[str, Any]:
    """Return the vocabulary limits with numbers instead of ``"auto"``; see the table of this module."""
    if min_df == "auto":
        min_df = min(max(num_docs // 100, 1), 5)
    if max_df == "auto":
        max_df = 0.5 if num_docs >= 20 else 1.0
    scores = {name: _MIN_NPMI if value == "auto" else value for name, value in min_npmi.items()}
    return {
        "min_df": min_df,
        "max_df": max_df,
        "max_features": 50_000 if max_features == "auto" else max_features,
    } | scores


def num_documents(limit: float, num_docs: int) -> float:
    """Return a limit that is a number of documents, or a fraction of them, as a number."""
    return limit if isinstance(limit, Integral) else limit * num_docs


def choose_words(
    frequency: npt.NDArray, total: npt.NDArray, num_docs: int, min_df: float, max_df: float, max_features: int | None
) -> npt.NDArray[np.bool_]:
    """Select the vocabulary as ``CountVectorizer`` does; if no word is left, the error names the option to relax.

    ``frequency`` and ``total`` are the document frequency and the number of tokens of each word in alphabetical order.
    """
    low, high = num_documents(min_df, num_docs), num_documents(max_df, num_docs)
    lower, higher = ("lower ", OptionName("min_df")), ("raise ", OptionName("max_df"))
    limits = (
        *(OptionName("min_df", min_df), f" requires a document frequency of at least {low:g}, "),
        *(OptionName("max_df", max_df), f" of at most {high:g}, in {plural(num_docs, 'document')}; "),
    )
    if high < low:
        change: Pieces = lower if high >= num_docs else (*lower, " or ", *higher)
        raise CorpusError("no word can be left: ", *limits, *change)
    if not frequency.any():
        problem = f"found no word in {plural(num_docs, 'document')}: try another "
        raise CorpusError(problem, OptionName("token_pattern"), ", or fewer ", OptionName("stop_words"))
    mask = (frequency >= low) & (frequency <= high)
    if not mask.any():
        if not (frequency >= low).any():
            change = (*lower, f": the most common word is in {frequency.max()}")
        elif not (frequency <= high).any():
            change = (*higher, f": the rarest word is in {frequency[frequency > 0].min()}")
        else:
            change = (*lower, " or ", *higher)
        raise CorpusError(f"no word is left of {np.count_nonzero(frequency):,}: ", *limits, *change)
    if max_features is not None and np.count_nonzero(mask) > max_features:
        # The same call on the same numbers as in CountVectorizer, so that ties are resolved in the same way.
        mask[np.delete(np.flatnonzero(mask), (-total[mask]).argsort()[:max_features])] = False
    return mask


def _option_error(name: str, problem: str) -> CorpusError:
    return CorpusError(OptionName(name), f": {problem}")


def _check_words(words: Iterable[str], name: str) -> list[str]:
    words = list(words)
    for i, word in enumerate(words):
        if not isinstance(word, str):
            raise _option_error(name, f"expected words, got {word!r} as word {i + 1}")
    return words


def _check_pattern(pattern: object) -> None:
    try:
        if not isinstance(pattern, str):
            raise TypeError("expected a string")
        groups = re.compile(pattern).groups
    except (re.error, TypeError, OverflowError, RecursionError) as error:
        raise _option_error("token_pattern", f"{pattern!r} is not a regular expression: {error}") from None
    if groups > 1:
        raise _option_error("token_pattern", f"expected at most one group in {pattern!r}, got {groups}")


def _check_lengths(ngram_range: Sequence[int]) -> tuple[int, int]:
    lengths = tuple(ngram_range)
    are_integers = len(lengths) == 2 and all(isinstance(n, Integral) for n in lengths)
    if not are_integers or not 1 <= lengths[0] <= lengths[1] <= _MAX_NGRAM:
        expected = f"expected (shortest, longest) up to {_MAX_NGRAM}, 1 ≤ shortest ≤ longest"
        raise _option_error("ngram_range", f"{expected}; got {lengths}")
    return int(lengths[0]), int(lengths[1])


def _stop_words(given: Any, name: str, lowercase: bool, encoding: str) -> tuple[str, ...]:
    """Return words that are given as an option: words, or the path of a file."""
    if isinstance(given, str | os.PathLike):
        if not os.path.exists(given) or os.path.isdir(given):
            expected = "expected english, or a file with one word per line"
            raise _option_error(name, f"{expected}; there is no file {os.fspath(given)!r}")
        given = read_words(given, encoding)
    words = _check_words(given, name)
    return tuple(sorted({word.lower() if lowercase else word for word in words}))


@lru_cache(maxsize=8)
def _analyzer(definition: Tokens) -> Callable[[str], list[str]]:
    try:
        from sklearn.feature_extraction.text import CountVectorizer
    except ImportError:
        raise ImportError('text is counted with scikit-learn: pip install "smoothgrad_jax[sklearn]"') from None
    tokenizer = None
    if definition.tokenizer is not None:
        tokenizer = tokenizers.words_of(definition.tokenizer, definition.lowercase)
    vectorizer = CountVectorizer(
        lowercase=definition.lowercase and tokenizer is None,
        token_pattern=definition.token_pattern,
        stop_words=list(definition.stop_words) if isinstance(definition.stop_words, tuple) else definition.stop_words,
        ngram_range=definition.ngram_range,
        tokenizer=tokenizer,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about stop words that are split; `tokens` warns in one line
        return vectorizer.build_analyzer()


def _chunks(texts: Iterable[str]) -> Iterator[list[str]]:
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


def _submit(pool: Any, texts: list[str], definition: Tokens) -> Callable[[], Chunk]:
    """Return a function that returns the counts of texts. This process counts them if the pool cannot."""
    future = None
    with contextlib.suppress(BrokenProcessPool, OSError), signals_blocked():
        future = pool and pool.submit(count_chunk, texts, definition)
    size = sum(map(len, texts))
    limit = None if definition.trusted else _PATTERN_SECONDS * (1 + size // _CHUNK)

    def result() -> Chunk:
        try:
            if future is not None:
                return future.result(limit)
        except (BrokenProcessPool, pickle.PicklingError):
            pass
        except TimeoutError:
            problem = f"the saved regular expression {definition.token_pattern!r} took more than {limit:,} s"
            remedy = "the model cannot be applied to this text"
            raise CorpusError(f"{problem} for {_CHUNK:,} characters; {remedy}") from None
        if definition.trusted:
            return count_chunk(texts, definition)
        raise CorpusError(
            "a saved regular expression is applied in another process, which could not be started or was killed"
        )

    return result
