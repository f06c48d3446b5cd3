"""Several processes, on one machine or on many: start them, compare them, and end all of them when one fails.

    from smoothgrad_jax import distributed, fit

    distributed.start()                                    # before any other call of jax
    training = fit(corpus, model, lam, mesh=distributed.mesh(), batch_size=2_400, key=key)

Every process runs the same program on the same corpus. :func:`start` takes the addresses from its arguments, or from
the environment of a launcher, or it starts one process:

| launcher                         | variables                                                       | read by      |
|----------------------------------|-----------------------------------------------------------------|--------------|
| torchrun, ``smoothgrad launch``  | RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT                      | this module  |
| Slurm (``srun``)                 | SLURM_JOB_ID, SLURM_PROCID, SLURM_NTASKS, …                     | jax          |
| Open MPI 4                       | OMPI_MCA_orte_hnp_uri, OMPI_COMM_WORLD_SIZE, …                  | jax          |

**Failure.** A process that meets an error prints it and ends at once, without the exit handlers of Python, in which jax
waits for the other processes. The others meet a broken connection and end too, within two seconds. A process that is
frozen, or whose machine is gone, is noticed after ``heartbeat_timeout``; one that is alive but takes no part in an
exchange after ``collective_timeout``. A process that ends because another one died has the exit code 1, or 134
(SIGABRT) where jax itself ends it. No process continues without the others: restart all, and resume from a checkpoint.

**Network.** Process 0 listens on the coordinator's address, without authentication: use a trusted network. With
addresses from Slurm or Open MPI, jax listens on all interfaces unless ``bind_address`` is given. The processes also
connect to each other's host names on arbitrary ports, which must be open.

On one machine, threads are faster than processes: use processes for several machines, or to test a program.
"""

import contextlib
import ipaddress
import json
import os
import socket
import sys
import traceback
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from smoothgrad_jax.core.errors import OptionError
from smoothgrad_jax.data.durable_files import package_versions

_COLLECTIVE_TIMEOUT = "--xla_cpu_collective_timeout_seconds"
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# The number of processes, and of those on this machine, under launchers that jax detects.
_SIZES = {"SLURM_NTASKS": "SLURM_TASKS_PER_NODE", "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE"}
_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID")  # what jax reads besides the number
_OPEN_MPI = "OMPI_MCA_orte_hnp_uri"  # by which jax recognises Open MPI
_UNSUPPORTED_SIZE = "PMI_SIZE"  # of MPICH and others, which jax does not detect
_INTERRUPTED = 130


class DifferenceError(ValueError):
    """Processes that should be the same are not; every process raises the same error."""


class Addresses(NamedTuple):
    """Where the processes meet.

    Attributes:
      coordinator: ``HOST:PORT`` of process 0.
      num_processes: Number of processes.
      process_id: Number of this process.
    """

    coordinator: str
    num_processes: int
    process_id: int


def start(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    bind_address: str | None = None,
    devices: int = 1,
    start_timeout: int = 60,
    heartbeat_timeout: int = 10,
    collective_timeout: int = 600,
) -> int:
    """Connect this process with the others; call it before any other call of jax.

    Changes settings of jax (CPU devices, SIGTERM, time-outs), and how Python ends after an error (see the module).

    Args:
      coordinator_address: ``HOST:PORT`` of process 0. Give all of the first three arguments, or none of them.
      num_processes: Number of processes.
      process_id: Number of this process, from 0.
      bind_address: ``HOST:PORT`` on which process 0 listens; by default the coordinator's address.
      devices: CPU devices of this process, one per core that it uses.
      start_timeout: Seconds to wait for the other processes.
      heartbeat_timeout: Seconds after which a process that does not answer counts as dead.
      collective_timeout: Seconds that an exchange waits for a process that is alive.

    Returns:
      The number of processes.

    Raises:
      OptionError: The arguments or the variables of a launcher are incomplete.
      DifferenceError: The processes use other versions of packages.
      ValueError: A host name cannot be reached from other machines.
    """
    addresses = _addresses(coordinator_address, num_processes, process_id)
    several = _launched_processes() > 1 if addresses is None else addresses.num_processes > 1
    if bind_address is not None and not several:
        raise OptionError("bind_address", "has no effect on one process")
    jax.config.update("jax_num_cpu_devices", devices)
    if not several:
        return 1
    _check_host_name(addresses)
    # jax would otherwise replace the handler of SIGTERM by one that only takes a note.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if _COLLECTIVE_TIMEOUT not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = (
            f"{os.environ.get('XLA_FLAGS', '')} {_COLLECTIVE_TIMEOUT}={collective_timeout}".strip()
        )
    _end_at_errors()
    given = {} if addresses is None else addresses._asdict()
    with _stdout_to_stderr():  # gloo prints to stdout
        jax.distributed.initialize(
            given.get("coordinator"),
            given.get("num_processes"),
            given.get("process_id"),
            cluster_detection_method=None if addresses is None else "deactivate",
            initialization_timeout=start_timeout,
            heartbeat_timeout_seconds=heartbeat_timeout,
            shutdown_timeout_seconds=heartbeat_timeout,
            coordinator_bind_address=bind_address or given.get("coordinator"),
        )
        with _batch_scheduling():
            jax.devices()
        check_same(package_versions())
    return jax.process_count()


def mesh() -> Mesh:
    """Return the mesh of all devices of all processes, for ``fit(…, mesh=mesh)``."""
    return Mesh(np.array(jax.devices()), ("p",))


