"""LDA by smoothed SVI as a scikit-learn estimator.

| letter | name                | meaning                                                                               |
|--------|---------------------|---------------------------------------------------------------------------------------|
| K      | ``n_components``    | topics                                                                                |
| L      | ``window``          | minibatches over which statistics are averaged                                        |
| B      | ``batch_size``      | documents in a minibatch                                                              |
| α, η   | ``…_prior``         | Dirichlet priors of the topic proportions of a document, and of the words of a topic  |
| ρ_t    | ``learning_rate``   | step size; (τ + t)^−κ with ``learning_offset`` τ and ``learning_decay`` κ             |
| λ      | ``components_``     | [K, V]; a row that is divided by its sum is a topic                                   |

The names and their meanings are those of :class:`sklearn.decomposition.LatentDirichletAllocation`, for which
:class:`SmoothedLDA` can stand in; what differs is said where it does.
"""

import math
import numbers
import zlib
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from smoothgrad_jax.app import progress, saved
from smoothgrad_jax.core import schedules
from smoothgrad_jax.core.row_sparse.state import RowSparseState
from smoothgrad_jax.data.batches import Layout
from smoothgrad_jax.data.corpus import Corpus
from smoothgrad_jax.data.sampling import default_batch_size
from smoothgrad_jax.models.lda import inference, priors, topics
from smoothgrad_jax.models.lda.model import LDA
from smoothgrad_jax.training import driver as training

try:
    from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.validation import check_is_fitted, check_non_negative, validate_data
except ImportError:
    raise ImportError('SmoothedLDA needs scikit-learn: pip install "smoothgrad_jax[sklearn]"') from None

ALPHA = ETA = 0.1  # α and η of those who give none
_LOOK_AT = 512  # documents for an update of α
_UPDATES = 100  # of learned priors during a run, at most
_LEAST_STEPS = 5  # between two updates of learned priors
_MEMORY = 0.1  # share of the newest documents in the mean that α is fitted to


