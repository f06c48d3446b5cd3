"""Checkpoints: reading returns what was written, or names the damaged file; a killed run resumes to the same bits."""

import errno
import itertools
import math
import multiprocessing
import os
import random
import shutil
import signal
import zlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import killed
import mixture
import numpy as np
import pytest
from disk import Disk, Killed

from smoothgrad_jax import LDA, Corpus, Exponential, fit, init_topics, pack, phase_out, robbins_monro
from smoothgrad_jax.core.mesh_step import MeshState
from smoothgrad_jax.core.row_sparse.state import END, RowSparseState, init_rows
from smoothgrad_jax.data import durable_files, folder_lock
from smoothgrad_jax.data.durable_files import LoadError, SaveError
from smoothgrad_jax.training import driver
from smoothgrad_jax.training.checkpoints import Checkpoints, _read_checkpoint, check_same, check_sampler, fingerprint
from smoothgrad_jax.training.state_files import write_tree

V, K, D, B = 80, 4, 120, 10
KEY = jax.random.key(5)


@pytest.fixture(name="X")
def some_documents(rng):
    return rng.poisson(rng.gamma(0.2, 1, (D, V)))


def assert_same(one, other):
    """Two states are equal to the last bit."""
    one, other = without_padding(one), without_padding(other)
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def without_padding(state):
    """A state whose slots have zeros after the last word: a reused slot has values of an earlier minibatch there."""

    def clear(slot):
        used = (slot.words < END).sum(1)
        return slot._replace(
            values=tuple(
                tuple(
                    np.asarray(part) * (np.arange(len(part)) < n).reshape(-1, *[1] * (part.ndim - 1)) for part in parts
                )
                for parts, n in zip(slot.values, used, strict=True)
            )
        )

    if not isinstance(state, RowSparseState) or state.slots is None:
        return state
    return state._replace(slots=tuple(map(clear, state.slots)), leaving=tuple(map(clear, state.leaving)))


def copied(state):
    """A state that shares no memory with the run it comes from."""
    return jax.tree.map(lambda leaf: jnp.array(leaf) if isinstance(leaf, jax.Array) else np.array(leaf), state)


def entries(folder):
    """What is in a folder beside the lock of this process."""
    return [path for path in folder.iterdir() if path.name != folder_lock.NAME]


def small_run(step, dtype=np.float32):
    """A run with a small state, a different one for every step."""
    state = init_rows(np.random.default_rng(step).random((5, 2)).astype(dtype) + 0.1, 2)
    return SimpleNamespace(state=state._replace(step=np.asarray(step)), step=step, sampler=None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"key": jax.random.key(6)}, r"seed was \[0, 5\], now \[0, 6\]"),
        ({"batch_size": 2 * B}, "batch_size was 10, now 20"),
        ({"replace": True}, "replace was false, now true"),
        ({"documents": np.arange(D - 1)}, "num_docs was 120, now 119"),
    ],
)
def test_a_run_that_would_draw_other_documents_is_another_run(X, tmp_path, change, message):
    model, options = LDA(0.3, 0.2, D), {"batch_size": B, "key": KEY, "steps": 2, "threads": 1}
    Checkpoints(tmp_path).write(fit(X, model, init_topics(jax.random.key(0), V, K), **options).finish())
    last = Checkpoints(tmp_path).latest()
    training = fit(X, model, last.state, **options | change)
    if message is None:
        check_sampler(last.sampler, training.sampler)
        return
    with pytest.raises(LoadError, match=message):
        check_sampler(last.sampler, training.sampler)
    supplied = fit([pack(X[:B])], model, last.state, threads=1)
    with pytest.raises(LoadError, match="minibatches were drawn from a corpus, now they are supplied by the caller"):
        check_sampler(last.sampler, supplied.sampler)
    with pytest.raises(LoadError, match="minibatches were supplied by the caller, now they are drawn from a corpus"):
        check_sampler(None, training.sampler)
    check_sampler(None, supplied.sampler)


WINDOWS = {
    "L=1": {"window": 1, "threads": 1},
    "L=3": {"window": 3, "threads": 2},
    "zeros": {"window": 4, "threads": 2, "warmup": "zeros"},
    "inf": {"window": math.inf, "threads": 2},
    "phase out": {"window": phase_out(5, 3, 9), "threads": 1},
    "uint8": {"window": 3, "threads": 2, "slots": "uint8"},
    "bfloat16": {"window": phase_out(4, 3, 9), "threads": 1, "slots": "bfloat16"},
    "exponential": {"window": Exponential(3)},
}
SLOW = ("L=1", "bfloat16")


