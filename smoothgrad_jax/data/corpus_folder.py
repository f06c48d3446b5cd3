"""A corpus on disk: a folder of plain arrays that ``fit`` reads without loading them.

| file               | content                                                                                         |
|--------------------|-------------------------------------------------------------------------------------------------|
| ``indptr.npy``     | [D + 1] int64; document d has the entries indptr[d] … indptr[d + 1] − 1                         |
| ``indices.npy``    | word ids of the entries, increasing per document; uint16, or int32 for more than 65,536 words   |
| ``data.npy``       | counts of the entries, positive; the smallest unsigned integers that hold them, or float32      |
| ``vocabulary.txt`` | word i on line i + 1, UTF-8; absent if the words have no names                                  |
| ``metadata.jsonl`` | document d on line d + 1: a list of its id, or null, and its kept fields; absent if there are   |
|                    | neither ids nor kept fields                                                                     |
| ``manifest.json``  | format, version, sizes, CRC-32 of each file, source, options, and what was dropped              |

Document d of the folder is document d of the source: empty documents are kept. Metadata are written and read as a
stream. Writing needs the memory of
:mod:`smoothgrad_jax.data.counting`, which does not grow with the number of documents. The folder is renamed
to its final name when it is complete.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import numpy as np
import numpy.typing as npt

from smoothgrad_jax.data import batches, count_blocks, counting, documents, durable_files, schema, text
from smoothgrad_jax.data.corpus import Corpus
from smoothgrad_jax.data.counting import Counted, OnProgress
from smoothgrad_jax.data.documents import Metadata
from smoothgrad_jax.data.durable_files import Entry, LoadError
from smoothgrad_jax.data.errors import CorpusError, OptionName, corpus_error
from smoothgrad_jax.data.sources import Source

FORMAT, VERSION = "smoothgrad corpus", 2
METADATA = "metadata.jsonl"  # an optional file

_TYPES = {"indptr.npy": ("<i8",), "indices.npy": ("<u2", "<i4"), "data.npy": ("|u1", "<u2", "<u4", "<f4")}
_WORDS = "vocabulary.txt"
_SEQUENCES = OptionName("ngram_range", (1, 2))
_CHUNK = 1 << 20  # offsets that are compared at a time
_MANIFEST = schema.record(
    {
        "num_docs": schema.integer(1),
        "num_words": schema.integer(1, count_blocks.MAX_WORDS),
        "num_entries": schema.integer(),
        "num_tokens": schema.number(0),
        "source": schema.record({"format": schema.string, "paths": schema.list_of(schema.string)}),
        "tokens": schema.optional(text.STORED_TOKENS),
        "dropped": schema.record(
            dict.fromkeys(
                ("tokens_outside_vocabulary", "documents_that_lost_all_words", "empty_documents"), schema.number(0)
            )
        ),
        "files": schema.mapping(durable_files.ENTRY),
    },
    {"metadata": schema.record({"id": schema.optional(schema.string), "keep": schema.list_of(schema.string)})},
)


class CountedCorpus(NamedTuple):
    """A corpus with its words.

    Attributes:
      corpus: Counts; memory-mapped if they come from a folder.
      vocabulary: The V words, or None if the source has none.
      manifest: The content of ``manifest.json``: ``num_docs``, ``num_words``, ``num_entries``, ``num_tokens``;
        ``source`` (``format`` and ``paths``); ``tokens``, the options of :func:`smoothgrad_jax.data.text.tokens`, or
        None if the source is not text; ``limits``, by which words were chosen, or None; ``dropped``, as in
        :class:`smoothgrad_jax.data.counting.Counted`; and if the corpus comes from a folder, ``files`` and, if there
        are some, ``metadata``: the names of the fields with the id and with the kept values.
    """

    corpus: Corpus
    vocabulary: list[str] | None
    manifest: dict[str, Any]


class WordOptions(text.TokenOptions, total=False):
    """Options that select the vocabulary of a corpus, in addition to those that define a token.

    Attributes:
      min_df: The minimal document frequency of a word: a number of documents, or a fraction of them. ``"auto"``, the
        default, is 5 documents for text, fewer for less than 500 documents; for counts every word is kept.
      max_df: The maximal document frequency. ``"auto"`` is half of the documents for text, all of them for less than 20
        documents and for counts.
      max_features: The maximal number of words, of which the most frequent are kept; None for any number. ``"auto"`` is
        50,000 for text and None for counts.
      min_npmi: The minimal score of a sequence of words, if ``ngram_range`` allows sequences; ``"auto"`` is 0.4, −1
        keeps all. See :func:`smoothgrad_jax.data.collocations.collocations`.
      vocabulary: Exactly these words in this order, or the path of a file with one word per line; excludes the four
        options above. Words of counts are matched by name. By default the vocabulary of a source of text, if it has
        one.
      tokens: A definition of a token instead of the options that define one, such as that of a saved model
        (:func:`smoothgrad_jax.data.text.stored_tokens`).
    """

    min_df: float | str
    max_df: float | str
    max_features: int | str | None
    min_npmi: float | str
    vocabulary: Sequence[str] | str | os.PathLike | None
    tokens: text.Tokens | None


def convert(
    source: Source,
    out: str | os.PathLike,
    *,
    overwrite: bool = False,
    jobs: int | None = None,
    progress: OnProgress | None = None,
    **options: Unpack[WordOptions],
) -> CountedCorpus:
    """Write a corpus to a folder, in bounded memory.

    Args:
      source: A source of :func:`smoothgrad_jax.open_source`.
      out: The folder. It must not exist, unless ``overwrite`` is set and it is a corpus folder.
      overwrite: Replace a corpus folder, once the new one is complete.
      jobs: Processes that count text; see :func:`smoothgrad_jax.data.text.count_stream`.
      progress: Called with the number of documents so far, at most five times per second, and at the end.
      **options: See :class:`WordOptions`, and for text :func:`smoothgrad_jax.data.text.tokens`.

    Returns:
      The corpus of the folder.

    Raises:
      CorpusError: If the source or an option is not usable, no word is left, or ``out`` exists.
      SaveError: If ``out`` cannot be written. An existing corpus is unchanged after any error. A killed process leaves
        ``OUT.partial-…``, which can be deleted.
    """
    out = Path(out)
    tokens, limits, words = _check_options(source, jobs, **options)
    check_output(out, overwrite)
    with durable_files.saving(out, lambda: "what was written has been removed"):
        durable_files.make_folder(out.parent)
        with durable_files.replacing(out, overwrite=overwrite) as temporary, contextlib.ExitStack() as stack:
            temporary.mkdir()
            lines = stack.enter_context(durable_files.new_file(temporary / METADATA)) if source.has_metadata else None
            record = None if lines is None else lambda metadata: lines.write(documents.metadata_line(metadata))
            counted = stack.enter_context(
                counting.count(source, tokens, limits, words, jobs, progress, temporary, record)
            )
            files, manifest = _write_files(counted, temporary), _manifest(source, tokens, counted)
            if lines is not None:
                files[METADATA] = lines.finish()
                manifest["metadata"] = {"id": source.id, "keep": list(source.keep)}
            manifest = {"format": FORMAT, "version": VERSION, **manifest, "files": files}
            durable_files.write_json(temporary / "manifest.json", manifest)
    return open_folder(out)


def check_output(out: str | os.PathLike, overwrite: bool) -> None:
    """Raise an error if :func:`convert` would not replace what ``out`` contains."""
    if os.path.lexists(out) and not overwrite:
        remedy = "choose another name, or pass ", OptionName("overwrite", True), " to replace a corpus"
        raise corpus_error(out, ("exists already; ", *remedy))
    if os.path.lexists(out) and not is_folder(out):
        raise corpus_error(out, "exists and is not a corpus folder; it is not overwritten")


def read(
    source: Source, *, jobs: int | None = None, progress: OnProgress | None = None, **options: Unpack[WordOptions]
) -> CountedCorpus:
    """Read a corpus into memory, with the content and the types that :func:`convert` would write to a folder.

    The arguments and the errors are those of :func:`convert`.
    """
    tokens, limits, words = _check_options(source, jobs, **options)
    with counting.count(source, tokens, limits, words, jobs, progress) as counted:
        lengths = (counted.num_docs + 1, counted.num_entries, counted.num_entries)
        arrays = [np.zeros(length, dtype) for length, dtype in zip(lengths, counted.types, strict=True)]
        ends = [1, 0, 0]
        for block in counted.blocks():
            for i, piece in enumerate(block):
                arrays[i][ends[i] : ends[i] + len(piece)] = piece
                ends[i] += len(piece)
        indptr, indices, data = arrays
        corpus = Corpus(indptr, indices, data, counted.num_words)
        return CountedCorpus(corpus, counted.vocabulary, _manifest(source, tokens, counted))


def open_folder(path: str | os.PathLike, *, verify: bool = False) -> CountedCorpus:
    """Open a corpus folder. Its arrays are memory-mapped; only the vocabulary is read into memory.

    Args:
      path: The folder.
      verify: Read all files and compare the checksums. Otherwise only sizes, types, shapes and offsets are checked;
        word ids and counts are checked where they are used.

    Raises:
      CorpusError: If it is not a corpus folder, is damaged, or of another version of the format.
    """
    path = Path(path)
    file = path / "manifest.json"
    try:
        manifest = durable_files.read_json(file, FORMAT, VERSION, _MANIFEST, if_older="convert the source again")
        with durable_files.loading(file):
            return _open(path, manifest, verify)
    except LoadError as error:
        raise CorpusError(str(error)) from None


def read_metadata(path: str | os.PathLike, manifest: dict[str, Any]) -> Iterator[Metadata]:
    """Yield the ids and kept fields of all documents of a corpus folder, which must contain some."""
    file, number = Path(path) / METADATA, 0
    try:
        with durable_files.loading(file), durable_files.open_regular(file) as lines:
            for metadata in documents.read_metadata(lines, len(manifest["metadata"]["keep"])):
                number += 1
                yield metadata
            if number != manifest["num_docs"]:
                raise LoadError(f"{file}: damaged: expected {manifest['num_docs']:,} documents, got {number:,}")
    except LoadError as error:
        raise CorpusError(str(error)) from None


def described_files(path: str | os.PathLike) -> dict[str, Entry]:
    """Return the entries of the files of a corpus folder, or raise a :class:`LoadError`."""
    return durable_files.read_json(Path(path) / "manifest.json", FORMAT, VERSION, _MANIFEST)["files"]


def is_folder(path: str | os.PathLike) -> bool:
    """Return whether a path is a corpus folder of any version; its files are not checked."""
    try:
        manifest = json.loads(durable_files.read_bytes(Path(path) / "manifest.json"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(manifest, dict) and manifest.get("format") == FORMAT


def _open(path: Path, manifest: dict[str, Any], verify: bool) -> CountedCorpus:
    num_docs, num_words, num_entries = (manifest[name] for name in ("num_docs", "num_words", "num_entries"))
    files: dict[str, Entry] = manifest["files"]
    lengths = {"indptr.npy": num_docs + 1, "indices.npy": num_entries, "data.npy": num_entries}
    indptr, indices, data = (
        _open_array(path / name, files.get(name), length, verify) for name, length in lengths.items()
    )
    if indptr[0] != 0 or indptr[-1] != num_entries:
        expected = f"expected offsets from 0 to {num_entries}, got {indptr[0]} to {indptr[-1]}"
        raise LoadError(f"{path / 'indptr.npy'}: damaged: {expected}")
    _check_offsets(path / "indptr.npy", indptr)
    if indices.dtype != (np.uint16 if num_words <= 1 << 16 else np.int32):
        raise LoadError(f"{path / 'indices.npy'}: damaged: {indices.dtype} are not the ids of {num_words} words")
    corpus = Corpus(indptr, indices, data, num_words)
    for _, entries in count_blocks.block_ranges(indptr) if verify else ():
        batches.check_entries(corpus, entries)
    vocabulary = None
    if _WORDS in files:
        durable_files.verify(path / _WORDS, files[_WORDS], checksum=verify)
        vocabulary = durable_files.read_bytes(path / _WORDS).decode("utf-8", "replace").split("\n")[:-1]
        if len(vocabulary) != num_words:
            raise LoadError(f"{path / _WORDS}: damaged: expected {num_words} words, got {len(vocabulary)}")
    if "metadata" in manifest:
        durable_files.verify(path / METADATA, files.get(METADATA), checksum=verify)
    return CountedCorpus(corpus, vocabulary, manifest)


def _check_offsets(path: Path, indptr: npt.NDArray) -> None:
    """Raise an error unless the offsets increase: others would let compiled code read and write anywhere."""
    for first in range(0, len(indptr) - 1, _CHUNK):
        falls = np.diff(indptr[first : first + _CHUNK + 1]) < 0
        if falls.any():
            document = first + int(np.argmax(falls))
            offsets = f"{indptr[document]} to {indptr[document + 1]}"
            raise LoadError(f"{path}: damaged: the entries of document {document} are {offsets}")


def _open_array(path: Path, entry: Entry | None, length: int, verify: bool) -> npt.NDArray:
    array = durable_files.read_array(path, entry, checksum=verify)
    dtypes = _TYPES[path.name]
    if array.shape != (length,) or array.dtype.str not in dtypes:
        got = f"{array.dtype.str} of shape {array.shape}"
        raise LoadError(f"{path}: damaged: expected {' or '.join(dtypes)} of shape ({length},), got {got}")
    return array


def _check_options(
    source: Source,
    jobs: int | None,
    *,
    min_df: float | str = "auto",
    max_df: float | str = "auto",
    max_features: int | str | None = "auto",
    min_npmi: float | str = "auto",
    vocabulary: Sequence[str] | str | os.PathLike | None = None,
    tokens: text.Tokens | None = None,
    **token_options: Unpack[text.TokenOptions],
) -> tuple[text.Tokens | None, dict[str, Any], list[str] | None]:
    """Return the definition of a token in text, the limits by which words are chosen, and the vocabulary if given."""
    if tokens is not None and token_options:
        raise CorpusError(OptionName(next(iter(token_options))), " has no effect beside a definition of a token")
    text.check_limits(min_df, max_df, max_features, min_npmi)
    if source.is_text:
        tokens = tokens or text.tokens(**token_options, encoding=source.encoding)
    else:
        npmi = None if min_npmi == "auto" else min_npmi
        for name, value in {**token_options, "jobs": jobs, "tokens": tokens, "min_npmi": npmi}.items():
            if name in token_options or value is not None:
                raise corpus_error(source.paths[0], (OptionName(name, value), f" has no meaning for {source.format}"))
    limits = {"min_df": min_df, "max_df": max_df, "max_features": max_features}
    if tokens is not None and tokens.ngram_range[1] > 1:
        limits["min_npmi"] = min_npmi
    elif min_npmi != "auto":
        raise CorpusError(OptionName("min_npmi"), " has no effect without sequences of words; pass ", _SEQUENCES)
    if vocabulary is None and source.is_text:
        vocabulary = source.vocabulary
    if vocabulary is not None and any(value != "auto" for value in limits.values()):
        problem = OptionName("vocabulary"), ": exactly these words are kept; omit "
        raise CorpusError(*problem, *[OptionName(name) for name, value in limits.items() if value != "auto"][:1])
    return tokens, limits, None if vocabulary is None else text.check_vocabulary(vocabulary, source.encoding)


def _manifest(source: Source, tokens: text.Tokens | None, counted: Counted) -> dict[str, Any]:
    names = ("num_docs", "num_words", "num_entries", "num_tokens")
    return {
        **{name: getattr(counted, name) for name in names},
        "source": {"format": source.format, "paths": [str(Path(path).absolute()) for path in source.paths]},
        "tokens": None if tokens is None else tokens.as_json(),
        "limits": counted.limits,
        "dropped": counted.dropped,
    }


def _write_files(counted: Counted, folder: Path) -> dict[str, Entry]:
    """Write all files except the manifest, and return their entries."""
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context(durable_files.new_file(folder / name)) for name in _TYPES}
        lengths = (counted.num_docs + 1, counted.num_entries, counted.num_entries)
        for file, length, dtype in zip(files.values(), lengths, counted.types, strict=True):
            file.write(durable_files.array_header(dtype, (length,)))
        files["indptr.npy"].write(np.zeros(1, "<i8"))
        for block in counted.blocks():
            for file, piece in zip(files.values(), block, strict=True):
                file.write(piece)
        if counted.vocabulary is not None:
            files[_WORDS] = stack.enter_context(durable_files.new_file(folder / _WORDS))
            for word in counted.vocabulary:
                files[_WORDS].write(text.word_line(word))
        return {name: file.finish() for name, file in files.items()}
