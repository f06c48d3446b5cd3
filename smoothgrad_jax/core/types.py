"""Names for the types in public signatures."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import jax.typing
from numpy.typing import ArrayLike, DTypeLike

if TYPE_CHECKING:
    from chex import Array, ArrayTree, Numeric, PRNGKey
else:  # chex imports unittest and absl.testing, which would delay the start of every run
    Array = PRNGKey = jax.Array
    Numeric = jax.typing.ArrayLike
    ArrayTree = Any

__all__ = [
    "Array",
    "ArrayLike",
    "ArrayTree",
    "DTypeLike",
    "LocalStep",
    "Numeric",
    "PRNGKey",
    "PyTree",
    "Schedule",
    "Warmup",
]

PyTree: TypeAlias = Any  # any nesting of registered containers, with leaves of any kind
Schedule: TypeAlias = Callable[[jax.typing.ArrayLike], jax.typing.ArrayLike]  # step number -> value, as in optax
LocalStep: TypeAlias = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]  # (params, batch) -> (statistics, info)
Warmup: TypeAlias = Literal["mean", "zeros"]
