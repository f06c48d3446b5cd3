"""``smoothgrad topics``: print the topics of a model, and label them."""

from argparse import Namespace

import numpy as np

from smoothgrad_jax.app import saved_models
from smoothgrad_jax.app.commands.output import emit, log, print_topics
from smoothgrad_jax.app.topic_labels import read_labels
from smoothgrad_jax.core.errors import OptionError
from smoothgrad_jax.data import folder_lock
from smoothgrad_jax.data.errors import plural


def run(args: Namespace) -> int:
    """Print the topics, the largest first; labels from a file replace those of the model."""
    if args.all and args.json:
        raise OptionError("all", "has no effect with --json, which writes all topics")
    model = saved_models.load_model(args.model)
    if args.labels is not None:
        with folder_lock.locked(args.model):  # a run would replace the labels by those that it has read at its start
            model = saved_models.load_model(args.model)
            model = model._replace(labels=read_labels(args.labels, model.lam.shape[1]))
            saved_models.save_model(args.model, model)
        log(f"{args.model}: {plural(len(model.labels or {}), 'label')}")
    if not args.json:
        print_topics(model, args.words, show_all=args.all)
        return 0
    words, prevalence, quality = model.top_words(args.words), model.topic_proportions(), model.quality
    for k in np.argsort(-prevalence, kind="stable").tolist():
        measured = {"npmi": float(quality.npmi[k]), "remarks": quality.remarks(k)} if quality else {}
        record = {"topic": k, "label": (model.labels or {}).get(k), "prevalence": float(prevalence[k]), **measured}
        emit(record | {"words": [{"word": w, "p": p} for w, p in words[k]]})
    return 0
