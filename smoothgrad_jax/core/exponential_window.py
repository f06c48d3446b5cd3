"""The exponential window: a mean of all values with weights that decay by a factor d per push.

    m_t = Σ_i d^(t−i) S_i / w_t        w_t = Σ_i d^(t−i)        d = (L − 1)/(L + 1)

It needs memory for one value, whatever L is. L is the length of the moving window whose mean has the same variance; it
may be any real number from 1 on.

| letter | name       | meaning                                          |
|--------|------------|--------------------------------------------------|
| S_i    | ``value``  | the value of push i, a pytree of arrays          |
| L      | ``length`` | length of the moving window of equal variance    |
| d      | ``decay``  | factor by which weights decay per push           |
| m      | ``mean``   | the weighted mean                                |
| w      | ``weight`` | the sum of the weights                           |
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from smoothgrad_jax.core import window_kind
from smoothgrad_jax.core.errors import OptionError
from smoothgrad_jax.core.types import ArrayLike, Numeric, PyTree, Schedule, Warmup


class ExponentialState(NamedTuple):
    """State of an exponential window.

    Attributes:
      mean: m, the weighted mean.
      weight: w, the sum of the weights.
    """

    mean: PyTree
    weight: jax.Array

    @property
    def kind(self) -> "Exponential":
        """The kind of this state; the state keeps no length."""
        return Exponential()


@dataclass(frozen=True)
class Exponential:
    """A window whose weights decay exponentially; needs memory for one value.

    Attributes:
      length: L of the moving window with the same variance, any real number from 1 on; ∞ is the mean of everything. A
        schedule of the step number where the caller counts the steps, as ``fit`` and ``window_mean`` do. None: every
        push names its length.
    """

    length: float | Schedule | None = None

    def __post_init__(self) -> None:
        if self.length is not None and not callable(self.length):
            window_kind.check_lengths(self.length)

    def init(self, template: PyTree) -> ExponentialState:
        """Return an empty window for values like ``template`` (arrays or ``ShapeDtypeStruct``)."""
        template = window_kind.as_arrays(template)
        mean = jax.tree.map(lambda leaf: window_kind.zeros_like(leaf, window_kind.sum_dtype(leaf.dtype)), template)
        precise = any(leaf.dtype in (jnp.float64, jnp.complex128) for leaf in jax.tree.leaves(mean))
        return ExponentialState(mean, weight=jnp.zeros((), jnp.float64 if precise else jnp.float32))

    def push(
        self, state: ExponentialState, value: PyTree, length: Numeric | None = None, *, warmup: Warmup = "mean"
    ) -> tuple[PyTree, ExponentialState]:
        """Add a value; return the weighted mean and the new state. See :func:`smoothgrad_jax.core.window.push`."""
        window_kind.check_warmup(warmup)
        given = window_kind.as_arrays(value)
        window_kind.check_value(state.mean, given)
        if not jax.tree.leaves(given):
            return value, state
        self.check_lengths(length)
        length = self.length if length is None else length
        # w ← d w + 1,   m ← (1 − 1/w) m + S/w: a convex combination, so the mean stays within the values
        weight = _decay(length, state.weight.dtype) * state.weight + 1
        new = 1 / weight

        def blend(m, v):
            return (1 - new).astype(m.dtype) * m + new.astype(m.dtype) * v.astype(m.dtype)

        state = ExponentialState(jax.tree.map(blend, state.mean, given), weight)
        return window_kind.cast_mean(self.mean(state, length, warmup=warmup), given), state

    def mean(self, state: ExponentialState, length: Numeric | None = None, *, warmup: Warmup = "mean") -> PyTree:
        """Return the mean that the last push returned, in the dtype of the sum."""
        if warmup == "mean":
            return state.mean
        # Algorithm 1's zeros: divide by the weight that infinitely many values would have, 1/(1 − d).
        decay = _decay(self.length if length is None else length, state.weight.dtype)
        known = jnp.where(decay < 1, state.weight * (1 - decay), 1)
        return jax.tree.map(lambda m: m * known.astype(m.dtype), state.mean)

    def check_lengths(self, lengths: ArrayLike | None) -> None:
        """Raise an error for a length that is known now and is below 1, or for none where there is no default."""
        given = self.length if lengths is None else lengths
        if given is None:
            raise OptionError("length", "is missing: an exponential window has no default length")
        window_kind.check_lengths(given)

    def vmap_axes(self) -> ExponentialState:
        """Return ``in_axes`` for the state of several runs: every array has a leading axis of runs."""
        return ExponentialState._make((0, 0))


def _decay(length, dtype):
    """d = (L − 1)/(L + 1), written so that L = ∞ gives 1 and not ∞/∞."""
    return 1 - 2 / (jnp.asarray(length, dtype) + 1)
