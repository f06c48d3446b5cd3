"""Atomic writing and checksums of files, for corpus folders, models, checkpoints and reports.

- A file is created, written from front to back and flushed to the disk (fsync). Its size and its CRC-32 form an
  :class:`Entry`, which the caller stores in a JSON file and passes to :func:`verify` or :func:`read_array` later.
- A JSON file contains its own checksum, so that a truncated or edited file is recognised.
- :func:`replacing` gives a file or a folder its name only when the content is complete.
"""

import contextlib
import importlib
import io
import json
import os
import platform
import shutil
import stat
import sys
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NotRequired, TypedDict

import numpy as np
import numpy.typing as npt

from smoothgrad_jax import __version__
from smoothgrad_jax.data import schema
from smoothgrad_jax.data.schema import Json, Schema

_CHUNK_BYTES = 1 << 22
_LOW_PRIORITY = 15  # of the thread that compares checksums, from −20 (high) to 19


class SaveError(OSError):
    """Raised if a file cannot be written. The previous content of the path is unchanged."""


class LoadError(ValueError):
    """Raised if a file is damaged, missing, not of this package, of another version, or of another run."""


class VersionError(LoadError):
    """Raised if a file was written in a version of its format that this package does not read."""


class Entry(TypedDict):
    """Size, CRC-32 in hexadecimal digits, and for an array the data type (such as ``"bfloat16"``) of a written file."""

    bytes: int
    crc32: str
    dtype: NotRequired[str]


ENTRY: Schema = schema.record({"bytes": schema.integer(), "crc32": schema.string}, {"dtype": schema.string})


