"""Topics to start from, and expected topics."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse

from smoothgrad_jax.core.types import Array, PRNGKey
from smoothgrad_jax.data import batches
from smoothgrad_jax.data.corpus import Corpus

_SEEDS, _SEED_WEIGHT = 20, 0.3  # documents per initial topic; experiments/BENCHMARKS.md says how the weight was chosen


@partial(jax.jit, static_argnames=("num_words", "num_topics", "dtype"))
def init_topics(key: PRNGKey, num_words: int, num_topics: int, dtype: type | np.dtype = np.float32) -> Array:
    """Return random λ [V, K] with mean 1 and standard deviation 0.1, close to Gamma(100, 1/100)."""
    # Wilson and Hilferty: the cube root of a Gamma variable is nearly normal. Much faster than a Gamma sampler.
    normal = jax.random.normal(key, (num_words, num_topics), dtype)
    return jnp.maximum(1 - 1 / 900 + normal / 30, 0.1) ** 3


def seed_topics(
    key: PRNGKey,
    X: scipy.sparse.csr_array | Corpus,
    num_topics: int,
    *,
    num_docs: float | None = None,
    dtype: type | np.dtype = np.float32,
) -> np.ndarray:
    """Return λ [V, K] in which each topic leans towards twenty documents drawn at random.

    Topics that start alike, as those of :func:`init_topics`, differ only by noise: some of them take most of the
    corpus, and many stay empty. Topics seeded with documents start apart, and more of them are used. Seeding suits
    small priors; with α = η = 0.5, as in the paper, noise is the better start.

    Args:
      key: A random key.
      X: Documents × words, CSR or a :class:`smoothgrad_jax.Corpus`.
      num_topics: K.
      num_docs: D, if X is only a part of the corpus.
      dtype: Of λ.
    """
    size, num_words = X.shape
    # The spawn key keeps the stream apart from that of the minibatches, which are drawn with the same key.
    rng = np.random.default_rng(np.random.SeedSequence(np.asarray(jax.random.key_data(key)).ravel(), spawn_key=(1,)))
    few = num_topics * _SEEDS > size
    rows = rng.choice(size, num_topics * _SEEDS, replace=few)
    entries = batches.entry_positions(X, rows)
    topic = np.repeat(np.arange(len(rows)) // _SEEDS, X.indptr[rows + 1] - X.indptr[rows])
    places = np.asarray(X.indices[entries], np.int64) * num_topics + topic
    # Few words of a topic have seeds: no second array of the size of λ is needed.
    places, entry = np.unique(places, return_inverse=True)
    counts = np.bincount(entry, X.data[entries], len(places))
    totals = np.bincount(places % num_topics, counts, num_topics)
    # The seeds of a topic weigh a fraction of the tokens that it would have if all topics were equal.
    tokens = (size if num_docs is None else num_docs) * counts.sum() / len(rows)
    fraction = counts / np.maximum(totals, 1)[places % num_topics]
    lam = np.array(init_topics(key, num_words, num_topics, dtype))
    lam.reshape(-1)[places] += (_SEED_WEIGHT * tokens / num_topics * fraction).astype(lam.dtype)
    return lam


def topics(lam: Array) -> Array:
    """Return E[β] as [K, V]: one row per topic, which sums to one."""
    # NumPy adds the rows one after the other: in float32 the sum of a million small numbers is wrong by percents.
    is_numpy = isinstance(lam, np.ndarray)
    total = lam.sum(0, np.float64, keepdims=True).astype(lam.dtype) if is_numpy else lam.sum(0, keepdims=True)
    return (lam / total).T
