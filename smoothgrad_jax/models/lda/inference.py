"""Topic proportions and held-out scores of any number of documents, on all cores, with the topics held fixed.

| letter | name         | shape  | meaning                                                                            |
|--------|--------------|--------|------------------------------------------------------------------------------------|
| γ      |              | [D, K] | q(θ_d) = Dirichlet(γ_d), fitted to the words of document d alone                   |
| θ      |              | [D, K] | E[θ] = γ / Σ_k γ_k, topic proportions                                              |
| λ      | ``lam``      | [V, K] | the topics, from :func:`smoothgrad_jax.fit`                                        |

γ of a document depends on its words, the topics and the prior, and on no other document. Only the split into halves in
:func:`completion` is random.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from smoothgrad_jax.core._threads import num_threads, submit
from smoothgrad_jax.core._xla import SINGLE_THREAD_OPTIONS
from smoothgrad_jax.core.platforms import platform_of
from smoothgrad_jax.core.types import ArrayLike, PRNGKey
from smoothgrad_jax.data import batches
from smoothgrad_jax.data.batches import DocumentsLike
from smoothgrad_jax.data.corpus import Corpus
from smoothgrad_jax.models.lda.document_sampling import SampledInfo
from smoothgrad_jax.models.lda.execution import for_platform
from smoothgrad_jax.models.lda.methods import deterministic
from smoothgrad_jax.models.lda.model import LDA, check, fit_local, local_step, split_documents
from smoothgrad_jax.models.lda.row_kernel import without_tokens
from smoothgrad_jax.models.lda.topics import topics

_CHUNK = 512  # documents per call of the compiled program
_ENTRIES = 1 << 16  # entries of held-out halves that are scored at a time; allocates two arrays [_ENTRIES, K]


class Completion(NamedTuple):
    """How well one half of the words of each document is predicted from the other half.

    Attributes:
      log_prob: [D] sum of log p(word) over the held-out half.
      words: [D] tokens in the held-out half.
    """

    log_prob: np.ndarray
    words: np.ndarray

    @property
    def score(self) -> float:
        """Nats per held-out word, over all documents; NaN if nothing is held out."""
        total = self.words.sum()
        return float(self.log_prob.sum() / total) if total else float("nan")

    @property
    def perplexity(self) -> float:
        """exp(−score)."""
        return float(np.exp(-self.score))


def posteriors(
    model: LDA,
    lam: ArrayLike,
    X: DocumentsLike,
    *,
    tol: float | None = None,
    max_iter: int | None = None,
    threads: int | None = None,
) -> np.ndarray:
    """Return γ of documents.

    Allocates, besides the result, a few arrays [U, K] per thread for the U different words of 512 documents.

    Args:
      model: Priors, ``tol`` and ``max_iter``; ``num_docs`` has no effect.
      lam: λ [V, K].
      X: Documents × words, as in :func:`smoothgrad_jax.pack`, or a :class:`smoothgrad_jax.Corpus`, with at most V
      words.
      tol, max_iter: When the fit of a document stops; by default as the model says.
      threads: Number of threads; by default one per core, up to 8.

    Returns:
      γ [D, K] in the dtype of λ; γ of an empty document is α.
    """
    corpus = Corpus.of(X)
    given: dict[str, Any] = {name: value for name, value in (("tol", tol), ("max_iter", max_iter)) if value is not None}
    model = check(model._replace(method=deterministic(model.method), **given), lam, corpus.num_words)
    lam = jnp.asarray(lam)
    model = model._replace(execution=for_platform(model.execution, platform_of(lam)))
    size = min(_CHUNK, batches.next_power_of_two(corpus.num_docs))  # few programs, whatever the number of documents
    starts = np.arange(0, corpus.num_docs, size)
    lengths = np.diff(corpus.indptr)
    shortest, layout = int(lengths.argmin()), _layout(corpus, lengths, starts, size)
    out = np.empty((corpus.num_docs, lam.shape[1]), lam.dtype)

    def fit(start):
        # The last chunk is filled up with the shortest document, so that all chunks have one shape.
        chunk = start + np.arange(size)
        batch = corpus.pack(np.where(chunk < corpus.num_docs, chunk, shortest), layout)
        gamma = np.asarray(_fit(model, lam, without_tokens(batch)))
        out[start : start + size] = gamma[: len(out) - start]

    threads = min(threads or num_threads(), len(starts))
    with ThreadPoolExecutor(threads, thread_name_prefix="inference") as pool:
        try:
            for each in [submit(pool, fit, start) for start in starts.tolist()]:
                each.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return out


def sampled_counts(model: LDA, lam: ArrayLike, X: DocumentsLike, key: PRNGKey) -> np.ndarray:
    """Return the tokens per document and topic [D, K] after the last sweep of a model with the sampled method."""
    _, info = local_step(model, jnp.asarray(lam), batches.pack(X), key=key)
    assert isinstance(info, SampledInfo), "the model must sample"
    return np.asarray(info.tokens, np.float64)


def proportions(model: LDA, lam: ArrayLike, X: DocumentsLike, **options: Any) -> np.ndarray:
    """Return E[θ] of documents, [D, K] with rows that sum to one; arguments as in :func:`posteriors`.

    Example:
      >>> import numpy as np
      >>> lam = np.array([[9, 1], [9, 1], [1, 9]], np.float32)  # three words, two topics
      >>> theta = proportions(LDA(0.1, 0.1, 1), lam, np.array([[3, 2, 0], [0, 0, 4]]))
      >>> theta.argmax(1).tolist()
      [0, 1]
    """
    gamma = posteriors(model, lam, X, **options)
    gamma /= gamma.sum(1, keepdims=True)
    return gamma


def completion(model: LDA, lam: ArrayLike, X: DocumentsLike, key: PRNGKey | None = None, **options: Any) -> Completion:
    """Score documents by completion: half of the tokens of each document is observed, the other half is predicted.

        log p(w) = log Σ_k E[θ_dk | observed] E[β_wk]

    Args:
      model, lam, X: As in :func:`posteriors`.
      key: Decides which half; by default the same half at every call, so that models can be compared.
      options: ``tol``, ``max_iter`` and ``threads`` of :func:`posteriors`.

    Returns:
      :class:`Completion`; its ``score`` equals :func:`smoothgrad_jax.log_predictive` of these halves.
    """
    observed, held_out = split_documents(X, jax.random.key(0) if key is None else key)
    theta = proportions(model, lam, observed, **options)
    lam = np.asarray(lam)
    beta = topics(lam).T
    document = np.repeat(np.arange(held_out.shape[0]), np.diff(held_out.indptr))
    log_prob = np.empty(held_out.nnz)
    for first in range(0, held_out.nnz, _ENTRIES):
        some = slice(first, first + _ENTRIES)
        p = np.einsum("ek,ek->e", theta[document[some]], beta[held_out.indices[some]], dtype=np.float64)
        log_prob[some] = held_out.data[some] * np.log(p)
    return Completion(
        log_prob=np.bincount(document, log_prob, held_out.shape[0]),
        words=np.bincount(document, held_out.data, held_out.shape[0]),
    )


@partial(jax.jit, compiler_options=SINGLE_THREAD_OPTIONS)
def _fit(model, lam, batch):
    return fit_local(model, lam, batch, None)[1].gamma


def _layout(corpus, lengths, starts, size):
    """Return one layout for all chunks, for the longest document and for the chunk with the most entries."""
    ends = np.minimum(starts + size, corpus.num_docs)
    entries = int((corpus.indptr[ends] - corpus.indptr[starts]).max()) + size * int(lengths.min())
    return batches.round_layout(int(lengths.max()), entries, corpus.num_words)
