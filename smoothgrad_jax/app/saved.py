"""Models and checkpoints on disk: plain ``.npy`` arrays and JSON, nothing that is executed when it is read.

A model is a folder:

| file                            | holds                                                                             |
|---------------------------------|-----------------------------------------------------------------------------------|
| ``model.json``                  | format, version, D, settings, history; size and checksum of every other file      |
| ``lam.npy``                     | λ [V, K], float32 or float64                                                      |
| ``alpha.npy``, ``eta.npy``      | priors: α of shape () or [K], η of any shape that broadcasts to λ                 |
| ``prevalence.npy`` (may lack)   | how much of the corpus each topic explains [K]                                    |
| ``word_counts.npy`` (may lack)  | how often each word occurs in the corpus [V]                                      |
| ``vocabulary.txt`` (may lack)   | the V words, UTF-8, one a line                                                    |

It is replaced as a whole. The new files are first written beside, as ``NAME.new`` with ``model.json.new`` last; from
the moment that one is whole they are the model, wherever the renaming of them is interrupted. Other things in the
folder are left alone, such as ``checkpoints/``:

| file                            | holds                                                                             |
|---------------------------------|-----------------------------------------------------------------------------------|
| ``NNNNNN-step-T/``              | a checkpoint, the NNNNNN-th of this folder, after step T                          |
| ``…/checkpoint.json``           | format, version, facts of the state, sampler, settings, history; size and         |
|                                 | checksum of every array                                                           |
| ``…/*.npy``                     | the arrays of the state; bfloat16 as its bits in uint16                           |
| ``.new-…``, ``.old-…``          | one that was being written or removed when the process was killed                 |

A checkpoint is written under another name, made durable (fsync), and renamed; only then older ones go. A run goes on
from it to the same bits, on the same machine with the same packages.
"""

import contextlib
import importlib
import io
import json
import os
import platform
import re
import shutil
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from smoothgrad_jax.data.durable_files import LoadError, SaveError
from smoothgrad_jax.training.state_files import read_tree, write_tree

_MODEL, _CHECKPOINT = "smoothgrad model", "smoothgrad checkpoint"
_VERSIONS = {_MODEL: 1, _CHECKPOINT: 2}  # checkpoints of version 1 kept the stamps of rows apart from the rows
_ARRAYS = ("lam", "alpha", "eta", "prevalence", "word_counts")
_WORDS = "vocabulary.txt"
_FILES = (*(f"{name}.npy" for name in _ARRAYS), _WORDS)
_NAME = re.compile(r"(\d{6,})-step-(\d+)")
_CHUNK = 1 << 22


class _VersionError(LoadError):
    """Written by another version of this package, in a form that this one does not read."""


