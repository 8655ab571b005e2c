"""Programs and gradients on the CPU devices that tests/conftest.py sets up."""

from collections.abc import Callable
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


def relative_error(got: Any, wanted: Any) -> float:
    """Return ||got - wanted|| / ||wanted||, in float64."""
    got, wanted = (np.asarray(x, np.float64) for x in (got, wanted))
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))
