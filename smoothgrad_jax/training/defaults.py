"""Defaults of a run for any model; :mod:`smoothgrad_jax.app.settings` adds those of LDA.

This module imports nothing, so that ``smoothgrad fit --help`` is fast.
"""

WINDOW = 10  # L
KAPPA = 0.7  # κ
MAX_THREADS = 1024  # more than any machine has cores for; each thread has memory of its own


def default_batch_size(num_docs: int, batches_per_pass: int = 32) -> int:
    """Return B for a corpus of D documents: D / ``batches_per_pass``, between 32 and 256."""
    return min(max(int(num_docs) // batches_per_pass, 32), 256)


def default_tau(batches_per_pass: float) -> float:
    """Return τ of the step sizes: the number of minibatches per pass, between 1 and 64.

    Where a minibatch is a large part of the data, its statistics have little noise, and a few passes are few steps;
    these have to be large. With B = D the first step is that of batch variational Bayes.
    """
    return min(max(float(batches_per_pass), 1.0), 64.0)
