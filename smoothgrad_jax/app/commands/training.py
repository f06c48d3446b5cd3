"""Training that ``fit``, ``sweep`` and ``demo`` share: a run from a corpus and settings, shown while it works."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import numpy as np

from smoothgrad_jax.app import progress, runs
from smoothgrad_jax.app.commands.output import INTERRUPTED, emit, say
from smoothgrad_jax.app.runs import Run
from smoothgrad_jax.app.saved_models import SavedModel
from smoothgrad_jax.data.corpus_folder import Stored
from smoothgrad_jax.training.checkpoints import Checkpoint, Checkpoints
from smoothgrad_jax.training.driver import Progress
from smoothgrad_jax.training.engines import NotFiniteError
from smoothgrad_jax.training.settings import Settings


def new_run(stored: Stored, settings: Settings, facts: dict[str, Any], checkpoint: Checkpoint | None = None) -> Run:
    """Return a run over a corpus, with some of its documents held out.

    Args:
      stored: The corpus and its words.
      settings: Resolved settings.
      facts: What else the model stores, such as a fingerprint of the corpus.
      checkpoint: A checkpoint to continue from.
    """
    corpus = stored.corpus
    assert settings.held_out is not None, "the settings must be resolved"
    rng, key = np.random.default_rng(settings.seed), jax.random.key(settings.seed)
    documents, held_out = runs.hold_out(rng, corpus.num_docs, settings.held_out)
    start = None if checkpoint else runs.first_topics(key, corpus, settings.topics, documents)
    return Run(
        corpus,
        settings,
        start,
        key=key,
        rng=rng,
        documents=documents,
        held_out=corpus.select(held_out) if held_out.size else None,
        checkpoint=checkpoint,
        facts=facts,
    )


def train(run: Run, as_json: bool, checkpoints: Checkpoints | None = None) -> int:
    """Train to the end or until an interruption, show the progress, and return the exit code."""

    def lines(reports: Iterator[Progress]) -> Iterator[Progress]:
        for report in reports:
            emit({"event": "progress", **runs.record(report), "remaining": report.remaining})
            yield report

    watch = lines if as_json else partial(progress.watch, steps=run.steps)
    try:
        with _sigterm_like_ctrl_c():
            return 0 if run.train(watch, checkpoints) else INTERRUPTED
    except NotFiniteError as error:
        say(str(error))
        return 1


def saved_model(run: Run, stored: Stored) -> SavedModel:
    """Return the topics of a run as a model that can be saved."""
    lam, model = np.asarray(run.params), run.model
    learned = np.maximum(lam - np.asarray(model.eta), 0).sum(0, dtype=np.float64)
    return SavedModel(
        lam=lam,
        alpha=model.alpha,
        eta=model.eta,
        num_docs=model.num_docs,
        vocabulary=stored.vocabulary,
        settings=run.settings_json(),
        history=run.history,
        prevalence=learned / learned.sum() if learned.sum() else None,
        word_counts=stored.corpus.word_counts(),
    )


@contextmanager
def _sigterm_like_ctrl_c() -> Iterator[None]:
    """Treat SIGTERM, by which clusters end a job, like Ctrl-C; Python allows that in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
