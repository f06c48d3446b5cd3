"""Files that are complete or absent: the package's only atomic writer and its only checksum scheme.

Corpus folders, models, checkpoints, reports and tables are all written by these functions.

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
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NotRequired, Protocol, TypedDict

import numpy as np
import numpy.typing as npt

from smoothgrad_jax import __version__

_CHUNK_BYTES = 1 << 22


class SaveError(OSError):
    """Raised if something cannot be written. The previous content of the path is unchanged."""


class LoadError(ValueError):
    """Raised if a file is damaged, missing, not of this package, of another version, or of another run."""


class VersionError(LoadError):
    """Raised if a file was written in a version of its format that this package does not read."""


class Entry(TypedDict):
    """Describe a written file.

    Attributes:
      bytes: Its size.
      crc32: Its checksum, eight hexadecimal digits.
      dtype: The data type of an array, such as ``"float32"`` or ``"bfloat16"``.
    """

    bytes: int
    crc32: str
    dtype: NotRequired[str]


class ArrayOnHost(Protocol):
    """An array of NumPy, or of a library whose arrays NumPy can read, such as JAX."""

    @property
    def dtype(self) -> np.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __array__(self) -> npt.NDArray: ...


class FileWriter:
    """Append to a file and compute its size and checksum on the way; made by :func:`new_file`."""

    def __init__(self, file: BinaryIO):
        self._file, self._bytes, self._crc = file, 0, 0

    def write(self, data: bytes | memoryview | npt.NDArray) -> None:
        """Append bytes, or the elements of an array in C order."""
        if isinstance(data, np.ndarray):
            data = memoryview(np.ascontiguousarray(data).reshape(-1).view(np.uint8))
        self._file.write(data)
        self._bytes, self._crc = self._bytes + len(data), zlib.crc32(data, self._crc)

    def finish(self) -> Entry:
        """Flush the file to the disk and return its entry."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return {"bytes": self._bytes, "crc32": f"{self._crc:08x}"}


@contextlib.contextmanager
def new_file(path: str | os.PathLike) -> Iterator[FileWriter]:
    """Create a file that is written from front to back.

    Use it where several files are written in turns; :func:`write_file` is enough for one file at a time.

    Args:
      path: The file, which must not exist.

    Raises:
      OSError: If the file exists or cannot be written.
    """
    with open(path, "xb") as file:
        yield FileWriter(file)


def write_file(path: str | os.PathLike, chunks: Iterable[bytes | memoryview | npt.NDArray]) -> Entry:
    """Write a new file durably.

    Args:
      path: The file, which must not exist.
      chunks: Its content, in order.

    Returns:
      Its size and checksum.

    Raises:
      OSError: If the file exists or cannot be written.
    """
    with new_file(path) as file:
        for chunk in chunks:
            file.write(chunk)
        return file.finish()


def write_array(path: str | os.PathLike, array: ArrayOnHost | list[ArrayOnHost] | tuple[ArrayOnHost, ...]) -> Entry:
    """Write an array as a new ``.npy`` file. NumPy knows no bfloat16: it is stored as its bits, in uint16.

    Args:
      path: The file, which must not exist.
      array: The array, or a list or tuple of its pieces along the first axis, which are never joined in memory.

    Returns:
      The file's size and checksum, and the array's data type.

    Raises:
      OSError: If the file exists or cannot be written.
    """
    if isinstance(array, list | tuple):
        pieces: list[ArrayOnHost] = list(array)
        shape = (sum(piece.shape[0] for piece in pieces), *pieces[0].shape[1:])
    else:
        pieces = [array]
        shape = array.shape
    dtype = pieces[0].dtype
    with new_file(path) as file:
        file.write(array_header(np.dtype(np.uint16) if dtype.name == "bfloat16" else dtype, shape))
        for piece in pieces:
            file.write(np.asarray(piece))
        return {**file.finish(), "dtype": dtype.name}


def array_header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """Return the bytes that precede the elements of an array in a ``.npy`` file."""
    header = io.BytesIO()
    described = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, described)
    return header.getvalue()


