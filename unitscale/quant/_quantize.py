"""Quantize and dequantize one tensor; compute its scale from its amax."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ..core import (
    Format,
    ScaledArray,
    amax,
    as_scale,
    cast,
    format_of,
    materialize,
    scale_to_fit,
    to_float,
    widen,
)
from ._config import Block, Delayed, Dynamic, Static, Strategy, Unit, check_strategy

Cast = Callable[[jax.Array, Any], Any]


def needs_scale(dtype: Any) -> bool:
    """Return whether a format has less range than float32; other formats are cast at scale 1."""
    return format_of(dtype).exponent_bits < format_of("float32").exponent_bits


def tensor_scale(
    x: jax.Array, fmt: Format, margin: int = 0, axis: tuple[int, ...] | None = None
) -> jax.Array:
    """Return the `Dynamic` scale of a tensor; with ``axis``, one per slice, with size-1 axes."""
    return scale_to_fit(amax(x, axis), fmt, margin)


def quantize_at(x: jax.Array, dtype: Any, scale: Any, cast_data: Cast = cast) -> ScaledArray:
    """Quantize to a format at a given scale: a Python number, an array, or None for 1."""
    if scale is None or (isinstance(scale, float | int) and scale == 1):
        return ScaledArray(cast_data(x, dtype))
    # The inverse of a power of two is exact.
    return ScaledArray(cast_data(widen(x) * (1 / scale), dtype), scale)


def quantize_dynamic(
    x: jax.Array, dtype: Any, strategy: Any, summed: tuple[int, ...], cast_data: Cast = cast
) -> ScaledArray:
    """Quantize an array with the strategy `Dynamic` or `Block`, using the caller's cast."""
    fmt, summed = format_of(dtype), tuple(sorted(summed))
    if isinstance(strategy, Dynamic):
        axes = summed if strategy.granularity == "channel" else None
        return quantize_at(x, dtype, tensor_scale(x, fmt, strategy.margin, axes), cast_data)
    if not isinstance(strategy.dims, int):
        raise ValueError(
            "unitscale.quant.quantize: Block: dims must be 1 or 2 for a single tensor; got "
            f"{strategy.dims}"
        )
    sizes = [1] * x.ndim
    kept = [axis for axis in range(x.ndim) if axis not in summed]
    for axes in (summed, kept if strategy.dims == 2 else ()):
        if axes:
            sizes[axes[-1]] = min(strategy.size, max(x.shape[axes[-1]], 1))
    pads = [(0, -n % size) for n, size in zip(x.shape, sizes, strict=True)]
    split = _split(jnp.pad(widen(x), pads) if pads else widen(x), sizes)
    within = tuple(range(1, split.ndim, 2))
    largest = lax.squeeze(amax(split, within), within)
    scale = _block_scale(largest, fmt, strategy)
    if strategy.adaptive:
        larger = _block_scale(largest, fmt, strategy, 1.5)
        growth = jnp.square(to_float(larger) / to_float(scale))
        better = growth * _error(split, larger, fmt, within) < _error(split, scale, fmt, within)
        scale = jnp.where(better, larger, scale)
    scaled = ScaledArray(x, scale, block_shape=tuple(sizes))
    return scaled.map_data(lambda x: cast_data(widen(x) / to_float(scaled.full_scale), dtype))


def _block_scale(largest: jax.Array, fmt: Format, strategy: Block, times: float = 1.0) -> jax.Array:
    """Return the scale of each block; NaN if amax is not finite and the data has no NaN."""
    scale_format = format_of(strategy.scale_format)
    finite, unit = jnp.isfinite(largest), None
    if scale_format.name != "float8_e4m3fn":
        scale = scale_to_fit(largest, fmt)
    else:
        if strategy.tensor_scale:
            whole = jnp.max(jnp.where(finite, largest, 0.0), initial=0.0)
            most = scale_format.max * fmt.max / (1.5 if strategy.adaptive else 1.0)
            unit = jnp.maximum(scale_to_fit(whole, dataclasses.replace(fmt, max=most)), 2.0**-117)
            largest = largest / unit
        scale = jnp.maximum(largest / fmt.max * times, scale_format.smallest_subnormal)
        scale = jnp.where(finite & (largest > 0), scale, 1.0)
    if not fmt.has_nan:
        scale = jnp.where(finite, scale, jnp.nan)
    scale = lax.stop_gradient(cast(scale, scale_format))
    return scale if unit is None else widen(scale) * unit


def _error(split: jax.Array, scale: jax.Array, fmt: Format, within: tuple[int, ...]) -> jax.Array:
    """Return the squared rounding error of each block, in units of its scale."""
    x = split / lax.expand_dims(to_float(scale), within)
    fmt = dataclasses.replace(fmt, dtype=None)  # XLA may drop a conversion to a dtype and back
    ones = jnp.ones([x.shape[axis] for axis in within])  # a CPU sums slowly without a dot
    pairs = within, tuple(range(len(within)))
    return jnp.tensordot(jnp.square(cast(x, fmt) - x), ones, pairs, precision="highest")


# Signs of the Hadamard matrix, fixed at random. One vector serves all matmuls and steps.
_SIGNS = np.array([1, 1, -1, 1, -1, -1, -1, 1, 1, -1, -1, 1, 1, 1, -1, -1], np.float32)


