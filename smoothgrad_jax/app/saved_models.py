"""Models on disk: plain ``.npy`` arrays and JSON. Reading a model executes nothing.

A model is a folder:

| file                            | content                                                                           |
|---------------------------------|-----------------------------------------------------------------------------------|
| ``model.json``                  | format, version, kind of model, D, settings, history, quality and labels of the   |
|                                 | topics (both optional); size and checksum of every other file                     |
| ``lam.npy``                     | λ [V, K], float32 or float64                                                      |
| ``alpha.npy``, ``eta.npy``      | priors: α of shape () or [K], η of any shape that broadcasts to λ                 |
| ``prevalence.npy`` (optional)   | expected fraction of the corpus per topic [K]                                     |
| ``word_counts.npy`` (optional)  | occurrences of each word in the corpus [V]                                        |
| ``vocabulary.txt`` (optional)   | the V words, UTF-8, one per line                                                  |

A model is replaced atomically. The new files are written first, as ``NAME.new``, with ``model.json.new`` last. Once
``model.json.new`` is complete, the new files are the model, also if the process is killed while it renames them. Other
files in the folder are not changed, for example those in ``checkpoints/``.
"""

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from smoothgrad_jax.app.settings import METHODS
from smoothgrad_jax.app.topic_labels import checked_labels
from smoothgrad_jax.data import durable_files, schema, text
from smoothgrad_jax.data.durable_files import Entry, LoadError

if TYPE_CHECKING:
    import scipy.sparse

    from smoothgrad_jax.data.corpus import Corpus
    from smoothgrad_jax.models.lda.model import LDA  # importing jax would slow down commands that only read a model
    from smoothgrad_jax.models.topic_quality import TopicQuality

_FORMAT, _VERSION, _KIND = "smoothgrad model", 1, "lda"
_REQUIRED, _OPTIONAL = ("lam", "alpha", "eta"), ("prevalence", "word_counts")
_VOCABULARY = "vocabulary.txt"
_CONTENT = schema.record(
    {
        "num_docs": schema.number(0, above=True),
        "settings": schema.record(
            {},
            {
                "tokens": schema.optional(text.STORED_TOKENS),
                "local_tol": schema.number(0),
                "local_max_iter": schema.integer(1),
                "method": schema.one_of(*METHODS),
            },
        ),
        "history": schema.list_of(
            schema.record(
                {}, dict.fromkeys(("step", "passes", "seconds", "rate", "score"), schema.optional(schema.real))
            )
        ),
        "files": schema.mapping(durable_files.ENTRY),
    }
)
_OTHER_FOLDERS = {  # a file of each, and the rest of a message
    "sweep.json": "a sweep; its models are in its folder runs",
    "manifest.json": "a corpus; fit makes a model of it",
}
_FILES = (*(f"{name}.npy" for name in (*_REQUIRED, *_OPTIONAL)), _VOCABULARY)

Documents: TypeAlias = "Corpus | npt.NDArray | scipy.sparse.sparray | scipy.sparse.spmatrix"