@pytest.mark.parametrize(
    "options",
    [pytest.param(each, id=name, marks=[pytest.mark.slow] * (name in SLOW)) for name, each in WINDOWS.items()],
)
def test_a_run_goes_on_from_any_checkpoint_to_the_same_bits(X, tmp_path, options):
    model, lam = LDA(0.3, 0.2, D), init_topics(jax.random.key(0), V, K)
    options = options | {"batch_size": B, "key": KEY, "report_every": 1}
    complete = fit(X, model, lam, steps=11, **options).finish()
    # The same run with reads, scores and checkpoints between the steps, which do not change it.
    checkpoints = Checkpoints(tmp_path, keep=100)
    watched = fit(X, model, lam, steps=11, held_out=X[:20], score_every=3, **options)
    for progress in watched:
        assert watched.params.shape == (V, K)
        if progress.step in (1, 2, 4, 7, 11):
            checkpoints.write(watched, {"step": progress.step}, [{"score": progress.score}])
            if progress.step == 4:
                held = copied(watched.state)
    assert_same(watched.state, complete.state)
    found = sorted(entries(tmp_path))
    assert [path.name for path in found][:2] == ["000001-step-1", "000002-step-2"]
    while found:
        last = checkpoints.latest()
        assert last.path == found.pop()
        assert last.settings == {"step": last.step}
        if last.step < 11:
            rest = fit(X, model, last.state, steps=11 - last.step, **options).finish()
            assert_same(rest.state, complete.state)
            np.testing.assert_array_equal(rest.params, complete.params)
        if last.step == 4:
            assert_same(checkpoints.latest().state, held)
        shutil.rmtree(last.path)
    assert checkpoints.latest() is None


def test_schedules_are_the_same_wherever_a_run_starts():
    complete = driver._schedule_values("rho", robbins_monro(3, 0.7), 0, lambda _: None)
    expected = list(itertools.islice(complete, 2100))
    for first in (1, 7, 1023, 1024, 1500):
        part = driver._schedule_values("rho", robbins_monro(3, 0.7), first, lambda _: None)
        assert list(itertools.islice(part, 2100 - first)) == expected[first:]


def test_a_model_that_is_a_function_continues(rng, tmp_path):
    x = rng.poisson(np.where(rng.random((9, 50)) < 0.3, 2, 15)).astype(np.float32)
    model, start = jax.tree_util.Partial(mixture.local_step, 1000.0), mixture.start(2)
    options = {"prior": mixture.PRIOR, "window": 4, "report_every": 1, "slots": "bfloat16"}
    complete, checkpoints = fit(iter(x), model, start, **options), Checkpoints(tmp_path)
    for progress in complete:
        if progress.step == 3:
            checkpoints.write(complete)
    last = checkpoints.latest()
    assert last.sampler is None
    rest = fit(iter(x[3:]), model, last.state, **options).finish()
    assert_same(rest.state, complete.state)


def test_float64_needs_its_mode(tmp_path):
    with jax.enable_x64(True):
        tiny = small_run(1, np.float64)
        Checkpoints(tmp_path).write(tiny)
        assert_same(Checkpoints(tmp_path).latest().state, tiny.state)
    with pytest.raises(ValueError, match="enable_x64"):
        Checkpoints(tmp_path).latest()


def test_killed_at_every_operation_of_a_checkpoint(tmp_path):
    outcomes = []
    for n in itertools.count():
        folder = tmp_path / str(n)
        checkpoints = Checkpoints(folder)
        with pytest.MonkeyPatch.context() as patch:
            Disk(patch)  # fast
            for step in (1, 2):
                checkpoints.write(small_run(step), {"a": 1}, [{"step": step}])
        with pytest.MonkeyPatch.context() as patch:
            disk = Disk(patch, at=n)
            try:
                checkpoints.write(small_run(3), {"a": 1}, [{"step": 3}])
                break
            except Killed:
                pass
        last = Checkpoints(folder).latest()
        outcomes.append(last.step)
        assert not last.damaged
        for path in [path for path in entries(folder) if "." not in path.name]:
            assert _read_checkpoint(path, None).path == path
        assert last.history == [{"step": last.step}]
        assert_same(last.state, small_run(last.step).state)
        with pytest.MonkeyPatch.context() as patch:
            Disk(patch)
            Checkpoints(folder).write(small_run(4))
        assert Checkpoints(folder).latest().step == 4
        assert not [path for path in entries(folder) if "." in path.name], "temporary folders remain"
        assert 1 < len(entries(folder)) <= 2
    assert n == len(disk.log) > 20
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {2, 3}


