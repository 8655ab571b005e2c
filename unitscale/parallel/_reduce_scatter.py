"""The mean over devices, each keeping a part: an all-to-all in few bits and a wide local sum."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..core import CastRounding, Format, is_scaled, narrow, widen
from ._quantize import (
    AxisName,
    SharedScale,
    agree,
    axis_size,
    check_varying,
    decode,
    device_keys,
    encode,
    wire_dtype,
    wire_format,
)


def scatter_mean(
    parts: jax.Array,
    fmt: Format,
    shared: SharedScale,
    axis_name: AxisName,
    rounding: CastRounding,
    key: jax.Array | None,
) -> jax.Array:
    """The mean of part i over all devices on device i, in units of the scale.

    Args:
        parts: (devices, ...) what this device has for each, as values.
        fmt: format of at most 16 bits that the parts are sent in.
        shared: the scale of all devices.
        axis_name: mesh axis.
        rounding: of what is sent.
        key: of this device, for stochastic rounding.

    Returns:
        (...) float32: the mean of what was sent, within the range of the format.
    """
    bits = encode(widen(parts) * shared.inverse, fmt, rounding, key)
    received = lax.all_to_all(bits, axis_name, 0, 0)
    return jnp.sum(decode(received, fmt), axis=0) / received.shape[0]


def checked_leaves(where: str, tree: Any, axis_name: AxisName) -> tuple[list[jax.Array], Any]:
    """The leaves of a tree of gradients and its structure.

    Raises:
        TypeError: if one is not floating.
        ValueError: if JAX knows that one is the same on all devices.
    """
    found, structure = jax.tree_util.tree_flatten_with_path(tree)
    leaves = []
    for path, leaf in found:
        name = f"grads{jax.tree_util.keystr(path)}"
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise TypeError(
                f"unitscale.parallel.{where}: {name} must be floating; got dtype "
                f"{jnp.result_type(leaf)}. Leave it out, or give it to jax.lax.psum."
            )
        check_varying(where, name, leaf, axis_name)
        leaves.append(jnp.asarray(leaf))
    return leaves, structure


def reduce_scatter(
    grads: Any,
    axis_name: AxisName,
    dtype: Any = jnp.float8_e4m3fn,
    *,
    axis: int = 0,
    rounding: CastRounding = "nearest",
    key: jax.Array | None = None,
) -> Any:
    """Mean of gradients over a mesh axis, each device keeping its part: the way back of FSDP.

    Scaling:
        As the first half of `all_reduce`: one power-of-two scale per tensor for all devices, FP8
        parts through an all-to-all, their mean in float32. Rounded once; n - 1 bytes leave a device
        for every n elements.

    Args:
        grads: tree of floating arrays of one shape on all devices, with ``axis`` divisible by their
            number. To be called inside `jax.shard_map`.
        axis_name: mesh axis, or several that count as one.
        dtype: format of the exchange: float8, float16, bfloat16, or float32 (`jax.lax.psum_scatter`
            itself).
        axis: dimension that is cut.
        rounding: "nearest" or "stochastic" (unbiased).
        key: `jax.random` key for stochastic rounding, the same on all devices.

    Returns:
        The same tree, ``axis`` divided by the number of devices, in the dtypes that came in. All of
        a tensor is NaN where one device has an entry that is not finite.

    Raises:
        TypeError: if a leaf is not floating or a ScaledArray, or the exchange is differentiated.
        ValueError: outside of shard_map, if the axis cannot be cut, or for arguments that
            `all_reduce` refuses.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> from unitscale.parallel import make_mesh
        >>> mesh = make_mesh({"fsdp": 1}, devices=jax.devices()[:1])
        >>> mean = jax.shard_map(
        ...     lambda g: reduce_scatter(g, "fsdp"),
        ...     mesh=mesh,
        ...     in_specs=P("fsdp"),
        ...     out_specs=P("fsdp"),
        ... )
        >>> print(mean(jnp.array([1.0, -3.0])))
        [ 1. -3.]

    References:
        Peng et al., "FP8-LM", 2023, arXiv 2310.18313, section 2.1.
    """
    where = "reduce_scatter"
    devices = axis_size(where, axis_name)
    fmt = wire_format(where, dtype)
    if any(map(is_scaled, jax.tree.leaves(grads, is_leaf=is_scaled))):
        raise TypeError(
            f"unitscale.parallel.{where}: grads must be plain arrays, as a scale cannot be cut; "
            "got a ScaledArray. Differentiate with respect to to_array(params)."
        )
    leaves, structure = checked_leaves(where, grads, axis_name)
    keys = device_keys(where, rounding, key, axis_name, len(leaves))
    for leaf in leaves:
        if not -leaf.ndim <= axis < leaf.ndim or leaf.shape[axis] % devices:
            raise ValueError(
                f"unitscale.parallel.{where}: axis {axis} of every leaf must be divisible by the "
                f"{devices} devices of {axis_name!r}; got shape {leaf.shape}. Pad it, or use "
                "all_reduce."
            )
    shared = agree(leaves, [fmt] * len(leaves), [1.0] * len(leaves), axis_name)

    def one(leaf: jax.Array, scale: SharedScale, key: jax.Array | None) -> jax.Array:
        cut = axis % leaf.ndim
        if wire_dtype(fmt).itemsize == 4:
            total = lax.psum_scatter(widen(leaf), axis_name, scatter_dimension=cut, tiled=True)
            return narrow(total / devices, leaf.dtype)
        shape = (*leaf.shape[:cut], devices, leaf.shape[cut] // devices, *leaf.shape[cut + 1 :])
        parts = jnp.moveaxis(leaf.reshape(shape), cut, 0)
        mean = scatter_mean(parts, fmt, scale, axis_name, rounding, key)
        return narrow(mean * scale.scale, leaf.dtype)

    return jax.tree.unflatten(structure, list(map(one, leaves, shared, keys)))
