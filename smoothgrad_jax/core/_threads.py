"""Python threads that run compiled programs, and processes in which none can run."""

import os
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import jax
import jax.numpy as jnp

_MAX_THREADS = 8

_forked_while_running: list[int] = []  # this process, if it was forked from one in which jax ran

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


def check_not_forked() -> None:
    """Raise an error in a process that was forked after jax had started: its threads are missing there, and it waits.

    Raises:
      RuntimeError: In such a process.
    """
    if os.getpid() in _forked_while_running:
        raise RuntimeError(
            "this process was forked after jax had started, and jax would wait for ever in it: start the process with "
            'multiprocessing.get_context("spawn"), or fork before the first computation'
        )


def _note_fork() -> None:
    # jax has no public function that says whether it has started without starting it.
    if getattr(sys.modules.get("jax._src.xla_bridge"), "_backends", None):
        _forked_while_running[:] = [os.getpid()]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)
