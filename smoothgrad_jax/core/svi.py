"""Smoothed stochastic variational inference, for any conjugate-exponential model.

    Ŝᴸ_i  = mean of the last L of the noisy statistics Ŝ_i
    λ_i+1 = λ_i + ρ_i ((η − λ_i) + Ŝᴸ_i) = (1 − ρ_i) λ_i + ρ_i (η + Ŝᴸ_i)

The statistics are averaged, λ is not: it is a convex combination of positive numbers and stays positive for ρ ≤ 1.

| letter | name       | meaning                                                                            |
|--------|------------|------------------------------------------------------------------------------------|
| λ      | ``params`` | natural parameters of the global variational distribution, any pytree              |
| Ŝ      | ``stats``  | expected statistics of one minibatch, scaled up to the whole data; like ``params`` |
| η      | ``prior``  | natural parameters of the prior: a pytree prefix of ``params``, so one number will |
|        |            | do                                                                                 |
| ρ      | ``rho``    | step size                                                                          |
| L      | ``length`` | window                                                                             |
| i      | ``step``   | steps taken                                                                        |

A model enters as a function ``local_step(params, batch) -> (stats, info)``; nothing here knows which model it is.

Reference: Mandt and Blei, *Smoothed Gradients for Stochastic Variational Inference*, NIPS 2014.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from smoothgrad_jax.core import window as _window
from smoothgrad_jax.core.window import Warmup

LocalStep = Callable[[Any, Any], tuple[Any, Any]]


class SVIState(NamedTuple):
    """What the next step needs.

    Attributes:
      params: λ.
      window: The statistics of the last steps and their sum.
      step: i, int32.
    """

    params: Any
    window: _window.WindowState | _window.ExponentialState
    step: jax.Array


def init(params: Any, capacity: int | float | None = None, *, exponential: bool = False, dtype: Any = None) -> SVIState:
    """The state before the first step.

    Args:
      params: λ to start from, a pytree of positive arrays.
      capacity: The longest window that will be asked for: memory for ``capacity + 1`` statistics is allocated. 0 or ∞
        averages everything and needs none.
      exponential: Forget exponentially instead: one slot, any length, no capacity.
      dtype: dtype of the stored statistics, for example ``jnp.bfloat16``.

    Returns:
      An :class:`SVIState` that shares no memory with ``params``.
    """
    if exponential == (capacity is not None) or (exponential and dtype is not None):
        raise ValueError("give the window a capacity, or exponential=True, which has neither capacity nor dtype")
    params = jax.tree.map(jnp.array, params)  # its own memory: donating the state must not delete the caller's array
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(f"params{jax.tree_util.keystr(path)} must be floats, got {leaf.dtype}")
    window = _window.init_exponential(params) if exponential else _window.init(params, capacity, dtype=dtype)
    return SVIState(params, window, jnp.zeros((), jnp.int32))


def export(state: SVIState) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The state as arrays and as facts that JSON can hold; it stays as it is.

    Nothing is copied on a CPU: the arrays are views. While one is held, a step that would write there copies first.
    """
    leaves = jax.tree_util.tree_leaves_with_path(state)
    facts = {
        "exponential": isinstance(state.window, _window.ExponentialState),
        "step": int(state.step),
        "paths": [jax.tree_util.keystr(path) for path, _ in leaves],
    }
    return {f"leaf{i}": np.asarray(leaf) for i, (_, leaf) in enumerate(leaves)}, facts


def restore(arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any], like: Any = None) -> SVIState:
    """The state of which :func:`export` made these; a run goes on from it to the same bits.

    Args:
      arrays, facts: From :func:`export`.
      like: A pytree with the structure of the parameters, if they are more than one array: a file cannot tell it.
    """
    like = jax.tree.map(lambda _: 0, like) if like is not None else 0
    if facts["exponential"]:
        window = _window.ExponentialState(mean=like, weight=0)
    else:
        window = _window.WindowState(buffer=like, index=0, first=0, total=like, residue=like, negative=0, broken=0)
    leaves, structure = jax.tree_util.tree_flatten_with_path(SVIState(params=like, window=window, step=0))
    paths = [jax.tree_util.keystr(path) for path, _ in leaves]
    if paths != facts["paths"]:
        odd = next(a or b for a, b in itertools.zip_longest(facts["paths"], paths) if a != b)
        raise ValueError(f"this state is of a model with other parameters: see {odd}; give its parameters as like=")
    values = [arrays[f"leaf{i}"] for i in range(len(paths))]
    if any(value.dtype in (np.float64, np.complex128) for value in values) and not jax.config.jax_enable_x64:
        raise ValueError("this state is of a run in float64: go on under jax.enable_x64(True)")
    return jax.tree.unflatten(structure, [jnp.array(np.asarray(value)) for value in values])


