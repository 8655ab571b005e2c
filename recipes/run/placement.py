"""Where the arrays of a run lie: on one device, or spread over a mesh."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

from unitscale.parallel import batch_axes, batch_share, make_mesh, param_shardings, shard_batch

from ..config import RunConfig
from ..errors import RecipeError
from .batch import loss_inputs


def open_mesh(config: RunConfig) -> Mesh | None:
    """The mesh that a config asks for, over all devices; None for one device."""
    if config.mesh is None:
        if jax.process_count() > 1:
            raise RecipeError(
                f"mesh: expected one of the {jax.device_count()} devices of all "
                f"{jax.process_count()} processes; got null; set mesh.data={jax.device_count()}"
            )
        return None
    axes, precision = config.mesh.model_dump(), config.precision
    divided = math.prod(axes.values()) > axes["data"]
    if precision.exchange and (divided or precision.scalify):
        raise RecipeError(
            "precision.exchange: expected mesh.fsdp, context and tensor 1 and precision.scalify "
            f"null, so that parameters are whole on every device; got {precision.exchange} and "
            f"mesh {axes}; set precision.exchange null"
        )
    try:
        return make_mesh(axes)
    except ValueError as error:
        raise RecipeError(f"mesh: {error}") from error


def place(state: Any, mesh: Mesh | None) -> Any:
    """A tree of arrays, the same in all processes, spread over the mesh by their shapes."""
    if mesh is None:
        return state
    shardings = param_shardings(state, mesh)
    if jax.process_count() == 1:
        return jax.device_put(state, shardings)
    return jax.jit(_same, out_shardings=shardings)(state)


def whole(tree: Any) -> Any:
    """A tree of arrays, each whole in this process; all processes have to ask."""

    def own(x: Any) -> Any:
        if not isinstance(x, jax.Array) or x.is_fully_addressable:
            return x
        replicated = NamedSharding(cast(NamedSharding, x.sharding).mesh, PartitionSpec())
        return jax.jit(_same, out_shardings=replicated)(x).addressable_data(0)

    return jax.tree.map(own, tree)


def _same(tree: Any) -> Any:
    return tree


def share(mesh: Mesh | None) -> dict[str, int]:
    """Which share of each batch this process reads, as arguments of `Data.training`."""
    process, processes = (0, 1) if mesh is None else batch_share(mesh)
    return {"process": process, "processes": processes}


def place_batch(batch: Any, mesh: Mesh | None) -> Any:
    """A batch, its first dimension divided over the mesh."""
    return batch if mesh is None else shard_batch(batch, mesh)


def over(mesh: Mesh | None) -> AbstractContextManager[Any]:
    """Within the block, layers that are traced know the mesh, as under `jax.set_mesh`."""
    return nullcontext() if mesh is None else use_abstract_mesh(mesh.abstract_mesh)


def divided(batch: Any, mesh: Mesh | None) -> Any:
    """What the loss takes of a batch, divided over the mesh, inside a compiled function.

    The first dimension lies over the axes of `batch_axes`; arrays of the shape of the first one,
    (batch, time), have their second over the axis context too.
    """
    if mesh is None:
        return batch
    inputs = loss_inputs(batch)
    rows = batch_axes(mesh)
    tokens = PartitionSpec(rows, "context" if "context" in mesh.shape else None)

    def divide(x: Any) -> Any:
        spec = tokens if x.shape == inputs[0].shape and x.ndim == 2 else PartitionSpec(rows)
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    return tuple(map(divide, inputs))


def on_mesh(step: Callable[..., Any], state: Any, mesh: Mesh | None) -> Callable[..., Any]:
    """The step `(state, batch, ...) -> (state, values)` with its state left where it lies."""
    if mesh is None:
        return step

    def on_divided(state: Any, batch: Any, *rest: Any) -> Any:
        with over(mesh):
            return step(state, divided(batch, mesh), *rest)

    shardings = (param_shardings(state, mesh), None)
    return jax.jit(on_divided, donate_argnums=0, out_shardings=shardings)
