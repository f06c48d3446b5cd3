"""Schedules of the step number, as in optax: step sizes ρ_t and window lengths L_t.

A schedule is a frozen dataclass: two schedules with the same parameters are equal, and the ``repr`` names them. So the
settings of a run can be stored and compared. The public names are those of functions, as in optax.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from smoothgrad_jax.core.errors import OptionError


@dataclass(frozen=True)
class RobbinsMonro:
    """The step sizes ρ_t = (τ + t)^−κ for t = 0, 1, ….

    Attributes:
      tau: τ ≥ 1, the delay, makes the first steps smaller; ρ_0 = τ^−κ must not exceed 1.
      kappa: κ in (0.5, 1] fulfils the conditions of Robbins and Monro; 0 is a constant 1.
    """

    tau: float = 1.0
    kappa: float = 0.7

    def __post_init__(self) -> None:
        if isinstance(self.tau, int | float) and not self.tau >= 1:
            raise OptionError("tau", f"must be at least 1, or the first step sizes exceed 1; got {self.tau}")
        if isinstance(self.kappa, int | float) and not self.kappa >= 0:
            raise OptionError("kappa", f"must not be negative, or the step sizes grow; got {self.kappa}")

    def __call__(self, count: ArrayLike) -> jax.Array:
        # ρ_t = (τ + t)^−κ
        return (self.tau + jnp.asarray(count, float)) ** -jnp.asarray(self.kappa, float)


@dataclass(frozen=True)
class Annealed:
    """The step sizes ρ_t = (τ + t)^−κ (1 − t/T) for t = 0, …, T − 1, for a run of T steps.

    In a run with :func:`robbins_monro` the last minibatches have the largest weights in λ, and λ has their noise. Here
    the step sizes are large while the parameters still move far, and small at the end: λ ends as a mean over more
    minibatches.

    Attributes:
      tau: τ ≥ 1, as in :func:`robbins_monro`.
      kappa: κ ≥ 0; it may be smaller than in :func:`robbins_monro`, because the factor 1 − t/T ends the noise.
      steps: T. Steps after T have the size 0.
    """

    tau: float
    kappa: float
    steps: int

    def __post_init__(self) -> None:
        RobbinsMonro(self.tau, self.kappa)  # checks both
        if isinstance(self.steps, int | float) and not self.steps >= 1:
            raise OptionError("steps", f"must be at least 1, got {self.steps}")

    def __call__(self, count: ArrayLike) -> jax.Array:
        # ρ_t = (τ + t)^−κ (1 − t/T)
        return RobbinsMonro(self.tau, self.kappa)(count) * jnp.maximum(1 - jnp.asarray(count, float) / self.steps, 0)


@dataclass(frozen=True)
class PhaseOut:
    """Window lengths that end in plain SVI: L up to step ``start``, then shorter, and 1 from ``stop`` on.

        L_t = L^((stop − t) / (stop − start))        between the two, rounded

    A window has a bias as long as λ moves. The paper proposes to phase the window out where convergence has to be
    guaranteed. Use it as the length in :func:`smoothgrad_jax.run` or, with ``capacity=length``, in
    :func:`smoothgrad_jax.window_mean`. With ``length=1`` every step is a step of SVI.

    Attributes:
      length: L at the beginning.
      start: The step after which L falls.
      stop: The first step with L = 1.
    """

    length: int
    start: int
    stop: int

    def __post_init__(self) -> None:
        if not self.length >= 1 or not 0 <= self.start < self.stop:
            raise ValueError(
                "expected length ≥ 1 and 0 ≤ start < stop; "
                f"got length {self.length}, start {self.start}, stop {self.stop}"
            )

    def __call__(self, count: ArrayLike) -> jax.Array:
        # L_t = L^((stop − t) / (stop − start)), rounded
        exponent = jnp.clip((self.stop - jnp.asarray(count, float)) / (self.stop - self.start), 0, 1)
        return jnp.round(jnp.asarray(self.length, float) ** exponent)


robbins_monro, annealed, phase_out = RobbinsMonro, Annealed, PhaseOut
