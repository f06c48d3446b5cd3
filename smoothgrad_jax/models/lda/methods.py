"""The local steps of LDA: how the topics of a document's words are inferred while λ is held fixed.

| method          | responsibilities of the topics for one token of word w             | topics β                |
|-----------------|--------------------------------------------------------------------|-------------------------|
| ``Variational`` | φ_k ∝ exp(E[log θ_k]) β_wk                                         | exp E[log β] (the paper)|
| ``Mean``        | φ_k ∝ exp(E[log θ_k]) β_wk                                         | E[β] = λ/T              |
| ``Collapsed``   | φ_k ∝ (N_k + α_k) β_wk, N_k = Σ n φ, one token of w left out      | E[β] = λ/T              |
| ``Maximum``     | φ_k ∝ θ_k β_wk,   θ_k ∝ α_k + Σ_w n_w φ_wk                         | E[β] = λ/T              |
| ``Sampled``     | z ~ (N_k + α_k) β_wk, N_k = tokens of topic k, this one left out   | E[β] = λ/T              |

T_k = Σ_w λ_wk. exp E[log β] of a word that a topic does not have yet is nearly 0: exp ψ(0.05) is 1e−9 where the mean
is 0.05. Topics therefore keep the words with which they started. The other methods use the mean.
``Sampled`` is collapsed Gibbs sampling within each document (Griffiths and Steyvers, 2004), with λ held fixed.
``Collapsed`` is CVB0 (Asuncion et al., 2009). ``Maximum`` scores documents for all methods that use E[β], see
:func:`smoothgrad_jax.log_predictive`.

A method is a pytree: its type is static, its numbers are traced.
"""

from typing import NamedTuple, TypeAlias

import jax
import numpy as np

from smoothgrad_jax.core.errors import OptionError
from smoothgrad_jax.core.types import Numeric


class Variational(NamedTuple):
    """Mean-field variational inference, as in the paper."""


class Mean(NamedTuple):
    """Variational inference with E[β] in the place of exp E[log β]."""


class Collapsed(NamedTuple):
    """Collapsed variational inference (CVB0): the expectation of ``Sampled`` in the place of its samples."""


class Maximum(NamedTuple):
    """The fixed point θ ∝ α + Σ_w n_w φ_w with E[β]; deterministic, for documents that are scored or transformed."""


class Sampled(NamedTuple):
    """Collapsed Gibbs sampling of the topic of every token.

    The first sweep draws the tokens one after the other, each given those before it, or near the fixed point of
    ``Maximum`` if the document has 100 tokens or more. Every other sweep draws each token given all others. A word that
    occurs c times is c tokens. A fractional count c is ⌈c⌉ tokens of weight c/⌈c⌉.

    Attributes:
      sweeps: Sweeps over the tokens of a document per local step.
      counted: The last sweeps, whose mean is the result.
    """

    sweeps: Numeric = 5
    counted: Numeric = 2


Method: TypeAlias = Variational | Mean | Collapsed | Maximum | Sampled


def named_method(name: str, sweeps: int) -> Method:
    """Return the method that has this name: ``"sampled"``, ``"collapsed"``, ``"mean"`` or ``"variational"``.

    Args:
      name: The name.
      sweeps: Of the sampled method, which counts the last half of them, rounded down.
    """
    methods: dict[str, Method] = {"collapsed": Collapsed(), "mean": Mean(), "variational": Variational()}
    return Sampled(sweeps, max(1, sweeps // 2)) if name == "sampled" else methods[name]


def check_method(method: Method) -> None:
    """Raise an :class:`OptionError` unless the method can be used."""
    if not isinstance(method, Method):
        names = "Variational(), Mean(), Collapsed(), Maximum() or Sampled(sweeps, counted)"
        raise OptionError("method", f"must be {names}, got {method!r}")
    if isinstance(method, Sampled):
        known = [each for each in method if not isinstance(each, jax.core.Tracer)]
        is_whole = all(np.ndim(each) == 0 and np.result_type(each).kind in "iu" for each in known)
        if not is_whole or any(each < 1 for each in known) or (len(known) == 2 and method.counted > method.sweeps):
            raise OptionError("sweeps", f"must be whole numbers, 1 ≤ counted ≤ sweeps, got {method}")


def deterministic(method: Method) -> Method:
    """Return the method with which documents are scored and transformed after training."""
    return method if isinstance(method, Variational) else Maximum()