class SmoothedLDA(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Latent Dirichlet allocation, trained online with statistics averaged over the last L minibatches.

    Parameters
    ----------
    n_components : int, default=10
        K, the number of topics.
    window : int, float('inf'), callable or Adaptive, default=10
        L: how many minibatches the statistics are averaged over. 1 is stochastic variational inference, ∞ the mean of
        all so far; a function of the step number, such as ``smoothgrad_jax.phase_out(…)``, changes it on the way, and
        ``smoothgrad_jax.Adaptive()`` finds it.
    doc_topic_prior : float, array of shape (n_components,), "auto" or None, default=None
        α. "auto" learns one number a topic. None is 0.1.
    topic_word_prior : float, array that broadcasts to (n_components, n_features), "auto" or None, default=None
        η. "auto" learns one number. None is 0.1.
    batch_size : int or None, default=None
        B. None is a 32nd of the documents, between 32 and 256.
    learning_rate : float, callable or None, default=None
        ρ: one number in (0, 1], or a function of the step number; None is (τ + t)^−κ.
    learning_offset : float or None, default=None
        τ of the step size. None is the number of minibatches in a pass, between 1 and 64: where a minibatch is a good
        part of the corpus, large steps are safe, and there are few.
    learning_decay : float, default=0.7
        κ of the step size; in (0.5, 1] to converge.
    max_iter : int, default=10
        Passes over the documents, each in an order of its own.
    early_stopping : bool, default=False
        Set ``validation_fraction`` of the documents aside, score them after each pass, and stop when the score has not
        risen by ``tol`` for ``n_iter_no_change`` passes in a row.
    validation_fraction : float, default=0.1
    n_iter_no_change : int, default=2
    tol : float, default=1e-3
        In nats per held-out word.
    mean_change_tol : float, default=1e-3
        A document is fitted when an update moves its γ by less, on average over the topics.
    max_doc_update_iter : int, default=100
        Updates of a document at most.
    total_samples : int, default=1_000_000
        Number of documents that the minibatches of :meth:`partial_fit` stand for.
    init : array of shape (n_components, n_features) or None, default=None
        λ to start from: topics times a number of words, or the ``components_`` of another model. Positive. None seeds
        every topic with a few documents, see :func:`smoothgrad_jax.seed_topics`.
    n_jobs : int or None, default=None
        Threads; None is one a core, up to eight, and fewer where there is little to do.
    verbose : int, default=0
        Show progress: a bar on a terminal, lines elsewhere.
    random_state : int, RandomState or None, default=None
        The topics to start from, and the order of the documents. The same number gives the same result with the same
        number of threads.

    Attributes
    ----------
    components_ : array of shape (n_components, n_features)
        λ: expected number of times that each topic chose each word, plus the prior. Rows divided by their sums are
        E[β]. It may be edited; everything below follows it.
    doc_topic_prior_, topic_word_prior_ : float or array
        The priors, as given, by default, or learned.
    n_iter_ : int
        Passes that were made.
    n_batch_iter_ : int
        Minibatches.
    validation_scores_ : list of float
        With early stopping, the score after each pass.
    n_features_in_, feature_names_in_
        As in any estimator.

    Notes
    -----
    The defaults were chosen by held-out score on 20 newsgroups, Reuters, arXiv abstracts and Wikipedia articles
    (``experiments/defaults.py --start noise``, with α = 1/K: 16,000 to 20,000 documents each, K = 50, ten passes, one
    seed; in nats per word, one thing changed at a time): L = 1 loses 0.02 to 0.03 on three of them and wins 0.003 on
    one; B = 64 loses 0.04 to 0.11, B = 1,024 loses 0.01 to 0.06 on three; τ = 10 loses 0.06 to 0.17 on three, τ = 256
    up to 0.05; κ = 0.5 and 0.9 lose up to 0.10 and 0.07; α = 0.5 loses 0.04 to 0.14 against 1/K = 0.02, and α = 0.1 is
    within 0.015 of it; η = 0.01 loses 0.01 to 0.05. η = 0.5 wins 0.002 to 0.05, but leaves more of the topics empty.
    Topics seeded with documents win 0.01 to 0.08 over noise, and more of them are used. On 2,000 abstracts and the
    2,246 articles of the Associated Press, 256 documents are too large a part: B = 64 did as well or better there.

    α is 0.1 and not 1/K because of large corpora and short texts. With K = 100, B = 256 and seeded topics, 0.1 wins
    0.19 over 1/K after one pass over 585,000 arXiv abstracts and 0.60 after a fifth of a pass over 1,138,000 headlines
    with a snippet; on Wikipedia articles they are equal. With 16,000 to 20,000 documents, K = 50, ten passes, it wins
    0.02 twice and loses 0.01 once. (scikit-learn and gensim take 1/K.)

    Ctrl-C during :meth:`fit` leaves what was learned until then in the attributes, and is raised.

    References
    ----------
    Mandt and Blei, *Smoothed Gradients for Stochastic Variational Inference*, NIPS 2014. Hoffman, Blei and Bach,
    *Online Learning for Latent Dirichlet Allocation*, NIPS 2010.

    Examples
    --------
    >>> import numpy as np
    >>> X = np.random.default_rng(0).poisson(0.5, (200, 30))
    >>> model = SmoothedLDA(5, random_state=0).fit(X)
    >>> model.transform(X[:3]).shape
    (3, 5)
    """

    def __init__(
        self,
        n_components=10,
        *,
        window=10,
        doc_topic_prior=None,
        topic_word_prior=None,
        batch_size=None,
        learning_rate=None,
        learning_offset=None,
        learning_decay=0.7,
        max_iter=10,
        early_stopping=False,
        validation_fraction=0.1,
        n_iter_no_change=2,
        tol=1e-3,
        mean_change_tol=1e-3,
        max_doc_update_iter=100,
        total_samples=1_000_000,
        init=None,
        n_jobs=None,
        verbose=0,
        random_state=None,
    ):
        self.n_components = n_components
        self.window = window
        self.doc_topic_prior = doc_topic_prior
        self.topic_word_prior = topic_word_prior
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.learning_offset = learning_offset
        self.learning_decay = learning_decay
        self.max_iter = max_iter
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.tol = tol
        self.mean_change_tol = mean_change_tol
        self.max_doc_update_iter = max_doc_update_iter
        self.total_samples = total_samples
        self.init = init
        self.n_jobs = n_jobs
        self.verbose = verbose
        self.random_state = random_state

    def fit(self, X, y=None):
        """Learn topics from counts.

        Parameters
        ----------
        X : array or sparse matrix of shape (n_samples, n_features)
            Counts: not negative; fractions will do.
        y : ignored

        Returns
        -------
        self
        """
        X = self._validated(X, reset=True)
        self._check_parameters()
        key, order = self._randomness()
        held_out = None
        if self.early_stopping:
            X, held_out = self._set_aside(X, order)
        corpus = Corpus.of(X)
        model = self._first_model(corpus.num_docs)
        size = min(self.batch_size or default_batch_size(corpus.num_docs), corpus.num_docs)
        steps = -(-self.max_iter * corpus.num_docs // size)
        learns = "auto" in (_kind(self.doc_topic_prior), _kind(self.topic_word_prior))
        run = training.fit(
            corpus,
            model,
            self._first_topics(key, X),
            window=self.window,
            rho=self._rho(corpus.num_docs / size),
            steps=steps,
            batch_size=size,
            key=key,
            held_out=held_out,
            score_every=max(1, round(corpus.num_docs / size)) if held_out is not None else None,
            report_every=max(_LEAST_STEPS, steps // _UPDATES) if learns else None,
            threads=self.n_jobs,
        )
        self._begin(X.dtype)
        learner = _PriorLearner(self, X, order) if learns else None
        try:
            with self._keeping(run):
                for report in progress.watch(run, steps=steps) if self.verbose else run:
                    if learner:
                        run.model = learner.learn(run.model, run.params)
                    if report.score is not None:
                        self.validation_scores_.append(report.score)
                        if self.early_stopping and self._has_converged():
                            break
        finally:
            self._state = None  # other documents should not go into the window of a run over all of these
            self.n_iter_ = min(math.ceil(run.step * size / corpus.num_docs), self.max_iter)
        return self

    def partial_fit(self, X, y=None):
        """Go on learning from some more documents, as one or more minibatches of about ``batch_size``.

        The window reaches back over earlier calls. After :meth:`fit` the topics are kept, and the window begins anew.
        The minibatches stand for a corpus of ``total_samples`` documents; priors are not learned here.

        Parameters
        ----------
        X : array or sparse matrix of shape (n_samples, n_features)
        y : ignored

        Returns
        -------
        self
        """
        first = not hasattr(self, "components_")
        X = self._validated(X, reset=first)
        self._check_parameters()
        if first:
            self._begin(X.dtype)
            start = self._first_topics(self._randomness()[0], X, self.total_samples)
            model = self._first_model(self.total_samples)
        else:
            # Topics that were edited are what counts; the window is of those before.
            goes_on = self._state is not None and self._mark == _mark(self.components_)
            start = self._state if goes_on else self._lam()
            model = self._model(self.total_samples)
        corpus = Corpus.of(X)
        size = self.batch_size or default_batch_size(self.total_samples)
        pieces = np.array_split(np.arange(corpus.num_docs), max(1, round(corpus.num_docs / size)))
        if self._layout is None:
            self._layout = tuple(corpus.layout(len(pieces[0])))
        layout = Layout(*self._layout)
        before = self.n_batch_iter_ - (int(start.step) if isinstance(start, RowSparseState) else 0)
        rho, window = self._rho(self.total_samples / size), self.window
        run = training.fit(
            [corpus.pack(rows, layout) for rows in pieces],
            model,
            start,
            window=(lambda step: window(step + before)) if callable(window) else window,
            rho=(lambda step: rho(step + before)) if callable(rho) else rho,
            threads=None if isinstance(start, RowSparseState) else self.n_jobs,
        )
        with self._keeping(run, before):
            run.finish()
        return self

    def transform(self, X):
        """Topic proportions of documents, with the topics held fixed.

        Nothing is random, and each document is fitted by itself.

        Parameters
        ----------
        X : array or sparse matrix of shape (n_samples, n_features)

        Returns
        -------
        array of shape (n_samples, n_components)
            Rows sum to one; that of an empty document is the prior's.
        """
        check_is_fitted(self, "components_")
        X = self._validated(X, reset=False)
        theta = inference.proportions(self._model(1), self._lam(), X, **self._options())
        return theta.astype(X.dtype, copy=False)

    def score(self, X, y=None):
        """Nats per held-out word by document completion; higher is better.

        Half of the tokens of each document is shown to the model, and the score is the mean of
        log Σ_k E[θ_k | shown] E[β_kw] over the other half. Which half is the same at every call with the same X. It is
        a probability of unseen words, comparable between models with any K, priors or library; scikit-learn's ``score``
        is a bound that counts the topics' part for the whole training corpus, which on held-out documents means
        nothing per word. :func:`smoothgrad_jax.elbo` is the bound.

        Parameters
        ----------
        X : array or sparse matrix of shape (n_samples, n_features)
        y : ignored

        Returns
        -------
        float
            NaN if no document has two tokens.
        """
        check_is_fitted(self, "components_")
        X = self._validated(X, reset=False)
        return inference.completion(self._model(1), self._lam(), X, **self._options()).score

    def perplexity(self, X):
        """exp(−score): how many equally likely words would be as hard to guess. See :meth:`score`."""
        return float(np.exp(-self.score(X)))

    def to_model(self, vocabulary=None):
        """The topics as a :class:`smoothgrad_jax.SavedModel`, for ``save_model``, ``write_report`` and ``to_pyldavis``.

        Parameters
        ----------
        vocabulary : list of str or None, default=None
            The words; by default the names of the features, if they came with X.
        """
        check_is_fitted(self, "components_")
        if vocabulary is None:
            vocabulary = getattr(self, "feature_names_in_", None)
        if vocabulary is not None and len(vocabulary) != self.n_features_in_:
            raise ValueError(f"expected {self.n_features_in_} words, got {len(vocabulary)}")
        settings = {name: value for name, value in self.get_params().items() if isinstance(value, int | float | str)}
        return saved.SavedModel(
            lam=self._lam(),
            alpha=self.doc_topic_prior_,
            eta=_word_major(self.topic_word_prior_),
            num_docs=self._num_docs,
            vocabulary=None if vocabulary is None else list(map(str, vocabulary)),
            settings=settings,
            history=[{"passes": i, "score": score} for i, score in enumerate(self.validation_scores_, start=1)],
        )

    @property
    def _n_features_out(self):
        return self.components_.shape[0]

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.input_tags.positive_only = True
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

    def _validated(self, X, reset):
        X = validate_data(self, X, accept_sparse="csr", dtype=[np.float64, np.float32], reset=reset)
        check_non_negative(X, "SmoothedLDA")
        return X

    def _check_parameters(self):
        for name in ("n_components", "max_iter", "n_iter_no_change", "max_doc_update_iter", "batch_size", "n_jobs"):
            value = getattr(self, name)
            if value is None and name in ("batch_size", "n_jobs"):
                continue
            if not isinstance(value, numbers.Integral) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if not 0 < self.validation_fraction < 1:
            raise ValueError(f"validation_fraction must be between 0 and 1, got {self.validation_fraction!r}")
        for name in ("doc_topic_prior", "topic_word_prior"):
            value = getattr(self, name)
            if isinstance(value, str) and value != "auto":
                raise ValueError(f'{name} must be a number, an array, "auto" or None; got {value!r}')

    def _randomness(self):
        rng = check_random_state(self.random_state)
        seed, second = rng.randint(np.iinfo(np.int32).max, size=2)
        return jax.random.key(int(seed)), np.random.default_rng(int(second))

    def _set_aside(self, X, order):
        number = max(1, round(X.shape[0] * self.validation_fraction))
        if number >= X.shape[0]:
            raise ValueError(
                f"early stopping needs documents to learn from and to score; got n_samples = {X.shape[0]} in all"
            )
        shuffled = order.permutation(X.shape[0])
        return X[np.sort(shuffled[number:])], X[np.sort(shuffled[:number])]

    def _has_converged(self):
        scores, patience = self.validation_scores_, self.n_iter_no_change
        return len(scores) > patience and max(scores[-patience:]) < max(scores[:-patience]) + self.tol

    def _rho(self, a_pass):
        if self.learning_rate is not None:
            return self.learning_rate
        offset = self.learning_offset
        return schedules.robbins_monro(
            schedules.default_delay(a_pass) if offset is None else offset, self.learning_decay
        )

    def _first_topics(self, key, X, num_docs=None):
        if self.init is None:
            return topics.seed_topics(key, Corpus.of(X), self.n_components, num_docs=num_docs)
        init, shape = np.asarray(self.init, np.float32), (self.n_components, self.n_features_in_)
        if init.shape != shape or not (np.isfinite(init) & (init > 0)).all():
            raise ValueError(f"init must be positive and finite of shape {shape}; got an array of shape {init.shape}")
        return np.ascontiguousarray(init.T)

    def _first_model(self, num_docs):
        alpha, eta = self.doc_topic_prior, self.topic_word_prior
        alpha = ALPHA if alpha is None or _kind(alpha) == "auto" else alpha
        eta = ETA if eta is None or _kind(eta) == "auto" else eta
        return LDA(alpha, _word_major(eta), num_docs, self.mean_change_tol, self.max_doc_update_iter)

    def _model(self, num_docs):
        eta = _word_major(self.topic_word_prior_)
        return LDA(self.doc_topic_prior_, eta, num_docs, self.mean_change_tol, self.max_doc_update_iter)

    def _begin(self, dtype):
        self._fitted_dtype, self._state, self._layout = dtype, None, None
        self.n_batch_iter_, self.n_iter_, self.validation_scores_ = 0, 0, []

    @contextmanager
    def _keeping(self, run, before=0):
        """Whatever ends a run, what was learned is kept, with the state that it can go on from."""
        try:
            yield
        finally:
            run.close()
            model, self._state = run.model, run.state
            self.n_batch_iter_ = before + run.step
            self.components_ = np.asarray(run.params).T.astype(self._fitted_dtype)
            self._mark, self._num_docs = _mark(self.components_), int(model.num_docs)
            self.doc_topic_prior_ = model.alpha
            self.topic_word_prior_ = model.eta.T if np.ndim(model.eta) else model.eta

    def _lam(self):
        return np.ascontiguousarray(np.asarray(self.components_, np.float32).T)

    def _options(self):
        return {"tol": self.mean_change_tol, "max_iter": self.max_doc_update_iter, "threads": self.n_jobs}


class _PriorLearner:
    """Fits priors to a few documents now and then, while the topics are learned."""

    def __init__(self, estimator, X, rng):
        self._alpha = _kind(estimator.doc_topic_prior) == "auto"
        self._eta = _kind(estimator.topic_word_prior) == "auto"
        self._X, self._rng, self._options = X, rng, estimator._options()
        self._size, self._mean_log = min(X.shape[0], _LOOK_AT), None

    def learn(self, model: LDA, lam: Any) -> LDA:
        if self._alpha:
            some = self._X[self._rng.choice(self._X.shape[0], self._size, replace=False)]
            found = priors.mean_log(inference.posteriors(model, lam, some, **self._options), 1)
            # The mean of many documents, but not of those that were fitted to the topics of long ago.
            old = self._mean_log
            self._mean_log = found if old is None else old + _MEMORY * (found - old)
            model = model._replace(alpha=priors.fit_dirichlet(self._mean_log, model.alpha))
        if self._eta:
            eta = priors.fit_symmetric(priors.mean_log(lam, 0), len(lam), model.eta)
            model = model._replace(eta=eta)
        return model


def _mark(components):
    return zlib.crc32(np.ascontiguousarray(components))


def _kind(prior):
    return prior if isinstance(prior, str) else None


def _word_major(eta):
    """η as λ [V, K] has it, from what broadcasts to [K, V]."""
    return np.atleast_2d(eta).T if np.ndim(eta) else eta
