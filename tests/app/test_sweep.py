"""The command ``sweep``: its grid, its processes, interruption and resumption, and the rule that recommends."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from smoothgrad_jax import Corpus, Progress, SaveError, load_model, match_topics, open_source
from smoothgrad_jax.app import saved_models
from smoothgrad_jax.app.cli import main
from smoothgrad_jax.app.commands import sweep, sweep_estimate
from smoothgrad_jax.app.commands.parallel_runs import RunTask
from smoothgrad_jax.app.configuration_choice import NPMI_FLOOR, SCORE_FLOOR, Configuration, choose, tolerance
from smoothgrad_jax.app.runs import Run
from smoothgrad_jax.app.settings import Settings
from smoothgrad_jax.core._xla import BEFORE_JAX_0_12
from smoothgrad_jax.data import corpus_folder
from smoothgrad_jax.training import mesh_engine

ROOT = Path(__file__).parents[2]
COMMON = ["--passes", "6", "--batch-size", "32", "--threads", "1"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Three hundred lines of twenty words, each from one of three topics with ten words."""
    rng = np.random.default_rng(0)
    words = np.array([f"{topic}{letter}" for topic in ("sail", "oven", "star") for letter in "abcdefghij"])
    lines = [" ".join(rng.choice(words[10 * (i % 3) :][:10], 20)) for i in range(300)]
    path = tmp_path_factory.mktemp("sweep") / "texts.txt"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def finished(texts):
    """Return the folder of a finished sweep over two and three topics."""
    out = texts.parent / "finished"
    assert main(["sweep", str(texts), "--out", str(out), "--topics", "3,2", "--jobs", "1", *COMMON]) == 0
    return out


@pytest.fixture
def copied(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "copied")


def rows_of(out):
    return json.loads((out / "sweep.json").read_text())


def lam(out, name):
    return load_model(out / "runs" / name).lam


def test_a_run_of_a_sweep_is_that_of_fit(texts, finished, tmp_path):
    """The same documents are held out, and drawn in the same order, whatever else the sweep compares."""
    command = ["fit", str(texts), "--out", str(tmp_path / "fit"), *COMMON, "--topics", "2", "--seed", "1"]
    assert main(command) == 0
    np.testing.assert_array_equal(lam(finished, "K2-L10-seed1"), load_model(tmp_path / "fit").lam)


def test_the_results_are_a_table_with_the_measures_of_the_models(finished):
    rows = rows_of(finished)
    assert [(row["topics"], row["window"], row["seed"]) for row in rows] == [
        *((2, "10", 0), (2, "10", 1), (3, "10", 0), (3, "10", 1))
    ]
    assert {tuple(row) for row in rows} == {tuple(rows[0])}
    for row in rows:
        model = load_model(finished / row["model"])
        assert model.lam.shape == (30, row["topics"])
        assert row["score"] == model.history[-1]["score"]
        assert model.quality.summary().items() <= row.items()
        other = load_model(finished / row["model"].replace(f"seed{row['seed']}", f"seed{1 - row['seed']}"))
        assert row["stability"] == pytest.approx(match_topics(model.lam, other.lam).similarity.mean())
    assert [row["recommended"] for row in rows] == [False, False, True, True]  # the lines have three topics
    assert not list(finished.glob("runs/*/checkpoints"))


