"""The README tells the truth: its Python blocks run, one after the other, as a reader would type them."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def names():
    names = {}
    for number, block in enumerate(BLOCKS, 1):
        exec(compile(block, f"README.md, python block {number}", "exec"), names)
    return names


def test_every_block_runs(names):
    assert len(BLOCKS) >= 6
    assert {"smoothed", "beta", "score", "states", "errors", "rates"} <= set(names)


def test_what_the_comments_say(names):
    assert names["beta"].shape == (5, 50)
    assert names["lda"].components_.shape == (2, 9)
    assert names["info"].gamma.shape == (100, 5)
    assert names["states"].params.shape == (4, 50, 5)
    assert sorted(map(float, names["rates"])) == pytest.approx([2, 15], rel=0.15)
    assert names["score"] < 0
    assert names["errors"].variance.shape == (30,)
