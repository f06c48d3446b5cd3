"""Independent runs on one corpus, several at a time, each in a process of its own.

    train_runs(tasks, stored, metadata, jobs=4, notify=lambda number, message: …)

A worker process trains one run after the other: it writes checkpoints and metrics to the folder of the run, saves the
model there at the end, and removes the checkpoints. So a run is finished if and only if its folder has a model; an
unfinished one continues from its checkpoint.

The caller and a worker exchange messages through a pipe. A worker stops after the step in progress, and writes a
checkpoint, if it receives anything during a run, or if the caller has died. It blocks the signals of Ctrl-C and of
schedulers, which the caller handles.
"""

import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from smoothgrad_jax.app import runs, saved_models
from smoothgrad_jax.app.commands import metrics
from smoothgrad_jax.app.commands.training import new_run, saved_model
from smoothgrad_jax.app.program_cache import stored_programs
from smoothgrad_jax.app.settings import Settings
from smoothgrad_jax.data import corpus_folder
from smoothgrad_jax.data.corpus_folder import CountedCorpus
from smoothgrad_jax.data.worker_processes import signals_blocked
from smoothgrad_jax.training.checkpoints import Checkpoints
from smoothgrad_jax.training.driver import Progress
from smoothgrad_jax.training.engines import NotFiniteError


class RunTask(NamedTuple):
    """A run: its resolved settings, and the folder of its model."""

    settings: Settings
    folder: Path


class Started(NamedTuple):
    """A message: a run has started."""

    step: int  # of the checkpoint from which it continues; 0 without one
    steps: int  # of the complete run


class Ended(NamedTuple):
    """A message: a run has ended."""

    is_complete: bool  # its model has been saved
    error: str | None = None  # why it is not complete; None if the run was stopped


Message: TypeAlias = Started | Progress | Ended
Notify: TypeAlias = Callable[[int, Message], None]  # number of the task, message


def train_runs(
    tasks: Sequence[RunTask], stored: CountedCorpus, metadata: Mapping[str, Any], *, jobs: int, notify: Notify
) -> None:
    """Train runs in ``jobs`` processes, or in this one if that is 1; a run that fails does not end the others.

    Raises:
      KeyboardInterrupt: After every run in progress has written a checkpoint.
    """
    if min(jobs, len(tasks)) > 1:
        indices = stored.corpus.indices
        # Processes map the files of a corpus folder into memory, instead of copying the arrays.
        data = Path(str(indices.filename)).parent if isinstance(indices, np.memmap) else stored
        _Workers(min(jobs, len(tasks)), data, metadata).train(tasks, notify)
        return
    for number, task in enumerate(tasks):
        ended = _train(stored, metadata, task, partial(notify, number))
        notify(number, ended)
        if not ended.is_complete and ended.error is None:
            raise KeyboardInterrupt


def _train(stored: CountedCorpus, metadata: Mapping[str, Any], task: RunTask, send: Callable[[Message], None]) -> Ended:
    """Train one run, from its last checkpoint if there is one, and save its model."""
    checkpoints, settings = Checkpoints(task.folder / "checkpoints"), task.settings
    try:
        last = checkpoints.latest()
        if last:
            runs.check_same_run(last.settings, settings, metadata)
            # The number of threads is that of the checkpoint's state.
            settings = replace(settings, threads=None)
        run = new_run(stored, settings, dict(metadata), last)
        send(Started(run.step, run.steps))

        def watch(reports: Iterator[Progress]) -> Iterator[Progress]:
            for report in metrics.recorded(reports, task.folder / metrics.FILE_NAME, run.step):
                send(report)
                yield report

        if not run.train(watch, checkpoints):
            return Ended(False)
        saved_models.save_model(task.folder, saved_model(run, stored))
        checkpoints.clear()
        with contextlib.suppress(OSError):
            checkpoints.folder.rmdir()
    except (NotFiniteError, ValueError, OSError, MemoryError) as error:  # ValueError includes LoadError, OptionError
        return Ended(False, str(error) or type(error).__name__)
    return Ended(True)


class _Workers:
    """Worker processes, each with the number of the task that it trains."""

    def __init__(self, number: int, data: CountedCorpus | Path, metadata: Mapping[str, Any]) -> None:
        self._number, self._data, self._metadata = number, data, metadata
        self._processes: dict[Connection, BaseProcess] = {}
        self._task_of: dict[Connection, int] = {}

    def train(self, tasks: Sequence[RunTask], notify: Notify) -> None:
        waiting = iter(enumerate(tasks))
        try:
            for _ in range(self._number):
                self._give(self._start(), next(waiting, None))
            self._receive(notify, waiting)
            for number, _ in waiting:  # every process has died
                notify(number, Ended(False, "not started, because all processes ended unexpectedly"))
        except KeyboardInterrupt:
            for worker in list(self._task_of):
                with contextlib.suppress(OSError):
                    worker.send(None)
            self._receive(notify, iter(()))
            raise
        finally:
            for worker, process in self._processes.items():
                if worker in self._task_of:  # an error, or a second Ctrl-C: do not wait for its run
                    process.kill()
                worker.close()
                process.join()

    def _start(self) -> Connection:
        context = multiprocessing.get_context("spawn")  # jax does not survive a fork
        ours, theirs = context.Pipe()
        with signals_blocked():
            process = context.Process(target=_serve, args=(theirs, self._data, self._metadata))
            process.start()
        theirs.close()
        self._processes[ours] = process
        return ours

    def _give(self, worker: Connection, task: tuple[int, RunTask] | None) -> None:
        """Send a worker its next task, or let it end."""
        self._task_of.pop(worker, None)
        with contextlib.suppress(OSError):  # it has died: the next read says so
            worker.send(None if task is None else task[1])
        if task is not None:
            self._task_of[worker] = task[0]

    def _receive(self, notify: Notify, waiting: Iterator[tuple[int, RunTask]]) -> None:
        """Pass on messages and give out tasks until no worker has one."""
        while self._task_of:
            for ready in connection.wait(list(self._task_of)):
                assert isinstance(ready, Connection)
                number = self._task_of[ready]
                try:
                    message: Message = ready.recv()
                except (EOFError, OSError):
                    del self._task_of[ready]
                    self._processes[ready].join()
                    code = self._processes[ready].exitcode
                    reason = "out of memory?" if code == -signal.SIGKILL else "see the messages above"
                    message = Ended(False, f"its process ended with exit code {code} ({reason})")
                else:
                    if isinstance(message, Ended):
                        self._give(ready, next(waiting, None))
                notify(number, message)


def _serve(caller: Connection, data: CountedCorpus | Path, metadata: Mapping[str, Any]) -> None:
    """Train the runs that a caller sends."""

    def send(message: Message) -> None:
        try:
            caller.send(message)
            is_asked_to_stop = caller.poll()
        except OSError:  # the caller has died
            is_asked_to_stop = True
        if is_asked_to_stop:
            raise KeyboardInterrupt

    stored = corpus_folder.open_folder(data) if isinstance(data, Path) else data
    with stored_programs(), contextlib.suppress(EOFError, OSError):
        while (task := caller.recv()) is not None:
            try:
                ended = _train(stored, metadata, task, send)
            except KeyboardInterrupt:  # before the first step
                ended = Ended(False)
            caller.send(ended)
