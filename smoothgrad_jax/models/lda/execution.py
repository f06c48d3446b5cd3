"""In which order the documents of a minibatch are fitted: one after the other, or all at once.

| execution        | a local step is                                                          | for          |
|------------------|--------------------------------------------------------------------------|--------------|
| ``Sequential()`` | loops over documents and words, which XLA for CPU compiles into one      | CPU          |
|                  | function                                                                 |              |
| ``Batched()``    | operations on arrays of all documents; a finished document waits for the | accelerators |
|                  | others                                                                   |              |

Both make the same number of updates per document, with the same random numbers, and give the same result up to
rounding. An accelerator would run the scalar loops of ``Sequential()`` kernel by kernel, hundreds of times too slow.

An execution is a pytree without leaves, so that it is static in compiled programs.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from jax import lax

from smoothgrad_jax.core.errors import OptionError
from smoothgrad_jax.core.types import PyTree


class Sequential(NamedTuple):
    """One document after the other; only on a CPU."""


class Batched(NamedTuple):
    """All documents of a minibatch at once; runs everywhere, on a CPU more slowly than ``Sequential``."""


Execution: TypeAlias = Sequential | Batched | None  # None: chosen by platform


def named_execution(name: str | None) -> Execution:
    """Return the execution that has this name: ``"sequential"``, ``"batched"``, or None for the choice by platform."""
    executions: dict[str | None, Execution] = {None: None, "sequential": Sequential(), "batched": Batched()}
    return executions[name]


def for_platform(execution: Execution, platform: str | None) -> Execution:
    """Return the execution on a platform.

    Args:
      execution: What the user chose; None leaves the choice to this function.
      platform: Platform of the arrays, such as ``"cpu"`` or ``"gpu"``; None if it is not known yet.

    Raises:
      OptionError: ``Sequential()`` was chosen, and the platform is not a CPU.
    """
    if not isinstance(execution, Execution):
        raise OptionError("execution", f"must be Sequential(), Batched() or None, got {execution!r}")
    if isinstance(execution, Sequential) and platform not in ("cpu", None):
        raise OptionError("execution", f"must be batched on {platform}: its loops over documents are for a CPU")
    if execution is None and platform is not None:
        return Sequential() if platform == "cpu" else Batched()
    return execution


def choose(
    execution: Execution, sequential: Callable[..., PyTree], batched: Callable[..., PyTree], *operands: PyTree
) -> PyTree:
    """Call the function of an execution; without a choice, the one for the platform for which XLA compiles."""
    if execution is None:
        return lax.platform_dependent(*operands, cpu=sequential, default=batched)
    return (batched if isinstance(execution, Batched) else sequential)(*operands)
