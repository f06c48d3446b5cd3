"""The corpus of ``smoothgrad demo``: docstrings of the installed Python, NumPy, SciPy and JAX.

A document is the docstring of a module, class or function with at least twenty words. The source files are parsed, not
imported.
"""

import ast
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import inspect
import itertools
import os
import platform
import sysconfig
import warnings
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path

from smoothgrad_jax.data.worker_processes import signals_blocked, start_pool

PACKAGES = ("numpy", "scipy", "jax")
_MIN_WORDS = 20
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib", "lib2to3", "_vendor"}
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_DOCUMENTING_CALLS = {"add_newdoc", "add_docstring"}  # how NumPy and SciPy document functions in C


def version(packages: Iterable[str] = PACKAGES) -> str:
    """Return a hash of the versions of Python and the packages, which identifies the corpus."""
    versions = [platform.python_version()]
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    return hashlib.sha256(" ".join(versions).encode()).hexdigest()[:12]


def collect(packages: Iterable[str] = PACKAGES) -> Generator[tuple[str, str]]:
    """Yield (name, text) of every docstring in the standard library and in the installed packages.

    Duplicate texts are skipped, and packages that are not installed. Files are parsed in parallel.
    """
    roots = [("", Path(sysconfig.get_path("stdlib")))]
    for package in packages:
        found = importlib.util.find_spec(package)
        if found and found.origin:
            roots.append((package, Path(found.origin).parent))
    seen: set[str] = set()
    files = []
    for prefix, root in roots:
        for path in sorted(root.rglob("*.py")):
            inside = path.relative_to(root)
            if not _SKIPPED.intersection(inside.parts):
                parts = [part for part in (prefix, *inside.with_suffix("").parts) if part not in ("", "__init__")]
                files.append((path, ".".join(parts)))
    with contextlib.ExitStack() as stack:
        pool = start_pool(min(8, os.cpu_count() or 1))
        with signals_blocked():
            documents = pool.map(docstrings, files, chunksize=50) if pool else map(docstrings, files)
        if pool:
            stack.callback(pool.shutdown, kill_workers=True)
        for name, text in itertools.chain.from_iterable(documents):
            if text not in seen:
                seen.add(text)
                yield name, text


def docstrings(file: tuple[Path, str]) -> list[tuple[str, str]]:
    """Return (name, text) of the docstrings in one file, given as (path, name of the module)."""
    path, module = file
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escape sequences in the sources
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError, OSError):
        return []  # a template, or a file with a deliberate error
    return [(name, text) for name, text in _strings(module, tree) if len(text.split()) >= _MIN_WORDS]


def _strings(module: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    stack: list[tuple[str, ast.AST]] = [(module, tree)]
    while stack:
        name, node = stack.pop()
        if isinstance(node, _DOCUMENTED):
            text = ast.get_docstring(node)
            if text:
                yield name, text
            for child in node.body:
                if isinstance(child, _DOCUMENTED):
                    stack.append((f"{name}.{child.name}", child))
                elif isinstance(child, ast.Expr) and isinstance(child.value, ast.Call):
                    yield from _added(name, child.value)


def _added(module: str, call: ast.Call) -> Iterator[tuple[str, str]]:
    """Yield the docstring of a call ``add_newdoc("module", "name", "text")``."""
    function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)
    if function not in _DOCUMENTING_CALLS:
        return
    strings = [arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
    texts = [text for text in strings if len(text.split()) >= _MIN_WORDS]
    if texts:
        yield ".".join([module, *(s for s in strings if s.isidentifier())][:3]), inspect.cleandoc(texts[-1])