class FileWriter:
    """Append to a file and compute its size and checksum; made by :func:`new_file`."""

    def __init__(self, file: BinaryIO):
        self._file, self._bytes, self._crc = file, 0, 0

    def write(self, data: bytes | memoryview | npt.NDArray) -> None:
        """Append bytes, or the elements of an array in C order."""
        if isinstance(data, np.ndarray):
            data = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
        self._file.write(data)
        self._bytes, self._crc = self._bytes + len(data), zlib.crc32(data, self._crc)

    def finish(self) -> Entry:
        """Flush the file to the disk and return its entry."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return {"bytes": self._bytes, "crc32": f"{self._crc:08x}"}


@contextlib.contextmanager
def new_file(path: str | os.PathLike) -> Iterator[FileWriter]:
    """Create a file, which must not exist. :func:`write_file` is enough unless several files are written in turns."""
    with open(path, "xb") as file:
        yield FileWriter(file)


def write_file(path: str | os.PathLike, chunks: Iterable[bytes | memoryview | npt.NDArray]) -> Entry:
    """Write chunks of content to a file, which must not exist, and return its entry."""
    with new_file(path) as file:
        for chunk in chunks:
            file.write(chunk)
        return file.finish()


def write_array(path: str | os.PathLike, array: npt.ArrayLike) -> Entry:
    """Write a ``.npy`` file, which must not exist, and return its entry.

    NumPy has no bfloat16: such an array is stored as its bits, in uint16.
    """
    array = np.asarray(array)
    stored = np.dtype(np.uint16) if array.dtype.name == "bfloat16" else array.dtype
    return {**write_file(path, [array_header(stored, array.shape), array]), "dtype": array.dtype.name}


def array_header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """Return the bytes that precede the elements of an array in a ``.npy`` file."""
    header = io.BytesIO()
    described = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, described)
    return header.getvalue()


def open_regular(path: str | os.PathLike) -> BinaryIO:
    """Open a file for reading, if it is a regular file and no link that leads out of its folder.

    A folder from someone else may contain a pipe or a link to a device, which would block the reader for ever, or a
    link to a private file of the reader.

    Raises:
      FileNotFoundError: There is no such file.
      LoadError: It cannot be opened, or is of another kind.
    """
    path = Path(path)
    folder = path.parent.resolve()
    if path.is_symlink() and not path.resolve().is_relative_to(folder):
        raise LoadError(f"{path}: is a link that leads out of its folder; copy the file into the folder")
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise LoadError(f"{path}: cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise LoadError(f"{path}: expected a regular file, got a folder, a pipe or a device")
    return os.fdopen(descriptor, "rb")


def read_bytes(path: str | os.PathLike) -> bytes:
    """Return the content of a file; raises as :func:`open_regular`."""
    with open_regular(path) as file:
        return file.read()


def verify(
    path: str | os.PathLike, entry: Entry | None, *, checksum: bool = True, stop: threading.Event | None = None
) -> None:
    """Check that a file has the content that was written.

    Args:
      path: The file.
      entry: Returned by :func:`write_file`; None if the description of the folder does not name the file.
      checksum: Read the file and compare its checksum. If False, only its size is compared.
      stop: Return early, without an error, once it is set.

    Raises:
      LoadError: If the file is missing, damaged or not described.
    """
    if not entry:
        raise LoadError(f"{path}: not named in the description of its folder")
    crc = 0
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            while checksum and size == entry["bytes"] and (chunk := file.read(_CHUNK_BYTES)):
                crc = zlib.crc32(chunk, crc)
                if stop is not None and stop.is_set():
                    return
    except FileNotFoundError as error:
        raise LoadError(f"{path}: missing") from error
    except OSError as error:
        raise LoadError(f"{path}: cannot be read: {error.strerror}") from error
    if size != entry["bytes"]:
        raise LoadError(f"{path}: damaged: expected {entry['bytes']} bytes, got {size}")
    if checksum and f"{crc:08x}" != entry["crc32"]:
        raise LoadError(f"{path}: damaged: expected the checksum {entry['crc32']}, got {crc:08x}")


class SumCheck:
    """Compares the checksums of the files of a folder in a thread of low priority, while the caller works with them."""

    def __init__(self, folder: str | os.PathLike, files: Mapping[str, Entry]) -> None:
        self._error: LoadError | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(Path(folder), dict(files)), name="sums", daemon=True)
        self._thread.start()

    def check(self, *, wait: bool = False) -> None:
        """Raise a :class:`LoadError` if a file was damaged so far; with ``wait``, read the remaining files first."""
        while wait and self._thread.is_alive():
            self._thread.join(0.1)
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()

    def _run(self, folder: Path, files: dict[str, Entry]) -> None:
        with contextlib.suppress(OSError, AttributeError):  # a thread has a priority of its own on Linux only
            if sys.platform == "linux":
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOW_PRIORITY)
        try:
            for name, entry in files.items():
                verify(folder / name, entry, stop=self._stop)
        except LoadError as error:
            self._error = error


def read_array(path: str | os.PathLike, entry: Entry | None, *, checksum: bool = True) -> npt.NDArray:
    """Open a file of :func:`write_array` as a read-only memory-mapped array, after :func:`verify`."""
    verify(path, entry, checksum=checksum)
    try:
        with warnings.catch_warnings(action="error"):
            array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # NumPy parses a header as Python code: a damaged one raises many types of errors
        raise LoadError(f"{path}: damaged: expected an array, got {error}") from error
    if not isinstance(array, np.ndarray):
        raise LoadError(f"{path}: damaged: expected one array, got an archive of several")
    if entry and entry.get("dtype") == "bfloat16":
        # JAX depends on ml_dtypes; NumPy alone knows no bfloat16.
        return array.view(importlib.import_module("ml_dtypes").bfloat16)
    return array


def write_json(path: str | os.PathLike, body: Mapping[str, Any]) -> Entry:
    """Write a JSON file, which must not exist, with its own checksum, and return its entry.

    The content includes the keys ``format`` and ``version``, which :func:`read_json` requires.
    """
    text = json.dumps({**body, "checksum": _json_checksum(body)}, indent=1) + "\n"
    return write_file(path, [text.encode()])


def read_json(
    path: str | os.PathLike,
    format: str,
    version: int,
    content: Schema = schema.anything,
    *,
    if_older: str = "write it again",
) -> dict[str, Any]:
    """Read a file of :func:`write_json`.

    Args:
      path: The file.
      format, version: The required values of these keys, such as ``"smoothgrad model"`` and 1.
      content: The schema of the content.
      if_older: Advice to the user of a file of an older version.

    Returns:
      The content without the checksum.

    Raises:
      VersionError: If the file has another version of the format.
      LoadError: If the file is missing, damaged, or of another format.
    """
    try:
        body = json.loads(read_bytes(path))
    except FileNotFoundError as error:
        raise LoadError(f"{path}: missing; every {format} has this file") from error
    except LoadError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(f"{path}: damaged, or not a {format}: {error}") from error
    if not isinstance(body, dict) or body.get("format") != format:
        raise LoadError(f"{path}: not a {format}")
    # The checksum is compared before the version, so that a damaged file is not reported as a newer one.
    if body.pop("checksum", None) != _json_checksum(body):
        raise LoadError(f"{path}: damaged, or edited by hand: its checksum does not match")
    found = body.get("version")
    if found != version:
        advice = if_older if isinstance(found, int) and found < version else "upgrade this package"
        raise VersionError(f"{path}: format version {found}, this package reads version {version}: {advice}")
    try:
        content(body, "")
    except ValueError as error:
        raise LoadError(f"{path}: damaged: {error}") from error
    return body


def json_values(name: str, value: object) -> Json:
    """Return a value as JSON reads it after writing: tuples and arrays become lists, NumPy scalars numbers."""

    def from_numpy(value: object) -> Json:
        if isinstance(value, np.generic | np.ndarray):
            return value.tolist()
        raise TypeError(f"{type(value).__name__} {value!r}")

    try:
        return json.loads(json.dumps(value, default=from_numpy))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} must be a value that JSON can represent, got {error}") from error


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that compute, and the architecture of the machine."""
    versions = {"smoothgrad_jax": __version__, "python": platform.python_version(), "numpy": np.__version__}
    if "jax" in sys.modules:  # a model can be read and written without jax
        versions["jax"] = sys.modules["jax"].__version__
    return versions | {"machine": platform.machine()}


