"""What a run shows while it works: one live bar on a terminal, a line now and then in a log."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

_LOG_EVERY = 5.0  # seconds between two lines of a log


def watch(reports: Iterable[Any], *, steps: int, stream: TextIO | None = None, label: str = "fit") -> Iterator[Any]:
    """Pass on the reports of a run, and show them.

    Args:
      reports: A :class:`smoothgrad_jax.Training`, or any iterable of :class:`smoothgrad_jax.Progress`.
      steps: The number of the last step.
      stream: Where to; by default the standard error. A terminal gets a bar, if tqdm is installed, anything else a line
        every five seconds and one for every score.
      label: What stands in front.

    Yields:
      The reports.
    """
    stream = stream or sys.stderr
    show, close = _bar(steps, stream, label) if stream.isatty() else _log(steps, stream, label)
    try:
        for report in reports:
            show(report)
            yield report
    finally:
        close()


def describe(report: Any, score: float | None = None) -> str:
    """A report in a few words: passes, rate, score, time left."""
    score = report.score if report.score is not None else score
    parts = [f"{report.passes:.2f} passes", f"{report.rate:,.0f} documents/s"]
    parts += [f"held-out {score:.4f}"] if score is not None else []
    parts += [f"{_clock(report.remaining)} left"] if report.remaining else []
    return ", ".join(parts)


def _bar(steps, stream, label):
    try:
        from tqdm import tqdm
    except ImportError:
        return _log(steps, stream, label)
    bar = tqdm(total=steps, file=stream, desc=label, bar_format="{desc} {percentage:3.0f}%|{bar}| {postfix}")
    known = None

    def show(report):
        nonlocal known
        known = report.score if report.score is not None else known
        bar.n = min(report.step, steps)
        bar.set_postfix_str(describe(report, known))

    return show, bar.close


def _log(steps, stream, label):
    last = -_LOG_EVERY

    def show(report):
        nonlocal last
        now = time.monotonic()
        if report.score is not None or report.step >= steps or now - last >= _LOG_EVERY:
            last = now
            print(f"{label} step {report.step:,} of {steps:,}: {describe(report)}", file=stream, flush=True)

    return show, lambda: None


def _clock(seconds):
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
