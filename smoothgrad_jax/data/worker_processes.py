"""Worker processes: they leave signals to the process that starts them, and end with it."""

import contextlib
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from joblib.externals.loky import ProcessPoolExecutor

_PARENT_INTERVAL = 0.5  # seconds between two looks of a worker for its parent


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Block Ctrl-C, SIGTERM and SIGHUP in processes that are started in the block: this process handles them."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # if it were started in the block, it would unblock the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_pool(jobs: int) -> "ProcessPoolExecutor | None":
    """Return a pool of processes, or None if the system cannot start one; submit inside :func:`signals_blocked`.

    Unlike the processes of the standard library, those of loky do not import the caller's script.
    """
    try:
        from joblib.externals.loky import ProcessPoolExecutor

        return ProcessPoolExecutor(jobs, initializer=_initialize, initargs=(os.getpid(),))
    except (ImportError, OSError, NotImplementedError):
        return None


def _initialize(parent: int) -> None:
    """Ignore Ctrl-C where it cannot be blocked, and warnings, which the parent has already shown; end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """End this process soon after its parent: a parent that is killed cannot end its workers."""
    while os.getppid() == parent:
        time.sleep(_PARENT_INTERVAL)
    os._exit(1)
