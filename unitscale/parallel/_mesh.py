"""Device meshes, and the shardings of batches and parameters."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ..core import batch_axes, fsdp_dimension, is_scaled

ROW_LAYERS = frozenset(
    ("down", "down_proj", "out", "o", "wo", "output", "out_proj", "o_proj", "c_proj", "fc2")
)
"""Names of the last layers of blocks, whose kernels `param_shardings` shards by input."""

_EXPERT_LAYERS = frozenset(("experts",))
"""Names of layers with one matrix per expert, whose kernels `param_shardings` shards by expert."""


def make_mesh(axes: Mapping[str, int], *, devices: Sequence[Any] | None = None) -> Mesh:
    """Make a mesh of named axes over all devices of all processes, by `jax.make_mesh`.

    Args:
        axes: the number of devices by axis name: ``{"data": 4, "fsdp": 2}``. Neighbors along the
            last axis are the closest devices.
        devices: by default `jax.devices()`.

    Returns:
        A Mesh over whose axes the compiler shards (`jax.sharding.AxisType.Auto`).

    Raises:
        ValueError: if a number is not positive, or they do not multiply to the number of devices.

    Example:
        >>> dict(make_mesh({"data": 1, "tensor": 1}, devices=jax.devices()[:1]).shape)
        {'data': 1, 'tensor': 1}
    """
    available = jax.devices() if devices is None else list(devices)
    sizes = tuple(axes.values())
    if not axes or not all(isinstance(n, int) and n > 0 for n in sizes):
        raise ValueError(
            "unitscale.parallel.make_mesh: axes must give each axis a positive number of devices; "
            f"got {dict(axes)}"
        )
    if math.prod(sizes) != len(available):
        product = " x ".join(f"{name} {n}" for name, n in axes.items())
        raise ValueError(
            "unitscale.parallel.make_mesh: the axes must multiply to the number of devices; got "
            f"{product} = {math.prod(sizes)} and {len(available)} devices. Change an axis, pass "
            "devices=, or on a CPU set XLA_FLAGS=--xla_force_host_platform_device_count="
            f"{math.prod(sizes)} before jax is imported."
        )
    return jax.make_mesh(sizes, tuple(axes), (AxisType.Auto,) * len(sizes), devices=available)


def _batch_sharding(mesh: Mesh) -> tuple[NamedSharding, int]:
    """Return the sharding of a batch and the number of shards."""
    names = batch_axes(mesh)
    spec = PartitionSpec(names) if names else PartitionSpec()
    return NamedSharding(mesh, spec), math.prod(mesh.shape[name] for name in names)


def batch_share(mesh: Mesh) -> tuple[int, int]:
    """Return the share of a global batch that this process must pass to `shard_batch`.

    Processes whose devices hold the same rows, such as those of one tensor-parallel group, pass the
    same share.

    Returns:
        The index of the share, from 0, and the number of shares; (0, 1) for one process.

    Raises:
        ValueError: if the rows of two processes partly overlap.
    """
    sharding, shards = _batch_sharding(mesh)
    rows: dict[int, set[int]] = {}
    for device, (part,) in sharding.devices_indices_map((shards,)).items():
        rows.setdefault(device.process_index, set()).update(range(shards)[part])
    shares = sorted({tuple(sorted(own)) for own in rows.values()})
    if sum(map(len, shares)) != shards:
        raise ValueError(
            "unitscale.parallel.batch_share: the rows of a batch on two processes must be the same "
            f"or disjoint; got {rows} on the mesh {dict(mesh.shape)}. Change the axes, so that no "
            "process holds a part of another's rows."
        )
    return shares.index(tuple(sorted(rows[jax.process_index()]))), len(shares)


def shard_batch(batch: Any, mesh: Mesh) -> Any:
    """Shard the first dimension of a batch over the axes of `batch_axes`.

    Args:
        batch: tree of arrays with the same first dimension. Each of several processes passes its
            own share of the global batch (`batch_share`).
        mesh: a mesh from `make_mesh`.

    Raises:
        ValueError: if the first dimension of a leaf is not divisible by the number of shards.

    Example:
        >>> mesh = make_mesh({"data": 1}, devices=jax.devices()[:1])
        >>> shard_batch(np.zeros((4, 8)), mesh).sharding.spec
        P('data',)
    """
    sharding, shards = _batch_sharding(mesh)
    processes = len({device.process_index for device in mesh.devices.flat})
    _, shares = batch_share(mesh)

    def shard(x: Any) -> jax.Array:
        rows = jnp.shape(x)[0] * shares if jnp.ndim(x) else 0
        if not rows or rows % shards:
            raise ValueError(
                f"unitscale.parallel.shard_batch: the batch must be divisible by the {shards} "
                f"devices of {' and '.join(batch_axes(mesh))}; got a leaf of shape {jnp.shape(x)} "
                f"in each of {shares} shares. Change the batch size or the mesh."
            )
        if processes == 1:
            return jax.device_put(x, sharding)
        x = np.asarray(x)
        return jax.make_array_from_process_local_data(sharding, x, (rows, *x.shape[1:]))

    return jax.tree.map(shard, batch)


def param_shardings(
    params: Any,
    mesh: Mesh,
    *,
    small: int = 1024,
    rows: Collection[str] = ROW_LAYERS,
    experts: Collection[str] = _EXPERT_LAYERS,
) -> Any:
    """Choose a sharding for every parameter, from its shape and its name.

    The mesh axis ``tensor`` shards the matrices of a block in pairs: the last ones, which have a
    name of ``rows`` in their path, along the next-to-last dimension (the inputs of a `dense`
    kernel), and all others along the last (the outputs). So each device has its own hidden units or
    heads, and a block needs one all-reduce forward and one backward.

    The axis ``expert`` shards arrays with a name of ``experts`` in their path by expert: along the
    third dimension from the end, or for a ``bias`` the second. So each device has its own experts,
    as `ops.mixture` and `nn.MoE` expect.

    The axis ``fsdp`` shards one of the last two dimensions: the largest that is divisible and not
    sharded yet. Vectors, small arrays and indivisible ones are replicated. Scales are sharded like
    their data where they are divisible.

    Args:
        params: tree of arrays or ScaledArrays, such as parameters or optimizer state.
        mesh: a mesh from `make_mesh`.
        small: arrays with fewer entries are replicated.
        rows: names of layers whose matrices are sharded along their inputs.
        experts: names of layers with one matrix per expert.

    Returns:
        The same tree of NamedSharding, for `jax.device_put` and `jax.jit`.

    Example:
        >>> mesh = make_mesh({"fsdp": 1, "tensor": 1}, devices=jax.devices()[:1])
        >>> params = {"up": {"k": jnp.zeros((64, 32))}, "down": {"k": jnp.zeros((32, 64))}}
        >>> shardings = param_shardings(params, mesh)
        >>> shardings["up"]["k"].spec, shardings["down"]["k"].spec
        (P('fsdp', 'tensor'), P('tensor', 'fsdp'))

    References:
        Shoeybi et al., "Megatron-LM", 2019, arXiv 1909.08053, section 3;
        Lepikhin et al., "GShard", 2020, arXiv 2006.16668, section 3 (experts).
    """

    def divides(name: str, n: int) -> bool:
        return name in mesh.shape and n % mesh.shape[name] == 0

    def choose(path: Any, shape: tuple[int, ...]) -> list[str | None]:
        spec: list[str | None] = [None] * len(shape)
        if len(shape) < 2 or math.prod(shape) < small:
            return spec
        names = {jax.tree_util.keystr((key,), simple=True) for key in path}
        if not names.isdisjoint(experts):
            expert = len(shape) - (2 if "bias" in names else 3)
            if expert >= 0 and divides("expert", shape[expert]):
                spec[expert] = "expert"
            if "bias" in names:
                return spec
        free = [len(shape) - 2, len(shape) - 1]
        axis = free[names.isdisjoint(rows)]
        if divides("tensor", shape[axis]):
            spec[axis] = "tensor"
            free.remove(axis)
        if "fsdp" in mesh.shape:
            dimension = fsdp_dimension(shape, mesh.shape["fsdp"], free)
            if dimension is not None:
                spec[dimension] = "fsdp"
        return spec

    def shard(path: Any, x: Any) -> Any:
        leaves, structure = jax.tree.flatten(x)  # data and scale, or one array
        data, *_ = shapes = [jnp.shape(leaf) for leaf in leaves]
        spec, shardings = choose(path, data), []
        for shape in shapes:
            names = spec if len(shape) == len(data) else [None] * len(shape)
            fits = (name and divides(name, n) for name, n in zip(names, shape, strict=True))
            own = [name if fit else None for name, fit in zip(names, fits, strict=True)]
            shardings.append(NamedSharding(mesh, PartitionSpec(*own)))
        return jax.tree.unflatten(structure, shardings)

    return jax.tree.map_with_path(shard, params, is_leaf=is_scaled)
