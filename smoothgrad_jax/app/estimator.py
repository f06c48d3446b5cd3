"""LDA by smoothed SVI as a scikit-learn estimator.

| letter | name                | meaning                                                                               |
|--------|---------------------|---------------------------------------------------------------------------------------|
| K      | ``n_components``    | topics                                                                                |
| L      | ``window``          | minibatches over which statistics are averaged                                        |
| B      | ``batch_size``      | documents per minibatch                                                               |
| α, η   | ``…_prior``         | Dirichlet priors of the topic proportions of a document, and of the words of a topic  |
| ρ_t    | ``learning_rate``   | step size; (τ + t)^−κ with ``learning_offset`` τ and ``learning_decay`` κ             |
| λ      | ``components_``     | [K, V]; a row divided by its sum is a topic                                           |

The parameters have the names and meanings of :class:`sklearn.decomposition.LatentDirichletAllocation`, which
:class:`SmoothedLDA` can replace. Parameters that scikit-learn does not have carry the names of
:class:`smoothgrad_jax.app.settings.Settings`.
"""

import math
import numbers
import os
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import jax
import numpy as np
import scipy.sparse

from smoothgrad_jax.app import progress, runs, saved_models
from smoothgrad_jax.app.program_cache import stored_programs
from smoothgrad_jax.app.runs import Run
from smoothgrad_jax.app.settings import DEFAULTS, OPTIONS, Prior, Settings, StepSize, Warmup
from smoothgrad_jax.app.topic_labels import checked_labels
from smoothgrad_jax.app.window_text import Window, window_object
from smoothgrad_jax.core.errors import OptionError
from smoothgrad_jax.core.row_sparse.state import RowSparseState
from smoothgrad_jax.core.types import ArrayLike, PRNGKey
from smoothgrad_jax.data.batches import Layout
from smoothgrad_jax.data.corpus import Corpus
from smoothgrad_jax.models.lda import inference
from smoothgrad_jax.models.lda.execution import named_execution
from smoothgrad_jax.models.lda.methods import named_method
from smoothgrad_jax.models.lda.model import LDA
from smoothgrad_jax.models.topic_quality import TopicQuality, topic_prevalence, topic_quality
from smoothgrad_jax.training import driver
from smoothgrad_jax.training.checkpoints import Checkpoints, fingerprint

try:
    import joblib
    from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.validation import check_is_fitted, check_non_negative, validate_data
except ImportError:
    raise ImportError('SmoothedLDA needs scikit-learn: pip install "smoothgrad_jax[sklearn]"') from None

# Settings with a different parameter name in scikit-learn.
SCIKIT_LEARN_NAMES = {
    "topics": "n_components",
    "alpha": "doc_topic_prior",
    "eta": "topic_word_prior",
    "rho": "learning_rate",
    "tau": "learning_offset",
    "kappa": "learning_decay",
    "passes": "max_iter",
    "patience": "n_iter_no_change",
    "min_improvement": "tol",
    "local_tol": "mean_change_tol",
    "local_max_iter": "max_doc_update_iter",
    "threads": "n_jobs",
}
_NOT_PARAMETERS = ("held_out", "score_every", "seed")  # they follow from other parameters
_PARAMETER_OF = {name: SCIKIT_LEARN_NAMES.get(name, name) for name in OPTIONS if name not in _NOT_PARAMETERS}
_PARAMETER_OF_LIBRARY = _PARAMETER_OF | {
    "seed": "random_state",
    "held_out": "validation_fraction",
    "tol": "mean_change_tol",
    "max_iter": "max_doc_update_iter",
}
_VALIDATION_FRACTION = 0.1

Counts: TypeAlias = ArrayLike | scipy.sparse.sparray | scipy.sparse.spmatrix


@contextmanager
def _parameter_names() -> Iterator[None]:
    """Report errors of options under the names of the estimator's parameters."""
    try:
        yield
    except OptionError as error:
        raise OptionError(_PARAMETER_OF_LIBRARY.get(error.option, error.option), error.problem) from error


