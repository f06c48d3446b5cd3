"""The laws of the house that a machine can hold."""

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import smoothgrad_jax

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "smoothgrad_jax"

# A room imports only rooms above it in this table, and of other packages only these.
ROOMS = {
    "window": {"jax", "numpy"},
    "dirichlet": {"jax"},
    "loops": {"jax", "numpy"},
    "documents": {"numpy", "scipy"},
    "lda": {"jax", "numpy", "dirichlet", "documents", "loops"},
    "svi": {"jax", "numpy", "window"},
    "adaptive": {"jax", "numpy", "loops"},
    "transform": {"jax", "numpy", "optax", "window"},
    "diagnostics": {"jax", "window", "svi"},
    "corpus": {"jax", "numpy", "scipy", "documents"},
    "unpacking": set(),
    "blocks": {"numpy", "scipy", "unpacking"},
    "archives": {"numpy", "blocks", "unpacking"},
    "counts": {"numpy", "archives", "blocks", "unpacking"},
    "readers": {"blocks", "counts", "unpacking"},
    "text": {"numpy", "scipy", "sklearn", "joblib", "unpacking"},
    "counting": {"numpy", "scipy", "text", "unpacking"},
    "store": {"numpy", "corpus", "counting", "text", "unpacking"},
    "rows": {"jax", "numpy", "adaptive", "documents", "lda", "loops", "window"},
    "training": {"jax", "numpy", "adaptive", "corpus", "documents", "lda", "rows", "svi", "window"},
    "inference": {"jax", "numpy", "corpus", "documents", "lda", "loops", "rows"},
    "report": {"numpy", "scipy"},
    "saved": {"jax", "numpy", "pyLDAvis", "corpus", "inference", "lda", "report", "training"},
    "priors": {"numpy", "scipy"},
    "progress": {"tqdm"},
    "estimator": {"jax", "numpy", "sklearn", "corpus", "documents", "inference", "lda", "priors", "progress"}
    | {"rows", "saved", "svi", "training"},
    "runs": {"jax", "numpy", "scipy", "corpus", "documents", "inference", "lda", "saved", "svi", "training"},
    "docstrings": set(),
    "commands": {"numpy", "scipy", "matplotlib", "docstrings", "documents", "inference", "lda", "progress", "readers"}
    | {"report", "runs", "saved", "store", "training", "unpacking"},
    "cli": {"__version__", "commands"},
    "__main__": {"cli"},
}


def imports(path):
    """Top-level packages that a file imports, and rooms of this package by their own name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: a relative import hides which room it means"
            names = (
                [node.module] if node.module != "smoothgrad_jax" else [f"smoothgrad_jax.{a.name}" for a in node.names]
            )
        else:
            continue
        for name in names:
            first, *rest = name.split(".")
            found.add(rest[0] if first == "smoothgrad_jax" else first)
    return found - set(sys.stdlib_module_names)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_the_table_allows(room):
    assert imports(PACKAGE / f"{room}.py") <= ROOMS[room]


def test_every_file_is_a_room_of_the_table():
    assert {path.stem for path in PACKAGE.glob("*.py")} == {*ROOMS, "__init__"}


def test_the_table_has_no_cycle():
    order = list(ROOMS)
    for room, allowed in ROOMS.items():
        assert all(order.index(other) < order.index(room) for other in allowed & set(order))


def test_public_names():
    for name in smoothgrad_jax.__all__:
        assert hasattr(smoothgrad_jax, name)
    assert smoothgrad_jax.window.__name__ == "smoothgrad_jax.window"
    assert callable(smoothgrad_jax.window.push)
    assert smoothgrad_jax.fit.__module__ == "smoothgrad_jax.training"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = smoothgrad_jax.nothing


def test_type_checkers_see_the_same_names():
    stub = ast.parse((PACKAGE / "__init__.pyi").read_text())
    homes = {a.asname: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for a in node.names}
    assert sorted(homes) == sorted(smoothgrad_jax.__all__)
    for name, module in homes.items():
        assert getattr(importlib.import_module(module), name) is getattr(smoothgrad_jax, name)


def test_the_package_imports_nothing_until_it_is_used():
    program = "import sys, smoothgrad_jax; assert not {'jax', 'numpy', 'scipy', 'sklearn'} & set(sys.modules)"
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, cwd=ROOT)


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.stem)
def test_public_functions_are_documented(path):
    text = path.read_text()
    tree = ast.parse(text)
    assert ast.get_docstring(tree)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{path.name}: {node.name} has no docstring"


@pytest.mark.parametrize(
    "path", sorted(p for d in ("smoothgrad_jax", "tests", "experiments") for p in (ROOT / d).glob("*.py"))
)
def test_nothing_is_suppressed(path):
    marks = ["no" + "qa", "type: " + "ignore", "fmt: " + "skip", "fmt: " + "off", "pragma: " + "no cover"]
    assert not [mark for mark in marks if mark in path.read_text(encoding="utf-8")]


def test_import_changes_no_configuration_and_starts_no_backend():
    program = (
        "import jax, optax\n"
        "before = dict(jax.config.values)\n"
        "import smoothgrad_jax\n"
        "for name in smoothgrad_jax.__all__: getattr(smoothgrad_jax, name)\n"
        "assert dict(jax.config.values) == before\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge._backends, 'importing the package ran a computation'\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, cwd=ROOT)


@pytest.mark.slow
def test_strict_modes():
    modes = {"JAX_NUMPY_RANK_PROMOTION": "raise", "JAX_NUMPY_DTYPE_PROMOTION": "strict", "PYTHONPATH": str(ROOT)}
    program = [sys.executable, "-W", "error", ROOT / "tests" / "strict.py"]
    subprocess.run(program, check=True, cwd=ROOT, env=os.environ | modes)


def test_doctests():
    import doctest

    import jax.numpy as jnp
    import optax

    from smoothgrad_jax import adaptive, corpus, documents, estimator, inference, priors, text, transform

    names = {"jnp": jnp, "optax": optax}
    for module in (adaptive, corpus, documents, estimator, inference, priors, text, transform):
        result = doctest.testmod(module, extraglobs=names, optionflags=doctest.ELLIPSIS)
        assert result.attempted > 0
        assert result.failed == 0
