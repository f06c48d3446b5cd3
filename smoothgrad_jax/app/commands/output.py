"""Output that several commands share: messages, JSON lines, topics, and files with one row per document."""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from smoothgrad_jax.app.saved_models import SavedModel
from smoothgrad_jax.data.corpus_folder import Stored
from smoothgrad_jax.data.durable_files import replacing

INTERRUPTED = 130  # exit code
_FEW_WORDS = 0.05  # a topic with less than this fraction of the mean prevalence holds few words
_SUFFIXES = (".tsv", ".jsonl", ".npz")

WriteRows = Callable[[int, np.ndarray], None]


class CommandError(Exception):
    """A request that cannot be fulfilled, described in one line for the user."""


def say(line: str) -> None:
    """Write a message to the standard error."""
    print(line, file=sys.stderr, flush=True)


def emit(record: dict[str, Any]) -> None:
    """Write one JSON line to the standard output."""
    print(json.dumps(record), flush=True)


def event_of(code: int) -> str:
    """Return the name of the event that ends a run with this exit code."""
    return {0: "done", INTERRUPTED: "interrupted"}.get(code, "failed")


def size_of(stored: Stored) -> str:
    """Return the size of a corpus in words."""
    manifest = stored.manifest
    return (
        f"{manifest['num_docs']:,} documents, {manifest['num_words']:,} distinct words, "
        f"{manifest['num_tokens']:,.0f} words in total"
    )


def say_dropped(stored: Stored) -> None:
    """Report words of the text that are not in the vocabulary."""
    dropped = stored.manifest.get("dropped") or {}
    if not dropped.get("tokens_outside_vocabulary"):
        return
    empty = dropped.get("documents_that_lost_all_words", 0)
    say(
        f"ignoring {dropped['tokens_outside_vocabulary']:,} words of the text that are not in the vocabulary"
        + (f"; {empty:,} documents contain no other words" if empty else "")
    )


def print_topics(model: SavedModel, num_words: int, most: int | None = None, everything: bool = False) -> None:
    """Print the topics, largest first; topics that hold few words are only counted.

    Args:
      model: The model.
      num_words: Words per topic.
      most: Largest number of topics to print.
      everything: Print all topics.
    """
    prevalence, words = model.topic_proportions(), model.top_words(num_words)
    order = np.argsort(-prevalence, kind="stable").tolist()
    used = [k for k in order if everything or prevalence[k] >= _FEW_WORDS / len(order)]
    for k in used[:most]:
        print(f"{k:4d} {100 * prevalence[k]:5.1f} %  {' '.join(word for word, _ in words[k])}")
    if most is not None and len(used) > most:
        print(f"     … and {len(used) - most} smaller topics")
    if len(order) > len(used):
        print(f"     {len(order) - len(used)} of {len(order)} topics are nearly empty; fewer topics may be enough")


def check_output(out: str | None, suffixes: Sequence[str] = _SUFFIXES) -> None:
    """Refuse a file that could not be written, before anything is computed.

    Raises:
      CommandError: The suffix is unknown, or the folder is missing or not writable.
    """
    if out is None:
        return
    path = Path(out)
    if path.suffix not in suffixes:
        raise CommandError(f"{path}: expected a name that ends in {', '.join(suffixes[:-1])} or {suffixes[-1]}")
    check_folder_of(path)


def check_folder_of(path: Path) -> None:
    """Refuse a file whose folder is missing or not writable."""
    if not path.parent.is_dir():
        raise CommandError(f"{path}: the folder {path.parent} does not exist")
    if not os.access(path.parent, os.W_OK):
        raise CommandError(f"{path}: the folder {path.parent} is not writable")


@contextmanager
def row_writer(out: str | None, columns: Sequence[str], name: str) -> Iterator[WriteRows]:
    """Yield a function ``write(number of the first document, rows)``.

    The suffix of the file decides between TSV, JSON lines and ``.npz``; the file is complete or absent. Without a file
    TSV is written to the standard output.

    Args:
      out: The file, or None; see :func:`check_output`.
      columns: Names of the columns.
      name: Name of the array in ``.npz``, and of the list of all columns in JSON lines.
    """
    if out is None:
        yield _line_writer(sys.stdout.buffer, ".tsv", columns, name)
        sys.stdout.buffer.flush()
        return
    suffix = Path(out).suffix
    with replacing(out) as temporary, temporary.open("wb") as file:
        if suffix == ".npz":
            rows: list[np.ndarray] = []
            yield lambda _, new: rows.append(new)
            arrays: dict[str, Any] = {name: np.concatenate(rows)}
            np.savez_compressed(file, **arrays)
        else:
            yield _line_writer(file, suffix, columns, name)


def _line_writer(file: BinaryIO, suffix: str, columns: Sequence[str], name: str) -> WriteRows:
    if suffix == ".tsv":
        file.write("\t".join(["document", *columns]).encode() + b"\n")

    def line(number: int, row: list[float]) -> str:
        if suffix == ".tsv":
            return "\t".join([str(number), *(f"{value:.6g}" for value in row)])
        values = {"topics": row} if name == "theta" else dict(zip(columns, row, strict=True))
        return json.dumps({"document": number, **values})

    def write(first: int, rows: np.ndarray) -> None:
        lines = (line(number, row) for number, row in enumerate(rows.tolist(), start=first))
        file.write("".join(f"{each}\n" for each in lines).encode())

    return write


@contextmanager
def reading_progress(quiet: bool) -> Iterator[Callable[[int, int | None], None] | None]:
    """Yield a function that shows how many documents were read, on one line of a terminal; None elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    start, width = time.perf_counter(), shutil.get_terminal_size().columns - 1

    def show(number: int, size: int | None) -> None:
        rate = number / max(time.perf_counter() - start, 1e-9)
        read = f", {size / 1e6:,.0f} MB" if size else ""
        line = f"read {number:,} documents{read}, {rate:,.0f} documents/s"
        print(f"\r{line[: width - 1]}", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        print(f"\r{' ' * width}\r", end="", file=sys.stderr, flush=True)
