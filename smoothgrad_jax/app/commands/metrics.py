"""Metrics of a run: ``MODEL/metrics.jsonl``, one JSON object per line, for ``pandas.read_json(path, lines=True)``.

| key         | meaning                                                                  |
|-------------|--------------------------------------------------------------------------|
| step        | steps since the start of the run                                         |
| documents   | documents seen since the start of the run                                |
| passes      | documents / D                                                            |
| seconds     | seconds of training, without scoring                                     |
| rate        | documents per second since the report before, which need not be a line   |
| score       | held-out score, nats per word; null where none was due                   |
| window      | L of the last step; null for ∞                                           |

The file has a line per held-out score, and one per five seconds otherwise. A resumed run continues it after the step of
its checkpoint: no step occurs twice, also after a kill.
"""

import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from smoothgrad_jax.app.commands.output import log
from smoothgrad_jax.app.event_log import event, finite
from smoothgrad_jax.data.durable_files import replacing
from smoothgrad_jax.training.driver import Progress

FILE_NAME = "metrics.jsonl"
_FIELDS = ("step", "documents", "passes", "seconds", "rate", "score", "window")
_EVERY = 5.0  # seconds between two lines without a score


def recorded(reports: Iterable[Progress], path: str | os.PathLike, first: int) -> Iterator[Progress]:
    """Append reports to a file of metrics and to the log of events, and yield them all.

    The folder of the file is created, and lines of steps after ``first``, where the run begins, are removed. A file
    that cannot be written is reported once; the run continues without it.
    """
    path, last, failed = Path(path), -_EVERY, False
    try:
        _truncate(path, first)
    except OSError as error:
        failed = True
        _complain(path, error)
    for report in reports:
        if report.score is not None or time.monotonic() - last >= _EVERY:
            last = time.monotonic()
            row = {name: finite(getattr(report, name)) for name in _FIELDS}
            event("progress", **row)
            try:
                if not failed:
                    with path.open("a") as file:
                        file.write(f"{json.dumps(row)}\n")
            except OSError as error:
                failed = True
                _complain(path, error)
        yield report


def _truncate(path: Path, first: int) -> None:
    """Keep the complete lines of a file up to a step; create its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        return
    kept = []
    for line in path.read_text(errors="replace").splitlines():
        row = _parsed(line)
        if row is None or row["step"] > first:
            break
        kept.append(f"{line}\n")
    with replacing(path) as temporary:
        temporary.write_text("".join(kept))


def _parsed(line: str) -> dict[str, Any] | None:
    """Return a line as an object with a step; None for a line that a killed process left incomplete."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _complain(path: Path, error: OSError) -> None:
    log(f"{path}: could not be written: {error.strerror or error}; the run continues without this file")
