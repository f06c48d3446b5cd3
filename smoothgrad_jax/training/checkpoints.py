"""Checkpoints: the state of a run on disk, from which :func:`smoothgrad_jax.fit` continues.

| file                            | content                                                                           |
|---------------------------------|-----------------------------------------------------------------------------------|
| ``NNNNNN-step-T/``              | a checkpoint, the NNNNNN-th of its folder, after step T                           |
| ``…/checkpoint.json``           | format, version, structure of the state, sampler, settings, history; size and     |
|                                 | checksum of every array file                                                      |
| ``…/*.npy``                     | the arrays of the state, one file per data type                                   |
|                                 | (:mod:`smoothgrad_jax.training.state_files`)                                      |
| ``…/process-NNNNN/``            | if several processes train: the arrays of each of them, with ``part.json`` in the |
|                                 | place of their entries in ``checkpoint.json``                                     |
| ``.lock``                       | while a run writes: its process (:mod:`smoothgrad_jax.data.folder_lock`)          |
| ``NNNNNN-step-T.…-…``           | left by a process that was killed while it wrote or removed a checkpoint          |

If several processes train, each writes its part, and process 0 names the checkpoint when all parts are complete: they
need a folder that they share. The parts are described by words, so that another number of processes can continue.

A checkpoint is written under a temporary name, flushed to the disk, and renamed; older checkpoints are removed after
that. A run continues from a checkpoint to the same bits, on the same machine with the same packages.
"""

import contextlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from smoothgrad_jax.core.mesh_step import MeshState
from smoothgrad_jax.core.row_sparse.state import RowSparseState
from smoothgrad_jax.core.types import PyTree
from smoothgrad_jax.data import durable_files, schema
from smoothgrad_jax.data.corpus import Corpus
from smoothgrad_jax.data.durable_files import Entry, LoadError, SaveError, VersionError
from smoothgrad_jax.data.folder_lock import FolderLock
from smoothgrad_jax.training import distributed
from smoothgrad_jax.training.minibatches import Sampler
from smoothgrad_jax.training.state_files import IncompatibleError, read_tree, write_tree

_FORMAT, _VERSION = "smoothgrad checkpoint", 3
_NAME = re.compile(r"(\d{6,})-step-(\d+)")
_PART = "process-{:05d}"
_PART_FORMAT = "smoothgrad checkpoint part"
_CHUNK = 1 << 19  # entries of a corpus that are read together
_STATE = schema.record({"structure": schema.anything, "files": schema.mapping(durable_files.ENTRY)})
_PART_CONTENT = schema.record({"state": _STATE})
_CONTENT = schema.record(
    {
        "made_by": schema.mapping(schema.string),
        "step": schema.integer(0, 2**32 - 1),  # random keys depend on it as a uint32
        "sampler": schema.optional(
            schema.record(
                {
                    "seed": schema.list_of(schema.integer(0, 2**64 - 1)),
                    "num_docs": schema.integer(1),
                    "batch_size": schema.integer(1),
                    "replace": schema.boolean,
                }
            )
        ),
        "settings": schema.mapping(schema.anything),
        "history": schema.list_of(schema.anything),
        "state": schema.either(_STATE, schema.record({"processes": schema.integer(2)})),
    }
)


class Resumable(Protocol):
    """A run that can be written; :class:`smoothgrad_jax.Training` between two reports is one."""

    @property
    def state(self) -> PyTree:
        """A pytree of arrays, from which the run continues."""

    @property
    def step(self) -> int:
        """Number of steps so far."""

    @property
    def sampler(self) -> Sampler | None:
        """How minibatches are drawn; see :class:`Checkpoint`."""


