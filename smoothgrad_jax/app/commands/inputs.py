"""Input shared by several commands: open the files on the command line as a corpus."""

import hashlib
import json
from argparse import Namespace
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse

from smoothgrad_jax.app.commands.output import CommandError, log, log_dropped, reading_progress
from smoothgrad_jax.app.saved_models import SavedModel
from smoothgrad_jax.data import batches, corpus_folder, sources
from smoothgrad_jax.data.corpus_folder import Stored
from smoothgrad_jax.data.sources import Source
from smoothgrad_jax.training.checkpoints import Checkpoint, fingerprint

_WORD_OPTIONS = ("vocabulary", "min_df", "max_df", "max_features", "stop_words", "token_pattern")


def open_source(args: Namespace) -> Source:
    """Recognise the files on the command line as one corpus."""
    source = sources.open_source(
        args.inputs,
        field=args.field,
        vocabulary=args.words_file,
        first_id=args.first_id,
        encoding=args.encoding,
        sort=args.sort,
        format=args.format,
    )
    if source.field and not args.field:
        log(f"reading the text from the field {source.field!r}; --field selects another")
    return source


def word_options(args: Namespace) -> dict[str, Any]:
    """Return the vocabulary options given on the command line."""
    options = {name: getattr(args, name) for name in _WORD_OPTIONS if getattr(args, name) is not None}
    if options.get("stop_words") == "none":
        options["stop_words"] = None
    return options


def open_corpus(args: Namespace, checkpoint: Checkpoint | None = None) -> Stored:
    """Return the corpus to train on: memory-mapped if it is a corpus folder, otherwise read into memory.

    Args:
      args: Arguments of the command.
      checkpoint: Supplies the vocabulary options if the command line has none.
    """
    source, options = open_source(args), word_options(args)
    if source.format == "folder":
        if options:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in options)
            raise CommandError(f"{source.paths[0]}: the words of this corpus were chosen by convert; omit {names}")
        return corpus_folder.open_folder(source.paths[0])
    if checkpoint and not options:
        options = checkpoint.settings.get("word_options", {})
    with reading_progress(args.json) as show:
        stored = corpus_folder.read(source, progress=show, **options)
    log_dropped(stored)
    return stored


def provenance(stored: Stored) -> dict[str, Any]:
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
      stored: Their counts.
      columns: Row of λ per word of the corpus, −1 for unknown words; None if the vocabularies are equal.
      num_words: Number of rows of λ.
    """

    source: Source
    stored: Stored
    columns: np.ndarray | None
    num_words: int

    def parts(self) -> Iterator[scipy.sparse.csr_array]:
        """Yield the documents in parts, with one column per row of λ."""
        return (self._aligned(batches.as_csr(part)) for part in self.stored.corpus.parts())

    def texts(self, words: list[str]) -> Iterator[str]:
        """Return the documents as text; for counts, the distinct words of each document.

        Args:
          words: Vocabulary to use if the corpus has none.
        """
        if self.source.is_text:
            return self.source.texts()
        names, corpus = self.stored.vocabulary or words, self.stored.corpus
        spans = zip(corpus.indptr[:-1].tolist(), corpus.indptr[1:].tolist(), strict=True)
        return (" ".join(names[w] for w in corpus.indices[a:b].tolist()) for a, b in spans)

    def _aligned(self, counts: scipy.sparse.csr_array) -> scipy.sparse.csr_array:
        if self.columns is None:
            return counts
        entries = counts.tocoo()
        columns = self.columns[entries.col]
        known = columns >= 0
        places = (entries.row[known], columns[known])
        return scipy.sparse.csr_array((entries.data[known], places), (counts.shape[0], self.num_words))


def open_for_model(args: Namespace, model: SavedModel) -> ModelInputs:
    """Open the documents on the command line for a model; report words outside its vocabulary."""
    source = open_source(args)
    if source.format == "folder":
        stored = corpus_folder.open_folder(source.paths[0])
    elif source.is_text and model.vocabulary is None:
        raise CommandError("the model has no vocabulary: it can be applied to counts, not to text")
    elif source.is_text or (source.vocabulary is not None and model.vocabulary is not None):
        tokens = model.settings.get("tokens") or {}
        stored = corpus_folder.read(source, vocabulary=model.vocabulary, **(tokens if source.is_text else {}))
        log_dropped(stored)
    else:
        stored = corpus_folder.read(source)
    num_words, columns = len(model.lam), None
    if stored.vocabulary is not None and model.vocabulary is not None and stored.vocabulary != model.vocabulary:
        rows = {word: row for row, word in enumerate(model.vocabulary)}
        columns = np.array([rows.get(word, -1) for word in stored.vocabulary])
        log(f"ignoring {(columns < 0).sum():,} of {len(columns):,} distinct words, which the model does not have")
    elif stored.corpus.num_words > num_words:
        raise CommandError(f"the documents have {stored.corpus.num_words:,} distinct words, the model {num_words:,}")
    return ModelInputs(source, stored, columns, num_words)
