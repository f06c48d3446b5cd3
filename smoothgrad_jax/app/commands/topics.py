"""``smoothgrad topics``: print the topics of a model."""

from argparse import Namespace

import numpy as np

from smoothgrad_jax.app import saved_models
from smoothgrad_jax.app.commands.output import emit, print_topics


def run(args: Namespace) -> int:
    """Print the topics, the largest first."""
    model = saved_models.load_model(args.model)
    if not args.json:
        print_topics(model, args.words, show_all=args.all)
        return 0
    words, prevalence, quality = model.top_words(args.words), model.topic_proportions(), model.quality
    for k in np.argsort(-prevalence, kind="stable").tolist():
        measured = {"npmi": float(quality.npmi[k]), "remarks": quality.remarks(k)} if quality else {}
        record = {"topic": k, "share": float(prevalence[k]), **measured}
        emit(record | {"words": [{"word": w, "p": p} for w, p in words[k]]})
    return 0