class SavedModel(NamedTuple):
    """A trained topic model.

    Attributes:
      lam: λ [V, K].
      alpha: α, one number or [K].
      eta: η, one number or an array that broadcasts to λ.
      num_docs: D.
      vocabulary: The V words, or None.
      settings: The settings of the run, as values that JSON can represent.
      history: Records of the run, such as step and score.
      prevalence: The expected fraction of the corpus per topic [K], or None.
      word_counts: Occurrences of each word in the corpus [V], or None.
      quality: Coherence and other measures of the topics on training documents, or None.
      labels: Names of topics by topic number, for some or all topics, or None; see
        :mod:`smoothgrad_jax.app.topic_labels`.
    """

    lam: npt.NDArray
    alpha: npt.ArrayLike
    eta: npt.ArrayLike
    num_docs: float
    vocabulary: list[str] | None
    settings: dict[str, Any]
    history: list[dict[str, Any]]
    prevalence: npt.NDArray | None = None
    word_counts: npt.NDArray | None = None
    quality: "TopicQuality | None" = None
    labels: dict[int, str] | None = None

    def __repr__(self) -> str:
        """Return the sizes; all values of a real model would be a hundred thousand characters."""
        num_words, num_topics = np.shape(self.lam)
        return f"SavedModel({num_topics:,} topics, {num_words:,} words, {self.num_docs:,.0f} training documents)"

    def topics(self) -> npt.NDArray[np.float64]:
        """Return E[β] as [K, V]: one row per topic, which sums to one."""
        lam = np.asarray(self.lam, np.float64)
        return (lam / lam.sum(0)).T

    def topic_proportions(self) -> npt.NDArray[np.float64]:
        """Return the expected fraction of the corpus per topic [K]; computed from λ if the model does not store it."""
        mass = np.asarray(self.lam).sum(0, dtype=np.float64) if self.prevalence is None else self.prevalence
        return np.asarray(mass, np.float64) / np.sum(mass)

    def words(self) -> list[str]:
        """Return the vocabulary, or the word numbers as text if the model has no vocabulary."""
        return list(self.vocabulary) if self.vocabulary is not None else [str(w) for w in range(len(self.lam))]

    def topic_names(self) -> list[str]:
        """Return one distinct name per topic: ``"topic 3: galaxies"``, or ``"topic 3"`` if the topic has no label."""
        labels = self.labels or {}
        return [f"topic {k}: {labels[k]}" if k in labels else f"topic {k}" for k in range(np.shape(self.lam)[1])]

    def top_words(self, n: int = 10) -> list[list[tuple[str, float]]]:
        """Return the n most probable words per topic with their probabilities; ties in the order of the vocabulary."""
        from smoothgrad_jax.models.topic_quality import top_words  # imports scipy

        lam, words = np.asarray(self.lam), self.words()
        best = top_words(lam, n)
        p = np.take_along_axis(lam, best.T, axis=0).T / lam.sum(0, dtype=np.float64)[:, None]
        return [
            [(words[w], q) for w, q in zip(*topic, strict=True)]
            for topic in zip(best.tolist(), p.tolist(), strict=True)
        ]

    def lda(self) -> "LDA":
        """Return the priors and the options of the local step as a :class:`smoothgrad_jax.LDA`.

        An option that the settings do not contain has the default of that class.
        """
        from smoothgrad_jax.models.lda.methods import named_method
        from smoothgrad_jax.models.lda.model import LDA

        setting_of = {"tol": "local_tol", "max_iter": "local_max_iter", "method": "method"}
        options = {name: self.settings[setting] for name, setting in setting_of.items() if setting in self.settings}
        if "method" in options:
            options["method"] = named_method(options["method"], sweeps=1)  # inference after training does not sample
        return LDA(self.alpha, self.eta, self.num_docs, **options)

    def transform(self, documents: "Documents", **options: Any) -> npt.NDArray:
        """Return E[θ] [D, K]; the arguments are those of :func:`smoothgrad_jax.models.lda.inference.proportions`."""
        import jax

        from smoothgrad_jax.models.lda import inference

        lam = np.asarray(self.lam, jax.dtypes.canonicalize_dtype(self.lam.dtype))
        return inference.proportions(self.lda(), lam, documents, **options)

    def to_pyldavis(self, corpus: "Documents | None" = None, **options: Any) -> object:
        """Return the topics prepared for pyLDAvis: ``pyLDAvis.save_html(model.to_pyldavis(), "topics.html")``.

        Args:
          corpus: Documents that determine the sizes of topics and words; by default the totals of the training
            documents, if the model stores them.
          **options: Of ``pyLDAvis.prepare``. The default of ``mds`` is the map of the report, because the
            default of pyLDAvis 3.4 fails with recent NumPy.

        Raises:
          ImportError: If pyLDAvis is not installed.
        """
        try:
            import pyLDAvis
        except ImportError as error:
            raise ImportError("to_pyldavis needs pyLDAvis: pip install pyLDAvis") from error
        if corpus is None:
            # One document with the statistics of the corpus: pyLDAvis shows only the totals per topic and per word.
            words = np.asarray(self.lam).sum(1, dtype=np.float64) if self.word_counts is None else self.word_counts
            theta, lengths = self.topic_proportions()[None], np.array([np.sum(words)])
        else:
            from smoothgrad_jax.data.corpus import Corpus

            corpus = Corpus.of(corpus)
            theta, words, lengths = self.transform(corpus).astype(np.float64), corpus.word_counts(), corpus.lengths()
        return pyLDAvis.prepare(
            topic_term_dists=self.topics(),
            doc_topic_dists=theta / theta.sum(1, keepdims=True),
            doc_lengths=lengths,
            vocab=self.words(),
            term_frequency=words,
            **{"mds": _topic_map} | options,
        )

    def to_octis(
        self, documents: "Documents", test: "Documents | None" = None, *, top_words: int = 10
    ) -> dict[str, Any]:
        """Return the dictionary that the metrics of OCTIS take: ``TopicDiversity(topk=10).score(model.to_octis(X))``.

        gensim computes coherence from the same words; ``tokens`` are the documents as lists of words::

            from gensim.corpora import Dictionary
            from gensim.models import CoherenceModel

            topics = model.to_octis(X)["topics"]
            found = CoherenceModel(topics=topics, texts=tokens, dictionary=Dictionary(tokens), coherence="c_npmi")
            found.get_coherence()

        Args:
          documents: Training documents.
          test: Test documents.
          top_words: Number of words per topic; the largest ``topk`` that a metric can have.

        Returns:
          ``topics``, lists of words; ``topic-word-matrix`` [K, V]; ``topic-document-matrix`` [K, D]; and with test
          documents ``test-topic-document-matrix`` [K, D].
        """
        octis = {
            "topics": [[word for word, _ in topic] for topic in self.top_words(top_words)],
            "topic-word-matrix": self.topics(),
            "topic-document-matrix": self.transform(documents).T,
        }
        return octis if test is None else octis | {"test-topic-document-matrix": self.transform(test).T}


