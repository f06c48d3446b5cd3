"""A model read from disk equals the one written, or reading raises an error that names the damage."""

import contextlib
import errno
import itertools
import json
import math
import os
import pickle
import shutil
import subprocess
import sys
import types
import warnings
import zlib
from pathlib import Path

import jax
import numpy as np
import oracle
import pytest
from disk import Disk, Killed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smoothgrad_jax import Corpus, init_topics, npmi, top_words
from smoothgrad_jax.app.saved_models import SavedModel, load_model, save_model
from smoothgrad_jax.data import durable_files
from smoothgrad_jax.data.durable_files import LoadError, SaveError
from smoothgrad_jax.models.topic_quality import TopicQuality

V, K, D = 80, 4, 120


@pytest.fixture(name="X")
def some_documents(rng):
    return rng.poisson(rng.gamma(0.2, 1, (D, V)))


def a_model(num_words=7, num_topics=3, seed=0, **change):
    rng = np.random.default_rng(seed)
    lam = rng.gamma(1, 1, (num_words, num_topics)).astype(np.float32) + 0.01
    words = [f"wört {w}\r\u2028" for w in range(num_words)]  # line breaks of str.splitlines, but not of the file
    history = [{"step": 10, "score": -7.25}, {"step": 20, "score": math.nan}]
    model = SavedModel(lam, 0.1, np.float32(0.2), 120, words, {"window": math.inf, "key": [0, 1]}, history)
    return model._replace(**change)


QUALITY = TopicQuality(np.array([0.25, -0.1, 0.0]), 2 / 3, 2.9, [(0, 2)], {1: "incoherent", 2: "flat"}, 120)


def assert_equal(one, other):
    for name in ("lam", "alpha", "eta", "num_docs", "prevalence", "word_counts"):
        a, b = (getattr(each, name) for each in (one, other))
        assert (a is None) == (b is None), name
        np.testing.assert_array_equal(a, b, err_msg=name, strict=a is not None and np.ndim(a) > 0)
    assert one.vocabulary == other.vocabulary
    assert repr(one.quality) == repr(other.quality)
    assert one.labels == other.labels
    assert repr((one.settings, one.history)) == repr((other.settings, other.history))  # NaN differs from itself


MODELS = {
    "plain": a_model(),
    "no words": a_model(vocabulary=None),
    "float64": a_model(lam=np.random.default_rng(1).random((7, 3)) + 1e-300),
    "priors": a_model(alpha=np.array([0.1, 0.2, 0.3]), eta=np.full((7, 1), 0.5, np.float32)),
    "counted": a_model(prevalence=np.array([0.5, 0.5, 0.0]), word_counts=np.arange(7)),
    "measured": a_model(quality=QUALITY),
    "labelled": a_model(labels={0: "wörter & “more”", 2: "🦜 موضوع"}),
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_model_is_read_as_it_was_written(tmp_path, model):
    save_model(tmp_path / "deep" / "model", model)
    assert_equal(load_model(tmp_path / "deep" / "model"), model)


def test_a_model_is_replaced_and_other_files_in_its_folder_stay(tmp_path):
    save_model(tmp_path, MODELS["counted"])
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "report.html").touch()
    save_model(tmp_path, MODELS["no words"])
    assert_equal(load_model(tmp_path), MODELS["no words"])
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"model.json", "lam.npy", "alpha.npy", "eta.npy", "checkpoints", "report.html"}


@pytest.mark.parametrize("error", [None, errno.ENOSPC])
def test_killed_or_out_of_space_at_every_operation_of_saving_a_model(tmp_path, error):
    old, new, third = MODELS["counted"], a_model(9, 2, seed=5), a_model(4, 4, seed=6)
    outcomes = []
    for n in itertools.count():
        folder = tmp_path / str(n)
        with pytest.MonkeyPatch.context() as patch:
            Disk(patch)
            save_model(folder, old)
        with pytest.MonkeyPatch.context() as patch:
            disk = Disk(patch, n, error)
            failure = None
            try:
                save_model(folder, new)
            except (Killed, SaveError) as caught:
                failure = caught
            if len(disk.log) <= n:
                break
        if isinstance(failure, SaveError):
            assert failure.errno == error
            assert "could not be written: No space left on device; the previous content is unchanged" in str(failure)
        found = load_model(folder)
        outcomes.append(len(found.lam))
        assert_equal(found, old if len(found.lam) == 7 else new)
        with pytest.MonkeyPatch.context() as patch:
            Disk(patch)
            save_model(folder, third)
        assert_equal(load_model(folder), third)
        assert not list(folder.glob("*.new"))
    assert len(outcomes) > 15
    assert set(outcomes) == {7, 9}
    if error is None:
        assert outcomes == sorted(outcomes)


