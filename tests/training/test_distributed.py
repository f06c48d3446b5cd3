"""Several processes: where they meet, that they agree, and that all end when one of them fails."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import distributed_run
import numpy as np
import pytest

from smoothgrad_jax import Checkpoints, distributed
from smoothgrad_jax.core.errors import OptionError

ROOT = Path(__file__).parents[2]
LIMIT = 300  # seconds for a group of processes
GRACE = 20  # seconds between the end of the first process and that of the last
STEPS = 12
CACHE = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
    """Let the processes of all tests share their compiled programs."""
    CACHE["JAX_COMPILATION_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))


def run_processes(number, folder, *arguments, steps=STEPS, grace=GRACE):
    """Run the program in several processes; return their exit codes, outputs, and the times at which they ended."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = os.environ | CACHE | {"WORLD_SIZE": str(number), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [
        sys.executable,
        str(ROOT / "tests" / "distributed_run.py"),
        str(folder),
        str(steps),
        *map(str, arguments),
    ]
    files = [(folder / f"output-{rank}").open("w+") for rank in range(number)]
    processes = [
        subprocess.Popen(command, env=env | {"RANK": str(rank)}, cwd=ROOT, stdout=file, stderr=file)
        for rank, file in enumerate(files)
    ]
    ended, deadline = {}, time.monotonic() + LIMIT
    try:
        while len(ended) < number and time.monotonic() < deadline:
            for rank, process in enumerate(processes):
                if rank not in ended and process.poll() is not None:
                    ended[rank] = time.time()
                    deadline = min(deadline, time.monotonic() + grace)
            time.sleep(0.01)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    outputs = [file.seek(0) or file.read() for file in files]
    for file in files:
        file.close()
    return [process.returncode for process in processes], outputs, ended


def results(folder, number):
    return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(number)]


@pytest.fixture
def expected(x64):
    """What one process computes without a mesh."""
    run = distributed_run.begin(STEPS)
    scores = [report.score for report in run]
    return np.asarray(run.params), scores


def test_two_processes_compute_what_one_computes_and_any_number_resumes(tmp_path, expected):
    lam, scores = expected
    codes, outputs, _ = run_processes(2, tmp_path, steps=6)
    assert codes == [0, 0], outputs
    first, second = results(tmp_path, 2)
    assert first == second
    np.testing.assert_allclose(first["scores"][-1], scores[1], rtol=1e-10)
    assert "process 1 differs from process 0: process is 1, not 0." in outputs[0]
    assert outputs[0].splitlines()[-1] == outputs[1].splitlines()[-1]
    for number in (2, 1):
        again = tmp_path / f"again-{number}"
        again.mkdir()
        subprocess.run(["cp", "-r", str(tmp_path / "checkpoints"), str(again)], check=True)
        codes, outputs, _ = run_processes(number, again)
        assert codes == [0] * number, outputs
        found = results(again, number)[0]
        assert (found["first"], found["step"]) == (6, STEPS)
        np.testing.assert_allclose(found["lam"], lam, rtol=1e-10)


def check_failure(tmp_path, event, step, process, within):
    # A frozen process does not end by itself.
    codes, outputs, ended = run_processes(2, tmp_path, event, step, process, grace=0 if event == "stop" else GRACE)
    assert all(codes), outputs
    begun = float((tmp_path / "event").read_text())
    survivor = 1 - process
    assert survivor in ended, outputs
    assert ended[survivor] - begun < within, (ended[survivor] - begun, outputs)
    assert codes[survivor] in (1, -signal.SIGABRT), outputs
    last = Checkpoints(tmp_path / "checkpoints").latest()
    assert last.step >= step
    return outputs


@pytest.mark.parametrize(("event", "process", "within"), [("kill", 1, 2), ("raise", 0, 2), ("stop", 1, 15)])
def test_when_one_process_fails_the_others_end(tmp_path, x64, event, process, within):
    outputs = check_failure(tmp_path, event, 3, process, within)
    if event == "raise":
        assert "ZeroDivisionError" in outputs[process]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(12))
def test_failures_at_random_steps_and_then_a_resumed_run(tmp_path, expected, number):
    chance = random.Random(number)
    event = ("kill", "stop", "raise")[number % 3]
    check_failure(tmp_path, event, chance.randrange(3, 10, 3), chance.randrange(2), 15 if event == "stop" else 2)
    codes, outputs, _ = run_processes(2, tmp_path)
    assert codes == [0, 0], outputs
    np.testing.assert_allclose(results(tmp_path, 2)[0]["lam"], expected[0], rtol=1e-10)


def test_sigterm_of_one_process_interrupts_all_after_the_same_step(tmp_path):
    codes, outputs, _ = run_processes(2, tmp_path, "terminate", 3, 1, steps=3_000)
    assert codes == [0, 0], outputs
    first, second = results(tmp_path, 2)
    assert first == second
    assert first["scores"][-1] == "interrupted"
    assert first["step"] < 100


def test_the_addresses_come_from_arguments_or_from_torchrun(monkeypatch):
    assert distributed._addresses(None, None, None) is None
    assert distributed._addresses("h:1", 3, 2) == ("h:1", 3, 2)
    with pytest.raises(OptionError, match="process_id is missing"):
        distributed._addresses("h:1", 3, None)
    for name, value in {"WORLD_SIZE": "3", "RANK": "2", "MASTER_ADDR": "h", "MASTER_PORT": "7"}.items():
        monkeypatch.setenv(name, value)
    assert distributed._addresses(None, None, None) == ("h:7", 3, 2)
    monkeypatch.setenv("RANK", "x")
    with pytest.raises(OptionError, match="RANK must be set beside WORLD_SIZE as torchrun sets it, got x"):
        distributed._addresses(None, None, None)


def test_a_host_name_that_other_machines_cannot_reach_is_refused(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    # 192.0.2.1 is an address of documentation, which no machine has.
    elsewhere = distributed.Addresses("192.0.2.1:99", 2, 1)
    with pytest.raises(
        ValueError, match=r"here of this machine resolves to 127\.0\.1\.1, which other machines cannot reach"
    ):
        distributed._check_host_name(elsewhere)
    distributed._check_host_name(distributed.Addresses("127.0.0.1:99", 2, 1))
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="which other machines cannot reach"):
        distributed._check_host_name(distributed.Addresses("127.0.0.1:99", 2, 1))
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.0.0.7")
    distributed._check_host_name(elsewhere)
