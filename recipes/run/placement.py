"""Where the arrays of a run lie: on one device, or spread over a mesh."""

from collections.abc import Callable
from typing import Any, cast

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from unitscale.parallel import batch_share, make_mesh, param_shardings, shard_batch

from ..config import RunConfig
from ..errors import RecipeError


def open_mesh(config: RunConfig) -> Mesh | None:
    """The mesh that a config asks for, over all devices; None for one device."""
    if config.mesh is None:
        if jax.process_count() > 1:
            raise RecipeError(
                f"mesh: expected one of the {jax.device_count()} devices of all "
                f"{jax.process_count()} processes; got null; set mesh.data={jax.device_count()}"
            )
        return None
    axes = config.mesh.model_dump(exclude={"gradients"})
    if config.mesh.gradients and (axes["fsdp"] * axes["tensor"] > 1 or config.scalify):
        raise RecipeError(
            "mesh.gradients: expected fsdp 1, tensor 1 and scalify null, so that parameters are "
            f"whole on every device; got {config.mesh.gradients} and mesh {axes}; set "
            "mesh.gradients null"
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


def on_mesh(step: Callable[..., Any], state: Any, mesh: Mesh | None) -> Callable[..., Any]:
    """The step `(state, ...) -> (state, values)` with its state left where it lies."""
    if mesh is None:
        return step
    return jax.jit(step, donate_argnums=0, out_shardings=(param_shardings(state, mesh), None))
