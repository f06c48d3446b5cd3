"""Means of recent values of any pytree, in one pass and without recompilation when the length changes.

A window kind says which mean: :class:`Moving`, the mean of the last L values, or :class:`Exponential`, with weights
that decay. The functions here work with the state of any kind.

    >>> state = init(jnp.zeros(2), Moving(10))
    >>> mean, state = push(state, jnp.array([1.0, 4.0]))
    >>> mean, state = push(state, jnp.array([3.0, 4.0]), length=2)
    >>> mean.tolist()
    [2.0, 4.0]

Each kind is one file: :mod:`smoothgrad_jax.core.moving_window`, :mod:`smoothgrad_jax.core.exponential_window`. The
protocol is :class:`smoothgrad_jax.core.window_kind.Window`.
"""

from typing import TypeVar

from smoothgrad_jax.core.errors import OptionError
from smoothgrad_jax.core.exponential_window import Exponential, ExponentialState
from smoothgrad_jax.core.moving_window import Moving, MovingState
from smoothgrad_jax.core.types import DTypeLike, Numeric, PyTree, Warmup
from smoothgrad_jax.core.window_kind import Window, WindowState, check_lengths

__all__ = [
    "Exponential",
    "ExponentialState",
    "Moving",
    "MovingState",
    "Warmup",
    "Window",
    "WindowState",
    "as_kind",
    "check_lengths",
    "init",
    "mean",
    "push",
]

_State = TypeVar("_State", bound=WindowState)


def as_kind(window: Window | float | None, *, dtype: DTypeLike | None = None) -> Window:
    """Return a window kind, from a kind or from the capacity of a moving window.

    Args:
      window: A kind; or a capacity, for ``Moving(window, dtype)``.
      dtype: Floating dtype of the slots of a moving window.

    Raises:
      OptionError: ``window`` is neither, or a kind is given together with a dtype.
    """
    if isinstance(window, Window):
        if dtype is not None:
            raise OptionError("dtype", f"belongs to the window kind: leave it out beside {window}")
        return window
    if window is None:
        raise OptionError("capacity", "is missing: give the longest window, or a window kind such as Exponential()")
    return Moving(window, dtype)


def init(template: PyTree, window: Window | float, *, dtype: DTypeLike | None = None) -> WindowState:
    """Return an empty window.

    Args:
      template: A pytree with the structure, shapes and dtypes of the values (arrays or ``ShapeDtypeStruct``).
      window: A kind, or the capacity of a moving window: the longest one that will be used. 0 or ∞ is the mean of
        everything.
      dtype: Floating dtype of the slots of a moving window; see :class:`Moving`.

    Raises:
      OptionError: The kind has a length that its state does not keep, so that later pushes would not know it.
    """
    kind = as_kind(window, dtype=dtype)
    state = kind.init(template)
    if kind.length is not None and state.kind.length is None:
        name = type(kind).__name__
        raise OptionError(
            "length", f"of {kind} is not kept in the state: start with {name}(), and give every step its length"
        )
    return state


def push(
    state: _State, value: PyTree, length: Numeric | None = None, *, warmup: Warmup = "mean"
) -> tuple[PyTree, _State]:
    """Add a value; return the mean of the last ``length`` values and the new state.

    With the state donated (``jax.jit(push, donate_argnums=0)``) nothing but the mean is allocated.

    Args:
      state: From :func:`init`.
      value: A pytree like the template.
      length: L, a number or a traced scalar. It may change from push to push.

        Of a moving window, by default the capacity. A shorter window than before drops the oldest values. A longer
        one grows with the values to come: a value that was dropped does not return. ∞ drops nothing from now on. A
        length beyond the capacity is an error if it is known, and means the capacity if it is traced.

        Of an exponential window, the length of a moving window with the same variance, any real number from 1 on.
      warmup: The divisor while fewer than L values are stored: their number (``"mean"``), or L as in Algorithm 1, which
        counts the missing ones as zeros (``"zeros"``). For L = ∞ it is always their number.

    Returns:
      ``(mean, state)``; the mean has the structure, shapes and (floating) dtypes of ``value``.

    With L = 1 the mean is the value, to the last bit. A value that is not finite affects the mean while it is in the
    window, and not after; a sum beyond the largest float affects it until the sum is rebuilt. ``jax.jvp`` works, also
    of a ``vmap``; ``jacfwd`` and reverse mode do not.
    """
    return state.kind.push(state, value, length, warmup=warmup)


def mean(state: WindowState, length: Numeric | None = None, *, warmup: Warmup = "mean") -> PyTree:
    """Return the mean that the last :func:`push` returned, in the dtype of the sum.

    Args:
      state: The state after the push.
      length, warmup: As given to the push.
    """
    return state.kind.mean(state, length, warmup=warmup)
