"""The settings of a run of LDA: each option with its default, its help text and its check, in one place.

The estimator and the command read their defaults from :class:`Settings`, and from the functions ``default_…`` where a
default follows from the corpus or the method. Defaults that hold for any model are in
:mod:`smoothgrad_jax.training.defaults`, which :func:`smoothgrad_jax.fit` reads too. Exceptions:
:func:`smoothgrad_jax.fit` makes one pass, and the estimator has ten topics, as in scikit-learn. This module imports
neither jax nor numpy, so that ``smoothgrad fit --help`` is fast.

    settings = Settings(topics=20, window="adaptive:64").resolve(num_docs=10_000)
    settings.batch_size                            # 38: chosen from the number of documents
    Settings.from_json(settings.as_json())         # the same settings

| letter | setting                | meaning                                                          |
|--------|------------------------|------------------------------------------------------------------|
| K      | ``topics``             | number of topics                                                 |
| L      | ``window``             | minibatches over which the statistics are averaged               |
| B      | ``batch_size``         | documents per minibatch                                          |
| ρ      | ``rho``                | constant step size, or a schedule                                |
| τ, κ   | ``tau``, ``kappa``     | offset and decay of the step sizes (τ + t)^−κ                    |
|        | ``schedule``           | whether these also fall to 0 in T steps, the length of the run   |
| α, η   | ``alpha``, ``eta``     | Dirichlet priors of topics per document and of words per topic   |

A window object with a text form (:mod:`smoothgrad_jax.app.window_text`) is stored as its text, and
``rho=robbins_monro(τ, κ)`` as ``tau`` and ``kappa``: settings that mean the same are equal, and a checkpoint can be
compared with them.
"""

import math
import numbers
import operator
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple, TypeAlias

from smoothgrad_jax.app.window_text import EXPECTED, Window, is_window, parse_window, window_text
from smoothgrad_jax.core.errors import OptionError
from smoothgrad_jax.training.defaults import KAPPA, MAX_THREADS, WINDOW, default_batch_size, default_tau

_DEFAULT_PASSES, _ENOUGH_DOCUMENTS = 10, 1_000_000  # fewer passes where one pass has many documents
_HELD_OUT_FRACTION, _MOST_HELD_OUT = 0.05, 1_000
_LONGEST_LIST = 1_000  # numbers of an array that JSON holds; of a larger one it holds a checksum
WARMUPS = ("mean", "zeros")
SLOTS = ("float32", "bfloat16", "uint8")
EXECUTIONS = ("sequential", "batched")
SCHEDULES = ("annealed", "robbins-monro")
METHODS = ("sampled", "collapsed", "mean", "variational")

