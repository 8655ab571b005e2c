"""Quantize, dequantize and fake-quantize one tensor; compute its scale from its amax."""

import math
from collections.abc import Callable
from functools import partial
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
    bounded_product,
    cast,
    custom_vjp,
    format_of,
    materialize,
    normal_pow2,
    to_float,
    widen,
)
from ._config import Block, Delayed, Dynamic, Static, Strategy, Unit, check_strategy

MAX_EXPONENT = 126
"""Largest exponent of a scale (`tensor_scale`): 2**126 and 2**-126 are normal in float32."""
MIN_EXPONENT = -MAX_EXPONENT


def needs_scale(dtype: Any) -> bool:
    """Whether a format has fewer exponent bits than float32; others are cast at scale 1."""
    return format_of(dtype).exponent_bits < format_of("float32").exponent_bits


def needed_exponent(largest: jax.Array, fmt: Format) -> jax.Array:
    """The least k in -126 ... 126 with ``largest <= fmt.max * 2**k``, for positive finite input."""
    bits = lax.bitcast_convert_type(largest.astype(jnp.float32), jnp.int32)
    top = int(np.asarray(fmt.max, np.float32).view(np.int32))
    # Mantissas above that of fmt.max carry into the exponent.
    exponent = (bits + ((1 << 23) - 1 - (top & 0x7FFFFF))) >> 23
    return jnp.clip(exponent - (top >> 23), MIN_EXPONENT, MAX_EXPONENT)


def _scale_from(largest: jax.Array, fmt: Format, margin: int) -> jax.Array:
    """The power-of-two scale for an amax; 1 if it is zero, infinite or NaN."""
    exponent = needed_exponent(largest, fmt)
    if margin:
        exponent = jnp.minimum(exponent + margin, MAX_EXPONENT)
    usable = (largest > 0) & (largest < jnp.inf)
    return lax.stop_gradient(jnp.where(usable, normal_pow2(exponent), jnp.float32(1)))


def tensor_scale(
    x: jax.Array, fmt: Format, margin: int = 0, axis: tuple[int, ...] | None = None
) -> jax.Array:
    """Return the `Dynamic` scale of a tensor, or of its slices along ``axis``, keeping it."""
    return _scale_from(amax(x, axis), fmt, margin)


def quantize_at(x: jax.Array, dtype: Any, scale: Any) -> ScaledArray:
    """Quantize to a format at a given scale: a Python number, an array, or None for 1."""
    return at_scale(x, dtype, scale, cast)


def at_scale(x: jax.Array, dtype: Any, scale: Any, cast: Callable[..., jax.Array]) -> ScaledArray:
    if scale is None or (isinstance(scale, float | int) and scale == 1):
        return ScaledArray(cast(x, dtype))
    # The inverse of a power of two is exact.
    return ScaledArray(cast(widen(x) * (1 / scale), dtype), scale)


def _block_shape(shape: tuple[int, ...], block: Block, summed: tuple[int, ...]) -> tuple[int, ...]:
    sizes = [1] * len(shape)
    if summed:
        sizes[summed[-1]] = block.size
    kept = [axis for axis in range(len(shape)) if axis not in summed]
    if block.dims == 2 and kept:
        sizes[kept[-1]] = block.size
    return tuple(min(size, max(n, 1)) for size, n in zip(sizes, shape, strict=True))


