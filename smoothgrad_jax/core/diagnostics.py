"""Bias and variance of the smoothed gradient, along a run.

With the full statistics S_i = S(λ_i) of the full data beside the noisy Ŝ_i, and ᴸ for the mean over the last L steps:

    g_i  = (η − λ_i) + S_i         the true natural gradient
    ĝᴸ_i = (η − λ_i) + Ŝᴸ_i        the smoothed one, which the run follows
    gᴸ_i = (η − λ_i) + Sᴸ_i        the smoothed one without noise

    SB_i  = ‖gᴸ_i − g_i‖²   squared bias: S has changed since the old statistics were computed
    VAR_i = ‖ĝᴸ_i − gᴸ_i‖²  variance: falls as 1/L
    SE_i  = ‖ĝᴸ_i − g_i‖²   squared error, about SB + VAR

η − λ_i is the same in all three and cancels: the differences are those of the statistics.

The baseline averages gradients (:func:`averaged_step`), and its η − λ_j are those of the last L steps. They do not
cancel, and the bias has a second term:

    gᴸ_i − g_i = (Sᴸ_i − S_i) + (λ_i − λ̄ᴸ_i)

| letter | name              | meaning                                                    |
|--------|-------------------|------------------------------------------------------------|
| λ, η   | ``params, prior`` | as in :mod:`smoothgrad_jax.core.svi`                       |
| Ŝ, Ŝᴸ  | ``stats, noisy``  | statistics of a minibatch, and their mean over L steps     |
| S, Sᴸ  | ``full``          | statistics of the full data, and their mean                |
| L      | ``length``        | window length                                              |
| λ̄ᴸ     |                   | mean of λ over the last L steps                            |

Reference: Mandt and Blei, *Smoothed Gradients for Stochastic Variational Inference*, NIPS 2014, sections 3 and 4.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from smoothgrad_jax.core import svi, window
from smoothgrad_jax.core.model import Model, as_model, broadcast_prior, check_key, local_step
from smoothgrad_jax.core.svi import SVIState
from smoothgrad_jax.core.types import ArrayLike, LocalStep, Numeric, PRNGKey, PyTree, Schedule, Warmup
from smoothgrad_jax.core.window import Window, WindowState


class GradientError(NamedTuple):
    """SB, VAR and SE; scalars, or one per step. With ``per_leaf``, each is a pytree like the parameters.

    Attributes:
      squared_bias: ‖gᴸ − g‖².
      variance: ‖ĝᴸ − gᴸ‖².
      squared_error: ‖ĝᴸ − g‖².
      extra_bias: ‖(η − λ)ᴸ − (η − λ)‖², the part of the bias that comes from averaging old λ with the statistics. With
        a full window, and always with ``warmup="mean"``, it is ‖λ − λ̄ᴸ‖². None where only statistics are averaged.
    """

    squared_bias: PyTree
    variance: PyTree
    squared_error: PyTree
    extra_bias: PyTree | None = None


class MeasuredState(NamedTuple):
    """State of :func:`bias_variance`: the fields of an :class:`SVIState`, and the windows that it is compared with.

    Attributes:
      params: λ.
      window: What the run averages: noisy statistics, or gradients.
      step: i, int32.
      full: The same without noise, from the full data.
      past: The η − λ that the averaged gradients contain; None where statistics are averaged.
      error: The errors of the last step, inside a run; else None.
    """

    params: PyTree
    window: WindowState
    step: jax.Array
    full: WindowState
    past: WindowState | None = None
    error: GradientError | None = None


def measured(state: SVIState, update: Callable[..., SVIState] = svi.global_step) -> MeasuredState:
    """Return the state of a measured run before its first step, with one more window, or two.

    :func:`bias_variance` calls this function itself; several runs under ``vmap`` need it, see :func:`vmap_axes`.

    Args:
      state: From :func:`smoothgrad_jax.init`, before its first step: the full statistics of earlier steps are not
        known.
      update: The global step of the run.
    """
    if not isinstance(state.step, jax.core.Tracer) and state.step != 0:
        raise ValueError(f"bias_variance needs a state before its first step, from init; this one is at {state.step}")

    def empty():
        return state.window.kind.init(state.params)

    return MeasuredState(*state, full=empty(), past=None if update is svi.global_step else empty())


def vmap_axes(update: Callable[..., SVIState] = svi.global_step, window: Window | float = math.inf) -> MeasuredState:
    """Return ``in_axes`` and ``out_axes`` for a ``vmap`` of :func:`bias_variance` over runs that step together.

    For example several lengths, in chunks of steps; all runs write to the same slot, so that no ring is copied:

        axes = vmap_axes()
        states = jax.vmap(lambda _: measured(init(lam, 300)), out_axes=axes)(lengths)

        @partial(jax.jit, donate_argnums=0)
        def chunk(states, lengths, batches):
            def one(state, length):
                return bias_variance(step, state, batches, data, prior, rho, length)

            return jax.vmap(one, in_axes=(axes, 0), out_axes=(axes, 0))(states, lengths)

    Args:
      update: The global step of the runs.
      window: The window kind of the runs; for moving windows the axes do not depend on the capacity.
    """
    params, ring, step = svi.vmap_axes(window)
    return MeasuredState(params, ring, step, full=ring, past=None if update is svi.global_step else ring)


def bias_variance(
    model: Model | LocalStep,
    state: SVIState | MeasuredState,
    batches: PyTree,
    data: PyTree,
    prior: PyTree | None = None,
    rho: ArrayLike | Schedule | None = None,
    length: ArrayLike | Schedule | None = None,
    *,
    warmup: Warmup = "mean",
    record: Callable[[MeasuredState, GradientError], PyTree] | None = None,
    update: Callable[..., SVIState] = svi.global_step,
    key: PRNGKey | None = None,
    donate: bool = False,
    per_leaf: bool = False,
) -> tuple[MeasuredState, PyTree]:
    """Run smoothed SVI and measure its gradient against the full data at every step.

    Costs one local step on the full data per step, and a second window. To compare lengths, ``vmap`` over ``length``
    with one capacity for all; :func:`vmap_axes` shows how, in chunks of steps.

    Args:
      model, batches, prior, rho, length, warmup: As in :func:`smoothgrad_jax.run`.
      state: From :func:`smoothgrad_jax.init`, before its first step: the full statistics of earlier steps are not
        known. Or from an earlier call, to continue.
      data: The full data as one batch.
      record: ``(state after the step, errors of the step) -> what to keep``; by default the errors.
      update: The global step. The values that it pushes to its window are compared: statistics, or gradients with
        :func:`averaged_step`, which then needs a third window for the extra bias.
      key: Random key, for a model that samples. The minibatches get the keys of :func:`smoothgrad_jax.run`, the full
        data gets others.
      donate: Donate the state, so that its windows are not copied at the start.
      per_leaf: Whether to measure each leaf of the parameters by itself. The errors of the leaves add up to those of
        the whole gradient.

    Returns:
      ``(state, records)``; :class:`GradientError` of arrays [T], or with ``per_leaf`` of pytrees of arrays [T] with the
      structure of the parameters.
    """
    model = as_model(model, prior)
    check_key(model, key)
    start = state if isinstance(state, MeasuredState) else measured(state, update)
    if (start.past is None) != (update is svi.global_step):
        raise ValueError("this state is of a run with another update: continue with that one, or start from init")
    # Each zero is an array of its own, as one array cannot be donated twice.
    zeros = [_distance(start.params, start.params, per_leaf) for _ in range(3 if start.past is None else 4)]
    measured_state, records = svi.run(
        _MeasuredModel(model, data),
        start._replace(error=GradientError(*zeros)),
        batches,
        rho=rho,
        length=length,
        warmup=warmup,
        record=_Record(record),
        update=_MeasuredStep(update, per_leaf),
        key=key,
        donate=donate,
    )
    return measured_state._replace(error=None), records


def averaged_step(
    state: SVIState,
    stats: PyTree,
    prior: PyTree,
    rho: Numeric,
    length: Numeric | None = None,
    *,
    warmup: Warmup = "mean",
) -> SVIState:
    """Take a step of the baseline that the paper rejects: average the *gradients*, not the statistics.

        λ ← λ + ρ · mean of the last L of (η − λ_j) + Ŝ_j

    Replaces :func:`smoothgrad_jax.global_step`, also in :func:`smoothgrad_jax.run` (``update=averaged_step``). The old
    −λ_j in the mean can make λ negative; :func:`count_negative` counts where.

    Args:
      state, stats, prior, rho, length, warmup: As in :func:`smoothgrad_jax.global_step`.

    Returns:
      The next state, whose window holds gradients.

    With L = 1 this is SVI.
    """
    eta = broadcast_prior(prior, state.params)
    gradient = jax.tree.map(lambda eta, lam, s: (eta - lam) + s, eta, state.params, stats)
    mean, ring = window.push(state.window, gradient, length, warmup=warmup)
    params = jax.tree.map(lambda lam, g: (lam + rho * g).astype(lam.dtype), state.params, mean)
    return SVIState(params, ring, state.step + 1)


def count_negative(params: PyTree) -> jax.Array:
    """Return the number of entries of λ that are zero or negative, and so are no parameters of a distribution."""
    return sum((jnp.sum(leaf <= 0) for leaf in jax.tree.leaves(params)), start=jnp.zeros((), int))


class _MeasuredModel(NamedTuple):
    """A model whose statistics are a pair: those of the minibatch, and those of the full data."""

    model: Model
    data: PyTree

    @property
    def prior(self):
        return self.model.prior

    def local_step(self, params, batch, key=None):
        other = None if key is None else jax.random.fold_in(key, 1)
        noisy, _ = local_step(self.model, params, batch, key)
        full, _ = local_step(self.model, params, self.data, other)
        return (noisy, full), None


# Dataclasses and not closures: two of them with the same functions are equal, so that nothing compiles again.


@dataclass(frozen=True)
class _MeasuredStep:
    update: Callable[..., SVIState]
    per_leaf: bool

    def __call__(self, state, stats, prior, rho, length, *, warmup):
        noisy, full = stats

        def step(ring, stats, length):
            return self.update(SVIState(state.params, ring, state.step), stats, prior, rho, length, warmup=warmup)

        def averaged(stats):
            """Return what the update averages: the statistics themselves, or a gradient with them."""
            return step(window.init(state.params, 0), stats, None).window.total

        new = step(state.window, noisy, length)
        mean = window.mean(new.window, length, warmup=warmup)
        exact = averaged(full)
        exact_mean, full_window = window.push(state.full, exact, length, warmup=warmup)
        pairs = ((exact_mean, exact), (mean, exact_mean), (mean, exact))
        error = GradientError(*(_distance(a, b, self.per_leaf) for a, b in pairs))
        past = state.past
        if past is not None:
            # A gradient without statistics is (η − λ_i).
            now = averaged(jax.tree.map(jnp.zeros_like, full))
            mean, past = window.push(past, now, length, warmup=warmup)
            error = error._replace(extra_bias=_distance(mean, now, self.per_leaf))
        return MeasuredState(new.params, new.window, new.step, full_window, past, error)


@dataclass(frozen=True)
class _Record:
    record: Callable[[MeasuredState, GradientError], PyTree] | None

    def __call__(self, state, _):
        return self.record(state._replace(error=None), state.error) if self.record else state.error


def _distance(a, b, per_leaf):
    """‖a − b‖², of each leaf or over all leaves."""

    def squared(x, y):
        return jnp.sum((x - y).astype(jnp.promote_types(x.dtype, jnp.float32)) ** 2)

    distances = jax.tree.map(squared, a, b)
    return distances if per_leaf else sum(jax.tree.leaves(distances))