def verify(path: str | os.PathLike, entry: Entry | None, *, checksum: bool = True) -> None:
    """Check that a file is what was written.

    Args:
      path: The file.
      entry: What :func:`write_file` returned; None if the caller's description of its files does not name this one.
      checksum: Read the file once and compare its checksum. If False, only its size is compared.

    Raises:
      LoadError: If the file is missing, damaged or not described.
    """
    if not entry:
        raise LoadError(f"{path}: not named in the description of its folder")
    size = crc = 0
    try:
        if checksum:
            with open(path, "rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    size, crc = size + len(chunk), zlib.crc32(chunk, crc)
        else:
            size = os.stat(path).st_size
    except FileNotFoundError as error:
        raise LoadError(f"{path}: missing") from error
    except OSError as error:
        raise LoadError(f"{path}: cannot be read: {error.strerror}") from error
    if size != entry["bytes"]:
        raise LoadError(f"{path}: damaged: expected {entry['bytes']} bytes, got {size}")
    if checksum and f"{crc:08x}" != entry["crc32"]:
        raise LoadError(f"{path}: damaged: expected the checksum {entry['crc32']}, got {crc:08x}")


def read_array(path: str | os.PathLike, entry: Entry | None, *, checksum: bool = True) -> npt.NDArray:
    """Open a ``.npy`` file as a memory-mapped array, after :func:`verify`.

    Args:
      path: The file.
      entry: What :func:`write_array` returned.
      checksum: As in :func:`verify`.

    Returns:
      The array, read-only, of the type that was written.

    Raises:
      LoadError: If the file is missing, damaged, not described, or not one array.
    """
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
    """Write a new JSON file that contains its own checksum.

    Args:
      path: The file, which must not exist.
      body: Its content, with the keys ``format`` and ``version`` that :func:`read_json` asks for. See
        :func:`json_values` for values that are not of JSON's types.

    Returns:
      Its size and checksum.

    Raises:
      OSError: If the file exists or cannot be written.
    """
    text = json.dumps({**body, "checksum": _json_checksum(body)}, indent=1) + "\n"
    return write_file(path, [text.encode()])


def read_json(
    path: str | os.PathLike, format: str, version: int, *, if_older: str = "write it again"
) -> dict[str, Any]:
    """Read a file of :func:`write_json`.

    Args:
      path: The file.
      format: The value that its key ``format`` must have, such as ``"smoothgrad model"``.
      version: The value that its key ``version`` must have.
      if_older: The advice to the user of a file of an older version.

    Returns:
      Its content, without the checksum.

    Raises:
      VersionError: If it was written in another version of the format.
      LoadError: If it is missing, damaged, or of another format.
    """
    try:
        with open(path, "rb") as file:
            body = json.loads(file.read())
    except FileNotFoundError as error:
        raise LoadError(f"{path}: missing; every {format} has this file") from error
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(f"{path}: damaged, or not a {format}: {error}") from error
    if not isinstance(body, dict) or body.get("format") != format:
        raise LoadError(f"{path}: not a {format}")
    found = body.get("version")
    older = isinstance(found, int) and found < version
    # The checksum is compared before the version, so that a damaged file is not reported as a newer one. The first
    # version of corpus folders had no checksum in its manifest.
    given = body.pop("checksum", None)
    if given != _json_checksum(body) and not (older and given is None):
        raise LoadError(f"{path}: damaged, or edited by hand: its checksum does not match")
    if found != version:
        advice = if_older if older else "upgrade this package"
        raise VersionError(f"{path}: format version {found}, this package reads version {version}: {advice}")
    return body


def json_values(name: str, value: Any) -> Any:
    """Return a value as JSON would return it after writing and reading: tuples become lists, NumPy numbers numbers.

    Args:
      name: What the value is called in the error.
      value: Dictionaries, sequences, strings, numbers, None, and NumPy arrays and scalars.

    Raises:
      ValueError: If JSON cannot represent the value.
    """

    def from_numpy(value: object) -> Any:
        if isinstance(value, np.generic | np.ndarray):
            return value.tolist()
        raise TypeError(f"{type(value).__name__} {value!r}")

    try:
        return json.loads(json.dumps(value, default=from_numpy))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} must be a value that JSON can represent, got {error}") from error


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that compute, and the machine's architecture, for the record in a file."""
    versions = {"smoothgrad_jax": __version__, "python": platform.python_version(), "numpy": np.__version__}
    if "jax" in sys.modules:  # a model can be read and written without jax
        versions["jax"] = sys.modules["jax"].__version__
    return versions | {"machine": platform.machine()}


@contextlib.contextmanager
def replacing(path: str | os.PathLike, *, overwrite: bool = True) -> Iterator[Path]:
    """Yield the path of a temporary file or folder, which replaces ``path`` if the block ends without an error.

    The caller creates the file or the folder, in the same folder as ``path``, which must exist. After an error
    ``path`` is as it was, and the temporary one is removed. A killed process leaves ``NAME.partial-…``, which can be
    deleted.

    Args:
      path: The file or folder to write.
      overwrite: Replace an existing one; if False, raise ``FileExistsError``.

    Raises:
      OSError: If it cannot be written.

    Example::

        with replacing("report.html") as temporary:
            temporary.write_bytes(page)
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
        elif path.is_dir():
            _swap_folders(temporary, path)
        else:
            temporary.replace(path)
        sync_folder(path.parent)
    finally:
        _remove(temporary)


@contextlib.contextmanager
def saving(path: str | os.PathLike, what_is_left: Callable[[], str]) -> Iterator[None]:
    """Turn an ``OSError`` of the block into a :class:`SaveError`.

    Args:
      path: The path that the error names.
      what_is_left: Returns the end of the message: what the user still has, or can do.
    """
    try:
        yield
    except OSError as error:
        failure = SaveError(f"{path}: could not be written: {error.strerror or error}; {what_is_left()}")
        failure.errno = error.errno
        raise failure from error


@contextlib.contextmanager
def loading(path: str | os.PathLike) -> Iterator[None]:
    """Turn every error that the content of a file can cause into a :class:`LoadError` that names ``path``."""
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
    """Make the names in a folder durable, where the system supports it."""
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
