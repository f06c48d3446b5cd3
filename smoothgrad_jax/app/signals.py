"""What Ctrl-C, SIGTERM and SIGHUP do: the first of them ends the work, and nothing that follows prevents saving.

    with handled() as signals:                 the command line, once per process
        with deferred():                       a part that must be completed: no signal interrupts it
            try:
                with interruptible():          a part of that part, which the first signal ends
                    train()
            except KeyboardInterrupt:
                pass
            save()

- The first signal raises ``KeyboardInterrupt`` in the main thread; inside :func:`deferred`, at its end.
- A second signal does nothing: schedulers and impatient users send several.
- A third one within a second ends the process at once, and says so. A thread counts the signals, so that this works
  also while the main thread is inside compiled code.
- Python ignores an exception in a callback of the garbage collector, and jax runs such a callback. The signal is then
  sent again a moment later.
- A signal that the process ignores from its start, as SIGHUP under ``nohup``, stays ignored.
- A terminal that hangs up sends SIGHUP. Output to it would fail from then on, and is dropped, as is the output of a run
  to a pipe whose reader has ended.

The exit code is 128 plus the number of the first signal, as shells report it.
"""

import _thread
import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_NUMBERS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
_LATER = 0.02  # seconds until a signal is sent again
_GIVE_UP = 3  # signals within _SECOND
_SECOND = 1.0
_active: "Signals | None" = None


class Signals:
    """The signals of a process; made by :func:`handled`."""

    def __init__(self) -> None:
        self.first: int | None = None  # the number of the first signal
        self.num_repeated = 0  # signals that this process sends to itself, and that do not count for giving up
        self._is_deferred, self._is_pending = False, False
        self._action: Callable[[], None] | None = None

    @property
    def exit_code(self) -> int:
        """The exit code of an interrupted process."""
        return 128 + (self.first or signal.SIGINT)

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal in the main thread."""
        if number == getattr(signal, "SIGHUP", None):
            drop_closed_output()
        if self.first is None:
            self.first, self._is_pending = number, True
            self._raise_pending()

    def repeat(self) -> None:
        """Send the first signal again a moment later, after an exception that Python has ignored."""
        number, self.first = self.first or signal.SIGINT, None
        self.num_repeated += 1
        main = threading.main_thread().ident
        assert main is not None, "the main thread runs"
        if hasattr(signal, "pthread_kill"):  # unlike interrupt_main it ends a wait of the main thread
            threading.Timer(_LATER, signal.pthread_kill, (main, number)).start()
        else:
            threading.Timer(_LATER, _thread.interrupt_main, (number,)).start()

    @contextlib.contextmanager
    def set_deferred(self, value: bool) -> Iterator[None]:
        """Set whether the first signal waits; a signal that has waited is raised where it may be raised again."""
        before, self._is_deferred = self._is_deferred, value
        try:
            self._raise_pending()
            yield
        finally:
            self._is_deferred = before
        self._raise_pending()

    @contextlib.contextmanager
    def set_action(self, action: Callable[[], None]) -> Iterator[None]:
        """Set a function that is called in the place of the exception."""
        self._action = action
        try:
            self._raise_pending()
            yield
        finally:
            self._action = None

    def _raise_pending(self) -> None:
        if self._is_pending and self._action is not None:
            self._is_pending = False
            self._action()
        if self._is_pending and not self._is_deferred:
            self._is_pending = False
            raise KeyboardInterrupt


@contextlib.contextmanager
def handled(*numbers: int) -> Iterator[Signals]:
    """Handle signals as described above until the end of the block; only the main thread can.

    Args:
      *numbers: Of the signals; by default SIGINT, SIGTERM and SIGHUP. Those with a handler of another program keep it.
    """
    global _active
    if not _in_main_thread():
        yield Signals()
        return
    if _active is not None:
        yield _active
        return
    signals = _active = Signals()
    with contextlib.ExitStack() as stack:
        stack.callback(_deactivate)
        mine = [n for n in numbers or _NUMBERS if signal.getsignal(n) in (signal.SIG_DFL, signal.default_int_handler)]
        if os.name == "posix":
            stack.enter_context(_giving_up(signals, mine))
        stack.enter_context(_repeating_ignored_interrupts(signals))
        for number in mine:
            stack.callback(signal.signal, number, signal.signal(number, signals.receive))
        yield signals


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Complete the block: the first signal raises ``KeyboardInterrupt`` at its end, except in :func:`interruptible`.

    Outside of :func:`handled`, as in a notebook, this holds for Ctrl-C.
    """
    with handled(signal.SIGINT) as signals, signals.set_deferred(True):
        yield


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let the first signal raise ``KeyboardInterrupt`` inside a part of :func:`deferred`."""
    with _active.set_deferred(False) if _active and _in_main_thread() else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def redirected(action: Callable[[], None]) -> Iterator[None]:
    """Call a function at the first signal, for a part of several processes that all have to leave at the same place."""
    with _active.set_action(action) if _active and _in_main_thread() else contextlib.nullcontext():
        yield


def exit_code() -> int:
    """Return the exit code of a process that was interrupted."""
    return (_active or Signals()).exit_code


def drop_closed_output() -> None:
    """Replace standard output and standard error by the null device where a reader has ended or a terminal hung up."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            poll = select.poll()
            poll.register(descriptor, 0)
            if poll.poll(0):  # an error, or hung up
                drop_output(descriptor)


def drop_output(descriptor: int) -> None:
    """Replace the file of a descriptor by the null device."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


@contextlib.contextmanager
def dropping_closed_output() -> Iterator[None]:
    """Let work go on whose output has lost its reader: the output of the block and all that follows is dropped."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        drop_closed_output()


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _deactivate() -> None:
    global _active
    _active = None


@contextlib.contextmanager
def _giving_up(signals: Signals, numbers: list[int]) -> Iterator[None]:
    """End the process at the third signal within a second; a thread reads the numbers that Python's handler writes.

    It passes them on to the previous reader, such as the event loop of asyncio.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def count() -> None:
        times: list[float] = []
        while number := int.from_bytes(os.read(reader, 1)):
            if before >= 0:
                with contextlib.suppress(OSError):
                    os.write(before, bytes([number]))
            if signals.num_repeated:
                signals.num_repeated -= 1
                continue
            times = [*times[1 - _GIVE_UP :], time.monotonic()] if number in numbers else times
            if len(times) == _GIVE_UP and times[-1] - times[0] <= _SECOND:
                message = f"smoothgrad: {_GIVE_UP} signals within a second: giving up without saving\n"
                with contextlib.suppress(OSError):
                    os.write(2, message.encode())
                os._exit(128 + (signals.first or number))

    thread = threading.Thread(target=count, name="signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.write(writer, b"\0")
        thread.join()
        os.close(reader)
        os.close(writer)


@contextlib.contextmanager
def _repeating_ignored_interrupts(signals: Signals) -> Iterator[None]:
    """Interrupt again after a ``KeyboardInterrupt`` that Python ignores, in a callback or a finaliser."""
    before = sys.unraisablehook

    def hook(ignored: Any) -> None:
        if isinstance(ignored.exc_value, KeyboardInterrupt):
            signals.repeat()
        else:
            before(ignored)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before