def test_a_grid_of_windows_and_topics_with_one_seed(texts, tmp_path, capsys):
    out = tmp_path / "grid"
    command = ["sweep", str(texts), "--out", str(out), "--topics", "2,3", "--windows", "1,inf", "--seeds", "1"]
    assert main([*command, "--jobs", "1", "--json", *COMMON[2:], "--passes", "4"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert events[0]["event"] == "start"
    assert events[0]["runs"] == 4
    assert sum(each["event"] == "run" for each in events) == 4
    assert events[-1]["event"] == "done"
    assert events[-1]["recommended"]["topics"] == 3
    assert any("--seeds" in note for note in events[-1]["notes"])
    assert {(row["topics"], row["window"]) for row in rows_of(out)} == {(2, "1"), (2, "inf"), (3, "1"), (3, "inf")}
    assert all(row["stability"] is None for row in rows_of(out))


def test_only_missing_runs_are_trained_again(copied, texts, capsys):
    """A resumed sweep may have further topics and seeds; another setting is an error."""
    shutil.rmtree(copied / "runs" / "K2-L10-seed0")
    before = {path: path.stat().st_mtime_ns for path in copied.glob("runs/*/lam.npy")}
    command = ["sweep", str(texts), "--out", str(copied), "--topics", "2,3", "--jobs", "1", *COMMON]
    assert main(command) == 1
    assert "contains a sweep; --resume continues it" in capsys.readouterr().err
    for wrong, message in (
        (["--alpha", "0.2"], "--alpha was 0.3 in the checkpoint, and is 0.2 now"),
        (["--passes", "7"], "--passes was 6 in "),
        (["--min-df", "90"], "the corpus was "),
    ):
        assert main([*command, "--resume", *wrong]) in (1, 2)
        assert message in capsys.readouterr().err
    assert main([*command, "--resume"]) == 0
    out, err = capsys.readouterr()
    assert "4 runs, 3 finished" in err
    assert "are missing" not in out
    assert err.count("ended: K") == 1
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert len(rows_of(copied)) == 4
    assert main([*command, "--resume"]) == 0  # nothing is left to train
    assert "estimate" not in capsys.readouterr().err


def test_an_interrupted_sweep_continues_to_the_same_bits(texts, finished, tmp_path, monkeypatch, capsys):
    """The second run is interrupted when its window is full; the first one is finished."""
    notify = sweep._Watcher.notify

    def interrupting(self, number, message):
        notify(self, number, message)
        if number == 1 and isinstance(message, Progress) and message.step > 20:
            raise KeyboardInterrupt

    out = tmp_path / "interrupted"
    command = ["sweep", str(texts), "--out", str(out), "--topics", "2", "--jobs", "1", *COMMON]
    with monkeypatch.context() as patched:
        patched.setattr(sweep._Watcher, "notify", interrupting)
        assert main([*command, "--log-json", str(tmp_path / "log")]) == 130
    printed, err = capsys.readouterr()
    assert "no configuration has a result for each seed yet" in printed
    assert "interrupted: 1 of 2 runs finished; repeat the command with --resume to continue" in err
    assert [row["recommended"] for row in rows_of(out)] == [False]
    arrays = list(out.glob("runs/K2-L10-seed1/checkpoints/*/*.npy"))
    events = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    told = next(each["state"] for each in events if each["event"] == "start")
    assert told == pytest.approx(sum(np.load(path).nbytes for path in arrays), rel=0.02)
    assert main([*command, "--resume"]) == 0
    for name in ("K2-L10-seed0", "K2-L10-seed1"):
        np.testing.assert_array_equal(lam(out, name), lam(finished, name))
    steps = [json.loads(line)["step"] for line in (out / "runs/K2-L10-seed1/metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps))


def test_a_run_that_fails_does_not_end_the_others_and_loses_nothing(texts, tmp_path, monkeypatch, capsys):
    """The disk is full when the first model is saved: its run is complete, and resumes to its model."""
    save, out = saved_models.save_model, tmp_path / "failed"

    def full(path, model):
        if path.name.endswith("seed0"):
            raise SaveError(f"{path}: could not be written: No space left on device")
        save(path, model)

    command = ["sweep", str(texts), "--out", str(out), "--topics", "2", "--jobs", "1", *COMMON]
    with monkeypatch.context() as patched:
        patched.setattr(saved_models, "save_model", full)
        assert main(command) == 1
    err = capsys.readouterr().err
    assert "K2-L10-seed0 failed: " in err
    assert "No space left on device" in err
    assert "failed: 1 of 2 runs finished; repeat the command with --resume to continue" in err
    assert [row["seed"] for row in rows_of(out)] == [1]
    assert main([*command, "--resume"]) == 0
    assert [row["seed"] for row in rows_of(out)] == [0, 1]


def test_two_processes_give_the_same_models_and_store_their_programs(texts, finished, tmp_path, capfd, monkeypatch):
    out = tmp_path / "parallel"
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "1")  # of the two processes; this one has read it
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["sweep", str(texts), "--out", str(out), "--topics", "2", "--jobs", "2", *COMMON]) == 0
    assert "with 2 runs at a time" in capfd.readouterr().err
    for name in ("K2-L10-seed0", "K2-L10-seed1"):
        np.testing.assert_array_equal(lam(out, name), lam(finished, name))
    stored = list(tmp_path.glob("smoothgrad_jax/programs/*-cache"))
    assert (len(stored) > 10) == (sys.platform == "linux" and not BEFORE_JAX_0_12)


def children(pid):
    """Return the process ids of the workers of a sweep."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(each) for each in found if b"spawn_main" in Path(f"/proc/{each}/cmdline").read_bytes()]


def start_sweep(texts, out, *extra):
    """Start a sweep of two long runs in two processes; return once both train."""
    command = [sys.executable, "-m", "smoothgrad_jax", "sweep", str(texts), "--out", str(out), "--topics", "3"]
    command += [*COMMON[2:], "--passes", "100000", "--score-every", "50", "--json", "--jobs", "2", *extra]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    seen = set()
    while len(seen) < 2:
        seen.add(json.loads(child.stdout.readline()).get("run", ""))
        seen.discard("")
    return child


def is_alive(pid):
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "\nState:\tZ" not in status.read_text()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_sweep_leaves_checkpoints_and_no_processes(texts, tmp_path, number):
    """Also where the sweep is killed: its workers notice, write a checkpoint and end."""
    out = tmp_path / "interrupted"
    with start_sweep(texts, out) as child:
        workers = children(child.pid)
        assert len(workers) == 2
        child.send_signal(number)
        err = child.communicate(timeout=60)[1]
    deadline = time.monotonic() + 30
    while any(map(is_alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(is_alive, workers))
    assert len(list(out.glob("runs/*/checkpoints/*-step-*/checkpoint.json"))) == 2
    assert "Traceback" not in err
    if number == signal.SIGTERM:
        assert child.returncode == 128 + number
        assert "0 of 2 runs finished; repeat the command with --resume to continue" in err


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_a_run_whose_process_is_killed_does_not_end_the_others(texts, tmp_path):
    with start_sweep(texts, tmp_path / "killed") as child:
        first, second = children(child.pid)
        os.kill(first, signal.SIGKILL)
        records = iter(lambda: json.loads(child.stdout.readline()), None)
        failed = next(each for each in records if each["event"] == "run failed")
        assert "exit code -9 (out of memory?)" in failed["message"]
        assert is_alive(second)
        assert next(each for each in records if each["event"] == "score")["run"] != failed["run"]
        child.send_signal(signal.SIGTERM)
        child.communicate(timeout=60)
    assert child.returncode == 128 + signal.SIGTERM


def test_a_sweep_that_does_not_fit_on_the_disk_is_refused(texts, tmp_path, monkeypatch, capsys):
    usage = shutil.disk_usage(tmp_path)._replace(free=3_000)
    monkeypatch.setattr(sweep_estimate.shutil, "disk_usage", lambda _: usage)
    out = tmp_path / "out"
    assert main(["sweep", str(texts), "--out", str(out), "--topics", "3", *COMMON]) == 1
    assert "and 0.1 MB are free; free some space" in capsys.readouterr().err
    assert not out.exists()


def test_memory_limits_the_runs_at_a_time(texts, tmp_path, monkeypatch):
    """One process needs 400 MB; with 900 MB free there are two, whatever the number of cores."""
    monkeypatch.setattr(sweep_estimate, "num_cores", lambda: 64)
    monkeypatch.setattr(sweep_estimate, "_used_memory", lambda: 400_000_000)
    monkeypatch.setattr(sweep_estimate, "free_memory", lambda: 900_000_000)
    monkeypatch.setattr(sweep, "check_disk", stop)
    found = {}
    monkeypatch.setattr(sweep_estimate.Estimate, "describe", lambda self: found.update(self._asdict()) or "")
    with pytest.raises(StopIteration):
        main(["sweep", str(texts), "--out", str(tmp_path / "out"), "--topics", "2,3", *COMMON[:4]])
    assert (found["jobs"], found["threads"]) == (2, 16)


def test_the_estimate_includes_a_full_window_of_any_kind(texts):
    stored, found = corpus_folder.read(open_source(texts)), []
    for window in (16, "adaptive:16:16", "phase-out:16:100:200"):
        settings = Settings(topics=3, window=window, passes=9).resolve(stored.corpus.num_docs)
        found.append(sweep_estimate.estimate([RunTask(settings, texts.parent)], stored, {}, 1).state)
    assert found[0] > 5_000
    assert found[2] == found[0]
    assert found[1] > 0.9 * found[0]


def test_the_estimate_of_a_checkpoint_includes_the_window_of_rows_on_a_mesh(monkeypatch, rng):
    monkeypatch.setattr(mesh_engine, "LAZY_FROM", 1)
    corpus = Corpus.of(rng.poisson(0.05, (100, 400)))
    options = {"topics": 3, "method": "collapsed", "window": 20, "batch_size": 10, "passes": 4, "held_out": 0}
    settings, lam = Settings(**options).resolve(100), rng.gamma(1, 1, (400, 3)).astype(np.float32)
    mesh = jax.make_mesh((1,), ("p",), axis_types=(jax.sharding.AxisType.Auto,))
    run = Run(corpus, settings, lam, key=jax.random.key(0), rng=rng, mesh=mesh)
    estimated = run.checkpoint_bytes(corpus)
    list(run.reports())
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(run.state))
    assert 0.9 * size < estimated < 2 * size


def stop(*_):
    raise StopIteration


def measured(topics, scores, npmi):
    return Configuration(topics, f"K = {topics}", np.array(scores), np.array(npmi))


def test_the_fewest_topics_within_the_tolerance_are_recommended():
    four = [
        measured(20, [-7.50, -7.52], [0.20, 0.20]),
        measured(50, [-7.402, -7.422], [0.18, 0.18]),
        measured(100, [-7.398, -7.418], [0.18, 0.18]),
        measured(200, [-7.400, -7.420], [0.15, 0.15]),
    ]
    assert tolerance([each.scores for each in four], SCORE_FLOOR) == SCORE_FLOOR  # a seed shifts all scores alike
    choice = choose(four)
    assert four[choice.number].topics == 50
    assert "within 0.010 of the best, -7.408 (K = 100)" in choice.reason
    assert "lower by more than 0.010: K = 20" in choice.reason
    assert choice.notes == []


def test_clearly_lower_coherence_rules_fewer_topics_out():
    choice = choose([measured(50, [-7.4] * 2, [0.10] * 2), measured(100, [-7.4] * 2, [0.15] * 2)])
    assert choice.number == 1
    assert "NPMI lower by more than 0.020: K = 50" in choice.reason
    assert choice.notes == ["100 is the largest number of topics tried; more may be better"]


def test_a_wide_spread_over_seeds_widens_the_tolerance():
    """The difference of 0.03 is clear if both seeds agree, and not if they contradict each other."""
    for scores, expected in (([-7.40, -7.40], 100), ([-7.50, -7.30], 50)):
        pair = [measured(50, [-7.43, -7.43], [0.2] * 2), measured(100, scores, [0.2] * 2)]
        assert pair[choose(pair).number].topics == expected


def test_the_tolerance_is_two_standard_errors_of_a_two_way_layout():
    x = np.random.default_rng(0).normal(size=(4, 3))
    c, s = (np.ravel(each) for each in np.indices(x.shape))
    design = np.column_stack([c[:, None] == np.arange(4), s[:, None] == np.arange(1, 3)]).astype(float)
    residual_sum = np.linalg.lstsq(design, x.ravel())[1][0]
    assert tolerance(x, NPMI_FLOOR) == pytest.approx(2 * np.sqrt(residual_sum / (12 - 6) * 2 / 3))
    assert tolerance(x[:1], NPMI_FLOOR) == tolerance(x[:, :1], NPMI_FLOOR) == NPMI_FLOOR


def test_the_picture_shows_every_measure(finished, copied, texts, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: figures.append(self))
    assert main(["sweep", str(texts), "--out", str(copied), "--topics", "2,3", "--resume", *COMMON]) == 0
    *panels, curves = figures[0].axes
    assert len(panels) == 5
    for axes, name in zip(panels, ("score", "npmi", "effective_topics", "diversity", "stability"), strict=True):
        _, points, _ = axes.get_lines()
        assert sorted(points.get_ydata()) == sorted(row[name] for row in rows_of(finished))
    assert [line.get_label() for line in curves.get_lines()] == ["K = 2", "K = 3"]
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["sweep", str(texts), "--out", str(copied), "--topics", "2,3", "--resume", *COMMON]) == 0
    assert 'pip install "smoothgrad_jax[plot]"' in capsys.readouterr().err
