"""Several processes as one program, by `jax.distributed`."""

import math
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
    """Joins the processes of a run; afterwards `jax.devices()` has the devices of all.

    To be called before anything else of JAX, in every process. On CPUs the processes talk through
    gloo, on GPUs through NCCL.

    Args:
        coordinator: address of process 0, ``"host:port"``; by default the environment variable
            JAX_COORDINATOR_ADDRESS.
        processes: number of processes; by default JAX_NUM_PROCESSES.
        process: which one this is, from 0; by default JAX_PROCESS_ID.
        detect: take what is not said from the scheduler that started the processes, where JAX knows
            it: Slurm, Open MPI, Kubernetes, TPU pods.
        timeout: seconds to wait for the others; JAX ends a process that waited in vain.
        heartbeat: seconds without a sign of life after which a process counts as lost; JAX then
            ends the others.

    Returns:
        Whether there are several processes: False, and nothing done, where neither arguments nor
        variables say anything, or they say one process.

    Raises:
        ValueError: if some of the three are given and others missing, one makes no sense, or
            ``detect`` finds no scheduler.
        RuntimeError: if JAX has been used already.

    Example:
        >>> initialize()  # one process
        False
    """
    given: dict[str, Any] = {
        "coordinator": coordinator,
        "processes": processes,
        "process": process,
    }
    found = {
        name: os.environ.get(variable) if given[name] is None else given[name]
        for name, variable in _VARIABLES.items()
    }
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
    _check(address, count, index)
    if count == 1:
        return False
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            address,
            count,
            index,
            initialization_timeout=timeout,
            heartbeat_timeout_seconds=heartbeat,
        )
    except ValueError as error:
        raise ValueError(
            "unitscale.parallel.initialize: detect expected a scheduler that JAX knows (Slurm, "
            f"Open MPI, Kubernetes, TPU pods); got none ({error}). Pass coordinator, processes "
            "and process."
        ) from error
    return jax.process_count() > 1


def _check(address: Any, count: int | None, index: int | None) -> None:
    limit = math.inf if count is None else count
    if limit < 1 or (index is not None and not 0 <= index < limit):
        raise ValueError(
            "unitscale.parallel.initialize: process must be from 0 to processes - 1; got process "
            f"{index} of {count}"
        )
    if address is not None and not (
        str(address).rpartition(":")[0] and str(address).rpartition(":")[2].isdigit()
    ):
        raise ValueError(
            "unitscale.parallel.initialize: coordinator must be 'host:port' of process 0; got "
            f"{address!r}"
        )


def _whole(name: str, value: Any) -> int | None:
    try:
        return None if value is None else int(value)
    except (TypeError, ValueError):
        raise ValueError(
            f"unitscale.parallel.initialize: {name} must be a whole number; got {value!r}"
        ) from None
