"""Models and checkpoints: what is read is what was written, or an error with a name; whatever is killed, whenever."""

import contextlib
import errno
import itertools
import json
import math
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import types
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import killed
import mixture
import numpy as np
import oracle
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smoothgrad_jax import LDA, Corpus, fit, init_topics, phase_out, robbins_monro
from smoothgrad_jax.app import saved
from smoothgrad_jax.app.saved import (
    Checkpoints,
    LoadError,
    SavedModel,
    SaveError,
    check_same,
    load_model,
    save_model,
)
from smoothgrad_jax.training import driver as training
from smoothgrad_jax.training import rows

V, K, D, B = 80, 4, 120, 10
KEY = jax.random.key(5)


@pytest.fixture(name="X")
def some_documents(rng):
    return rng.poisson(rng.gamma(0.2, 1, (D, V)))


def same(one, other):
    """Whether two snapshots are the same to the last bit."""
    (a, facts), (b, others) = one, other
    assert facts == others
    assert a.keys() == b.keys()
    for name in a:
        for x, y in zip(jax.tree.leaves(a[name]), jax.tree.leaves(b[name]), strict=True):
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(x, y, err_msg=name)


# Going on


WINDOWS = {
    "L=1": {"window": 1, "threads": 1},
    "L=3": {"window": 3, "threads": 2},
    "zeros": {"window": 4, "threads": 2, "warmup": "zeros"},
    "inf": {"window": math.inf, "threads": 2},
    "phase out": {"window": phase_out(5, 3, 9), "threads": 1},
    "uint8": {"window": 3, "threads": 2, "dtype": jnp.uint8},
    "bfloat16": {"window": phase_out(4, 3, 9), "threads": 1, "dtype": jnp.bfloat16},
    "exponential": {"window": 3, "exponential": True},
}
SLOW = ("L=1", "bfloat16")


@pytest.mark.parametrize(
    "options",
    [pytest.param(each, id=name, marks=[pytest.mark.slow] * (name in SLOW)) for name, each in WINDOWS.items()],
)
def test_a_run_goes_on_from_any_checkpoint_to_the_same_bits(X, tmp_path, options):
    model, lam = LDA(0.3, 0.2, D), init_topics(jax.random.key(0), V, K)
    options = options | {"batch_size": B, "key": KEY, "every": 1}
    whole = fit(X, model, lam, steps=11, **options).finish()
    # The same run, looked at, scored and taken down all the time: that does not change it.
    checkpoints = Checkpoints(tmp_path, keep=100)
    watched = fit(X, model, lam, steps=11, held_out=X[:20], score_every=3, **options)
    for progress in watched:
        assert watched.params.shape == (V, K)
        if progress.step in (1, 2, 4, 7, 11):
            checkpoints.write(watched, {"step": progress.step}, [{"score": progress.score}])
            if progress.step == 4:
                held = watched.snapshot()
    same(watched.snapshot(), whole.snapshot())
    found = sorted(tmp_path.iterdir())
    assert [path.name for path in found][:2] == ["000001-step-1", "000002-step-2"]
    while found:
        last = checkpoints.latest()
        assert last.path == found.pop()
        assert last.settings == {"step": last.step}
        if last.step < 11:
            rest = fit(X, model, last.state, steps=11 - last.step, **options).finish()
            same(rest.snapshot(), whole.snapshot())
            np.testing.assert_array_equal(rest.params, whole.params)
        if last.step == 4:  # a snapshot that was held while the run went on
            state = fit(X, model, checkpoints.latest().state, steps=1, **options)
            same(state.snapshot(), held)
            state.close()
        shutil.rmtree(last.path)
    assert checkpoints.latest() is None


def test_schedules_are_the_same_wherever_a_run_begins():
    whole = training._values("rho", robbins_monro(3, 0.7), 0, lambda _: None)
    expected = list(itertools.islice(whole, 2100))
    for first in (1, 7, 1023, 1024, 1500):
        part = training._values("rho", robbins_monro(3, 0.7), first, lambda _: None)
        assert list(itertools.islice(part, 2100 - first)) == expected[first:]


