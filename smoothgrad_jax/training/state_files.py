"""Pytrees of arrays on disk: the only way in which a training state is stored.

A tree is stored in two parts:

- The **structure**, which JSON can represent. It names every container and describes every leaf.
- The **leaves**: all leaves of one data type, flattened and concatenated in the order of the structure, form one
  ``.npy`` file. The number of files is the number of data types, also for a window of many thousand slots.

| node                            | in the structure                                                             |
|---------------------------------|------------------------------------------------------------------------------|
| None                            | ``null``                                                                     |
| list, tuple                     | ``{"list": [child, …]}``, ``{"tuple": [child, …]}``                          |
| dict with keys str or int       | ``{"dict": [[key, child], …]}``                                              |
| NamedTuple of this package      | ``{"class": "smoothgrad_jax.core.svi.SVIState", "fields": {name: child, …}}``|
| any other registered node       | ``{"node": "PyTreeDef(…)", "children": [child, …]}``                         |
| array of NumPy or JAX           | ``"numpy float64[]"``, ``"jax float32[300,50]"``                             |
| typed PRNG key                  | ``"threefry2x32 uint32[2]"``: its implementation and its data                |

A leaf returns as an array of the library that it came from. A clock in NumPy's float64 therefore keeps its precision
where JAX is limited to float32. bfloat16 is stored as its bits.

Reading executes nothing: a class is looked up by name among the NamedTuples of this package, and other node types are
taken from an example that the caller supplies.
"""

import contextlib
import importlib
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from smoothgrad_jax.core.types import PyTree
from smoothgrad_jax.data.durable_files import Entry, LoadError, array_header, loading, new_file, read_array
from smoothgrad_jax.data.schema import Json

_NAMES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128"
_DTYPES = {name: np.dtype(name) for name in _NAMES.split()} | {"bfloat16": np.dtype(jnp.bfloat16)}
_LEAF = re.compile(r"(\w+) (\w+)\[((?:\d{1,18}(?:,\d{1,18})*)?)\]")
_CLASS = re.compile(r"(smoothgrad_jax\.(?:core|models|training)(?:\.[a-z_][a-z0-9_]*)+)\.([A-Za-z][A-Za-z0-9]*)")
_A_LEAF = jax.tree.structure(0)


class IncompatibleError(LoadError):
    """Raised if a stored state is intact, but this process cannot hold it. The message names the remedy."""


def describe(tree: PyTree) -> tuple[Json, list[npt.NDArray]]:
    """Split a pytree into a structure that JSON can represent and the arrays of its leaves.

    Copies nothing on a CPU: the arrays are views of the leaves. A jitted function that receives a leaf as a donated
    argument copies it while a view exists.

    Args:
      tree: A pytree whose leaves are arrays or typed PRNG keys.

    Returns:
      ``(structure, leaves)``, the leaves in the order of the structure.

    Raises:
      ValueError: A leaf is not an array, or has a data type that cannot be stored.
    """
    leaves: list[npt.NDArray] = []
    return _describe(tree, "state", leaves), leaves


def write_tree(folder: str | os.PathLike, tree: PyTree) -> dict[str, Json]:
    """Write the leaves of a pytree into a folder, without a copy of them in memory.

    Args:
      folder: The folder. Files named after data types, such as ``float32.npy``, are created in it.
      tree: As in :func:`describe`.

    Returns:
      ``{"structure": …, "files": …}`` for :func:`read_tree`, which JSON can represent.

    Raises:
      OSError: A file exists or cannot be written.
      ValueError: As in :func:`describe`.
    """
    structure, leaves = describe(tree)
    by_dtype: dict[str, list[npt.NDArray]] = {}
    for leaf in leaves:
        by_dtype.setdefault(leaf.dtype.name, []).append(leaf)
    files: dict[str, Entry] = {}
    for name, arrays in by_dtype.items():
        with new_file(Path(folder) / f"{name}.npy") as file:
            stored = np.dtype(np.uint16) if name == "bfloat16" else _DTYPES[name]
            file.write(array_header(stored, (sum(array.size for array in arrays),)))
            for array in arrays:
                file.write(array)
            files[name] = {**file.finish(), "dtype": name}
    return {"structure": structure, "files": files}