def runs() -> SVIState:
    """``in_axes`` and ``out_axes`` for a ``vmap`` of :func:`global_step` over runs that step together."""
    return SVIState(params=0, window=_window.runs(), step=None)


def global_step(
    state: SVIState,
    stats: Any,
    prior: Any,
    rho: Any,
    length: Any = None,
    *,
    warmup: Warmup = "mean",
    donate: bool = False,
) -> SVIState:
    """Average the statistics and move λ towards them; compiled once per shape.

        λ ← (1 − ρ) λ + ρ (η + Ŝᴸ)

    Args:
      state: The state.
      stats: Ŝ, from a local step.
      prior: η.
      rho: ρ in [0, 1]; of a schedule its value, ``schedule(state.step)``.
      length: L, by default the capacity; see :func:`smoothgrad_jax.core.window.push`.
      warmup: ``"mean"`` or ``"zeros"``; see :func:`smoothgrad_jax.core.window.push`.
      donate: Give the old state away: the ring is then updated in place, and not copied. The state passed in cannot be
        used any more. (Under a ``jit`` of your own, donate there.)

    Returns:
      The next state.

    With L = 1 this is SVI; with L = 1, ρ = 1 and statistics of the whole data it is batch variational Bayes.
    """
    if callable(rho) or callable(length):
        raise ValueError("global_step takes numbers: call a schedule with state.step, or give it to run")
    if np.ndim(rho) or np.ndim(length):
        raise ValueError(f"rho and length must be single numbers, got {rho} and {length}; run takes one per step")
    check_rho(rho)
    if jax.tree.leaves(stats):
        _window.check_length(length, state.window)
    # As floats, so that 1, 1.0 and ∞ are one program.
    rho = jnp.asarray(rho, float)
    length = None if length is None else jnp.asarray(length, float)
    step = _donating_step if donate else _global_step
    return step(state, stats, prior, rho, length, warmup=warmup)


def _step(state, stats, prior, rho, length, *, warmup):
    mean, window = _window.push(state.window, stats, length, warmup=warmup)

    def move(eta, params, mean):  # eta is one leaf, which may stand for a whole subtree of params
        def blend(lam, s):
            eta_like = jnp.broadcast_to(jnp.asarray(eta, lam.dtype), lam.shape)
            return ((1 - rho) * lam + rho * (eta_like + s)).astype(lam.dtype)

        return jax.tree.map(blend, params, mean)

    return SVIState(jax.tree.map(move, prior, state.params, mean), window, state.step + 1)


_global_step = jax.jit(_step, static_argnames="warmup")
_donating_step = jax.jit(_step, static_argnames="warmup", donate_argnames="state")


def robbins_monro(tau: float = 1.0, kappa: float = 0.7) -> Callable[[Any], Any]:
    """The step sizes ρ_t = (τ + t)^−κ for t = 0, 1, …, an optax schedule.

    Args:
      tau: τ ≥ 1 slows the first steps down; ρ_0 = τ^−κ must not exceed 1.
      kappa: κ in (0.5, 1] fulfils the conditions of Robbins and Monro; 0 is a constant 1.

    Returns:
      A function of the step number.
    """
    if isinstance(tau, int | float) and not tau >= 1:
        raise ValueError(f"tau must be at least 1, or the first step sizes exceed 1; got {tau}")
    if isinstance(kappa, int | float) and not kappa >= 0:
        raise ValueError(f"kappa must not be negative, or the step sizes grow; got {kappa}")

    def schedule(count):
        return (tau + jnp.asarray(count, float)) ** -jnp.asarray(kappa, float)

    return schedule


def default_offset(a_pass: float) -> float:
    """τ for :func:`robbins_monro` where nothing is said: the number of minibatches in a pass, between 1 and 64.

    Where a minibatch is a good part of the data its statistics have little noise, and a few passes are few steps: these
    have to be large. With B = D the first step is that of batch variational Bayes. For 64, see
    ``experiments/defaults.py``.
    """
    return min(max(float(a_pass), 1.0), 64.0)


