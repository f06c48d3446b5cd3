"""A run of LDA from settings that JSON can hold: documents set aside, steps, history, checkpoints, and the model.

    run = Run(stored, settings(corpus.num_docs, {"topics": 20}) | provenance(stored))
    run.train()
    save_model("model", run.model())

The settings, the corpus and the number of steps taken determine all that follows: a run that goes on from a checkpoint
ends where it would have ended, bit for bit on the same machine.

| setting                  | meaning                                                                                  |
|--------------------------|------------------------------------------------------------------------------------------|
| topics, window           | K, L (a number, or "inf")                                                                |
| batch_size, tau, kappa   | B, and ρ_t = (τ + t)^−κ                                                                  |
| alpha, eta               | priors                                                                                   |
| passes                   | over the documents that are not set aside                                                |
| held_out                 | number of documents that are set aside and scored                                        |
| seed                     | of the topics to start from, the documents set aside, and the order of the others        |
| slots                    | how the window is kept: float32, bfloat16 or uint8                                       |
"""

import hashlib
import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from smoothgrad_jax.app import saved
from smoothgrad_jax.app.saved import SavedModel
from smoothgrad_jax.core import schedules
from smoothgrad_jax.data.sampling import default_batch_size
from smoothgrad_jax.models.lda.model import LDA
from smoothgrad_jax.models.lda.topics import seed_topics
from smoothgrad_jax.training import driver as training

# Chosen by held-out score on four corpora: experiments/defaults.py.
DEFAULTS = {
    "topics": 50,
    "window": 10,
    "kappa": 0.7,
    "alpha": 0.1,
    "eta": 0.1,
    "seed": 0,
    "slots": "float32",
}
_PASSES, _ENOUGH = 10, 1_000_000  # passes, unless fewer show that many documents
_HELD_OUT, _MOST_HELD_OUT = 0.05, 1_000  # share of the documents, and number
_SEEDS = 10_000  # documents that topics are seeded from
_SCORES = 20  # of the held-out documents during a run