def _split(x: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
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


def _quantize_blocks(
    x: jax.Array, dtype: Any, block: Block, summed: tuple[int, ...], cast_data: Callable[..., Any]
) -> ScaledArray:
    sizes = _block_shape(x.shape, block, summed)
    pads = [(0, -n % size) for n, size in zip(x.shape, sizes, strict=True)]
    padded = jnp.pad(jnp.abs(widen(x)), pads) if pads else jnp.abs(widen(x))
    split = _split(padded, sizes)
    largest = jnp.max(split, axis=tuple(range(1, split.ndim, 2)), initial=0.0)
    scale = _scale_from(largest, format_of(dtype), 0)
    full = to_float(ScaledArray(x, scale, block_shape=sizes).full_scale)
    data = cast_data(widen(x) * (1 / full), dtype)
    return ScaledArray(data, cast(scale, block.scale_format), block_shape=sizes)


def quantize_array(
    x: jax.Array,
    dtype: Any,
    strategy: Any,
    summed: tuple[int, ...],
    cast: Callable[..., jax.Array] = cast,
) -> ScaledArray:
    """`quantize` of an array by `Unit`, `Dynamic` or `Block`, with the caller's cast."""
    if isinstance(strategy, Unit) or not needs_scale(dtype):
        return ScaledArray(cast(x, dtype))
    if isinstance(strategy, Block):
        return _quantize_blocks(x, dtype, strategy, summed, cast)
    return at_scale(x, dtype, _scale_of(x, dtype, strategy, summed), cast)


def _scale_of(x: jax.Array, dtype: Any, strategy: Dynamic, summed: tuple[int, ...]) -> jax.Array:
    axes = summed if strategy.granularity == "channel" else None
    return tensor_scale(x, format_of(dtype), strategy.margin, axes)


def quantize(
    x: Any, dtype: Any, strategy: Strategy | None = None, *, axis: int | tuple[int, ...] = -1
) -> ScaledArray:
    """Quantize an array to a narrow format.

    Scaling:
        `Unit` casts the data and keeps its scale. The other strategies divide the data by a new
        scale and multiply the old scale by it; formats with the range of float32 need none. Finite
        values saturate; infinity and NaN stay, or become NaN in a format without infinity.

    Args:
        x: floating array or ScaledArray of any shape.
        dtype: target format, as for `unitscale.cast`.
        strategy: how the scale is chosen; `Unit()` by default.
        axis: the dimensions that a matmul will sum over: ``Dynamic("channel")`` shares scales along
            them, and the blocks of `Block` lie along them.

    Returns:
        ScaledArray with data in ``dtype``.

    Raises:
        ValueError: if the format is unknown, an axis is out of range, the strategy does not have
            one scale for one tensor, or `Block` is given a ScaledArray that has a scale.
        TypeError: if ``strategy`` is not a `Strategy`.

    Example:
        >>> quantize(jnp.array([0.3, 500.0]), "e4m3fn", Dynamic())
        ScaledArray(float8_e4m3fn[2], scale=2)

    References:
        As `Dynamic`.
    """
    strategy = Unit() if strategy is None else strategy
    check_strategy("quantize", strategy)
    x = x if isinstance(x, ScaledArray) else ScaledArray(x)
    if isinstance(strategy, Unit):
        return cast(x, dtype)
    data, scale = x.data, x.full_scale
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    if data.ndim and any(not -data.ndim <= a < data.ndim for a in axes):
        raise ValueError(
            f"unitscale.quant.quantize: axis must be among the {data.ndim} dimensions; got {axis}"
        )
    summed = tuple(sorted({a % data.ndim for a in axes})) if data.ndim else ()
    one_scale = isinstance(strategy, Static) and len(set(strategy.scales or ())) == 1
    if isinstance(strategy, Delayed) or (isinstance(strategy, Static) and not one_scale):
        raise ValueError(
            f"unitscale.quant.quantize: one tensor needs one scale; got {strategy!r}. Use "
            "Static(scale) or Dynamic(); scales in a QuantState are for contract(..., state=)"
        )
    if isinstance(strategy, Static):
        own = as_scale(strategy.scales[0])
    elif scale is None:
        return quantize_array(data, dtype, strategy, summed)
    elif not needs_scale(dtype):
        own = None
    elif isinstance(strategy, Block):
        raise ValueError(
            "unitscale.quant.quantize: Block() takes an array, or a ScaledArray without a "
            f"scale; got {x!r}. Give it x.value."
        )
    else:
        own = _scale_of(data, dtype, strategy, summed)
    # The part of the scale that is out of float32's range moves into the data, and saturates.
    total, rest = bounded_product(scale, own)
    if isinstance(rest, int):
        return ScaledArray(quantize_at(data, dtype, own).data, total)
    data = widen(data) / to_float(own) * jnp.clip(rest, 2.0**-100, 2.0**100)
    return ScaledArray(cast(data, dtype), total)


def values_of(quantized: ScaledArray, x: jax.Array) -> jax.Array:
    """Dequantize to the dtype of ``x``; finite values that were rounded out of range saturate."""
    y = quantized.map_data(materialize).value
    largest = jnp.asarray(format_of(y.dtype).max, y.dtype)
    y = jnp.where(jnp.isfinite(x), jnp.clip(y, -largest, largest), y)
    return cast(y, x.dtype)


def dequantize(x: ScaledArray) -> jax.Array:
    """Return the value of a ScaledArray, in bfloat16 if that holds its mantissa, else float32."""
    exact = format_of(x.dtype).mantissa_bits <= format_of("bfloat16").mantissa_bits
    return x.map_data(materialize).value.astype(jnp.bfloat16 if exact else jnp.float32)


@partial(custom_vjp, nondiff_argnums=(1,))
def _fake_quantize(x, dtype):
    return values_of(ScaledArray(cast(x, dtype)), x)


_fake_quantize.defvjp(lambda x, dtype: (_fake_quantize(x, dtype), None), lambda dtype, _, dy: (dy,))


def fake_quantize(x: jax.Array, dtype: Any) -> jax.Array:
    """Round values to a narrow format and keep their dtype; cotangents are not rounded.

    Example:
        >>> print(fake_quantize(jnp.array([0.3, 9.3]), "e4m3fn"))
        [0.3125 9.    ]
    """
    return _fake_quantize(x, dtype)
