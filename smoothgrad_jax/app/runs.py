"""A run of LDA from :class:`~smoothgrad_jax.app.settings.Settings`; the command and the estimator use it.

    run = Run(corpus, settings.resolve(corpus.num_docs), lam, key=key, rng=rng)
    run.train()
    run.params, run.model

The run scores held-out documents, learns priors, stops early, keeps a history and writes checkpoints. The
settings, the corpus and the number of steps determine the result: a run that continues from a checkpoint of
:meth:`Run.train` ends with the same λ as an uninterrupted one, bit for bit on the same machine. Exception:
learned priors are updated at each report, so an interruption between two reports changes later updates.
"""

import contextlib
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import scipy.sparse
from jax.sharding import Mesh

from smoothgrad_jax.app import signals
from smoothgrad_jax.app.event_log import event
from smoothgrad_jax.app.settings import OPTIONS, Settings, default_alpha
from smoothgrad_jax.app.window_text import window_object
from smoothgrad_jax.core.adaptive import Adaptive
from smoothgrad_jax.core.errors import OptionError
from smoothgrad_jax.core.mesh_step import MeshState
from smoothgrad_jax.core.row_sparse.state import RowSparseState
from smoothgrad_jax.core.schedules import annealed, robbins_monro
from smoothgrad_jax.core.types import Array, ArrayLike, PRNGKey, PyTree
from smoothgrad_jax.data import schema
from smoothgrad_jax.data.corpus import Corpus
from smoothgrad_jax.data.durable_files import LoadError, SaveError, loading
from smoothgrad_jax.models.lda import inference, local_steps, priors
from smoothgrad_jax.models.lda.execution import named_execution
from smoothgrad_jax.models.lda.methods import Variational, named_method
from smoothgrad_jax.models.lda.model import LDA
from smoothgrad_jax.models.lda.topics import seed_topics
from smoothgrad_jax.training import distributed, driver
from smoothgrad_jax.training.checkpoints import Checkpoint, Checkpoints, check_same
from smoothgrad_jax.training.driver import Progress
from smoothgrad_jax.training.engines import NotFiniteError

_SEED_DOCUMENTS = 10_000  # documents that seed the initial topics
_SCORES = 20  # held-out scores per run
_PRIOR_DOCUMENTS = 512  # documents per update of α
_PRIOR_UPDATES = 100  # largest number of updates of learned priors per run
_STEPS_PER_UPDATE = 5  # smallest number of steps between two updates
_INITIAL_ETA = 0.1  # where η is learned
_PRIOR_WEIGHT = 0.1  # weight of the newest documents in the moving average to which α is fitted
_IN_WORDS = {"corpus": "the corpus", "tokens": "the definition of a word", "word_options": "the choice of words"}

_RECORD = schema.record({"step": schema.integer()} | dict.fromkeys(("passes", "seconds", "rate", "score"), schema.real))
_POSITIVE = schema.number(0, above=True)
_LEARNED = schema.record(
    {
        "alpha": schema.either(_POSITIVE, schema.list_of(_POSITIVE)),
        "eta": schema.anything,  # [V, K] where it is not learned
        "mean_log": schema.optional(schema.list_of(schema.number(most=0))),
        "rng": schema.record({"bit_generator": schema.string}),
    }
)

Record = dict[str, Any]  # step, passes, seconds, rate and score of one report
Warn = Callable[[str], None]
Watch = Callable[[Iterator[Progress]], Iterator[Progress]]


def hold_out(rng: np.random.Generator, num_docs: int, number: int) -> tuple[npt.NDArray, npt.NDArray]:
    """Return the documents to train on and those to hold out, each in increasing order."""
    order = rng.permutation(num_docs).astype(np.int32 if num_docs < 2**31 else np.int64)
    held_out, documents = np.split(order, [number])
    return np.sort(documents), np.sort(held_out)


