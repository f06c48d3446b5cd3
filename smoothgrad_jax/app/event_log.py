"""Structured log of a command: JSON lines, one object per event, for programs that watch many runs.

    with writing("runs.jsonl"):
        event("start", topics=20)  # {"time": "2026-01-31T12:00:00.000+00:00", "level": "info", "event": "start", …}

Events are records of the standard logger ``smoothgrad_jax``. Other handlers of that logger receive them too: a program
that calls the package can route them with :mod:`logging`.

| key       | content                                                                  |
|-----------|--------------------------------------------------------------------------|
| ``time``  | ISO 8601, UTC, milliseconds                                              |
| ``level`` | ``info``, ``warning`` or ``error``                                       |
| ``event`` | name of the event                                                        |
| others    | fields of the event, as JSON values; ∞ and NaN are null                  |
"""

import json
import logging
import math
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from typing import Any, TextIO, TypeAlias

Field: TypeAlias = Any  # a value that JSON can represent, or a number that is not finite

_LOGGER = logging.getLogger("smoothgrad_jax")
_LOGGER.addHandler(logging.NullHandler())  # without it Python would print warnings to standard error


def event(name: str, /, level: int = logging.INFO, **fields: Field) -> None:
    """Log an event at a level of :mod:`logging`."""
    if _LOGGER.isEnabledFor(level):
        _LOGGER.log(level, name, extra={"fields": fields})


@contextmanager
def writing(path: str | os.PathLike | None) -> Iterator[None]:
    """Append the events of the block to a file, if any, one flushed line per event: a killed process loses none.

    If the file can no longer be written, for example on a full disk, the block continues without it.
    """
    if path is None:
        yield
        return
    with ExitStack() as stack:
        try:
            file = stack.enter_context(open(path, "a", encoding="utf-8", buffering=1))
        except OSError as error:
            raise OSError(f"{path}: the log cannot be written: {error.strerror}; give another file") from error
        handler = _JsonLines(file)
        stack.callback(_LOGGER.setLevel, _LOGGER.level)
        stack.callback(_LOGGER.removeHandler, handler)
        _LOGGER.addHandler(handler)
        _LOGGER.setLevel(logging.INFO)
        try:
            yield
        except BaseException as error:
            event("error", level=logging.ERROR, message=repr(error))
            raise


def finite(value: Field) -> Field:
    """Return a value as strict JSON has it: None for ∞ and NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


class _JsonLines(logging.Handler):
    def __init__(self, file: TextIO) -> None:
        super().__init__()
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record as one line of JSON."""
        fields = getattr(record, "fields", {})
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        head = {"time": time, "level": record.levelname.lower(), "event": record.getMessage()}
        line = json.dumps(head | {name: finite(value) for name, value in fields.items()}, default=str)
        try:
            self._file.write(f"{line}\n")
        except OSError as error:
            _LOGGER.removeHandler(self)
            print(f"{self._file.name}: the log ends here: {error.strerror}", file=sys.stderr, flush=True)
