"""Time and memory of a sweep, estimated before it starts from a short measurement of its largest run."""

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax

from smoothgrad_jax.app.commands.output import CommandError
from smoothgrad_jax.app.commands.parallel_runs import RunTask
from smoothgrad_jax.app.commands.training import new_run
from smoothgrad_jax.app.progress import clock
from smoothgrad_jax.app.runs import Run
from smoothgrad_jax.core._threads import num_cores
from smoothgrad_jax.core.svi import free_memory
from smoothgrad_jax.data.corpus_folder import CountedCorpus

_SECONDS = 1.0  # of training that are measured, after the steps that compile
_KEPT_CHECKPOINTS = 3  # of a run in progress: two, and the one that is being written


class Estimate(NamedTuple):
    """What a sweep needs, as if every run took as long as the largest one; made by :func:`estimate`."""

    jobs: int  # runs at a time
    threads: int | None  # per run; None for the default of a run
    seconds: float  # in total
    seconds_per_run: float
    memory: int | None  # bytes per process; None where the system does not tell
    state: int  # bytes of the training state of the largest run, and of one of its checkpoints, with a full window
    disk: int  # bytes of the models, and of the checkpoints of the runs in progress

    def describe(self) -> str:
        """Return the estimate as one line."""
        memory = "" if self.memory is None else f", {_size(self.memory)} of memory per process"
        return (
            f"estimate from a measurement of {_SECONDS:.0f} s: about {clock(self.seconds)} with "
            f"{self.jobs} run{'s' if self.jobs > 1 else ''} at a time{memory} (training state {_size(self.state)}), "
            f"{_size(self.disk)} on disk"
        )


def estimate(
    tasks: Sequence[RunTask], stored: CountedCorpus, metadata: dict[str, Any], jobs: int | None = None
) -> Estimate:
    """Train the first run, which is the largest, for a moment, and return what all runs need.

    By default there is one run at a time per core, or per ``threads`` cores, as far as the memory suffices.
    """
    settings = tasks[0].settings
    cores = num_cores() if jax.default_backend() == "cpu" else 1
    most = min(jobs or max(1, cores // (settings.threads or 1)), len(tasks))
    threads = settings.threads or (max(1, cores // most) if most > 1 else None)
    started = time.perf_counter()
    run = new_run(stored, replace(settings, threads=threads), metadata)
    state = run.checkpoint_bytes(stored.corpus)
    seconds_per_run = _seconds_per_run(run, started, settings.passes or 1)
    run.close()
    memory = _used_memory()
    free = free_memory()
    if not jobs and memory and free is not None:
        most = max(1, min(most, int(free // memory)))
    rounds = -(-len(tasks) // most)
    models = sum(task.settings.topics for task in tasks) * stored.corpus.num_words * 4
    return Estimate(
        jobs=most,
        threads=threads,
        seconds=seconds_per_run * rounds,
        seconds_per_run=seconds_per_run,
        memory=memory,
        state=state,
        disk=models + most * _KEPT_CHECKPOINTS * state,
    )


def _seconds_per_run(run: Run, started: float, passes: int) -> float:
    """Train a new run, whose preparation began at ``started``, for a moment; return the seconds of the complete run."""
    reports = run.reports()
    first = last = next(reports)  # the first steps compile
    while last.seconds - first.seconds < _SECONDS and (report := next(reports, None)):
        last = report
    seconds, documents = last.seconds - first.seconds, last.documents - first.documents
    # Compilation, also of the score, takes place once.
    once = time.perf_counter() - started - seconds
    total = last.documents / last.passes * passes
    return once + (seconds / documents * total if documents else 0)


def check_disk(out: Path, need: int) -> None:
    """Raise an error if the disk of a folder has less space than needed."""
    free = shutil.disk_usage(out).free
    if need > free:
        raise CommandError(
            f"{out}: the sweep needs {_size(need)} for models and checkpoints, and {_size(free)} are free; free some "
            "space, choose another folder, or sweep fewer topics or seeds"
        )


def _used_memory() -> int | None:
    """Return the bytes of memory that this process uses; None if the system does not tell."""
    path = Path("/proc/self/statm")
    return int(path.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if path.exists() else None


def _size(number: float) -> str:
    return f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{max(number / 1e6, 0.1):,.1f} MB"
