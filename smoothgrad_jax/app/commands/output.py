"""Output shared by several commands: messages, JSON lines, topics, and files with one row per document."""

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from smoothgrad_jax.app.saved_models import SavedModel
from smoothgrad_jax.data.corpus_folder import CountedCorpus
from smoothgrad_jax.data.counting import OnProgress
from smoothgrad_jax.data.durable_files import replacing, saving
from smoothgrad_jax.data.errors import plural
from smoothgrad_jax.models.topic_quality import effective_topics

_FEW_WORDS = 0.05  # a topic with less than this fraction of the mean prevalence holds few words
_SUFFIXES = (".tsv", ".jsonl", ".npz")

_CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")  # also reverses the direction

WriteRows = Callable[[int, np.ndarray], None]


class CommandError(Exception):
    """An error that the user sees as one line."""


def printable(text: str) -> str:
    """Return text from a file without characters that command a terminal; they are shown as escapes, like ``\\x1b``."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def log(line: str) -> None:
    """Print a message to standard error."""
    print(printable(line), file=sys.stderr, flush=True)


def emit(record: dict[str, Any]) -> None:
    """Print one JSON line to standard output."""
    print(json.dumps(record), flush=True)


def event_of(code: int) -> str:
    """Return the name of the event that ends a run with this exit code."""
    return {0: "done", 1: "failed"}.get(code, "interrupted")


def size_of(stored: CountedCorpus) -> str:
    """Describe the size of a corpus for a message."""
    manifest = stored.manifest
    documents, words = plural(manifest["num_docs"], "document"), plural(manifest["num_words"], "distinct word")
    return f"{documents}, {words}, {plural(round(manifest['num_tokens']), 'word')} in total"


def log_dropped(stored: CountedCorpus) -> None:
    """Report words that are not in the vocabulary."""
    dropped = stored.manifest["dropped"]
    outside, empty = dropped["tokens_outside_vocabulary"], dropped["documents_that_lost_all_words"]
    if outside:
        others = f"; without any other word: {plural(empty, 'document')}" if empty else ""
        log(f"ignoring {plural(outside, 'word')} outside of the vocabulary{others}")


def print_topics(model: SavedModel, num_words: int, max_topics: int | None = None, show_all: bool = False) -> None:
    """Print the topics, largest first, and their quality; topics that hold few words are only counted.

    Args:
      model: The model.
      num_words: Words per topic.
      max_topics: Maximum number of topics to print.
      show_all: Also print topics that hold few words.
    """
    prevalence, words, quality = model.topic_proportions(), model.top_words(num_words), model.quality
    order = np.argsort(-prevalence, kind="stable").tolist()
    shown = [k for k in order if show_all or prevalence[k] >= _FEW_WORDS / len(order)][:max_topics]
    if quality:
        print("topic  prevalence  NPMI  words")
    for k in shown:
        coherence = f" {quality.npmi[k]:5.2f}" if quality else ""
        remarks = "; ".join(quality.remarks(k)) if quality else ""
        line = f"{k:5d} {100 * prevalence[k]:10.1f}%{coherence}  {' '.join(word for word, _ in words[k])}"
        print(printable(line + (f"  ({remarks})" if remarks else "")))
    if len(order) > len(shown):
        print(f"      … and {plural(len(order) - len(shown), 'smaller topic')}")
    if quality:
        print(f"quality: {quality.describe()}")
    else:
        print(f"quality: {effective_topics(prevalence):.1f} effective topics of {len(order)}")


def check_output(out: str | None) -> None:
    """Check that an output file can be written, before anything is computed.

    Raises:
      CommandError: The suffix is unknown, the path is a folder, or its folder is missing or not writable.
    """
    if out is None:
        return
    path = Path(out)
    if path.suffix not in _SUFFIXES:
        raise CommandError(f"{path}: expected a name that ends in {', '.join(_SUFFIXES[:-1])} or {_SUFFIXES[-1]}")
    check_file(path)


def check_file(path: Path) -> None:
    """Raise an error if the path of an output file is a folder, or if its folder cannot be written."""
    if path.is_dir():
        raise CommandError(f"{path}: expected the name of a file, got a folder; give another name")
    if not path.parent.is_dir():
        raise CommandError(f"{path}: the folder {path.parent} does not exist")
    check_folder(path.parent)


def check_folder(path: Path) -> None:
    """Raise an error if a path is not a folder that can be written, or that can be created."""
    first = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not first.is_dir():
        raise CommandError(f"{path}: expected a folder or a new name, got a file" + (f" {first}" * (first != path)))
    if not os.access(first, os.W_OK):
        raise CommandError(f"{path}: the folder {first} is not writable")


@contextmanager
def row_writer(out: str | None, columns: Sequence[str], name: str) -> Iterator[WriteRows]:
    """Yield a function ``write(number of the first document, rows)``.

    The suffix of the file selects TSV, JSON lines or ``.npz``; an incomplete file is removed. Without a file,
    TSV is written to standard output.

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
    removed = "the incomplete file has been removed; free some space, or choose another folder"
    with saving(out, lambda: removed), replacing(out) as temporary, temporary.open("wb") as file:
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
def reading_progress(quiet: bool) -> Iterator[OnProgress | None]:
    """Yield a function that displays the number of documents read; None without a terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    start, width = time.perf_counter(), shutil.get_terminal_size().columns - 1

    def show(number: int) -> None:
        rate = number / max(time.perf_counter() - start, 1e-9)
        line = f"read {plural(number, 'document')}, {rate:,.0f} documents/s"
        print(f"\r{line[: width - 1]}", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        print(f"\r{' ' * width}\r", end="", file=sys.stderr, flush=True)
