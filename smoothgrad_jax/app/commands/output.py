"""Output shared by several commands: messages, JSON lines and topics."""

import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from smoothgrad_jax.app import signals
from smoothgrad_jax.app.event_log import event
from smoothgrad_jax.app.saved_models import SavedModel
from smoothgrad_jax.data import folder_lock
from smoothgrad_jax.data.corpus_folder import CountedCorpus
from smoothgrad_jax.data.counting import OnProgress
from smoothgrad_jax.data.errors import plural
from smoothgrad_jax.data.local_files import is_url
from smoothgrad_jax.models.topic_quality import effective_topics

_FEW_WORDS = 0.05  # a topic with less than this fraction of the mean prevalence holds few words
FEW_USED = 0.5  # of all topics: with fewer effective topics the user is told

_CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")  # also reverses the direction


class CommandError(ValueError):
    """An error that the user sees as one line."""


def printable(text: str) -> str:
    """Return text from a file without characters that command a terminal; they are shown as escapes, like ``\\x1b``."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def log(line: str) -> None:
    """Print a message to standard error, and log it as an event."""
    with signals.dropping_closed_output():
        print(printable(line), file=sys.stderr, flush=True)
    event("message", message=line)


def emit(record: dict[str, Any]) -> None:
    """Print one JSON line to standard output."""
    with signals.dropping_closed_output():
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
    """Report words that are not in the vocabulary, and documents without any word."""
    outside = stored.manifest["dropped"]["tokens_outside_vocabulary"]
    if outside:
        longest = (stored.manifest["tokens"] or {}).get("ngram_range", (1, 1))[1]
        what = plural(outside, "word") + (" and sequences of words" if longest > 1 else "")
        log(f"ignoring {what} outside of the vocabulary")
    log_empty(stored)


def log_empty(stored: CountedCorpus) -> None:
    """Report documents without any word of the vocabulary, which keep their rows."""
    empty, documents = stored.manifest["dropped"]["empty_documents"], plural(stored.corpus.num_docs, "document")
    if empty:
        log(f"{empty:,} of {documents} {'is' if empty == 1 else 'are'} empty, or without any known word")


def print_topics(model: SavedModel, num_words: int, max_topics: int | None = None, show_all: bool = False) -> None:
    """Print the topics, largest first, and their quality; topics with few words are only counted."""
    prevalence, words, quality = model.topic_proportions(), model.top_words(num_words), model.quality
    order = np.argsort(-prevalence, kind="stable").tolist()
    shown = [k for k in order if show_all or prevalence[k] >= _FEW_WORDS / len(order)][:max_topics]
    if quality:
        print("topic  prevalence  NPMI  words")
    for k in shown:
        coherence = f" {quality.npmi[k]:5.2f}" if quality else ""
        remarks = "; ".join(quality.remarks(k)) if quality else ""
        label = f"{model.labels[k]}: " if model.labels and k in model.labels else ""
        line = f"{k:5d} {100 * prevalence[k]:10.1f}%{coherence}  {label}{' '.join(word for word, _ in words[k])}"
        print(printable(line + (f"  ({remarks})" if remarks else "")))
    if len(order) > len(shown):
        print(f"      … and {plural(len(order) - len(shown), 'smaller topic')}")
    used = quality.effective_topics if quality else effective_topics(prevalence)
    print(f"quality: {quality.describe() if quality else f'{used:.1f} effective topics of {len(order)}'}")
    if used < FEW_USED * len(order):
        print(
            f"in effect, {used:.0f} of the {len(order)} topics are used; fewer topics may be as good: "
            f"smoothgrad sweep --topics {max(round(used), 2)},{len(order)} compares"
        )


def check_file(path: Path, suffixes: Sequence[str] = ()) -> None:
    """Raise an error if the path of an output file is a folder, or if its folder cannot be written."""
    if path.is_dir():
        raise CommandError(f"{path}: expected the name of a file, got a folder; give another name")
    if suffixes and path.suffix not in suffixes:
        raise CommandError(f"{path}: expected a name that ends in {' or '.join(suffixes)}")
    _refuse_url(path)
    if not path.parent.is_dir():
        raise CommandError(f"{path}: the folder {path.parent} does not exist")
    _check_writable(path.parent, path)


def check_folder(path: Path) -> None:
    """Raise an error if a path is not a folder that can be written, or that can be created."""
    _refuse_url(path)
    first = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not first.is_dir():
        raise CommandError(f"{path}: expected a folder or a new name, got a file" + (f" {first}" * (first != path)))
    _check_writable(first, path)


@contextmanager
def output_folder(path: Path) -> Iterator[set[str]]:
    """Lock a folder, which is created if necessary, to write into it; yield the names of the files in it."""
    check_folder(path)
    with folder_lock.locked(path):
        yield {each.name for each in path.iterdir()} - {folder_lock.NAME}


def _check_writable(folder: Path, path: Path) -> None:
    """Raise an error about an output if its folder cannot be written."""
    try:
        # Permissions are not enough: the file system can be read-only, or a network can map the user to another one.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise CommandError(f"{path}: the folder {folder} is not writable: {error.strerror}") from None


def _refuse_url(path: Path) -> None:
    if is_url(str(path)):
        raise CommandError(f"{path}: expected a file or a folder of this computer, got a URL")


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
