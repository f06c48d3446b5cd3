"""A pytree read from disk equals the one written, or reading raises an error that names the damage."""

import collections
import copy
import json
import tracemalloc
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smoothgrad_jax.core import svi
from smoothgrad_jax.data.durable_files import LoadError
from smoothgrad_jax.training.state_files import IncompatibleError, describe, read_tree, write_tree


class Pair(NamedTuple):
    """A node type that the package does not know."""

    first: object
    second: object


class CVB0State(NamedTuple):
    """A state with a digit in its name, which a test moves into the package."""

    counts: object


def assert_same(tree, other):
    """Compare two pytrees of arrays: structure, library, data type and bits."""
    structure, leaves = describe(tree)
    other_structure, other_leaves = describe(other)
    assert structure == other_structure
    for leaf, other_leaf in zip(leaves, other_leaves, strict=True):
        assert leaf.tobytes() == other_leaf.tobytes()


def round_trip(folder, tree, like=None):
    written = json.loads(json.dumps(write_tree(folder, tree)))
    return read_tree(folder, written, like)


TREES = {
    "one array": jnp.arange(6.0).reshape(2, 3),
    "nothing": None,
    "containers": {"b": [jnp.ones(2), None, ()], "a": (np.zeros((0, 3), np.int16), {7: np.array(True)}), "": {}},
    "low precision": [jnp.full((3, 2), 1 / 3, jnp.bfloat16), np.arange(5, dtype=np.uint8), jnp.zeros((), jnp.float16)],
    "clock": (np.array(-1 / 3), np.array([1e300]), np.array(2**62), np.float64(0.1)),
    "keys": {"key": jax.random.key(5), "keys": jax.random.split(jax.random.key(1, impl="rbg"), 3)},
    "moving window": svi.init({"b": jnp.ones(3), "a": jnp.ones((2, 2))}, 4, dtype=jnp.bfloat16),
    "strided": np.arange(12.0).reshape(3, 4)[:, ::2],
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_a_tree_returns_with_the_same_structure_libraries_and_bits(tmp_path, tree):
    restored = round_trip(tmp_path, tree)
    assert_same(restored, tree)
    assert jax.tree.structure(restored) == jax.tree.structure(tree)
    for leaf in jax.tree.leaves(restored):
        assert not isinstance(leaf, np.memmap)


def test_a_state_of_the_package_may_have_digits_in_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(CVB0State, "__module__", svi.__name__)
    monkeypatch.setattr(svi, "CVB0State", CVB0State, raising=False)
    assert isinstance(round_trip(tmp_path, CVB0State(jnp.ones(2))), CVB0State)


def test_the_number_of_files_is_the_number_of_data_types(tmp_path):
    slots = tuple((np.full(i % 3, i, np.int32), jnp.full(2, i, jnp.float32)) for i in range(300))
    assert_same(round_trip(tmp_path, slots), slots)
    assert {path.name for path in tmp_path.iterdir()} == {"int32.npy", "float32.npy"}
    np.testing.assert_array_equal(np.load(tmp_path / "float32.npy"), np.repeat(np.arange(300), 2))


def test_other_nodes_need_an_example(tmp_path):
    tree = {"params": Pair(jnp.ones(2), collections.OrderedDict(x=np.ones(1))), "count": np.array(3)}
    written = write_tree(tmp_path, tree)
    example = Pair(0, collections.OrderedDict(x=0))
    restored = read_tree(tmp_path, written, like=example)
    assert_same(restored, tree)
    assert isinstance(restored["params"], Pair)
    for like in (None, Pair(0, 0), {"other": 0}):
        with pytest.raises(IncompatibleError, match="give its parameters as like="):
            read_tree(tmp_path, written, like)


def test_64_bits_of_jax_need_its_mode_and_those_of_numpy_do_not(tmp_path):
    with jax.enable_x64(True):
        tree = {"lam": jnp.full(3, 1 / 3), "clock": np.array(1 / 3)}
        written = write_tree(tmp_path, tree)
        assert_same(read_tree(tmp_path, written), tree)
    with pytest.raises(IncompatibleError, match=r"run with float64: resume it under jax.enable_x64\(True\)"):
        read_tree(tmp_path, written)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": [1.5]}, r"state\['a'\]\[0\] must be an array, got float"),
        (svi.init(jnp.ones(2), 2)._replace(step="text"), r"state\.step must be an array, got str"),
        (np.array([object()]), "state has the data type object, which cannot be stored"),
        (np.ones(2, ">f4"), "state has the data type >f4, which cannot be stored"),
        (np.array("2026-01-01", "M8[D]"), "cannot be stored"),
    ],
)
def test_leaves_that_cannot_be_stored_are_named(tmp_path, tree, message):
    with pytest.raises(ValueError, match=message):
        write_tree(tmp_path, tree)
    assert not list(tmp_path.iterdir())


