"""Input shared by several commands: open the files on the command line as a corpus."""

import hashlib
import inspect
import itertools
import json
import os
import re
import sys
from argparse import Namespace
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from smoothgrad_jax.app.commands import tables
from smoothgrad_jax.app.commands.output import CommandError, log, log_dropped, log_empty, reading_progress
from smoothgrad_jax.app.saved_models import SavedModel
from smoothgrad_jax.core.errors import OptionError
from smoothgrad_jax.data import corpus_folder, sources, text
from smoothgrad_jax.data.corpus import Corpus
from smoothgrad_jax.data.corpus_folder import CountedCorpus
from smoothgrad_jax.data.documents import Document, Metadata, Value
from smoothgrad_jax.data.errors import plural
from smoothgrad_jax.data.sources import Source
from smoothgrad_jax.training.checkpoints import Checkpoint, fingerprint

# Options of `open_source` with their defaults; the command calls its `vocabulary` --words-file.
_PARAMETERS = inspect.signature(sources.open_source).parameters.values()
_READING = {each.name: each.default for each in _PARAMETERS if each.name not in ("paths", "vocabulary")}
_LIMITS = ("vocabulary", "min_df", "max_df", "max_features", "min_npmi")
_TOKEN_OPTIONS = ("stop_words", "stop_words_only", "ngram_range", "token_pattern", "tokenizer")


def open_source(args: Namespace) -> Source:
    """Recognise the files on the command line as one corpus; report what was found beside them or inside them."""
    options, words = {name: getattr(args, name, default) for name, default in _READING.items()}, args.words_file
    source = sources.open_source(args.inputs, vocabulary=False if words == "none" else words, **options)
    if source.is_text and words:
        raise OptionError("words_file", f"has no meaning for {source.format}: it names the words of counts")
    if source.field and not args.field:
        log(f"reading the text from the field {source.field!r}; --field selects another")
    if source.field and source.id and getattr(args, "id", source.id) is None:
        log(f"reading the ids from the field {source.id!r}; --id selects another")
    if source.words_file and not words:
        log(f"reading the words from {source.words_file}; --words-file selects another file, or none")
    return source


def refuse_reading_options(args: Namespace) -> None:
    """Raise an error if an option of :func:`open_source` is given."""
    for name, default in (_READING | {"words_file": None, "tokenizer": None}).items():
        if getattr(args, name, default) != default:
            raise OptionError(name, "has no effect without documents to read")


def word_options(args: Namespace) -> dict[str, Any]:
    """Return the vocabulary options given on the command line."""
    names = (*_LIMITS, *_TOKEN_OPTIONS)
    options = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if options.get("stop_words") == "none":
        options["stop_words"] = None
    if "tokenizer" in options:
        _find_modules_here()
    return options