def hadamard(x: jax.Array, axis: int) -> jax.Array:
    """Multiply groups along an axis by an orthogonal matrix with random signs; return float32.

    The matrix cancels in a matmul of two such arrays that sums over the axis. Groups have 16
    elements, or the largest power of two below 16 that divides the axis.

    References:
        NVIDIA, "Pretraining Large Language Models with NVFP4", 2025, arXiv 2509.25149, section 4.2.
    """
    size = math.gcd(x.shape[axis], len(_SIGNS))
    parity = np.bitwise_count(np.arange(size)[:, None] & np.arange(size)) % 2
    matrix = np.where(parity, -1, 1) * _SIGNS[:size, None] / np.sqrt(size)
    shape = (*x.shape[:axis], x.shape[axis] // size, size, *x.shape[axis + 1 :])
    groups = widen(x).reshape(shape)
    groups = jnp.tensordot(np.float32(matrix), groups, ((0,), (axis + 1,)), precision="highest")
    return jnp.moveaxis(groups, 0, axis + 1).reshape(x.shape)


def _split(x: jax.Array, sizes: list[int]) -> jax.Array:
    """Reshape (n, ...) to (n / size, size, ...); keep explicit mesh axes that divide n / size."""
    counts = [n // size for n, size in zip(x.shape, sizes, strict=True)]
    shape = [part for pair in zip(counts, sizes, strict=True) for part in pair]
    own = jax.typeof(x).sharding
    if not any(own.spec):
        return x.reshape(shape)
    spec = [
        axes if count % math.prod(own.mesh.shape[a] for a in jax.tree.leaves(axes)) == 0 else None
        for axes, count in zip(own.spec, counts, strict=True)
    ]
    x = jax.sharding.reshard(x, NamedSharding(own.mesh, PartitionSpec(*spec)))
    halves = PartitionSpec(*(axes for part in spec for axes in (part, None)))
    return jnp.reshape(x, shape, out_sharding=NamedSharding(own.mesh, halves))


def quantize(
    x: Any, dtype: Any, strategy: Strategy | None = None, *, axis: int | tuple[int, ...] = -1
) -> ScaledArray:
    """Quantize an array to a narrow format.

    Scaling:
        data = x / scale, where the strategy chooses the scale; formats with the range of float32
        get none, except from `Static`. `Unit` casts the data of a ScaledArray and keeps its scale;
        the other strategies quantize its value. Finite values saturate; infinity becomes NaN if the
        format lacks it. In FP4 and FP6, which lack NaN too, `Block` makes whole blocks NaN; other
        strategies hide both.

    Args:
        x: floating array or ScaledArray of any shape.
        dtype: target format, as for `unitscale.cast`.
        strategy: how the scale is chosen; `Unit()` by default.
        axis: dimensions that a matmul will sum over. ``Dynamic("channel")`` uses one scale along
            them; `Block` places its blocks along them.

    Raises:
        ValueError: if the format is unknown, an axis is out of range, or the strategy does not
            give one tensor a scale (`Delayed`, or `Static` without exactly one scale).

    Example:
        >>> quantize(jnp.array([0.3, 500.0]), "e4m3fn", Dynamic())
        ScaledArray(float8_e4m3fn[2], scale=2)
    """
    strategy = Unit() if strategy is None else strategy
    check_strategy("quantize", strategy)
    x = x if isinstance(x, ScaledArray) else ScaledArray(x)
    if isinstance(strategy, Unit):
        return cast(x, dtype)
    x = x.value
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    if x.ndim and any(not -x.ndim <= a < x.ndim for a in axes):
        raise ValueError(
            f"unitscale.quant.quantize: axis must be among the {x.ndim} dimensions; got {axis}"
        )
    scales = set(getattr(strategy, "scales", None) or ())
    if isinstance(strategy, Delayed | Static) and len(scales) != 1:
        raise ValueError(
            f"unitscale.quant.quantize: strategy must give one tensor a scale; got {strategy!r}. "
            "Use Static(scale) or Dynamic(); scales in a QuantState are for contract(..., state=)"
        )
    if isinstance(strategy, Static):
        return quantize_at(x, dtype, as_scale(scales.pop()))
    if not needs_scale(dtype):
        return ScaledArray(cast(x, dtype))
    return quantize_dynamic(x, dtype, strategy, tuple({a % x.ndim for a in axes if x.ndim}))


def values_of(quantized: ScaledArray, x: jax.Array) -> jax.Array:
    """Dequantize to the dtype of ``x``. Results out of its range saturate if ``x`` is finite."""
    y = quantized.map_data(materialize).value
    largest = jnp.asarray(format_of(y.dtype).max, y.dtype)
    y = jnp.where(jnp.isfinite(x), jnp.clip(y, -largest, largest), y)
    return cast(y, x.dtype)


def dequantize(x: ScaledArray) -> jax.Array:
    """Return the value of a ScaledArray in bfloat16, or in float32 if its data needs it."""
    exact = format_of(x.dtype).mantissa_bits <= format_of("bfloat16").mantissa_bits
    return x.map_data(materialize).value.astype(jnp.bfloat16 if exact else jnp.float32)
