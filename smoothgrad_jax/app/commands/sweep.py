"""``smoothgrad sweep``: train every number of topics with every window and several seeds, and recommend one.

| file in OUT                       | content                                                                       |
|-----------------------------------|-------------------------------------------------------------------------------|
| ``runs/K20-L10-seed0/``           | the folder of a run: its model, once it is finished, and ``metrics.jsonl``;   |
|                                   | ``checkpoints/`` until then                                                   |
| ``sweep.json``                    | a list with one flat object per finished run, for ``pandas.read_json``        |
| ``sweep.png``                     | the picture, with matplotlib                                                  |

The runs of a seed start from the same settings, hold out the same documents and draw the same minibatches. They are
independent: a finished run is the same as that of ``smoothgrad fit``, and its model can be used like any other.
"""

import itertools
import json
import logging
import sys
import time
from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from smoothgrad_jax.app import runs, saved_models, signals
from smoothgrad_jax.app.cli import given_settings
from smoothgrad_jax.app.commands.inputs import open_corpus, provenance
from smoothgrad_jax.app.commands.output import (
    FEW_USED,
    CommandError,
    emit,
    event_of,
    log,
    output_folder,
    size_of,
)
from smoothgrad_jax.app.commands.parallel_runs import Message, RunTask, Started, train_runs
from smoothgrad_jax.app.commands.sweep_estimate import Estimate, check_disk, estimate
from smoothgrad_jax.app.commands.sweep_picture import Curve, draw
from smoothgrad_jax.app.configuration_choice import Choice, Configuration, choose
from smoothgrad_jax.app.event_log import event
from smoothgrad_jax.app.progress import clock
from smoothgrad_jax.app.saved_models import SavedModel
from smoothgrad_jax.app.settings import DEFAULTS, Settings
from smoothgrad_jax.core.errors import OptionError
from smoothgrad_jax.data.corpus_folder import CountedCorpus
from smoothgrad_jax.data.durable_files import replacing
from smoothgrad_jax.data.errors import plural
from smoothgrad_jax.models.topic_quality import match_topics
from smoothgrad_jax.training.driver import Progress
from smoothgrad_jax.training.engines import NotFiniteError

_TOPICS = (20, 50, 100, 200)
_MEASURES = ("score", "npmi", "diversity", "effective_topics", "stability", "seconds")

Row = dict[str, Any]  # of `sweep.json`


def run(args: Namespace) -> int:
    """Train the runs that are not finished; write and print the results and a recommendation."""
    out, grid = Path(args.out), _grid(args)
    with output_folder(out) as names:
        _check_out(out, names, args.resume)
        return _run(args, out, grid)


def _run(args: Namespace, out: Path, grid: Sequence[Settings]) -> int:
    stored = open_corpus(args)
    metadata = provenance(stored)
    tasks = [_task(out, settings.resolve(stored.corpus.num_docs)) for settings in grid]
    if not tasks[0].settings.held_out:
        raise OptionError("held_out", "must be at least 1: a sweep compares held-out scores")
    waiting = [task for task in tasks if not _is_finished(task, metadata)]
    waiting.sort(key=lambda task: -task.settings.topics)  # the longest first: no core waits for one at the end
    log(f"{size_of(stored)}; {plural(len(tasks), 'run')}, {len(tasks) - len(waiting)} finished")
    code = _train(waiting, stored, metadata, args) if waiting else 0
    results = _results(out, tasks, args.seeds)
    if results.rows:
        with replacing(out / "sweep.json") as temporary:
            temporary.write_text(json.dumps(results.rows, indent=1))
    picture = draw(out / "sweep.png", results.rows, results.curves, results.headline) if results.rows else None
    summary = {"finished": len(results.rows), "runs": len(tasks), **results.as_json()}
    event(event_of(code), level=logging.INFO if code == 0 else logging.WARNING, **summary)
    if args.json:
        emit({"event": event_of(code)} | summary)
    elif results.rows:
        with signals.dropping_closed_output():
            _print(results, out, picture)
    if code:
        done = f"{len(results.rows)} of {plural(len(tasks), 'run')} finished"
        log(f"{event_of(code)}: {done}; repeat the command with --resume to continue")
    return code


class Results(NamedTuple):
    """The finished runs of a sweep."""

    rows: list[Row]  # one per run
    curves: list[Curve]  # of the first run of each configuration
    choice: Choice | None  # the recommended configuration; None if no configuration has all its seeds
    name: str  # of the recommended configuration
    model: str  # the folder of its model whose topics are most similar to those of the other seeds
    notes: list[str]  # what limits the recommendation

    @property
    def headline(self) -> str:
        """The recommendation as one line."""
        return f"recommended: {self.name} — {self.choice.reason}" if self.choice else self.name

    def as_json(self) -> dict[str, Any]:
        """Return the recommendation as JSON can represent it."""
        if self.choice is None:
            return {"recommended": None}
        topics, window = (next(row[key] for row in self.rows if row["recommended"]) for key in ("topics", "window"))
        recommended = {"topics": topics, "window": window, "model": self.model}
        return {"recommended": recommended, "reason": self.choice.reason, "notes": self.notes}


