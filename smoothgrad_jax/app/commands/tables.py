"""Tables that commands write, with one row per document or group: TSV, CSV, JSON lines, ``.npz`` or Parquet.

A table is written in parts. A part is a dictionary of columns with the same number of rows; None is a missing value.

| suffix          | topic proportions θ [D, K]      | a missing value             | memory        |
|-----------------|---------------------------------|-----------------------------|---------------|
| .tsv, .csv      | columns named as the topics     | an empty field              | one part      |
| .jsonl          | a list ``topics``               | null                        | one part      |
| .npz            | an array ``theta``              | NaN, in text an empty text  | all parts     |
| .parquet        | columns as in .tsv              | null                        | one part      |
"""

import csv
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt

from smoothgrad_jax.app.commands.output import CommandError, check_file
from smoothgrad_jax.data.documents import Metadata, Value
from smoothgrad_jax.data.durable_files import replacing, saving

SUFFIXES = (".tsv", ".csv", ".jsonl", ".npz", ".parquet")
THETA = "theta"  # the column with the topic proportions, a matrix

Columns: TypeAlias = Mapping[str, Sequence[Value] | npt.NDArray]
WriteColumns = Callable[[Columns], None]


def check_output(out: str | None, inputs: Iterable[str]) -> None:
    """Raise an error, before anything is computed, if an output file cannot be written, or is an input."""
    if out is None:
        return
    path = Path(out)
    if path.suffix not in SUFFIXES:
        raise CommandError(f"{path}: expected a name that ends in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    if path.suffix == ".parquet":
        _import_parquet()
    check_file(path)
    if path.exists() and any(os.path.exists(each) and path.samefile(each) for each in inputs):
        raise CommandError(f"{path}: is one of the inputs, which would be replaced; give another name")


@contextmanager
def table_writer(
    out: str | None,
    types: Callable[[], Mapping[str, type]] = dict,
    default: str = ".tsv",
    topics: Sequence[str] = (),
) -> Iterator[WriteColumns]:
    """Yield a function that writes the next rows of a table. An incomplete file is removed.

    Args:
      out: The file, whose suffix selects the format (see :func:`check_output`); None for standard output.
      types: Returns the types of the columns that are lists, by default text. Called for formats that store types.
      default: The format of standard output, ``".tsv"`` or ``".jsonl"``.
      topics: The names of the topics, for tables with θ; see :meth:`SavedModel.topic_names`.
    """
    if out is None:
        yield _line_writer(sys.stdout.buffer, default, topics)
        sys.stdout.buffer.flush()
        return
    suffix = Path(out).suffix
    removed = "the incomplete file has been removed; free some space, or choose another folder"
    with saving(out, lambda: removed), replacing(out) as temporary, temporary.open("wb") as file:
        if suffix == ".npz":
            with _array_writer(file) as write:
                yield write
        elif suffix == ".parquet":
            with _parquet_writer(file, types(), topics) as write:
                yield write
        else:
            yield _line_writer(file, suffix, topics)


def column_types(names: Sequence[str], metadata: Iterable[Metadata]) -> dict[str, type]:
    """Return the types of the fields of documents: bool, int, float, or str if there are several or none."""
    types: list[type | None] = [None] * len(names)
    for each in metadata:
        types = [_common_type(*pair) for pair in zip(types, each.fields, strict=True)]
    return {name: found or str for name, found in zip(names, types, strict=True)}


def _common_type(found: type | None, value: Value) -> type | None:
    """Return the type of a column with values of the type ``found``, after another value."""
    if value is None or found is str:
        return found
    kind = str if isinstance(value, int) and abs(value) >= 1 << 63 else type(value)
    if found in (None, kind):
        return kind
    return float if {found, kind} == {int, float} else str


def _line_writer(file: BinaryIO, suffix: str, topics: Sequence[str]) -> WriteColumns:
    """Return a writer of lines: of JSON, or of values that are quoted where necessary."""
    started = False

    def write(part: Columns) -> None:
        nonlocal started
        text = io.StringIO(newline="")
        if suffix == ".jsonl":
            names = ["topics" if name == THETA else name for name in part]
            for row in zip(*map(_python, part.values()), strict=True):
                text.write(json.dumps(dict(zip(names, row, strict=True))) + "\n")
        else:
            lines = csv.writer(text, delimiter="\t" if suffix == ".tsv" else ",", lineterminator="\n")
            flat = _flat(part, topics)
            if not started:
                lines.writerow(flat)
            lines.writerows(zip(*map(_fields, flat.values()), strict=True))
        started = True
        file.write(text.getvalue().encode())

    return write


@contextmanager
def _array_writer(file: BinaryIO) -> Iterator[WriteColumns]:
    """Yield a writer of arrays; lists become arrays of numbers or of text, without Python objects."""
    parts: list[Columns] = []
    yield parts.append
    arrays: dict[str, Any] = {}
    for name, first in parts[0].items():
        if isinstance(first, np.ndarray):
            arrays[name] = np.concatenate([np.asarray(part[name]) for part in parts])
            continue
        values = [value for part in parts for value in part[name]]
        kind: type | None = None
        for value in values:
            kind = _common_type(kind, value)
        if None in values and kind in (int, bool):
            kind = float
        missing = np.nan if kind is float else ""
        arrays[name] = np.array([missing if v is None else _cast(v, kind or str) for v in values], kind or str)
    np.savez_compressed(file, **arrays)


@contextmanager
def _parquet_writer(file: BinaryIO, types: Mapping[str, type], topics: Sequence[str]) -> Iterator[WriteColumns]:
    """Yield a writer of Parquet, with one row group per part."""
    pyarrow, parquet = _import_parquet()
    kinds = {bool: pyarrow.bool_(), int: pyarrow.int64(), float: pyarrow.float64(), str: pyarrow.string()}
    writer = None

    def write(part: Columns) -> None:
        nonlocal writer
        arrays = {}
        for name, values in _flat(part, topics).items():
            if isinstance(values, np.ndarray):
                arrays[name] = pyarrow.array(values)
            else:
                kind = types.get(name, str)
                cast = [None if value is None else _cast(value, kind) for value in values]
                arrays[name] = pyarrow.array(cast, kinds[kind])
        table = pyarrow.table(arrays)
        writer = writer or parquet.ParquetWriter(file, table.schema)
        writer.write_table(table)

    try:
        yield write
    finally:
        if writer is not None:
            writer.close()


def _import_parquet() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError('Parquet files need pyarrow: pip install "smoothgrad_jax[parquet]"') from error
    return pyarrow, pyarrow.parquet


def _flat(part: Columns, topics: Sequence[str]) -> dict[str, Sequence[Value] | npt.NDArray]:
    """Return the columns with one column per topic instead of the matrix."""
    flat = {name: values for name, values in part.items() if name != THETA}
    theta = part.get(THETA)
    return flat if theta is None else flat | dict(zip(topics, np.asarray(theta).T, strict=True))


def _python(values: Sequence[Value] | npt.NDArray) -> Sequence[Value]:
    return values.tolist() if isinstance(values, np.ndarray) else values


def _fields(values: Sequence[Value] | npt.NDArray) -> Iterable[Value]:
    """Return values for the csv module: computed numbers with six digits, and metadata with all of theirs.

    Before Python 3.13 the module writes a carriage return without quotes; it becomes a line feed.
    """
    if isinstance(values, np.ndarray):
        return (f"{value:.6g}" for value in values.tolist()) if values.dtype.kind == "f" else values.tolist()
    return (v.replace("\r\n", "\n").replace("\r", "\n") if isinstance(v, str) else v for v in values)


def _cast(value: Value, kind: type) -> Value:
    return value if isinstance(value, kind) else kind(value)