def settings(num_docs: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of a run: what is given, and what is chosen for the rest.

    Args:
      num_docs: Documents in the corpus.
      given: Some settings; None is not given.

    Raises:
      ValueError: More documents are to be held out than there are.
    """
    chosen = DEFAULTS | {
        "passes": min(_PASSES, max(1, math.ceil(_ENOUGH / num_docs))),
        "held_out": min(_MOST_HELD_OUT, int(_HELD_OUT * num_docs)),
    }
    chosen |= {name: value for name, value in given.items() if value is not None}
    left = num_docs - chosen["held_out"]
    chosen.setdefault("batch_size", default_batch_size(left))
    chosen.setdefault("tau", schedules.default_delay(left / chosen["batch_size"]))
    if not 0 <= chosen["held_out"] < num_docs:
        raise ValueError(f"{chosen['held_out']:,} documents are to be held out, and there are {num_docs:,}")
    if chosen["window"] == math.inf:
        chosen["window"] = "inf"
    return chosen


def provenance(stored: Any) -> dict[str, Any]:
    """What counts a run is of: a mark of the corpus, and how its text was cut into words."""
    manifest = stored.manifest
    if "files" in manifest:  # of a folder, whose checksums are known
        mark = hashlib.sha256(json.dumps(manifest["files"], sort_keys=True).encode()).hexdigest()[:16]
    else:
        mark = saved.fingerprint(stored.corpus)
    return {"corpus": mark, "tokens": manifest["tokens"]}


class Run:
    """A run that can be watched, interrupted, and taken up again.

    Args:
      stored: A corpus with its words, :class:`smoothgrad_jax.data.store.Stored`.
      settings: As in the table of the module; whatever else is in it is kept with the model.
      last: A :class:`smoothgrad_jax.app.saved.Checkpoint` to go on from.
      threads: As in :func:`smoothgrad_jax.fit`; a run that goes on has those it had.

    Attributes:
      steps: Number of steps in all.
      history: A record for every score.

    Raises:
      ValueError: The settings do not fit.
    """

    def __init__(self, stored: Any, settings: Mapping[str, Any], last: Any = None, threads: int | None = None) -> None:
        corpus = stored.corpus
        self._stored, self._settings = stored, dict(settings)
        order = np.random.default_rng(settings["seed"]).permutation(corpus.num_docs)
        order = order.astype(np.int32 if corpus.num_docs < 2**31 else np.int64)
        aside, rows = (np.sort(each) for each in np.split(order, [settings["held_out"]]))
        size = min(settings["batch_size"], rows.size)
        self.steps = max(1, math.ceil(settings["passes"] * rows.size / size))
        first = last.step if last else 0
        self._over = first >= self.steps
        self.history = list(last.history) if last else []
        self._passes_before = first * size / rows.size
        self._seconds_before = self.history[-1]["seconds"] if self.history else 0.0  # as far as was written down
        self._num_docs = int(rows.size)
        key = jax.random.key(settings["seed"])
        self._training = training.fit(
            corpus,
            LDA(settings["alpha"], settings["eta"], self._num_docs),
            last.state if last else self._first_topics(key, rows),
            window=float(settings["window"]),
            rho=schedules.robbins_monro(settings["tau"], settings["kappa"]),
            steps=max(self.steps - first, 1),
            batch_size=settings["batch_size"],
            key=key,
            documents=rows,
            held_out=corpus.select(aside) if aside.size else None,
            score_every=max(1, self.steps // _SCORES),
            threads=None if last else threads,
            slots=settings["slots"],
        )

    def _first_topics(self, key, rows):
        some = self._stored.corpus.select(rows[:: -(-rows.size // _SEEDS)])  # spread over all
        return seed_topics(key, some, self._settings["topics"], num_docs=rows.size)

    @property
    def step(self) -> int:
        """Steps taken."""
        return self._training.step

    def reports(self) -> Iterator[training.Progress]:
        """Train, and pass on the reports, with passes counted from the very first step; scores go into the history.

        Of a run that goes on from its end there are none.
        """
        for report in () if self._over else self._training:
            report = report._replace(
                passes=report.passes + self._passes_before, seconds=report.seconds + self._seconds_before
            )
            if report.score is not None:
                self.history.append(record(report))
            yield report

    def train(
        self,
        watch: Callable[[Iterator[training.Progress]], Iterator[Any]] = iter,
        checkpoints: saved.Checkpoints | None = None,
        every: float | None = 60.0,
    ) -> bool:
        """Train to the end.

        Args:
          watch: What the reports go through, such as a bar that shows them.
          checkpoints: Where to write checkpoints: every so many seconds, when interrupted, and at the end.
          every: Seconds; None for a checkpoint when interrupted only.

        Returns:
          Whether the end was reached; Ctrl-C and SIGTERM end the run after a whole step.

        Raises:
          NotFiniteError: As :func:`smoothgrad_jax.fit`; :meth:`model` has the last good topics.
        """
        finished, written = False, time.monotonic()
        try:
            with _terminated_like_ctrl_c():
                for _ in watch(self.reports()):
                    if checkpoints and every is not None and time.monotonic() - written >= every:
                        checkpoints.write(self._training, self._settings, self.history)
                        written = time.monotonic()
                finished = True
        except KeyboardInterrupt:
            pass  # what was learned is worth keeping
        if checkpoints and not (finished and (every is None or self._over)):
            checkpoints.write(self._training, self._settings, self.history)
        return finished

    def model(self) -> SavedModel:
        """The topics as they are now."""
        lam = np.asarray(self._training.params)
        learned = np.maximum(lam - self._settings["eta"], 0).sum(0, dtype=np.float64)
        return SavedModel(
            lam=lam,
            alpha=self._settings["alpha"],
            eta=self._settings["eta"],
            num_docs=self._num_docs,
            vocabulary=self._stored.vocabulary,
            settings=self._settings,
            history=self.history,
            prevalence=learned / learned.sum() if learned.sum() else None,
            word_counts=self._stored.corpus.word_counts(),
        )


def record(report: training.Progress) -> dict[str, Any]:
    """A report as the history keeps it."""
    return {name: getattr(report, name) for name in ("step", "passes", "seconds", "rate", "score")}


@contextmanager
def _terminated_like_ctrl_c():
    """SIGTERM, by which clusters end what runs, is to be like Ctrl-C; only the main thread may say so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
