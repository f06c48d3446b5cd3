"""Smoothed stochastic variational inference in JAX, after Mandt and Blei (NIPS 2014)."""

from smoothgrad_jax import diagnostics, dirichlet, window
from smoothgrad_jax.corpus import Corpus, prefetch, sample
from smoothgrad_jax.diagnostics import averaged_step, bias_variance, count_negative
from smoothgrad_jax.documents import Batch, pack
from smoothgrad_jax.fit import NotFiniteError, Progress, Training, fit
from smoothgrad_jax.lda import (
    LDA,
    LocalInfo,
    elbo,
    init_topics,
    local_step,
    log_predictive,
    split_documents,
    topics,
)
from smoothgrad_jax.svi import SVIState, global_step, init, phase_out, robbins_monro, run, sweep
from smoothgrad_jax.transform import natural_gradient, smoothed_svi, window_mean

__version__ = "0.1.0"

__all__ = [
    "LDA",
    "Batch",
    "Corpus",
    "LocalInfo",
    "NotFiniteError",
    "Progress",
    "SVIState",
    "Training",
    "averaged_step",
    "bias_variance",
    "count_negative",
    "diagnostics",
    "dirichlet",
    "elbo",
    "fit",
    "global_step",
    "init",
    "init_topics",
    "local_step",
    "log_predictive",
    "natural_gradient",
    "pack",
    "phase_out",
    "prefetch",
    "robbins_monro",
    "run",
    "sample",
    "smoothed_svi",
    "split_documents",
    "sweep",
    "topics",
    "window",
    "window_mean",
]