class Checkpoint(NamedTuple):
    """The state of a run after some step.

    Attributes:
      state: The state, an argument of :func:`smoothgrad_jax.fit`.
      step: Number of steps so far.
      settings, history: The arguments of :meth:`Checkpoints.write`.
      sampler: Seed (the data of the key), number of documents, batch size and replacement. With the step they
        determine the next documents. None if the caller supplied the batches.
      made_by: Versions of the packages and the architecture of the machine. With others, the last bits may differ.
      path: The folder of the checkpoint.
      damaged: One message per later checkpoint that is damaged.
    """

    state: PyTree
    step: int
    settings: dict[str, Any]
    history: list[dict[str, Any]]
    sampler: dict[str, Any] | None
    made_by: dict[str, str]
    path: Path
    damaged: tuple[str, ...]


class Checkpoints:
    """The checkpoints of a run, in a folder of their own.

    Args:
      folder: The folder, which the first :meth:`write` creates.
      keep: Number of checkpoints that are kept. Writing needs disk space for one more.

    Example::

        checkpoints = Checkpoints("model/checkpoints")
        last = checkpoints.latest()
        if last:
            check_same(last.settings, settings)
        training = fit(corpus, model, last.state if last else lam, steps=1000 - (last.step if last else 0), key=key)
        if last:
            check_sampler(last.sampler, training.sampler)
        for progress in training:
            checkpoints.write(training, settings)
    """

    def __init__(self, folder: str | os.PathLike, keep: int = 2) -> None:
        if not isinstance(keep, int | np.integer) or keep < 1:
            raise ValueError(f"keep must be a whole number of at least 1, got {keep!r}")
        self.folder, self.keep = Path(folder), keep
        self._lock: FolderLock | None = None

    def lock(self) -> None:
        """Keep other processes from writing checkpoints into the folder, which is created if necessary.

        :meth:`write` and :meth:`clear` do that too; call it before a long run. The lock ends with this object or with
        the process; see :mod:`smoothgrad_jax.data.folder_lock`.

        Raises:
          FolderInUseError: Another process writes checkpoints into the folder; the message names it.
          SaveError: The folder cannot be written.
        """
        with durable_files.saving(self.folder, self._what_is_left):
            lock = FolderLock(self.folder)  # again: the folder may have been removed and made anew
        if self._lock:
            self._lock.release()
        self._lock = lock

    def write(
        self,
        training: Resumable,
        settings: Mapping[str, Any] | None = None,
        history: Sequence[Mapping[str, Any]] = (),
    ) -> Path:
        """Write a checkpoint, then remove those beyond ``keep``. The run does not change.

        Allocates no memory in proportion to the state: the arrays are written from where they are.

        Args:
          training: The run. If several processes train, all of them call this method.
          settings: Settings that must be equal when the run continues, see :func:`check_same`; values that JSON can
            represent.
          history: Records of the run so far.

        Returns:
          The folder of this checkpoint.

        Raises:
          SaveError: If the checkpoint cannot be written (disk full, no permission, another process writes here, …).
            Earlier ones are unchanged.
        """
        body = {
            "format": _FORMAT,
            "version": _VERSION,
            "made_by": durable_files.package_versions(),
            "step": int(training.step),
            "sampler": durable_files.json_values("sampler", training.sampler and training.sampler._asdict()),
            "settings": durable_files.json_values("settings", settings or {}),
            "history": durable_files.json_values("history", list(history)),
        }
        with durable_files.saving(self.folder, self._what_is_left):
            state = training.state
            if isinstance(state, MeshState) and len(state.parts) < int(state.num_devices):
                return self._write_parts(state, body)
            path = self._new_path(body["step"])
            with durable_files.replacing(path, overwrite=False) as new:
                new.mkdir()
                written = write_tree(new, state)
                durable_files.write_json(new / "checkpoint.json", body | {"state": written})
        self._remove(self.paths()[: -self.keep])
        return path

    def _new_path(self, step: int) -> Path:
        """Make the folder ready for another checkpoint, and return its path."""
        self.lock()
        self._remove_leftovers()
        found = self._found()
        return self.folder / f"{found[-1][0] + 1 if found else 1:06d}-step-{step}"

    def _write_parts(self, state: MeshState, body: dict[str, Any]) -> Path:
        """Write the part of this process; process 0 names the checkpoint after all processes have done so."""
        is_first, num_processes = jax.process_index() == 0, jax.process_count()
        number = int(self._new_path(body["step"]).name.partition("-")[0]) if is_first else 0
        path = self.folder / f"{distributed.from_process_0(number):06d}-step-{body['step']}"
        new = path.with_name(f"{path.name}.partial-shared")
        if is_first:
            new.mkdir()
        distributed.wait_for_all()
        if not new.is_dir():
            raise SaveError(f"{self.folder}: process {jax.process_index()} does not share this folder with process 0")
        part = new / _PART.format(jax.process_index())
        part.mkdir()
        written = {"format": _PART_FORMAT, "version": _VERSION, "state": write_tree(part, state)}
        durable_files.write_json(part / "part.json", written)
        durable_files.sync_folder(part)
        distributed.wait_for_all()
        if is_first:
            durable_files.write_json(new / "checkpoint.json", body | {"state": {"processes": num_processes}})
            durable_files.sync_folder(new)
            new.rename(path)
            durable_files.sync_folder(self.folder)
            self._remove(self.paths()[: -self.keep])
        distributed.wait_for_all()
        return path

    def latest(self, like: PyTree = None) -> Checkpoint | None:
        """Return the newest intact checkpoint, or None if there are no checkpoints.

        Args:
          like: An example of the parameters, for a model whose parameters are neither an array nor made of
            dictionaries, lists and tuples.

        Raises:
          LoadError: If every checkpoint is damaged, or the newest is of another version of this package, or its state
            needs ``like`` or 64-bit arrays.
        """
        damaged: list[str] = []
        for path in reversed(self.paths()):
            try:
                return _read_checkpoint(path, like)._replace(damaged=tuple(damaged))
            except (VersionError, IncompatibleError):
                raise
            except LoadError as error:
                damaged.append(str(error))
        if damaged:
            found = "; ".join(damaged)
            raise LoadError(f"{self.folder}: every checkpoint is damaged: {found}. Remove the folder to start again")
        return None

    def clear(self) -> None:
        """Remove all checkpoints, the oldest first."""
        if not self.paths():
            return
        self.lock()
        self._remove(self.paths())

    def paths(self) -> list[Path]:
        """Return the folders of the checkpoints, the oldest first; their content is not checked."""
        return [path for _, _, path in self._found()]

    def _found(self) -> list[tuple[int, int, Path]]:
        """Return (number, step, path) of every checkpoint, in the order of writing."""
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        except NotADirectoryError as error:
            raise LoadError(f"{self.folder}: expected a folder of checkpoints, got a file") from error
        matches = filter(None, map(_NAME.fullmatch, names))
        return sorted((int(match[1]), int(match[2]), self.folder / match[0]) for match in matches)

    def _remove(self, paths: Iterable[Path]) -> None:
        # A checkpoint loses its name first, so that no folder with such a name is incomplete.
        for path in paths:
            with contextlib.suppress(OSError):
                os.rename(path, path.with_name(f"{path.name}.old-"))
        self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        for path in self.folder.glob("*-step-*.*-*"):
            shutil.rmtree(path, ignore_errors=True)

    def _what_is_left(self) -> str:
        with contextlib.suppress(OSError, LoadError):
            if found := self._found():
                return f"the checkpoint after step {found[-1][1]} is still there ({found[-1][2]})"
        return "there is no earlier checkpoint"