def test_everything_is_durable_before_it_gets_its_name(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(patch)
        path = Checkpoints(tmp_path / "model" / "checkpoints").write(small_run(1))
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
            checkpoints.write(small_run(1))
            checkpoints.write(small_run(2))
        failure = None
        with pytest.MonkeyPatch.context() as patch:
            disk = Disk(patch, n, error)
            try:
                checkpoints.write(small_run(3))
            except SaveError as caught:
                failure = caught
            done = len(disk.log) <= n
        last = checkpoints.latest()
        assert not last.damaged
        assert all(
            ".old-" in path.name for path in entries(tmp_path) if "." in path.name
        )  # the next checkpoint removes them
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
            checkpoints.write(small_run(4))
        assert checkpoints.latest().step == 4
        if done:
            break
    assert n > 20


@pytest.mark.parametrize("harm", ["cut", "flip", "lose"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(tmp_path, harm):
    checkpoints = Checkpoints(tmp_path / "complete")
    checkpoints.write(small_run(1))
    newest = checkpoints.write(small_run(2)).name
    for name in sorted(path.name for path in (tmp_path / "complete" / newest).iterdir()):
        folder = tmp_path / name
        shutil.copytree(tmp_path / "complete", folder)
        damage(folder / newest / name, harm)
        last = Checkpoints(folder).latest()
        assert last.step == 1
        assert len(last.damaged) == 1
        assert name in last.damaged[0]
        assert harm != "cut" or not name.endswith(".npy") or "bytes, got" in last.damaged[0]
        damage(last.path / name, harm)
        with pytest.raises(LoadError, match=r"every checkpoint is damaged: .*Remove the folder to start again"):
            Checkpoints(folder).latest()


def damage(path, harm):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    if harm == "lose":
        path.unlink()
    else:
        path.write_bytes(data if harm == "flip" else data[:-1])


def forge(path, change):
    """Change the content of a checkpoint and give it valid checksums, as someone else could have done."""
    body = durable_files.read_json(path / "checkpoint.json", "smoothgrad checkpoint", 3)
    change(path, body)
    for entry in body["state"]["files"].values() if isinstance(body["state"], dict) else ():
        name = path / f"{entry['dtype']}.npy"
        content = name.read_bytes()
        entry |= {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}
    (path / "checkpoint.json").unlink()
    durable_files.write_json(path / "checkpoint.json", body)


def change_leaves(change):
    """A forgery of the state: its leaves are written again after a change of the tree."""

    def forgery(path, body):
        state = change(_read_checkpoint(path, None).state)
        for file in path.glob("*.npy"):
            file.unlink()
        body["state"] = write_tree(path, state)

    return forgery


def with_words(value, at=0):
    def change(state):
        words = state.slots[0].words.copy()
        words[0, at] = value
        return state._replace(slots=(state.slots[0]._replace(words=words), *state.slots[1:]))

    return change_leaves(change)


def on_a_mesh(state):
    """The state of a mesh of one device."""
    return MeshState(np.asarray(V), np.asarray(1), np.zeros(1, np.int64), (state,), None)


FORGERIES = [
    (lambda path, body: body.update(step="seven"), "checkpoint.json: damaged: step must be an integer from 0"),
    (lambda path, body: body.update(step=-1), "step must be an integer from 0 to"),
    (lambda path, body: body.update(step=4), "the state is after step 5, expected 4"),
    (lambda path, body: body.update(history={"a": 1}), "history must be a list, got"),
    (lambda path, body: body.update(settings=[1]), r"settings must be an object, got \[1\]"),
    (lambda path, body: body.update(state=3), "state must be an object, got 3"),
    (lambda path, body: body.update(made_by=None), "made_by must be an object, got None"),
    (lambda path, body: body["sampler"].update(batch_size=0), r"sampler\.batch_size must be an integer from 1"),
    (lambda path, body: body["sampler"].update(seed="x"), r"sampler\.seed must be a list"),
    (with_words(-7), r"slots\[0\]\.words\[0\] is -7"),
    (with_words(V), r"slots\[0\]\.words\[0\] is "),
    (with_words(3, at=-1), r"slots\[0\]\.words\[0\] is "),  # no END
    (change_leaves(lambda state: state._replace(clock=np.array([1.0, np.nan]))), "clock is"),
    (change_leaves(lambda state: state._replace(num_values=np.asarray(50))), "num_values is 50 with 3 values"),
    (change_leaves(lambda state: state._replace(step=np.asarray(-2))), "step is -2"),
    (change_leaves(lambda state: state._replace(entering=state.entering._replace(scale=np.asarray(-1.0)))), "scale"),
    (change_leaves(lambda state: state._replace(totals=state.totals[0])), "damaged, or not written"),
    (
        change_leaves(lambda state: on_a_mesh(state._replace(num_values=np.asarray(50)))),
        "num_values is 50 with 3 values",
    ),
    (change_leaves(lambda state: on_a_mesh(state._replace(step=np.asarray(4)))), "is after step 4, expected 5"),
]


@pytest.fixture(name="healthy", scope="module")
def some_checkpoint(tmp_path_factory):
    X = np.random.default_rng(0).poisson(0.2, (D, V))
    options = {"batch_size": B, "key": KEY, "steps": 5, "threads": 1, "window": 3}
    folder = tmp_path_factory.mktemp("healthy")
    return Checkpoints(folder).write(fit(X, LDA(0.3, 0.2, D), init_topics(jax.random.key(0), V, K), **options).finish())


@pytest.mark.parametrize(("change", "message"), FORGERIES)
def test_a_forged_checkpoint_is_refused_by_name_before_it_is_used(healthy, tmp_path, change, message):
    """A compiled loop over a word list with −7 in it would never end, and could not be interrupted."""
    path = tmp_path / healthy.name
    shutil.copytree(healthy, path)
    forge(path, change)
    with pytest.raises(LoadError, match=message):
        Checkpoints(tmp_path).latest()


def test_checkpoints_by_the_order_they_were_written(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    for step in (5, 5, 3):  # a later run in the same folder may have fewer steps
        checkpoints.write(small_run(step))
        assert checkpoints.latest().step == step
        assert len(entries(tmp_path)) == 1
    path = tmp_path / "000009-step-9"
    path.mkdir()
    for version, what in ((4, "upgrade"), (2, "finish the run with the version that wrote it, or start again")):
        other = {"format": "smoothgrad checkpoint", "version": version, "something": "else"}
        (path / "checkpoint.json").unlink(missing_ok=True)
        durable_files.write_json(path / "checkpoint.json", other)
        with pytest.raises(LoadError, match=f"format version {version}, this package reads version 3: {what}"):
            checkpoints.latest()
    checkpoints.clear()
    assert not entries(tmp_path)
    for keep in (0, 2.5):
        with pytest.raises(ValueError, match="keep must be a whole number of at least 1"):
            Checkpoints(tmp_path, keep=keep)
    with pytest.raises(ValueError, match="settings must"):
        checkpoints.write(small_run(1), {"a": object()})
    (tmp_path / "file").touch()
    with pytest.raises(LoadError, match="expected a folder of checkpoints, got a file"):
        Checkpoints(tmp_path / "file").latest()
    with pytest.raises(SaveError, match="there is no earlier checkpoint"):
        Checkpoints(tmp_path / "file").write(small_run(1))


def test_a_run_with_other_settings_is_refused():
    then = {"window": math.inf, "key": (0, 5), "K": 10, "score": math.nan, "words": "été"}
    check_same(
        then, {"window": np.float64(math.inf), "key": [0, 5], "K": np.int64(10), "score": math.nan, "words": "été"}
    )
    with pytest.raises(
        LoadError, match=r'another run: K was 10, now 20; words was "été", now not set; B was not set, now 3'
    ):
        check_same(then, {key: then[key] for key in ("window", "key", "score")} | {"K": 20, "B": 3})


def test_a_fingerprint_is_of_the_documents_and_not_of_the_arrays(X):
    corpus = Corpus.of(X)
    wide = Corpus(corpus.indptr.astype(np.int64), corpus.indices.astype(np.int64), corpus.data.astype(np.float64), V)
    assert fingerprint(corpus) == fingerprint(wide)
    assert fingerprint(corpus.part(10, 20)) == fingerprint(Corpus.of(X[10:20]))
    other = X.copy()
    other[3, np.flatnonzero(X[3])[0]] += 1
    assert len({fingerprint(Corpus.of(each)) for each in (X, other, X[1:], X[:, : V - 1])}) == 4


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

    complete, told, _ = start("complete", 0.0)
    assert ends(complete)
    begun, inside = [], 0
    for n in range(20):
        child, told, folder = start("killed", 0.003)
        if n % 5 == 4:  # at any moment, the first ones among them
            child.join(random.uniform(0, 1))
        else:  # while it trains and writes
            assert told.poll(120), "the process made no step"
            begun.append(told.recv())
            child.join(random.uniform(0, 0.3))
        child.kill()
        child.join()
        assert child.exitcode == -signal.SIGKILL, "it ended before it was killed"
        inside += any("." in path.name for path in entries(folder))
    last, told, _ = start("killed", 0.0)
    assert ends(last)
    assert begun == sorted(begun)
    assert 0 < begun[-1] < killed.STEPS
    assert inside >= 5, "hardly a kill fell into a write"
    broken, expected = (np.load(tmp_path / name / "final.npy") for name in ("killed", "complete"))
    np.testing.assert_array_equal(broken, expected)
