"""Training shared by ``fit``, ``sweep`` and ``demo``."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from smoothgrad_jax.app import progress, runs
from smoothgrad_jax.app.commands.output import INTERRUPTED, emit, log
from smoothgrad_jax.app.runs import Run
from smoothgrad_jax.app.saved_models import SavedModel
from smoothgrad_jax.data.corpus_folder import CountedCorpus
from smoothgrad_jax.models.topic_quality import topic_prevalence, topic_quality
from smoothgrad_jax.training.checkpoints import Checkpoint, Checkpoints
from smoothgrad_jax.training.driver import Progress
from smoothgrad_jax.training.engines import NotFiniteError
from smoothgrad_jax.training.settings import Settings


def new_run(
    stored: CountedCorpus,
    settings: Settings,
    metadata: dict[str, Any],
    checkpoint: Checkpoint | None = None,
    mesh: Mesh | None = None,
) -> Run:
    """Return a run over a corpus, with some of its documents held out.

    Args:
      stored: The corpus and its words.
      settings: Resolved settings.
      metadata: Entries stored with the settings, such as a fingerprint of the corpus.
      checkpoint: A checkpoint to continue from.
      mesh: Devices to train on; None for the threads of this process.
    """
    corpus = stored.corpus
    assert settings.held_out is not None, "the settings must be resolved"
    rng, key = np.random.default_rng(settings.seed), jax.random.key(settings.seed)
    documents, held_out = runs.hold_out(rng, corpus.num_docs, settings.held_out)
    start = None if checkpoint else runs.initial_topics(key, corpus, settings.topics, documents)
    return Run(
        corpus,
        settings,
        start,
        key=key,
        rng=rng,
        documents=documents,
        held_out=corpus.select(held_out) if held_out.size else None,
        checkpoint=checkpoint,
        metadata=metadata,
        mesh=mesh,
    )


def train(run: Run, as_json: bool, checkpoints: Checkpoints | None = None) -> int:
    """Train until the end or an interruption, display progress, and return the exit code."""

    def lines(reports: Iterator[Progress]) -> Iterator[Progress]:
        for report in reports:
            emit({"event": "progress", **runs.record(report), "remaining": report.remaining})
            yield report

    watch = lines if as_json else partial(progress.watch, steps=run.steps)
    try:
        with interrupt_in_step(run) if jax.process_count() > 1 else sigterm_as_ctrl_c():
            return 0 if run.train(watch, checkpoints) else INTERRUPTED
    except NotFiniteError as error:
        log(str(error))
        return 1


def saved_model(run: Run, stored: CountedCorpus, lam: np.ndarray | None = None) -> SavedModel:
    """Return the topics of a run as a model that can be saved, with their quality on training documents.

    Args:
      run: The run.
      stored: Its corpus.
      lam: λ, if the caller has read it.
    """
    lam, model = np.asarray(run.params) if lam is None else lam, run.model
    prevalence = topic_prevalence(lam, np.asarray(model.eta))
    return SavedModel(
        lam=lam,
        alpha=model.alpha,
        eta=model.eta,
        num_docs=model.num_docs,
        vocabulary=stored.vocabulary,
        settings=run.settings_json(),
        history=run.history,
        prevalence=prevalence,
        word_counts=stored.corpus.word_counts(),
        quality=topic_quality(lam, stored.corpus, prevalence=prevalence, documents=run.documents),
    )


@contextmanager
def interrupt_in_step(run: Run) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end the run of all processes after the same step."""
    numbers = signal.SIGINT, signal.SIGTERM
    previous = [signal.signal(number, lambda *_: run.interrupt()) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Treat SIGTERM, which cluster schedulers send, like Ctrl-C. Only the main thread can set a handler."""
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