def _find_modules_here() -> None:
    """Let a tokenizer be a module in the current folder, as for ``python -m``; installed modules come first."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def open_corpus(args: Namespace, checkpoint: Checkpoint | None = None) -> CountedCorpus:
    """Return the corpus to train on: memory-mapped if it is a corpus folder, otherwise read into memory.

    The vocabulary options are those of the checkpoint, if there is one and the command line has none.
    """
    source, options = open_source(args), word_options(args)
    if isinstance(source.loaded, CountedCorpus):
        for name in options:
            raise OptionError(name, f"has no effect: the words of {source.paths[0]} were chosen by convert")
        log_empty(source.loaded)
        return source.loaded
    if checkpoint and not options.keys() - {"tokenizer"}:
        options = _earlier_options(checkpoint, options.get("tokenizer"))
    with reading_progress(args.json) as show:
        stored = corpus_folder.read(source, progress=show, **options)
    log_dropped(stored)
    return stored


def _earlier_options(checkpoint: Checkpoint, tokenizer: str | None) -> dict[str, Any]:
    """Return the vocabulary options of a checkpoint, with the definition of a word that it stores."""
    options, tokens = checkpoint.settings.get("word_options", {}), checkpoint.settings.get("tokens")
    limits = {name: value for name, value in options.items() if name in _LIMITS}
    return limits if tokens is None else limits | {"tokens": text.stored_tokens(tokens, tokenizer)}


def provenance(stored: CountedCorpus) -> dict[str, Any]:
    """Return a fingerprint of the corpus and its tokenizer options."""
    manifest = stored.manifest
    if "files" in manifest:  # a corpus folder, whose checksums are known; training does not read the metadata
        files = {name: entry for name, entry in manifest["files"].items() if name != corpus_folder.METADATA}
        identifier = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:16]
    else:
        identifier = fingerprint(stored.corpus)
    return {"corpus": identifier, "tokens": manifest["tokens"]}


class ModelInputs(NamedTuple):
    """Documents to which a model is applied."""

    source: Source
    corpus: Corpus  # with at most as many words as λ has rows
    words: list[str]  # of the corpus

    def documents(self) -> Iterator[Document]:
        """Yield the documents; the text of a document of counts is its distinct words."""
        if self.source.is_text:
            return self.source.documents()
        indptr, indices, *_ = self.corpus
        spans = itertools.pairwise(map(int, indptr))
        texts = (" ".join(self.words[w] for w in indices[first:last].tolist()) for first, last in spans)
        return map(Document, texts, self.metadata())

    def metadata(self) -> Iterator[Metadata]:
        """Yield the id and the kept fields of each document."""
        return (
            self.source.metadata() if self.source.has_metadata else itertools.repeat(Metadata(), self.corpus.num_docs)
        )

    def parts(self) -> Iterator[tuple[Corpus, dict[str, Sequence[Value] | npt.NDArray]]]:
        """Yield parts of the corpus and the columns that identify their documents in a table.

        The columns are: ``document``, the row number; ``id``, if the source has ids; the kept fields; and ``words``,
        the number of words that are in the vocabulary, 0 for an empty document.
        """
        metadata, first = self.metadata(), 0
        for part in self.corpus.parts():
            rows = list(itertools.islice(metadata, part.num_docs))
            if len(rows) < part.num_docs:  # the files are read once for the counts and once for the metadata
                raise CommandError(f"{self.source.paths[0]}: has fewer documents than before; was it changed?")
            ids, fields = zip(*rows, strict=True)
            columns: dict[str, Sequence[Value] | npt.NDArray] = {"document": np.arange(first, first + part.num_docs)}
            if self.source.id is not None:
                columns["id"] = ids
            columns |= zip(self.source.keep, zip(*fields, strict=True), strict=True)
            words = part.lengths()
            yield part, columns | {"words": words if part.data.dtype.kind == "f" else words.astype(np.int64)}
            first += part.num_docs

    def column_types(self) -> dict[str, type]:
        """Return the types of the kept fields; reads the metadata of all documents."""
        return tables.column_types(self.source.keep, self.metadata())


def definition_of(model: SavedModel, tokenizer: str | None) -> text.Tokens:
    """Return the definition of a word of a model; a tokenizer is imported only if it is given on the command line."""
    stored = model.settings.get("tokens")
    if stored is None:
        log("the model does not store how text is split into words; splitting as fit does by default")
        stored = {}
    if tokenizer is not None:
        _find_modules_here()
    return text.stored_tokens(stored, tokenizer)


def title_of(number: int, metadata: Metadata) -> str:
    """Return the heading of a document: its id, or its row number, and its kept fields."""
    values = (str(value) for value in metadata.fields if value not in (None, ""))
    return " · ".join([metadata.id or f"document {number}", *values])


def open_for_model(args: Namespace, model: SavedModel, columns: Collection[str] = ()) -> ModelInputs:
    """Open the documents on the command line for a model; report words outside its vocabulary.

    No kept field can have the name of one of the columns, which the output has beside those of the documents.
    """
    source, vocabulary = open_source(args), model.vocabulary
    for name in source.keep if columns else ():
        if name in (*columns, "document", "id", "words") or re.fullmatch(r"topics|topic \d+", name):
            raise OptionError("keep", f"{name}: the output has a column of this name; keep other fields")
    if source.is_text:
        if vocabulary is None:
            raise CommandError("the model has no vocabulary: it can be applied to counts, not to text")
        counted = corpus_folder.read(source, vocabulary=vocabulary, tokens=definition_of(model, args.tokenizer))
        log_dropped(counted)
    elif args.tokenizer is not None and getattr(args, "text", None) is None:
        raise OptionError("tokenizer", f"has no meaning for {source.format}")
    elif vocabulary is not None and source.vocabulary not in (None, vocabulary):
        counted = corpus_folder.read(source, vocabulary=vocabulary)
        log_dropped(counted)
    else:
        counted = source.loaded if isinstance(source.loaded, CountedCorpus) else corpus_folder.read(source)
        log_empty(counted)
    if counted.corpus.num_words > len(model.lam):
        given, known = plural(counted.corpus.num_words, "distinct word"), len(model.lam)
        raise CommandError(f"{source.paths[0]}: has {given} without names, more than the {known:,} of the model")
    return ModelInputs(source, counted.corpus, counted.vocabulary or model.words())
