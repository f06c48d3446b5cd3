"""``smoothgrad fit``: train a model on a corpus, with checkpoints, in one process or in several.

With ``--distributed`` every process runs this command on the same files. Process 0 prints, and saves the model.
"""

import logging
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from smoothgrad_jax.app import runs, saved_models, signals
from smoothgrad_jax.app.cli import given_settings
from smoothgrad_jax.app.commands import metrics
from smoothgrad_jax.app.commands.inputs import open_corpus, provenance, word_options
from smoothgrad_jax.app.commands.output import (
    CommandError,
    check_folder,
    emit,
    event_of,
    log,
    output_folder,
    print_topics,
    size_of,
)
from smoothgrad_jax.app.commands.training import check_space, new_run, saved_model, train
from smoothgrad_jax.app.event_log import event
from smoothgrad_jax.app.settings import Settings
from smoothgrad_jax.core.errors import OptionError
from smoothgrad_jax.data import folder_lock
from smoothgrad_jax.data.durable_files import LoadError, SumCheck
from smoothgrad_jax.data.errors import plural
from smoothgrad_jax.training import distributed
from smoothgrad_jax.training.checkpoints import Checkpoint, Checkpoints

_TOPICS_SHOWN, _WORDS_SHOWN = 20, 10


def run(args: Namespace) -> int:
    """Train, save the model, and print its topics."""
    if args.distributed:
        return _run_in_several_processes(args)
    if args.messages:
        raise OptionError("messages", "has no effect without --distributed")
    with output_folder(Path(args.out)):
        return _run(args)


def _run_in_several_processes(args: Namespace) -> int:
    if args.log_json:
        raise OptionError("log_json", "cannot be used with --distributed: every process would write it")
    check_folder(Path(args.out))
    if distributed.start(devices=args.threads or 1) == 1:
        print("one process trains: no launcher has started others", file=sys.stderr)
    is_first = jax.process_index() == 0
    try:
        with nullcontext() if is_first else _quiet(), folder_lock.locked(args.out) if is_first else nullcontext():
            distributed.wait_for_all()  # the folder exists
            code = _run(args, distributed.mesh())
            distributed.wait_for_all()  # the model is saved
            return code
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        raise CommandError(f"process {jax.process_index()}: the exchange with the others failed: {reason}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Print nothing; an error that leaves the block is printed."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def _run(args: Namespace, mesh: Mesh | None = None) -> int:
    out, given = Path(args.out), given_settings(args)
    checkpoints = Checkpoints(out / "checkpoints")
    last = _last_checkpoint(out, checkpoints, args)
    earlier = last.settings if last else {}
    if last:
        runs.check_settings(earlier, given)
    settings = Settings.from_json(runs.stored_settings(last).as_json() if last else {}, **given)
    stored = open_corpus(args, last)
    files = stored.manifest.get("files")  # of a corpus folder, which are checked while the run reads them
    sums = SumCheck(args.inputs[0], files) if files else None
    settings = settings.resolve(stored.corpus.num_docs)
    chosen = word_options(args)
    if not chosen.keys() - {"tokenizer"}:  # a tokenizer is given again to resume; see `open_corpus`
        chosen = {**earlier.get("word_options", {}), **chosen}
    metadata = provenance(stored) | ({"word_options": chosen} if chosen else {})
    if last:
        runs.check_same_run(last.settings, settings, metadata)
    is_first = mesh is None or jax.process_index() == 0
    if mesh is not None:
        facts = {"messages": args.messages, "checkpoint": last.step if last else None}
        distributed.check_same(settings.as_json() | metadata | facts)
    training = new_run(stored, settings, metadata, last, mesh, args.messages)
    labels = _earlier_labels(out, settings, metadata) if last else None
    log(f"{size_of(stored)}; {settings.topics} topics, window {settings.window}")
    if args.overwrite and is_first:
        checkpoints.clear()
        (out / "report.html").unlink(missing_ok=True)  # it describes the model that is replaced
    if last and training.step >= training.steps:
        log(f"{out}: the run is complete after {plural(training.steps, 'step')}; give more --passes to continue")
    event("start", step=training.step, steps=training.steps, model=str(out), settings=training.settings_json())
    check_space(training, stored.corpus, checkpoints)
    with signals.deferred():
        code = train(training, args.json, checkpoints, out / metrics.FILE_NAME if is_first else None, sums)
        lam = np.asarray(training.params)  # of all processes
        if not is_first:
            return code
        model = saved_model(training, stored, lam)._replace(labels=labels)
        saved_models.save_model(out, model)
    latest = training.history[-1] if training.history else {}
    quality = model.quality.summary() if model.quality else {}
    summary = {"model": str(out)} | latest | {"step": training.step} | quality
    event(event_of(code), level=logging.INFO if code == 0 else logging.WARNING, **summary)
    if args.json:
        emit({"event": event_of(code)} | summary)
    else:
        with signals.dropping_closed_output():
            print_topics(model, _WORDS_SHOWN, _TOPICS_SHOWN)
            print(f"model: {out}")
            if code < 128:
                print(f"next: smoothgrad report {out}")
    if code > 128:
        log(
            f"interrupted at step {training.step:,} of {training.steps:,}; repeat the command with --resume to continue"
        )
    return code


def _earlier_labels(out: Path, settings: Settings, metadata: Mapping[str, Any]) -> dict[int, str] | None:
    """Return the labels of the model that a resumed run replaces; None if it is damaged, or not of the same run."""
    if not (out / "model.json").exists():
        return None
    try:
        model = saved_models.load_model(out)
        if model.labels:  # `--overwrite` leaves another model in place until it has one to replace it
            runs.check_same_run(model.settings, settings, metadata)
        return model.labels
    except (LoadError, OptionError) as error:
        log(f"{out}: labels of the earlier model are lost: {error}")
        return None


def _last_checkpoint(out: Path, checkpoints: Checkpoints, args: Namespace) -> Checkpoint | None:
    """Return the checkpoint to resume, or None for a new run; raise an error if that would overwrite files."""
    check_folder(checkpoints.folder)
    names = {path.name for path in out.iterdir()} - {folder_lock.NAME}
    if args.overwrite:
        if names and not ((out / "model.json").exists() or checkpoints.folder.is_dir()):
            raise CommandError(f"{out}: is neither a model nor the folder of a run; --overwrite replaces only these")
        return None
    last = checkpoints.latest()
    if last and not args.resume:
        raise CommandError(f"{out}: contains a run; --resume continues it, --overwrite replaces it")
    # A run that was killed before its first checkpoint leaves only the folder of checkpoints and the metrics.
    if not last and names - {"checkpoints", metrics.FILE_NAME}:
        what = "contains no checkpoint to resume from" if args.resume else "is not empty"
        raise CommandError(f"{out}: {what}; give another folder, or --overwrite to replace a model")
    for problem in last.damaged if last else ():
        log(f"{problem}; resuming from an earlier checkpoint")
    if args.resume and not last:
        log(f"{out}: no checkpoint to resume from yet; starting a new run")
    return last
