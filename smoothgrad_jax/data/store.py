"""A corpus on disk: a folder of plain arrays that ``fit`` reads without loading it.

| file               | holds                                                                                           |
|--------------------|-------------------------------------------------------------------------------------------------|
| ``indptr.npy``     | [D + 1] int64; document d has the entries indptr[d] … indptr[d + 1] − 1                         |
| ``indices.npy``    | word ids of the entries, increasing in a document; uint16, or int32 for more than 65,536 words  |
| ``data.npy``       | counts of the entries, positive; the smallest unsigned integers that hold them, or float32      |
| ``vocabulary.txt`` | word i on line i + 1, UTF-8; no such file if the words have no names                            |
| ``manifest.json``  | format, version, sizes, SHA-256 of each file, source, options, and what was dropped             |

Document d of the folder is document d of the source: none is left out, also if it is empty. The memory that it takes to
write one is that of :mod:`smoothgrad_jax.data.counting`, and does not grow with the number of documents.

The folder is written under another name and renamed when it is whole. SHA-256 is no slower than a disk, as processors
have instructions for it, and ``sha256sum`` can check the files without us.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from smoothgrad_jax.data import counting, text
from smoothgrad_jax.data.corpus import Corpus
from smoothgrad_jax.data.counting import OnProgress
from smoothgrad_jax.data.unpacking import CorpusError

FORMAT, VERSION = "smoothgrad corpus", 1

_ARRAYS = ("indptr.npy", "indices.npy", "data.npy")
_PIECE = 1 << 20  # entries, or documents, of a folder that are read at a time


class Stored(NamedTuple):
    """A corpus with its words.

    Attributes:
      corpus: Counts; memory-mapped if they come from a folder.
      vocabulary: The V words, or None if the source gave none.
      manifest: What ``manifest.json`` says: ``num_docs``, ``num_words``, ``num_entries``, ``num_tokens``; ``source``
        (``format`` and ``paths``); ``tokens``, the options of :func:`smoothgrad_jax.data.text.tokens`, or None if it
        was not
        text; ``limits``, by which words were chosen, or None; ``dropped``: ``empty_documents`` (documents without any
        word now), ``documents_that_lost_all_words`` (those of them that had some), ``tokens_outside_vocabulary``,
        ``pruned_words`` and ``pruned_tokens``; and, of a folder, ``files``.
    """

    corpus: Corpus
    vocabulary: list[str] | None
    manifest: dict[str, Any]


def convert(
    source: Any,
    out: str | os.PathLike,
    *,
    overwrite: bool = False,
    min_df: float | str = "auto",
    max_df: float | str = "auto",
    max_features: int | str | None = "auto",
    vocabulary: Sequence[str] | str | os.PathLike | None = None,
    lowercase: bool = True,
    token_pattern: str = text.WORD,
    stop_words: str | os.PathLike | Iterable[str] | None = "english",
    ngram_range: Sequence[int] = (1, 1),
    jobs: int | None = None,
    progress: OnProgress | None = None,
) -> Stored:
    """Write a corpus to a folder, in bounded memory.

    Args:
      source: What :func:`smoothgrad_jax.data.readers.open_source` gives.
      out: The folder. It must not exist, unless ``overwrite`` and it is a corpus folder.
      overwrite: Replace a corpus folder, when the new one is whole.
      min_df: The fewest documents that a word must be in: a whole number, or a share of the documents. ``"auto"`` is
        5 documents for text, fewer for less than 500 documents; nothing for counts.
      max_df: The most documents that it may be in. ``"auto"`` is half of them for text (if there are 20), and all for
        counts.
      max_features: The most words, the most frequent ones; None for any number. ``"auto"`` is 50,000 for text, None for
        counts.
      vocabulary: Exactly these words in this order, a list or the path of a file with one on each line; no other
        option then chooses words. What is outside is counted in the manifest. Words of counts are found by their
        names. If the source is text and came with a vocabulary, that is it.
      lowercase: For text, like the next three: see :func:`smoothgrad_jax.data.text.tokens`.
      token_pattern: What a token is.
      stop_words: ``"english"``, None, words, or the path of a file.
      ngram_range: Sequences of tokens that are words.
      jobs: Processes that count text; see :func:`smoothgrad_jax.data.text.count_stream`.
      progress: Called with (documents so far, bytes read or None if that is not known), at most five times a second,
        and at the end.

    Returns:
      The folder, opened.

    Raises:
      CorpusError: The source is not usable, no word is left, ``out`` exists, or it cannot be written. Nothing is left
        behind then, nor by Ctrl-C, and a corpus that was to be overwritten is still there. A killed process leaves
        ``OUT.partial-…``, which can be deleted.
      ValueError: An option is not usable.
    """
    out = Path(out)
    tokens = text.Tokens(lowercase, token_pattern, stop_words, ngram_range)
    limits = {"min_df": min_df, "max_df": max_df, "max_features": max_features}
    source, what, vocabulary = _check_options(source, tokens, limits, vocabulary)
    _check_free(out, overwrite)
    with _complaints_about_writing(out), _beside(out) as partial:
        with counting.count(source, what, limits, vocabulary, jobs, progress, partial) as counted:
            files = _write(counted, partial)
        _replace(partial, out, _manifest(source, what, counted) | {"files": files}, overwrite)
    return open_folder(out)


def read(
    source: Any,
    *,
    min_df: float | str = "auto",
    max_df: float | str = "auto",
    max_features: int | str | None = "auto",
    vocabulary: Sequence[str] | str | os.PathLike | None = None,
    lowercase: bool = True,
    token_pattern: str = text.WORD,
    stop_words: str | os.PathLike | Iterable[str] | None = "english",
    ngram_range: Sequence[int] = (1, 1),
    jobs: int | None = None,
    progress: OnProgress | None = None,
) -> Stored:
    """Read a corpus into memory: what :func:`convert` makes of it, without a folder.

    Args:
      source: As in :func:`convert`, like all the options.
      min_df: The fewest documents of a word.
      max_df: The most.
      max_features: The most words.
      vocabulary: Exactly these words.
      lowercase: Whether upper and lower case are one.
      token_pattern: What a token is.
      stop_words: Tokens that are no words.
      ngram_range: Sequences of tokens that are words.
      jobs: Processes.
      progress: Called with (documents so far, bytes read or None).

    Returns:
      :class:`Stored`, its arrays in memory and of the types that a folder has.

    Raises:
      CorpusError: The source is not usable, or no word is left.
      ValueError: An option is not usable.
    """
    tokens = text.Tokens(lowercase, token_pattern, stop_words, ngram_range)
    limits = {"min_df": min_df, "max_df": max_df, "max_features": max_features}
    source, what, vocabulary = _check_options(source, tokens, limits, vocabulary)
    with counting.count(source, what, limits, vocabulary, jobs, progress) as counted:
        lengths = (counted.num_docs + 1, counted.num_entries, counted.num_entries)
        arrays = [np.zeros(length, kind) for length, kind in zip(lengths, counted.types, strict=True)]
        ends = [1, 0, 0]
        for block in counted.blocks():
            for i, piece in enumerate(block):
                arrays[i][ends[i] : ends[i] + len(piece)] = piece
                ends[i] += len(piece)
        corpus = Corpus(*arrays, counted.num_words)
        return Stored(corpus, counted.vocabulary, _manifest(source, what, counted))


def open_folder(path: str | os.PathLike, *, verify: bool = False) -> Stored:
    """Open a corpus folder. Its arrays are memory-mapped, nothing but the vocabulary is loaded.

    Args:
      path: The folder.
      verify: Read everything once, and check it against the checksums. Otherwise only what costs nothing is checked:
        sizes, types and shapes.

    Returns:
      :class:`Stored`.

    Raises:
      CorpusError: It is no corpus folder, or is damaged, or of a version that this program does not know.
    """
    path = Path(path)
    manifest = _read_manifest(path)
    try:
        num_docs, num_words, num_entries = (int(manifest[name]) for name in ("num_docs", "num_words", "num_entries"))
        files = {name: (int(file["bytes"]), str(file["sha256"])) for name, file in manifest["files"].items()}
        if not set(_ARRAYS) <= set(files) <= {*_ARRAYS, "vocabulary.txt"}:
            raise KeyError(f"files {sorted(files)}")
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CorpusError(f"{path / 'manifest.json'}: damaged: {type(error).__name__} {error}") from None
    for name, (size, checksum) in files.items():
        _check_file(path / name, size, checksum if verify else None)
    kinds = {
        "indptr.npy": (num_docs + 1, ("<i8",)),
        "indices.npy": (num_entries, ("<u2", "<i4")),
        "data.npy": (num_entries, ("|u1", "<u2", "<u4", "<f4")),
    }
    arrays = [_map(path / name, *kinds[name]) for name in _ARRAYS]
    indptr, indices, data = arrays
    if indptr[0] != 0 or indptr[-1] != num_entries:
        expected = f"expected offsets from 0 to {num_entries}, got {indptr[0]} to {indptr[-1]}"
        raise CorpusError(f"{path / 'indptr.npy'}: damaged: {expected}")
    if verify and ((np.diff(indptr) < 0).any() or any(not 0 <= i < num_words for i in _ends(indices))):
        raise CorpusError(f"{path}: damaged: an offset or a word id is out of range")
    vocabulary = None
    if "vocabulary.txt" in files:
        vocabulary = (path / "vocabulary.txt").read_bytes().decode("utf-8", "replace").split("\n")[:-1]
        if len(vocabulary) != num_words:
            got = f"expected {num_words} words, got {len(vocabulary)}"
            raise CorpusError(f"{path / 'vocabulary.txt'}: damaged: {got}")
    return Stored(Corpus(indptr, indices, data, num_words), vocabulary, manifest)


def is_folder(path: str | os.PathLike) -> bool:
    """Whether a path is a corpus folder, perhaps a damaged one."""
    try:
        _read_manifest(Path(path))
    except CorpusError:
        return False
    return True


def _ends(array):
    return (int(array.min()), int(array.max())) if array.size else ()


class _Folder(NamedTuple):
    """A corpus folder as a source of counts."""

    stored: Stored
    paths: tuple[Path, ...]
    vocabulary: list[str] | None
    num_words: int
    format: str = "folder"
    is_text: bool = False

    def blocks(self):
        indptr, indices, data, _ = self.stored.corpus
        first = 0
        while first < len(indptr) - 1:
            last = int(np.searchsorted(indptr, indptr[first] + _PIECE, side="right")) - 1
            last = min(max(last, first + 1), first + _PIECE)
            part = slice(int(indptr[first]), int(indptr[last]))
            yield np.array(indptr[first : last + 1]) - indptr[first], indices[part].astype(np.int32), data[part]
            first = last


def _check_options(source, tokens, limits, vocabulary):
    """A source that can be counted; what a token is, if it is text; the vocabulary, if one is given."""
    text.check_limits(**limits)
    if source.format == "folder":
        stored = open_folder(source.paths[0])
        source = _Folder(stored, source.paths, stored.vocabulary, stored.corpus.num_words)
    if vocabulary is None and source.is_text:
        vocabulary = source.vocabulary
    if vocabulary is not None:
        if any(value != "auto" for value in limits.values()):
            raise ValueError("vocabulary: exactly these words are kept; leave out min_df, max_df and max_features")
        vocabulary = text.check_vocabulary(vocabulary)
    return source, text.tokens(*tokens) if source.is_text else None, vocabulary


def _manifest(source, what, counted):
    names = ("num_docs", "num_words", "num_entries", "num_tokens")
    return {
        "format": FORMAT,
        "version": VERSION,
        **{name: getattr(counted, name) for name in names},
        "source": {"format": source.format, "paths": [str(Path(path).absolute()) for path in source.paths]},
        "tokens": None if what is None else what._asdict(),
        "limits": counted.limits,
        "dropped": counted.dropped,
    }


class _File:
    """A file that is written once, from front to back, and summed as it is written."""

    def __init__(self, path):
        self.path, self.file, self.sum = path, path.open("xb"), hashlib.sha256()

    def write(self, data):
        self.file.write(data)
        self.sum.update(data)

    def close(self):
        self.file.close()

    def end(self):
        """Make sure that it is on the disk; what the manifest says of it."""
        self.file.flush()
        os.fsync(self.file.fileno())
        return {"bytes": self.file.tell(), "sha256": self.sum.hexdigest()}


def _write(counted, folder):
    """Write all but the manifest, and return what that says of the files."""
    with contextlib.ExitStack() as stack:

        def new(name):
            return stack.enter_context(contextlib.closing(_File(folder / name)))

        files = {name: new(name) for name in _ARRAYS}
        lengths = (counted.num_docs + 1, counted.num_entries, counted.num_entries)
        for file, length, kind in zip(files.values(), lengths, counted.types, strict=True):
            described = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": (length,)}
            np.lib.format.write_array_header_1_0(file, described)
        files["indptr.npy"].write(np.zeros(1, "<i8").data)
        for block in counted.blocks():
            for file, piece in zip(files.values(), block, strict=True):
                file.write(np.ascontiguousarray(piece).data)
        if counted.vocabulary is not None:
            files["vocabulary.txt"] = new("vocabulary.txt")
            for word in counted.vocabulary:
                files["vocabulary.txt"].write(counting.line(word))
        return {name: file.end() for name, file in files.items()}


def _check_free(out, overwrite):
    if os.path.lexists(out) and not overwrite:
        raise CorpusError(f"{out}: exists already; give another name, or overwrite=True if it is an old corpus")
    if os.path.lexists(out) and not is_folder(out):
        raise CorpusError(f"{out}: exists and is not a corpus folder, so that it is not overwritten")


@contextlib.contextmanager
def _beside(out):
    """A new folder beside ``out``, gone at the end unless it has been renamed."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f"{out.name}.partial-{os.getpid()}-{time.time_ns():x}")
    partial.mkdir()
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _complaints_about_writing(out):
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            why = "there is no room left on the disk; what was written has been removed"
        else:
            why = f"cannot be written: {error}"
        raise CorpusError(f"{out}: {why}") from error