StepSize: TypeAlias = float | Callable[[Any], Any]  # a number, or a schedule of the step number
Warmup: TypeAlias = Literal["mean", "zeros"]
Prior: TypeAlias = Any  # a number, an array, or "auto"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Every option of a run; the table of the module explains the letters.

    ``OPTIONS`` describes each option for the user. None means that :meth:`resolve` chooses the value from the number of
    documents, or that there is no such limit.

    Raises:
      OptionError: An option has an invalid value, or has no effect beside another one.
    """

    topics: int = 50
    method: str = "sampled"
    sweeps: int = 5
    execution: str | None = None
    window: Window = WINDOW
    warmup: Warmup = "mean"
    slots: str | None = None
    batch_size: int | None = None
    tau: float | None = None
    kappa: float | None = None
    rho: StepSize | None = None
    schedule: str | None = None
    alpha: Prior = None
    eta: Prior = None
    passes: int | None = None
    seconds: float | None = None
    held_out: int | None = None
    score_every: int | None = None
    early_stopping: bool = False
    patience: int = 2
    min_improvement: float = 1e-3
    local_tol: float = 1e-3
    local_max_iter: int = 100
    replace: bool = False
    seed: int = 0
    threads: int | None = None
    checkpoint_every: float = 60.0

    def __post_init__(self) -> None:
        for name in OPTIONS:
            check_option(name, getattr(self, name))
        object.__setattr__(self, "window", window_text(self.window))
        self._check_effects()
        schedule = _robbins_monro_parameters(self.rho)
        if schedule is not None:
            tau, kappa = schedule
            for name, value in {"rho": None, "tau": tau, "kappa": kappa, "schedule": "robbins-monro"}.items():
                object.__setattr__(self, name, value)

    def _check_effects(self) -> None:
        """Refuse options that would have no effect beside another one."""
        if self.rho is not None:
            for name in ("tau", "kappa", "schedule"):
                if getattr(self, name) != DEFAULT_VALUES[name]:
                    raise OptionError(name, "has no effect with a constant step size; leave one of the two out")
        if self.method != "sampled" and self.sweeps != DEFAULT_VALUES["sweeps"]:
            raise OptionError("sweeps", f"has no effect with the method {self.method}")
        if not self.early_stopping:
            for name in ("patience", "min_improvement"):
                if getattr(self, name) != DEFAULT_VALUES[name]:
                    raise OptionError(name, "has no effect without early stopping")
        if self.held_out == 0:
            if self.early_stopping:
                raise OptionError("held_out", "must be at least 1 for early stopping, got 0")
            if self.score_every is not None:
                raise OptionError("score_every", "has no effect without held-out documents")
        if self.slots is not None and self.window in (math.inf, "inf"):
            raise OptionError("slots", "has no effect with an infinite window, which stores one mean")
        if isinstance(self.window, str):
            if self.window.startswith("adaptive") and self.warmup != "mean":
                raise OptionError("warmup", f'must be "mean" with an adaptive window, got {self.warmup!r}')
            if self.window.startswith("exponential") and self.slots is not None:
                raise OptionError("slots", "has no effect with an exponential window, which stores one mean")

    def resolve(self, num_docs: int) -> "Settings":
        """Return the settings with every value that follows from the number of documents filled in.

        Raises:
          OptionError: No document would be left to train on.
        """
        held_out = min(_MOST_HELD_OUT, int(_HELD_OUT_FRACTION * num_docs)) if self.held_out is None else self.held_out
        if self.early_stopping and self.held_out is None:
            held_out = max(held_out, 1)
        if held_out >= num_docs:
            raise OptionError(
                "held_out", f"must leave documents to train on: {held_out:,} of {num_docs:,} are held out"
            )
        num_trained = num_docs - held_out
        batch_size = self.batch_size or default_batch_size(num_trained, default_batches_per_pass(self.method))
        tau = default_tau(num_trained / batch_size) if self.tau is None and self.rho is None else self.tau
        passes = min(_DEFAULT_PASSES, max(1, math.ceil(_ENOUGH_DOCUMENTS / num_docs)))
        schedule, kappa, steps = self.schedule, self.kappa, passes * num_trained / batch_size
        if self.rho is None:
            schedule = schedule or default_schedule(self.method, self.early_stopping)
            kappa = default_kappa(self.method, schedule) if kappa is None else kappa
            last_rho = ((tau or 1.0) + steps) ** -kappa
        else:
            last_rho = float(self.rho(int(steps))) if callable(self.rho) else self.rho
        remembered = batch_size * remembered_minibatches(schedule, last_rho, steps)
        return replace(
            self,
            held_out=held_out,
            batch_size=batch_size,
            tau=tau,
            kappa=kappa,
            schedule=schedule,
            alpha=default_alpha(self.method, self.topics) if self.alpha is None else self.alpha,
            eta=default_eta(self.method, num_trained, remembered) if self.eta is None else self.eta,
            passes=passes if self.passes is None else self.passes,
        )

    @property
    def learns_priors(self) -> bool:
        """Whether α or η is learned during the run."""
        return any(isinstance(prior, str) for prior in (self.alpha, self.eta))

    def as_json(self) -> dict[str, Any]:
        """Return the settings that have a value, as JSON can hold them.

        JSON identifies some values without holding them: an array of more than 1,000 numbers by its checksum, a
        function by its name, another object by its ``repr``. Such values can be compared, but not read back.
        """
        pairs = ((name, _plain(getattr(self, name))) for name in OPTIONS)
        return {name: value for name, value in pairs if value is not None}

    @classmethod
    def from_json(cls, values: Mapping[str, Any], **changed: Any) -> "Settings":
        """Return settings from what :meth:`as_json` returned; other names in ``values`` are ignored.

        Args:
          values: Settings by name.
          **changed: Settings with another value.

        Raises:
          OptionError: A value was stored by its name only, see :meth:`as_json`.
        """
        known = {name: value for name, value in values.items() if name in OPTIONS}
        return cls(**known | changed)


class Option(NamedTuple):
    """A setting as the user meets it."""

    help: str  # one line, which also says what a default of None means
    parse: Callable[[str], Any]  # converts a text of the command line to a value, or raises ValueError
    accepts: Callable[[Any], bool]  # whether a value is valid; None is valid where it is the default
    expected: str  # valid values in words, after "must be"
    metavar: str | None  # placeholder of the value in the help text; None for a switch
    may_change: bool = False  # whether a resumed run may have another value


def check_option(name: str, value: object) -> None:
    """Raise an :class:`OptionError` unless the value of the setting is valid."""
    option = OPTIONS[name]
    if not ((value is None and DEFAULT_VALUES[name] is None) or option.accepts(value)):
        raise OptionError(name, f"must be {option.expected}, got {value!r}")


def parse_option(name: str, text: str) -> object:
    """Return the value of a setting from the text of the command line.

    Raises:
      OptionError: The text stands for no valid value.
    """
    try:
        value = OPTIONS[name].parse(text)
    except ValueError:
        value = text  # the check says what was expected
    check_option(name, value)
    return value


_POSITIVE, _NOT_NEGATIVE, _AT_LEAST_1 = "a positive number", "a number of at least 0", "a number of at least 1"
_BOUNDS = {_POSITIVE: (0, operator.gt), _NOT_NEGATIVE: (0, operator.ge), _AT_LEAST_1: (1, operator.ge)}


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def _integer(help_text: str, metavar: str, least: int = 1, may_change: bool = False, most: int | None = None) -> Option:
    def accepts(value: Any) -> bool:
        is_integer = isinstance(value, numbers.Integral) and _is_number(value)
        return is_integer and int(value) >= least and (most is None or int(value) <= most)

    expected = f"an integer of at least {least}" if most is None else f"an integer from {least} to {most:,}"
    return Option(help_text, int, accepts, expected, metavar, may_change)


def _number(help_text: str, metavar: str, expected: str, may_change: bool = False) -> Option:
    """Return an option for a number, from the words that describe valid ones."""
    least, is_valid = _BOUNDS[expected]

    def accepts(value: Any) -> bool:
        return _is_number(value) and is_valid(value, least)

    return Option(help_text, float, accepts, expected, metavar, may_change)


def _choice(help_text: str, choices: tuple[str, ...]) -> Option:
    return Option(help_text, str, lambda value: value in choices, f"one of {', '.join(choices)}", "|".join(choices))


def _switch(help_text: str) -> Option:
    def accepts(value: Any) -> bool:
        # NumPy's booleans are valid; the numbers 0 and 1 are not.
        return isinstance(value, bool) or (not isinstance(value, numbers.Number) and value in (True, False))

    return Option(help_text, bool, accepts, "true or false", None)


def _prior(help_text: str) -> Option:
    def parse(text: str) -> float | str:
        return text if text == "auto" else float(text)

    def accepts(value: Any) -> bool:
        if isinstance(value, str):
            return value == "auto"
        # The model checks arrays, whose shapes depend on K and V.
        return value > 0 if _is_number(value) else hasattr(value, "__len__")

    return Option(help_text, parse, accepts, 'a positive number, an array or "auto"', "A|auto")


def _accepts_rho(value: Any) -> bool:
    return callable(value) or (_is_number(value) and 0 < value <= 1)


def _robbins_monro_parameters(rho: StepSize | None) -> tuple[float, float] | None:
    """Return τ and κ of step sizes that :func:`smoothgrad_jax.robbins_monro` made; None for others."""
    if not callable(rho):
        return None
    from smoothgrad_jax.core.schedules import RobbinsMonro

    if not isinstance(rho, RobbinsMonro) or not (_is_number(rho.tau) and _is_number(rho.kappa)):
        return None
    return rho.tau, rho.kappa


OPTIONS: dict[str, Option] = {
    "topics": _integer("number of topics", "K"),
    "method": _choice("how the topics of a document's words are inferred; sampled finds the best topics", METHODS),
    "sweeps": _integer("samples per token and visit of a document, for the sampled method", "N"),
    "execution": _choice(
        "documents of a minibatch one after the other, or all at once (sequential on a CPU, batched on others)",
        EXECUTIONS,
    ),
    "window": Option(
        f"minibatches over which the statistics are averaged: {EXPECTED}",
        *(parse_window, is_window, f"{EXPECTED} (LONGEST: a power of two; MEMORY, FIRST, LAST: steps)", "L"),
    ),
    "warmup": _choice("while the window fills, divide by the minibatches in it (mean) or by L (zeros)", WARMUPS),
    "slots": _choice("precision of the window; a lower one saves memory where L is large (float32)", SLOTS),
    "batch_size": _integer("documents per minibatch (sampled: 1/250 of the documents, else 1/32; 32 to 256)", "B"),
    "tau": _number("offset of the step sizes (τ + t)^−κ (minibatches per pass, at most 64)", "TAU", _AT_LEAST_1),
    "kappa": _number(
        "decay of the step sizes (annealed 0.5, robbins-monro 0.6; variational 0.7)", "KAPPA", _NOT_NEGATIVE
    ),
    "rho": Option(
        "constant step size instead of (τ + t)^−κ", float, _accepts_rho, "a number above 0 and at most 1", "RHO"
    ),
    "schedule": _choice(
        "robbins-monro: step sizes (τ + t)^−κ, for any number of passes; annealed: they also fall linearly to 0 in the "
        "passes of the run, and a run that ends earlier has more noise (annealed; robbins-monro for the variational "
        "method and with early stopping)",
        SCHEDULES,
    ),
    "alpha": _prior("prior of the topics in a document; auto learns one number per topic (2.5/K; variational 0.1)"),
    "eta": _prior(
        "prior of the words in a topic; auto learns one number (0.05, more for large corpora; variational 0.1)"
    ),
    "passes": _integer("passes over the documents (10; fewer for more than 100,000 documents)", "N", may_change=True),
    "seconds": _number("stop after this many seconds of this call (no limit)", "S", _POSITIVE, may_change=True),
    "held_out": _integer("documents to hold out and to score (5% of the documents, at most 1,000)", "N", least=0),
    "score_every": _integer("steps between scores (20 scores per run; one per pass with early stopping)", "N"),
    "early_stopping": _switch("stop when the held-out score no longer improves"),
    "patience": _integer("scores without improvement that stop the run", "N"),
    "min_improvement": _number("rise of the score that counts as an improvement, in nats per word", "X", _NOT_NEGATIVE),
    "local_tol": _number("a document has converged when its γ changes by less on average", "X", _POSITIVE),
    "local_max_iter": _integer("largest number of updates per document", "N"),
    "replace": _switch("draw documents with replacement instead of in shuffled passes"),
    "seed": _integer("random seed", "N", least=0, most=2**31 - 1),
    "threads": _integer(
        "threads (one per core, at most 8; fewer for small minibatches)", "N", may_change=True, most=MAX_THREADS
    ),
    "checkpoint_every": _number("seconds between checkpoints; 0: only on Ctrl-C", "S", _NOT_NEGATIVE, may_change=True),
}
DEFAULT_VALUES: dict[str, Any] = {each.name: each.default for each in fields(Settings)}
DEFAULTS = Settings()  # chosen by held-out score and coherence: experiments/quality.py, experiments/defaults.py


def default_schedule(method: str, early_stopping: bool) -> str:
    """Return the schedule of the step sizes; a run that stops early has no known end towards which they could fall."""
    return "robbins-monro" if method == "variational" or early_stopping else "annealed"


def default_kappa(method: str, schedule: str) -> float:
    """Return κ of the step sizes for a local step of LDA."""
    if method == "variational":
        return KAPPA
    return 0.5 if schedule == "annealed" else 0.6


def default_batches_per_pass(method: str) -> int:
    """Return the number of minibatches per pass over a small corpus, for a local step of LDA.

    The sampled step scores higher with small minibatches, the others do not (experiments/BENCHMARKS.md).
    """
    return 250 if method == "sampled" else 32


def default_alpha(method: str, num_topics: int) -> float:
    """Return α: 2.5/K within 0.01 … 0.3, or 0.1 for the variational method.

    With few topics and a small α, sampling keeps all tokens of a document in the topic of its first token.
    """
    return 0.1 if method == "variational" else min(max(2.5 / num_topics, 0.01), 0.3)


def remembered_minibatches(schedule: str | None, last_rho: float, steps: float) -> float:
    """Return over how many minibatches λ is a mean after T ``steps``: 1 / Σ_t w_t² with the weights w_t in λ.

    With a last step size ρ the weight of a minibatch that is u steps old is ρ exp(−ρu), which is a mean over 2/ρ. If
    the step sizes also fall linearly to 0 in T steps, the weight is (ρu/T) exp(−ρu²/2T), a mean over 4 √(T/πρ).
    """
    return 4 * math.sqrt(steps / (math.pi * last_rho)) if schedule == "annealed" else 2 / last_rho


def default_eta(method: str, num_docs: float, remembered_docs: float) -> float:
    """Return η.

    λ is scaled to D documents, but it has the noise of a mean over n documents. A posterior from n documents, scaled up
    by D/n, has the prior scaled up too: η = 0.05 max(1, D/n). For the variational method η is 0.1. n is that after the
    default number of passes, so that a resumed run with more passes has the same η.
    """
    return 0.1 if method == "variational" else 0.05 * max(1.0, num_docs / remembered_docs)


def _plain(value: Any) -> Any:
    """Return a value of a setting as JSON can hold it."""
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else "inf"
    if hasattr(value, "__len__") or hasattr(value, "dtype"):
        import numpy as np

        array = np.asarray(value)
        if array.size <= _LONGEST_LIST:
            return array.tolist()
        return f"{array.dtype} {list(array.shape)}, checksum {zlib.crc32(np.ascontiguousarray(array).data):08x}"
    return getattr(value, "__qualname__", None) or repr(value)
