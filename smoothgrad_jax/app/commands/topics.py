"""``smoothgrad topics``: print the topics of a model."""

from argparse import Namespace

import numpy as np

from smoothgrad_jax.app import saved_models
from smoothgrad_jax.app.commands.output import emit, print_topics
from smoothgrad_jax.core.errors import OptionError


def run(args: Namespace) -> int:
    """Print the topics, the largest first."""
    if args.all and args.json:
        raise OptionError("all", "has no effect with --json, which writes all topics")
    model = saved_models.load_model(args.model)
    if not args.json:
        print_topics(model, args.words, show_all=args.all)
        return 0
    words, prevalence, quality = model.top_words(args.words), model.topic_proportions(), model.quality
    for k in np.argsort(-prevalence, kind="stable").tolist():
        measured = {"npmi": float(quality.npmi[k]), "remarks": quality.remarks(k)} if quality else {}
        record = {"topic": k, "prevalence": float(prevalence[k]), **measured}
        emit(record | {"words": [{"word": w, "p": p} for w, p in words[k]]})
    return 0