def _replace(partial, out, manifest, overwrite):
    """The manifest comes last, and then the name."""
    with (partial / "manifest.json").open("x", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1, ensure_ascii=False)
        file.flush()
        os.fsync(file.fileno())
    _sync(partial)
    if not (overwrite and os.path.lexists(out)):
        partial.rename(out)
    else:
        old = partial.with_name(partial.name.replace(".partial-", ".old-"))
        try:
            out.rename(old)
            partial.rename(out)
        except BaseException:
            if not os.path.lexists(out):
                old.rename(out)
            raise
        if old.is_symlink():
            old.unlink()
        else:
            shutil.rmtree(old, ignore_errors=True)
    _sync(out.parent)


def _sync(folder):
    """Make the names in a folder last, where folders can be opened."""
    with contextlib.suppress(PermissionError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def _read_manifest(path):
    file = path / "manifest.json"
    try:
        manifest = json.loads(file.read_bytes())
    except OSError as error:
        raise CorpusError(f"{path}: expected a corpus folder; its manifest.json: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise CorpusError(f"{file}: expected JSON, got something else") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CorpusError(f"{file}: expected the manifest of a {FORMAT}, got something else")
    if manifest.get("version") != VERSION:
        raise CorpusError(f"{file}: expected version {VERSION} of the format, got {manifest.get('version')!r}")
    return manifest


def _check_file(path, size, checksum):
    try:
        if path.stat().st_size != size:
            raise CorpusError(f"{path}: damaged: expected {size} bytes, got {path.stat().st_size}")
        if checksum is not None:
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != checksum:
                    raise CorpusError(f"{path}: damaged: its checksum is not that of the manifest")
    except OSError as error:
        raise CorpusError(f"{path}: expected a file of the corpus: {error.strerror}") from None


def _map(path, length, dtypes):
    try:
        with warnings.catch_warnings(action="error"):
            array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # a damaged header is read by Python's tokeniser and parser, which have many kinds of it
        raise CorpusError(f"{path}: damaged: expected an array, got {error}") from None
    if not isinstance(array, np.memmap) or array.shape != (length,) or array.dtype.str not in dtypes:
        got = f"{array.dtype.str} of shape {array.shape}" if isinstance(array, np.ndarray) else "several"
        raise CorpusError(f"{path}: damaged: expected {' or '.join(dtypes)} of shape ({length},), got {got}")
    return array