def read_tree(
    folder: str | os.PathLike, written: Mapping[str, Json], like: PyTree = None, *, copy: bool = True
) -> PyTree:
    """Read a pytree that :func:`write_tree` wrote.

    The files are memory-mapped and copied leaf by leaf. Everything is checked before the first copy.

    Args:
      folder: The folder.
      written: What :func:`write_tree` returned.
      like: A pytree that contains an example of every node which is neither a dict, list, tuple or None nor a
        NamedTuple of this package.
      copy: Copy the leaves into memory. If False, all leaves are views of the memory-mapped files, for a caller that
        needs a part of them.

    Raises:
      LoadError: A file is missing or damaged, or does not belong to the structure.
      IncompatibleError: A node has no example in ``like``, or a leaf needs 64 bits and JAX is limited to 32.
    """
    folder = Path(folder)
    with loading(folder):
        flat = {name: _read_flat(folder, name, entry) for name, entry in written["files"].items()}
        structure, node_types = written["structure"], _node_types(like)
        sizes = dict.fromkeys(flat, 0)

        def count(leaf: str) -> None:
            _, dtype, shape = _parse(leaf)
            sizes[dtype.name] += math.prod(shape)

        _rebuild(structure, count, node_types)
        for name, size in sizes.items():
            if size != flat[name].size:
                raise LoadError(f"{folder / name}.npy: expected {size} elements, got {flat[name].size}")
        starts = dict.fromkeys(flat, 0)

        def restore(leaf: str) -> jax.Array | npt.NDArray:
            library, dtype, shape = _parse(leaf)
            start = starts[dtype.name]
            starts[dtype.name] = end = start + math.prod(shape)
            array = flat[dtype.name][start:end].reshape(shape)
            return _as_leaf(library, array) if copy else array

        return _rebuild(structure, restore, node_types)


def _describe(node: PyTree, path: str, leaves: list[npt.NDArray]) -> Json:
    kind = type(node)
    if node is None:
        return None
    if kind is list or kind is tuple:
        return {kind.__name__: [_describe(child, f"{path}[{i}]", leaves) for i, child in enumerate(node)]}
    if kind is dict and all(type(key) in (str, int) for key in node):
        return {"dict": [[key, _describe(child, f"{path}[{key!r}]", leaves)] for key, child in node.items()]}
    if _is_namedtuple(kind) and _CLASS.fullmatch(f"{kind.__module__}.{kind.__qualname__}"):
        fields = {name: _describe(getattr(node, name), f"{path}.{name}", leaves) for name in kind._fields}
        return {"class": f"{kind.__module__}.{kind.__qualname__}", "fields": fields}
    children, one_level = _one_level(node)
    if one_level != _A_LEAF:
        described = [_describe(child, f"{path}[{i}]", leaves) for i, child in enumerate(children)]
        return {"node": str(one_level), "children": described}
    library, array = _as_numpy(node, path)
    leaves.append(array)
    return f"{library} {array.dtype.name}[{','.join(map(str, array.shape))}]"


def _as_numpy(leaf: object, path: str) -> tuple[str, npt.NDArray]:
    """Return the library of a leaf (for a key, its implementation) and a NumPy view of it."""
    if isinstance(leaf, jax.Array):
        is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        library = str(jax.random.key_impl(leaf)) if is_key else "jax"
        array = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
    elif isinstance(leaf, np.ndarray | np.generic):
        library, array = "numpy", np.asarray(leaf)
    else:
        raise ValueError(f"{path} must be an array, got {type(leaf).__name__}")
    if array.dtype != _DTYPES.get(array.dtype.name):
        raise ValueError(f"{path} has the data type {array.dtype}, which cannot be stored")
    return library, array


