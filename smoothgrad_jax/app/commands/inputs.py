"""Input shared by several commands: open the files on the command line as a corpus."""

import hashlib
import itertools
import json
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from typing import Any, NamedTuple

from smoothgrad_jax.app.commands.output import CommandError, log, log_dropped, reading_progress
from smoothgrad_jax.app.saved_models import SavedModel
from smoothgrad_jax.core.errors import OptionError
from smoothgrad_jax.data import corpus_folder, sources, text
from smoothgrad_jax.data.corpus import Corpus
from smoothgrad_jax.data.corpus_folder import CountedCorpus
from smoothgrad_jax.data.errors import plural
from smoothgrad_jax.data.sources import Source
from smoothgrad_jax.training.checkpoints import Checkpoint, fingerprint

# Options of `open_source` with their defaults.
_READING = {"format": None, "field": None, "encoding": "utf-8", "first_id": None, "sort": False, "words_file": None}
_LIMITS = ("vocabulary", "min_df", "max_df", "max_features", "min_npmi")
_TOKEN_OPTIONS = ("stop_words", "stop_words_only", "ngram_range", "token_pattern", "tokenizer")


def open_source(args: Namespace) -> Source:
    """Recognise the files on the command line as one corpus; report what was found beside them or inside them."""
    options = {name: getattr(args, name) for name in _READING}
    words = options.pop("words_file")
    source = sources.open_source(args.inputs, vocabulary=False if words == "none" else words, **options)
    if source.field and not args.field:
        log(f"reading the text from the field {source.field!r}; --field selects another")
    if source.words_file and not words:
        log(f"reading the words from {source.words_file}; --words-file selects another file, or none")
    return source


def refuse_reading_options(args: Namespace) -> None:
    """Raise an error if an option of :func:`open_source` is given."""
    for name, default in (*_READING.items(), ("tokenizer", None)):
        if getattr(args, name) != default:
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

    Args:
      args: Arguments of the command.
      checkpoint: Supplies the vocabulary options if the command line has none.
    """
    source, options = open_source(args), word_options(args)
    if isinstance(source.loaded, CountedCorpus):
        for name in options:
            raise OptionError(name, f"has no effect: the words of {source.paths[0]} were chosen by convert")
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
    if "files" in manifest:  # a corpus folder, whose checksums are known
        identifier = hashlib.sha256(json.dumps(manifest["files"], sort_keys=True).encode()).hexdigest()[:16]
    else:
        identifier = fingerprint(stored.corpus)
    return {"corpus": identifier, "tokens": manifest["tokens"]}


class ModelInputs(NamedTuple):
    """Documents to which a model is applied.

    Attributes:
      source: The files.
      corpus: Their counts, with at most as many words as λ has rows.
      words: The words of the corpus.
    """

    source: Source
    corpus: Corpus
    words: list[str]

    def texts(self) -> Iterator[str]:
        """Return the documents as text; for counts, the distinct words of each document."""
        if self.source.is_text:
            return self.source.texts()
        indptr, indices, *_ = self.corpus
        spans = itertools.pairwise(indptr.tolist())
        return (" ".join(self.words[w] for w in indices[first:last].tolist()) for first, last in spans)


def _definition(model: SavedModel, tokenizer: str | None) -> text.Tokens:
    """Return the definition of a word of a model; a tokenizer is imported only if it is given on the command line."""
    stored = model.settings.get("tokens")
    if stored is None:
        log("the model does not store how text is split into words; splitting as fit does by default")
        stored = text.tokens().as_json()
    if tokenizer is not None:
        _find_modules_here()
    return text.stored_tokens(stored, tokenizer)


def open_for_model(args: Namespace, model: SavedModel) -> ModelInputs:
    """Open the documents on the command line for a model; report words outside its vocabulary."""
    source, vocabulary = open_source(args), model.vocabulary
    if source.is_text:
        if vocabulary is None:
            raise CommandError("the model has no vocabulary: it can be applied to counts, not to text")
        counted = corpus_folder.read(source, vocabulary=vocabulary, tokens=_definition(model, args.tokenizer))
        log_dropped(counted)
    elif args.tokenizer is not None:
        raise OptionError("tokenizer", f"has no meaning for {source.format}")
    elif vocabulary is not None and source.vocabulary not in (None, vocabulary):
        counted = corpus_folder.read(source, vocabulary=vocabulary)
        log_dropped(counted)
    else:
        counted = source.loaded if isinstance(source.loaded, CountedCorpus) else corpus_folder.read(source)
    if counted.corpus.num_words > len(model.lam):
        given, known = plural(counted.corpus.num_words, "distinct word"), len(model.lam)
        raise CommandError(f"{source.paths[0]}: has {given} without names, more than the {known:,} of the model")
    return ModelInputs(source, counted.corpus, counted.vocabulary or model.words())