PLAIN = """
import resource, sys
import numpy as np
from smoothgrad_jax.app.saved_models import SavedModel, load_model, save_model
from smoothgrad_jax.data.durable_files import SaveError
folder = sys.argv[1]
small, large = (SavedModel(np.ones((n, 10), np.float32), 0.1, 0.1, 5, None, {}, []) for n in (10, 10_000))
save_model(folder, small)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    save_model(folder, large)
except SaveError as error:
    print(error)
assert len(load_model(folder).lam) == 10
assert "jax" not in sys.modules
"""


def test_a_file_size_limit_is_an_error_and_jax_is_not_imported(tmp_path):
    program = [sys.executable, "-W", "error", "-c", PLAIN, str(tmp_path / "model")]
    root = Path(__file__).parents[2]
    done = subprocess.run(program, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "File too large; the previous content is unchanged" in done.stdout
    assert not list(tmp_path.rglob("*.new"))


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("healthy")
    save_model(folder, MODELS["counted"])
    return folder


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_a_model_or_a_load_error(healthy, tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("harmed") / "model"
    shutil.copytree(healthy, folder)
    path = data.draw(st.sampled_from(sorted(folder.iterdir())))
    content = bytearray(path.read_bytes())
    kind = data.draw(st.sampled_from(["flip", "cut", "insert", "replace", "lose", "folder", "beside"]))
    place = data.draw(st.integers(0, len(content) - 1))
    junk = data.draw(st.binary(max_size=40))
    if kind == "flip":
        content[place] ^= data.draw(st.integers(1, 255))
    elif kind == "cut":
        del content[place:]
    elif kind == "insert":
        content[place:place] = junk + b"x"
    elif kind == "replace":
        content = junk
    if kind in ("lose", "folder"):
        path.unlink()
        if kind == "folder":
            path.mkdir()
    else:
        path.with_name(path.name + ".new" * (kind == "beside")).write_bytes(content if kind != "beside" else junk)
    harmless = kind == "beside"  # an incomplete new model is ignored
    found = None
    with contextlib.nullcontext() if harmless else contextlib.suppress(LoadError):
        found = load_model(folder)
    if found is not None:  # white space in JSON may have changed
        assert harmless or path.name == "model.json"
        assert_equal(found, MODELS["counted"])


def test_an_edited_description_is_rejected(tmp_path):
    save_model(tmp_path, a_model())
    path = tmp_path / "model.json"
    text = path.read_text()
    assert '"step": 10' in text
    path.write_text(text.replace('"step": 10', '"step": 11'))
    with pytest.raises(LoadError, match=r"model\.json: damaged, or edited by hand"):
        load_model(tmp_path)


class Evil:
    """An object whose unpickling runs code."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("objects", r"lam\.npy: damaged: expected an array, got"),
        ("pickle", r"lam\.npy: damaged: expected an array, got"),
        ("archive", r"lam\.npy: damaged: expected one array, got an archive"),
        ("shape", r"lam\.npy: damaged: expected an array, got"),
        ("negative", r"model\.json: .* lam must be positive"),
        ("infinite", r"model\.json: .* lam must be finite"),
    ],
)
def test_a_forged_model_executes_nothing(tmp_path, monkeypatch, how, message):
    monkeypatch.chdir(tmp_path)
    save_model("model", a_model())
    path = Path("model/lam.npy")
    if how == "objects":
        np.save(path, np.array([[Evil()]]), allow_pickle=True)
    elif how == "pickle":
        path.write_bytes(pickle.dumps(Evil()))
    elif how == "archive":
        with path.open("wb") as file:
            np.savez(file, lam=a_model().lam)
    elif how == "shape":
        about = {"descr": "<f4", "fortran_order": False, "shape": (1 << 50, 3)}
        with path.open("wb") as file:
            np.lib.format.write_array_header_1_0(file, about)
    else:
        np.save(path, a_model().lam * (-1 if how == "negative" else math.inf))
    metadata = json.loads(Path("model/model.json").read_text())
    content = path.read_bytes()
    metadata["files"]["lam.npy"] |= {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}
    metadata.pop("checksum")
    Path("model/model.json").unlink()
    durable_files.write_json("model/model.json", metadata)
    with pytest.raises(LoadError, match=message):
        load_model("model")
    assert not Path("ran").exists()


@pytest.mark.parametrize("labels", [["a"], "a", 7, {"x": "a"}, {"3": "a"}, {"1": None}, {"1": "a\x1b[31m"}])
def test_forged_labels_are_not_loaded(tmp_path, labels):
    save_model(tmp_path, a_model())
    metadata = json.loads((tmp_path / "model.json").read_text())
    metadata.pop("checksum")
    (tmp_path / "model.json").unlink()
    durable_files.write_json(tmp_path / "model.json", metadata | {"labels": labels})
    with pytest.raises(LoadError, match=r"model\.json: "):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"settings": {"tokens": {"stop_words": "/etc/passwd"}}}, r"settings\.tokens\.stop_words must be a list, got"),
        ({"settings": {"tokens": {"ngram_range": [1]}}}, r"settings\.tokens\.ngram_range must be a list of 2"),
        ({"settings": {"method": "magic"}}, r"settings\.method must be 'sampled' or"),
        ({"settings": 3}, "settings must be an object, got 3"),
        ({"history": [{"score": "best"}]}, r"history\[0\]\.score must be a number, got 'best'"),
        ({"num_docs": "many"}, "num_docs must be a finite number above 0"),
        ({"files": {"lam.npy": []}}, r"files\.lam\.npy must be an object"),
    ],
)
def test_a_forged_description_is_refused_by_the_name_of_its_entry(tmp_path, change, message):
    """A model holds its stop words: the name of a file would be read on the computer of whoever loads the model."""
    save_model(tmp_path, a_model())
    metadata = json.loads((tmp_path / "model.json").read_text())
    del metadata["checksum"]
    (tmp_path / "model.json").unlink()
    durable_files.write_json(tmp_path / "model.json", metadata | change)
    with pytest.raises(LoadError, match=rf"model\.json: .*{message}"):
        load_model(tmp_path)


@pytest.mark.parametrize("name", ["lam.npy", "vocabulary.txt", "model.json"])
@pytest.mark.parametrize("target", [None, "/dev/zero", "/etc/passwd"])
def test_a_pipe_a_device_or_a_file_elsewhere_is_not_read(tmp_path, name, target):
    save_model(tmp_path, a_model())
    (tmp_path / name).unlink()
    if target is None:
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).symlink_to(target)
    with pytest.raises(LoadError, match=rf"{name}: (expected a regular file|is a link that leads out of its folder)"):
        load_model(tmp_path)


def test_folders_without_a_model_are_named(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for name, metadata in {
        "foreign": {"format": "other", "version": 1},
        "newer": {"format": "smoothgrad model", "version": 2},
        "network": {"format": "smoothgrad model", "version": 1, "model": "network"},
    }.items():
        (tmp_path / name).mkdir()
        durable_files.write_json(tmp_path / name / "model.json", metadata)
    for name, file in (("sweep", "sweep.json"), ("corpus", "manifest.json")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).touch()
    for name, message in (
        ("sweep", "got a sweep; its models are in its folder runs"),
        ("corpus", "got a corpus; fit makes a model of it"),
        ("nothing", "nothing: expected the folder of a model; there is no such folder"),
        ("file", "expected the folder of a model, got a file"),
        ("empty", r"model.json: missing; every smoothgrad model has this file"),
        ("foreign", "model.json: not a smoothgrad model"),
        ("newer", "format version 2, this package reads version 1: upgrade"),
        ("network", "this package reads models of the kind 'lda', got 'network'"),
    ):
        with pytest.raises(LoadError, match=message) as failure:
            load_model(tmp_path / name)
        assert str(tmp_path / name) in str(failure.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lam": np.ones(3)}, r"λ must be float32 or float64 of shape \[V, K\], got float64 of shape \(3,\)"),
        ({"lam": np.ones((7, 3), int)}, "λ must be float32 or float64"),
        ({"lam": np.zeros((7, 3))}, "lam must be positive, got 0.0"),
        ({"alpha": np.ones(2)}, r"alpha must broadcast to \(3,\), got shape \(2,\)"),
        ({"eta": np.ones((2, 7, 3))}, "eta must broadcast"),
        ({"eta": math.nan}, "eta must be finite"),
        ({"num_docs": 0}, "num_docs must be a positive number, got 0"),
        ({"vocabulary": ["a"]}, "the vocabulary must have 7 words, one per row of λ, got 1"),
        ({"vocabulary": [*"abcdef", "g\nh"]}, r"the word 'g\\nh' cannot be a line of vocabulary.txt"),
        ({"vocabulary": [*"abcdef", "\ud800"]}, r"the word '\\ud800' cannot be a line of vocabulary.txt"),
        ({"prevalence": np.ones(7)}, r"prevalence must have shape \(3,\)"),
        ({"word_counts": -np.ones(7)}, "word_counts must not be negative"),
        ({"quality": QUALITY._replace(npmi=np.zeros(2))}, "quality must be that of 3 topics, got 2"),
        ({"labels": {3: "a"}}, "labels: expected topics from 0 to 2, got 3"),
        ({"labels": {True: "a"}}, "labels: expected topics from 0 to 2, got True"),
        ({"labels": {1: 5}}, "label of topic 1: expected text, got 5"),
        ({"labels": {1: " "}}, "label of topic 1: expected 1 to 80 characters, got 0"),
        ({"labels": {1: "long" * 21}}, "label of topic 1: expected 1 to 80 characters, got 84"),
        ({"labels": {1: "a\x1b[31m"}}, r"label of topic 1: contains the control character U\+001B; remove it"),
        ({"labels": {1: "a\u202eb"}}, r"label of topic 1: contains the control character U\+202E"),
        ({"labels": {1: "\udc80"}}, r"label of topic 1: contains the control character U\+DC80"),
        ({"settings": {"a": {1, 2}}}, "settings must be a value that JSON can represent, got set"),
    ],
)
def test_a_model_whose_parts_do_not_match_is_not_saved(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        save_model(tmp_path / "model", a_model(**change))
    assert not (tmp_path / "model").exists()


def test_topics_have_distinct_names_with_their_labels():
    model = a_model(labels={2: "galaxies", 0: "galaxies"})
    assert model.topic_names() == ["topic 0: galaxies", "topic 1", "topic 2: galaxies"]
    assert a_model().topic_names() == ["topic 0", "topic 1", "topic 2"]


def test_a_model_is_shown_by_its_sizes():
    shown = repr(a_model(num_words=12_345, num_topics=6, num_docs=7600.0))
    assert shown == "SavedModel(6 topics, 12,345 words, 7,600 training documents)"


def test_topics_and_their_words():
    lam = np.array([[1, 6], [3, 1], [3, 1], [1, 2]], np.float32)
    model = SavedModel(lam, 0.1, 0.1, 5, ["a", "b", "c", "d"], {}, [])
    assert model.top_words(2) == [[("b", 0.375), ("c", 0.375)], [("a", 0.6), ("d", 0.2)]]
    assert [word for word, _ in model._replace(vocabulary=None).top_words(1)[1]] == ["0"]
    assert len(model.top_words(100)[0]) == 4


def test_a_saved_model_infers_documents_and_prepares_pyldavis(X, monkeypatch):
    lam = np.asarray(init_topics(jax.random.key(0), V, K))
    model = SavedModel(lam, 0.3, 0.2, D, None, {}, [])
    X[17] = 0
    theta = model.transform(X)
    documents = [(np.flatnonzero(x), x[x > 0]) for x in X]
    _, expected = oracle.local_step(0.3, lam.astype(np.float64), documents, D)
    np.testing.assert_allclose(theta, expected / expected.sum(1, keepdims=True), rtol=1e-3)
    np.testing.assert_allclose(theta[17], 1 / K)
    corpus = Corpus.of(X).part(10, 60)
    asked = {}
    monkeypatch.setitem(sys.modules, "pyLDAvis", types.SimpleNamespace(prepare=lambda **options: asked.update(options)))
    model.to_pyldavis(corpus, mds="mmds")
    np.testing.assert_allclose(asked["doc_topic_dists"], theta[10:60], rtol=1e-3)
    np.testing.assert_array_equal(asked["doc_lengths"], X[10:60].sum(1))
    np.testing.assert_array_equal(asked["term_frequency"], X[10:60].sum(0))
    np.testing.assert_allclose(asked["topic_term_dists"], lam.T / lam.T.sum(1, keepdims=True), rtol=1e-6)
    for name in ("doc_topic_dists", "topic_term_dists"):
        np.testing.assert_allclose(asked[name].sum(1), 1, rtol=1e-9)
    assert len(asked["vocab"]) == V
    assert asked["mds"] == "mmds"
    model.to_pyldavis()
    np.testing.assert_allclose(asked["doc_topic_dists"], [lam.sum(0) / lam.sum()], rtol=1e-6)
    np.testing.assert_allclose(asked["doc_lengths"].sum(), asked["term_frequency"].sum())
    # Three topics without common words have equal distances. pyLDAvis passes a DataFrame.
    points = asked["mds"](types.SimpleNamespace(__array__=lambda dtype=None, copy=None: np.eye(3)))
    sides = np.linalg.norm(points - np.roll(points, 1, axis=0), axis=1)
    np.testing.assert_allclose(sides, np.sqrt(np.log(2)))
    monkeypatch.setitem(sys.modules, "pyLDAvis", None)
    with pytest.raises(ImportError, match="pip install pyLDAvis"):
        model.to_pyldavis(corpus)


def test_the_real_pyldavis_prepares_topics_that_are_almost_equal():
    """Rounding made the distances of such topics NaN: "array must not contain infs or NaNs"."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of pyLDAvis and what it imports
        pyldavis = pytest.importorskip("pyLDAvis")
        lam = np.full((1_000, K), 0.05, np.float32)
        lam[7, 2] *= np.float32(1 + 1e-6)
        model = SavedModel(lam, 0.3, 0.2, D, None, {}, [])
        prepared = model.to_pyldavis(n_jobs=1, R=5, lambda_step=0.5)
        assert np.isfinite(prepared.topic_coordinates[["x", "y"]]).all(None)
        assert sorted(prepared.topic_order) == list(range(1, K + 1))
        assert pyldavis.prepared_data_to_html(prepared)


def test_octis_gets_words_and_matrices_with_one_row_per_topic(X):
    words = [f"word{w}" for w in range(V)]
    model = SavedModel(np.asarray(init_topics(jax.random.key(0), V, K)), 0.3, 0.2, D, words, {}, [])
    found = model.to_octis(X[:50], top_words=7)
    beta = model.lam.T / model.lam.T.sum(1, keepdims=True)
    assert found["topics"] == [[words[w] for w in np.argsort(-row)[:7]] for row in beta]
    np.testing.assert_allclose(found["topic-word-matrix"], beta, rtol=1e-6)
    np.testing.assert_array_equal(found["topic-document-matrix"], model.transform(X[:50]).T)
    assert set(found) == {"topics", "topic-word-matrix", "topic-document-matrix"}
    tested = model.to_octis(X[:50], X[50:])["test-topic-document-matrix"]
    np.testing.assert_array_equal(tested, model.transform(X[50:]).T)


def test_gensim_computes_the_same_coherence_from_the_words_for_octis():
    """With a window that holds a whole document, gensim counts documents, as the coherence of this package does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of gensim and what it imports
        gensim = pytest.importorskip("gensim.models")
        from gensim.corpora import Dictionary
    rng = np.random.default_rng(0)
    X = rng.poisson(0.7, (400, 20))
    words = [f"word{w}" for w in range(20)]
    model = SavedModel(np.asarray(init_topics(jax.random.key(1), 20, K)), 0.3, 0.2, 400, words, {}, [])
    tokens = [[words[w] for w in np.repeat(np.arange(20), row)] for row in X]
    found = gensim.CoherenceModel(
        topics=model.to_octis(X)["topics"],
        texts=tokens,
        dictionary=Dictionary(tokens),
        coherence="c_npmi",
        window_size=1_000,
        processes=1,
    )
    np.testing.assert_allclose(found.get_coherence_per_topic(), npmi(top_words(model.lam, 10), X), atol=1e-6)