class SmoothedLDA(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Latent Dirichlet allocation, trained online with statistics averaged over the last L minibatches.

    Parameters
    ----------
    n_components : int, default=10
        K, the number of topics.
    method : {"sampled", "collapsed", "mean", "variational"}, default="sampled"
        How the topics of a document's words are inferred during training: by sampling every token, by collapsed
        variational inference (CVB0), by variational inference with the mean of the topics, or by variational inference
        as in the paper.
    sweeps : int, default=5
        Samples per token and visit of a document, for the sampled method.
    execution : {"sequential", "batched"} or None, default=None
        Fit the documents of a minibatch one after the other, or all at once. None is "sequential" on a CPU and
        "batched" on other platforms.
    window : int, float('inf'), str, callable or Adaptive, default=10
        L, the number of minibatches over which the statistics are averaged. 1 is stochastic variational inference; ∞
        is the mean over all minibatches so far. A function of the step number, such as
        ``smoothgrad_jax.phase_out(...)``, changes L during training. ``smoothgrad_jax.Adaptive()`` chooses L from the
        data. The text forms of the command (``"adaptive:64"``, ``"exponential:10"``) are accepted too.
    warmup : {"mean", "zeros"}, default="mean"
        While the window fills: divide by the number of minibatches in it, or by L as in Algorithm 1 of the paper.
    slots : {"float32", "bfloat16", "uint8"} or None, default=None
        Precision of the statistics in the window. A lower one saves memory where L is large. None is that of λ.
    doc_topic_prior : float, array of shape (n_components,), "auto" or None, default=None
        α. "auto" learns one number per topic. None is 2.5/K within 0.01 … 0.3; 0.1 for the variational method.
    topic_word_prior : float, array that broadcasts to (n_components, n_features), "auto" or None, default=None
        η. "auto" learns one number. None is 0.05, and more where λ remembers only a part of the documents; 0.1 for the
        variational method.
    batch_size : int or None, default=None
        B. None is 1/250 of the documents for the sampled method and 1/32 for the others, between 32 and 256.
    learning_rate : float, callable or None, default=None
        ρ, one number in (0, 1] or a function of the step number. None is (τ + t)^−κ, see ``schedule``.
    learning_offset : float or None, default=None
        τ of the step size. None is the number of minibatches per pass, between 1 and 64.
    learning_decay : float or None, default=None
        κ of the step size. None is 0.5 if the step sizes are annealed, otherwise 0.6; 0.7 for the variational method.
    schedule : {"annealed", "robbins-monro"} or None, default=None
        "robbins-monro": step sizes (τ + t)^−κ, for any number of passes. "annealed": they also fall linearly to 0 at
        the end of ``max_iter`` passes, so that λ has less noise; a resumed run with more passes anneals again. None is
        "annealed"; "robbins-monro" for the variational method, with ``early_stopping``, and in :meth:`partial_fit`.
    max_iter : int, default=10
        Passes over the documents. Each pass has its own order.
    seconds : float or None, default=None
        Stop after this many seconds of training in this call; a resumed run has as many again.
    replace : bool, default=False
        Draw documents with replacement instead of in shuffled passes.
    early_stopping : bool, default=False
        Hold out ``validation_fraction`` of the documents, score them after each pass, and stop when the score has not
        risen by ``tol`` for ``n_iter_no_change`` passes.
    validation_fraction : float, default=0.1
        Fraction of the documents that early stopping holds out.
    n_iter_no_change : int, default=2
        Number of passes without improvement that stop the training.
    tol : float, default=1e-3
        Rise of the score that counts as an improvement, in nats per held-out word.
    mean_change_tol : float, default=1e-3
        A document has converged when an update changes its γ by less than this, on average over the topics.
    max_doc_update_iter : int, default=100
        Largest number of updates per document.
    total_samples : int, default=1_000_000
        Number of documents in the corpus from which the minibatches of :meth:`partial_fit` come.
    init : array of shape (n_components, n_features) or None, default=None
        Positive λ to start from: topics times a number of words, or the ``components_`` of another model. None seeds
        every topic with a few documents, see :func:`smoothgrad_jax.seed_topics`.
    checkpoints : str, path or None, default=None
        Folder for checkpoints of :meth:`fit`: one every ``checkpoint_every`` seconds, one after Ctrl-C, and one at the
        end.
    checkpoint_every : float, default=60
        Seconds between two checkpoints. 0 writes one only after Ctrl-C.
    resume : bool, default=False
        Continue from the last checkpoint in ``checkpoints``, if there is one. Documents, ``random_state`` and
        parameters must be the same, except ``max_iter``, ``seconds``, ``checkpoint_every`` and ``n_jobs=-1``.
    n_jobs : int or None, default=-1
        Threads. -1 is one per core, at most eight, and fewer for small minibatches. As in scikit-learn, None is 1
        except in a :obj:`joblib.parallel_config` context, and -2 is one less than the number of cores.
    verbose : int, default=0
        Show progress: a bar on a terminal, otherwise lines.
    random_state : int, RandomState or None, default=None
        Seed of the first topics and of the order of the documents. The same seed gives the same result with the same
        number of threads.

    Attributes
    ----------
    components_ : array of shape (n_components, n_features)
        λ: the expected number of times that each topic generated each word, plus the prior. Rows divided by their sums
        are E[β]. The array may be edited; all methods use the edited values.
    doc_topic_prior_, topic_word_prior_ : float or array
        The priors: given, default or learned.
    n_iter_ : int
        Number of passes.
    n_batch_iter_ : int
        Number of minibatches.
    validation_scores_ : list of float
        With early stopping, the score after each pass.
    n_features_in_, feature_names_in_
        As in any estimator.

    Notes
    -----
    The defaults were chosen by held-out score and topic coherence on five corpora; see ``experiments/quality.py``.

    The first :meth:`fit` on a machine compiles programs, which later processes read from the user's cache folder.
    :mod:`smoothgrad_jax.app.program_cache` says where this is done, and how to turn it off.

    After Ctrl-C, :meth:`fit` stores the current topics in the attributes and raises ``KeyboardInterrupt``.

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

    n_batch_iter_: int
    validation_scores_: list[float]
    _run_settings: dict[str, Any]
    _layout: tuple[int, ...] | None

    def __init__(
        self,
        n_components: int = 10,
        *,
        method: str = DEFAULTS.method,
        sweeps: int = DEFAULTS.sweeps,
        execution: str | None = None,
        window: Window = DEFAULTS.window,
        warmup: Warmup = DEFAULTS.warmup,
        slots: str | None = None,
        doc_topic_prior: Prior = None,
        topic_word_prior: Prior = None,
        batch_size: int | None = None,
        learning_rate: StepSize | None = None,
        learning_offset: float | None = None,
        learning_decay: float | None = None,
        schedule: str | None = None,
        max_iter: int = 10,
        seconds: float | None = None,
        replace: bool = False,
        early_stopping: bool = False,
        validation_fraction: float = _VALIDATION_FRACTION,
        n_iter_no_change: int = DEFAULTS.patience,
        tol: float = DEFAULTS.min_improvement,
        mean_change_tol: float = DEFAULTS.local_tol,
        max_doc_update_iter: int = DEFAULTS.local_max_iter,
        total_samples: int = 1_000_000,
        init: ArrayLike | None = None,
        checkpoints: str | os.PathLike | None = None,
        checkpoint_every: float = DEFAULTS.checkpoint_every,
        resume: bool = False,
        n_jobs: int | None = -1,
        verbose: int = 0,
        random_state: int | np.random.RandomState | None = None,
    ):
        self.n_components = n_components
        self.method = method
        self.sweeps = sweeps
        self.execution = execution
        self.window = window
        self.warmup = warmup
        self.slots = slots
        self.doc_topic_prior = doc_topic_prior
        self.topic_word_prior = topic_word_prior
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.learning_offset = learning_offset
        self.learning_decay = learning_decay
        self.schedule = schedule
        self.max_iter = max_iter
        self.seconds = seconds
        self.replace = replace
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.tol = tol
        self.mean_change_tol = mean_change_tol
        self.max_doc_update_iter = max_doc_update_iter
        self.total_samples = total_samples
        self.init = init
        self.checkpoints = checkpoints
        self.checkpoint_every = checkpoint_every
        self.resume = resume
        self.n_jobs = n_jobs
        self.verbose = verbose
        self.random_state = random_state

    @stored_programs()
    def fit(self, X: Counts, y: object = None) -> "SmoothedLDA":
        """Learn topics from counts.

        Parameters
        ----------
        X : array or sparse matrix of shape (n_samples, n_features)
            Counts, 0 or more; fractions are allowed.
        y : ignored

        Returns
        -------
        self
        """
        counts = self._validated(X, reset=True)
        with _parameter_names():
            seed, rng = self._randomness()
            settings = self._settings(counts.shape[0], seed).resolve(counts.shape[0])
            held_out = None
            if settings.held_out:
                documents, validation = runs.hold_out(rng, counts.shape[0], settings.held_out)
                counts, held_out = counts[documents], counts[validation]
            checkpoints = self._checkpoints()
            if checkpoints:
                checkpoints.lock()
            run = self._new_run(counts, held_out, settings, rng, checkpoints)
        self._reset(counts.dtype)
        self._run_settings = settings.as_json()
        watch = partial(progress.watch, steps=run.steps) if self.verbose else iter
        try:
            with self._storing(run):
                if not run.train(watch, checkpoints):
                    raise KeyboardInterrupt
        finally:
            self._state = None  # partial_fit starts with an empty window
            self.validation_scores_ = [each["score"] for each in run.history]
            self.n_iter_ = min(math.ceil(run.passes), self.max_iter)
        return self

    @stored_programs()
    def partial_fit(self, X: Counts, y: object = None) -> "SmoothedLDA":
        """Continue training on further documents, in one or more minibatches of about ``batch_size``.

        The window includes minibatches of earlier calls. After :meth:`fit` training continues from its topics with an
        empty window. The minibatches come from a corpus of ``total_samples`` documents. Priors are not learned here.
        ``max_iter`` and ``verbose`` apply to :meth:`fit` only. ``seconds``, ``replace``, ``early_stopping`` and
        ``checkpoints`` are refused.

        Parameters
        ----------
        X : array or sparse matrix of shape (n_samples, n_features)
        y : ignored

        Returns
        -------
        self
        """
        first = not hasattr(self, "components_")
        counts = self._validated(X, reset=first)
        with _parameter_names():
            if not isinstance(self.total_samples, numbers.Real) or not 1 <= self.total_samples < math.inf:
                raise OptionError("total_samples", f"must be a number of at least 1, got {self.total_samples!r}")
            for name, default in (("seconds", None), ("replace", False), ("early_stopping", False)):
                if getattr(self, name) != default:
                    raise OptionError(name, f"has no effect in partial_fit; set it to {default}")
            if self._checkpoints():
                raise OptionError("checkpoints", "has no effect in partial_fit; set it to None")
            if self.schedule == "annealed":
                raise OptionError("schedule", 'cannot be "annealed" in partial_fit, which has no last step')
            settings = self._settings(int(self.total_samples), 0)
            if settings.rho is None:
                settings = replace(settings, schedule="robbins-monro")
            settings = settings.resolve(int(self.total_samples))
            run, earlier_steps = self._partial_run(counts, settings, first)
        self._run_settings = settings.as_json()
        with self._storing(run, earlier_steps), _parameter_names():
            run.finish()
        return self

    @stored_programs()
    def transform(self, X: Counts) -> np.ndarray:
        """Return the topic proportions of documents, with the topics held fixed.

        The result is deterministic, and independent of the other documents in X.

        Parameters
        ----------
        X : array or sparse matrix of shape (n_samples, n_features)

        Returns
        -------
        array of shape (n_samples, n_components)
            Rows sum to one. The row of an empty document is the mean of the prior.
        """
        check_is_fitted(self, "components_")
        counts = self._validated(X, reset=False)
        theta = inference.proportions(self._model(1), self._lam(), counts, threads=self._threads())
        return theta.astype(counts.dtype, copy=False)

    @stored_programs()
    def score(self, X: Counts, y: object = None) -> float:
        """Return the log-probability per held-out word by document completion, in nats; higher is better.

        The model observes half of the tokens of each document. The score is the mean of
        log Σ_k E[θ_k | observed] E[β_kw] over the other half. The halves are the same at every call with the same X.
        The score is comparable between models with any K, prior or library. scikit-learn's ``score`` is a different
        quantity, a bound that includes the term of the topics for the complete training corpus;
        :func:`smoothgrad_jax.elbo` computes that bound.

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
        counts = self._validated(X, reset=False)
        return inference.completion(self._model(1), self._lam(), counts, threads=self._threads()).score

    def perplexity(self, X: Counts) -> float:
        """Return exp(−score): the number of equally likely words that would be as hard to predict."""
        return float(np.exp(-self.score(X)))

    def topic_quality(self, X: Counts) -> TopicQuality:
        """Return coherence, diversity and other measures of the topics; see :func:`smoothgrad_jax.topic_quality`.

        Parameters
        ----------
        X : array or sparse matrix of shape (n_samples, n_features)
            Documents in which words are counted as occurring together; usually the training documents. At most
            20,000 are used.

        Returns
        -------
        TopicQuality
        """
        check_is_fitted(self, "components_")
        counts = self._validated(X, reset=False)
        return topic_quality(self._lam(), counts, prevalence=self._prevalence())

    def to_model(
        self,
        vocabulary: Sequence[str] | None = None,
        X: Counts | None = None,
        labels: Mapping[int, str] | None = None,
    ) -> saved_models.SavedModel:
        """Return the topics as a :class:`smoothgrad_jax.SavedModel`, which can be saved and reported.

        Parameters
        ----------
        vocabulary : list of str or None, default=None
            The words; by default the names of the features, if X has them.
        X : array or sparse matrix of shape (n_samples, n_features) or None, default=None
            Documents whose word counts, and the quality of the topics on them, are stored with the model.
        labels : dict or None, default=None
            Names of topics by topic number, for some or all topics.
        """
        check_is_fitted(self, "components_")
        if vocabulary is None:
            vocabulary = getattr(self, "feature_names_in_", None)
        if vocabulary is not None and len(vocabulary) != self.n_features_in_:
            raise ValueError(f"expected {self.n_features_in_} words, got {len(vocabulary)}")
        options = {"local_tol": self.mean_change_tol, "local_max_iter": self.max_doc_update_iter}
        return saved_models.SavedModel(
            lam=self._lam(),
            alpha=self.doc_topic_prior_,
            eta=_word_major(self.topic_word_prior_),
            num_docs=self._num_docs,
            vocabulary=None if vocabulary is None else list(map(str, vocabulary)),
            settings=self._run_settings | {"method": self.method} | options,
            history=[{"passes": i, "score": score} for i, score in enumerate(self.validation_scores_, start=1)],
            prevalence=self._prevalence(),
            word_counts=None if X is None else Corpus.of(self._validated(X, reset=False)).word_counts(),
            quality=None if X is None else self.topic_quality(X),
            labels=None if labels is None else checked_labels(labels, self.components_.shape[0]),
        )

    def to_pyldavis(self, X: Counts, vocabulary: Sequence[str] | None = None, **options: Any) -> object:
        """Return the topics prepared for pyLDAvis; see :meth:`smoothgrad_jax.SavedModel.to_pyldavis`.

        Parameters
        ----------
        X : array or sparse matrix of shape (n_samples, n_features)
            Documents that determine the sizes of topics and words.
        vocabulary : list of str or None, default=None
            As in :meth:`to_model`.
        **options
            Of ``pyLDAvis.prepare``.
        """
        return self.to_model(vocabulary).to_pyldavis(self._validated(X, reset=False), **options)

    def to_octis(
        self, X: Counts, vocabulary: Sequence[str] | None = None, *, test: Counts | None = None, top_words: int = 10
    ) -> dict[str, Any]:
        """Return the dictionary that the metrics of OCTIS take; see :meth:`smoothgrad_jax.SavedModel.to_octis`.

        Parameters
        ----------
        X : array or sparse matrix of shape (n_samples, n_features)
            Training documents.
        vocabulary : list of str or None, default=None
            As in :meth:`to_model`.
        test : array or sparse matrix of shape (n_samples, n_features) or None, default=None
            Test documents.
        top_words : int, default=10
            Words per topic.
        """
        model, unseen = self.to_model(vocabulary), None if test is None else self._validated(test, reset=False)
        return model.to_octis(self._validated(X, reset=False), unseen, top_words=top_words)

    @property
    def _n_features_out(self):
        return self.components_.shape[0]

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.input_tags.positive_only = True
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

    def _validated(self, X: Any, reset: bool) -> Any:
        X = validate_data(self, X, accept_sparse="csr", dtype=[np.float64, np.float32], reset=reset)
        check_non_negative(X, "SmoothedLDA")
        return X

    def _settings(self, num_docs: int, seed: int) -> Settings:
        """Return the settings that correspond to the parameters, with a seed derived from ``random_state``."""
        values = {name: getattr(self, parameter) for name, parameter in _PARAMETER_OF.items()}
        values["eta"] = _word_major(values["eta"])
        values["threads"] = self._threads()
        return Settings(**values, held_out=self._num_held_out(num_docs), seed=seed)

    def _threads(self) -> int | None:
        """Return the number of threads that ``n_jobs`` stands for; None if the training chooses it."""
        jobs = self.n_jobs
        if jobs is not None and (not isinstance(jobs, numbers.Integral) or isinstance(jobs, bool) or jobs == 0):
            raise OptionError("n_jobs", f"must be None or an integer other than 0, got {jobs!r}")
        if jobs == -1:
            return None
        return int(jobs) if jobs is not None and jobs > 0 else int(joblib.effective_n_jobs(jobs))

    def _num_held_out(self, num_docs: int) -> int:
        fraction = self.validation_fraction
        if not 0 < fraction < 1:
            raise OptionError("validation_fraction", f"must be between 0 and 1, got {fraction!r}")
        if not self.early_stopping:
            if fraction != _VALIDATION_FRACTION:
                raise OptionError("validation_fraction", "has no effect without early stopping")
            return 0
        if num_docs < 2:
            raise ValueError(f"early stopping needs documents to train on and to score; got n_samples = {num_docs}")
        return min(max(1, round(num_docs * fraction)), num_docs - 1)

    def _randomness(self) -> tuple[int, np.random.Generator]:
        rng = check_random_state(self.random_state)
        seed, second = rng.randint(np.iinfo(np.int32).max, size=2)
        return int(seed), np.random.default_rng(int(second))

    def _new_run(
        self, X: Any, held_out: Any, settings: Settings, rng: np.random.Generator, checkpoints: Checkpoints | None
    ) -> Run:
        corpus, key = Corpus.of(X), jax.random.key(settings.seed)
        metadata = {"corpus": fingerprint(corpus)} if checkpoints else {}
        last = checkpoints.latest() if checkpoints else None
        if last:
            if not self.resume:
                raise OptionError("checkpoints", f"names a folder with a run; resume=True continues it: {last.path}")
            runs.check_same_run(last.settings, settings, metadata)
        start = None if last else self._initial_topics(key, corpus)
        return Run(corpus, settings, start, key=key, rng=rng, held_out=held_out, checkpoint=last, metadata=metadata)

    def _checkpoints(self) -> Checkpoints | None:
        if self.checkpoints is not None:
            return Checkpoints(self.checkpoints)
        for name, default in (("resume", False), ("checkpoint_every", DEFAULTS.checkpoint_every)):
            if getattr(self, name) != default:
                raise OptionError(name, "has no effect without checkpoints")
        return None

    def _partial_run(self, X: Any, settings: Settings, first: bool) -> tuple[driver.Training, int]:
        """Return the run of one :meth:`partial_fit`, and the number of steps before those that its state counts."""
        corpus, key = Corpus.of(X), jax.random.key(self._randomness()[0])
        if first:
            start = self._initial_topics(key, corpus, self.total_samples)
            model = runs.initial_model(settings, self.total_samples)
            self._reset(X.dtype)
        else:
            # The state is valid only for unedited topics; edited topics start with an empty window.
            is_unchanged = self._state is not None and self._components_checksum == _checksum(self.components_)
            start = self._state if is_unchanged else self._lam()
            model = self._model(self.total_samples)
        assert settings.batch_size is not None, "the settings must be resolved"
        pieces = np.array_split(np.arange(corpus.num_docs), max(1, round(corpus.num_docs / settings.batch_size)))
        if self._layout is None:
            self._layout = tuple(corpus.layout(len(pieces[0])))
        layout = Layout(*self._layout)
        earlier_steps = self.n_batch_iter_ - (int(start.step) if isinstance(start, RowSparseState) else 0)
        run = driver.fit(
            [corpus.pack(documents, layout) for documents in pieces],
            model,
            start,
            window=_delayed(window_object(self.window), earlier_steps),
            warmup=settings.warmup,
            rho=_delayed(runs.step_size(settings, 0), earlier_steps),
            key=key,
            threads=None if isinstance(start, RowSparseState) else settings.threads,
            slots=settings.slots,
        )
        return run, earlier_steps

    def _initial_topics(self, key: PRNGKey, corpus: Corpus, num_docs: int | None = None) -> Any:
        if self.init is None:
            if self.n_components > corpus.num_docs:
                warnings.warn(
                    f"n_components={self.n_components} is more than the {corpus.num_docs} documents to start from. "
                    "Every topic starts from twenty documents drawn with replacement, so that many topics resemble "
                    f"each other; choose n_components below {corpus.num_docs}, or give init",
                    UserWarning,
                    stacklevel=5,
                )
            return runs.initial_topics(key, corpus, self.n_components, num_docs=num_docs)
        init, shape = np.asarray(self.init, np.float32), (self.n_components, self.n_features_in_)
        if init.shape != shape or not (np.isfinite(init) & (init > 0)).all():
            raise OptionError("init", f"must be positive and finite of shape {shape}; got shape {init.shape}")
        return np.ascontiguousarray(init.T)

    def _model(self, num_docs: int) -> LDA:
        eta = _word_major(self.topic_word_prior_)
        method, execution = named_method(self.method, self.sweeps), named_execution(self.execution)
        limits = self.mean_change_tol, self.max_doc_update_iter
        return LDA(self.doc_topic_prior_, eta, num_docs, *limits, method, execution)

    def _reset(self, dtype: Any) -> None:
        self._fitted_dtype, self._state = dtype, None
        self._layout = None
        self.n_batch_iter_, self.n_iter_ = 0, 0
        self.validation_scores_ = []

    @contextmanager
    def _storing(self, run: Run | driver.Training, earlier_steps: int = 0) -> Iterator[None]:
        """Store the results of a run in the attributes, also after an exception."""
        try:
            yield
        finally:
            run.close()
            model, self._state = run.model, run.state
            assert isinstance(model, LDA)
            self.n_batch_iter_ = earlier_steps + run.step
            self.components_ = np.asarray(run.params).T.astype(self._fitted_dtype)
            self._components_checksum, self._num_docs = _checksum(self.components_), int(model.num_docs)
            self.doc_topic_prior_ = model.alpha
            self.topic_word_prior_ = np.asarray(model.eta).T if np.ndim(model.eta) else model.eta

    def _prevalence(self) -> np.ndarray | None:
        return topic_prevalence(self._lam(), _word_major(self.topic_word_prior_))

    def _lam(self) -> np.ndarray:
        return np.ascontiguousarray(np.asarray(self.components_, np.float32).T)


def _delayed(value: Any, steps: int) -> Any:
    """Return a schedule that starts at a later step; a number or an object is returned as it is."""
    return (lambda step: value(step + steps)) if callable(value) else value


def _checksum(components: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(components).data)


def _word_major(eta: Any) -> Any:
    """Return η with one row per word, as λ [V, K] has it, from a number or an array that broadcasts to [K, V]."""
    return np.atleast_2d(eta).T if np.ndim(eta) else eta
