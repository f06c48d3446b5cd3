"""Several processes of the command: the saved model, resumption with another number of processes, and errors."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from smoothgrad_jax import load_model
from smoothgrad_jax.app.cli import main

OPTIONS = ["--topics", "3", "--batch-size", "32", "--held-out", "30", "--method", "variational", "--window", "3"]
ENVIRONMENT = {}  # of the processes


@pytest.fixture(scope="module", autouse=True)
def environment(quick_environment):
    ENVIRONMENT.update(quick_environment)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    rng = np.random.default_rng(0)
    words = np.array([f"word{chr(97 + i)}{chr(97 + j)}" for i in range(6) for j in range(10)])
    path = tmp_path_factory.mktemp("launch") / "texts.txt"
    path.write_text("\n".join(" ".join(rng.choice(words[i % 3 * 20 :][:20], 20)) for i in range(300)) + "\n")
    return path


def launch(number, *arguments):
    command = [sys.executable, "-m", "smoothgrad_jax", "launch", "-n", str(number), "fit", *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True, env=ENVIRONMENT)


def finish(process):
    try:
        out, err = process.communicate(timeout=300)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the session that this test has started
        process.wait()
    return process.returncode, out, err


def test_sigterm_saves_a_model_and_a_checkpoint_that_another_number_resumes(texts, tmp_path):
    folder = tmp_path / "model"
    several = ["--passes", "100000", "--messages", "bfloat16", "--json", *OPTIONS]
    process = launch(2, texts, "--out", folder, *several)
    for line in process.stdout:  # only process 0 writes, and nothing else reaches the standard output
        if json.loads(line)["event"] == "progress":
            break
    process.send_signal(signal.SIGTERM)
    code, out, err = finish(process)
    assert code == 143, err
    assert "repeat the command with --resume" in err
    last = json.loads(out.splitlines()[-1])
    assert last["event"] == "interrupted"
    assert load_model(folder).num_docs > 0
    assert os.listdir(folder / "checkpoints")
    passes = last["step"] * 32 // 270 + 2
    code, _, err = finish(launch(1, texts, "--out", folder, "--passes", passes, "--resume"))
    assert code == 0, err
    assert load_model(folder).history[-1]["step"] > last["step"]


@pytest.mark.slow
def test_several_processes_and_a_resumed_one_compute_what_one_computes(texts, tmp_path):
    folder = tmp_path / "model"
    code, _, err = finish(launch(2, texts, "--out", folder, "--passes", "2", *OPTIONS))
    assert code == 0, err
    code, _, err = finish(launch(1, texts, "--out", folder, "--passes", "4", "--resume"))
    assert code == 0, err
    assert main(["fit", str(texts), "--out", str(tmp_path / "one"), "--passes", "4", "--threads", "1", *OPTIONS]) == 0
    several, one = load_model(folder), load_model(tmp_path / "one")
    np.testing.assert_allclose(several.lam, one.lam, rtol=0.02)
    assert [each["step"] for each in several.history][-1] == [each["step"] for each in one.history][-1]


def test_an_error_ends_all_processes_and_is_one_line(texts, tmp_path):
    begun = time.monotonic()
    code, out, err = finish(launch(2, tmp_path / "missing.txt", "--out", tmp_path / "model"))
    assert (code, out) == (1, "")
    assert "missing.txt" in err
    assert "Traceback" not in err
    assert time.monotonic() - begun < 60


def test_launch_runs_only_fit(capsys):
    assert main(["launch", "-n", "2", "topics", "model"]) == 1
    assert "expected the command fit and its options, got topics model" in capsys.readouterr().err