def save_model(path: str | os.PathLike, model: SavedModel) -> None:
    """Write a model to a folder, which is created if necessary; an existing model is replaced atomically.

    Raises:
      ValueError: If the parts of the model do not match.
      SaveError: If the model cannot be written (disk full, no permission, …). A previous model is unchanged.
    """
    model = checked(model)
    lines = [text.word_line(word) for word in model.vocabulary or []]
    folder = Path(path)
    metadata: dict[str, Any] = {
        "format": _FORMAT,
        "version": _VERSION,
        "model": _KIND,
        "made_by": durable_files.package_versions(),
        "num_docs": model.num_docs,
        "settings": durable_files.json_values("settings", model.settings),
        "history": durable_files.json_values("history", model.history),
    }
    if model.quality is not None:
        metadata["quality"] = durable_files.json_values("quality", model.quality.as_json())
    if model.labels:
        metadata["labels"] = {str(k): label for k, label in model.labels.items()}
    remedy = "the previous content is unchanged; free some space, or choose another folder"
    with durable_files.saving(folder, lambda: remedy):
        durable_files.make_folder(folder)
        _complete_renaming(folder)
        try:
            files = {}
            for name in (*_REQUIRED, *_OPTIONAL):
                if getattr(model, name) is not None:
                    path = folder / f"{name}.npy.new"
                    files[f"{name}.npy"] = durable_files.write_array(path, getattr(model, name))
            if model.vocabulary is not None:
                files[_VOCABULARY] = durable_files.write_file(folder / f"{_VOCABULARY}.new", [b"".join(lines)])
            durable_files.sync_folder(folder)
            durable_files.write_json(folder / "model.json.new", metadata | {"files": files})
            durable_files.sync_folder(folder)
        except BaseException:
            _remove_new_files(folder)
            raise
        _complete_renaming(folder)


def load_model(path: str | os.PathLike) -> SavedModel:
    """Read a model from its folder.

    Raises:
      LoadError: If the folder has no model, or the model is damaged or of a newer version.
    """
    folder = Path(path)
    if not folder.is_dir():
        found = ", got a file" if folder.exists() else "; there is no such folder"
        raise LoadError(f"{folder}: expected the folder of a model{found}")
    for file, content in _OTHER_FOLDERS.items():
        if (folder / file).exists() and not (folder / "model.json").exists():
            raise LoadError(f"{folder}: expected the folder of a model, got {content}")
    started_at = _modification(folder)
    try:
        return _load(folder)
    except LoadError:
        if _modification(folder) == started_at:
            raise
    return _load(folder)  # another process replaced the model while this one read it


def described_files(path: str | os.PathLike) -> dict[str, Entry]:
    """Return the entries of the files of a model, or raise a :class:`LoadError`."""
    return durable_files.read_json(Path(path) / "model.json", _FORMAT, _VERSION, _CONTENT)["files"]


