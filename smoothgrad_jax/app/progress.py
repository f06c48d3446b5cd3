"""Display of the progress of a run: a bar on a terminal, otherwise lines of a log."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TextIO, TypeAlias

from smoothgrad_jax.app import signals
from smoothgrad_jax.training.driver import Progress

_LOG_EVERY = 5.0  # seconds between two lines of a log

Display: TypeAlias = tuple[Callable[[Progress], None], Callable[[], None]]  # show a report, close the display


def watch(reports: Iterable[Progress], *, steps: int, stream: TextIO | None = None) -> Iterator[Progress]:
    """Display the reports of a run of so many steps, and yield them.

    The stream is the standard error by default. A terminal shows a bar if tqdm is installed. Any other stream gets one
    line every five seconds and one line per score.
    """
    stream = stream or sys.stderr
    show, close = _bar(steps, stream) if stream.isatty() else _log(steps, stream)
    try:
        for report in reports:
            show(report)
            yield report
    finally:
        close()


def describe(report: Progress, score: float | None = None) -> str:
    """Return passes, rate, score and remaining time as text; ``score`` replaces a missing score."""
    score = report.score if report.score is not None else score
    parts = [f"{report.passes:.2f} passes", f"{report.rate:,.0f} documents/s"]
    parts += [f"held-out {score:.4f}"] if score is not None else []
    parts += [f"{clock(report.remaining)} left"] if report.remaining else []
    return ", ".join(parts)


def _bar(steps: int, stream: TextIO) -> Display:
    try:
        from tqdm import tqdm
    except ImportError:
        return _log(steps, stream)
    bar = tqdm(total=steps, file=stream, bar_format="fit {percentage:3.0f}%|{bar}| {postfix}")
    last_score: float | None = None

    def show(report: Progress) -> None:
        nonlocal last_score
        last_score = report.score if report.score is not None else last_score
        bar.n = min(report.step, steps)
        bar.set_postfix_str(describe(report, last_score))

    return show, bar.close


def _log(steps: int, stream: TextIO) -> Display:
    last = -_LOG_EVERY

    def show(report: Progress) -> None:
        nonlocal last
        now = time.monotonic()
        if report.score is not None or report.step >= steps or now - last >= _LOG_EVERY:
            last = now
            with signals.dropping_closed_output():
                print(f"fit step {report.step:,} of {steps:,}: {describe(report)}", file=stream, flush=True)

    return show, lambda: None


def clock(duration: float) -> str:
    """Return seconds as ``minutes:seconds``, or ``hours:minutes:seconds``."""
    minutes, seconds = divmod(round(duration), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
