"""``smoothgrad sweep``: compare the held-out curves of several windows on the same minibatches."""

import json
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from smoothgrad_jax.app import signals
from smoothgrad_jax.app.cli import given_settings
from smoothgrad_jax.app.commands.inputs import open_corpus, provenance
from smoothgrad_jax.app.commands.output import CommandError, check_folder, emit, event_of, log, size_of
from smoothgrad_jax.app.commands.training import new_run
from smoothgrad_jax.app.runs import Record, Run, record
from smoothgrad_jax.core.errors import OptionError
from smoothgrad_jax.data import folder_lock
from smoothgrad_jax.data.durable_files import replacing
from smoothgrad_jax.training.engines import NotFiniteError
from smoothgrad_jax.training.settings import Settings

Curves = dict[str, list[Record]]  # window -> scores


def run(args: Namespace) -> int:
    """Train one run per window; write and print the held-out curves."""
    out, given = Path(args.out), given_settings(args)
    if given.get("held_out") == 0:
        raise OptionError("held_out", "must be at least 1: a sweep compares held-out scores")
    each = [Settings(**given, window=window) for window in args.windows]
    check_folder(out)
    with folder_lock.locked(out):
        return _run(args, out, each)


def _run(args: Namespace, out: Path, each: Sequence[Settings]) -> int:
    if (out / "sweep.json").exists():
        raise CommandError(f"{out}: contains the curves of another sweep; give another folder")
    stored = open_corpus(args)
    settings = [one.resolve(stored.corpus.num_docs) for one in each]
    if not settings[0].held_out:
        raise OptionError("held_out", "must be at least 1: a sweep compares held-out scores")
    metadata = provenance(stored)
    runs = [new_run(stored, one, metadata) for one in settings]
    names = [str(window) for window in args.windows]
    log(f"{size_of(stored)}; {settings[0].topics} topics, windows {', '.join(names)}")
    shared = replace(settings[0], window=Settings().window).as_json() | metadata
    shared["windows"] = names
    del shared["window"]
    with signals.deferred():
        code = _train(runs, names, args.json)
        curves = {name: one.history for name, one in zip(names, runs, strict=True)}
        with replacing(out / "sweep.json") as temporary:
            temporary.write_text(json.dumps({"settings": shared, "curves": curves}, indent=1))
    _summarise(out, curves, code, args.json)
    return code


def _train(runs: Sequence[Run], names: Sequence[str], as_json: bool) -> int:
    """Train all runs in lockstep, print one line per score, and return the exit code."""
    if not as_json:
        print("passes" + "".join(f"{f'L = {name}':>12}" for name in names))
    scores = [(report for report in run.reports() if report.score is not None) for run in runs]
    try:
        with signals.interruptible():
            for line in zip(*scores, strict=True):
                if as_json:
                    for name, report in zip(names, line, strict=True):
                        emit({"event": "score", "window": name, **record(report)})
                else:
                    print(f"{line[0].passes:6.2f}" + "".join(f"{each.score:12.4f}" for each in line), flush=True)
    except KeyboardInterrupt:
        return signals.exit_code()
    except NotFiniteError as error:
        log(str(error))
        return 1
    return 0


def _summarise(out: Path, curves: Curves, code: int, as_json: bool) -> None:
    """Report the best window at the last score that all runs have."""
    number = min(map(len, curves.values()))
    if not number:
        log("the sweep ended before its first score")
        return
    score, best = max((curve[number - 1]["score"], window) for window, curve in curves.items())
    picture = _draw(out / "sweep.png", curves)
    if as_json:
        emit({"event": event_of(code), "best_window": best, "score": score})
    else:
        print(f"best window at the end: L = {best}, {score:.4f} nats per word")
        print(f"curves: {out / 'sweep.json'}" + (f", {picture}" if picture else ""))


def _draw(path: Path, curves: Curves) -> Path | None:
    """Draw the held-out score against passes, one labelled line per window; None without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        log('install matplotlib for a picture of the curves: pip install "smoothgrad_jax[plot]"')
        return None
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for window, curve in curves.items():
        if curve:
            points: list[tuple[Any, Any]] = [(each["passes"], each["score"]) for each in curve]
            (line,) = axes.plot(*zip(*points, strict=True), marker=".", label=f"L = {window}")
            axes.annotate(f" L = {window}", points[-1], color=line.get_color(), va="center")
    axes.set_xlabel("effective passes")
    axes.set_ylabel("nats per held-out word")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.12)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path
