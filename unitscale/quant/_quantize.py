"""Quantization of one tensor: a strategy chooses the scale, the cast saturates."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ..core import (
    Scale,
    ScaledArray,
    as_scale,
    bounded_product,
    cast,
    custom_vjp,
    format_of,
    materialize,
    to_float,
    widen,
)
from ._amax import needs_scale, scale_from, tensor_scale
from ._strategies import Block, Dynamic, Static, Strategy, Unit, check_strategy


def quantize_at(x: jax.Array, dtype: Any, scale: Any) -> ScaledArray:
    """Returns ``x`` in a narrow format at a given scale (a Python number, an array, or None for 1).

    Example:
        >>> print(quantize_at(jnp.array([1.0, 500.0]), "e4m3fn", 2.0).data)
        [0.5 256]
    """
    if scale is None or (isinstance(scale, float | int) and scale == 1):
        return ScaledArray(cast(x, dtype))
    # The inverse of a power of two is exact, and finite for each scale that is chosen here.
    return ScaledArray(cast(widen(x) * (1 / scale), dtype), scale)


def _block_shape(shape: tuple[int, ...], block: Block, summed: tuple[int, ...]) -> tuple[int, ...]:
    sizes = [1] * len(shape)
    if summed:
        sizes[summed[-1]] = block.size
    kept = [axis for axis in range(len(shape)) if axis not in summed]
    if block.dims == 2 and kept:
        sizes[kept[-1]] = block.size
    return tuple(min(size, max(n, 1)) for size, n in zip(sizes, shape, strict=True))


def _block_amax(x: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
    """The largest magnitude of each block; ragged ends are blocks of their own."""
    pads = [(0, -n % size) for n, size in zip(x.shape, sizes, strict=True)]
    x = jnp.abs(widen(x))
    x = jnp.pad(x, pads) if pads else x  # of a number, JAX pads no axis
    x = _split(x, sizes)
    return jnp.max(x, axis=tuple(range(1, x.ndim, 2)), initial=0.0)


def _split(x: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
    """(n / size, size, ...) of (n, ...): explicit axes that divide n go on dividing n / size."""
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
    x: jax.Array, dtype: Any, block: Block, summed: tuple[int, ...]
) -> ScaledArray:
    sizes = _block_shape(x.shape, block, summed)
    scale = lax.stop_gradient(scale_from(_block_amax(x, sizes), format_of(dtype), 0))
    at = ScaledArray(x, scale, block_shape=sizes)
    data = cast(widen(x) * (1 / to_float(at.full_scale)), dtype)
    return ScaledArray(data, cast(scale, block.scale_format), block_shape=sizes)


def _single(strategy: Static) -> float:
    if strategy.scales is None or len(set(strategy.scales)) > 1:
        raise ValueError(
            "unitscale.quant.quantize: one tensor needs one scale; got "
            f"{strategy!r}. Use Static(scale)."
        )
    return strategy.scales[0]


def quantize(
    x: Any, dtype: Any, strategy: Strategy | None = None, *, axis: int | tuple[int, ...] = -1
) -> ScaledArray:
    """Returns ``x`` stored in a narrow format.

    Scaling:
        Under `Unit` no statistics are taken: the data is cast at the scale that it has; a plain
        array has none. The other strategies divide the data by a scale first, which multiplies the
        one that it has. Formats with the range of float32 need no scale. Finite values saturate;
        infinity and NaN stay, or are NaN in a format without infinity, so that a product shows
        them: they are selected beside the clamp, in the same kernel.

    Args:
        x: floating array or ScaledArray of any shape.
        dtype: target format, as for `unitscale.cast`.
        strategy: how the scale is chosen; `Unit()` by default.
        axis: the dimensions that a product will sum over: those that share a scale under
            ``Dynamic("channel")``, and along which the blocks of `Block` lie.

    Returns:
        ScaledArray with data in ``dtype``.

    Raises:
        ValueError: if the format is unknown, an axis is out of range, the scales of the strategy
            are held elsewhere (`Delayed`, and `Static` without a single scale), or `Block` meets a
            ScaledArray with a scale.
        TypeError: if the strategy is not one of this package.

    Example:
        >>> quantize(jnp.array([0.3, 500.0]), "e4m3fn")
        ScaledArray(float8_e4m3fn[2], scale=None)
        >>> quantize(jnp.array([0.3, 500.0]), "e4m3fn", Dynamic())
        ScaledArray(float8_e4m3fn[2], scale=2)

    References:
        Micikevicius et al., "FP8 Formats for Deep Learning", 2022, arXiv 2209.05433, section 3.
    """
    strategy = Unit() if strategy is None else strategy
    check_strategy("quantize", strategy)
    x = x if isinstance(x, ScaledArray) else ScaledArray(x)
    if isinstance(strategy, Unit):
        return cast(x, dtype)
    data, scale = x.data, x.full_scale
    summed = _axes(axis, data.ndim)
    if isinstance(strategy, Static):
        own = as_scale(_single(strategy))
    elif not isinstance(strategy, Dynamic | Block):
        raise ValueError(
            f"unitscale.quant.quantize: the scales of {strategy!r} are held in a QuantState; use "
            "contract(..., state=), or Dynamic() for one tensor"
        )
    elif not needs_scale(dtype):
        own = None
    elif isinstance(strategy, Block):
        if scale is not None:
            raise ValueError(
                "unitscale.quant.quantize: Block() takes an array, or a ScaledArray without a "
                f"scale; got {x!r}. Give it x.value."
            )
        return _quantize_blocks(data, dtype, strategy, summed)
    else:
        axes = summed if strategy.granularity == "channel" else None
        own = tensor_scale(data, format_of(dtype), strategy.margin, axes)
    return _quantize_at_product(data, dtype, scale, own)


def _quantize_at_product(data: jax.Array, dtype: Any, scale: Scale, own: Scale) -> ScaledArray:
    """Data of a scale, divided by one of its own; what the product cannot hold stays in the data.

    There it saturates, at a value beyond float32's range.
    """
    total, rest = bounded_product(scale, own)
    if not isinstance(rest, int):
        data = widen(data) / to_float(own) * jnp.clip(rest, 2.0**-100, 2.0**100)
        return ScaledArray(cast(data, dtype), total)
    return ScaledArray(quantize_at(data, dtype, own).data, total)


def _axes(axis: int | tuple[int, ...], rank: int) -> tuple[int, ...]:
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    if rank == 0:
        return ()
    if any(not -rank <= a < rank for a in axes):
        raise ValueError(
            f"unitscale.quant.quantize: axis must be among the {rank} dimensions; got {axis}"
        )
    return tuple(sorted({a % rank for a in axes}))


def rounded(x: ScaledArray) -> ScaledArray:
    """Returns quantized data that XLA cannot take for the data it was made from.

    Example:
        >>> print(rounded(quantize(jnp.array([0.3, 9.3]), "e4m3fn")).data)
        [0.3125 9]
    """
    return x.map_data(materialize)


def values_of(quantized: ScaledArray, x: jax.Array) -> jax.Array:
    """Returns the value of quantized data in the dtype of ``x``; what was finite saturates there.

    Rounding up can leave the range of float16, and at the end of it that of float32.

    Example:
        >>> x = jnp.float16(65504)
        >>> float(values_of(quantize(x, "bfloat16"), x))
        65504.0
    """
    y = rounded(quantized).value
    largest = jnp.asarray(format_of(y.dtype).max, y.dtype)
    y = jnp.where(jnp.isfinite(x), jnp.clip(y, -largest, largest), y)
    return cast(y, x.dtype)


def dequantize(x: ScaledArray) -> jax.Array:
    """Returns the value of quantized data in the narrowest type that holds it exactly.

    That is bfloat16 for formats of at most 7 mantissa bits, whose values times a power of two it
    holds; float32 for others.

    Example:
        >>> dequantize(quantize(jnp.array([0.3, 500.0]), "e4m3fn", Block(2)))
        Array([0.3125, 512], dtype=bfloat16)
    """
    narrow = format_of(x.dtype).mantissa_bits <= format_of("bfloat16").mantissa_bits
    return rounded(x).value.astype(jnp.bfloat16 if narrow else jnp.float32)


@partial(custom_vjp, nondiff_argnums=(1,))
def _fake_quantize(x, dtype):
    return values_of(ScaledArray(cast(x, dtype)), x)


_fake_quantize.defvjp(lambda x, dtype: (_fake_quantize(x, dtype), None), lambda dtype, _, dy: (dy,))


def fake_quantize(x: jax.Array, dtype: Any) -> jax.Array:
    """Rounds values to a narrow format and keeps them in their own dtype.

    Backward is the identity, so that cotangents are not rounded.

    Args:
        x: floating array.
        dtype: format name, as for `unitscale.cast`.

    Returns:
        Array of the shape and dtype of ``x``.

    Example:
        >>> print(fake_quantize(jnp.array([0.3, 9.3]), "e4m3fn"))
        [0.3125 9.    ]
    """
    return _fake_quantize(x, dtype)
