"""``smoothgrad topics``: print the topics of a model."""

from argparse import Namespace

import numpy as np

from smoothgrad_jax.app import saved_models
from smoothgrad_jax.app.commands.output import emit, print_topics


def run(args: Namespace) -> int:
    """Print the topics, the largest first."""
    model = saved_models.load_model(args.model)
    if not args.json:
        print_topics(model, args.words, everything=args.all)
        return 0
    words, prevalence = model.top_words(args.words), model.topic_proportions()
    for k in np.argsort(-prevalence, kind="stable").tolist():
        emit({"topic": k, "share": float(prevalence[k]), "words": [{"word": w, "p": p} for w, p in words[k]]})
    return 0
