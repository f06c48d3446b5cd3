"""Python threads that run compiled programs."""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import jax
import jax.numpy as jnp

_MAX_THREADS = 8

P = ParamSpec("P")
R = TypeVar("R")


def num_threads() -> int:
    """Return the default number of threads: CPU cores, at most 8; 1 on accelerators."""
    if jax.default_backend() != "cpu":
        return 1
    return min(num_cores(), _MAX_THREADS)


def num_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def submit(pool: ThreadPoolExecutor, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
    """Call ``pool.submit`` in the float64 mode of the calling thread, which jax keeps per thread."""

    def call(x64: bool) -> R:
        with jax.enable_x64(x64):
            return function(*args, **kwargs)

    return pool.submit(call, jnp.dtype(float) == jax.dtypes.canonicalize_dtype(float))
