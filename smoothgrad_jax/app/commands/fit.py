"""``smoothgrad fit``: train a model on a corpus, with checkpoints, in one process or in several.

With ``--distributed`` every process runs this command on the same files. Process 0 prints, and saves the model.
"""

import os
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from smoothgrad_jax.app import runs, saved_models
from smoothgrad_jax.app.cli import given_settings
from smoothgrad_jax.app.commands.inputs import open_corpus, provenance, word_options
from smoothgrad_jax.app.commands.output import (
    INTERRUPTED,
    CommandError,
    check_folder,
    emit,
    event_of,
    log,
    print_topics,
    size_of,
)
from smoothgrad_jax.app.commands.training import new_run, saved_model, train
from smoothgrad_jax.data.errors import plural
from smoothgrad_jax.training import distributed
from smoothgrad_jax.training.checkpoints import Checkpoint, Checkpoints
from smoothgrad_jax.training.settings import Settings

_TOPICS_SHOWN, _WORDS_SHOWN = 20, 10


def run(args: Namespace) -> int:
    """Train, save the model, and print its topics."""
    if not args.distributed:
        return _fit(args)
    distributed.start(devices=args.threads or 1)
    try:
        with _quiet(unless=jax.process_index() == 0):
            code = _fit(args, distributed.mesh())
            distributed.wait_for_all()
            return code
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        raise CommandError(f"process {jax.process_index()}: the exchange with the others failed: {reason}") from error


@contextmanager
def _quiet(unless: bool) -> Iterator[None]:
    """Print nothing; an error that leaves the block is printed."""
    with open(os.devnull, "w") as nowhere:
        if unless:
            yield
        else:
            with redirect_stdout(nowhere), redirect_stderr(nowhere):
                yield


def _fit(args: Namespace, mesh: Mesh | None = None) -> int:
    out, given = Path(args.out), given_settings(args)
    checkpoints = Checkpoints(out / "checkpoints")
    last = _last_checkpoint(out, checkpoints, args)
    earlier = last.settings if last else {}
    if last:
        runs.check_settings(earlier, given)
    settings = Settings.from_json({**earlier, "threads": None}, **given)
    stored = open_corpus(args, last)
    settings = settings.resolve(stored.corpus.num_docs)
    chosen = word_options(args) or earlier.get("word_options")
    metadata = provenance(stored) | ({"word_options": chosen} if chosen else {})
    if last:
        runs.check_resumable(last, settings, metadata)
    if mesh is not None:
        distributed.check_same(settings.as_json() | metadata | {"checkpoint": last.step if last else None})
    training = new_run(stored, settings, metadata, last, mesh)
    log(f"{size_of(stored)}; {settings.topics} topics, window {settings.window}")
    is_first = mesh is None or jax.process_index() == 0
    if args.overwrite and is_first:
        checkpoints.clear()
        (out / "report.html").unlink(missing_ok=True)  # it describes the model that is replaced
    if last and training.step >= training.steps:
        log(f"{out}: the run is complete after {plural(training.steps, 'step')}; give more --passes to continue")
    code = train(training, args.json, checkpoints)
    lam = np.asarray(training.params)
    if not is_first:
        return code
    model = saved_model(training, stored, lam)
    saved_models.save_model(out, model)
    if args.json:
        latest = training.history[-1] if training.history else {}
        quality = model.quality.summary() if model.quality else {}
        emit({"event": event_of(code), "model": str(out)} | latest | {"step": training.step} | quality)
    else:
        print_topics(model, _WORDS_SHOWN, _TOPICS_SHOWN)
        print(f"model: {out}")
        if code != INTERRUPTED:
            print(f"next: smoothgrad report {out}")
    if code == INTERRUPTED:
        log(
            f"interrupted at step {training.step:,} of {training.steps:,}; repeat the command with --resume to continue"
        )
    return code


def _last_checkpoint(out: Path, checkpoints: Checkpoints, args: Namespace) -> Checkpoint | None:
    """Return the checkpoint to resume, or None for a new run; raise an error if that would overwrite files."""
    check_folder(out)
    if args.overwrite:
        if out.is_dir() and any(out.iterdir()) and not ((out / "model.json").exists() or checkpoints.folder.is_dir()):
            raise CommandError(f"{out}: is neither a model nor the folder of a run; --overwrite replaces only these")
        return None
    last = checkpoints.latest()
    if last and not args.resume:
        raise CommandError(f"{out}: contains a run; --resume continues it, --overwrite replaces it")
    # A run that was killed before its first checkpoint leaves only the folder of checkpoints.
    if not last and out.is_dir() and {path.name for path in out.iterdir()} - {"checkpoints"}:
        what = "contains no checkpoint to resume from" if args.resume else "is not empty"
        raise CommandError(f"{out}: {what}; give another folder, or --overwrite to replace a model")
    for problem in last.damaged if last else ():
        log(f"{problem}; resuming from an earlier checkpoint")
    if args.resume and not last:
        log(f"{out}: no checkpoint to resume from yet; starting a new run")
    return last
