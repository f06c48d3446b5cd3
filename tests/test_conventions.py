"""The conventions of the code base that a program can check."""

import ast
import doctest
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import optax
import pytest

import smoothgrad_jax

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "smoothgrad_jax"
FILES = sorted(PACKAGE.rglob("*.py"))

# Each layer imports only these layers. `models` reads batches and corpora, so it also imports `data`.
LAYERS = {
    "core": set(),
    "data": set(),
    "models": {"core", "data"},
    "training": {"core", "data", "models"},
    "app": {"core", "data", "models", "training"},
}
# Packages that a layer may import besides the standard library.
PACKAGES = {
    "core": {"jax", "numpy", "optax", "chex"},
    "data": {"jax", "numpy", "scipy", "sklearn", "joblib", "pyarrow"},
    "models": {"jax", "numpy", "scipy"},
    "training": {"jax", "numpy"},
    "app": {"jax", "numpy", "scipy", "sklearn", "joblib", "matplotlib", "tqdm", "pyLDAvis", "pyarrow"},
}


def layer_of(path):
    return path.relative_to(PACKAGE).parts[0]


def imports(path):
    """Return the modules that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative imports hide the layer"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def check_imports(path, layer):
    """Check that a file imports only the layers and packages that its layer may import."""
    parts = [name.split(".") for name in imports(path)]
    ours = {part[1] for part in parts if part[0] == "smoothgrad_jax"} - {"__version__"}
    assert ours <= LAYERS[layer] | {layer}
    assert {part[0] for part in parts} - set(sys.stdlib_module_names) - {"smoothgrad_jax"} <= PACKAGES[layer]


@pytest.mark.parametrize("path", [path for path in FILES if layer_of(path) in LAYERS], ids=lambda path: path.stem)
def test_a_layer_imports_no_layer_above_it(path):
    check_imports(path, layer_of(path))


@pytest.mark.parametrize("name", ["skeleton_model.py", "unigram_mixture.py"])
def test_a_model_file_to_copy_imports_what_a_model_may_import(name):
    check_imports(ROOT / "tests" / name, "models")


def test_every_module_is_in_a_layer():
    assert {layer_of(path) for path in FILES} == {*LAYERS, "__init__.py", "__main__.py"}


def test_public_names():
    for name in smoothgrad_jax.__all__:
        assert hasattr(smoothgrad_jax, name)
    assert smoothgrad_jax.core.window.__name__ == "smoothgrad_jax.core.window"
    assert callable(smoothgrad_jax.core.window.push)
    assert smoothgrad_jax.fit.__module__ == "smoothgrad_jax.training.driver"
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


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_public_functions_are_documented(path):
    text = path.read_text()
    tree = ast.parse(text)
    assert ast.get_docstring(tree)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{path.name}: {node.name} has no docstring"


def functions(path, *, public):
    """Yield the functions and methods of a file: all of them, or the public ones at the top level and in classes."""
    nodes = list(ast.parse(path.read_text()).body)
    while nodes:
        node = nodes.pop()
        name = getattr(node, "name", "")
        if public and name.startswith("_") and name != "__init__":
            continue
        if isinstance(node, ast.FunctionDef):
            yield node
        if isinstance(node, ast.ClassDef) or not public:
            nodes += ast.iter_child_nodes(node)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_function_body_is_longer_than_60_lines(path):
    for node in functions(path, public=False):
        body = node.body[1:] if ast.get_docstring(node) else node.body
        length = node.end_lineno - body[0].lineno + 1 if body else 0
        assert length <= 60, f"{path.name}: the body of {node.name} has {length} lines"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_public_signatures_are_typed(path):
    """Every parameter and return value is annotated, and none is a bare ``Any``; ``**options: Any`` is allowed."""
    for node in functions(path, public=True):
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        hints = {argument.arg: argument.annotation for argument in arguments if argument.arg not in ("self", "cls")}
        if node.name != "__init__":
            hints["return"] = node.returns
        for name, hint in hints.items():
            assert hint is not None, f"{path.name}: {node.name}: {name} is not annotated"
            assert ast.unparse(hint) != "Any", f"{path.name}: {node.name}: {name} is a bare Any"


def test_the_readme_stays_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


def test_contributing_names_files_that_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for name in re.findall(r"`([a-z_]+/[A-Za-z_/]+\.py)", text):
        exists = (ROOT / name).exists() or (PACKAGE / name).exists()
        assert exists or "NAME" in name, f"CONTRIBUTING.md: no file {name}"
    for name, defined in re.findall(r"`([a-z_]+/[A-Za-z_/]+\.py): ([A-Za-z_]+)`", text):
        path = ROOT / name if (ROOT / name).exists() else PACKAGE / name
        assert re.search(rf"^(def|class)? ?{defined}\b", path.read_text(), re.M), f"{name} does not define {defined}"


@pytest.mark.parametrize(
    "path", sorted(p for d in ("smoothgrad_jax", "tests", "experiments") for p in (ROOT / d).rglob("*.py"))
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
def test_jax_strict_modes():
    modes = {"JAX_NUMPY_RANK_PROMOTION": "raise", "JAX_NUMPY_DTYPE_PROMOTION": "strict", "PYTHONPATH": str(ROOT)}
    program = [sys.executable, "-W", "error", ROOT / "tests" / "strict.py"]
    subprocess.run(program, check=True, cwd=ROOT, env=os.environ | modes)


@pytest.mark.parametrize("path", [path for path in FILES if ">>> " in path.read_text()], ids=lambda path: path.stem)
def test_doctests(path):
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    names = {"jnp": jax.numpy, "optax": optax}
    result = doctest.testmod(module, extraglobs=names, optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0
    assert result.failed == 0
