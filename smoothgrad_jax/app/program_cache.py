"""Compiled programs on disk, so that the second process does not compile what the first one has compiled.

The estimator and the command keep them in ``programs`` in the user's cache folder, through jax's persistent cache. jax
finds a program by its code, by the versions of jax and XLA, and by the features of the CPU. A program from the cache is
the compiled one, and gives the same bits. For a damaged program jax gives a warning and compiles again; remove the
folder then.

Loading a program runs code from the folder, so a folder that others may write to is not used. Programs are not stored

- if the user has chosen a folder for jax (``JAX_COMPILATION_CACHE_DIR``), where jax then stores them, or has turned the
  cache off (``JAX_ENABLE_COMPILATION_CACHE=0``);
- before jax 0.12, which rejects stored programs on many CPUs and logs an error for each (jax#38445);
- on systems other than Linux, where this was not tried;
- where the folder cannot be written, or the disk is nearly full.
"""

import functools
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from smoothgrad_jax.core._xla import BEFORE_JAX_0_12

_MAX_BYTES = 100_000_000  # about 400 models of different sizes
_OTHERS_MAY_WRITE = 0o022
_lock = threading.Lock()


@contextmanager
def stored_programs() -> Iterator[None]:
    """Store compiled programs during a ``with`` block or a call; jax's configuration is restored at its end."""
    with _lock:
        folder = _folder()
        if folder is not None:
            shortest = jax.config.values["jax_persistent_cache_min_compile_time_secs"]
            jax.config.update("jax_compilation_cache_dir", str(folder))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    try:
        yield
    finally:
        if folder is not None:
            with _lock:
                jax.config.update("jax_compilation_cache_dir", None)
                jax.config.update("jax_persistent_cache_min_compile_time_secs", shortest)
                compilation_cache.reset_cache()  # or jax would go on to use the folder


def cache_folder() -> Path:
    """Return the folder for files of this package that can be made again, in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "smoothgrad_jax"


def _folder() -> Path | None:
    """Return the folder for programs; None if they are not to be stored, or are stored already."""
    config = jax.config.values
    if BEFORE_JAX_0_12 or sys.platform != "linux":
        return None
    if config["jax_compilation_cache_dir"] is not None or not config["jax_enable_compilation_cache"]:
        return None
    try:
        folder = cache_folder() / "programs"
        return folder if _is_usable(folder) else None
    except (OSError, RuntimeError):  # the folder cannot be made or read; the user has no home
        return None


@functools.cache
def _is_usable(folder: Path) -> bool:
    """Make the folder; return whether this user, and no other, can write to it. Remove its oldest programs, if many."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & _OTHERS_MAY_WRITE or not os.access(folder, os.W_OK):
        return False
    if shutil.disk_usage(folder).free < _MAX_BYTES:  # a program that is cut off gives a warning in every later process
        return False
    programs = sorted(((path.stat(), path) for path in folder.glob("*-cache")), key=lambda each: -each[0].st_mtime)
    total = 0
    for program, path in programs:
        total += program.st_size
        if total > _MAX_BYTES or not program.st_size:  # a power failure leaves empty files
            path.unlink(missing_ok=True)
    return True
