"""The README's Python blocks run in order, as a reader would type them, and give what their comments say."""

import re
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def names():
    names = {}
    for number, block in enumerate(BLOCKS, 1):
        exec(compile(block, f"README.md, python block {number}", "exec"), names)
    return names


def test_every_block_runs(names):
    assert len(BLOCKS) >= 5
    assert {"pipeline", "training", "states", "mixture", "optimiser"} <= set(names)


def test_the_comments_are_true(names):
    assert names["theta"].shape == (200, 2)
    assert names["lda"].components_.shape == (2, 9)
    assert names["beta"].shape == (5, 50)
    assert names["progress"].score < 0
    assert names["states"].params.shape == (4, 50, 5)
    assert sorted(map(float, names["rates"])) == pytest.approx([2, 15], rel=0.15)


def test_the_chain_is_the_optimiser(names):
    """The chain that the README spells out computes the update of ``smoothed_svi``."""
    params, stats = names["mixture"].params, names["mixture_step"](names["mixture"].params, names["x"][0])[0]
    updates = [each.update(stats, each.init(params), params)[0] for each in (names["optimiser"], names["chain"])]
    for name in params:
        np.testing.assert_allclose(updates[0][name], updates[1][name], rtol=1e-6)


def test_the_optax_loop_finds_the_same_rates_as_run(names):
    rates = names["params"]["shape"] / names["params"]["rate"]
    np.testing.assert_allclose(sorted(rates), sorted(names["rates"]), rtol=1e-3)


def test_links_lead_to_files():
    for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", TEXT):
        assert (ROOT / link).exists(), f"README.md: no file {link}"
