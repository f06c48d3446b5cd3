"""Labels of topics: the names that people give to topics, and the files that store them.

A file of labels is JSON, ``{"3": "galaxies"}``, or lines of topic number, tab and label, optionally after the line
``topic<TAB>label``. The report writes the second form ("Download labels").
"""

import json
import os
import unicodedata
from collections.abc import Iterator, Mapping
from numbers import Integral
from pathlib import Path

from smoothgrad_jax.data.errors import corpus_error, excerpt

MAX_LENGTH = 80  # characters; `report_page/labels.js` has the same limit
_HEADER = ["topic", "label"]
_NOT_SHOWN = ("Cc", "Cs", "Zl", "Zp")  # control characters, lone surrogates, line and paragraph separators
_DIRECTIONS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # change the order of the text around them


def checked_labels(labels: Mapping[int, str], num_topics: int) -> dict[int, str]:
    """Return labels by topic, in the order of the topics, without white space around them.

    Raises:
      ValueError: If a topic does not exist, or a label is empty, too long, or contains control characters; the message
        names the topic.
    """
    found: dict[int, str] = {}
    for topic, label in labels.items():
        if isinstance(topic, bool) or not isinstance(topic, Integral) or not 0 <= topic < num_topics:
            raise ValueError(f"labels: expected topics from 0 to {num_topics - 1}, got {topic!r}")
        if not isinstance(label, str):
            raise ValueError(f"label of topic {topic}: expected text, got {label!r}")
        found[int(topic)] = label.strip()
        problem = _problem(found[int(topic)])
        if problem:
            raise ValueError(f"label of topic {topic}: {problem}")
    return dict(sorted(found.items()))


def read_labels(path: str | os.PathLike, num_topics: int) -> dict[int, str]:
    """Return the labels of a file by topic.

    Raises:
      CorpusError: If there is no such file, a line or an entry is not a topic number and a label, a topic does not
        exist or has two labels, or a label is not valid; the message names the file and the line or the topic.
      OSError: If the file cannot be read.
    """
    path = Path(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise corpus_error(path, "there is no such file") from None
    except UnicodeDecodeError as error:
        raise corpus_error(path, f"byte {error.start} is not UTF-8; save the file as UTF-8") from error
    is_json = text.lstrip().startswith("{")
    labels: dict[int, str] = {}
    for line, topic, label in _json_entries(path, text) if is_json else _lines(path, text):
        if not (topic.isascii() and topic.isdecimal()):
            problem = f"expected a topic number, a tab and a label, got the topic {excerpt(topic)}"
            raise corpus_error(path, problem, line)
        if int(topic) in labels:
            raise corpus_error(path, f"topic {int(topic)} has two labels; keep one", line)
        try:
            labels |= checked_labels({int(topic): label}, num_topics)
        except ValueError as error:
            raise corpus_error(path, str(error), line) from error
    return labels


def _problem(label: str) -> str | None:
    """Return why a label is not valid, or None."""
    if not 1 <= len(label) <= MAX_LENGTH:
        return f"expected 1 to {MAX_LENGTH} characters, got {len(label)}"
    for character in label:
        if unicodedata.category(character) in _NOT_SHOWN or character in _DIRECTIONS:
            return f"contains the control character U+{ord(character):04X}; remove it"
    return None


def _lines(path: Path, text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line number, the topic and the label of each line that is not empty."""
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), start=1):
        parts = line.split("\t")
        if not line.strip() or (number == 1 and parts == _HEADER):
            continue
        if len(parts) != 2:
            problem = f"expected a topic number, a tab and a label, got {excerpt(line)}"
            raise corpus_error(path, problem, number)
        yield number, parts[0].strip(), parts[1]


def _json_entries(path: Path, text: str) -> Iterator[tuple[None, str, str]]:
    """Yield None, the topic and the label of each entry of a JSON object."""
    try:
        entries = json.loads(text, object_pairs_hook=list)
    except (ValueError, RecursionError) as error:
        raise corpus_error(path, f"is not valid JSON: {error}") from error
    for topic, label in entries:
        yield None, topic, label