def _rebuild(
    structure: Json, restore: Callable[[str], Any], node_types: Mapping[str, jax.tree_util.PyTreeDef]
) -> PyTree:
    """Return the tree of a structure, with ``restore(description)`` for each leaf in order."""

    def children(items: Iterable[Json]) -> list[PyTree]:
        return [_rebuild(item, restore, node_types) for item in items]

    match structure:
        case None:
            return None
        case str():
            return restore(structure)
        case {"list": [*items]}:
            return children(items)
        case {"tuple": [*items]}:
            return tuple(children(items))
        case {"dict": [*pairs]}:
            return {key: _rebuild(child, restore, node_types) for key, child in pairs}
        case {"class": str(name), "fields": dict(fields)}:
            cls = _class_named(name)
            if tuple(fields) != cls._fields:
                raise ValueError(f"{name} has the fields {', '.join(cls._fields)}; got {', '.join(fields)}")
            return cls._make(children(fields.values()))
        case {"node": str(name), "children": [*items]}:
            if name not in node_types:
                raise IncompatibleError(
                    f"a file cannot describe the node {name} of this state: give its parameters as like="
                )
            return jax.tree.unflatten(node_types[name], children(items))
    raise ValueError(f"expected the structure of a pytree, got {structure!r:.50}")


def _parse(leaf: str) -> tuple[str, np.dtype, tuple[int, ...]]:
    """Return the library, the data type and the shape of a leaf from its description."""
    found = _LEAF.fullmatch(leaf)
    if not found or found[2] not in _DTYPES:
        raise ValueError(f"expected the description of an array, got {leaf!r:.50}")
    library, dtype = found[1], _DTYPES[found[2]]
    if library != "numpy" and jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise IncompatibleError(f"this state is of a run with {dtype}: resume it under jax.enable_x64(True)")
    return library, dtype, tuple(map(int, filter(None, found[3].split(","))))


def _read_flat(folder: Path, name: str, entry: Entry) -> npt.NDArray:
    """Open the file of one data type."""
    if name not in _DTYPES:
        raise LoadError(f"{folder}: unknown data type {name!r}")
    array = read_array(folder / f"{name}.npy", entry)
    if array.ndim != 1 or array.dtype != _DTYPES[name]:
        raise LoadError(f"{folder / name}.npy: damaged: expected one axis of {name}, got {array.dtype}{array.shape}")
    return array


def _as_leaf(library: str, array: npt.NDArray) -> jax.Array | npt.NDArray:
    """Copy an array into memory of its library; undo :func:`_as_numpy`."""
    if library == "numpy":
        return np.array(array)
    copy = jnp.array(np.asarray(array))
    return copy if library == "jax" else jax.random.wrap_key_data(copy, impl=library)


def _class_named(name: str) -> Any:
    """Return a NamedTuple class of this package."""
    found, cls = _CLASS.fullmatch(name), None
    if found:
        with contextlib.suppress(ImportError):
            cls = getattr(importlib.import_module(found[1]), found[2], None)
    if not found or not _is_namedtuple(cls) or cls.__module__ != found[1]:
        raise ValueError(f"{name!r:.80} is not a state of this package")
    return cls


def _is_namedtuple(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")


def _one_level(node: PyTree) -> tuple[list[PyTree], jax.tree_util.PyTreeDef]:
    """Return the children of a node and the node without them."""
    return jax.tree.flatten(node, is_leaf=lambda other: other is not node)


def _node_types(tree: PyTree) -> dict[str, jax.tree_util.PyTreeDef]:
    """Return every node of a tree without its children, by its description."""
    children, one_level = _one_level(tree)
    if one_level == _A_LEAF:
        return {}
    found = {str(one_level): one_level}
    for child in children:
        found |= _node_types(child)
    return found