class SavedModel(NamedTuple):
    """Topics with all that is needed to use them.

    Attributes:
      lam: λ [V, K].
      alpha: α, one number or [K].
      eta: η, one number or anything that broadcasts to λ.
      num_docs: D.
      vocabulary: The V words, or None.
      settings: How it was made, in what JSON can hold.
      history: Records on the way, such as step and score.
      prevalence: The share of the corpus that each topic explains [K], or None.
      word_counts: How often each word occurs in the corpus [V], or None.
    """

    lam: np.ndarray
    alpha: Any
    eta: Any
    num_docs: float
    vocabulary: list[str] | None
    settings: dict[str, Any]
    history: list[dict[str, Any]]
    prevalence: np.ndarray | None = None
    word_counts: np.ndarray | None = None

    def topics(self) -> np.ndarray:
        """E[β] as [K, V] in float64: one row a topic, which sums to one."""
        lam = np.asarray(self.lam, np.float64)
        return (lam / lam.sum(0)).T

    def shares(self) -> np.ndarray:
        """How much of the corpus each topic explains [K], in float64; from λ where it was not kept."""
        mass = np.asarray(self.lam).sum(0, dtype=np.float64) if self.prevalence is None else self.prevalence
        return np.asarray(mass, np.float64) / np.sum(mass)

    def words(self) -> list[str]:
        """The vocabulary; where there is none, the numbers of the words."""
        return list(self.vocabulary) if self.vocabulary is not None else [str(w) for w in range(len(self.lam))]

    def top_words(self, n: int = 10) -> list[list[tuple[str, float]]]:
        """For each topic its n most probable words, with their probabilities; of equals the first word goes first."""
        words = self.words()
        best = [(beta, np.argsort(-beta, kind="stable")[:n]) for beta in self.topics()]
        return [[(words[w], float(beta[w])) for w in order] for beta, order in best]

    def lda(self) -> Any:
        """The priors, as :class:`smoothgrad_jax.LDA`."""
        from smoothgrad_jax.models.lda.model import LDA

        return LDA(self.alpha, self.eta, self.num_docs)

    def transform(self, documents: Any, **options: Any) -> np.ndarray:
        """E[θ] of documents [D, K], as :func:`smoothgrad_jax.models.inference.proportions` gives it, with its
        options."""
        import jax

        from smoothgrad_jax.models.lda import inference

        lam = np.asarray(self.lam, None if jax.config.jax_enable_x64 else np.float32)
        return inference.proportions(self.lda(), lam, documents, **options)

    def pyldavis_inputs(self, corpus: Any = None) -> dict[str, Any]:
        """What ``pyLDAvis.prepare`` takes, for these topics and these documents; see :meth:`to_pyldavis`."""
        from smoothgrad_jax.data.corpus import Corpus

        if corpus is None:
            # All documents as one: what is drawn is the share of each topic, and how often each word occurs.
            words = np.asarray(self.lam).sum(1, dtype=np.float64) if self.word_counts is None else self.word_counts
            theta, lengths = self.shares()[None], np.array([np.sum(words)])
        else:
            corpus = Corpus.of(corpus)
            theta, words = self.transform(corpus).astype(np.float64), corpus.word_counts()
            ends = np.asarray(corpus.indptr) - corpus.indptr[0]
            counts = np.asarray(corpus.data[corpus.indptr[0] : corpus.indptr[-1]], np.float64)
            lengths = np.diff(np.concatenate([[0.0], np.cumsum(counts)])[ends])
        return {
            "topic_term_dists": self.topics(),
            "doc_topic_dists": theta / theta.sum(1, keepdims=True),
            "doc_lengths": lengths,
            "vocab": self.words(),
            "term_frequency": words,
        }

    def to_pyldavis(self, corpus: Any = None, **options: Any) -> Any:
        """The topics prepared for pyLDAvis: ``pyLDAvis.save_html(model.to_pyldavis(), "topics.html")``.

        Args:
          corpus: The documents that sizes of topics and words are counted from; by default those it was trained on,
            as far as the model remembers them.
          **options: Of ``pyLDAvis.prepare``. By default ``mds`` is the map of our report: that of pyLDAvis 3.4 gives
            complex numbers with NumPy 2.5, and stumbles over them.

        Raises:
          ImportError: If pyLDAvis is not installed.
        """
        try:
            import pyLDAvis
        except ImportError as error:
            raise ImportError("to_pyldavis needs pyLDAvis: pip install pyLDAvis") from error
        return pyLDAvis.prepare(**self.pyldavis_inputs(corpus), **{"mds": _map} | options)


def save_model(path: str | os.PathLike, model: SavedModel) -> None:
    """Write a model into a folder, which is made if need be; a model that is there is replaced as a whole, or stays.

    Args:
      path: The folder. What else is in it is left alone.
      model: The model.

    Raises:
      ValueError: If the model does not fit together.
      SaveError: If it cannot be written (disk full, no permission, …); a model that was there before still is.
    """
    model = _checked(model)
    folder = Path(path)
    facts = {
        "format": _MODEL,
        "version": _VERSIONS[_MODEL],
        "made_by": _made_by(),
        "num_docs": model.num_docs,
        "settings": _plain("settings", model.settings),
        "history": _plain("history", model.history),
    }
    with _saving(folder, lambda: "what was there before still is; free some space, or choose another folder"):
        _make(folder)
        _finish(folder)
        try:
            files = {}
            for name in _ARRAYS:
                if getattr(model, name) is not None:
                    files[f"{name}.npy"] = _write_array(folder / f"{name}.npy.new", getattr(model, name))
            if model.vocabulary is not None:
                words = "".join(f"{word}\n" for word in model.vocabulary).encode()
                files[_WORDS] = _write(folder / f"{_WORDS}.new", [words])
            _sync(folder)
            _write(folder / "model.json.new", [_to_json(facts | {"files": files})])
            _sync(folder)
        except BaseException:
            _discard(folder)
            raise
        _finish(folder)