def initial_topics(
    key: PRNGKey, corpus: Corpus, num_topics: int, documents: npt.NDArray | None = None, num_docs: int | None = None
) -> Array:
    """Return the initial λ [V, K], seeded with documents of the corpus.

    Args:
      key, corpus, num_topics: As in :func:`smoothgrad_jax.seed_topics`.
      documents: Candidate documents, of which at most 10,000 evenly spaced ones are used; by default all documents.
      num_docs: Number of documents to which λ is scaled; by default the number of candidates.
    """
    _check_memory(corpus.num_words, num_topics)
    if documents is None:
        return seed_topics(key, corpus, num_topics, num_docs=num_docs)
    some = corpus.select(documents[:: -(-documents.size // _SEED_DOCUMENTS)])
    return seed_topics(key, some, num_topics, num_docs=num_docs or documents.size)


def _check_memory(num_words: int, num_topics: int) -> None:
    """Raise an error if λ and the state of a run, four matrices of its size, exceed the memory of the machine."""
    needed = 4 * num_words * num_topics * np.dtype(np.float32).itemsize
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else math.inf
    if needed > total:
        size = f"{num_words:,} words and {num_topics:,} topics need {needed / 1e9:,.0f} GB"
        raise MemoryError(f"{size}, this machine has {total / 1e9:,.0f} GB; use a smaller vocabulary or fewer topics")


def step_size(settings: Settings, steps: int) -> float | Callable[[Any], Any]:
    """Return ρ of resolved settings, a number or a schedule of the step number, for a run of so many steps."""
    if settings.rho is not None:
        return settings.rho
    assert settings.tau is not None, "the settings must be resolved"
    assert settings.kappa is not None, "the settings must be resolved"
    if settings.schedule == "annealed":
        return annealed(settings.tau, settings.kappa, steps)
    return robbins_monro(settings.tau, settings.kappa)


def initial_model(settings: Settings, num_docs: float) -> LDA:
    """Return the model with the priors of the settings; learned priors start from the defaults."""
    alpha = default_alpha(settings.method, settings.topics) if isinstance(settings.alpha, str) else settings.alpha
    eta = _INITIAL_ETA if isinstance(settings.eta, str) else settings.eta
    method = named_method(settings.method, settings.sweeps)
    execution = named_execution(settings.execution)
    return LDA(alpha, eta, num_docs, settings.local_tol, settings.local_max_iter, method, execution)


def check_same_run(stored: Mapping[str, Any], settings: Settings, metadata: Mapping[str, Any]) -> None:
    """Raise an error if the settings and metadata of a checkpoint or a model are not those of a new run.

    A setting that differs, and has no ``may_change``, is an :class:`OptionError`; metadata that differ, such as the
    fingerprint of the corpus, are a :class:`LoadError` that names every difference with both values.
    """
    # Settings follow from the number of documents: other documents are the first difference to report.
    ignored = {"learned", *OPTIONS}
    then, now = (
        {_IN_WORDS.get(name, name): value for name, value in each.items() if name not in ignored}
        for each in (stored, metadata)
    )
    check_same(then, now)
    check_settings(stored, dict.fromkeys(OPTIONS) | settings.as_json())


def stored_settings(checkpoint: Checkpoint) -> Settings:
    """Return the settings of a checkpoint; a new run chooses the number of threads."""
    with loading(checkpoint.path / "checkpoint.json"):
        return Settings.from_json(checkpoint.settings, threads=None)


def check_settings(stored: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raise an :class:`OptionError` if a setting of a new run differs from that of the checkpoint, and must not.

    A checkpoint of a version without this option has its default.
    """
    defaults = Settings().as_json()
    for name, value in current.items():
        then, now = stored.get(name, defaults.get(name)), "inf" if value == math.inf else value
        if then != now and not OPTIONS[name].may_change:
            was = "not set" if then is None else then
            problem = f"was {was} in the checkpoint, and is {'not set' if now is None else now} now"
            raise OptionError(name, f"{problem}; a resumed run cannot change it")


class PriorLearner:
    """Fits α to a sample of the documents of a corpus, None for all, and η to the topics, at every report of a run."""

    def __init__(
        self, settings: Settings, corpus: Corpus, documents: npt.NDArray | None, rng: np.random.Generator
    ) -> None:
        self._learns_alpha, self._learns_eta = (isinstance(p, str) for p in (settings.alpha, settings.eta))
        self._corpus, self._rng, self._threads = corpus, rng, settings.threads
        self._documents = np.arange(corpus.num_docs) if documents is None else documents
        self._mean_log: npt.NDArray | None = None

    def update(self, model: LDA, lam: Array) -> LDA:
        """Return the model with learned priors."""
        if self._learns_alpha:
            size = min(len(self._documents), _PRIOR_DOCUMENTS)
            some = self._documents[self._rng.choice(len(self._documents), size, replace=False)]
            learn = self._alpha_of_posteriors if isinstance(model.method, Variational) else self._alpha_of_counts
            model = model._replace(alpha=learn(model, lam, self._corpus.select(some)))
        if self._learns_eta:
            eta = priors.fit_symmetric(float(priors.mean_log(lam, 0)), len(lam), float(np.asarray(model.eta)))
            model = model._replace(eta=eta)
        return model

    def _alpha_of_counts(self, model: LDA, lam: Array, X: scipy.sparse.csr_array) -> npt.NDArray:
        """Move α towards Minka's fixed point for the tokens per document and topic, with Σ_k α_k unchanged.

        A few sweeps from a new start use fewer topics per document than the posterior. The likelihood of their counts
        would lower Σα at every update, and a lower Σα the number of topics.
        """
        old = np.broadcast_to(np.asarray(model.alpha, np.float64), lam.shape[1])
        if model.uses_key:
            counts = inference.sampled_counts(model, lam, X, jax.random.key(int(self._rng.integers(2**31))))
        else:
            counts = np.maximum(inference.posteriors(model, lam, X, threads=self._threads) - old, 0)
        found = priors.fit_counts(counts, old)
        return old + _PRIOR_WEIGHT * (found * (old.sum() / found.sum()) - old)

    def _alpha_of_posteriors(self, model: LDA, lam: Array, X: scipy.sparse.csr_array) -> npt.NDArray:
        """Fit α to a moving average of E[log θ]."""
        gamma = inference.posteriors(model, lam, X, threads=self._threads)
        found = np.asarray(priors.mean_log(gamma, 1))
        # The moving average includes many documents, and forgets documents that were fitted to older topics.
        old = self._mean_log
        self._mean_log = mean_log = found if old is None else old + _PRIOR_WEIGHT * (found - old)
        return priors.fit_dirichlet(mean_log, np.asarray(model.alpha))

    def state(self, model: LDA) -> dict[str, Any]:
        """Return the state for :meth:`restore` as JSON values."""
        return {
            "alpha": np.asarray(model.alpha).tolist(),
            "eta": np.asarray(model.eta).tolist(),
            "mean_log": None if self._mean_log is None else self._mean_log.tolist(),
            "rng": self._rng.bit_generator.state,
        }

    def restore(self, model: LDA, state: Mapping[str, Any], num_topics: int) -> LDA:
        """Continue from a :meth:`state`; returns the model with its priors."""
        _LEARNED(state, "learned")
        for name in ("alpha", "mean_log"):
            if np.size(state[name]) not in (1, num_topics):
                raise ValueError(f"learned.{name} must have {num_topics} numbers, got {np.size(state[name])}")
        if self._learns_eta:
            _POSITIVE(state["eta"], "learned.eta")
        self._mean_log = None if state["mean_log"] is None else np.asarray(state["mean_log"])
        self._rng.bit_generator.state = state["rng"]
        if self._learns_alpha:
            model = model._replace(alpha=np.asarray(state["alpha"]))
        return model._replace(eta=state["eta"]) if self._learns_eta else model


class Run:
    """A run that can be watched, interrupted and resumed.

    A resumed run counts steps and passes from the first step of all, and ``settings.seconds`` from its own start.

    Args:
      corpus: The counts.
      settings: Resolved settings.
      params: Initial λ [V, K]; not used with a checkpoint.
      key: Decides the order of the documents and the halves of held-out documents.
      rng: Chooses documents for learned priors.
      documents: Documents of the corpus to train on; None for all.
      held_out: Counts of the documents to score, or None.
      checkpoint: A checkpoint to continue from.
      metadata: Further entries that checkpoints store with the settings, such as a fingerprint of the corpus.
      mesh, messages: As in :func:`smoothgrad_jax.fit`. If the devices belong to several processes, each of these makes
        the same run.

    Attributes:
      steps: Number of steps of the complete run.
      history: One record per score.
      documents: As given.
      is_stored: Whether the last checkpoint could be written.

    Raises:
      OptionError: An option does not fit the data.
    """

    def __init__(
        self,
        corpus: Corpus,
        settings: Settings,
        params: ArrayLike | None,
        *,
        key: PRNGKey,
        rng: np.random.Generator,
        documents: npt.NDArray | None = None,
        held_out: Corpus | scipy.sparse.sparray | scipy.sparse.spmatrix | None = None,
        checkpoint: Checkpoint | None = None,
        metadata: Mapping[str, Any] | None = None,
        mesh: Mesh | None = None,
        messages: str | None = None,
    ) -> None:
        self._settings, self._metadata = settings, dict(metadata or {})
        self._is_shared = mesh is not None and jax.process_count() > 1
        self.documents, self.is_stored = documents, True
        self._num_docs = corpus.num_docs if documents is None else len(documents)
        assert settings.batch_size is not None, "the settings must be resolved"
        assert settings.passes is not None, "the settings must be resolved"
        self._batch_size = min(settings.batch_size, self._num_docs)
        self.steps = max(1, math.ceil(settings.passes * self._num_docs / self._batch_size))
        if checkpoint:
            _check_checkpoint(checkpoint, self._num_docs / self._batch_size)
        first = checkpoint.step if checkpoint else 0
        self.history: list[Record] = list(checkpoint.history) if checkpoint else []
        self._earlier_passes = first * self._batch_size / self._num_docs
        self._earlier_seconds = self.history[-1]["seconds"] if self.history else 0.0  # up to the last score
        self._is_complete = first >= self.steps or self._has_converged()
        model = initial_model(settings, self._num_docs)
        self._learner = PriorLearner(settings, corpus, documents, rng) if settings.learns_priors else None
        if self._learner and checkpoint and "learned" in checkpoint.settings:
            with loading(checkpoint.path / "checkpoint.json"):
                model = self._learner.restore(model, checkpoint.settings["learned"], settings.topics)
        self._training = driver.fit(
            corpus,
            model,
            checkpoint.state if checkpoint else params,
            window=window_object(settings.window),
            warmup=settings.warmup,
            rho=step_size(settings, self.steps),
            steps=max(self.steps - first, 1),
            seconds=settings.seconds,
            batch_size=self._batch_size,
            replace=settings.replace,
            key=key,
            documents=documents,
            held_out=held_out,
            score_every=None if held_out is None else self._score_every(),
            report_every=max(_STEPS_PER_UPDATE, self.steps // _PRIOR_UPDATES) if self._learner else None,
            threads=settings.threads if mesh is None else None,  # one thread per device of the mesh
            slots=settings.slots,
            mesh=mesh,
            messages=messages,
        )

    @property
    def step(self) -> int:
        """Number of completed steps."""
        return self._training.step

    @property
    def passes(self) -> float:
        """Number of passes over the documents so far."""
        return self._training.step * self._batch_size / self._num_docs

    @property
    def params(self) -> Array:
        """λ after the last step."""
        return self._training.params

    @property
    def model(self) -> LDA:
        """The model with its priors, as given or as learned so far."""
        model = self._training.model
        assert isinstance(model, LDA)
        return model

    @property
    def state(self) -> PyTree:
        """The training state, from which :func:`smoothgrad_jax.fit` continues."""
        return self._training.state

    def checkpoint_bytes(self, corpus: Corpus) -> int:
        """Estimate the size of a checkpoint with a full window, before the first step."""
        state, num_devices, bytes_per_id = self.state, 1, np.dtype(np.int32).itemsize
        stored = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        if isinstance(state, MeshState):  # the parts of this process
            num_devices = int(state.num_devices)
            stored = stored // len(state.parts) * num_devices
            state = state.parts[0]
        if not isinstance(state, RowSparseState):
            return stored  # a dense state has the slots of its window from the start
        rows = num_devices * corpus.layout(-(-self._batch_size // num_devices)).num_used
        width = local_steps.width(self.model.method, state.num_columns)
        stored += rows * (len(state.partitions) * width * state.dtype.itemsize + bytes_per_id)  # of the last minibatch
        if state.slots is None:
            return stored
        window = window_object(self._settings.window)
        longest = window.longest if isinstance(window, Adaptive) else window(0) if callable(window) else window
        dtype = jnp.dtype(self._settings.slots or state.dtype)
        bytes_per_row = state.num_columns * dtype.itemsize + bytes_per_id + (4 if dtype == np.uint8 else 0)  # a scale
        return stored + int(min(longest, self.steps)) * rows * bytes_per_row

    def close(self) -> None:
        """End the run; ``params`` and ``state`` stay available."""
        self._training.close()

    def reports(self) -> Iterator[Progress]:
        """Train and yield reports, with documents, passes and seconds since the first step of the complete run.

        Scores are appended to the history. A complete run yields nothing.
        """
        for report in () if self._is_complete else self._training:
            if self._learner:
                self._training.model = self._learner.update(self.model, self._training.params)
            report = report._replace(
                documents=report.step * self._batch_size,
                passes=report.passes + self._earlier_passes,
                seconds=report.seconds + self._earlier_seconds,
            )
            if report.score is not None:
                self.history.append(record(report))
            yield report
            if report.score is not None and self._has_converged():
                self.close()
                return

    def train(self, watch: Watch = iter, checkpoints: Checkpoints | None = None, warn: Warn = warnings.warn) -> bool:
        """Train to the end.

        Args:
          watch: Displays and yields the reports, as :func:`smoothgrad_jax.app.progress.watch` does.
          checkpoints: Where to write a checkpoint every ``settings.checkpoint_every`` seconds, after an interruption,
            and at the end. One that cannot be written, for example because the disk is full, does not end the run;
            :attr:`is_stored` says whether the last one could be written.
          warn: Called with a message if a checkpoint cannot be written.

        Returns:
          Whether the end was reached. Ctrl-C ends the run after a complete step; a second one does not prevent that
          the checkpoint is written.

        Raises:
          NotFiniteError: As :func:`smoothgrad_jax.fit`; :attr:`params` are those of the last valid step. After another
            error, of ``watch`` for example, a checkpoint is written before it is raised.
        """
        finished = False
        with signals.deferred():
            try:
                with signals.redirected(self._training.interrupt) if self._is_shared else signals.interruptible():
                    self._train(watch, checkpoints, warn)
                finished = True
            except KeyboardInterrupt:
                pass  # params and state remain available to the caller
            except NotFiniteError:
                raise
            except Exception:
                # An error of the display or of the data. After one in a step there may be no state to write.
                # One of several processes cannot write without the others.
                with contextlib.suppress(ValueError, RuntimeError):
                    if checkpoints and not self._is_shared:
                        self._write(checkpoints, warn)
                raise
            if checkpoints and not (finished and (not self._settings.checkpoint_every or self._is_complete)):
                self._write(checkpoints, warn)
        return finished

    def _train(self, watch: Watch, checkpoints: Checkpoints | None, warn: Warn) -> None:
        """Train to the end, with a checkpoint at intervals."""
        every, written = self._settings.checkpoint_every, time.monotonic()
        for _ in watch(self.reports()):
            is_due = time.monotonic() - written >= every
            if checkpoints and every and (distributed.from_process_0(is_due) if self._is_shared else is_due):
                self._write(checkpoints, warn)
                written = time.monotonic()

    def settings_json(self) -> dict[str, Any]:
        """Return the settings and the metadata as JSON values, for a model or a checkpoint."""
        return self._settings.as_json() | self._metadata

    def _write(self, checkpoints: Checkpoints, warn: Warn) -> None:
        learned = {"learned": self._learner.state(self.model)} if self._learner else {}
        self.is_stored, begun = False, time.monotonic()
        try:
            path = checkpoints.write(self._training, self.settings_json() | learned, self.history)
        except SaveError as error:
            if self._is_shared:
                raise  # the others wait for this process
            warn(str(error))
            return
        self.is_stored = True
        event("checkpoint", step=self.step, path=str(path), seconds=time.monotonic() - begun)

    def _score_every(self) -> int:
        if self._settings.score_every is not None:
            return self._settings.score_every
        if self._settings.early_stopping:
            return max(1, round(self._num_docs / self._batch_size))
        return max(1, self.steps // _SCORES)

    def _has_converged(self) -> bool:
        """Return whether none of the last ``patience`` scores improves on the earlier scores."""
        if not self._settings.early_stopping:
            return False
        scores, patience = [each["score"] for each in self.history], self._settings.patience
        target = max(scores[:-patience], default=math.inf) + self._settings.min_improvement
        return len(scores) > patience and max(scores[-patience:]) < target


def _check_checkpoint(checkpoint: Checkpoint, scale: float) -> None:
    """Raise an error unless the history has the records of a run, and the last step scaled its statistics by D/B."""
    with loading(checkpoint.path / "checkpoint.json"):
        schema.list_of(_RECORD)(checkpoint.history, "history")
    entering = getattr(checkpoint.state, "entering", None)
    if entering is not None and not math.isclose(entering.scale, scale, rel_tol=1e-6):
        problem = f"the state is not valid: entering.scale is {entering.scale:g}, expected D/B = {scale:g}"
        raise LoadError(f"{checkpoint.path}: damaged: {problem}")


def record(report: Progress) -> Record:
    """Return a report as the history stores it."""
    return {name: getattr(report, name) for name in ("step", "passes", "seconds", "rate", "score")}
