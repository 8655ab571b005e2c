"""The mean of gradients over devices, exchanged in few bits."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..core import CastRounding, Format, narrow, widen
from ._all_gather import gather_bits
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
from ._reduce_scatter import checked_leaves, scatter_mean


def exchange(
    where: str,
    grads: Any,
    mu: Any,
    axis_name: AxisName,
    dtype: Any,
    rounding: CastRounding,
    key: jax.Array | None,
    small: int,
    small_dtype: Any,
    count: bool = False,
) -> tuple[Any, list[jax.Array]]:
    """`all_reduce`, and the share of entries beyond the format's range, per leaf if ``count``."""
    devices = axis_size(where, axis_name)
    large, little = wire_format(where, dtype), wire_format(where, small_dtype)
    leaves, structure = checked_leaves(where, grads, axis_name)
    mus = [mu] * len(leaves)
    if jax.tree.structure(mu) == structure:
        mus = jax.tree.leaves(mu)
    elif jax.tree.structure(mu) != jax.tree.structure(0):
        raise ValueError(
            f"unitscale.parallel.{where}: mu must be a number, or a tree of numbers as grads; got "
            f"{jax.tree.structure(mu)}"
        )
    if any(isinstance(m, (int, float)) and not 0 < m < float("inf") for m in mus):
        raise ValueError(f"unitscale.parallel.{where}: mu must be positive and finite; got {mu}")
    keys = device_keys(where, rounding, key, axis_name, len(leaves))
    formats = [large if leaf.size >= small else little for leaf in leaves]
    shared = agree(leaves, formats, mus, axis_name)
    means = [
        _mean(leaf, fmt, one, devices, axis_name, rounding, k)
        for leaf, fmt, one, k in zip(leaves, formats, shared, keys, strict=True)
    ]
    saturated = []
    if count and leaves:
        beyond = [
            jnp.mean(jnp.abs(widen(leaf)) * one.inverse > fmt.max, dtype=jnp.float32)
            for leaf, fmt, one in zip(leaves, formats, shared, strict=True)
        ]
        saturated = list(lax.pmean(jnp.stack(beyond), axis_name))
    return jax.tree.unflatten(structure, means), saturated


def _mean(
    leaf: jax.Array,
    fmt: Format,
    shared: SharedScale,
    devices: int,
    axis_name: AxisName,
    rounding: CastRounding,
    key: jax.Array | None,
) -> jax.Array:
    if wire_dtype(fmt).itemsize == 4 or not leaf.size:
        return narrow(lax.pmean(widen(leaf), axis_name), leaf.dtype)
    first, second = (None, None) if key is None else jax.random.split(key)
    flat = leaf.reshape(-1)
    parts = jnp.pad(flat, (0, -flat.size % devices)).reshape(devices, -1)
    mean = scatter_mean(parts, fmt, shared, axis_name, rounding, first)
    data = gather_bits(encode(mean, fmt, rounding, second), fmt, axis_name)
    value = widen(data)[: flat.size].reshape(leaf.shape) * shared.scale
    return narrow(value, leaf.dtype)


def all_reduce(
    grads: Any,
    axis_name: AxisName,
    dtype: Any = jnp.float8_e4m3fn,
    *,
    mu: Any = 1.0,
    rounding: CastRounding = "nearest",
    key: jax.Array | None = None,
    small: int = 1024,
    small_dtype: Any = jnp.float32,
) -> Any:
    """Mean of gradients over a mesh axis, exchanged in FP8.

    Scaling:
        1. All devices agree on one power-of-two scale per tensor: that with which the largest
           magnitude of any device fits into the format, divided by ``mu``.
        2. Each rounds g / scale to ``dtype``, saturating, and sends part i to device i (an
           all-to-all). Device i takes the mean of what it received in float32.
        3. The mean, which cannot be larger than its terms, is rounded to ``dtype`` at the same
           scale and sent to all (an all-gather), as bits of unsigned integers in both directions.

        Two roundings and, per tensor, one integer beside the data: 2 (n - 1) / n bytes per element
        on n devices, a quarter of a float32 all-reduce. An entry below the format's smallest value
        times the scale (2^-17 of the largest in float8_e4m3fn) is lost to nearest rounding, and
        kept on average by stochastic rounding.

    Args:
        grads: tree of floating arrays, of the same shapes on all devices. A ScaledArray that
            `jax.grad` made, data beside a scale of zero, is a tree like any other. To be called
            inside `jax.shard_map`.
        axis_name: mesh axis, or several that count as one.
        dtype: format of the exchange: float8, float16, bfloat16, or float32 (`jax.lax.pmean`).
        mu: positive factor on the data, rounded down to a power of two; a number or a tree of
            numbers as ``grads``. Above 1 the largest entries may saturate and small ones gain
            precision (see `AutoScale`).
        rounding: "nearest" or "stochastic", which is unbiased and different on each device.
        key: `jax.random` key for stochastic rounding, the same on all devices.
        small: leaves of fewer entries are exchanged in ``small_dtype``.
        small_dtype: format of small leaves.

    Returns:
        The same tree of means, in the dtypes that came in, bit for bit the same on all devices. All
        of a tensor is NaN where one device has an entry that is not finite (in bfloat16 and
        float32, the entries it touches).

    Raises:
        TypeError: if a leaf is not floating, or the exchange is differentiated.
        ValueError: outside of shard_map, for a format that cannot be sent, an unknown rounding, a
            missing key, a ``mu`` that is not positive, or a gradient that JAX has summed already.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> from unitscale.parallel import make_mesh
        >>> mesh = make_mesh({"data": 1}, devices=jax.devices()[:1])
        >>> mean = jax.shard_map(
        ...     lambda g: all_reduce(g, "data", small=0),
        ...     mesh=mesh,
        ...     in_specs=P("data"),
        ...     out_specs=P(),
        ... )
        >>> print(mean(jnp.array([1.0, 1.05, -300.0])))
        [   1.    1. -288.]

    References:
        Peng et al., "FP8-LM: Training FP8 Large Language Models", 2023, arXiv 2310.18313,
        section 2.1 (one shared scale per tensor; here the sum is wide rather than FP8).
    """
    where = "all_reduce"
    means, _ = exchange(where, grads, mu, axis_name, dtype, rounding, key, small, small_dtype)
    return means