def test_writing_copies_no_array_and_reading_copies_each_once(tmp_path):
    size = 10_000_000
    tree = {"jax": jnp.zeros(size, jnp.float32), "numpy": np.zeros(size // 2)}
    for leaf, view in zip((tree["jax"], tree["numpy"]), describe(tree)[1], strict=True):
        assert np.shares_memory(np.asarray(leaf), view)
    tracemalloc.start()
    try:
        written = write_tree(tmp_path, tree)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
        tracemalloc.reset_peak()
        read_tree(tmp_path, written)
        assert tracemalloc.get_traced_memory()[1] < 4 * size + 10_000_000  # the array of NumPy, and one chunk
    finally:
        tracemalloc.stop()


SVI = "smoothgrad_jax.core.svi.SVIState"
LEAF = "jax float32[2]"
FORGED = {
    "a number": 3,
    "unknown container": {"set": [LEAF]},
    "more elements than there are": "jax float32[3]",
    "fewer elements than there are": "jax float32[]",
    "huge": "jax float32[999999999999999999,999999999999999999]",
    "negative": "jax float32[-2]",
    "no data type of ours": "jax object[2]",
    "no file": "jax int32[2]",
    "too many axes": "jax float32[2" + ",1" * 80 + "]",
    "no library": "float32[2]",
    "no implementation of keys": "nothing float32[2]",
    "missing fields": {"class": SVI, "fields": {"params": LEAF}},
    "fields in a list": {"class": SVI, "fields": [LEAF, None, None]},
    "class outside the package": {"class": "os.stat_result", "fields": {"st_mode": LEAF}},
    "program of the package": {"class": "smoothgrad_jax.__main__.main", "fields": {}},
    "no class": {"class": "smoothgrad_jax.core.svi.init", "fields": {"params": LEAF}},
    "imported class": {"class": "smoothgrad_jax.core.svi.NamedTuple", "fields": {"params": LEAF}},
    "no module": {"class": "smoothgrad_jax.core.nothing.State", "fields": {"params": LEAF}},
    "a pair of three": {"dict": [["key", LEAF, LEAF]]},
    "a key that cannot be one": {"dict": [[[], LEAF]]},
    "deep": None,
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_structure_is_an_error_with_a_name(tmp_path, name):
    written = write_tree(tmp_path, jnp.ones(2))
    structure = FORGED[name]
    if name == "deep":
        structure = LEAF
        for _ in range(100_000):
            structure = {"list": [structure]}
    with pytest.raises(LoadError, match=str(tmp_path)):
        read_tree(tmp_path, written | {"structure": structure})
    while isinstance(structure, dict) and "list" in structure:  # without recursion in the interpreter
        structure = structure["list"].pop()


@pytest.mark.parametrize("files", [None, [], {"float32": None}, {"float32": 3}, {"../float32": {}}, {}])
def test_a_forged_list_of_files_is_an_error_with_a_name(tmp_path, files):
    written = write_tree(tmp_path, jnp.ones(2))
    with pytest.raises(LoadError, match=str(tmp_path)):
        read_tree(tmp_path, copy.deepcopy(written) | {"files": files})