def check_same(facts: Mapping[str, object]) -> None:
    """Compare facts with those of the other processes, each of which makes the same call.

    Args:
      facts: Values by name that JSON can represent, for example settings.

    Raises:
      DifferenceError: A process has another value; the message names each difference. Raised in every process.
    """
    if jax.process_count() == 1:
        return
    mine = np.frombuffer(json.dumps(dict(facts), default=str).encode(), np.uint8).astype(np.int32)
    sizes = np.ravel(multihost_utils.process_allgather(np.array(mine.size, np.int32)))
    padded = np.pad(mine, (0, int(sizes.max()) - mine.size))
    rows = np.asarray(multihost_utils.process_allgather(padded)).astype(np.uint8)
    first, *others = (json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True))
    for number, other in enumerate(others, start=1):
        names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
        if names:
            found = "; ".join(f"{name} is {other.get(name)}, not {first.get(name)}" for name in names)
            raise DifferenceError(
                f"process {number} differs from process 0: {found}. Start all processes with the same command, the "
                "same packages and the same files"
            )


def from_process_0(value: int) -> int:
    """Return the number that process 0 gives; each process makes the same call."""
    if jax.process_count() == 1:
        return value
    return int(np.asarray(multihost_utils.broadcast_one_to_all(np.array(value, np.int32))))


def wait_for_all() -> None:
    """Wait until every process makes this call."""
    from_process_0(0)


def leave(code: int) -> None:
    """End this process after an error, at once, if there are other processes; else return."""
    if code and jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _addresses(coordinator: str | None, num_processes: int | None, process_id: int | None) -> Addresses | None:
    """Return the addresses given by arguments or by torchrun; None if there are none."""
    given = {"coordinator_address": coordinator, "num_processes": num_processes, "process_id": process_id}
    missing = [name for name, value in given.items() if value is None]
    if coordinator is not None and num_processes is not None and process_id is not None:
        return Addresses(coordinator, num_processes, process_id)
    if len(missing) < len(given):
        raise OptionError(missing[0], f"is missing: give {', '.join(given)}, or none of them")
    values = [os.environ.get(name) for name in _TORCHRUN]
    if "WORLD_SIZE" not in os.environ:
        return None
    for name, value in zip(_TORCHRUN, values, strict=True):
        if value is None or (name not in ("MASTER_ADDR",) and not value.isdecimal()):
            raise OptionError(name, f"must be set beside WORLD_SIZE as torchrun sets it, got {value}")
    rank, size, address, port = map(str, values)
    return Addresses(f"{address}:{port}", int(size), int(rank))


def _launched_processes() -> int:
    """Return the number of processes of a launcher that jax detects; 1 without a launcher."""
    sizes = {name: os.environ.get(name, "1") for name in (*_SIZES, _UNSUPPORTED_SIZE)}
    remedy = f"set {', '.join(_TORCHRUN)} for every process"
    for name, value in sizes.items():
        if not value.isdecimal():
            raise OptionError(name, f"must be a number of processes, got {value}; or {remedy}")
    number = max(int(sizes[name]) for name in _SIZES)
    if int(sizes["OMPI_COMM_WORLD_SIZE"]) > 1:
        if _OPEN_MPI not in os.environ:
            problem = f"is {number}, but {_OPEN_MPI} of Open MPI 4 is not set: {remedy}"
            raise OptionError("OMPI_COMM_WORLD_SIZE", problem)
    elif number > 1:
        missing = next((name for name in _SLURM if name not in os.environ), None)
        if missing is not None:
            raise OptionError("SLURM_NTASKS", f"is {number}, but {missing} is not set: start the processes with srun")
    elif int(sizes[_UNSUPPORTED_SIZE]) > 1:
        problem = f"is {sizes[_UNSUPPORTED_SIZE]}, of a launcher that is not supported: {remedy}"
        raise OptionError(_UNSUPPORTED_SIZE, problem)
    return number


def _check_host_name(addresses: Addresses | None) -> None:
    """Raise an error if this machine's host name leads only to itself, while there are other machines.

    gloo tells the other processes to connect to the host name of this machine.
    """
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        found = socket.gethostbyname(name)
        if ipaddress.ip_address(found).is_loopback and _has_other_machines(addresses):
            raise ValueError(
                f"the host name {name} of this machine resolves to {found}, which other machines cannot reach; let it "
                "resolve to an address in their network, for example in /etc/hosts"
            )


def _has_other_machines(addresses: Addresses | None) -> bool:
    if addresses is None:
        return any(os.environ.get(all_, "1") != os.environ.get(here, "1") for all_, here in _SIZES.items())
    if os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE")) != os.environ.get("WORLD_SIZE"):
        return True
    # An address can be bound only on its own machine.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((addresses.coordinator.rpartition(":")[0], 0))
        except OSError:
            return True
    return False


@contextlib.contextmanager
def _batch_scheduling() -> Iterator[None]:
    """Create threads that never preempt another one.

    gloo's thread tries a lock again and again while it preempts the holder of the lock: an exchange then takes
    milliseconds instead of tenths. Threads inherit the policy of the thread that creates them.
    """
    if not hasattr(os, "SCHED_BATCH"):
        yield
        return
    before = os.sched_getscheduler(0)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, before, os.sched_param(0))


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Send to standard error what C++ code writes to standard output."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _end_at_errors() -> None:
    """Print an error that nothing catches, and end the process without exit handlers."""

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        traceback.print_exception(kind, error, trace)
        leave(_INTERRUPTED if issubclass(kind, KeyboardInterrupt) else 1)

    sys.excepthook = end
