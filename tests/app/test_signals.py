"""Signals: the first one ends the work, a part that must be completed is completed, the third one gives up."""

import contextlib
import gc
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from smoothgrad_jax.app import signals

ROOT = Path(__file__).parents[2]
# A parent that ignores SIGINT or SIGHUP, such as `nohup ... &`, passes that on to its children: they reset it.
_RESET = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from smoothgrad_jax.app import signals
from smoothgrad_jax.app.cli import main
"""


@contextlib.contextmanager
def started(program, *arguments, **options):
    command = [sys.executable, "-W", "error", "-c", _RESET + program, *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT} | options
    with subprocess.Popen(command, **pipes) as child:
        try:
            yield child
        finally:
            child.kill()


@pytest.fixture(autouse=True)
def default_handlers():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_interrupts_and_the_second_does_nothing(number):
    with signals.handled() as received:
        with pytest.raises(KeyboardInterrupt):
            send(number)
        send(signal.SIGTERM)
        assert received.exit_code == signals.exit_code() == 128 + number
    assert signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)


def test_a_deferred_part_is_completed_and_an_interruptible_part_of_it_is_not():
    done = []

    def work():
        with signals.handled(), signals.deferred():
            send(signal.SIGTERM)
            done.append("saved")
            with signals.interruptible():  # the signal has been received, and is raised here
                done.append("trained")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["saved"]


def test_a_signal_that_ended_the_interruptible_part_is_not_raised_again():
    done = []
    with signals.handled():
        with signals.deferred():
            with contextlib.suppress(KeyboardInterrupt), signals.interruptible():
                send(signal.SIGINT)
                done.append("trained")
            send(signal.SIGINT)
            done.append("saved")
        done.append("after")
    assert done == ["saved", "after"]


def test_without_a_command_a_deferred_part_is_completed_too():
    """As in a notebook, which handles Ctrl-C itself."""
    done = []

    def work():
        with signals.deferred():
            send(signal.SIGINT)
            send(signal.SIGINT)
            done.append("saved")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["saved"]


def test_an_event_loop_learns_of_signals_that_arrive_meanwhile():
    """asyncio calls its handlers when the number of the signal arrives at the file descriptor that it has set."""
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    before, handler = signal.set_wakeup_fd(theirs), signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        with signals.deferred():
            send(signal.SIGUSR1)
        os.write(theirs, b"\0")
        assert os.read(ours, 2)[0] == signal.SIGUSR1
        assert signal.set_wakeup_fd(theirs) == theirs
    finally:
        signal.set_wakeup_fd(before)
        signal.signal(signal.SIGUSR1, handler)
        os.close(ours)
        os.close(theirs)


def test_an_ignored_signal_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with signals.handled() as received:
        send(signal.SIGHUP)
        assert received.first is None


def test_an_interrupt_during_garbage_collection_comes_later():
    """Python ignores exceptions of the functions that are called there; jax has such a function."""

    def callback(phase, info):
        if phase == "start" and not sent:
            sent.append(True)
            send(signal.SIGINT)
            time.sleep(0)  # the handler runs here

    sent = []
    gc.callbacks.append(callback)
    try:
        with signals.handled() as received:
            gc.collect(0)
            with pytest.raises(KeyboardInterrupt):
                time.sleep(5)
        assert sent
        assert received.exit_code == 130
    finally:
        gc.callbacks.remove(callback)


STUCK = """
import ctypes
with signals.handled(), signals.deferred():
    print("ready", flush=True)
    ctypes.CDLL(None).sleep(60)  # compiled code: no handler of Python runs
    ctypes.CDLL(None).sleep(60)
    ctypes.CDLL(None).sleep(60)
    ctypes.CDLL(None).sleep(60)
"""


def test_the_third_signal_within_a_second_gives_up_and_says_so():
    with started(STUCK) as child:
        assert child.stdout.readline() == "ready\n"
        for _ in range(2):
            child.send_signal(signal.SIGTERM)
            time.sleep(0.02)
        time.sleep(0.2)
        assert child.poll() is None
        child.send_signal(signal.SIGTERM)
        _, error = child.communicate(timeout=20)
    assert error == "smoothgrad: 3 signals within a second: giving up without saving\n"
    assert child.returncode == 143


HANGS_UP = """
os.setsid()
terminal = os.open(sys.argv[1], os.O_RDWR)  # becomes the controlling terminal
for descriptor in (1, 2):
    os.dup2(terminal, descriptor)
with signals.handled() as received:
    with signals.deferred():
        try:
            with signals.interruptible():
                print("training", flush=True)
                time.sleep(60)
        except KeyboardInterrupt:
            pass
        print("to a terminal that is closed", flush=True)
        open(sys.argv[2], "w").write("saved")
    os._exit(received.exit_code)
"""


def test_a_terminal_that_hangs_up_does_not_prevent_saving(tmp_path):
    master, slave = pty.openpty()
    with started(HANGS_UP, os.ttyname(slave), tmp_path / "model") as child:
        assert os.read(master, 8) == b"training"
        os.close(slave)
        os.close(master)
        _, error = child.communicate(timeout=30)
    assert (child.returncode, error) == (129, "")
    assert (tmp_path / "model").read_text() == "saved"


@pytest.fixture(name="long_text", scope="module")
def text_that_takes_seconds(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    words = [f"word{chr(97 + i % 26)}{chr(97 + i // 26 % 26)}" for i in range(600)]
    rng = np.random.default_rng(0)
    lines = [" ".join(rng.choice(words, 50)) for _ in range(2_000)]
    path.write_text("\n".join(lines * 60) + "\n")
    return path


def children_of(process):
    """Return the processes that a process has started, and theirs."""
    found = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [*found, *(each for child in found for each in children_of(child))]


def is_alive(process):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs the children of a process")
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_an_ended_conversion_leaves_no_process_and_no_partial_output(long_text, tmp_path, number):
    out, deadline = tmp_path / "out", time.monotonic() + 60
    with started("sys.exit(main())", "convert", long_text, out, "--jobs", "2") as child:
        while len(workers := children_of(child.pid)) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert child.poll() is None, child.communicate()
        time.sleep(0.5)
        child.send_signal(number)
        _, error = child.communicate(timeout=30)
    while any(map(is_alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, workers))
    if number == signal.SIGTERM:
        assert (child.returncode, error) == (143, "smoothgrad convert: interrupted\n")
        assert list(tmp_path.iterdir()) == []


COLLECT = """
from smoothgrad_jax.app import demo_corpus
if __name__ == "__main__":
    for _ in demo_corpus.collect(()):
        print("collecting", flush=True)
        time.sleep(60)
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs the children of a process")
def test_a_killed_demo_leaves_no_process():
    with started(COLLECT) as child:
        assert child.stdout.readline() == "collecting\n"
        workers = children_of(child.pid)
        assert len(workers) >= 2
        child.kill()
        child.wait()
    deadline = time.monotonic() + 20
    while any(map(is_alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, workers))
