"""Emulate machines on this one: network namespaces, joined by a switch, with links of limited bandwidth.

    with emulated_machines(2, gbit=1) as machines:
        processes = [subprocess.Popen([*machine.prefix, "smoothgrad", …]) for machine in machines]

Each machine has a host name, an address and a loopback interface of its own; cores, memory and files are those of this
machine. A link limits what its machine sends (``tc``, token bucket filter). Linux only; needs the rights of root, and
the programs ip, tc, unshare and nsenter. Nothing remains: a namespace ends with the last process in it.
"""

import contextlib
import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_INTERFACE = "eth0"
_READY = "ready"


class Machine(NamedTuple):
    """An emulated machine.

    Attributes:
      name: Its host name, which all machines resolve to its address.
      address: Its address in the emulated network.
      holder: A process that does nothing but keep the namespaces.
    """

    name: str
    address: str
    holder: subprocess.Popen[str]

    @property
    def prefix(self) -> list[str]:
        """The words before a command that this machine is to run."""
        return ["nsenter", f"--target={self.holder.pid}", "--net", "--uts", "--mount"]

    def sent_bytes(self) -> int:
        """Return the number of bytes that this machine has sent."""
        found = json.loads(_run(*self.prefix, "ip", "-json", "-stats", "link", "show", _INTERFACE))
        return int(found[0]["stats64"]["tx"]["bytes"])

    def set_link(self, state: str) -> None:
        """Set the link ``"up"`` or ``"down"``; while it is down, packets are lost."""
        _run(*self.prefix, "ip", "link", "set", _INTERFACE, state)


@contextlib.contextmanager
def emulated_machines(number: int, gbit: float) -> Iterator[list[Machine]]:
    """Emulate machines for the duration of a ``with`` block, which must end the processes that it starts there.

    Args:
      number: Number of machines.
      gbit: Bandwidth of each link, in Gbit/s.

    Raises:
      OSError, subprocess.CalledProcessError: A program is missing, or this process may not do it.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        names = [(f"machine{i}", f"10.77.0.{i + 1}") for i in range(number)]
        hosts = folder / "hosts"
        hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in names))
        switch = Machine("switch", "", stack.enter_context(_holder("switch", hosts)))
        machines = [Machine(*each, stack.enter_context(_holder(each[0], hosts))) for each in names]
        _run(*switch.prefix, "ip", "link", "add", "switch", "type", "bridge")
        _run(*switch.prefix, "ip", "link", "set", "switch", "up")
        for i, machine in enumerate(machines):
            peer = ["peer", "name", _INTERFACE, "netns", str(machine.holder.pid)]
            _run(*switch.prefix, "ip", "link", "add", f"port{i}", "type", "veth", *peer)
            _run(*switch.prefix, "ip", "link", "set", f"port{i}", "master", "switch", "up")
            _run(*machine.prefix, "ip", "address", "add", f"{machine.address}/24", "dev", _INTERFACE)
            machine.set_link("up")
            limit = ["rate", f"{round(gbit * 1000)}mbit", "burst", "128kb", "latency", "50ms"]
            _run(*machine.prefix, "tc", "qdisc", "add", "dev", _INTERFACE, "root", "tbf", *limit)
        yield machines


@contextlib.contextmanager
def _holder(name: str, hosts: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a process in namespaces of its own."""
    script = f'hostname {name} && mount --bind "$0" /etc/hosts && ip link set lo up && echo {_READY} && exec cat'
    command = ["unshare", "--net", "--uts", "--mount", "sh", "-c", script, str(hosts)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as holder:
        try:
            assert holder.stdout is not None, "a pipe"
            if holder.stdout.readline().strip() != _READY:
                raise subprocess.CalledProcessError(holder.wait(), command, stderr=holder.communicate()[1])
            yield holder
        finally:
            holder.kill()


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout
