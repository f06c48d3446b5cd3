"""Inputs that a user names, as regular files: standard input and pipes are copied, and URLs are refused.

A source is read several times: to recognise its format, to count it, and to show its documents. A pipe can be read only
once, so it is first copied to a temporary file, which is removed when the process ends.
"""

import atexit
import os
import re
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from smoothgrad_jax.data.compressed_files import CHUNK_BYTES, chunks_of
from smoothgrad_jax.data.errors import corpus_error

_WAIT = 10.0  # seconds until a process opens the other end of a pipe


def regular_file(path: str | os.PathLike) -> Path:
    """Return the path of a file or folder, or of a temporary copy of a pipe; ``"-"`` is the standard input."""
    name, path = os.fspath(path), Path(path)
    if name == "-":
        if sys.stdin is None or sys.stdin.isatty():
            problem = "the standard input is a terminal; write documents to it with a pipe, or name a file"
            raise corpus_error("-", problem)
        return _copy(chunks_of(sys.stdin.buffer), "standard input")
    if is_url(name) and not os.path.exists(path):
        problem = "expected a file, got a URL; download the file first, or read it with a pipe:"
        raise corpus_error(name, f"{problem} curl -L URL | smoothgrad … -")
    try:
        is_pipe = stat.S_ISFIFO(os.stat(path).st_mode)
    except (OSError, ValueError):  # the caller, who reads the file, raises an error
        return path
    return _copy(_pipe_chunks(path), path.name) if is_pipe else path


def is_url(name: str) -> bool:
    """Return whether the name of a file is a URL."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", name) is not None


def _pipe_chunks(path: Path) -> Iterator[bytes]:
    """Yield the content of a pipe, once another process has opened its other end."""
    start = time.monotonic()
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as file:
        while (first := file.read(CHUNK_BYTES)) == b"":  # None: another process has opened the pipe
            if time.monotonic() - start > _WAIT:
                raise corpus_error(path, f"no process has written to the pipe for {_WAIT:g} s")
            time.sleep(0.02)
        if first:
            yield first
        os.set_blocking(file.fileno(), True)
        yield from chunks_of(file)


def _copy(chunks: Iterator[bytes], name: str) -> Path:
    """Write chunks to a temporary file, whose name appears in messages."""
    folder = Path(tempfile.mkdtemp(prefix="smoothgrad-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    try:
        with open(folder / name, "wb") as copy:
            for chunk in chunks:
                copy.write(chunk)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        remedy = "the environment variable TMPDIR selects another folder"
        raise corpus_error(name, f"cannot be copied to {folder.parent}: {error.strerror}; {remedy}") from None
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder / name
