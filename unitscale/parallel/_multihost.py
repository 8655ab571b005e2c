"""Several processes as one program, by `jax.distributed`."""

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
    timeout: int = 300,
) -> bool:
    """Joins the processes of a run; afterwards `jax.devices()` has the devices of all.

    To be called before anything else of JAX, in every process. On CPUs the processes talk through
    gloo, on GPUs through NCCL. Where a scheduler says who takes part (Slurm, Open MPI, TPU pods),
    `jax.distributed.initialize()` alone finds out.

    Args:
        coordinator: address of process 0, ``"host:port"``; by default the environment variable
            JAX_COORDINATOR_ADDRESS.
        processes: number of processes; by default JAX_NUM_PROCESSES.
        process: which one this is, from 0; by default JAX_PROCESS_ID.
        timeout: seconds to wait for the others.

    Returns:
        Whether there are several processes: False, and nothing done, where neither arguments nor
        variables say anything, or they say one process.

    Raises:
        ValueError: if some of the three are given and others missing, or one makes no sense.
        RuntimeError: if JAX has been used already, or the others do not come in time.

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
    if len(missing) == len(found):
        return False
    if missing:
        there = ", ".join(f"{name} {value}" for name, value in found.items() if value is not None)
        raise ValueError(
            f"unitscale.parallel.initialize: {missing[0]} must be given too; got only {there}. "
            f"Pass it or set {_VARIABLES[missing[0]]}."
        )
    count, index = (_whole(name, found[name]) for name in ("processes", "process"))
    if not (count > 0 and 0 <= index < count):
        raise ValueError(
            "unitscale.parallel.initialize: process must be from 0 to processes - 1; got process "
            f"{index} of {count}"
        )
    address = str(found["coordinator"])
    if not address.rpartition(":")[0] or not address.rpartition(":")[2].isdigit():
        raise ValueError(
            "unitscale.parallel.initialize: coordinator must be 'host:port' of process 0; got "
            f"{address!r}"
        )
    if count == 1:
        return False
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, count, index, initialization_timeout=timeout)
    return True


def _whole(name: str, value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise ValueError(
            f"unitscale.parallel.initialize: {name} must be a whole number; got {value!r}"
        ) from None
