"""Programs on the CPU devices that tests/conftest.py sets up, and in two processes."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec as P

from unitscale.parallel import make_mesh


def mesh_of(**axes: int) -> Mesh:
    """Make a mesh over the first devices."""
    return make_mesh(axes, devices=jax.devices()[: int(np.prod(list(axes.values())))])


def explicit_mesh(**axes: int) -> Mesh:
    """Make a mesh with explicit axis types, the default of `jax.make_mesh`."""
    devices = jax.devices()[: int(np.prod(list(axes.values())))]
    types = (AxisType.Explicit,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), devices=devices, axis_types=types)


def on_each(f: Callable[..., Any], devices: int, out: Any = None, **kwargs: Any) -> Callable:
    """Apply `f` to each device's row of (devices, ...) arrays; by default return all results."""
    mesh = mesh_of(data=devices)
    each = P("data") if out is None else out

    def local(*rows):
        result = f(*jax.tree.map(lambda x: x[0], rows))
        return jax.tree.map(lambda x: x[None], result) if out is None else result

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=each, **kwargs))


def start_two(code: str, *words: str, **settings: str) -> list[subprocess.Popen[str]]:
    """Run Python code in two processes that JAX can join, with environment variables."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
    environment = {k: v for k, v in os.environ.items() if "proxy" not in k.lower()} | settings
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parents[2])}
    environment |= {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2"}
    return [
        subprocess.Popen(
            [sys.executable, "-c", code, *words],
            env=environment | {"JAX_PROCESS_ID": str(index)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]


def relative_error(got: Any, wanted: Any) -> float:
    """Return ||got - wanted|| / ||wanted||, in float64."""
    got, wanted = (np.asarray(x, np.float64) for x in (got, wanted))
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))