def phase_out(length: int, start: int, stop: int) -> Callable[[Any], Any]:
    """Window lengths that end in plain SVI: L up to step ``start``, then fewer and fewer, and 1 from ``stop`` on.

        L_t = L^((stop − t) / (stop − start))        between the two, rounded

    The bias of the window stays while λ moves; the paper proposes to phase the window out where convergence has to be
    guaranteed. A schedule for :func:`run`, and with ``capacity=length`` for :func:`smoothgrad_jax.window_mean`.

    Args:
      length: L, at the beginning.
      start: The first step at which it falls.
      stop: The first step with L = 1.

    Returns:
      A function of the step number.

    With ``length=1`` this is SVI all along.
    """
    if not length >= 1 or not 0 <= start < stop:
        raise ValueError(f"expected length ≥ 1 and 0 ≤ start < stop; got length {length}, start {start}, stop {stop}")

    def schedule(count):
        share = jnp.clip((stop - jnp.asarray(count, float)) / (stop - start), 0, 1)
        return jnp.round(jnp.asarray(length, float) ** share)

    return schedule


def run(
    local_step: LocalStep,
    state: SVIState,
    batches: Any,
    prior: Any,
    rho: Any,
    length: Any = None,
    *,
    warmup: Warmup = "mean",
    record: Callable[[SVIState, Any], Any] | None = None,
    update: Callable[..., SVIState] = global_step,
    donate: bool = False,
) -> tuple[SVIState, Any]:
    """Many steps in one compiled program.

    It is compiled for the function objects it is given. ``jax.tree_util.Partial(local_step, model)`` makes the model's
    numbers an input instead of a constant: made anew for other numbers it does not compile again.

    Args:
      local_step: ``(params, batch) -> (stats, info)``.
      state: From :func:`init`, or from an earlier run to go on.
      batches: A pytree with a leading axis T: one minibatch a step.
      prior: η.
      rho: ρ: a number, one per step [T], or a schedule of the step number.
      length: L: likewise; by default the capacity.
      warmup: ``"mean"`` or ``"zeros"``.
      record: ``(state after the step, info) -> what to keep``; by default the info of every step is kept.
      update: The global step; :func:`smoothgrad_jax.core.diagnostics.averaged_step` is another.
      donate: Give the state away, so that its ring need not be copied at the start.

    Returns:
      ``(state, records)``; the records have a leading axis T.
    """
    if not hasattr(state, "window"):
        raise ValueError(f"expected a state, got {type(state).__name__}; init(params, capacity) makes one")
    steps = state.step + jnp.arange(_num_steps(batches), dtype=jnp.int32)
    rho, length = _per_step("rho", rho, steps), _per_step("length", length, steps)
    check_rho(rho)
    _window.check_length(length, state.window)
    program = _donating_run if donate else _run
    return program(as_pytree(local_step), state, batches, prior, rho, length, warmup, record, update)


def sweep(
    local_step: LocalStep,
    params: Any,
    batches: Any,
    prior: Any,
    rho: Any,
    lengths: Sequence[int | float],
    *,
    warmup: Warmup = "mean",
    dtype: Any = None,
    record: Callable[[SVIState, Any], Any] | None = None,
    memory_limit: float | None = None,
) -> tuple[SVIState, Any]:
    """Runs with several window lengths in one program, all on the same minibatches.

    The runs share the clock and the write slot, so each gets a ring for the longest finite length: R runs with windows
    up to C take R (C + 1) slots of λ's size, and not Σ L. That is the price of a write that is one copy and not a
    scatter; lengths of very different size are cheaper in two sweeps. L = ∞ costs a ring like the others.

    Args:
      local_step, batches, prior, rho, warmup, record: As in :func:`run`.
      params: λ, where every run starts.
      lengths: R window lengths; ``math.inf`` averages everything. Another longest one compiles again.
      dtype: dtype of the stored statistics.
      memory_limit: Bytes that states and records may take; by default what the machine has free.

    Returns:
      ``(states, records)`` with a leading axis R; each run equals a separate :func:`run` up to rounding.

    Raises:
      MemoryError: Before anything is allocated.
    """
    if isinstance(params, SVIState):
        raise ValueError("sweep makes its own states: give it the parameters to start from, not a state")
    if np.ndim(lengths) != 1 or not len(lengths):
        raise ValueError(f"lengths must be several window lengths, got {lengths}")
    _window.check_lengths(lengths, None)
    capacity = int(max((length for length in lengths if length != math.inf), default=0))
    _window.check_lengths(lengths, capacity)
    params = jax.tree.map(jnp.asarray, params)
    _check_memory(len(lengths) * _window.nbytes(params, capacity, dtype=dtype), len(lengths), capacity, memory_limit)
    rho = _per_step("rho", rho, jnp.arange(_num_steps(batches), dtype=jnp.int32))
    check_rho(rho)
    inputs = (as_pytree(local_step), params, batches, prior, rho, jnp.asarray(lengths, float))
    options = {"capacity": capacity, "warmup": warmup, "dtype": dtype, "record": record}
    result = _sweep.eval_shape(*inputs, **options)
    need = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(result))
    _check_memory(need, len(lengths), capacity, memory_limit)
    return _sweep(*inputs, **options)