def described_files(path: str | os.PathLike) -> dict[str, Entry]:
    """Return the entries of the files of a checkpoint.

    Raises:
      LoadError: The description is missing or damaged.
    """
    path = Path(path)
    states = {"": _read_description(path)["state"]}
    if "processes" in states[""]:
        names = map(_PART.format, range(states[""]["processes"]))
        states = {f"{name}/": _read_part(path / name) for name in names}
    return {f"{part}{name}.npy": entry for part, state in states.items() for name, entry in state["files"].items()}


def check_same(stored: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Check that a run continues with the settings of its checkpoint.

    Args:
      stored: The settings of the checkpoint.
      current: The settings of this run.

    Raises:
      LoadError: If settings differ. The message names each of them with both values.
    """
    stored, current = (durable_files.json_values("settings", each) for each in (stored, current))

    def show(settings: Mapping[str, Any], name: str) -> str:
        return json.dumps(settings[name], ensure_ascii=False) if name in settings else "not set"

    # The texts are compared, because NaN differs from NaN.
    pairs = {name: (show(stored, name), show(current, name)) for name in {**stored, **current}}
    changed = [f"{name} was {then}, now {now}" for name, (then, now) in pairs.items() if then != now]
    if changed:
        raise LoadError(f"this checkpoint is of another run: {'; '.join(changed)}")


def check_sampler(stored: Mapping[str, Any] | None, current: Sampler | None) -> None:
    """Check that a run draws the documents that the run of its checkpoint would have drawn next.

    Call it before the first step of the run that continues; until then the checkpoint's state is unchanged.

    Args:
      stored: :attr:`Checkpoint.sampler`.
      current: :attr:`smoothgrad_jax.Training.sampler` of this run.

    Raises:
      LoadError: The key, the number of documents, the batch size or the replacement differs, or documents are drawn in
        one of the runs only. The message names each difference.
    """
    if (stored is None) != (current is None):
        was, now = ("supplied by the caller", "drawn from a corpus")[:: 1 if stored is None else -1]
        raise LoadError(f"this checkpoint is of another run: its minibatches were {was}, now they are {now}")
    if stored is not None and current is not None:
        check_same(stored, current._asdict())


def fingerprint(corpus: Corpus) -> str:
    """Return a short identifier of the documents of a corpus, which is independent of the data types of its arrays.

    Reads the corpus once, in chunks.
    """
    first, last = int(corpus.indptr[0]), int(corpus.indptr[-1])
    crc = zlib.crc32(np.diff(corpus.indptr).astype(np.int64).data)
    for start in range(first, last, _CHUNK):
        chunk = slice(start, min(start + _CHUNK, last))
        crc = zlib.crc32(np.asarray(corpus.indices[chunk], np.int64).data, crc)
        crc = zlib.crc32(np.asarray(corpus.data[chunk], np.float64).data, crc)
    return f"{len(corpus.indptr) - 1}x{corpus.num_words}-{crc:08x}"


def _read_description(path: Path) -> dict[str, Any]:
    return durable_files.read_json(
        path / "checkpoint.json",
        _FORMAT,
        _VERSION,
        _CONTENT,
        if_older="finish the run with the version that wrote it, or start again",
    )


def _read_checkpoint(path: Path, like: PyTree) -> Checkpoint:
    body = _read_description(path)
    with durable_files.loading(path):
        is_divided = "processes" in body["state"]
        state = _read_parts(path, body["state"], like) if is_divided else read_tree(path, body["state"], like)
        for part in state.parts if isinstance(state, MeshState) else (state,):
            if isinstance(part, RowSparseState):
                part.check()
                if part.step != body["step"]:
                    raise LoadError(f"{path}: damaged: the state is after step {part.step}, expected {body['step']}")
        return Checkpoint(
            state=state,
            step=body["step"],
            settings=body["settings"],
            history=body["history"],
            sampler=body["sampler"],
            made_by=body["made_by"],
            path=path,
            damaged=(),
        )


def _read_part(part: Path) -> dict[str, Any]:
    return durable_files.read_json(part / "part.json", _PART_FORMAT, _VERSION, _PART_CONTENT)["state"]


def _read_parts(path: Path, written: Mapping[str, Any], like: PyTree) -> MeshState:
    """Read the parts of all processes, memory-mapped: each process copies only the rows that it needs."""
    parts = [path / _PART.format(number) for number in range(written["processes"])]
    states = [read_tree(part, _read_part(part), like, copy=False) for part in parts]
    return states[0]._replace(
        devices=np.concatenate([state.devices for state in states]),
        parts=tuple(part for state in states for part in state.parts),
    )
