"""Comparison of two models: their topics, matched one to one over the words that both models have."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from smoothgrad_jax.app.saved_models import SavedModel
from smoothgrad_jax.models.topic_quality import TopicMatch, match_topics


class Comparison(NamedTuple):
    """Another model with its topics matched to those of a model; made by :func:`compare_models`.

    Attributes:
      name: The name of the other model.
      model: The other model.
      match: For each topic of the first model, its topic in the other model, and their similarity.
      num_common_words: Number of words that both models have, over which the similarities were computed.
    """

    name: str
    model: SavedModel
    match: TopicMatch
    num_common_words: int


def compare_models(model: SavedModel, other: SavedModel, name: str) -> Comparison:
    """Match the topics of two models, whose vocabularies and numbers of topics may differ; ``name`` is the other's.

    Raises:
      ValueError: If the models have no common words, or only one of them has a vocabulary.
    """
    here, there = _common_rows(model, other)
    match = match_topics(np.asarray(model.lam)[here], np.asarray(other.lam)[there])
    return Comparison(name, other, match, len(here))


def _common_rows(model: SavedModel, other: SavedModel) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the rows of λ of the common words, in both models."""
    if model.vocabulary is None and other.vocabulary is None:
        if len(model.lam) != len(other.lam):
            raise ValueError(
                f"the models have no vocabulary and {len(model.lam):,} and {len(other.lam):,} words; "
                "compare models of the same vocabulary"
            )
        return np.arange(len(model.lam)), np.arange(len(model.lam))
    if model.vocabulary is None or other.vocabulary is None:
        raise ValueError("one of the models has no vocabulary; compare models that both have one")
    row = {word: w for w, word in enumerate(other.vocabulary)}
    common = [(w, row[word]) for w, word in enumerate(model.vocabulary) if word in row]
    if not common:
        raise ValueError("the models have no common word; compare models of documents in the same language")
    pairs = np.asarray(common)
    return pairs[:, 0], pairs[:, 1]
