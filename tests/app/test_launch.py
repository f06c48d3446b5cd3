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
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def finish(process):
    try:
        out, err = process.communicate(timeout=300)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the session that this test has started
        process.wait()
    return process.returncode, out, err


def test_processes_save_one_model_and_another_number_resumes(texts, tmp_path):
    folder = tmp_path / "model"
    code, out, err = finish(launch(2, texts, "--out", folder, "--passes", "2", "--json", *OPTIONS))
    assert code == 0, err
    # Only process 0 writes, and nothing else reaches the standard output.
    events = [json.loads(line) for line in out.splitlines()]
    assert [event["event"] for event in events].count("done") == 1
    code, out, err = finish(launch(1, texts, "--out", folder, "--passes", "4", "--resume"))
    assert code == 0, err
    assert main(["fit", str(texts), "--out", str(tmp_path / "one"), "--passes", "4", "--threads", "1", *OPTIONS]) == 0
    several, one = load_model(folder), load_model(tmp_path / "one")
    np.testing.assert_allclose(several.lam, one.lam, rtol=0.02)
    assert [each["step"] for each in several.history][-1] == [each["step"] for each in one.history][-1]


def test_sigterm_saves_the_model_and_a_checkpoint(texts, tmp_path):
    process = launch(2, texts, "--out", tmp_path / "model", "--passes", "100000", "--messages", "bfloat16", *OPTIONS)
    for line in process.stderr:
        if line.startswith("fit step"):
            break
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert code == 143, err
    assert "repeat the command with --resume" in err
    assert load_model(tmp_path / "model").num_docs > 0
    assert os.listdir(tmp_path / "model" / "checkpoints")


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
