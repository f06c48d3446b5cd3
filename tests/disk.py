"""A disk that stops at a given operation: the process is killed there, or the system returns an error."""

import contextlib
import os
import types

from smoothgrad_jax.data import durable_files


class Killed(BaseException):
    """Nothing runs after this."""


class Disk:
    """Count operations on files, and stop at a given one.

    Args:
      patch: A ``pytest.MonkeyPatch``.
      at: The number of the operation, or None.
      error: The error number that the system returns at that operation. With None the process is killed: this
        operation and all later ones raise :class:`Killed`.

    Attributes:
      log: (name of the operation, its arguments …) of every operation.
    """

    def __init__(self, patch, at=None, error=None):
        self.at, self.error, self.log = at, error, []
        for name in ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir"):
            patch.setattr(os, name, self._counted(name, getattr(os, name)))
        patch.setattr(durable_files, "open", self._open, raising=False)

    def _act(self, name, *about):
        self.log.append((name, *about))
        n = len(self.log) - 1
        if self.error is None and self.at is not None and n >= self.at:
            raise Killed
        if self.error is not None and n == self.at:
            raise OSError(self.error, os.strerror(self.error))

    def _counted(self, name, function):
        def counted(*args, **options):
            self._act(name, *((os.fstat(*args).st_ino,) if name == "fsync" else args))
            return None if name == "fsync" else function(*args, **options)  # the tests need no durability

        return counted

    @contextlib.contextmanager
    def _open(self, path, mode):
        with open(path, mode) as file:
            if "x" not in mode:
                yield file
                return
            self._act("open", path)
            write = file.write

            def write_or_stop_halfway(chunk):
                try:
                    self._act("write", path)
                except BaseException:
                    write(bytes(chunk)[: len(chunk) // 2])
                    raise
                write(chunk)

            yield types.SimpleNamespace(write=write_or_stop_halfway, flush=file.flush, fileno=file.fileno)
