"""``smoothgrad report``: one HTML file that shows the topics of a model."""

import itertools
from argparse import Namespace
from pathlib import Path

import numpy as np

from smoothgrad_jax.app import report, saved_models
from smoothgrad_jax.app.commands.inputs import open_for_model, refuse_reading_options, title_of
from smoothgrad_jax.app.commands.output import check_file


def run(args: Namespace) -> int:
    """Write the report, with typical documents per topic if documents are given."""
    if not args.inputs:
        refuse_reading_options(args)
    path = Path(args.out) if args.out else Path(args.model) / "report.html"
    if args.out:
        check_file(path, (".html", ".htm"))
    model = saved_models.load_model(args.model)
    check_file(path)
    typical = None
    if args.inputs:
        documents = open_for_model(args, model)
        theta = np.concatenate([model.transform(part) for part in documents.corpus.parts()])
        texts, again = itertools.tee(documents.documents())
        titles = (title_of(number, each.metadata) for number, each in enumerate(again))
        typical = report.typical_documents(theta, (each.text for each in texts), titles)
    print(report.write_report(path, model, documents=typical, title=args.title))
    return 0