def _grid(args: Namespace) -> list[Settings]:
    """Return the settings of all runs: topics × windows × seeds."""
    given = {name: value for name, value in given_settings(args).items() if name != "topics"}
    if given.get("held_out") == 0:
        raise OptionError("held_out", "must be at least 1: a sweep compares held-out scores")
    topics = args.topics or (_TOPICS if args.windows is None else (DEFAULTS.topics,))
    first = given.pop("seed", DEFAULTS.seed)
    combinations = itertools.product(sorted(topics), args.windows or (DEFAULTS.window,), range(args.seeds))
    return [Settings(**given, topics=K, window=L, seed=first + s) for K, L, s in combinations]


def _task(out: Path, settings: Settings) -> RunTask:
    window = str(settings.window).replace(":", "-")
    return RunTask(settings, out / "runs" / f"K{settings.topics}-L{window}-seed{settings.seed}")


def _check_out(out: Path, names: Collection[str], resume: bool) -> None:
    """Raise an error if a sweep would overwrite files."""
    if not names:
        if resume:
            log(f"{out}: no run to resume from yet; starting a new sweep")
    elif not (out / "runs").is_dir():
        raise CommandError(f"{out}: is neither empty nor the folder of a sweep; give another folder")
    elif not resume:
        raise CommandError(f"{out}: contains a sweep; --resume continues it, also with more topics, windows or seeds")


def _is_finished(task: RunTask, metadata: Mapping[str, Any]) -> bool:
    """Return whether a run has a model; raise an error if it was made with other settings."""
    if not (task.folder / "model.json").exists():
        return False
    stored = saved_models.load_model(task.folder).settings
    runs.check_same_run(stored, task.settings, metadata)
    if (passes := stored.get("passes")) != task.settings.passes:
        problem = f"was {passes} in {task.folder}, and is {task.settings.passes} now"
        raise OptionError("passes", f"{problem}; all runs of a sweep have the same length: give another folder")
    return True


def _train(tasks: Sequence[RunTask], stored: CountedCorpus, metadata: dict[str, Any], args: Namespace) -> int:
    """Train runs, after an estimate of time and memory; return the exit code."""
    try:
        expected = estimate(tasks, stored, metadata, args.jobs)
        log(expected.describe())
        check_disk(Path(args.out), expected.disk)
        event("start", runs=len(tasks), **expected._asdict())
        if args.json:
            emit({"event": "start", "runs": len(tasks), **expected._asdict()})
        tasks = [task._replace(settings=replace(task.settings, threads=expected.threads)) for task in tasks]
        watcher = _Watcher(tasks, expected, args.json)
        try:
            train_runs(tasks, stored, metadata, jobs=expected.jobs, notify=watcher.notify)
        finally:
            watcher.close()
    except KeyboardInterrupt:
        return signals.exit_code()
    except NotFiniteError as error:  # during the measurement
        log(str(error))
        return 1
    return 1 if watcher.failed else 0


