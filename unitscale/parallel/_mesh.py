"""Meshes of devices, and which part of a batch or a parameter lies on which device."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ..core import batch_axes, is_scaled


def make_mesh(axes: Mapping[str, int], *, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of named axes over all devices of all processes, by `jax.make_mesh`.

    Args:
        axes: name to number of devices, as a config gives it: ``{"data": 4, "fsdp": 2}``. The last
            axis has the nearest neighbours.
        devices: what to use; by default `jax.devices()`.

    Returns:
        A Mesh whose axes are left to the compiler (`jax.sharding.AxisType.Auto`), as jit with
        shardings wants them; `jax.shard_map` takes it too.

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


def batch_share(mesh: Mesh) -> tuple[int, int]:
    """Which share of a batch this process gives to `shard_batch`.

    Processes whose devices hold the same rows, as those of one tensor parallel group do, give the
    same share.

    Args:
        mesh: of `make_mesh`.

    Returns:
        The number of the share, from 0, and that of shares; (0, 1) for one process.

    Raises:
        ValueError: if the rows of two processes overlap in part.

    Example:
        >>> batch_share(make_mesh({"data": 1}, devices=jax.devices()[:1]))
        (0, 1)
    """
    ways = math.prod(mesh.shape[name] for name in batch_axes(mesh))
    rows: dict[int, set[int]] = {}
    for device, (part,) in _batch_sharding(mesh).devices_indices_map((ways,)).items():
        rows.setdefault(device.process_index, set()).update(range(ways)[part])
    shares = sorted({tuple(sorted(own)) for own in rows.values()})
    if sum(map(len, shares)) != ways:
        raise ValueError(
            "unitscale.parallel.batch_share: the rows of a batch that processes hold must be the "
            f"same or apart; got {rows} on the mesh {dict(mesh.shape)}. Change an axis, so that it "
            "is that of whole processes."
        )
    return shares.index(tuple(sorted(rows[jax.process_index()]))), len(shares)


def shard_batch(batch: Any, mesh: Mesh) -> Any:
    """Divides the first dimension of a batch over the axes of `batch_axes`.

    Args:
        batch: tree of arrays of one leading size. With several processes each passes its own share
            of the global batch, the one that `batch_share` names.
        mesh: of `make_mesh`.

    Returns:
        The same tree of global arrays.

    Raises:
        ValueError: if a leaf has no dimension, or its devices do not divide it.

    Example:
        >>> mesh = make_mesh({"data": 1}, devices=jax.devices()[:1])
        >>> shard_batch(np.zeros((4, 8)), mesh).sharding.spec
        P('data',)
    """
    names = batch_axes(mesh)
    ways = math.prod(mesh.shape[name] for name in names)
    sharding = _batch_sharding(mesh)
    processes = len({device.process_index for device in mesh.devices.flat})
    _, shares = batch_share(mesh)

    def place(x: Any) -> jax.Array:
        rows = jnp.shape(x)[0] * shares if jnp.ndim(x) else 0
        if not rows or rows % ways:
            raise ValueError(
                f"unitscale.parallel.shard_batch: the batch must be divisible by the {ways} "
                f"devices of {' and '.join(names)}; got a leaf of shape {jnp.shape(x)} in each of "
                f"{shares} shares. Change the batch size or the mesh."
            )
        if processes == 1:
            return jax.device_put(x, sharding)
        x = np.asarray(x)
        return jax.make_array_from_process_local_data(sharding, x, (rows, *x.shape[1:]))

    return jax.tree.map(place, batch)


def _batch_sharding(mesh: Mesh) -> NamedSharding:
    names = batch_axes(mesh)
    return NamedSharding(mesh, PartitionSpec(names) if names else PartitionSpec())


ROW_LAYERS = frozenset(
    ("down", "down_proj", "out", "o", "wo", "output", "out_proj", "o_proj", "c_proj", "fc2")
)
"""Names of layers that end a block, which `param_shardings` cuts along their inputs."""

EXPERT_LAYERS = frozenset(("experts",))
"""Names of what holds one matrix for each expert, which `param_shardings` divides among devices."""
BIAS = "bias"
"""The name of a vector for each expert."""


def param_shardings(
    params: Any,
    mesh: Mesh,
    *,
    small: int = 1024,
    rows: Collection[str] = ROW_LAYERS,
    experts: Collection[str] = EXPERT_LAYERS,
) -> Any:
    """A sharding for every parameter, from its shape and its name.

    Over ``tensor`` the matrices of a block are paired: the first ones are cut along their last
    dimension (the outputs of a `dense` kernel), those that end the block, which have one of the
    names ``rows`` in their path, along the one before (the inputs). So a device computes with its
    own hidden units or heads, and a block costs one sum over devices forward and one backward. The
    names in `unitscale.nn` are ``down`` in an MLP and ``out`` in attention; others are those of
    common libraries.

    Over ``expert`` the matrices of a mixture of experts, which have one of the names ``experts`` in
    their path, are cut along the dimension before their last two, and those named ``bias`` along
    the one before the last: each device has its own experts, as `ops.mixture` and `nn.MoE` compute
    them.

    Layers of `unitscale.nn` that are traced under ``jax.set_mesh(mesh)`` keep activations where the
    batch lies, so that weights come to them.

    Over ``fsdp`` the largest of the last two dimensions is cut that can be and is not; dimensions
    before them (stacked layers) never are. Vectors, small arrays and what the devices do not divide
    are whole on every device. The scales of a ScaledArray are cut as its data is, where the devices
    divide them.

    Args:
        params: tree of arrays or ScaledArrays; optimizer state too, whose arrays have the shapes
            and paths of parameters.
        mesh: of `make_mesh`.
        small: arrays of fewer entries stay whole.
        rows: names of the layers whose matrices are cut along their inputs.
        experts: names of what holds the matrices of experts.

    Returns:
        The same tree of NamedSharding, for `jax.device_put` and `jax.jit`.

    Example:
        >>> mesh = make_mesh({"fsdp": 1, "tensor": 1}, devices=jax.devices()[:1])
        >>> params = {
        ...     "up": {"kernel": jnp.zeros((64, 32))},
        ...     "down": {"kernel": jnp.zeros((32, 64))},
        ... }
        >>> shardings = param_shardings(params, mesh)
        >>> shardings["up"]["kernel"].spec, shardings["down"]["kernel"].spec
        (P('fsdp', 'tensor'), P('tensor', 'fsdp'))

    References:
        Shoeybi et al., "Megatron-LM", 2019, arXiv 1909.08053, section 3;
        Lepikhin et al., "GShard", 2020, arXiv 2006.16668, section 3 (experts).
    """

    def choose(path: Any, x: Any) -> NamedSharding:
        shape = jnp.shape(x)
        spec: list[str | None] = [None] * len(shape)
        if len(shape) >= 2 and math.prod(shape) >= small:
            names = {_name(key) for key in path}
            if not names.isdisjoint(experts):
                each = len(shape) - (2 if BIAS in names else 3)
                if each >= 0 and "expert" in mesh.shape and not shape[each] % mesh.shape["expert"]:
                    spec[each] = "expert"
                if BIAS in names:
                    return NamedSharding(mesh, PartitionSpec(*spec))
            free = [len(shape) - 2, len(shape) - 1]
            cut = free[1 if names.isdisjoint(rows) else 0]
            if "tensor" in mesh.shape and shape[cut] % mesh.shape["tensor"] == 0:
                spec[cut] = "tensor"
                free.remove(cut)
            free = [d for d in free if "fsdp" in mesh.shape and not shape[d] % mesh.shape["fsdp"]]
            if free:
                spec[max(free, key=lambda d: shape[d])] = "fsdp"
        return NamedSharding(mesh, PartitionSpec(*spec))

    def place(path: Any, x: Any) -> Any:
        if not is_scaled(x):
            return choose(path, x)
        data, *scales = jax.tree.leaves(x)
        own = choose(path, data)
        cuts = [_cut_alike(own, jnp.shape(data), jnp.shape(scale)) for scale in scales]
        return jax.tree.unflatten(jax.tree.structure(x), [own, *cuts])

    return jax.tree_util.tree_map_with_path(place, params, is_leaf=is_scaled)


def _cut_alike(
    sharding: NamedSharding, shape: tuple[int, ...], other: tuple[int, ...]
) -> NamedSharding:
    """Where scales lie of data that lies so: cut as it is, where that goes."""
    spec: list[str | None] = [None] * len(other)
    if len(shape) == len(other):
        for axis, name in enumerate(sharding.spec):
            if name is not None and other[axis] % sharding.mesh.shape[name] == 0:
                spec[axis] = name
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))


def _name(key: Any) -> str:
    return jax.tree_util.keystr((key,), simple=True)
