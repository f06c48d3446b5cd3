"""The protocol of a window kind, and what all kinds share: checks of lengths and conversions of values.

A window kind says how a mean of recent values is computed. It is an immutable object without arrays; its state is a
pytree of arrays whose ``kind`` property returns the kind, so that a function that holds a state needs no flag. A new
kind is one file with a kind and a state; :mod:`smoothgrad_jax.core.moving_window` and
:mod:`smoothgrad_jax.core.exponential_window` are two examples.
"""

from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from smoothgrad_jax.core.adaptive import Adaptive
from smoothgrad_jax.core.errors import OptionError
from smoothgrad_jax.core.types import ArrayLike, Numeric, PyTree, Schedule, Warmup


class WindowState(Protocol):
    """The state of a window: a NamedTuple of arrays."""

    @property
    def kind(self) -> "Window":
        """The kind that pushes to this state."""


@runtime_checkable
class Window(Protocol):
    """A window kind."""

    @property
    def length(self) -> float | Schedule | None:
        """L of a push that is given no length; None if the kind has no default."""

    def init(self, template: PyTree) -> PyTree:
        """Return the empty state for values like ``template``."""

    def push(
        self, state: PyTree, value: PyTree, length: Numeric | None = None, *, warmup: Warmup = "mean"
    ) -> tuple[PyTree, PyTree]:
        """Add a value; return the mean and the new state."""

    def mean(self, state: PyTree, length: Numeric | None = None, *, warmup: Warmup = "mean") -> PyTree:
        """Return the mean that the last push returned, in the dtype of the sum."""

    def check_lengths(self, lengths: ArrayLike | None) -> None:
        """Raise an error for a length that is known now and that this kind cannot use."""

    def vmap_axes(self) -> PyTree:
        """Return ``in_axes`` for the state of several runs that are pushed in step."""


def check_number(option: str, value: ArrayLike | Adaptive) -> np.ndarray:
    """Return a number, or several, as an array of floats; raise an error for other values, such as ``"10"``.

    Args:
      option: Name of the option, for the error.
      value: A number or an array of numbers; not traced.
    """
    if isinstance(value, Adaptive):
        raise OptionError(
            option,
            f"must be a number, got {value}. Lengths are chosen during training by fit(window=Adaptive()), and in a "
            "loop of your own by adaptive.push",
        )
    for each in value if isinstance(value, list | tuple) else ():  # NumPy cannot make an array of unlike elements
        check_number(option, each)
    array = np.asarray(value)
    if not (jnp.issubdtype(array.dtype, np.number) or array.dtype == bool):
        raise OptionError(option, f"must be a number, got {value!r}")
    return array.astype(float)


def check_lengths(lengths: ArrayLike | Schedule, capacity: int | None = None) -> None:
    """Raise an error for a length that is known now and that a window cannot use.

    Args:
      lengths: One length or several; traced ones are not checked.
      capacity: The longest finite window, in whole numbers; 0 allows ∞ alone. None: any real number from 1 on.

    Raises:
      OptionError: With the first length that does not fit.
    """
    if isinstance(lengths, jax.core.Tracer):
        return
    if callable(lengths):
        raise OptionError("length", "must be a number here: call a schedule with the step number")
    numbers = np.ravel(check_number("length", lengths))
    if capacity is None:
        expected, fits = "a number from 1 on, or ∞", numbers >= 1
    elif capacity:
        expected = f"a whole number from 1 to the capacity {capacity}, or ∞"
        fits = (numbers == np.inf) | ((numbers >= 1) & (numbers <= capacity) & (numbers == np.floor(numbers)))
    else:
        expected, fits = "∞, as the capacity is 0", numbers == np.inf
    if not fits.all():
        raise OptionError("length", f"must be {expected}; got {numbers[~fits][0]:g}")


def check_warmup(warmup: str) -> None:
    """Raise an error unless ``warmup`` is one of its two values."""
    if warmup not in ("mean", "zeros"):
        raise OptionError("warmup", f'must be "mean" or "zeros", got {warmup!r}')


def as_arrays(tree: PyTree) -> PyTree:
    """Return the pytree with arrays, or ``ShapeDtypeStruct``, as leaves."""
    return jax.tree.map(
        lambda leaf: leaf if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) else jnp.asarray(leaf), tree
    )


def zeros_like(leaf: jax.Array | jax.ShapeDtypeStruct, dtype: np.dtype) -> jax.Array:
    """Return zeros with the shape of a leaf, and with its sharding if it is an array."""
    return jnp.zeros(leaf.shape, dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else jnp.zeros_like(leaf, dtype)


def sum_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype in which values of ``dtype`` are summed: float32, or their own if that holds more."""
    return jnp.promote_types(dtype, jnp.float32)


def check_value(template: PyTree, value: PyTree) -> None:
    """Raise an error unless a value has the structure and the shapes that a state was made for."""
    known: object = jax.tree.structure(template)
    given: object = jax.tree.structure(value)
    if known != given:
        raise ValueError(f"the window was made for values like {known}, got {given}")
    pairs = zip(jax.tree_util.tree_leaves_with_path(template), jax.tree.leaves(value), strict=True)
    for (path, expected), leaf in pairs:
        if expected.shape != leaf.shape:
            name = jax.tree_util.keystr(path) or "the value"
            raise ValueError(f"{name}: the window was made for shape {expected.shape}, got {leaf.shape}")


def cast_mean(mean: PyTree, value: PyTree) -> PyTree:
    """Return a mean in the dtype of the values, where that is a floating one."""

    def cast(m, v):
        return m.astype(v.dtype) if jnp.issubdtype(v.dtype, jnp.inexact) else m

    return jax.tree.map(cast, mean, value)
