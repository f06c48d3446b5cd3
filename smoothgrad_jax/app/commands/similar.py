"""``smoothgrad similar``: the documents whose topic proportions are nearest to those of a document or a text."""

import itertools
from argparse import Namespace
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from smoothgrad_jax.app import saved_models
from smoothgrad_jax.app.commands.inputs import ModelInputs, definition_of, open_for_model, title_of
from smoothgrad_jax.app.commands.output import CommandError, emit, printable
from smoothgrad_jax.app.saved_models import SavedModel
from smoothgrad_jax.core.errors import OptionError
from smoothgrad_jax.data import text
from smoothgrad_jax.data.corpus import Corpus
from smoothgrad_jax.data.errors import plural
from smoothgrad_jax.models.lda import inference
from smoothgrad_jax.models.topic_similarity import nearest, word_proportions

_EXCERPT = 100  # characters


def run(args: Namespace) -> int:
    """Print the most similar documents, the most similar first."""
    model = saved_models.load_model(args.model)
    documents = open_for_model(args, model)
    row, query = None, None
    if args.text is not None:
        query = _count(args, model)
    else:
        row = _find(documents, args.to) if args.row is None else args.row
        if row >= documents.corpus.num_docs:
            raise OptionError("row", f"{row} must be less than the number of documents, {documents.corpus.num_docs:,}")
        query = documents.corpus.part(row, row + 1)
    if not query.lengths().any():
        raise CommandError("the document or text has no word that is in the vocabulary of the model")
    found = nearest(_parts(documents, model, row), _proportions(model, query)[0], args.top)
    wanted, excerpts = set(found.documents.tolist()), {}
    for number, (words, metadata) in enumerate(itertools.islice(documents.documents(), max(wanted, default=-1) + 1)):
        if number in wanted:
            excerpts[number] = metadata, " ".join(words.split())
    if not args.json:
        print("similarity  document")
    for number, value in zip(found.documents.tolist(), found.similarity.tolist(), strict=True):
        metadata, words = excerpts[number]
        if args.json:
            fields = dict(zip(documents.source.keep, metadata.fields, strict=True))
            emit({"document": number, "id": metadata.id, "similarity": value, "fields": fields, "text": words})
        else:
            short = words if len(words) <= _EXCERPT else f"{words[:_EXCERPT]}…"
            print(printable(f"{value:10.3f}  {title_of(number, metadata)}  {short}"))
    return 0


def _find(documents: ModelInputs, wanted: str) -> int:
    """Return the row number of the document with an id; without such an id, ``wanted`` is a row number."""
    rows = [number for number, metadata in enumerate(documents.metadata()) if metadata.id == wanted]
    if len(rows) > 1:
        listed = ", ".join(map(str, rows[:5]))
        raise CommandError(
            f"--to {wanted}: {plural(len(rows), 'document')} have this id, rows {listed}; pass one as --row"
        )
    if rows:
        return rows[0]
    if wanted.isdecimal() and int(wanted) < documents.corpus.num_docs:
        return int(wanted)
    ids = f"no document has this id, and the rows are 0 to {documents.corpus.num_docs - 1}"
    raise CommandError(f"--to {wanted}: {ids}")


def _count(args: Namespace, model: SavedModel) -> Corpus:
    """Return the text on the command line as a corpus of one document."""
    if model.vocabulary is None:
        raise CommandError("the model has no vocabulary: it cannot be applied to text")
    (chunk,) = text.count_stream([args.text], definition_of(model, args.tokenizer))
    counts = text.renumber(chunk, {word: i for i, word in enumerate(model.vocabulary)})
    return Corpus(counts.indptr, counts.indices, counts.data, len(model.vocabulary))


def _parts(documents: ModelInputs, model: SavedModel, row: int | None) -> Iterator[npt.NDArray]:
    """Yield topic proportions in parts, with NaN for the document itself and for documents without a known word."""
    first = 0
    for part in documents.corpus.parts():
        proportions = _proportions(model, part)
        if row is not None and first <= row < first + len(proportions):
            proportions[row - first] = np.nan
        yield proportions
        first += len(proportions)


def _proportions(model: SavedModel, corpus: Corpus) -> npt.NDArray:
    proportions = word_proportions(inference.posteriors(model.lda(), model.lam, corpus), model.alpha)
    proportions[corpus.lengths() == 0] = np.nan
    return proportions
