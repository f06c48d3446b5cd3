"""``smoothgrad transform``: the topic proportions of documents."""

from argparse import Namespace

from smoothgrad_jax.app import saved_models
from smoothgrad_jax.app.commands.inputs import open_for_model
from smoothgrad_jax.app.commands.output import check_output, row_writer
from smoothgrad_jax.data.errors import plural


def run(args: Namespace) -> int:
    """Write one row of topic proportions per document."""
    check_output(args.out)
    model = saved_models.load_model(args.model)
    documents, first = open_for_model(args, model), 0
    with row_writer(args.out, model.topic_names(), "theta") as write:
        for part in documents.corpus.parts():
            theta = model.transform(part)
            write(first, theta)
            first += len(theta)
    if args.out:
        print(f"{args.out}: {plural(first, 'document')}")
    return 0