def test_a_model_of_ones_own_goes_on(rng, tmp_path):
    x = rng.poisson(np.where(rng.random((9, 50)) < 0.3, 2, 15)).astype(np.float32)
    model, start = jax.tree_util.Partial(mixture.local_step, 1000.0), mixture.start(2)
    options = {"prior": mixture.PRIOR, "window": 4, "every": 1, "dtype": jnp.bfloat16}
    whole, checkpoints = fit(iter(x), model, start, **options), Checkpoints(tmp_path)
    for progress in whole:
        if progress.step == 3:
            checkpoints.write(whole)
    last = checkpoints.latest(like=start)
    assert last.sampler is None
    rest = fit(iter(x[3:]), model, last.state, **options).finish()
    same(rest.snapshot(), whole.snapshot())
    with pytest.raises(ValueError, match="give its parameters as like="):
        checkpoints.latest()
    with pytest.raises(ValueError, match="other parameters"):
        checkpoints.latest(like={"other": 0})


def test_float64_needs_its_mode(tmp_path):
    with jax.enable_x64(True):
        tiny = take(1, np.float64)
        Checkpoints(tmp_path).write(tiny)
        same(again(Checkpoints(tmp_path).latest()), tiny)
    with pytest.raises(ValueError, match="enable_x64"):
        Checkpoints(tmp_path).latest()


# Writing, and being killed while writing


class Killed(BaseException):
    """Nothing runs after this."""


