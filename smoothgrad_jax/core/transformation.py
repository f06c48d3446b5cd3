"""The optax door: smoothed SVI as gradient transformations.

The paper's whole claim is the order of two lines:

    smoothed = optax.chain(window_mean(L), natural_gradient(prior), optax.scale_by_learning_rate(rho))
    averaged = optax.chain(natural_gradient(prior), window_mean(L), optax.scale_by_learning_rate(rho))

The first averages the statistics and keeps λ positive. The second, the baseline that the paper rejects, averages
gradients, drags old λ along, and can make λ negative.

What enters as the "gradient" are the statistics Ŝ of a minibatch; what leaves :func:`natural_gradient` is the natural
gradient of the *negative* bound, so that optax's descent climbs:

    updates = λ − η − Ŝᴸ,        λ ← λ − ρ updates

| letter | name            | meaning                                                    |
|--------|-----------------|------------------------------------------------------------|
| λ      | ``params``      | natural parameters                                         |
| Ŝ      | ``updates``     | statistics of a minibatch, then their mean, then the step  |
| η      | ``prior``       | natural parameters of the prior                            |
| L      | ``length``      | window                                                     |
| ρ      |``learning_rate``| step size or schedule                                      |
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from smoothgrad_jax.core import window
from smoothgrad_jax.core.window import Warmup


class WindowMeanState(NamedTuple):
    """State of :func:`window_mean`.

    Attributes:
      count: Updates so far, int32.
      window: The stored updates and their sum.
    """

    count: jax.Array
    window: window.WindowState | window.ExponentialState


def window_mean(
    length: int | float | Callable[[Any], Any],
    *,
    capacity: int | None = None,
    exponential: bool = False,
    warmup: Warmup = "mean",
    dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Replace updates by the mean of the last ``length`` updates.

    Useful in front of any optax optimiser, not only for SVI. The state holds ``length + 1`` copies of the parameters.

    Args:
      length: L; ``math.inf`` is the mean of everything; or a schedule of the step number, which needs a ``capacity``.
        It decides the shape of the state unless a ``capacity`` is given: under ``optax.inject_hyperparams`` name it,
        or the capacity, and ``dtype`` in ``static_args``.
      capacity: The longest window that will be asked for.
      exponential: Forget exponentially, with the variance of a window of that length, and store one copy; has neither
        capacity nor dtype.
      warmup: ``"mean"`` or ``"zeros"``; see :func:`smoothgrad_jax.core.window.push`.
      dtype: dtype of the stored updates.

    Returns:
      A gradient transformation; dtypes are preserved.

    With ``length=1`` it is the identity.
    """
    if warmup not in ("mean", "zeros"):
        raise ValueError(f"warmup must be 'mean' or 'zeros', got {warmup!r}")
    if exponential and (capacity is not None or dtype is not None):
        raise ValueError("an exponential window has neither capacity nor dtype")
    known = not callable(length) and not isinstance(length, jax.core.Tracer)
    if known and (length is None or np.ndim(length)):
        raise ValueError(f"length must be a number or a schedule, got {length}")
    if not exponential and capacity is None:
        if not known:
            raise ValueError(
                "a length that changes needs a capacity, the longest window it will ask for "
                "(under optax.inject_hyperparams: static_args='length', or a static capacity)"
            )
        window.check_lengths(length, None)
        capacity = 0 if length == math.inf else int(length)
        window.check_lengths(length, max(capacity, 1))
    elif known:
        window.check_lengths(length, None if exponential else capacity)

    def init_fn(params):
        inner = window.init_exponential(params) if exponential else window.init(params, capacity, dtype=dtype)
        return WindowMeanState(jnp.zeros((), jnp.int32), inner)

    def update_fn(updates, state, params=None, **extra_args):
        del params, extra_args
        now = length(state.count) if callable(length) else length
        mean, inner = window.push(state.window, updates, now, warmup=warmup)
        return mean, WindowMeanState(optax.safe_increment(state.count), inner)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def natural_gradient(prior: Any) -> optax.GradientTransformationExtraArgs:
    """Turn statistics Ŝ into the natural gradient of the negative bound: λ − η − Ŝ.

    Args:
      prior: η, a pytree prefix of the parameters; one number will do.

    Returns:
      A stateless gradient transformation whose update needs ``params``.
    """

    def update_fn(updates, state, params=None, **extra_args):
        del extra_args
        if params is None:
            raise ValueError("natural_gradient needs the parameters: call update(updates, state, params)")

        def descend(eta, params, updates):  # eta is one leaf, which may stand for a whole subtree
            def one(lam, s):
                return (lam - jnp.broadcast_to(jnp.asarray(eta, lam.dtype), lam.shape) - s).astype(s.dtype)

            return jax.tree.map(one, params, updates)

        return jax.tree.map(descend, prior, params, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update_fn)


def smoothed_svi(
    length: int | float | Callable[[Any], Any],
    prior: Any,
    learning_rate: Any,
    *,
    capacity: int | None = None,
    exponential: bool = False,
    warmup: Warmup = "mean",
    dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Smoothed stochastic variational inference (Mandt and Blei, 2014).

        Ŝᴸ = mean of the last L statistics,        λ ← λ + ρ (η − λ + Ŝᴸ)

    Args:
      length: L, as in :func:`window_mean`.
      prior: η, as in :func:`natural_gradient`.
      learning_rate: ρ, a number or a schedule.
      capacity, exponential, warmup, dtype: As in :func:`window_mean`.

    Returns:
      A gradient transformation. Its updates are λ-sized steps for ``optax.apply_updates``.

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
        window_mean(length, capacity=capacity, exponential=exponential, warmup=warmup, dtype=dtype),
        natural_gradient(prior),
        optax.scale_by_learning_rate(learning_rate),
    )
