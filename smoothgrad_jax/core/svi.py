"""Smoothed stochastic variational inference, for any conjugate-exponential model.

    Ŝᴸ_i  = mean of the last L of the noisy statistics Ŝ_i
    λ_i+1 = λ_i + ρ_i ((η − λ_i) + Ŝᴸ_i) = (1 − ρ_i) λ_i + ρ_i (η + Ŝᴸ_i)

The statistics are averaged, λ is not: it is a convex combination of positive numbers and stays positive for ρ ≤ 1.

| letter | name       | meaning                                                                            |
|--------|------------|------------------------------------------------------------------------------------|
| λ      | ``params`` | natural parameters of the global variational distribution, any pytree              |
| Ŝ      | ``stats``  | expected statistics of one minibatch, scaled to the full data; like ``params``    |
| η      | ``prior``  | natural parameters of the prior: a pytree prefix of ``params``, for example one    |
|        |            | number                                                                             |
| ρ      | ``rho``    | step size                                                                          |
| L      | ``length`` | window length                                                                      |
| i      | ``step``   | number of steps so far                                                             |

:func:`run` and :func:`sweep` take a model object (:mod:`smoothgrad_jax.core.model`), which carries its prior, or a
function ``(params, batch) -> (stats, info)`` and a prior.

Reference: Mandt and Blei, *Smoothed Gradients for Stochastic Variational Inference*, NIPS 2014.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from smoothgrad_jax.core import window as _window
from smoothgrad_jax.core.errors import OptionError
from smoothgrad_jax.core.model import Model, as_model, broadcast_prior, check_key, for_platform, local_step
from smoothgrad_jax.core.platforms import platform_of
from smoothgrad_jax.core.types import ArrayLike, DTypeLike, LocalStep, Numeric, PRNGKey, PyTree, Schedule, Warmup
from smoothgrad_jax.core.window import Moving, Window, WindowState
from smoothgrad_jax.core.window_kind import check_number

Record: TypeAlias = Callable[[Any, PyTree], PyTree]  # (state after the step, info) -> what to keep


class RunState(Protocol):
    """What a run needs of its state; :class:`SVIState` is one."""

    @property
    def params(self) -> PyTree:
        """λ."""

    @property
    def window(self) -> WindowState:
        """The statistics of the last steps and their mean."""

    @property
    def step(self) -> jax.Array:
        """i, int32."""


_State = TypeVar("_State", bound=RunState)


class SVIState(NamedTuple):
    """State of smoothed SVI.

    Attributes:
      params: λ.
      window: The statistics of the last steps and their mean.
      step: i, int32.
    """

    params: PyTree
    window: WindowState
    step: jax.Array


def init(params: PyTree, window: Window | float | None = None, *, dtype: DTypeLike | None = None) -> SVIState:
    """Return the state before the first step.

    Args:
      params: λ to start from, a pytree of floating arrays. Positive ones stay positive if the statistics do.
      window: The capacity of a moving window, the longest that will be used: memory for ``capacity + 1`` statistics is
        allocated. 0 or ∞ averages everything and stores none. Or a window kind, for example ``Exponential()``, whose
        length every step is given.
      dtype: dtype of the statistics that a moving window stores, for example ``jnp.bfloat16``.

    Returns:
      An :class:`SVIState` that uses other memory than ``params``.
    """
    kind = _window.as_kind(window, dtype=dtype)
    params = jax.tree.map(jnp.array, params)  # its own memory: donating the state must not delete the caller's array
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(f"params{jax.tree_util.keystr(path)} must be floats, got {leaf.dtype}")
    return SVIState(params, _window.init(params, kind), jnp.zeros((), jnp.int32))


def vmap_axes(window: Window | float = math.inf) -> SVIState:
    """Return ``in_axes`` and ``out_axes`` for a ``vmap`` of :func:`global_step` over runs that step together.

    Args:
      window: The window kind of the runs; for moving windows the axes do not depend on the capacity.
    """
    return SVIState._make((0, _window.as_kind(window).vmap_axes(), None))  # params, window, step


def global_step(
    state: SVIState,
    stats: PyTree,
    prior: PyTree,
    rho: Numeric,
    length: Numeric | None = None,
    *,
    warmup: Warmup = "mean",
    donate: bool = False,
) -> SVIState:
    """Average the statistics and move λ towards their mean; compiled once per shape.

        λ ← (1 − ρ) λ + ρ (η + Ŝᴸ)

    Args:
      state: The state.
      stats: Ŝ, from a local step.
      prior: η.
      rho: ρ in [0, 1]; for a schedule its value, ``schedule(state.step)``.
      length: L, by default the capacity; see :func:`smoothgrad_jax.core.window.push`.
      warmup: ``"mean"`` or ``"zeros"``; see :func:`smoothgrad_jax.core.window.push`.
      donate: Donate the old state, so that its window is updated in place and not copied. The state passed in cannot be
        used afterwards. (Under a ``jit`` of your own, donate there.)

    Returns:
      The next state.

    With L = 1 this is SVI; with L = 1, ρ = 1 and statistics of the full data it is batch variational Bayes.
    """
    if callable(rho) or callable(length):
        raise ValueError("global_step takes numbers: call a schedule with state.step, or give it to run")
    if length is not None and not isinstance(length, jax.core.Tracer):
        check_number("length", length)
    if np.ndim(rho) or (length is not None and np.ndim(length)):
        raise ValueError(f"rho and length must be single numbers, got {rho} and {length}; run takes one per step")
    check_rho(rho)
    if jax.tree.leaves(stats):
        state.window.kind.check_lengths(length)
    # As floats, so that 1, 1.0 and ∞ are one program.
    rho = jnp.asarray(rho, float)
    length = None if length is None else jnp.asarray(length, float)
    step = _donating_step if donate else _global_step
    return step(state, stats, prior, rho, length, warmup=warmup)


def _step(state, stats, prior, rho, length, *, warmup):
    mean, window = _window.push(state.window, stats, length, warmup=warmup)

    def blend(lam, eta, s):
        return ((1 - rho) * lam + rho * (eta + s)).astype(lam.dtype)

    params = jax.tree.map(blend, state.params, broadcast_prior(prior, state.params), mean)
    return SVIState(params, window, state.step + 1)


_global_step = jax.jit(_step, static_argnames="warmup")
_donating_step = jax.jit(_step, static_argnames="warmup", donate_argnames="state")


def run(
    model: Model | LocalStep,
    state: _State,
    batches: PyTree,
    prior: PyTree | None = None,
    rho: ArrayLike | Schedule | None = None,
    length: ArrayLike | Schedule | None = None,
    *,
    warmup: Warmup = "mean",
    record: Record | None = None,
    update: Callable[..., RunState] = global_step,
    key: PRNGKey | None = None,
    donate: bool = False,
) -> tuple[_State, PyTree]:
    """Run many steps in one compiled program.

    The program is compiled per function, and per class of model. The hyperparameters of a model are inputs: other
    values compile nothing again. For a function, ``jax.tree_util.Partial(function, hyperparameters)`` does the same.

    Args:
      model: A model; or a function ``(params, batch) -> (stats, info)``.
      state: From :func:`init`, or from an earlier run to continue; or another :class:`RunState` that ``update`` takes.
      batches: A pytree with a leading axis T: one minibatch per step.
      prior: η, if ``model`` is a function. A model carries its prior.
      rho: ρ: a number, one per step [T], or a schedule of the step number.
      length: L: likewise; by default the capacity.
      warmup: ``"mean"`` or ``"zeros"``.
      record: ``(state after the step, info) -> what to keep``; by default the info of every step is kept.
      update: The global step; :func:`smoothgrad_jax.core.diagnostics.averaged_step` is another.
      key: Random key, for a model that samples. Step i gets ``jax.random.fold_in(key, i)``, as in
        :func:`smoothgrad_jax.fit`.
      donate: Donate the state, so that its window is not copied at the start.

    Returns:
      ``(state, records)``; the records have a leading axis T.
    """
    model = as_model(model, prior)
    check_key(model, key)
    if not hasattr(state, "window"):
        raise ValueError(f"expected a state, got {type(state).__name__}; init(params, capacity) makes one")
    model = for_platform(model, platform_of(state.params))
    steps = state.step + jnp.arange(_num_steps(batches), dtype=jnp.int32)
    rhos, lengths = _rho_per_step(rho, steps), _per_step("length", length, steps)
    state.window.kind.check_lengths(lengths)
    program = _donating_run if donate else _run
    return program(model, state, batches, rhos, lengths, key, warmup, record, update)


def sweep(
    model: Model | LocalStep,
    params: PyTree,
    batches: PyTree,
    prior: PyTree | None = None,
    rho: ArrayLike | Schedule | None = None,
    lengths: Sequence[float] = (),
    *,
    warmup: Warmup = "mean",
    dtype: DTypeLike | None = None,
    record: Record | None = None,
    key: PRNGKey | None = None,
    memory_limit: float | None = None,
) -> tuple[SVIState, PyTree]:
    """Run moving windows of several lengths in one program, on the same minibatches.

    The runs write to the same slot at the same step, so each has a ring for the longest finite length C: R runs need
    R (C + 1) slots of the size of λ, and not Σ L. In return the write is one copy and not a scatter. Lengths of very
    different size need less memory in two sweeps. L = ∞ needs a ring like the others. :func:`sweep_bytes` returns the
    memory before anything is allocated; time is proportional to R and to the number of minibatches, so that a sweep
    over the first few of them, called twice because the first call compiles, predicts it.

    Args:
      model, batches, prior, rho, warmup, record, key: As in :func:`run`; all runs get the same keys.
      params: λ, where every run starts.
      lengths: R window lengths; ``math.inf`` averages everything. Another longest length compiles again.
      dtype: dtype of the stored statistics.
      memory_limit: Bytes that states and records may need; by default the free memory of the machine.

    Returns:
      ``(states, records)`` with a leading axis R; each run equals a separate :func:`run` up to rounding.

    Raises:
      MemoryError: Before anything is allocated.
    """
    options = {"warmup": warmup, "dtype": dtype, "record": record, "key": key}
    inputs, static = _sweep_inputs(model, params, batches, prior, rho, lengths, memory_limit, **options)
    need = _sweep_bytes(inputs, static)
    _check_memory(sum(need), len(lengths), static["kind"].capacity, memory_limit)
    return _sweep(*inputs, **static)


class SweepBytes(NamedTuple):
    """Memory of what :func:`sweep` returns; made by :func:`sweep_bytes`.

    Attributes:
      states: Bytes of the states, which include the windows.
      records: Bytes of the records of all steps.
    """

    states: int
    records: int


def sweep_bytes(
    model: Model | LocalStep,
    params: PyTree,
    batches: PyTree,
    prior: PyTree | None = None,
    rho: ArrayLike | Schedule | None = None,
    lengths: Sequence[float] = (),
    *,
    warmup: Warmup = "mean",
    dtype: DTypeLike | None = None,
    record: Record | None = None,
    key: PRNGKey | None = None,
) -> SweepBytes:
    """Return the bytes that a :func:`sweep` with the same arguments allocates for its results.

    A sweep needs this memory from its start to its end, and some arrays of the size of λ per run in addition. This
    function computes nothing and allocates nothing of this size.

    Args:
      model, params, batches, prior, rho, lengths, warmup, dtype, record, key: As in :func:`sweep`.
    """
    options = {"warmup": warmup, "dtype": dtype, "record": record, "key": key}
    return _sweep_bytes(*_sweep_inputs(model, params, batches, prior, rho, lengths, math.inf, **options))


def _sweep_inputs(model, params, batches, prior, rho, lengths, memory_limit, *, warmup, dtype, record, key):
    """Return the arrays and the static arguments of the compiled program of a sweep, checked."""
    model = as_model(model, prior)
    check_key(model, key)
    if isinstance(params, SVIState):
        raise ValueError("sweep makes its own states: give it the parameters to start from, not a state")
    check_number("lengths", lengths)
    if np.ndim(lengths) != 1 or not len(lengths):
        raise ValueError(f"lengths must be several window lengths, got {lengths}")
    _window.check_lengths(lengths)
    kind = Moving(max((length for length in lengths if length != math.inf), default=0), dtype)
    kind.check_lengths(lengths)
    params = jax.tree.map(jnp.asarray, params)
    model = for_platform(model, platform_of(params))
    size = len(lengths)
    # A window that is absurdly long is refused before the program is traced.
    _check_memory(size * _nbytes(jax.eval_shape(kind.init, params)), size, kind.capacity, memory_limit)
    rhos = _rho_per_step(rho, jnp.arange(_num_steps(batches), dtype=jnp.int32))
    inputs = (model, params, batches, rhos, jnp.asarray(lengths, float), key)
    return inputs, {"kind": kind, "warmup": warmup, "record": record}


def _sweep_bytes(inputs, static):
    return SweepBytes(*map(_nbytes, _sweep.eval_shape(*inputs, **static)))


def _scan(model, state, batches, rho, length, key, warmup, record, update):
    def step(state, inputs):
        batch, rho, length = inputs
        step_key = None if key is None else jax.random.fold_in(key, state.step)
        stats, info = local_step(model, state.params, batch, step_key)
        state = update(state, stats, model.prior, rho, length, warmup=warmup)
        return state, record(state, info) if record else info

    return lax.scan(step, state, (batches, rho, length))


_run = jax.jit(_scan, static_argnames=("warmup", "record", "update"))
_donating_run = jax.jit(_scan, static_argnames=("warmup", "record", "update"), donate_argnames="state")


@partial(jax.jit, static_argnames=("kind", "warmup", "record"))
def _sweep(model, params, batches, rho, lengths, key, kind, warmup, record):
    # First one state per run: rings that are separate arrays from the start are never copied.
    axes = vmap_axes(kind)
    states = jax.vmap(lambda _: init(params, kind), out_axes=axes)(lengths)

    def one(state, length):
        every = jnp.broadcast_to(length, rho.shape)
        return _scan(model, state, batches, rho, every, key, warmup, record, global_step)

    return jax.vmap(one, in_axes=(axes, 0))(states, lengths)


def _num_steps(batches):
    sizes = {np.shape(leaf)[0] if np.ndim(leaf) else None for leaf in jax.tree.leaves(batches)}
    if len(sizes) != 1 or None in sizes:
        raise ValueError(
            "batches must be stacked: every array needs the same leading axis, one entry per step "
            f"(found leading sizes {sorted(map(str, sizes))}); pack(X, rows) with rows [T, B] makes such a stack"
        )
    return sizes.pop()


def _rho_per_step(rho, steps):
    if rho is None:
        raise OptionError("rho", "is missing: give a number, one per step, or a schedule such as robbins_monro()")
    rho = _per_step("rho", rho, steps)
    check_rho(rho)
    return rho


def _per_step(option, value, steps):
    """Return a number, a schedule or an array as [T]; None stays None."""
    if value is None:
        return None
    if callable(value):
        return jax.vmap(lambda step: jnp.asarray(value(step), float))(steps)
    if not isinstance(value, jax.Array):
        check_number(option, value)
    value = jnp.asarray(value, float)
    if value.ndim > 1 or (value.ndim == 1 and value.shape != steps.shape):
        raise OptionError(option, f"must be a number, a schedule, or one per step [{len(steps)}]; got {value.shape}")
    return jnp.broadcast_to(value, steps.shape)


def check_rho(rho: ArrayLike) -> None:
    """Raise an error unless every ρ lies in [0, 1]; a traced one is not checked."""
    if not isinstance(rho, jax.core.Tracer) and not (np.abs(check_number("rho", rho) - 0.5) <= 0.5).all():
        raise OptionError("rho", f"must lie in [0, 1], or λ does not stay positive; got {rho}")


def _nbytes(tree):
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _check_memory(need, num_runs, capacity, limit):
    free = free_memory() if limit is None else limit
    if free is not None and need > free:
        raise MemoryError(
            f"{num_runs} runs with windows of up to {capacity} need {need / 1e9:.1f} GB with their records, and "
            f"{free / 1e9:.1f} GB are free. Sweep fewer or shorter lengths, record less, or store the window in half "
            "the memory with dtype=jnp.bfloat16; memory_limit overrides this check."
        )


def free_memory() -> int | None:
    """Return the free bytes of the default device, or of the machine; None if they are not known."""
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    info = Path("/proc/meminfo")
    if not info.exists():
        return None
    free = [line for line in info.read_text().splitlines() if line.startswith("MemAvailable:")]
    return int(free[0].split()[1]) * 1024 if free else None
