"""Training shared by ``fit``, ``sweep`` and ``demo``."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from smoothgrad_jax.app import progress, runs, signals
from smoothgrad_jax.app.commands import metrics
from smoothgrad_jax.app.commands.output import CommandError, emit, log
from smoothgrad_jax.app.runs import Run
from smoothgrad_jax.app.saved_models import SavedModel
from smoothgrad_jax.app.settings import Settings
from smoothgrad_jax.data.corpus import Corpus
from smoothgrad_jax.data.corpus_folder import CountedCorpus
from smoothgrad_jax.data.durable_files import LoadError, SumCheck
from smoothgrad_jax.models.topic_quality import topic_prevalence, topic_quality
from smoothgrad_jax.training.checkpoints import Checkpoint, Checkpoints
from smoothgrad_jax.training.driver import Progress
from smoothgrad_jax.training.engines import NotFiniteError


def new_run(
    stored: CountedCorpus,
    settings: Settings,
    metadata: dict[str, Any],
    checkpoint: Checkpoint | None = None,
    mesh: Mesh | None = None,
    messages: str | None = None,
) -> Run:
    """Return a run over a corpus, with some of its documents held out; see :class:`smoothgrad_jax.app.runs.Run`."""
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
        messages=messages,
    )


def train(
    run: Run,
    as_json: bool,
    checkpoints: Checkpoints | None = None,
    metrics_file: Path | None = None,
    sums: SumCheck | None = None,
) -> int:
    """Train until the end or an interruption, display and record the progress, and return the exit code.

    It is 1 if the run was interrupted and the last checkpoint could not be written. The check of the files of the
    corpus, ``sums``, ends before training does; if one is damaged, a checkpoint is written before the error is raised.
    """

    def checked(reports: Iterator[Progress]) -> Iterator[Progress]:
        for report in reports:
            if sums:
                sums.check()
            yield report
        if sums:
            sums.check(wait=True)

    def lines(reports: Iterator[Progress]) -> Iterator[Progress]:
        for report in reports:
            emit({"event": "progress", **runs.record(report), "remaining": report.remaining})
            yield report

    def watch(reports: Iterator[Progress]) -> Iterator[Progress]:
        if metrics_file:
            reports = metrics.recorded(reports, metrics_file, run.step)
        return lines(reports) if as_json else progress.watch(reports, steps=run.steps)

    try:
        finished = run.train(lambda reports: watch(checked(reports)), checkpoints, log)
        return 0 if finished else signals.exit_code() if run.is_stored else 1
    except NotFiniteError as error:
        log(str(error))
        return 1
    except LoadError as error:
        kept = "the model is not saved. Restore the corpus and repeat the command with --resume to continue"
        raise LoadError(f"{error}; {kept}") from error
    finally:
        if sums:
            sums.stop()


def check_space(run: Run, corpus: Corpus, checkpoints: Checkpoints) -> None:
    """Check that the disk can hold the model; warn if it cannot hold the checkpoints, without which a run can go on."""
    free, folder = shutil.disk_usage(checkpoints.folder.parent).free, checkpoints.folder.parent
    model = np.asarray(run.params).nbytes
    if free < model:
        raise CommandError(f"{folder}: the model needs {model:,} bytes, and {free:,} are free; free some space first")
    needed = model + (checkpoints.keep + 1) * run.checkpoint_bytes(corpus)
    if free < needed:
        log(
            f"{folder}: the checkpoints of this run need about {needed:,} bytes, and {free:,} are free; free some space"
        )


def saved_model(run: Run, stored: CountedCorpus, lam: np.ndarray | None = None) -> SavedModel:
    """Return the topics of a run, or λ if it is given, as a model, with their quality on training documents."""
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