@contextlib.contextmanager
def replacing(path: str | os.PathLike, *, overwrite: bool = True) -> Iterator[Path]:
    """Yield a temporary path in the same folder, which replaces ``path`` if the block ends without an error.

    The caller creates a file or a folder at the temporary path. After an error, ``path`` is unchanged and the temporary
    path is removed. A killed process leaves ``NAME.partial-…``, which can be deleted.

    Args:
      path: The file or folder to write; its parent must exist.
      overwrite: Replace an existing one; if False, raise ``FileExistsError``.

    Raises:
      IsADirectoryError, NotADirectoryError: The content is a file and ``path`` a folder, or the reverse.
    """
    path = Path(path)
    temporary = path.with_name(f"{path.name}.partial-{os.getpid()}-{time.time_ns():x}")
    try:
        yield temporary
        if temporary.is_dir():
            sync_folder(temporary)
        else:
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
        if not os.path.lexists(path):
            temporary.rename(path)
        elif not overwrite:
            raise FileExistsError(f"{path}: exists already")
        elif temporary.is_dir() and path.is_dir():
            _swap_folders(temporary, path)
        else:
            temporary.replace(path)  # the system refuses to replace a folder by a file, or a file by a folder
        sync_folder(path.parent)
    finally:
        _remove(temporary)


@contextlib.contextmanager
def saving(path: str | os.PathLike, what_is_left: Callable[[], str]) -> Iterator[None]:
    """Convert an ``OSError`` of the block to a :class:`SaveError` that names ``path``.

    The message ends with what ``what_is_left`` returns: which data the user still has, or a remedy.
    """
    try:
        yield
    except SaveError:
        raise
    except OSError as error:
        failure = SaveError(f"{path}: could not be written: {error.strerror or error}; {what_is_left()}")
        failure.errno = error.errno
        raise failure from error


@contextlib.contextmanager
def loading(path: str | os.PathLike) -> Iterator[None]:
    """Convert every error that the content of a file can cause to a :class:`LoadError` that names ``path``."""
    try:
        yield
    except LoadError:
        raise
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise LoadError(f"{path}: damaged, or not written by this package: {error}") from error


def make_folder(folder: str | os.PathLike) -> None:
    """Create a folder and its parents durably, if they do not exist."""
    folder = Path(folder)
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir()
        sync_folder(folder.parent)


def sync_folder(folder: str | os.PathLike) -> None:
    """Flush the names in a folder to the disk, where the system supports it."""
    if os.name != "posix":
        return
    with contextlib.suppress(PermissionError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _json_checksum(body: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(body, sort_keys=True).encode()):08x}"


def _swap_folders(new: Path, path: Path) -> None:
    """Rename ``new`` to ``path``, which is a folder or a link to one; a folder cannot be replaced in one call."""
    old = new.with_name(new.name.replace(".partial-", ".old-"))
    path.rename(old)
    try:
        new.rename(path)
    except BaseException:
        if not os.path.lexists(path):
            old.rename(path)
        raise
    _remove(old)


def _remove(path: Path) -> None:
    """Remove a file, a link or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
