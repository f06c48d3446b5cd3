"""Python threads that run compiled programs."""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import jax

_MAX_THREADS = 8

P = ParamSpec("P")
R = TypeVar("R")


def num_cores() -> int:
    """Return how many threads are worth starting: the cores of this process, at most 8; one off the CPU."""
    if jax.default_backend() != "cpu":
        return 1
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(available, _MAX_THREADS)


def submit(pool: ThreadPoolExecutor, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
    """Call ``pool.submit`` in the float64 mode of the calling thread, which jax keeps per thread."""

    def call(x64: bool) -> R:
        with jax.enable_x64(x64):
            return function(*args, **kwargs)

    return pool.submit(call, jax.config.jax_enable_x64)
