"""Schedules of the step number, as in optax: step sizes ρ_t and window lengths L_t."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from smoothgrad_jax.core.errors import OptionError
from smoothgrad_jax.core.types import Schedule


def robbins_monro(tau: float = 1.0, kappa: float = 0.7) -> Schedule:
    """Return the step sizes ρ_t = (τ + t)^−κ for t = 0, 1, ….

    Args:
      tau: τ ≥ 1, the delay, makes the first steps smaller; ρ_0 = τ^−κ must not exceed 1.
      kappa: κ in (0.5, 1] fulfils the conditions of Robbins and Monro; 0 is a constant 1.

    Returns:
      A function of the step number.
    """
    if isinstance(tau, int | float) and not tau >= 1:
        raise OptionError("tau", f"must be at least 1, or the first step sizes exceed 1; got {tau}")
    if isinstance(kappa, int | float) and not kappa >= 0:
        raise OptionError("kappa", f"must not be negative, or the step sizes grow; got {kappa}")

    def schedule(count: ArrayLike) -> jax.Array:
        return (tau + jnp.asarray(count, float)) ** -jnp.asarray(kappa, float)

    return schedule


def phase_out(length: int, start: int, stop: int) -> Schedule:
    """Return window lengths that end in plain SVI: L up to step ``start``, then shorter, and 1 from ``stop`` on.

        L_t = L^((stop − t) / (stop − start))        between the two, rounded

    A window has a bias as long as λ moves. The paper proposes to phase the window out where convergence has to be
    guaranteed. Use it as the length in :func:`smoothgrad_jax.run` or, with ``capacity=length``, in
    :func:`smoothgrad_jax.window_mean`.

    Args:
      length: L at the beginning.
      start: The step after which L falls.
      stop: The first step with L = 1.

    Returns:
      A function of the step number.

    With ``length=1`` every step is a step of SVI.
    """
    if not length >= 1 or not 0 <= start < stop:
        raise ValueError(f"expected length ≥ 1 and 0 ≤ start < stop; got length {length}, start {start}, stop {stop}")

    def schedule(count: ArrayLike) -> jax.Array:
        exponent = jnp.clip((stop - jnp.asarray(count, float)) / (stop - start), 0, 1)
        return jnp.round(jnp.asarray(length, float) ** exponent)

    return schedule