def _topic_map(topics: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return points [K, 2] for topics [K, V], as in the report."""
    from smoothgrad_jax.app import topic_map  # imports scipy

    return topic_map.classical_scaling(topic_map.jensen_shannon(np.asarray(topics)))[0]  # pyLDAvis passes a DataFrame


def checked(model: SavedModel) -> SavedModel:
    """Return the model with NumPy arrays.

    Raises:
      ValueError: If the parts of the model do not match, or a value is out of range; the message names the part.
    """
    lam = np.asarray(model.lam)
    if lam.ndim != 2 or lam.dtype not in (np.float32, np.float64) or not lam.size:
        raise ValueError(f"λ must be float32 or float64 of shape [V, K], got {lam.dtype} of shape {lam.shape}")
    num_words, num_topics = lam.shape
    shapes = {"lam": lam.shape, "alpha": (num_topics,), "eta": lam.shape}
    counts = {"prevalence": (num_topics,), "word_counts": (num_words,)}
    arrays: dict[str, Any] = {
        name: np.asarray(getattr(model, name)) for name in (*shapes, *counts) if getattr(model, name) is not None
    }
    for name, array in arrays.items():
        if array.dtype.kind not in "fiu" or not np.isfinite(array).all():
            raise ValueError(f"{name} must be finite numbers, got {array.dtype}")
        if name in shapes:
            if not _broadcasts(array.shape, shapes[name]):
                raise ValueError(f"{name} must broadcast to {shapes[name]}, got shape {array.shape}")
            if not (array > 0).all():
                raise ValueError(f"{name} must be positive, got {array.min()}")
        elif array.shape != counts[name]:
            raise ValueError(f"{name} must have shape {counts[name]}, got {array.shape}")
        elif not (array >= 0).all() or not array.any():
            raise ValueError(f"{name} must not be negative, and not all 0, got {array.min()} to {array.max()}")
    if model.quality is not None and np.shape(model.quality.npmi) != (num_topics,):
        raise ValueError(f"quality must be that of {num_topics} topics, got {np.size(model.quality.npmi)}")
    num_docs = float(model.num_docs)
    if not 0 < num_docs < float("inf"):
        raise ValueError(f"num_docs must be a positive number, got {model.num_docs}")
    vocabulary = None if model.vocabulary is None else list(map(str, model.vocabulary))
    if vocabulary is not None and len(vocabulary) != num_words:
        raise ValueError(f"the vocabulary must have {num_words} words, one per row of λ, got {len(vocabulary)}")
    labels = checked_labels(model.labels, num_topics) if model.labels else None
    return model._replace(num_docs=num_docs, vocabulary=vocabulary, labels=labels, **arrays)


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    try:
        return np.broadcast_shapes(shape, to) == to
    except ValueError:
        return False


def _complete_renaming(folder: Path) -> None:
    """Rename the new files of a complete model; remove those of an incomplete one."""
    try:
        metadata = durable_files.read_json(folder / "model.json.new", _FORMAT, _VERSION)
    except LoadError:
        _remove_new_files(folder)
        return
    for name in _FILES:
        if name in metadata["files"] and (folder / f"{name}.new").exists():
            os.replace(folder / f"{name}.new", folder / name)
    durable_files.sync_folder(folder)
    os.replace(folder / "model.json.new", folder / "model.json")
    durable_files.sync_folder(folder)
    for name in _FILES:
        if name not in metadata["files"]:
            (folder / name).unlink(missing_ok=True)


def _remove_new_files(folder: Path) -> None:
    for name in ("model.json", *_FILES):
        (folder / f"{name}.new").unlink(missing_ok=True)


def _load(folder: Path) -> SavedModel:
    is_new, path = True, folder / "model.json.new"
    try:
        metadata = durable_files.read_json(path, _FORMAT, _VERSION)
    except LoadError:
        is_new, path = False, folder / "model.json"
        metadata = durable_files.read_json(path, _FORMAT, _VERSION)
    if metadata.get("model") != _KIND:
        raise LoadError(f"{path}: this package reads models of the kind {_KIND!r}, got {metadata.get('model')!r}")

    def find(name: str) -> Path:
        """Return the path of a file, which may not have been renamed yet."""
        new = folder / f"{name}.new"
        return new if is_new and new.exists() else folder / name

    with durable_files.loading(path):
        _CONTENT(metadata, "")
        files = {name: metadata["files"].get(name) for name in _FILES}
        arrays: dict[str, Any] = {
            name: np.array(durable_files.read_array(find(f"{name}.npy"), files[f"{name}.npy"]))
            for name in (*_REQUIRED, *_OPTIONAL)
            if files[f"{name}.npy"] or name in _REQUIRED
        }
        vocabulary = None
        if files[_VOCABULARY]:
            durable_files.verify(find(_VOCABULARY), files[_VOCABULARY])
            vocabulary = durable_files.read_bytes(find(_VOCABULARY)).decode().split("\n")[:-1]
        settings, history = dict(metadata["settings"]), list(metadata["history"])
        model = SavedModel(
            num_docs=metadata["num_docs"], vocabulary=vocabulary, settings=settings, history=history, **arrays
        )
        if metadata.get("quality") is not None:
            from smoothgrad_jax.models.topic_quality import TopicQuality  # scipy, which other models do not need

            model = model._replace(quality=TopicQuality.from_json(metadata["quality"]))
        if metadata.get("labels") is not None:
            model = model._replace(labels={int(k): label for k, label in dict(metadata["labels"]).items()})
        return checked(model)


def _modification(folder: Path) -> list[tuple[str, int, int, int]]:
    """Return values that change when a model is replaced."""
    found = []
    for name in ("model.json", "model.json.new"):
        with contextlib.suppress(OSError):
            status = (folder / name).stat()
            found.append((name, status.st_ino, status.st_mtime_ns, status.st_size))
    return found