class _Watcher:
    """Displays the messages of the runs: a line per finished run, and on a terminal a line of progress."""

    def __init__(self, tasks: Sequence[RunTask], expected: Estimate, as_json: bool) -> None:
        self._tasks, self._expected, self._as_json = tasks, expected, as_json
        self._fraction = [0.0] * len(tasks)
        self._started: dict[int, tuple[float, float, int]] = {}  # time, fraction of the checkpoint, steps
        self._seconds: dict[int, list[float]] = {}  # per complete run with K topics
        self._ended, self._is_live = 0, sys.stderr.isatty() and not as_json
        self.failed = False

    def notify(self, number: int, message: Message) -> None:
        """Display a message."""
        settings, name = self._tasks[number].settings, self._tasks[number].folder.name
        if isinstance(message, Started):
            self._fraction[number] = message.step / message.steps
            self._started[number] = time.perf_counter(), self._fraction[number], message.steps
        elif isinstance(message, Progress):
            self._fraction[number] = min(1, message.step / self._started[number][2])
            if self._as_json and message.score is not None:
                emit({"event": "score", "run": name, **_configuration(settings), **runs.record(message)})
        elif message.is_complete:
            started, skipped, _ = self._started[number]
            elapsed = time.perf_counter() - started
            self._fraction[number] = 1.0
            if skipped < 0.5:  # the rest of a resumed run says little about the time of a complete one
                self._seconds.setdefault(settings.topics, []).append(elapsed / (1 - skipped))
            self._line(f"{name}: {elapsed:.0f} s", "run", run=name, seconds=elapsed)
        elif message.error is not None:
            self.failed, self._fraction[number] = True, 1.0
            self._line(f"{name} failed: {message.error}", "run failed", run=name, message=message.error)
        if self._is_live:
            print(f"\r{self._status():70}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Remove the line of progress."""
        if self._is_live:
            print(f"\r{'':70}\r", end="", file=sys.stderr, flush=True)

    def _line(self, text: str, kind: str, **fields: Any) -> None:
        self._ended += 1
        line = f"{self._ended} of {plural(len(self._tasks), 'run')} ended: {text}; {self._status()}"
        with signals.dropping_closed_output():
            print(f"\r{line:70}" if self._is_live else line, file=sys.stderr, flush=True)
        event(kind, **fields)
        if self._as_json:
            emit({"event": kind, **fields})

    def _status(self) -> str:
        """Return the estimated time that is left."""
        left = 0.0
        for task, fraction in zip(self._tasks, self._fraction, strict=True):
            measured = self._seconds.get(task.settings.topics)
            left += (1 - fraction) * (sum(measured) / len(measured) if measured else self._expected.seconds_per_run)
        return f"about {clock(left / self._expected.jobs)} left" if left else "none left"


def _configuration(settings: Settings) -> dict[str, Any]:
    return {"topics": settings.topics, "window": str(settings.window), "seed": settings.seed}


def _results(out: Path, tasks: Sequence[RunTask], seeds: int) -> Results:
    """Measure the finished runs, and choose a configuration of those with all seeds."""
    rows: list[Row] = []
    curves, configurations = [], []
    several = len({str(task.settings.window) for task in tasks}) > 1
    for _, group in itertools.groupby(tasks, key=lambda task: (task.settings.topics, str(task.settings.window))):
        found = [task for task in group if (task.folder / "model.json").exists()]
        models = [saved_models.load_model(task.folder) for task in found]
        if not found:
            continue
        stability = _stability(models)
        new = [_row(out, *each) for each in zip(found, models, stability, strict=True)]
        rows += new
        name = f"K = {new[0]['topics']}" + (f" (L = {new[0]['window']})" if several else "")
        curves.append(Curve(name, [(each["passes"], each["score"]) for each in models[0].history]))
        if len(new) == seeds:
            scores, npmi = (np.array([row[key] for row in new]) for key in ("score", "npmi"))
            configurations.append((Configuration(new[0]["topics"], name, scores, npmi), new))
    if not configurations:
        return Results(rows, curves, None, "no configuration has a result for each seed yet", "", [])
    choice = choose([each for each, _ in configurations])
    configuration, chosen = configurations[choice.number]
    for row in chosen:
        row["recommended"] = True
    used = float(np.mean([row["effective_topics"] for row in chosen]))
    notes = list(choice.notes)
    if len(rows) < len(tasks):
        notes.append(f"{len(tasks) - len(rows)} of {plural(len(tasks), 'run')} are missing")
    if used < FEW_USED * configuration.topics:
        notes.append(f"in effect, only {used:.0f} of the {configuration.topics} topics are used")
    # Seeds hold out different documents, so that their scores do not tell which model is better.
    typical = max(chosen, key=lambda row: row["stability"] or 0)
    return Results(rows, curves, choice, configuration.name, str(out / typical["model"]), notes)


def _row(out: Path, task: RunTask, model: SavedModel, stability: float | None) -> Row:
    last, quality = model.history[-1], model.quality
    assert quality is not None, "the model of a run stores its quality"
    return {
        **_configuration(task.settings),
        "score": last["score"],
        **quality.summary(),
        "stability": stability,
        **{name: last[name] for name in ("seconds", "passes", "step")},
        "model": str(task.folder.relative_to(out)),
        "recommended": False,
    }


def _stability(models: Sequence[SavedModel]) -> list[float | None]:
    """Return, for each of several seeds, the mean similarity of its topics to the matched topics of the others."""
    if len(models) < 2:
        return [None] * len(models)
    similarity = np.zeros((len(models), len(models)))
    for i, j in itertools.combinations(range(len(models)), 2):
        similarity[i, j] = similarity[j, i] = match_topics(models[i].lam, models[j].lam).similarity.mean()
    return (similarity.sum(1) / (len(models) - 1)).tolist()


def _print(results: Results, out: Path, picture: Path | None) -> None:
    """Print the mean over seeds per configuration, and the recommendation."""
    print(" topics  window   seeds   score    NPMI  diversity  effective topics  stability  seconds")
    for (topics, window), group in itertools.groupby(results.rows, key=lambda row: (row["topics"], row["window"])):
        rows = list(group)
        score, npmi, diversity, used, stability, seconds = (
            None if rows[0][name] is None else float(np.mean([row[name] for row in rows])) for name in _MEASURES
        )
        mark = "*" if rows[0]["recommended"] else " "
        stable = "-" if stability is None else f"{stability:.2f}"
        print(
            f"{mark}{topics:6d}  {window:>6}  {len(rows):6d}  {score:6.3f}  {npmi:6.3f}  {diversity:9.2f}  {used:16.1f}"
            f"  {stable:>9}  {seconds:7.1f}"
        )
    print(results.headline)
    for note in results.notes:
        print(f"note: {note}")
    print(f"results: {out / 'sweep.json'}" + (f", {picture}" if picture else ""))
    if results.model:
        print(f"next: smoothgrad topics {results.model}")
