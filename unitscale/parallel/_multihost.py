"""Start-up of programs that run in several processes (`jax.distributed`)."""

import math
import operator
import os
from typing import Any

import jax

_VARIABLES = {
    "coordinator": "JAX_COORDINATOR_ADDRESS",
    "processes": "JAX_NUM_PROCESSES",
    "process": "JAX_PROCESS_ID",
}


def initialize(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    detect: bool = False,
    timeout: int = 300,
    heartbeat: int = 100,
) -> bool:
    """Connect the processes of a run; `jax.devices()` then lists the devices of all processes.

    Call it in every process, before any other use of JAX.

    Args:
        coordinator: address of process 0, ``"host:port"``; by default the environment variable
            JAX_COORDINATOR_ADDRESS.
        processes: number of processes; by default JAX_NUM_PROCESSES.
        process: index of this process, from 0; by default JAX_PROCESS_ID.
        detect: take missing values from a scheduler that JAX knows: Slurm, Open MPI, Kubernetes,
            TPU pods.
        timeout: seconds to wait for the other processes; after that JAX ends this one.
        heartbeat: seconds of silence after which a process counts as lost; JAX then ends all
            others.

    Returns:
        Whether there are several processes. The function does nothing if neither arguments nor
        variables are set, or if they specify one process.

    Raises:
        ValueError: if only some of the first three arguments are known, one is invalid, or
            ``detect`` finds no scheduler.
        RuntimeError: if JAX was used before.
    """
    found: dict[str, Any] = {"coordinator": coordinator, "processes": processes, "process": process}
    for name, variable in _VARIABLES.items():
        found[name] = os.environ.get(variable) if found[name] is None else found[name]
    missing = [name for name, value in found.items() if value is None]
    if not detect and len(missing) == len(found):
        return False
    if missing and not detect:
        there = ", ".join(f"{name} {value}" for name, value in found.items() if value is not None)
        raise ValueError(
            f"unitscale.parallel.initialize: {missing[0]} must be given too; got only {there}. "
            f"Pass it or set {_VARIABLES[missing[0]]}."
        )
    address = found["coordinator"]
    count, index = (_whole(name, found[name]) for name in ("processes", "process"))
    limit = math.inf if count is None else count
    if limit < 1 or (index is not None and not 0 <= index < limit):
        raise ValueError(
            "unitscale.parallel.initialize: processes must be positive, and process from 0 to "
            f"processes - 1; got process {index} of {count}"
        )
    host, _, port = str(address).rpartition(":")
    if address is not None and not (host and port.isdigit()):
        raise ValueError(
            "unitscale.parallel.initialize: coordinator must be 'host:port' of process 0; got "
            f"{address!r}"
        )
    if count == 1:
        return False
    waits: Any = {"initialization_timeout": timeout, "heartbeat_timeout_seconds": heartbeat}
    try:
        jax.distributed.initialize(address, count, index, **waits)
    except ValueError as error:
        raise ValueError(
            "unitscale.parallel.initialize: detect expected a scheduler that JAX knows (Slurm, "
            f"Open MPI, Kubernetes, TPU pods); got none ({error}). Pass coordinator, processes "
            "and process."
        ) from error
    return jax.process_count() > 1


def _whole(name: str, value: Any) -> int | None:
    try:
        own = int(value) if isinstance(value, str) else value
        return None if own is None else operator.index(own)
    except (TypeError, ValueError):
        raise ValueError(
            f"unitscale.parallel.initialize: {name} must be a whole number; got {value!r}"
        ) from None