def load_model(path: str | os.PathLike) -> SavedModel:
    """Read a model from its folder.

    Raises:
      LoadError: If there is none, or it is damaged, not ours, or of a newer version.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise LoadError(
            f"{folder}: expected a model's folder, {'got a file' if folder.exists() else 'which is missing'}"
        )
    before = _stamp(folder)
    try:
        return _load(folder)
    except LoadError:
        if _stamp(folder) == before:
            raise
    return _load(folder)  # it was replaced while it was being read


class Checkpoint(NamedTuple):
    """A run as it was.

    Attributes:
      state: What :func:`smoothgrad_jax.fit` goes on from.
      step: Steps taken.
      settings, history: As they were given to :meth:`Checkpoints.write`.
      sampler: Seed (the key's numbers), number of documents, batch size and replacement, which with the step say what
        documents come next; None if the batches were the caller's own.
      made_by: Versions of the packages and the kind of machine: with others the bits may differ, and nothing else.
      path: Its folder.
      damaged: What is wrong with later checkpoints, if there are any.
    """

    state: Any
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
      folder: Where; made when the first is written.
      keep: How many stay. While one is written there is room needed for one more.

    Example::

        checkpoints = Checkpoints("model/checkpoints")
        last = checkpoints.latest()
        if last:
            check_same(last.settings, settings)
        training = fit(corpus, model, last.state if last else lam, steps=1000 - (last.step if last else 0), key=key)
        for progress in training:
            checkpoints.write(training, settings)
    """

    def __init__(self, folder: str | os.PathLike, keep: int = 2):
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self.folder, self.keep = Path(folder), keep

    def write(
        self, training: Any, settings: Mapping[str, Any] | None = None, history: Sequence[Mapping[str, Any]] = ()
    ) -> Path:
        """Write a checkpoint, then remove those that are too many. The run is not touched.

        Allocates nothing of the state's size: the arrays are written as they are.

        Args:
          training: A :class:`smoothgrad_jax.Training` between two reports, or its ``snapshot()``.
          settings: What must be the same when the run goes on, see :func:`check_same`; anything JSON can hold.
          history: Records on the way.

        Returns:
          The folder of this checkpoint.

        Raises:
          SaveError: If it cannot be written (disk full, no permission, …); earlier checkpoints are still there.
        """
        facts = {"step": training.step, "sampler": training.sampler and training.sampler._asdict()}
        body = {
            "format": _CHECKPOINT,
            "version": _VERSIONS[_CHECKPOINT],
            "made_by": _made_by(),
            "facts": _plain("facts", facts),
            "settings": _plain("settings", settings or {}),
            "history": _plain("history", list(history)),
        }
        with _saving(self.folder, self._consolation):
            _make(self.folder)
            self._clean()
            found = self._found()
            name = f"{found[-1][0] + 1 if found else 1:06d}-step-{facts['step']}"
            new = self.folder / f".new-{name}"
            try:
                new.mkdir()
                files = write_tree(new, training.state)
                _write(new / "checkpoint.json", [_to_json(body | {"files": files})])
                _sync(new)
                os.rename(new, self.folder / name)
            except BaseException:
                shutil.rmtree(new, ignore_errors=True)
                raise
            _sync(self.folder)
        self._remove(self._found()[: -self.keep])
        return self.folder / name

    def latest(self, like: Any = None) -> Checkpoint | None:
        """The newest checkpoint that is whole; None if there has never been one.

        Args:
          like: A pytree with the structure of the parameters, for a model of one's own with more than one array.

        Raises:
          LoadError: If there are some and none is whole, or the newest is of a newer version of this package.
        """
        damaged = []
        for _, _, path in reversed(self._found()):
            try:
                return _read_checkpoint(path, like)._replace(damaged=tuple(damaged))
            except _VersionError:
                raise
            except LoadError as error:
                damaged.append(str(error))
        if damaged:
            found = "; ".join(damaged)
            raise LoadError(f"{self.folder}: no checkpoint is whole: {found}. Remove the folder to begin anew")
        return None

    def clear(self) -> None:
        """Remove all checkpoints, the oldest first."""
        self._remove(self._found())
        self._clean()

    def _found(self):
        """(number, step, path) of every checkpoint that has its name, in the order they were written."""
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        except NotADirectoryError as error:
            raise LoadError(f"{self.folder}: expected a folder of checkpoints, got a file") from error
        matches = filter(None, map(_NAME.fullmatch, names))
        return sorted((int(match[1]), int(match[2]), self.folder / match[0]) for match in matches)

    def _remove(self, found):
        """Under another name first: a checkpoint that has its name is whole, as far as we can help it."""
        for _, _, path in found:
            with contextlib.suppress(OSError):
                os.rename(path, path.with_name(f".old-{path.name}"))
        self._clean()

    def _clean(self):
        for pattern in (".new-*", ".old-*"):
            for path in self.folder.glob(pattern):
                shutil.rmtree(path, ignore_errors=True)

    def _consolation(self):
        with contextlib.suppress(OSError, LoadError):
            if found := self._found():
                return f"the checkpoint after step {found[-1][1]} is still there ({found[-1][2]})"
        return "there is no earlier checkpoint"


def check_same(then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to go on with other settings than those of a checkpoint.

    Args:
      then: The settings of the checkpoint.
      now: Those of this run.

    Raises:
      LoadError: Which names every setting that differs, with both values.
    """
    then, now = _plain("settings", then), _plain("settings", now)
    nothing = object()

    def show(value):
        return "not set" if value is nothing else json.dumps(value, ensure_ascii=False)

    pairs = {name: (then.get(name, nothing), now.get(name, nothing)) for name in {**then, **now}}
    # NaN differs from itself, and is written like itself.
    changed = [f"{name} was {show(a)}, now {show(b)}" for name, (a, b) in pairs.items() if show(a) != show(b)]
    if changed:
        raise LoadError(f"this checkpoint is of another run: {'; '.join(changed)}")


def fingerprint(corpus: Any) -> str:
    """A short name for the documents of a corpus, whatever arrays hold them; reads all of it once, a part at a time."""
    first, last = int(corpus.indptr[0]), int(corpus.indptr[-1])
    crc = zlib.crc32(np.diff(corpus.indptr).astype(np.int64))
    for i in range(first, last, _CHUNK // 8):
        part = slice(i, min(i + _CHUNK // 8, last))
        crc = zlib.crc32(np.asarray(corpus.indices[part], np.int64), crc)
        crc = zlib.crc32(np.asarray(corpus.data[part], np.float64), crc)
    return f"{len(corpus.indptr) - 1}x{corpus.num_words}-{crc:08x}"


def _map(topics):
    """Points [K, 2] for topics [K, V], as in the report."""
    from smoothgrad_jax.app import report

    return report.plane(report.jensen_shannon(topics))[0]


def _checked(model):
    """The model as arrays of the right shapes; or a ValueError that says what is wrong."""
    lam = np.asarray(model.lam)
    if lam.ndim != 2 or lam.dtype not in (np.float32, np.float64) or not lam.size:
        raise ValueError(f"λ must be float32 or float64 of shape [V, K], got {lam.dtype} of shape {lam.shape}")
    num_words, num_topics = lam.shape
    shapes = {"lam": lam.shape, "alpha": (num_topics,), "eta": lam.shape}
    counts = {"prevalence": (num_topics,), "word_counts": (num_words,)}
    arrays = {name: np.asarray(getattr(model, name)) for name in (*shapes, *counts) if getattr(model, name) is not None}
    for name, array in arrays.items():
        if array.dtype.kind not in "fiu" or not np.isfinite(array).all():
            raise ValueError(f"{name} must be finite numbers, got {array.dtype}")
        if name in shapes:
            if _broadcast(array.shape, shapes[name]) != shapes[name]:
                raise ValueError(f"{name} must broadcast to {shapes[name]}, got shape {array.shape}")
            if not (array > 0).all():
                raise ValueError(f"{name} must be positive, got {array.min()}")
        elif array.shape != counts[name]:
            raise ValueError(f"{name} must be of shape {counts[name]}, got {array.shape}")
        elif not (array >= 0).all():
            raise ValueError(f"{name} must not be negative, got {array.min()}")
    num_docs = float(model.num_docs)
    if not 0 < num_docs < float("inf"):
        raise ValueError(f"num_docs must be a positive number, got {model.num_docs}")
    vocabulary = model.vocabulary
    if vocabulary is not None:
        vocabulary = list(map(str, vocabulary))
        if len(vocabulary) != num_words:
            raise ValueError(f"the vocabulary has {len(vocabulary)} words, but λ has {num_words} rows")
        for i, word in enumerate(vocabulary):
            if "\n" in word or not _encodes(word):
                raise ValueError(f"word {i} of the vocabulary cannot be a line of UTF-8: {word!r}")
    return model._replace(num_docs=num_docs, vocabulary=vocabulary, **arrays)


def _broadcast(shape, wanted):
    try:
        return np.broadcast_shapes(shape, wanted)
    except ValueError:
        return None


def _encodes(word):
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


def _finish(folder):
    """Give the files of a model that is whole their names; remove those of one that is not."""
    try:
        facts = _read_json(folder / "model.json.new", _MODEL)
    except LoadError:
        _discard(folder)
        return
    for name in _FILES:
        if name in facts["files"] and (folder / f"{name}.new").exists():
            os.replace(folder / f"{name}.new", folder / name)
    _sync(folder)
    os.replace(folder / "model.json.new", folder / "model.json")
    _sync(folder)
    for name in _FILES:
        if name not in facts["files"]:
            (folder / name).unlink(missing_ok=True)


def _discard(folder):
    for name in ("model.json", *_FILES):
        (folder / f"{name}.new").unlink(missing_ok=True)


def _load(folder):
    new, path = True, folder / "model.json.new"
    try:
        facts = _read_json(path, _MODEL)
    except LoadError:
        new, path = False, folder / "model.json"
        facts = _read_json(path, _MODEL)

    def find(name):
        """Its renaming may have been interrupted, or be under way."""
        beside = folder / f"{name}.new"
        return beside if new and beside.exists() else folder / name

    with _reading(path):
        files = {name: facts["files"].get(name) for name in _FILES}
        arrays = {
            name: np.array(_read_array(find(f"{name}.npy"), files[f"{name}.npy"]))
            for name in _ARRAYS
            if files[f"{name}.npy"] or name in _ARRAYS[:3]
        }
        vocabulary = None
        if files[_WORDS]:
            words = find(_WORDS)
            _verify(words, files[_WORDS])
            vocabulary = words.read_bytes().decode().split("\n")[:-1]
        settings, history = dict(facts["settings"]), list(facts["history"])
        missing = dict.fromkeys(_ARRAYS[3:])
        return _checked(
            SavedModel(
                num_docs=facts["num_docs"],
                vocabulary=vocabulary,
                settings=settings,
                history=history,
                **missing | arrays,
            )
        )


def _stamp(folder):
    """What changes when a model is replaced."""
    stamps = []
    for name in ("model.json", "model.json.new"):
        with contextlib.suppress(OSError):
            found = (folder / name).stat()
            stamps.append((name, found.st_ino, found.st_mtime_ns, found.st_size))
    return stamps


def _read_checkpoint(path, like):
    body = _read_json(path / "checkpoint.json", _CHECKPOINT)
    with _reading(path):
        facts, state = body["facts"], read_tree(path, body["files"], like)
    return Checkpoint(
        state=state,
        step=facts["step"],
        settings=body["settings"],
        history=body["history"],
        sampler=facts.get("sampler"),
        made_by=body["made_by"],
        path=path,
        damaged=(),
    )


@contextlib.contextmanager
def _reading(path) -> Iterator[None]:
    """Whatever a file's content leads to is a LoadError."""
    try:
        yield
    except LoadError:
        raise
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise LoadError(f"{path}: damaged, or not written by this package: {error}") from error


@contextlib.contextmanager
def _saving(path, consolation) -> Iterator[None]:
    """Whatever the system refuses is a SaveError, which says what is left."""
    try:
        yield
    except OSError as error:
        failure = SaveError(f"{path}: could not be written: {error.strerror or error}; {consolation()}")
        failure.errno = error.errno
        raise failure from error


def _make(folder):
    """A folder, and those it is in, durably."""
    if not folder.is_dir():
        _make(folder.parent)
        folder.mkdir()
        _sync(folder.parent)


def _sync(folder):
    """Make the names in a folder durable, where the system can."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write(path, chunks):
    """Bytes into a new file, durably; returns its size and checksum."""
    size = crc = 0
    with open(path, "xb") as file:
        for chunk in chunks:
            file.write(chunk)
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "crc32": f"{crc:08x}"}


def _write_array(path, array):
    """An array, or pieces of one along its first axis, as ``.npy``."""
    pieces = array if isinstance(array, list) else [array]
    first = pieces[0]
    kind = first.dtype.name
    stored = np.dtype(np.uint16) if kind == "bfloat16" else first.dtype
    shape = (sum(map(len, pieces)), *first.shape[1:]) if isinstance(array, list) else first.shape
    header = io.BytesIO()
    about = {"descr": np.lib.format.dtype_to_descr(stored), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, about)
    contents = (np.ascontiguousarray(piece).reshape(-1).view(np.uint8) for piece in pieces)
    return {"dtype": kind, **_write(path, (header.getvalue(), *contents))}


def _verify(path, entry):
    """Read a file once; a LoadError if it is not what was written."""
    if not entry:
        raise LoadError(f"{path}: the description of this folder does not name it")
    size = crc = 0
    try:
        with open(path, "rb") as file:
            while chunk := file.read(_CHUNK):
                size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    except FileNotFoundError as error:
        raise LoadError(f"{path}: missing") from error
    if size != entry["bytes"]:
        raise LoadError(f"{path}: damaged: expected {entry['bytes']} bytes, got {size}")
    if f"{crc:08x}" != entry["crc32"]:
        raise LoadError(f"{path}: damaged: its checksum is {crc:08x}, expected {entry['crc32']}")


def _read_array(path, entry):
    """A memory-mapped array, after its file was verified."""
    _verify(path, entry)
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    if not isinstance(array, np.ndarray):
        raise LoadError(f"{path}: expected one array, got an archive")
    if entry["dtype"] == "bfloat16":
        import jax.numpy as jnp

        return array.view(jnp.bfloat16)
    return array


def _to_json(body):
    """JSON that holds its own checksum."""
    return (json.dumps({**body, "checksum": _checksum(body)}, indent=1) + "\n").encode()


def _read_json(path, kind):
    try:
        body = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise LoadError(f"{path}: missing; expected a {kind}, which has one") from error
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(f"{path}: damaged, or not a {kind}: {error}") from error
    if not isinstance(body, dict) or body.get("format") != kind:
        raise LoadError(f"{path}: not a {kind}")
    # This is how every version has to do it, so that one that is damaged is not taken for one that is newer.
    if body.pop("checksum", None) != _checksum(body):
        raise LoadError(f"{path}: damaged, or changed by hand: its checksum is another")
    version, ours = body.get("version"), _VERSIONS[kind]
    if version != ours:
        older = isinstance(version, int) and version < ours
        what = "finish it with the version that wrote it, or start anew" if older else "upgrade it"
        raise _VersionError(f"{path}: format version {version}, this package reads version {ours}: {what}")
    return body


def _checksum(body):
    return f"{zlib.crc32(json.dumps(body, sort_keys=True).encode()):08x}"


def _plain(name, value):
    """What comes out again when this is written as JSON."""

    def convert(value):
        if isinstance(value, np.generic | np.ndarray):
            return value.tolist()
        raise TypeError(f"{type(value).__name__} {value!r}")

    try:
        return json.loads(json.dumps(value, default=convert))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} must be what JSON can hold, got {error}") from error


def _made_by():
    package = importlib.import_module("smoothgrad_jax")
    versions = {"smoothgrad_jax": package.__version__, "python": platform.python_version(), "numpy": np.__version__}
    if "jax" in sys.modules:  # a model can be read and written without
        versions["jax"] = sys.modules["jax"].__version__
    return versions | {"machine": platform.machine()}
