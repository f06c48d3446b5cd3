"""``smoothgrad transform``: the topic proportions of documents."""

from argparse import Namespace

from smoothgrad_jax.app import saved_models
from smoothgrad_jax.app.commands.inputs import open_for_model
from smoothgrad_jax.app.commands.tables import THETA, check_output, table_writer
from smoothgrad_jax.data.errors import plural


def run(args: Namespace) -> int:
    """Write one row of topic proportions per document, with its id and kept fields."""
    check_output(args.out, args.inputs)
    model = saved_models.load_model(args.model)
    documents = open_for_model(args, model, columns=[THETA])
    with table_writer(args.out, documents.column_types, topics=model.topic_names()) as write:
        for part, columns in documents.parts():
            write(columns | {THETA: model.transform(part)})
    if args.out:
        print(f"{args.out}: {plural(documents.corpus.num_docs, 'document')}")
    return 0
