"""Files of labels: both formats, and the errors of their lines."""

import json

import pytest

from smoothgrad_jax.app.topic_labels import read_labels
from smoothgrad_jax.data.errors import CorpusError

LABELS = {0: "galaxies", 3: "“cold” dark matter, 暗黒物質", 11: "=1+2"}


@pytest.mark.parametrize(
    "text",
    [
        "topic\tlabel\n" + "".join(f"{k}\t{label}\n" for k, label in LABELS.items()),
        "\ufeff\r\n" + "".join(f"{k}\t {label} \r\n\r\n" for k, label in reversed(LABELS.items())),
        json.dumps(LABELS),
        "\n" + json.dumps(LABELS, ensure_ascii=False, indent=2),
    ],
    ids=["tsv", "tsv with CRLF and BOM", "json", "indented json"],
)
def test_both_formats_give_the_same_labels(tmp_path, text):
    path = tmp_path / "labels"
    path.write_bytes(text.encode())
    assert read_labels(path, 12) == LABELS


@pytest.mark.parametrize("text", ["", "topic\tlabel\n", "{}"])
def test_a_file_without_entries_has_no_labels(tmp_path, text):
    (tmp_path / "labels").write_text(text)
    assert read_labels(tmp_path / "labels", 3) == {}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"0\tgood\n1 stars\n", r"labels, line 2: expected a topic number, a tab and a label, got '1 stars'"),
        (b"0\ta\tb\n", "labels, line 1: expected a topic number, a tab and a label"),
        (b"topic 1\tstars\n", "labels, line 1: .* got the topic 'topic 1'"),
        ("²\tstars\n".encode(), "labels, line 1: .* got the topic '²'"),
        (b"-1\tstars\n", "labels, line 1: .* got the topic '-1'"),
        (b"5\tstars\n", "labels, line 1: labels: expected topics from 0 to 4, got 5"),
        (b"1\tstars\n\n01\tmoons\n", "labels, line 3: topic 1 has two labels; keep one"),
        (b"1\t \n", "labels, line 1: label of topic 1: expected 1 to 80 characters, got 0"),
        (b"1\ta\x1b[2J\n", r"labels, line 1: label of topic 1: contains the control character U\+001B"),
        (b"1\ta\rb\n", r"line 1: label of topic 1: contains the control character U\+000D"),
        (b"1\t\xe9\n", "labels: byte 2 is not UTF-8"),
        (b'{"1": 5}', "labels: label of topic 1: expected text, got 5"),
        (b'{"1": "a", "1": "b"}', "labels: topic 1 has two labels"),
        (b'{"x": "a"}', "labels: expected a topic number, .* got the topic 'x'"),
        (b'{"1": "a"', "labels: is not valid JSON"),
        (b"{" * 100_000, "labels: is not valid JSON"),
    ],
)
def test_errors_name_the_file_the_line_and_the_topic(tmp_path, content, message):
    (tmp_path / "labels").write_bytes(content)
    with pytest.raises(CorpusError, match=message):
        read_labels(tmp_path / "labels", 5)
