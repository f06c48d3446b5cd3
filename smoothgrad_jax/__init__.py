"""Smoothed stochastic variational inference in JAX, after Mandt and Blei (NIPS 2014).

Names are imported when they are first used: the command answers ``--help`` without waiting for jax.
"""

import importlib.util
from typing import Any

__version__ = "0.1.0"

_ROOMS = {
    "adaptive": ("Adaptive",),
    "corpus": ("Corpus", "prefetch", "sample"),
    "diagnostics": ("averaged_step", "bias_variance", "count_negative"),
    "documents": ("Batch", "pack"),
    "estimator": ("SmoothedLDA",),
    "lda": (
        *("LDA", "LocalInfo", "elbo", "init_topics", "local_step", "log_predictive", "seed_topics", "split_documents"),
        "topics",
    ),
    "readers": ("Source", "open_source", "recognise"),
    "saved": ("Checkpoint", "Checkpoints", "LoadError", "SaveError", "SavedModel", "load_model", "save_model"),
    "report": ("Excerpt", "typical_documents", "write_report"),
    "svi": ("SVIState", "global_step", "init", "phase_out", "robbins_monro", "run", "sweep"),
    "training": ("NotFiniteError", "Progress", "Training", "fit"),
    "transform": ("natural_gradient", "smoothed_svi", "window_mean"),
    "unpacking": ("CorpusError",),
}
_HOME = {name: room for room, names in _ROOMS.items() for name in names}
_OPEN = ("adaptive", "diagnostics", "dirichlet", "store", "text", "window")  # rooms that are used by their own name

# `from smoothgrad_jax import *` is not to fail for want of an extra.
_missing = () if importlib.util.find_spec("sklearn") else _ROOMS["estimator"]
__all__ = sorted(
    {*_HOME, *_OPEN}.difference(_missing), key=lambda name: (name != name.upper(), name[0].islower(), name)
)


def __getattr__(name: str) -> Any:
    if name in _OPEN:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _HOME:
        value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
