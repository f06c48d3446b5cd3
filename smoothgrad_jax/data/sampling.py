"""Draw the documents of minibatches, and prepare minibatches in a background thread.

The documents of a minibatch are a function of the key and the step alone: a run continues from any step without a
stored state of the sampler.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TypeVar

import jax
import numpy as np
import numpy.typing as npt

Item = TypeVar("Item")
Result = TypeVar("Result")


def sample(key: jax.Array, step: int, num_docs: int, batch_size: int, *, replace: bool = False) -> npt.NDArray:
    """Draw the documents of minibatch t.

    Args:
      key: A random key.
      step: t, the number of the minibatch, from 0.
      num_docs: D, the documents in the corpus.
      batch_size: B, the documents per minibatch.
      replace: Draw uniformly with replacement, as in the paper. Otherwise every pass over the corpus has its own random
        order, and a minibatch may contain the end of one pass and the beginning of the next. The order of one pass
        needs four bytes of memory per document.

    Returns:
      [B] document numbers, a function of the arguments alone.
    """
    return draw(seed_of(key), step, num_docs, batch_size, replace)


def seed_of(key: jax.Array) -> tuple[int, ...]:
    """Return the integers of a key, from which a background thread can draw without JAX."""
    return tuple(np.asarray(jax.random.key_data(key)).ravel().tolist())


def draw(seed: tuple[int, ...], step: int, num_docs: int, batch_size: int, replace: bool) -> npt.NDArray:
    """Draw as :func:`sample` does, from the :func:`seed_of` a key."""
    if step < 0 or num_docs < 1 or batch_size < 1:
        got = f"step {step}, num_docs {num_docs} and batch_size {batch_size}"
        raise ValueError(f"expected a step of at least 0, and at least one document and one per minibatch; got {got}")
    if replace:
        return np.random.default_rng([*seed, step]).integers(0, num_docs, batch_size)
    places = step * batch_size + np.arange(batch_size)
    passes = places // num_docs
    return np.concatenate(
        [_order(seed, int(p), num_docs)[places[passes == p] % num_docs] for p in range(passes[0], passes[-1] + 1)]
    )


def prefetch(
    function: Callable[[Item], Result], items: Iterable[Item], depth: int = 2
) -> Generator[Result, None, None]:
    """Compute ``map(function, items)`` in a background thread.

    Args:
      function: The function to compute per item.
      items: The items; the background thread iterates over them.
      depth: The number of results that are computed in advance.

    Yields:
      The results, in order. An exception of the function or of the iterable is raised after the results that precede
      it.
    """
    iterator = iter(items)

    def compute() -> tuple[Result] | None:
        for item in iterator:
            return (function(item),)
        return None

    pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
    try:
        ready = deque(pool.submit(compute) for _ in range(depth))
        while (result := ready.popleft().result()) is not None:
            ready.append(pool.submit(compute))
            yield result[0]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


@lru_cache(maxsize=2)
def _order(seed: tuple[int, ...], number: int, num_docs: int) -> npt.NDArray:
    """Return the random order of the documents in one pass."""
    order = np.arange(num_docs, dtype=np.int32 if num_docs < 2**31 else np.int64)
    np.random.default_rng([*seed, number]).shuffle(order)
    return order
