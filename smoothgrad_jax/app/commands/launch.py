"""``smoothgrad launch``: run ``fit --distributed`` in several processes on this machine.

For tests of programs and clusters: on one machine, threads are faster than processes. The processes get the variables
that torchrun sets. When one of them fails, the others are ended.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from smoothgrad_jax.app.commands.output import CommandError

_GRACE = 3.0  # seconds in which processes end by themselves after another one failed
_INTERVAL = 0.05  # seconds between two looks at the processes
_ADDRESS = "127.0.0.1"


def run(args: Namespace) -> int:
    """Start the processes, wait for them, and return the exit code of the first one that failed, or 0."""
    if not args.arguments or args.arguments[0] != "fit":
        raise CommandError(f"expected the command fit and its options, got {' '.join(args.arguments) or 'nothing'}")
    command = [sys.executable, "-m", "smoothgrad_jax", *args.arguments]
    if "--distributed" not in args.arguments:
        command.append("--distributed")
    with _processes(command, args.processes) as processes:
        return _wait(processes)


@contextlib.contextmanager
def _processes(command: Sequence[str], number: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start a command in several processes, and end those that still run when the block ends."""
    environment = os.environ | {
        "WORLD_SIZE": str(number),
        "LOCAL_WORLD_SIZE": str(number),
        "MASTER_ADDR": _ADDRESS,
        "MASTER_PORT": str(_free_port()),
    }
    processes: list[subprocess.Popen[bytes]] = []
    received: list[int] = []

    def forward(signal_number: int, _: FrameType | None) -> None:
        received.append(signal_number)
        for process in processes:
            process.send_signal(signal_number)

    # A terminal sends Ctrl-C to the processes too; a scheduler sends SIGTERM to this one alone. New processes do not
    # inherit functions as handlers.
    handlers: dict[int, Any] = {signal.SIGINT: lambda *_: None, signal.SIGTERM: forward, signal.SIGHUP: forward}
    handlers = {each: handler for each, handler in handlers.items() if signal.getsignal(each) != signal.SIG_IGN}
    previous = {each: signal.signal(each, handler) for each, handler in handlers.items()}
    try:
        for rank in range(number):
            processes.append(subprocess.Popen(command, env=environment | {"RANK": str(rank)}))
            for each in received:
                processes[-1].send_signal(each)
        yield processes
    finally:
        _end(processes)
        for each, before in previous.items():
            signal.signal(each, before)


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait until all processes have ended, or one has failed; return its exit code."""
    while True:
        codes = [process.poll() for process in processes]
        failed = next((code for code in codes if code), None)
        if failed is not None:
            return 128 - failed if failed < 0 else failed
        if None not in codes:
            return 0
        time.sleep(_INTERVAL)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the processes that still run."""
    deadline = time.monotonic() + _GRACE
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(_INTERVAL)  # they notice by themselves, and say what they noticed
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((_ADDRESS, 0))
        return int(probe.getsockname()[1])
