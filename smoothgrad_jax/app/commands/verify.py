"""``smoothgrad verify``: compare the files of a folder with the checksums that were stored with them."""

from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from smoothgrad_jax.app import saved_models
from smoothgrad_jax.app.commands.output import CommandError, emit, printable
from smoothgrad_jax.data import corpus_folder, durable_files
from smoothgrad_jax.data.durable_files import Entry, LoadError
from smoothgrad_jax.data.errors import plural
from smoothgrad_jax.training import checkpoints
from smoothgrad_jax.training.checkpoints import Checkpoints


class Verdict(NamedTuple):
    """What was found about a file: its path, its size if it is intact, and the problem if it is not."""

    path: Path
    num_bytes: int | None
    problem: str | None = None


def run(args: Namespace) -> int:
    """Print one line per file; return 0 if all are intact, else 1."""
    bad = number = 0
    for path, num_bytes, problem in _verdicts(Path(args.folder)):
        number, bad = number + 1, bad + (problem is not None)
        if args.json:
            emit({"file": str(path), "ok": problem is None, "bytes": num_bytes, "problem": problem})
        elif problem is None:
            print(printable(f"ok       {path}: {plural(num_bytes or 0, 'byte')}"))
        else:
            print(printable(f"damaged  {problem}"))
    if not args.json:
        print(f"{args.folder}: {plural(number, 'file')}, " + (f"{bad:,} damaged" if bad else "all intact"))
    return 1 if bad else 0


def _verdicts(folder: Path) -> Iterator[Verdict]:
    """Yield the verdicts on the files of a corpus, of a model and its checkpoints, or of one or several checkpoints."""
    expected = "expected the folder of a corpus, a model, a run or a checkpoint"
    if not folder.is_dir():
        problem = ", got a file" if folder.exists() else "; there is no such folder"
        raise CommandError(f"{folder}: {expected}{problem}")
    stored = [path for each in (folder, folder / "checkpoints") for path in Checkpoints(each).paths()]
    described: list[tuple[Path, Callable[[Path], dict[str, Entry]]]] = [
        (folder / "manifest.json", corpus_folder.described_files),
        (folder / "model.json", saved_models.described_files),
        *((path / "checkpoint.json", checkpoints.described_files) for path in (folder, *stored)),
    ]
    found = [(path, files_of) for path, files_of in described if path.exists() or path.parent in stored]
    if not found:
        remedy = f"; a sweep has one folder per run in {folder / 'runs'}" if (folder / "sweep.json").exists() else ""
        raise CommandError(f"{folder}: {expected}{remedy}")
    for path, files_of in found:
        yield from _verdicts_on_files(path, files_of)


def _verdicts_on_files(path: Path, files_of: Callable[[Path], dict[str, Entry]]) -> Iterator[Verdict]:
    """Yield the verdicts on a description and the files that it names."""
    try:
        files = files_of(path.parent)
    except LoadError as error:
        yield Verdict(path, None, str(error))
        return
    yield Verdict(path, path.stat().st_size)
    for name, entry in files.items():
        try:
            durable_files.verify(path.parent / name, entry)
        except LoadError as error:
            yield Verdict(path.parent / name, None, str(error))
        else:
            yield Verdict(path.parent / name, entry["bytes"])
