"""Weights in few bits, gathered from the devices that hold their parts."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..core import CastRounding, Format, ScaledArray, is_scaled, widen
from ._quantize import (
    AxisName,
    SharedScale,
    agree,
    axis_size,
    device_keys,
    encode,
    wire_dtype,
    wire_format,
)


def gather_bits(bits: jax.Array, fmt: Format, axis_name: AxisName, axis: int = 0) -> jax.Array:
    """The parts of all devices side by side along ``axis``, the same on every device."""
    gathered = lax.all_gather(bits, axis_name, axis=axis, tiled=True, to="invarying")
    return lax.bitcast_convert_type(gathered, wire_dtype(fmt))


def all_gather(
    weights: Any,
    axis_name: AxisName,
    dtype: Any = jnp.float8_e4m3fn,
    *,
    axis: int = 0,
    rounding: CastRounding = "nearest",
    key: jax.Array | None = None,
) -> Any:
    """Whole weights from their parts, which travel as FP8: the way there of FSDP.

    Scaling:
        data = part / scale, rounded once and saturating; the scale is the smallest power of two
        with which the largest magnitude of all parts fits. What is in ``dtype`` already, with one
        power of two for the scale of all parts, arrives as it was.

    No derivative passes: an 8-bit array has 8-bit cotangents. Differentiate with respect to
    ``to_array`` of what this returns, and bring the gradient back with `reduce_scatter`.

    Args:
        weights: tree of floating arrays and ScaledArrays (of one scale), each this device's part.
            To be called inside `jax.shard_map`.
        axis_name: mesh axis, or several that count as one.
        dtype: format on the wire and of the result: float8, float16 or bfloat16.
        axis: dimension along which the parts lie side by side.
        rounding: "nearest" or "stochastic".
        key: `jax.random` key for stochastic rounding, the same on all devices.

    Returns:
        The same tree of ScaledArrays with ``axis`` times the number of devices, in ``dtype``, the
        same on all devices. The scale is NaN where some part has an entry that is not finite.

    Raises:
        TypeError: if a leaf is not floating, or the exchange is differentiated.
        ValueError: outside of shard_map, for float32 (use `jax.lax.all_gather`) or another format
            that cannot be sent, for a leaf without ``axis``, for an unknown rounding, or without a
            key for a stochastic one.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> from unitscale.parallel import make_mesh
        >>> mesh = make_mesh({"fsdp": 1}, devices=jax.devices()[:1])
        >>> whole = jax.shard_map(
        ...     lambda w: all_gather(w, "fsdp"), mesh=mesh, in_specs=P("fsdp"), out_specs=P()
        ... )
        >>> whole(jnp.array([448.0, 3.0]))
        ScaledArray(float8_e4m3fn[2], scale=1)

    References:
        Peng et al., "FP8-LM", 2023, arXiv 2310.18313, section 2.3 (weights of ZeRO in FP8).
    """
    where = "all_gather"
    axis_size(where, axis_name)
    fmt = wire_format(where, dtype)
    if wire_dtype(fmt).itemsize > 2:
        raise ValueError(
            f"unitscale.parallel.{where}: dtype must have at most 16 bits; got {fmt.name}. Use "
            "jax.lax.all_gather."
        )
    found, structure = jax.tree_util.tree_flatten_with_path(weights, is_leaf=is_scaled)
    values = []
    for path, leaf in found:
        value = leaf.value if is_scaled(leaf) else leaf
        if not jnp.issubdtype(jnp.result_type(value), jnp.floating):
            raise TypeError(
                f"unitscale.parallel.{where}: weights{jax.tree_util.keystr(path)} must be floating "
                f"or a ScaledArray; got dtype {jnp.result_type(value)}"
            )
        if not -jnp.ndim(value) <= axis < jnp.ndim(value):
            raise ValueError(
                f"unitscale.parallel.{where}: weights{jax.tree_util.keystr(path)} must have axis "
                f"{axis}; got shape {jnp.shape(value)}. Keep small arrays whole on every device."
            )
        values.append(jnp.asarray(value))
    shared = agree(values, [fmt] * len(values), [1.0] * len(values), axis_name)
    keys = device_keys(where, rounding, key, axis_name, len(values))

    def one(value: jax.Array, scale: SharedScale, key: jax.Array | None) -> ScaledArray:
        bits = encode(widen(value) * scale.inverse, fmt, rounding, key)
        return ScaledArray(gather_bits(bits, fmt, axis_name, axis % value.ndim), scale.scale)

    return jax.tree.unflatten(structure, list(map(one, values, shared, keys)))
