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
from smoothgrad_jax.core._threads import num_cores
from smoothgrad_jax.core.svi import free_memory
from smoothgrad_jax.data.corpus_folder import CountedCorpus

_SECONDS = 1.0  # of training that are measured, after the steps that compile
_KEPT_CHECKPOINTS = 3  # of a run in progress: two, and the one that is being written


class Estimate(NamedTuple):
    """What a sweep needs; made by :func:`estimate`.

    Attributes:
      jobs: Runs at a time.
      threads: Threads per run; None for the default of a run.
      seconds: An upper estimate of the time in total, because a run with fewer topics takes less.
      seconds_per_run: That of one run.
      memory: Bytes per process; None where the system does not tell.
      state: Bytes of the state of the largest run, which its process and its checkpoints contain.
      disk: Bytes of the models, and of the checkpoints of the runs in progress.
    """

    jobs: int
    threads: int | None
    seconds: float
    seconds_per_run: float
    memory: int | None
    state: int
    disk: int

    def describe(self) -> str:
        """Return the estimate as one line."""
        memory = "" if self.memory is None else f", {_size(self.memory)} of memory per process"
        return (
            f"estimate from a measurement of {_SECONDS:.0f} s: at most about {clock(self.seconds)} with "
            f"{self.jobs} run{'s' if self.jobs > 1 else ''} at a time{memory} (training state {_size(self.state)}), "
            f"{_size(self.disk)} on disk"
        )


def estimate(
    tasks: Sequence[RunTask], stored: CountedCorpus, metadata: dict[str, Any], jobs: int | None = None
) -> Estimate:
    """Train the first run for a moment, and return what all runs need.

    Args:
      tasks: The runs; the first one is the largest.
      stored: The corpus.
      metadata: As in :func:`smoothgrad_jax.app.commands.training.new_run`.
      jobs: Runs at a time; by default one per core, or per ``threads`` cores, as far as the memory suffices.
    """
    settings = tasks[0].settings
    cores = num_cores() if jax.default_backend() == "cpu" else 1
    most = min(jobs or max(1, cores // (settings.threads or 1)), len(tasks))
    threads = settings.threads or (max(1, cores // most) if most > 1 else None)
    started = time.perf_counter()
    run = new_run(stored, replace(settings, threads=threads), metadata)
    state = sum(leaf.nbytes for leaf in jax.tree.leaves(run.state))
    begun, compiled, seen, passes = time.perf_counter(), 0.0, 0, 0.0
    for report in run.reports():
        now = time.perf_counter()
        if not compiled:  # the first report includes the time of compilation
            begun, compiled, seen = now, now - started, report.documents
        passes = report.passes
        if now - begun >= _SECONDS:
            break
    elapsed, documents = time.perf_counter() - begun, report.documents - seen
    total = report.documents / passes * (settings.passes or 1)
    seconds_per_run = compiled + (elapsed / documents * total if documents else 0)
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


def check_disk(out: Path, need: int) -> None:
    """Raise an error if the disk of a folder has less space than needed."""
    free = shutil.disk_usage(next(each for each in (out, *out.absolute().parents) if each.exists())).free
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
