"""A lock on a folder, so that two runs do not write into it at the same time.

The lock is the file ``.lock`` in the folder. Its holder has it locked by the system (``flock``), and its content names
the holder: process, host, start of the system and of the process. It is removed when the lock is released.

| file system                        | what holds                                                                     |
|------------------------------------|--------------------------------------------------------------------------------|
| local                              | The system's lock alone decides. It ends with the process, also after SIGKILL. |
| of a network (NFS, …), same host   | The system's lock, and whether the process of the content is alive, decide.    |
| of a network, another host         | If the system's locks work between hosts, a live holder is found. If the file  |
|                                    | is not locked, its holder may be dead, or the locks may not work: the lock is  |
|                                    | refused with the name of the file, which the user removes if no run is active. |

Not promised: two processes on two hosts can both get a lock that neither sees, in the second between creating the file
and its appearance on the other host, if the file system has no working locks. Threads of one process share its locks.
Systems without ``flock`` (Windows) lock nothing.
"""

import contextlib
import importlib.util
import json
import os
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from smoothgrad_jax.data import durable_files
from smoothgrad_jax.data.durable_files import SaveError

_HAS_LOCKS = importlib.util.find_spec("fcntl") is not None  # not on Windows

NAME = ".lock"
# File systems of Linux whose locks and processes belong to one host.
_LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "f2fs", "ramfs", "bcachefs", "jfs"}
_guard = threading.RLock()  # the garbage collector may release a lock while one is taken
_held: dict[tuple[int, int, int], "_Held"] = {}  # by process, device and inode of the folder


class FolderInUseError(SaveError):
    """Raised if another process writes into the folder."""


class FolderLock:
    """The lock on a folder, which is created if necessary, until :meth:`release`, or until the process ends.

    Raises:
      FolderInUseError: Another process holds the lock; the message names it.
      OSError: The folder cannot be written.
    """

    def __init__(self, folder: str | os.PathLike) -> None:
        held, folder = None, Path(folder)
        if _HAS_LOCKS:
            with _guard:
                held = _hold(folder)
        self._finalizer = weakref.finalize(self, _release, held)

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        self._finalizer()


@contextlib.contextmanager
def locked(folder: str | os.PathLike) -> Iterator[None]:
    """Hold the lock on a folder; as :class:`FolderLock`, but an error is a :class:`SaveError`."""
    with durable_files.saving(folder, lambda: "choose a folder that can be written"):
        lock = FolderLock(folder)
    try:
        yield
    finally:
        lock.release()


class _Held:
    """A lock that this process holds, any number of times."""

    def __init__(self, folder: Path, key: tuple[int, int, int], is_new: bool) -> None:
        self.key, self.count, self._folder, self._is_new = key, 0, folder, is_new
        self._descriptor = _acquire(folder / NAME)

    def is_current(self) -> bool:
        """Return whether the file that is locked still has its name."""
        return _is_same(self._descriptor, self._folder / NAME)

    def close(self) -> None:
        """Remove the file, and the folder if it was made for the lock and has no other content."""
        with contextlib.suppress(OSError):
            if self.is_current():
                (self._folder / NAME).unlink()
            if self._is_new:
                self._folder.rmdir()
        os.close(self._descriptor)


def _hold(folder: Path) -> _Held:
    """Return the lock on a folder, held once more."""
    is_new = not folder.exists()
    durable_files.make_folder(folder)
    status = folder.stat()
    key = os.getpid(), status.st_dev, status.st_ino
    held = _held.get(key)
    if held is None or not held.is_current():
        held = _held[key] = _Held(folder, key, is_new)
    held.count += 1
    return held


def _release(held: _Held | None) -> None:
    if held is None or held.key[0] != os.getpid():  # a forked process has not taken the lock
        return
    with _guard:
        held.count -= 1
        if held.count == 0:
            held.close()
            if _held.get(held.key) is held:
                del _held[held.key]


def _acquire(path: Path) -> int:
    """Return the descriptor of the locked file."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            is_locked = _try_lock(descriptor)
            holder = _content(descriptor)
            if is_locked and not _is_same(descriptor, path):
                os.close(descriptor)  # its holder has just released and removed it
                continue
            if not is_locked or (holder and not _is_local(path) and not _has_ended(holder)):
                raise _in_use(path, holder, is_locked)
            content = json.dumps(_this_process()).encode()
            os.pwrite(descriptor, content, 0)
            os.truncate(descriptor, len(content))
            return descriptor
        except BaseException:
            with contextlib.suppress(OSError):
                os.close(descriptor)
            raise


def _try_lock(descriptor: int) -> bool:
    """Lock a file; return whether nobody else has it locked, as far as the file system knows."""
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # without locks on this file system, its content decides
    return True


def _content(descriptor: int) -> dict[str, Any]:
    """Return the holder that the file names; empty if it names none."""
    try:
        content = json.loads(os.pread(descriptor, 4096, 0))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _in_use(path: Path, holder: dict[str, Any], is_locked: bool) -> FolderInUseError:
    process, host = holder.get("process", "unknown"), holder.get("host", "unknown")
    since = f"{holder.get('since', 'an unknown time')}"
    problem = f"{path.parent}: process {process} on host {host} has been writing here since {since}"
    remedy = "wait for it, or give another folder"
    if is_locked and host != socket.gethostname():
        remedy = f"if it has ended, which this host cannot see, remove {path}"
    return FolderInUseError(f"{problem}; {remedy}")


def _this_process() -> dict[str, Any]:
    return {
        "process": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "boot": _boot(),
        "started": _started(os.getpid()),
    }


def _has_ended(holder: dict[str, Any]) -> bool:
    """Return whether the holder was a process of this host that is not alive; False for another host."""
    process = holder.get("process")
    if holder.get("host") != socket.gethostname() or not isinstance(process, int) or process <= 0:
        return False
    if holder.get("boot") != _boot():
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        pass
    return holder.get("started") != _started(process)  # another process may have got its number


def _boot() -> str | None:
    """Return what identifies the start of this system; None if it is not known."""
    return _read("/proc/sys/kernel/random/boot_id")


def _started(process: int) -> str | None:
    """Return when a process started, in ticks of the system; None if it is not known."""
    fields = (_read(f"/proc/{process}/stat") or "").rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 else None


def _is_local(path: Path) -> bool:
    """Return whether a file is on a file system of this host; False if that is not known."""
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    lines = (line.split() for line in (_read("/proc/self/mountinfo") or "").splitlines())
    types = {line[line.index("-") + 1] for line in lines if line[2] == number and "-" in line}
    return bool(types) and types <= _LOCAL


def _is_same(descriptor: int, path: Path) -> bool:
    """Return whether a path is still the name of an open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except OSError:
        return False


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None
