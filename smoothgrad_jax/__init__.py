"""Smoothed stochastic variational inference in JAX, after Mandt and Blei (NIPS 2014).

Public names are imported on first use, so that ``smoothgrad --help`` does not wait for jax.
"""

import importlib.util

__version__ = "0.1.0"

_NAMES = {
    "app.estimator": ("SmoothedLDA",),
    "app.model_comparison": ("Comparison", "compare_models"),
    "app.report": ("typical_documents", "write_report"),
    "app.report_content": ("Excerpt",),
    "app.saved_models": ("SavedModel", "load_model", "save_model"),
    "core.adaptive": ("Adaptive",),
    "core.diagnostics": ("averaged_step", "bias_variance", "count_negative"),
    "core.schedules": ("annealed", "phase_out", "robbins_monro"),
    "core.svi": ("SVIState", "global_step", "init", "run", "sweep", "sweep_bytes"),
    "core.transformation": ("natural_gradient", "smoothed_svi", "window_mean"),
    "core.window": ("Exponential", "Moving"),
    "data.batches": ("Batch", "pack"),
    "data.corpus": ("Corpus",),
    "data.sampling": ("prefetch", "sample"),
    "data.documents": ("Document", "Metadata"),
    "data.durable_files": ("LoadError", "SaveError"),
    "data.sources": ("Source", "open_source", "recognise"),
    "data.errors": ("CorpusError",),
    "models.lda.document_fit": ("LocalInfo",),
    "models.lda.document_sampling": ("SampledInfo",),
    "models.lda.execution": ("Batched", "Sequential"),
    "models.lda.methods": ("Collapsed", "Maximum", "Mean", "Sampled", "Variational"),
    "models.lda.model": ("LDA", "elbo", "local_step", "log_predictive", "split_documents"),
    "models.lda.topics": ("init_topics", "seed_topics", "topics"),
    "models.topic_groups": ("TopicGroups", "topic_groups"),
    "models.topic_quality": (
        "TopicMatch",
        "TopicQuality",
        "diversity",
        "effective_topics",
        "junk_topics",
        "match_topics",
        "near_duplicates",
        "npmi",
        "top_words",
        "topic_quality",
    ),
    "training.checkpoints": ("Checkpoint", "Checkpoints"),
    "training.driver": ("Progress", "Training", "fit"),
    "training.engines": ("NotFiniteError",),
}
_MODULES = {  # modules that are used by their own name
    "adaptive": "core.adaptive",
    "corpus_folder": "data.corpus_folder",
    "diagnostics": "core.diagnostics",
    "dirichlet": "models.dirichlet",
    "distributed": "training.distributed",
    "text": "data.text",
    "window": "core.window",
}
_RENAMED = {"store": "data.corpus_folder"}  # a former name of a module, which stays importable
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}

# `from smoothgrad_jax import *` must not fail because an extra is missing.
_missing = () if importlib.util.find_spec("sklearn") else _NAMES["app.estimator"]
__all__ = sorted(
    {*_MODULE_OF, *_MODULES}.difference(_missing), key=lambda name: (name != name.upper(), name[0].islower(), name)
)


def __getattr__(name: str) -> object:
    if name in _MODULES or name in _RENAMED:
        return importlib.import_module(f"{__name__}.{(_MODULES | _RENAMED)[name]}")
    if name in _MODULE_OF:
        value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
