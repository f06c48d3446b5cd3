"""How far the smoothed gradient is from the true one, along a run.

With the full statistics S_i = S(λ_i) of the whole data beside the noisy Ŝ_i, and ᴸ for the mean over the last L steps:

    g_i  = (η − λ_i) + S_i         the true natural gradient
    ĝᴸ_i = (η − λ_i) + Ŝᴸ_i        the smoothed one, which the run follows
    gᴸ_i = (η − λ_i) + Sᴸ_i        what it would be without noise

    SB_i  = ‖gᴸ_i − g_i‖²   squared bias: S has moved on since the old statistics were computed
    VAR_i = ‖ĝᴸ_i − gᴸ_i‖²  variance: falls as 1/L
    SE_i  = ‖ĝᴸ_i − g_i‖²   squared error, about SB + VAR

η − λ_i is the same in all three and cancels: the differences are those of the statistics.

| letter | name              | meaning                                                    |
|--------|-------------------|------------------------------------------------------------|
| λ, η   | ``params, prior`` | as in :mod:`smoothgrad_jax.svi`                            |
| Ŝ, Ŝᴸ  | ``stats, noisy``  | statistics of a minibatch, and their mean over L steps     |
| S, Sᴸ  | ``full``          | statistics of the whole data, and their mean               |
| L      | ``length``        | window                                                     |
| SB     | ``squared_bias``  | along the run, [T]                                         |
| VAR    | ``variance``      | along the run, [T]                                         |
| SE     | ``squared_error`` | along the run, [T]                                         |

Reference: Mandt and Blei, *Smoothed Gradients for Stochastic Variational Inference*, NIPS 2014, sections 3 and 4.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from smoothgrad_jax import svi, window
from smoothgrad_jax.svi import LocalStep, SVIState
from smoothgrad_jax.window import Warmup, WindowState


class GradientError(NamedTuple):
    """SB, VAR and SE; scalars, or one per step."""

    squared_bias: jax.Array
    variance: jax.Array
    squared_error: jax.Array


def gradient_error(
    noisy: Any, full: Any, state: WindowState, length: Any = None, *, warmup: Warmup = "mean"
) -> tuple[GradientError, WindowState]:
    """SB, VAR and SE of one step.

    Args:
      noisy: Ŝᴸ_i, the mean that the step used.
      full: S_i, statistics of the whole data under the same λ_i.
      state: The window of the full statistics so far, from :func:`smoothgrad_jax.window.init`.
      length: L.
      warmup: As in the run itself.

    Returns:
      The errors, and the window with S_i in it.
    """
    mean, state = window.push(state, full, length, warmup=warmup)
    return GradientError(_distance(mean, full), _distance(noisy, mean), _distance(noisy, full)), state


def bias_variance(
    local_step: LocalStep,
    state: SVIState,
    batches: Any,
    data: Any,
    prior: Any,
    rho: Any,
    length: Any = None,
    *,
    warmup: Warmup = "mean",
) -> tuple[SVIState, GradientError]:
    """Run smoothed SVI and measure its gradient against the whole data at every step.

    Costs one local step on the whole data per step, and a second window. To compare lengths, ``vmap`` over ``length``
    with one capacity for all.

    Args:
      local_step, batches, prior, rho, length, warmup: As in :func:`smoothgrad_jax.run`.
      state: From :func:`smoothgrad_jax.init`, before its first step: the full statistics of earlier steps are not
        known.
      data: The whole data as one batch.

    Returns:
      ``(state, errors)``; :class:`GradientError` of arrays [T].
    """
    if not isinstance(state.step, jax.core.Tracer) and state.step != 0:
        raise ValueError(f"bias_variance starts with the run, from init(params, capacity); this one is at {state.step}")
    if isinstance(state.window, window.ExponentialState):
        second = window.init_exponential(state.params)
    else:
        second = window.init(state.params, window.capacity_of(state.window))
    zero = _distance(state.params, state.params)
    measured = _Measured(state.params, state.window, state.step, second, GradientError(zero, zero, zero))
    paired = jax.tree_util.Partial(_local_and_full, svi.as_pytree(local_step), data)
    measured, errors = svi.run(
        paired, measured, batches, prior, rho, length, warmup=warmup, record=_last_error, update=_measured_step
    )
    return SVIState(measured.params, measured.window, measured.step), errors


def averaged_step(
    state: SVIState, stats: Any, prior: Any, rho: Any, length: Any = None, *, warmup: Warmup = "mean"
) -> SVIState:
    """The baseline that the paper rejects: average the *gradients*, not the statistics.

        λ ← λ + ρ · mean of the last L of (η − λ_j) + Ŝ_j

    Takes the place of :func:`smoothgrad_jax.global_step`, in :func:`smoothgrad_jax.run` too (``update=averaged_step``).
    The old −λ_j in the mean can push λ below zero; :func:`count_negative` counts where.

    Args:
      state, stats, prior, rho, length, warmup: As in :func:`smoothgrad_jax.global_step`.

    Returns:
      The next state, whose window holds gradients.

    With L = 1 this is SVI.
    """

    def gradient_of(eta, params, stats):  # eta is one leaf, which may stand for a whole subtree of params
        return jax.tree.map(
            lambda lam, s: (jnp.broadcast_to(jnp.asarray(eta, lam.dtype), lam.shape) - lam) + s, params, stats
        )

    gradient = jax.tree.map(gradient_of, prior, state.params, stats)
    mean, ring = window.push(state.window, gradient, length, warmup=warmup)
    params = jax.tree.map(lambda lam, g: (lam + rho * g).astype(lam.dtype), state.params, mean)
    return SVIState(params, ring, state.step + 1)


def count_negative(params: Any) -> jax.Array:
    """The number of entries of λ that are not positive, where no Dirichlet exists."""
    return sum(jnp.sum(leaf <= 0) for leaf in jax.tree.leaves(params))


class _Measured(NamedTuple):
    """The fields of an :class:`SVIState`, the window of the full statistics, and the errors of the last step."""

    params: Any
    window: WindowState
    step: jax.Array
    full: WindowState
    error: GradientError


def _local_and_full(local_step, data, params, batch):
    return (local_step(params, batch)[0], local_step(params, data)[0]), None


def _measured_step(state, stats, prior, rho, length, *, warmup):
    noisy, full = stats
    moved = svi.global_step(SVIState(state.params, state.window, state.step), noisy, prior, rho, length, warmup=warmup)
    mean = window.mean(moved.window, length, warmup=warmup)
    error, full_window = gradient_error(mean, full, state.full, length, warmup=warmup)
    return _Measured(moved.params, moved.window, moved.step, full_window, error)


def _last_error(state, _):
    return state.error


def _distance(a, b):
    """‖a − b‖² over all leaves."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return sum(jnp.sum((x - y).astype(jnp.promote_types(x.dtype, jnp.float32)) ** 2) for x, y in pairs)
