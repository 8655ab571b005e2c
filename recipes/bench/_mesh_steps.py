"""What a training step sends between devices, by the mesh that divides it."""

from collections import Counter
from typing import Any

import jax

from unitscale.parallel import batch_axes, make_mesh, param_shardings

from ..config import RunConfig
from ..run.placement import on_mesh
from ..run.step import abstract_step
from ._table import Table
from .aot import compile_h200, h200_available, h200_topology
from .wire import collectives

DEVICES = 8
MESHES = (
    {"data": 8},
    {"fsdp": 8},
    {"fsdp": 4, "tensor": 2},
    {"fsdp": 4, "context": 2},
    {"context": 8},
    {"fsdp": 2, "context": 2, "tensor": 2},
)
NARROW = ("u8", "s8", "f8")
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


def mesh_steps(config: RunConfig) -> Table:
    """Collectives and memory of a config's step on each device, on meshes of eight.

    Compiled for H200s where the CUDA plugin is installed, or else for this machine's CPU.
    """
    kind = "H200" if h200_available() else "CPU"
    rows = []
    for axes in MESHES:
        program = _compiled(config, axes, kind)
        found = collectives(program)
        counts = Counter(collective.kind for collective in found)
        sent = sum(collective.sent for collective in found)
        narrow = sum(collective.sent for collective in found if collective.dtype.startswith(NARROW))
        memory = program.memory_analysis()
        rows.append(
            {
                "mesh": ", ".join(f"{name} {size}" for name, size in axes.items()),
                **{f"{kind}s": counts[kind] for kind in KINDS},
                "MiB sent": sent / 2**20,
                "of it in 8 bits": narrow / max(sent, 1.0),
                "MiB of temporaries": memory.temp_size_in_bytes / 2**20,
                "MiB of arguments": memory.argument_size_in_bytes / 2**20,
            }
        )
    return Table(f"A training step on {DEVICES} devices ({kind}), on each of them", rows)


def _compiled(config: RunConfig, axes: dict[str, int], kind: str) -> Any:
    devices = h200_topology(DEVICES).devices if kind == "H200" else jax.devices()[:DEVICES]
    mesh = make_mesh(axes, devices=devices)
    _, step, (state, batch, index) = abstract_step(config)
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(batch_axes(mesh)))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def placed(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    arguments = (
        jax.tree.map(placed, state, param_shardings(state, mesh)),
        jax.tree.map(lambda x: placed(x, rows), batch),
        placed(index, everywhere),
    )
    divided = on_mesh(step, state, mesh)
    if kind == "H200":
        return compile_h200(divided, *arguments)
    return divided.lower(*arguments).compile()
