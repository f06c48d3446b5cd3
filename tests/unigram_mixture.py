"""A mixture of unigrams: a second model, in one file, with a row-sparse and a dense leaf.

    c_d ~ Categorical(π),   w_dn ~ β_c,        π ~ Dirichlet(η_π),   β_k ~ Dirichlet(η_β)

    r_dk ∝ exp(E[log π_k] + Σ_w n_dw E[log β_wk])

| letter | name                  | shape  | meaning                                             |
|--------|-----------------------|--------|-----------------------------------------------------|
| λ      | ``params["words"]``   | [V, K] | row-sparse: a minibatch touches the rows it contains|
| ω      | ``params["weights"]`` | [K]    | dense                                               |
| T      | ``totals``            | [K]    | column sums of λ                                    |
| r      |                       | [B, K] | responsibilities                                    |
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import digamma

from smoothgrad_jax.core.model import HeldOut
from smoothgrad_jax.core.row_sparse.kernel import GatheredKernel
from smoothgrad_jax.data.batches import pack
from smoothgrad_jax.models.lda.model import split_documents


class UnigramMixture(NamedTuple):
    """The model and its hyperparameters."""

    eta_words: Any
    eta_weights: Any
    num_docs: Any

    uses_documents = True

    @property
    def prior(self):
        return {"words": self.eta_words, "weights": self.eta_weights}

    def local_step(self, params, batch, key=None):
        rows, totals = params["words"][batch.vocabulary], params["words"].sum(0)
        stats, weights, info = fit_rows(self, rows, totals, params["weights"], batch, key)
        # The padding of the vocabulary adds zeros to row 0.
        scaled = self.num_docs / batch.size * stats
        return {"words": jnp.zeros_like(params["words"]).at[batch.vocabulary].add(scaled), "weights": weights}, info

    # For the row-sparse engine.
    def split_rows(self, params):
        return params["words"], params["weights"]

    def join_rows(self, matrix, rest):
        return {"words": matrix, "weights": rest}

    def row_prior(self):
        return self.eta_words, self.eta_weights

    def row_kernel(self, num_columns, dtype):
        return GatheredKernel(self, fit_rows, num_columns, self.num_docs)

    # For held-out scores.
    def split_held_out(self, data, key, params):
        observed, held_out = (pack(half) for half in split_documents(data, key))
        return HeldOut(observed, held_out)

    def held_out_score(self, params, held_out):
        return float(score(self, params, held_out))


def fit_rows(model, rows, totals, weights, batch, key):
    """Return the statistics of a minibatch from its rows of λ."""
    del key
    document = document_of_entry(batch)
    log_beta = digamma(rows) - digamma(totals)
    evidence = batch.counts[:, None] * log_beta[batch.words]
    log_r = digamma(weights) + jnp.zeros((batch.size, rows.shape[1]), rows.dtype).at[document].add(evidence)
    r = jax.nn.softmax(log_r, axis=1)
    stats = jnp.zeros_like(rows).at[batch.words].add(batch.counts[:, None] * r[document])
    return stats, model.num_docs / batch.size * r.sum(0), r


def document_of_entry(batch):
    """The document of each entry; the padding, whose counts are 0, belongs to the last one."""
    number = jnp.searchsorted(batch.offsets, jnp.arange(batch.words.shape[0]), side="right") - 1
    return jnp.minimum(number, batch.size - 1)


@jax.jit
def score(model, params, held_out):
    lam, batch = params["words"], held_out.held_out
    _, r = model.local_step(params, held_out.observed)
    beta = (lam / lam.sum(0))[batch.vocabulary][batch.words]
    log_p = jnp.log((r[document_of_entry(batch)] * beta).sum(1))
    return jnp.sum(batch.counts * log_p) / jnp.sum(batch.counts)


def reference_step(model, params, documents):
    """The statistics in float64 NumPy, document by document."""
    from scipy.special import psi

    lam, weights = params["words"], params["weights"]
    stats = {"words": np.zeros_like(lam), "weights": np.zeros_like(weights)}
    log_beta = psi(lam) - psi(lam.sum(0))
    for words, counts in documents:
        log_r = psi(weights) + np.asarray(counts) @ log_beta[np.asarray(words, int)]
        r = np.exp(log_r - log_r.max())
        r /= r.sum()
        stats["weights"] += r
        for w, n in zip(words, counts, strict=True):
            stats["words"][w] += n * r
    scale = model.num_docs / len(documents)
    return {name: scale * value for name, value in stats.items()}
