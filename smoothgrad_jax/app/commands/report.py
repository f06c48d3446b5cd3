"""``smoothgrad report``: one HTML file that shows the topics of a model."""

import itertools
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from smoothgrad_jax.app import report, saved_models
from smoothgrad_jax.app.commands.groups import group_documents
from smoothgrad_jax.app.commands.inputs import open_for_model, refuse_reading_options, title_of
from smoothgrad_jax.app.commands.output import check_file
from smoothgrad_jax.app.model_comparison import compare_models
from smoothgrad_jax.app.report_content import Excerpt
from smoothgrad_jax.app.saved_models import SavedModel
from smoothgrad_jax.core.errors import OptionError
from smoothgrad_jax.models.topic_groups import TopicGroups


def run(args: Namespace) -> int:
    """Write the report, with typical documents and groups if documents are given."""
    if not args.inputs:
        refuse_reading_options(args)
        if args.by:
            raise OptionError("by", "has no effect without documents to read")
    if args.period and not args.by:
        raise OptionError("period", "has no effect without --by")
    path = Path(args.out) if args.out else Path(args.model) / "report.html"
    if args.out:
        check_file(path, (".html", ".htm"))
    model, comparison = saved_models.load_model(args.model), None
    check_file(path)
    if args.compare is not None:
        other = saved_models.load_model(args.compare)
        comparison = compare_models(model, other, Path(args.compare).resolve().name)
    typical, groups = _read_documents(args, model) if args.inputs else (None, None)
    options = {"documents": typical, "groups": groups, "comparison": comparison, "title": args.title}
    print(report.write_report(path, model, **options))
    return 0


def _read_documents(args: Namespace, model: SavedModel) -> tuple[dict[int, list[Excerpt]], TopicGroups | None]:
    """Return the typical documents of each topic, and the topic proportions per group, if groups are wanted."""
    if args.by:
        args.keep = tuple(dict.fromkeys([args.by, *args.keep]))
    documents, parts = open_for_model(args, model), []

    def transformed() -> Iterator[npt.NDArray]:
        for part in documents.corpus.parts():
            parts.append(model.transform(part))
            yield parts[-1]

    groups = group_documents(args, documents, transformed()) if args.by else None
    theta = np.concatenate(parts or list(transformed()))
    texts, again = itertools.tee(documents.documents())
    titles = (title_of(number, each.metadata) for number, each in enumerate(again))
    return report.typical_documents(theta, (each.text for each in texts), titles), groups
