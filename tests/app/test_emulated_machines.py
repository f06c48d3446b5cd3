"""The command on two machines, which are emulated: links of limited bandwidth, and a link that is cut."""

import contextlib
import signal
import socket
import string
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from emulated_network import emulated_machines

from smoothgrad_jax import Checkpoints, load_model

ROOT = Path(__file__).parents[2]
GBIT = 0.02  # of a link; an exchange takes longer than a step
HEARTBEAT = 10  # seconds, the default of `distributed.start`
ENDED = (1, -signal.SIGABRT)  # the exit codes of a process whose peer has died; a shell says 134 for the second
LIMIT = 120  # seconds
PASSES, STEPS = 6, 60
OPTIONS = ["--topics=20", "--batch-size=128", f"--passes={PASSES}", "--window=3", "--method=collapsed"]
OPTIONS += ["--checkpoint-every=0.3"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def machines():
    with contextlib.ExitStack() as stack:
        try:
            found = stack.enter_context(emulated_machines(2, GBIT))
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"machines cannot be emulated here, which needs root, ip, tc, unshare and nsenter: {error}")
        yield found


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    rng = np.random.default_rng(0)
    words = np.array([a + b + c + "word" for a in "abcdefgh" for b in "abcdefgh" for c in string.ascii_lowercase])
    path = tmp_path_factory.mktemp("emulated") / "texts.txt"
    path.write_text("\n".join(" ".join(words[rng.zipf(1.3, 60) % len(words)]) for _ in range(1_280)) + "\n")
    return path


@contextlib.contextmanager
def command(machines, environment, texts, out, *options):
    """Run ``fit`` in two processes; each on its own machine, or both on this one."""
    address = machines[0].address if machines else "127.0.0.1"
    program = [sys.executable, "-m", "smoothgrad_jax", "fit", str(texts), f"--out={out}", "--distributed"]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT)}
    processes = []
    try:
        for rank in range(2):
            prefix = machines[rank].prefix if machines else []
            env, log = environment | meeting | {"RANK": str(rank)}, out.with_name(f"{out.name}-{rank}.log")
            with log.open("w") as file:
                started = subprocess.Popen([*prefix, *program, *OPTIONS, *options], env=env, stdout=file, stderr=file)
            processes.append(started)
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def finish(processes, out):
    codes = [process.wait(LIMIT) for process in processes]
    assert codes == [0, 0], [path.read_text() for path in out.parent.glob(f"{out.name}-?.log")]
    return load_model(out).lam


@pytest.fixture(scope="module")
def expected(quick_environment, texts, tmp_path_factory):
    """λ of two processes on this machine."""
    out = tmp_path_factory.mktemp("loopback") / "model"
    with command(None, quick_environment, texts, out) as processes:
        return finish(processes, out)


def test_machines_compute_the_bits_of_processes_on_one_machine(machines, quick_environment, texts, expected, tmp_path):
    out, before = tmp_path / "model", [machine.sent_bytes() for machine in machines]
    with command(machines, quick_environment, texts, out) as processes:
        lam = finish(processes, out)
    np.testing.assert_array_equal(lam, expected)
    assert all(machine.sent_bytes() - start > 1e6 for machine, start in zip(machines, before, strict=True))


def test_a_cut_link_ends_both_machines_and_resume_computes_the_same(
    machines, quick_environment, texts, expected, tmp_path
):
    out = tmp_path / "model"
    with command(machines, quick_environment, texts, out) as processes:
        deadline = time.monotonic() + LIMIT
        while (last := Checkpoints(out / "checkpoints").latest()) is None:
            assert time.monotonic() < deadline
            assert all(process.poll() is None for process in processes)
            time.sleep(0.05)
        machines[1].set_link("down")
        begun = time.monotonic()
        codes = [process.wait(LIMIT) for process in processes]
        seconds = time.monotonic() - begun
    machines[1].set_link("up")
    assert set(codes) <= set(ENDED)
    assert seconds < 2 * HEARTBEAT
    assert last.step < STEPS
    assert not (out / "model.json").exists()
    with command(machines, quick_environment, texts, out, "--resume") as processes:
        lam = finish(processes, out)
    np.testing.assert_array_equal(lam, expected)
