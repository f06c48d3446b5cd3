"""Smoothed SVI as optax gradient transformations.

The claim of the paper is the order of two lines:

    smoothed = optax.chain(window_mean(L), natural_gradient(prior), optax.scale_by_learning_rate(rho))
    averaged = optax.chain(natural_gradient(prior), window_mean(L), optax.scale_by_learning_rate(rho))

The first averages the statistics and keeps λ positive. The second, the baseline that the paper rejects, averages
gradients, which contain old λ, and can make λ negative.

The "gradient" that enters is the statistics Ŝ of a minibatch; the output of :func:`natural_gradient` is the natural
gradient of the *negative* bound, so that the descent of optax maximises the bound:

    updates = λ − η − Ŝᴸ,        λ ← λ − ρ updates

| letter | name            | meaning                                                    |
|--------|-----------------|------------------------------------------------------------|
| λ      | ``params``      | natural parameters                                         |
| Ŝ      | ``updates``     | statistics of a minibatch, then their mean, then the step  |
| η      | ``prior``       | natural parameters of the prior                            |
| L      | ``length``      | window length                                              |
| ρ      |``learning_rate``| step size or schedule                                      |
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from smoothgrad_jax.core import window
from smoothgrad_jax.core.errors import OptionError
from smoothgrad_jax.core.model import broadcast_prior
from smoothgrad_jax.core.types import DTypeLike, PyTree, Schedule, Warmup
from smoothgrad_jax.core.window import Moving, Window, WindowState
from smoothgrad_jax.core.window_kind import check_number, check_warmup


class WindowMeanState(NamedTuple):
    """State of :func:`window_mean`.

    Attributes:
      step: Number of updates so far, int32.
      window: The stored updates and their mean.
    """

    step: jax.Array
    window: WindowState


def window_mean(
    length: float | Schedule | Window,
    *,
    capacity: int | None = None,
    warmup: Warmup = "mean",
    dtype: DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Replace updates by the mean of the last ``length`` updates.

    Useful in front of any optax optimiser, not only for SVI. The state holds ``length + 1`` copies of the parameters.

    Args:
      length: L; ``math.inf`` is the mean of everything. Or a schedule of the step number, which needs a ``capacity``.
        Or a window kind with its length, for example ``Exponential(10)``, which holds one copy of the parameters. A
        number decides the shape of the state unless a ``capacity`` is given: under ``optax.inject_hyperparams`` name
        it, or the capacity, and ``dtype`` in ``static_args``.
      capacity: The longest moving window that will be used.
      warmup: ``"mean"`` or ``"zeros"``; see :func:`smoothgrad_jax.core.window.push`.
      dtype: dtype of the updates that a moving window stores.

    Returns:
      A gradient transformation; dtypes are preserved.

    With ``length=1`` it is the identity.
    """
    check_warmup(warmup)
    kind, each = _kind_and_length(length, capacity, dtype)

    def init_fn(params):
        return WindowMeanState(jnp.zeros((), jnp.int32), kind.init(params))

    def update_fn(updates, state, params=None, **extra_args):
        del params, extra_args
        now = each(state.step) if callable(each) else each
        mean, inner = kind.push(state.window, updates, now, warmup=warmup)
        return mean, WindowMeanState(optax.safe_increment(state.step), inner)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _kind_and_length(length, capacity, dtype) -> tuple[Window, float | Schedule]:
    """Return the window kind, and the length of every push or a schedule of them."""
    if isinstance(length, Window):
        if capacity is not None or dtype is not None:
            raise ValueError(f"capacity and dtype belong to the window kind: leave them out beside {length}")
        if length.length is None:
            raise OptionError("length", f"is missing: give {type(length).__name__} its length")
        return length, length.length
    known = not callable(length) and not isinstance(length, jax.core.Tracer)
    if known and (length is None or np.ndim(check_number("length", length))):
        raise OptionError("length", f"must be a number, a schedule or a window kind, got {length}")
    if capacity is None:
        if not known:
            raise ValueError(
                "a length that changes needs a capacity, the longest window that will be used "
                "(under optax.inject_hyperparams: static_args='length', or a static capacity)"
            )
        window.check_lengths(length)
        capacity = 0 if length == math.inf else int(length)
    kind = Moving(capacity, dtype)
    if known:
        kind.check_lengths(length)
    return kind, length


def natural_gradient(prior: PyTree) -> optax.GradientTransformationExtraArgs:
    """Turn statistics Ŝ into the natural gradient of the negative bound: λ − η − Ŝ.

    Args:
      prior: η, a pytree prefix of the parameters; for example one number.

    Returns:
      A stateless gradient transformation whose update needs ``params``.
    """

    def update_fn(updates, state, params=None, **extra_args):
        del extra_args
        if params is None:
            raise ValueError("natural_gradient needs the parameters: call update(updates, state, params)")

        def descend(lam, eta, s):
            return (lam - eta - s).astype(s.dtype)

        return jax.tree.map(descend, params, broadcast_prior(prior, params), updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update_fn)


def smoothed_svi(
    length: float | Schedule | Window,
    prior: PyTree,
    learning_rate: optax.ScalarOrSchedule,
    *,
    capacity: int | None = None,
    warmup: Warmup = "mean",
    dtype: DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Return an optimiser for smoothed stochastic variational inference (Mandt and Blei, 2014).

        Ŝᴸ = mean of the last L statistics,        λ ← λ + ρ (η − λ + Ŝᴸ)

    Args:
      length: L, as in :func:`window_mean`.
      prior: η, as in :func:`natural_gradient`.
      learning_rate: ρ, a number or a schedule.
      capacity, warmup, dtype: As in :func:`window_mean`.

    Returns:
      A gradient transformation. Its updates are steps of λ for ``optax.apply_updates``.

    Example:
      >>> optimiser = smoothed_svi(length=10, prior=0.5, learning_rate=0.01)
      >>> params = jnp.ones((3, 2))
      >>> state = optimiser.init(params)
      >>> updates, state = optimiser.update(jnp.full((3, 2), 4.0), state, params)
      >>> round(float(optax.apply_updates(params, updates)[0, 0]), 4)  # 1 + 0.01 (0.5 − 1 + 4)
      1.035

    With ``length=1`` this is SVI. The parameters are those of :func:`smoothgrad_jax.global_step` up to rounding; only
    the latter, which forms a convex combination, stays positive to the last bit at ρ = 1.
    """
    return optax.chain(
        window_mean(length, capacity=capacity, warmup=warmup, dtype=dtype),
        natural_gradient(prior),
        optax.scale_by_learning_rate(learning_rate),
    )