class Disk:
    """Counts what is done to files, and at a given operation stops: for good, or with an error of the system."""

    def __init__(self, patch, at=None, error=None):
        self.at, self.error, self.log = at, error, []
        for name in ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir"):
            patch.setattr(os, name, self.counted(name, getattr(os, name)))
        patch.setattr(saved, "open", self.open, raising=False)

    def act(self, name, *about):
        self.log.append((name, *about))
        n = len(self.log) - 1
        if self.error is None and self.at is not None and n >= self.at:
            raise Killed
        if self.error is not None and n == self.at:
            raise OSError(self.error, os.strerror(self.error))

    def counted(self, name, function):
        def counted(*args, **options):
            self.act(name, *((os.fstat(*args).st_ino,) if name == "fsync" else args))
            return None if name == "fsync" else function(*args, **options)  # the tests need no durability

        return counted

    @contextlib.contextmanager
    def open(self, path, mode):
        with open(path, mode) as file:
            if "x" not in mode:
                yield file
                return
            self.act("open", path)
            write = file.write

            def half(chunk):
                try:
                    self.act("write", path)
                except BaseException:
                    write(bytes(chunk)[: len(chunk) // 2])
                    raise
                write(chunk)

            yield types.SimpleNamespace(write=half, flush=file.flush, fileno=file.fileno)


def take(step, dtype=np.float32):
    """A small state, another for every step, as a snapshot."""
    state = rows.init(np.random.default_rng(step).random((5, 2)).astype(dtype) + 0.1, 2)
    arrays, facts = rows.export(state._replace(step=step))
    return arrays, facts | {"engine": "rows", "sampler": None}


def again(checkpoint):
    arrays, facts = rows.export(checkpoint.state)
    return arrays, facts | {"engine": "rows", "sampler": None}


def test_killed_at_every_operation_of_a_checkpoint(tmp_path):
    outcomes = []
    for n in itertools.count():
        folder = tmp_path / str(n)
        checkpoints = Checkpoints(folder)
        with pytest.MonkeyPatch.context() as patch:
            Disk(patch)  # fast
            for step in (1, 2):
                checkpoints.write(take(step), {"a": 1}, [{"step": step}])
        with pytest.MonkeyPatch.context() as patch:
            disk = Disk(patch, at=n)
            try:
                checkpoints.write(take(3), {"a": 1}, [{"step": 3}])
                break
            except Killed:
                pass
        last = Checkpoints(folder).latest()
        outcomes.append(last.step)
        assert not last.damaged
        for path in folder.glob("0*"):  # whatever has its name is whole
            assert saved._read_checkpoint(path, None).path == path
        assert last.history == [{"step": last.step}]
        same(again(last), take(last.step))
        with pytest.MonkeyPatch.context() as patch:
            Disk(patch)
            Checkpoints(folder).write(take(4))
        assert Checkpoints(folder).latest().step == 4
        assert not list(folder.glob(".*")), "leftovers stay"
        assert 1 < len(list(folder.iterdir())) <= 2
    assert n == len(disk.log) > 20
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {2, 3}


def test_everything_is_durable_before_it_gets_its_name(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(patch)
        path = Checkpoints(tmp_path / "model" / "checkpoints").write(take(1))
    (renamed,) = (i for i, (name, *_) in enumerate(disk.log) if name == "rename")
    assert disk.log[renamed][2] == path
    last = {}  # what was done last to each file and folder, before and after
    for name, *about in disk.log[:renamed]:
        last[about[0].name if name in ("open", "write") else about[0]] = name
    for file in path.iterdir():
        assert last[file.name] == "write"
        assert last[file.stat().st_ino] == "fsync"
    assert disk.log[renamed - 1] == ("fsync", path.stat().st_ino)
    assert disk.log[renamed + 1] == ("fsync", path.parent.stat().st_ino)
    for (name, *_), (after, *_) in itertools.pairwise(disk.log[:renamed]):
        assert name != "write" or after in ("write", "fsync"), "a file was closed without fsync"


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_full_disk_is_an_error_with_a_name_and_costs_nothing(tmp_path, error):
    checkpoints = Checkpoints(tmp_path)
    for n in itertools.count():
        shutil.rmtree(tmp_path, ignore_errors=True)
        with pytest.MonkeyPatch.context() as patch:
            Disk(patch)
            checkpoints.write(take(1))
            checkpoints.write(take(2))
        failure = None
        with pytest.MonkeyPatch.context() as patch:
            disk = Disk(patch, n, error)
            try:
                checkpoints.write(take(3))
            except SaveError as caught:
                failure = caught
            done = len(disk.log) <= n
        last = checkpoints.latest()
        assert not last.damaged
        assert not list(tmp_path.glob(".new*"))
        if failure is None:
            assert last.step == 3
        else:
            assert failure.errno == error
            message = (
                rf"could not be written: {os.strerror(error)}; the checkpoint after step {last.step} is still there"
            )
            assert message in str(failure)
        with pytest.MonkeyPatch.context() as patch:
            Disk(patch)
            checkpoints.write(take(4))
        assert checkpoints.latest().step == 4
        if done:
            break
    assert n > 20


@pytest.mark.parametrize("harm", ["cut", "flip", "lose"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(tmp_path, harm):
    checkpoints = Checkpoints(tmp_path / "whole")
    checkpoints.write(take(1))
    newest = checkpoints.write(take(2)).name
    for name in sorted(path.name for path in (tmp_path / "whole" / newest).iterdir()):
        folder = tmp_path / name
        shutil.copytree(tmp_path / "whole", folder)
        damage(folder / newest / name, harm)
        last = Checkpoints(folder).latest()
        assert last.step == 1
        assert len(last.damaged) == 1
        assert name in last.damaged[0]
        assert harm != "cut" or not name.endswith(".npy") or "bytes, got" in last.damaged[0]
        damage(last.path / name, harm)
        with pytest.raises(LoadError, match=r"no checkpoint is whole: .*Remove the folder to begin anew"):
            Checkpoints(folder).latest()


def damage(path, harm):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    if harm == "lose":
        path.unlink()
    else:
        path.write_bytes(data if harm == "flip" else data[:-1])


def test_checkpoints_by_the_order_they_were_written(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    for step in (5, 5, 3):  # again from the start, in the same folder
        checkpoints.write(take(step))
        assert checkpoints.latest().step == step
        assert len(list(tmp_path.iterdir())) == 1
    path = tmp_path / "000009-step-9"
    path.mkdir()
    for version, what in ((3, "upgrade it"), (1, "finish it with the version that wrote it, or start anew")):
        other = {"format": "smoothgrad checkpoint", "version": version, "something": "else"}
        (path / "checkpoint.json").write_bytes(saved._to_json(other))
        with pytest.raises(LoadError, match=f"format version {version}, this package reads version 2: {what}"):
            checkpoints.latest()
    checkpoints.clear()
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="keep must be at least 1"):
        Checkpoints(tmp_path, keep=0)
    with pytest.raises(ValueError, match="settings must be what JSON can hold, got object"):
        checkpoints.write(take(1), {"a": object()})
    (tmp_path / "file").touch()
    with pytest.raises(LoadError, match="expected a folder of checkpoints, got a file"):
        Checkpoints(tmp_path / "file").latest()
    with pytest.raises(SaveError, match="there is no earlier checkpoint"):
        Checkpoints(tmp_path / "file").write(take(1))


def test_a_run_with_other_settings_is_refused():
    then = {"window": math.inf, "key": (0, 5), "K": 10, "score": math.nan, "words": "été"}
    check_same(
        then, {"window": np.float64(math.inf), "key": [0, 5], "K": np.int64(10), "score": math.nan, "words": "été"}
    )
    with pytest.raises(
        LoadError, match=r'another run: K was 10, now 20; words was "été", now not set; B was not set, now 3'
    ):
        check_same(then, {key: then[key] for key in ("window", "key", "score")} | {"K": 20, "B": 3})


# Models


def a_model(num_words=7, num_topics=3, seed=0, **change):
    rng = np.random.default_rng(seed)
    lam = rng.gamma(1, 1, (num_words, num_topics)).astype(np.float32) + 0.01
    words = [f"wört {w}\r\u2028" for w in range(num_words)]  # whatever str.splitlines would split at
    history = [{"step": 10, "score": -7.25}, {"step": 20, "score": math.nan}]
    model = SavedModel(lam, 0.1, np.float32(0.2), 120, words, {"window": math.inf, "key": [0, 1]}, history)
    return model._replace(**change)


def assert_equal(one, other):
    for name in ("lam", "alpha", "eta", "num_docs", "prevalence", "word_counts"):
        a, b = (getattr(each, name) for each in (one, other))
        assert (a is None) == (b is None), name
        np.testing.assert_array_equal(a, b, err_msg=name, strict=a is not None and np.ndim(a) > 0)
    assert one.vocabulary == other.vocabulary
    assert repr((one.settings, one.history)) == repr((other.settings, other.history))  # NaN differs from itself


MODELS = {
    "plain": a_model(),
    "no words": a_model(vocabulary=None),
    "float64": a_model(lam=np.random.default_rng(1).random((7, 3)) + 1e-300),
    "priors": a_model(alpha=np.array([0.1, 0.2, 0.3]), eta=np.full((7, 1), 0.5, np.float32)),
    "counted": a_model(prevalence=np.array([0.5, 0.5, 0.0]), word_counts=np.arange(7)),
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_model_comes_back_as_it_was(tmp_path, model):
    save_model(tmp_path / "deep" / "model", model)
    assert_equal(load_model(tmp_path / "deep" / "model"), model)


def test_a_model_is_replaced_and_the_rest_of_its_folder_stays(tmp_path):
    save_model(tmp_path, MODELS["counted"])
    Checkpoints(tmp_path / "checkpoints").write(take(1))
    (tmp_path / "report.html").touch()
    save_model(tmp_path, MODELS["no words"])
    assert_equal(load_model(tmp_path), MODELS["no words"])
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"model.json", "lam.npy", "alpha.npy", "eta.npy", "checkpoints", "report.html"}
    assert Checkpoints(tmp_path / "checkpoints").latest().step == 1


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
            assert "could not be written: No space left on device; what was there before" in str(failure)
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
from smoothgrad_jax.app.saved import SavedModel, SaveError, load_model, save_model
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


def test_a_limit_of_the_system_and_no_need_of_jax(tmp_path):
    program = [sys.executable, "-W", "error", "-c", PLAIN, str(tmp_path / "model")]
    root = Path(__file__).parents[2]
    done = subprocess.run(program, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "File too large; what was there before still is" in done.stdout
    assert not list(tmp_path.rglob("*.new"))


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("healthy")
    save_model(folder, MODELS["counted"])
    return folder


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_a_model_or_an_error_with_a_name(healthy, tmp_path_factory, data):
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
    harmless = kind == "beside"  # what a killed save leaves behind is not looked at
    found = None
    with contextlib.nullcontext() if harmless else contextlib.suppress(LoadError):
        found = load_model(folder)
    if found is not None:  # of JSON the blanks may be other ones
        assert harmless or path.name == "model.json"
        assert_equal(found, MODELS["counted"])


def test_a_description_that_was_changed_is_not_believed(tmp_path):
    save_model(tmp_path, a_model())
    path = tmp_path / "model.json"
    text = path.read_text()
    assert '"step": 10' in text
    path.write_text(text.replace('"step": 10', '"step": 11'))
    with pytest.raises(LoadError, match=r"model\.json: damaged, or changed by hand"):
        load_model(tmp_path)


class Evil:
    """Would run code if it were unpickled."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


@pytest.mark.parametrize("how", ["objects", "pickle", "archive", "shape", "negative", "infinite"])
def test_a_forged_model_runs_nothing(tmp_path, monkeypatch, how):
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
    facts = json.loads(Path("model/model.json").read_text())
    content = path.read_bytes()
    facts["files"]["lam.npy"] |= {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}
    facts.pop("checksum")
    Path("model/model.json").write_bytes(saved._to_json(facts))
    with pytest.raises(LoadError, match="model"):
        load_model("model")
    assert not Path("ran").exists()


def test_what_is_not_a_model(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for name, kind in (("foreign", "other"), ("newer", "smoothgrad model")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.json").write_bytes(saved._to_json({"format": kind, "version": 2}))
    for name, message in (
        ("nothing", "expected a model's folder, which is missing"),
        ("file", "expected a model's folder, got a file"),
        ("empty", r"model.json: missing; expected a smoothgrad model"),
        ("foreign", "model.json: not a smoothgrad model"),
        ("newer", "format version 2, this package reads version 1: upgrade"),
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
        ({"vocabulary": ["a"]}, "the vocabulary has 1 words, but λ has 7 rows"),
        ({"vocabulary": [*"abcdef", "g\nh"]}, "word 6 of the vocabulary cannot be a line of UTF-8"),
        ({"vocabulary": [*"abcdef", "\ud800"]}, "word 6 of the vocabulary cannot be a line of UTF-8"),
        ({"prevalence": np.ones(7)}, r"prevalence must be of shape \(3,\)"),
        ({"word_counts": -np.ones(7)}, "word_counts must not be negative"),
        ({"settings": {"a": {1, 2}}}, "settings must be what JSON can hold, got set"),
    ],
)
def test_a_model_that_does_not_fit_together_is_not_saved(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        save_model(tmp_path / "model", a_model(**change))
    assert not (tmp_path / "model").exists()


def test_topics_and_their_words(X):
    lam = np.array([[1, 6], [3, 1], [3, 1], [1, 2]], np.float32)
    model = SavedModel(lam, 0.1, 0.1, 5, ["a", "b", "c", "d"], {}, [])
    assert model.top_words(2) == [[("b", 0.375), ("c", 0.375)], [("a", 0.6), ("d", 0.2)]]
    assert [word for word, _ in model._replace(vocabulary=None).top_words(1)[1]] == ["0"]
    assert len(model.top_words(100)[0]) == 4


def test_documents_by_a_saved_model(X, monkeypatch):
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
    # Three topics without a word in common are equally far from each other.
    model.to_pyldavis()
    np.testing.assert_allclose(asked["doc_topic_dists"], [lam.sum(0) / lam.sum()], rtol=1e-6)
    np.testing.assert_allclose(asked["doc_lengths"].sum(), asked["term_frequency"].sum())
    points = asked["mds"](np.eye(3))
    sides = np.linalg.norm(points - np.roll(points, 1, axis=0), axis=1)
    np.testing.assert_allclose(sides, np.sqrt(np.log(2)))
    monkeypatch.setitem(sys.modules, "pyLDAvis", None)
    with pytest.raises(ImportError, match="pip install pyLDAvis"):
        model.to_pyldavis(corpus)


def test_a_fingerprint_is_of_the_documents_and_not_of_the_arrays(X):
    corpus = Corpus.of(X)
    wide = Corpus(corpus.indptr.astype(np.int64), corpus.indices.astype(np.int64), corpus.data.astype(np.float64), V)
    assert saved.fingerprint(corpus) == saved.fingerprint(wide)
    assert saved.fingerprint(corpus.part(10, 20)) == saved.fingerprint(Corpus.of(X[10:20]))
    other = X.copy()
    other[3, np.flatnonzero(X[3])[0]] += 1
    assert len({saved.fingerprint(Corpus.of(each)) for each in (X, other, X[1:], X[:, : V - 1])}) == 4


# The real thing


@pytest.mark.slow
def test_killed_twenty_times_and_the_same_bits_at_the_end(tmp_path):
    """A process is killed (SIGKILL) at random moments, started again each time, and in the end left alone."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["killed"])

    def start(name, pause):
        told, pipe = context.Pipe(duplex=False)
        folder = tmp_path / name / "checkpoints"
        child = context.Process(target=killed.live, args=(folder, tmp_path / "cache", pipe, pause))
        child.start()
        pipe.close()
        return child, told, folder

    def ends(child):
        child.join(120)
        return child.exitcode == 0

    whole, told, _ = start("whole", 0.0)
    assert ends(whole)
    begun, inside = [], 0
    for n in range(20):
        child, told, folder = start("killed", 0.003)
        if n % 5 == 4:  # at any moment, the first ones among them
            child.join(random.uniform(0, 1))
        else:  # while it trains and writes
            assert told.poll(120), "a life made no step"
            begun.append(told.recv())
            child.join(random.uniform(0, 0.3))
        child.kill()
        child.join()
        assert child.exitcode == -signal.SIGKILL, "it ended before it was killed"
        inside += any(folder.glob(".*"))
    last, told, _ = start("killed", 0.0)
    assert ends(last)
    assert begun == sorted(begun)
    assert 0 < begun[-1] < killed.STEPS
    assert inside >= 5, "hardly a kill fell into a write"
    broken, expected = (np.load(tmp_path / name / "final.npy") for name in ("killed", "whole"))
    np.testing.assert_array_equal(broken, expected)
