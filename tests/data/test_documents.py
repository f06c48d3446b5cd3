"""Metadata of documents: any value of JSON is stored and read again."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smoothgrad_jax.data.documents import Metadata, metadata_line, metadata_of, read_metadata

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5)


@given(st.lists(st.tuples(VALUES, VALUES, VALUES)))
def test_metadata_of_any_values_are_read_as_written(rows):
    written = [metadata_of(id, fields) for id, *fields in rows]
    lines = b"".join(map(metadata_line, written)).splitlines(keepends=True)
    assert len(lines) == len(written)  # a value with a line break is on one line
    assert list(read_metadata(lines, 2)) == written
    for id, fields in written:
        for value in (id or "", *fields):
            str(value).encode()
            assert not isinstance(value, float) or math.isfinite(value)


def test_ids_are_strings_and_values_keep_their_types():
    assert metadata_of(7, ["a", 3, 2.5, True, None, math.inf, [1, "ü"], {"a": None}]) == Metadata(
        "7", ("a", 3, 2.5, True, None, None, '[1, "ü"]', '{"a": null}')
    )
    assert metadata_of("", []).id is None
    assert metadata_of(None, []).id is None
    assert metadata_of("\ud800x", ["\ud800"]) == Metadata("?x", ("?",))


@pytest.mark.parametrize("line", [b"", b"{}", b"[1]", b'["a", 1, 2]', b"\xff", b'"ab"'])
def test_other_lines_are_refused(line):
    with pytest.raises(ValueError, match=r"Expecting|line 1|decode"):
        list(read_metadata([line], 1))
