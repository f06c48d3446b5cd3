"""Several processes: where they meet, that they agree, and that all end when one of them fails."""

import contextlib
import json
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import distributed_run
import jax
import numpy as np
import pytest

from smoothgrad_jax import Checkpoints, distributed
from smoothgrad_jax.core.errors import OptionError

ROOT = Path(__file__).parents[2]
LIMIT = 300  # seconds for a group of processes
GRACE = 20  # seconds between the end of the first process and that of the last
STEPS = 12
FIRST_PORT = 61_440  # of the ports that jax chooses for Slurm and Open MPI
SUM = """
import jax
import numpy as np
from jax.experimental import multihost_utils
from smoothgrad_jax import distributed

number = distributed.start(start_timeout=30)
numbers = multihost_utils.process_allgather(np.array(10 ** jax.process_index()))
print(f"process {jax.process_index()} of {number}, {distributed.mesh().size} devices, sum {numbers.sum()}", flush=True)
"""
ENVIRONMENT = {}  # of the processes


@pytest.fixture(scope="module", autouse=True)
def environment(quick_environment):
    ENVIRONMENT.update(quick_environment)


def torchrun(number, rank, port):
    return {"WORLD_SIZE": number, "RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def slurm(number, rank, port):
    """jax computes the port from the number of the job."""
    job = {"SLURM_JOB_ID": port - FIRST_PORT, "SLURM_STEP_NODELIST": "localhost", "SLURM_TASKS_PER_NODE": number}
    return job | {"SLURM_NTASKS": number, "SLURM_PROCID": rank, "SLURM_LOCALID": rank}


def open_mpi(number, rank, port):
    """jax computes the port from the number of the job, which is a multiple of 4,096."""
    job = {"OMPI_MCA_orte_hnp_uri": f"{(port - FIRST_PORT) * 4096}.0;tcp://127.0.0.1:34911"}
    job |= {"OMPI_COMM_WORLD_SIZE": number, "OMPI_COMM_WORLD_LOCAL_SIZE": number}
    return job | {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_LOCAL_RANK": rank}


def free_port():
    """Return a free port of those that jax chooses for Slurm and Open MPI."""
    for port in random.sample(range(FIRST_PORT, 65_536), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free")


def run_processes(number, folder, *arguments, steps=STEPS, grace=GRACE):
    """Run the training program in several processes; see :func:`run_program`."""
    program = [ROOT / "tests" / "distributed_run.py", folder, steps, *arguments]
    return run_program(number, folder, torchrun, *program, grace=grace)


def run_program(number, folder, launcher, *program, grace=GRACE):
    """Run a program in several processes; return their exit codes, outputs, and the times at which they ended."""
    command, port = [sys.executable, *map(str, program)], free_port()
    files = [(folder / f"output-{rank}").open("w+") for rank in range(number)]
    environments = [ENVIRONMENT | launcher(number, rank, port) for rank in range(number)]
    processes = [
        subprocess.Popen(command, env={name: str(x) for name, x in env.items()}, cwd=ROOT, stdout=file, stderr=file)
        for env, file in zip(environments, files, strict=True)
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


def test_two_processes_compute_what_one_computes_and_another_number_resumes(tmp_path, expected):
    lam, scores = expected
    codes, outputs, _ = run_processes(2, tmp_path, steps=6)
    assert codes == [0, 0], outputs
    first, second = results(tmp_path, 2)
    assert first == second
    np.testing.assert_allclose(first["scores"][-1], scores[1], rtol=1e-10)
    assert "process 1 differs from process 0: process is 1, not 0." in outputs[0]
    assert outputs[0].splitlines()[-1] == outputs[1].splitlines()[-1]
    codes, outputs, _ = run_processes(1, tmp_path)
    assert codes == [0], outputs
    (found,) = results(tmp_path, 1)
    assert (found["first"], found["step"]) == (6, STEPS)
    np.testing.assert_allclose(found["lam"], lam, rtol=1e-10)


@pytest.mark.parametrize("launcher", [slurm, open_mpi])
def test_processes_of_a_launcher_that_jax_detects_find_each_other(tmp_path, launcher):
    codes, outputs, _ = run_program(2, tmp_path, launcher, "-c", SUM)
    assert codes == [0, 0], outputs
    for rank, output in enumerate(outputs):
        assert f"process {rank} of 2, 2 devices, sum 11" in output


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


def test_one_process_within_the_allocation_of_a_scheduler(monkeypatch):
    """``sbatch`` sets SLURM_NTASKS too, and so does ``salloc``; only ``srun`` starts so many processes."""
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with pytest.raises(OptionError, match=r"SLURM_STEP_NODELIST is not set: .* with srun"):
        distributed.start()
    for name, value in torchrun(1, 0, 7).items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)  # the backend of this process has started
    assert distributed.start() == 1


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"SLURM_NTASKS": "two"}, "SLURM_NTASKS must be a number of processes, got two; or set RANK, WORLD_SIZE"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_MCA_orte_hnp_uri of Open MPI 4 is not set: set RANK, WORLD_SIZE"),
        ({"PMI_SIZE": "2"}, "PMI_SIZE is 2, of a launcher that is not supported: set RANK, WORLD_SIZE"),
    ],
)
def test_a_launcher_that_is_not_supported_is_an_error_and_not_one_process(variables, message, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(OptionError, match=message):
        distributed.start()


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
    monkeypatch.delenv("WORLD_SIZE")
    for name, value in slurm(4, 0, FIRST_PORT).items():
        monkeypatch.setenv(name, str(value))
    distributed._check_host_name(None)
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "2(x2)")
    with pytest.raises(ValueError, match="which other machines cannot reach"):
        distributed._check_host_name(None)
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.0.0.7")
    distributed._check_host_name(elsewhere)