def _scan(local_step, state, batches, prior, rho, length, warmup, record, update):
    def step(state, inputs):
        batch, rho, length = inputs
        result = local_step(state.params, batch)
        if not isinstance(result, tuple) or len(result) != 2:
            raise ValueError(f"local_step must return (stats, info), got {type(result).__name__}")
        stats, info = result
        state = update(state, stats, prior, rho, length, warmup=warmup)
        return state, record(state, info) if record else info

    return lax.scan(step, state, (batches, rho, length))


_run = jax.jit(_scan, static_argnames=("warmup", "record", "update"))
_donating_run = jax.jit(_scan, static_argnames=("warmup", "record", "update"), donate_argnames="state")


@partial(jax.jit, static_argnames=("capacity", "warmup", "dtype", "record"))
def _sweep(local_step, params, batches, prior, rho, lengths, capacity, warmup, dtype, record):
    # The states first: a ring that no run shares with another from the start is never copied.
    states = jax.vmap(lambda _: init(params, capacity, dtype=dtype), out_axes=runs())(lengths)

    def one(state, length):
        every = jnp.broadcast_to(length, rho.shape)
        return _scan(local_step, state, batches, prior, rho, every, warmup, record, global_step)

    return jax.vmap(one, in_axes=(runs(), 0))(states, lengths)


def as_pytree(local_step: LocalStep) -> jax.tree_util.Partial:
    """A function as a pytree: its arguments so far are inputs, the function itself is what is compiled."""
    return local_step if isinstance(local_step, jax.tree_util.Partial) else jax.tree_util.Partial(local_step)


def _num_steps(batches):
    sizes = {np.shape(leaf)[0] if np.ndim(leaf) else None for leaf in jax.tree.leaves(batches)}
    if len(sizes) != 1 or None in sizes:
        raise ValueError(
            "batches must be stacked: every array needs the same leading axis, one entry a step "
            f"(found leading sizes {sorted(map(str, sizes))}); pack(X, rows) with rows [T, B] makes such a stack"
        )
    return sizes.pop()


def _per_step(name, value, steps):
    """A number, a schedule or an array as [T]; None stays None."""
    if value is None:
        return None
    if callable(value):
        return jax.vmap(lambda step: jnp.asarray(value(step), float))(steps)
    value = jnp.asarray(value, float)
    if value.ndim > 1 or (value.ndim == 1 and value.shape != steps.shape):
        raise ValueError(f"{name} must be a number, a schedule, or one per step [{len(steps)}]; got {value.shape}")
    return jnp.broadcast_to(value, steps.shape)


def check_rho(rho: Any) -> None:
    """An error unless every ρ lies in [0, 1]; a traced one is trusted."""
    if not isinstance(rho, jax.core.Tracer) and not (np.abs(np.asarray(rho) - 0.5) <= 0.5).all():
        raise ValueError(f"rho must lie in [0, 1], or λ does not stay positive; got {rho}")


def _check_memory(need, num_runs, capacity, limit):
    free = _free_memory() if limit is None else limit
    if free is not None and need > free:
        raise MemoryError(
            f"{num_runs} runs with windows of up to {capacity} take {need / 1e9:.1f} GB with what they record, and "
            f"{free / 1e9:.1f} GB are free. Sweep fewer or shorter lengths, record less, or store the window in half "
            "the memory with dtype=jnp.bfloat16; memory_limit overrides this check."
        )


def _free_memory():
    """Bytes that the default device, or the machine, has free; None if it does not tell."""
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    info = Path("/proc/meminfo")
    if not info.exists():
        return None
    free = [line for line in info.read_text().splitlines() if line.startswith("MemAvailable:")]
    return int(free[0].split()[1]) * 1024 if free else None
