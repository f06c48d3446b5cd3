"""``smoothgrad score``: the predictive probability of documents by document completion."""

import math
from argparse import Namespace
from contextlib import nullcontext

import numpy as np

from smoothgrad_jax.app import saved_models
from smoothgrad_jax.app.commands.inputs import open_for_model
from smoothgrad_jax.app.commands.output import CommandError, emit
from smoothgrad_jax.app.commands.tables import check_output, table_writer
from smoothgrad_jax.core.errors import OptionError
from smoothgrad_jax.data.errors import plural
from smoothgrad_jax.models.lda import inference

_COLUMNS = ("log_prob", "held_out_words")


def run(args: Namespace) -> int:
    """Print nats per held-out word; with ``--out`` also write one row per document."""
    check_output(args.out, args.inputs)
    for name in ("id", "keep"):
        if getattr(args, name) and not args.out:
            raise OptionError(name, "has no effect without --out")
    model = saved_models.load_model(args.model)
    documents, scores = open_for_model(args, model, _COLUMNS if args.out else ()), []
    with table_writer(args.out, documents.column_types) if args.out else nullcontext(None) as write:
        parts = documents.parts() if write else ((part, {}) for part in documents.corpus.parts())
        for part, columns in parts:
            found = inference.completion(model.lda(), model.lam, part)
            if write:
                write(columns | dict(zip(_COLUMNS, found, strict=True)))
            scores.append(found)
    total = inference.Completion(*map(np.concatenate, zip(*scores, strict=True)))
    if math.isnan(total.score):
        raise CommandError("no document has two words in the model's vocabulary; the score needs at least two")
    num_words = float(total.words.sum())
    if args.json:
        result = {"score": total.score, "perplexity": total.perplexity}
        emit(result | {"documents": documents.corpus.num_docs, "held_out_words": num_words})
    else:
        print(f"{total.score:.4f} nats per word, perplexity {total.perplexity:,.1f}")
        size = f"{plural(round(num_words), 'held-out word')} in {plural(documents.corpus.num_docs, 'document')}"
        print(f"{size}; one half of each document is predicted from the other half")
    return 0
