"""Smoothed stochastic variational inference in JAX, after Mandt and Blei (NIPS 2014).

The stub ``__init__.pyi`` lists the public names. They are imported on first use, so that ``smoothgrad --help`` does not
wait for jax.
"""

import functools

__version__ = "0.1.0"

_RENAMED = {"store": "corpus_folder"}  # a former name of a module, which stays importable


@functools.cache
def _module_of() -> dict[str, str]:
    """Return the module of each public name."""
    import pkgutil
    import re

    stub = pkgutil.get_data(__name__, "__init__.pyi") or b""
    return {name: module for module, name in re.findall(r"(?m)^from (\S+) import (\w+) as", stub.decode())}


def _public_names() -> list[str]:
    """Return ``__all__``; ``from smoothgrad_jax import *`` must not fail because an extra is missing."""
    from importlib.util import find_spec

    names = set(_module_of()) - (set() if find_spec("sklearn") else {"SmoothedLDA"})
    return sorted(names, key=lambda name: (name != name.upper(), name[0].islower(), name))


def __getattr__(name: str) -> object:
    if name == "__all__":
        return _public_names()
    public = _RENAMED.get(name, name)
    if public.startswith("_") or public not in _module_of():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # As `from module import name`, which also imports a module of this name.
    value = getattr(__import__(_module_of()[public], fromlist=[public]), public)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_public_names()})
