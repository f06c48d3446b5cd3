"""Latent Dirichlet allocation.

    β_k ~ Dirichlet(η),   θ_d ~ Dirichlet(α),   z_dn ~ θ_d,   w_dn ~ β_z

    q(β_k) = Dirichlet(λ_·k),   q(θ_d) = Dirichlet(γ_d),   q(z_dn) = φ_dn

| letter | name           | shape   | meaning                                                                |
|--------|----------------|---------|------------------------------------------------------------------------|
| α      | ``alpha``      | [K]     | prior of the topic proportions; or one number                          |
| η      | ``eta``        | [V, K]  | prior of the topics; or anything that broadcasts to it                 |
| λ      | ``lam``        | [V, K]  | word-major: the words of a document are rows                           |
| γ      | ``gamma``      | [B, K]  | variational parameters of the topic proportions                        |
| φ      |                | [n, K]  | responsibilities of the topics for a document's words; never stored    |
| n_w    | ``counts``     | [n]     | how often a word occurs in the document                                |
| Ŝ      | ``stats``      | [V, K]  | (D/B) Σ_d n_dw φ_dw: expected counts, scaled up to the corpus          |
| θ̃, β̃   |                |         | exp E[log θ], exp E[log β], each up to a factor that cancels in φ      |

The coordinate updates for one document are φ_wk ∝ θ̃_k β̃_wk and γ_k = α_k + Σ_w n_w φ_wk. Together, without φ:

    γ ← α + θ̃ ∘ ((n / β̃θ̃) β̃)

Float32 suffices for any prior, because β̃ is scaled so that the largest entry of each word is 1, and θ̃ so that the
largest γ of the document gets a number near 1. All factors cancel in φ.

References: Blei, Ng and Jordan, *Latent Dirichlet Allocation*, JMLR 2003; Hoffman, Blei and Bach, *Online Learning for
Latent Dirichlet Allocation*, NIPS 2010.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from smoothgrad_jax.core.fused_loops import row, set_row, whole
from smoothgrad_jax.data import batches as documents
from smoothgrad_jax.data.batches import Batch
from smoothgrad_jax.models import dirichlet

_LANES = 16  # topics are padded to a multiple of this: AVX-512 takes 16 at a time, and XLA takes a rest one by one
_SEEDS, _SEED_WEIGHT = 20, 0.3  # documents of a topic to start from; with a weight of 1 the score is lower
_ROWS = 64  # of a partial sum
_MOMENTUM, _RAMP = 0.25, 40  # b_t = min(t/40, 1/4): 7.8 evaluations a document where plain updates take 14.3 (arXiv)


class LDA(NamedTuple):
    """The model: what does not change while topics are learned.

    Attributes:
      alpha: α > 0, one number or one per topic.
      eta: η > 0, one number or anything that broadcasts to λ [V, K].
      num_docs: D, the number of documents in the corpus that minibatches stand for.
    """

    alpha: Any
    eta: Any
    num_docs: Any


class LocalInfo(NamedTuple):
    """What the local step found.

    Attributes:
      gamma: γ [B, K], in the order of the documents in the input.
      iterations: [B], updates of γ per document; 0 for an empty one.
      change: The largest last mean |Δγ| of all documents; at most ``tol``, unless some stopped at ``max_iter``.
    """

    gamma: jax.Array
    iterations: jax.Array
    change: jax.Array


@partial(jax.jit, static_argnames=("num_words", "num_topics", "dtype"))
def init_topics(key: jax.Array, num_words: int, num_topics: int, dtype: Any = jnp.float32) -> jax.Array:
    """Random λ [V, K] with mean 1 and standard deviation 0.1, near Gamma(100, 1/100), to start from."""
    # Wilson and Hilferty: the cube root of a Gamma variable is nearly normal. Fifty times faster than a Gamma sampler.
    normal = jax.random.normal(key, (num_words, num_topics), dtype)
    return jnp.maximum(1 - 1 / 900 + normal / 30, 0.1) ** 3


def seed_topics(
    key: jax.Array, X: Any, num_topics: int, *, num_docs: float | None = None, dtype: Any = jnp.float32
) -> np.ndarray:
    """λ [V, K] to start from that leans, for each topic, towards twenty documents drawn at random.

    Topics that start alike, as those of :func:`init_topics`, are told apart by noise: some run ahead, take most of the
    corpus, and many of K stay empty. Of 50 topics of Reuters' news 24 were in effect used after five passes with that
    start, 38 with this one (exp of the entropy of their shares), and the held-out score rose from −6.906 to −6.829; of
    100 topics of 20,000 arXiv abstracts after four passes 16 and 29, −7.668 and −7.645. That is for small priors: with
    α = η = 0.5, as in the paper, it scored −7.80 where noise scored −7.69 (all of arXiv, L = 1, (64 + t)^−0.7, 1,000
    steps).

    Args:
      key: A random key.
      X: Documents × words, CSR or a :class:`smoothgrad_jax.Corpus`.
      num_topics: K.
      num_docs: D, if X is only a part of the corpus.
      dtype: Of λ.
    """
    (size, num_words), rng = X.shape, np.random.default_rng(np.asarray(jax.random.key_data(key)).ravel())
    few = num_topics * _SEEDS > size
    rows = rng.choice(size, num_topics * _SEEDS, replace=few)
    entries = documents.entry_positions(X, rows)
    topic = np.repeat(np.arange(len(rows)) // _SEEDS, X.indptr[rows + 1] - X.indptr[rows])
    places = np.asarray(X.indices[entries], np.int64) * num_topics + topic
    counts = np.bincount(places, X.data[entries], num_words * num_topics).reshape(num_words, num_topics)
    # The seeds of a topic weigh as much as a share of the words that it would have, were all topics equal.
    words = (size if num_docs is None else num_docs) * counts.sum() / len(rows)
    share = counts / np.maximum(counts.sum(0), 1)
    noise = np.asarray(init_topics(key, num_words, num_topics, dtype))
    return noise + (_SEED_WEIGHT * words / num_topics * share).astype(noise.dtype)


def local_step(
    model: LDA, lam: jax.Array, batch: Batch, tol: Any = 1e-3, max_iter: Any = 100
) -> tuple[jax.Array, LocalInfo]:
    """Fit the documents of a minibatch with the topics held fixed; compiled once per shape.

    Each document starts from γ = α + N/K (N its number of tokens) and stops by itself, when an update moves γ by less
    than ``tol`` on average over the topics; its γ depends on nothing else in the batch. The updates have momentum, see
    :func:`smoothgrad_jax.models.lda.fit_documents`.

    Allocates a few arrays [U, K] for the U different words of the batch besides the result, and tiles [M, K] with room
    for the longest document.

    Args:
      model: Priors and corpus size.
      lam: λ [V, K], positive.
      batch: From :func:`smoothgrad_jax.pack`.
      tol: Where to stop.
      max_iter: Where to stop at the latest.

    Returns:
      ``(stats, info)``: Ŝ [V, K], the expected counts n_dw φ_dwk summed over the documents and scaled by D/B; and
      :class:`LocalInfo`.

    With B = D this is the E-step of batch variational Bayes.
    """
    return _local_step(_checked(model, lam, batch), lam, batch, tol, max_iter)


def elbo(model: LDA, lam: jax.Array, batch: Batch, tol: Any = 1e-3, max_iter: Any = 100) -> jax.Array:
    """The evidence lower bound of the corpus, estimated from a minibatch.

        (D/B) Σ_d [ Σ_w n_dw log Σ_k exp(E[log θ_dk] + E[log β_wk]) − KL(q(θ_d) ‖ p(θ_d)) ] − Σ_k KL(q(β_k) ‖ p(β_k))

    with φ at its optimum. The documents' part is scaled to the corpus, the topics' part is counted once: on held-out
    documents it is *not* a score per word of those documents (use :func:`log_predictive` for that).

    Args: as in :func:`local_step`.

    Returns:
      A scalar, in nats. For B = D it is the bound itself.
    """
    return _elbo(_checked(model, lam, batch), lam, batch, tol, max_iter)


def log_predictive(
    model: LDA, lam: jax.Array, observed: Any, held_out: Any, tol: Any = 1e-3, max_iter: Any = 100
) -> jax.Array:
    """Document completion: the mean log probability of a held-out word.

        Σ_d Σ_w n_dw log Σ_k E[θ_dk | observed] E[β_wk]  /  Σ_d Σ_w n_dw

    γ is fitted to the observed half of each document with λ fixed; the sums run over the other half.

    Args:
      model: Priors; ``num_docs`` plays no part.
      lam: λ [V, K].
      observed: The halves that are seen, from :func:`split_documents`: as they are, or packed once for many calls.
      held_out: The halves that are scored: the same documents in the same order.
      tol, max_iter: as in :func:`local_step`.

    Returns:
      A scalar, in nats per word; exp(−score) is a perplexity. NaN if nothing is held out.
    """
    observed, held_out = (X if isinstance(X, Batch) else documents.pack(X) for X in (observed, held_out))
    model = _checked(model, lam, observed)
    _checked(model, lam, held_out)
    if observed.size != held_out.size:
        raise ValueError(f"{observed.size} documents are observed, but {held_out.size} are held out")
    return _log_predictive(model, lam, observed, held_out, tol, max_iter)


def split_documents(X: Any, key: jax.Array) -> tuple[Any, Any]:
    """Split the tokens of each document in two halves at random, for :func:`log_predictive`.

    Args:
      X: Documents × words, as in :func:`smoothgrad_jax.pack`.
      key: A random key.

    Returns:
      ``(observed, held_out)``, two CSR arrays of the shape of X that sum to it. The odd token is observed, so that a
      document of one token has nothing held out.
    """
    seed = np.asarray(jax.random.key_data(key)).ravel()
    return documents.split_tokens(X, np.random.default_rng(seed))


def topics(lam: jax.Array) -> jax.Array:
    """E[β] as [K, V]: one row a topic, which sums to one."""
    return (lam / lam.sum(0, keepdims=True)).T


@jax.jit
def _local_step(model, lam, batch, tol, max_iter):
    _, _, stats, info = _fit(model.alpha, lam, batch, tol, max_iter)
    # Ŝ_wk = (D/B) Σ_d n_dw φ_dwk, 0 for words that the batch does not have
    scale = model.num_docs / batch.size
    return jnp.zeros_like(lam).at[batch.vocabulary].add(scale * stats[:, : lam.shape[1]]), info


@jax.jit
def _elbo(model, lam, batch, tol, max_iter):
    table, log_scale, _, info = _fit(model.alpha, lam, batch, tol, max_iter)
    likelihood = _log_likelihoods(jnp.zeros(batch.size, lam.dtype), table, log_scale, batch, info.gamma).sum()
    local = dirichlet.kl_divergence(info.gamma, model.alpha).sum()
    topic = dirichlet.kl_divergence(lam, model.eta, axis=0).sum()
    return model.num_docs / batch.size * (likelihood - local) - topic


@whole
def _log_likelihoods(_, table, log_scale, batch, gammas):
    """Σ_w n_dw log Σ_k exp(E[log θ_dk] + E[log β_wk]) [B]."""

    def one(d):
        theta, shift = _theta(gammas[d])
        # The factors are put back that θ̃ and β̃ lack.
        shift = shift - dirichlet.digamma(gammas[d].sum())
        return _sum_log(table, _pad(theta), batch, d, lambda w: log_scale[w] + shift)

    return lax.map(one, jnp.arange(batch.size))


@jax.jit
def _log_predictive(model, lam, observed, held_out, tol, max_iter):
    *_, info = _fit(model.alpha, lam, observed, tol, max_iter)
    theta = info.gamma / info.gamma.sum(1, keepdims=True)
    beta = lam[held_out.vocabulary] / lam.sum(0, keepdims=True)
    log_p = _log_probabilities(jnp.zeros(held_out.size, lam.dtype), beta, theta, held_out)
    return log_p.sum() / held_out.counts.astype(lam.dtype).sum()


@whole
def _log_probabilities(_, beta, theta, batch):
    """Σ_w n_dw log Σ_k θ_dk β_wk [B]."""
    return lax.map(lambda d: _sum_log(beta, theta[d], batch, d, lambda _: 0), jnp.arange(batch.size))


def _sum_log(table, theta, batch, d, extra):
    """Σ_w n_dw (log (table θ)_w + extra(w)) of document d."""

    def add(i, total):
        w = batch.words[i]
        return total + batch.counts[i].astype(total.dtype) * (jnp.log(table[w] @ theta) + extra(w))

    return lax.fori_loop(batch.offsets[d], batch.offsets[d + 1], add, jnp.zeros((), theta.dtype))


@jax.custom_batching.sequential_vmap
def _fit(alpha, lam, batch, tol, max_iter):
    """β̃, the log of its scale, Σ_d n_dw φ_dwk [U, K padded], and what was found.

    Runs under ``vmap`` go one after the other: together each document would take as long as in the slowest run, and a
    row that is written for several runs at once is no longer written in place.
    """
    alpha = jnp.broadcast_to(alpha, lam.shape[1])
    table = jnp.zeros((batch.vocabulary.shape[0], padded(lam.shape[1])), lam.dtype)
    info = LocalInfo(
        jnp.zeros((batch.size, lam.shape[1]), lam.dtype), jnp.zeros(batch.size, jnp.int32), jnp.zeros((), lam.dtype)
    )
    empty = table, table[:, 0], table, info
    return _fit_whole(empty, alpha, lam, lam.sum(0, keepdims=True), batch, tol, max_iter)


@whole
def _fit_whole(_, alpha, lam, total, batch, tol, max_iter):
    table, log_scale = topic_table(lam, total, batch)
    stats, _, info = fit_documents(alpha, (table,), batch, tol, max_iter)
    return table, log_scale, stats, info


def fit_documents(
    alpha: jax.Array,
    tables: tuple[jax.Array, ...],
    batch: Batch,
    tol: Any,
    max_iter: Any,
    first: Any = 0,
    last: Any = None,
) -> tuple[jax.Array, jax.Array, LocalInfo]:
    """Fit γ of the documents of a batch; not compiled by itself.

    The fixed point is found with momentum (Polyak's heavy ball): with F(γ) = α + θ̃ ∘ ((n / β̃θ̃) β̃), the next
    point to
    look at is

        γ_t+1 = max(γ_t + a_t (F(γ_t) − γ_t) + b_t (γ_t − γ_t−1), α),    b_t = min(t/40, 1/4),  a_t = (1 + √b_t)²

    and where mean |F(γ) − γ| < tol, F(γ) is the answer. F is a step of coordinate ascent: at a maximum of the bound its
    Jacobian has eigenvalues in [0, 1). Any b < 1 with this a converges to that maximum, in the long run by a factor of
    √b a step along all directions with eigenvalues up to 4√b / (1 + √b)²; those with eigenvalues below √b are slower
    than plain updates, and short documents have hardly any others, so that b rises slowly. The fixed point lies above
    α, hence the maximum takes no topic further from it. The last evaluation is as close to the fixed point as that of
    plain updates, since the same residual is asked for. Evaluations a document on three corpora (400 documents each,
    trained topics, K = 100); where α is small a document has several fixed points, and the bound may differ:

    |                                           | arXiv      | Wikipedia  | headlines |
    |-------------------------------------------|------------|------------|-----------|
    | plain updates, α = 0.5 and 0.1            | 14.3, 21.6 | 17.7, 24.8 | 8.3, 9.9  |
    | over-relaxed, a = 1.6, b = 0              | 10.4, 15.6 | 12.7, 17.2 | 9.3, 11.6 |
    | with momentum                             | 7.8, 12.3  | 8.9, 13.2  | 6.3, 7.7  |
    | its bound over plain, nats in 10⁴ words   | 0.1, 0.3   | 0.0, −0.6  | 0.3, 12   |

    All of it is loops over rows, read and written in place, for a caller that is
    :func:`smoothgrad_jax.core.fused_loops.whole`.

    Args:
      alpha: α [K].
      tables: β̃ [U, K padded], from :func:`scaled_topics`, for the words of the batch; if there are several, those with
        the positions 0 … U − 1 are in the first, U … 2 U − 1 in the second, and so on.
      batch: The documents.
      tol, max_iter: As in :func:`local_step`.
      first, last: Fit only the documents first … last − 1.

    Returns:
      Σ_d n_dw φ_dwk for the words of all tables, one after the other [S U, K padded]; its sum over words [K]; and
      :class:`LocalInfo`, in which a document that was not asked for keeps γ = α.
    """
    num_topics, dtype = alpha.shape[0], tables[0].dtype
    width = padded(num_topics)
    padded_alpha = _pad(alpha, jnp.finfo(dtype).tiny)  # padding is inert: its β̃ is at most 1 and its θ̃ the floor
    real = _pad(jnp.ones_like(alpha))
    all_counts, sizes, parts = batch.counts.astype(dtype), batch.tiles, range(len(batch.tiles))

    def fit(d, carry):
        stats, tiles, gammas, iterations, change = carry
        start, length = batch.offsets[d], batch.offsets[d + 1] - batch.offsets[d]
        wanted, at, used = zip(*_parts(length, sizes), strict=True)
        # Rows of earlier documents stay where this one has none: they are finite, and their counts are 0.
        tiles = tuple(_fill(tiles[j], tables, batch.words, start + at[j], used[j]) for j in parts)

        def counts(j):
            """n of the words of a tile; for use in a branch for wanted tiles, so that others cost nothing."""
            some = lax.dynamic_slice_in_dim(all_counts, start + at[j], sizes[j])
            return jnp.where(jnp.arange(sizes[j]) < used[j], some, 0)

        def expected(theta):
            """(n / β̃θ̃) β̃"""
            total = jnp.zeros(width, dtype)
            for j in parts:
                total = lax.cond(
                    wanted[j], lambda t, j=j: t + (counts(j) / (tiles[j] @ theta)) @ tiles[j], lambda t: t, total
                )
            return total

        def add(j, theta, stats):
            # n_w φ_wk = (n_w / (β̃θ̃)_w) β̃_wk θ̃_k; in this order no factor can overflow
            ratio = counts(j) / (tiles[j] @ theta)

            def one(i, stats):
                w = batch.words[start + at[j] + i]
                return set_row(stats, w, row(stats, w) + (ratio[i] * row(tiles[j], i)) * theta[None])

            return lax.fori_loop(0, used[j], one, stats)

        def unfinished(state):
            *_, moved, i = state
            return (moved >= tol) & (i < jnp.where(length > 0, max_iter, 0))

        def update(state):
            before, point, gamma, _, i = state
            # γ_t+1 = max(γ_t + a_t (F(γ_t) − γ_t) + b_t (γ_t − γ_t−1), α)
            b = jnp.minimum(i.astype(dtype) / _RAMP, _MOMENTUM)
            a = (1 + jnp.sqrt(b)) ** 2
            before, point = point, jnp.maximum(point + a * (gamma - point) + b * (point - before), padded_alpha)
            # F(γ) = α + θ̃ ∘ ((n / β̃θ̃) β̃)
            theta, _ = _theta(point)
            gamma = padded_alpha + theta * expected(theta)
            return before, point, gamma, _sum(real * jnp.abs(gamma - point)) / num_topics, i + 1

        tokens = lax.fori_loop(start, start + length, lambda i, tokens: tokens + all_counts[i], jnp.zeros((), dtype))
        gamma = padded_alpha + real * (tokens / num_topics)
        begin = (gamma, gamma, gamma, jnp.full((), jnp.inf, dtype), jnp.zeros((), jnp.int32))
        *_, gamma, moved, i = lax.while_loop(unfinished, update, begin)
        theta, _ = _theta(gamma)
        for j in parts:
            stats = lax.cond(wanted[j], partial(add, j, theta), lambda stats: stats, stats)
        moved = jnp.where(length > 0, moved, 0)
        return (
            stats,
            tiles,
            set_row(gammas, d, gamma[None, :num_topics]),
            set_row(iterations, d, i[None]),
            jnp.maximum(change, moved),
        )

    carry = (
        jnp.zeros((len(tables) * tables[0].shape[0], width), dtype),
        tuple(jnp.ones((size, width), dtype) for size in sizes),
        jnp.broadcast_to(alpha, (batch.size, num_topics)),
        jnp.zeros(batch.size, jnp.int32),
        jnp.zeros((), dtype),
    )
    stats, _, *info = lax.fori_loop(first, batch.size if last is None else last, fit, carry)
    return stats, _sum_rows(stats)[:num_topics], LocalInfo(*info)


def _sum_rows(x):
    """The sum over the first axis, of sums of a few rows each: the fewer numbers are added, the less is rounded."""
    nothing = jnp.zeros((1, x.shape[1]), x.dtype)

    def add(i, total):
        some = lax.fori_loop(i * _ROWS, jnp.minimum((i + 1) * _ROWS, len(x)), lambda w, some: some + row(x, w), nothing)
        return total + some

    return lax.fori_loop(0, -(-len(x) // _ROWS), add, nothing)[0]


def _parts(length, sizes):
    """(is it used, where it begins, how many words) for each tile, of a document of that many words."""
    parts, blocks, at = [], (length + sizes[0] - 1) // sizes[0], jnp.zeros_like(length)
    for j, size in reversed(list(enumerate(sizes))):  # the largest first: the last words are in the smallest
        bit = (blocks >> j) & 1
        parts.append((bit > 0, at, bit * jnp.minimum(length - at, size)))
        at = at + bit * size
    return parts[::-1]


def _fill(tile, tables, words, start, used):
    """A tile with the rows of some words."""

    def one(j, tile):
        w = words[start + j]
        if len(tables) == 1:
            return set_row(tile, j, row(tables[0], w))
        which, w = jnp.divmod(w, tables[0].shape[0])
        return set_row(tile, j, lax.switch(which, [partial(row, table) for table in tables], w))

    return lax.fori_loop(0, used, one, tile)


def topic_sizes(total: jax.Array) -> tuple[jax.Array, jax.Array]:
    """e(T) and 1/(T + c) [1, K padded] of the sums over words T [1, K], for :func:`scaled_topics`."""
    total = _pad(jnp.maximum(total, jnp.finfo(total.dtype).tiny), 1)
    return lax.optimization_barrier((dirichlet.exponent(total), 1 / (total + dirichlet.SHIFT)))


def scaled_topics(rows: jax.Array, sizes: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """β̃ of some words: exp E[log β] with the topics padded, and scaled to max_k β̃_wk = 1; not compiled by itself.

    exp E[log β_wk] = (λ_wk + c)/(T_k + c) · exp(e(λ_wk) − e(T_k)),   T_k = Σ_w λ_wk

    Args:
      rows: λ_w [n, K].
      sizes: Of the topics, from :func:`topic_sizes`.

    Returns:
      β̃ [n, K padded] and the log of the scale [n].
    """
    tiny = jnp.finfo(rows.dtype).tiny
    # Padding comes first: XLA takes what a row has beyond a multiple of eight one by one. Its β̃ is next to nothing.
    rows = jnp.maximum(_pad(rows, tiny), tiny)
    # A barrier keeps XLA from computing what stands above it twice, once for the maximum and once for its use.
    # The largest e(λ) goes first: for λ = 1e-6 it is −1e6, and would swallow the digits of e(T).
    exponent = lax.optimization_barrier(dirichlet.exponent(rows))
    largest = _largest(exponent)
    exponent = lax.optimization_barrier((exponent - largest) - sizes[0])
    shift = _largest(exponent)
    scaled = lax.optimization_barrier((rows + dirichlet.SHIFT) * sizes[1] * dirichlet.exp(exponent - shift))
    peak = _largest(scaled)
    return scaled / peak, (largest + shift + jnp.log(peak))[:, 0]


def _largest(x):
    """The largest of the last axis, which stays."""
    # By halves, which overlap where the number is odd: XLA compares these many at a time, and a row one by one.
    while x.shape[-1] > 8:
        half = (x.shape[-1] + 1) // 2
        x = jnp.maximum(x[..., :half], x[..., -half:])
    return x.max(-1, keepdims=True)


def _sum(x):
    """The sum of a vector, by halves as above while its length is even."""
    while x.shape[0] > 8 and x.shape[0] % 2 == 0:
        x = x[: x.shape[0] // 2] + x[x.shape[0] // 2 :]
    return x.sum()


def topic_table(lam: jax.Array, total: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """β̃ [U, K padded] of the words in the batch and the log of its scale [U]; not compiled by itself.

    Args:
      lam: λ [V, K].
      total: T [1, K].
      batch: The documents.
    """
    sizes = topic_sizes(total)

    def fill(i, carry):
        scaled, log_peak = scaled_topics(row(lam, batch.vocabulary[i]), sizes)
        return tuple(map(set_row, carry, (i, i), (scaled, log_peak)))

    num_rows = batch.vocabulary.shape[0]
    empty = jnp.zeros((num_rows, padded(lam.shape[1])), lam.dtype), jnp.zeros(num_rows, lam.dtype)
    return lax.fori_loop(0, batch.num_used, fill, empty)


def _theta(gamma):
    """θ̃ = exp ψ(γ) · exp(−shift), and the shift, for which the largest γ gets an exponent of 0.

    θ̃ is not below a floor that keeps β̃θ̃ positive, and φ a distribution, where all terms of it underflow.
    """
    exponent = dirichlet.exponent(gamma)
    shift = _largest(exponent)[0]
    floor = jnp.finfo(gamma.dtype).tiny ** 0.8
    return jnp.maximum((gamma + dirichlet.SHIFT) * dirichlet.exp(exponent - shift), floor), shift


def padded(num_topics: int) -> int:
    """K rounded up, as tables of β̃ have it."""
    return -(-num_topics // _LANES) * _LANES


def _pad(x, value=0):
    extra = padded(x.shape[-1]) - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, extra)], constant_values=value)


def _checked(model, lam, batch):
    """The model as arrays of λ's dtype, so that 1, 1.0 and np.float64(1) are one program; or an error that says why."""
    if not isinstance(batch, Batch):
        raise ValueError(f"expected a Batch, got {type(batch).__name__}; pack(X) makes one")
    if np.ndim(batch.offsets) != 1:
        raise ValueError(
            f"expected one batch, got a stack of {len(batch.offsets)}; run and sweep take stacks, and "
            "jax.tree.map(lambda x: x[0], batches) is the first of them"
        )
    return check(model, lam, batch.num_words)


def check(model: LDA, lam: Any, num_words: int | None = None) -> LDA:
    """The model as arrays of λ's dtype; or an error that says why it does not fit λ, or documents of so many words."""
    if not isinstance(lam, jax.Array | np.ndarray) or lam.ndim != 2 or lam.dtype not in (np.float32, np.float64):
        what = f"{lam.dtype} of shape {lam.shape}" if hasattr(lam, "dtype") else type(lam).__name__
        raise ValueError(f"lam must be float32 or float64 of shape [V, K], got {what}")
    if not isinstance(model, LDA):
        raise ValueError(f"expected an LDA(alpha, eta, num_docs), got {type(model).__name__}")
    num_rows, num_topics = lam.shape
    if num_words is not None and num_words > num_rows:
        raise ValueError(f"the documents have {num_words} words, but lam has {num_rows} rows")
    return LDA(
        alpha=_positive("alpha", model.alpha, (num_topics,), lam.dtype),
        eta=_positive("eta", model.eta, (num_rows, num_topics), lam.dtype),
        num_docs=_positive("num_docs", model.num_docs, (), lam.dtype),
    )


def _positive(name, value, shape, dtype):
    try:
        fits = np.broadcast_shapes(np.shape(value), shape) == shape
    except ValueError:
        fits = False
    if not fits:
        wanted = f"one number or broadcast to {shape}" if shape else "one number"
        raise ValueError(f"{name} must be {wanted}, got shape {np.shape(value)}")
    if isinstance(value, jax.core.Tracer):
        return value.astype(dtype)
    # A matrix is trusted: to look at all of it would cost as much as the step.
    if np.ndim(value) < 2 and not (np.asarray(value) > 0).all():
        raise ValueError(f"{name} must be positive, got {value}")
    return value.astype(dtype) if isinstance(value, jax.Array) else np.asarray(value, dtype)
