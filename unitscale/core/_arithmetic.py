"""Scales, and arithmetic on (data, scale) pairs.

A scale is None (for a plain array, at no cost) or a float array (float32 or an 8-bit format). A
pair represents the value ``data * scale``. Operations on pairs compute the result in float32, round
it once to the data type of the result, and return a pair. The scale of the result does not depend
on the data; square-root rules choose it so that data of RMS 1 stays near RMS 1.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._formats import (
    Rounding,
    is_floating,
    round_to_pow2,
    static_pow2,
    static_pow2_sqrt,
    wide_dtype,
    widen,
)

Scale: TypeAlias = jax.Array | None
"""A scale: None for a plain array, or an array; see `as_scale`."""
Pair: TypeAlias = tuple[jax.Array, Scale]

MAX_EXPONENT = 126
"""Largest exponent of a scale (`ScaledArray`): 2**126 and 2**-126 are normal in float32."""
_LARGEST = 2.0**MAX_EXPONENT

# -- scales ----------------------------------------------------------------------------------


def as_scale(scale: Any) -> Scale:
    """Convert None, a number or an array of floats or integers to a scale.

    A number becomes a float32 array, even if it is 1, so that the structure of a program does not
    depend on the value of a scale. Arrays of float8_e8m0fnu and float8_e4m3fn are kept.
    """
    if scale is None:
        return None
    if isinstance(scale, (int, float, np.number)) and not isinstance(
        scale, (bool, np.complexfloating)
    ):
        if not 1 / _LARGEST <= float(scale) <= _LARGEST:
            raise ValueError(
                "unitscale.ScaledArray: scale must be a number from 2**-126 to 2**126; got "
                f"{scale!r}. Put signs, zeros and other factors into data."
            )
        return jnp.float32(scale)
    dtype = getattr(scale, "dtype", None)
    if not (is_floating(scale) or (dtype is not None and jnp.issubdtype(dtype, jnp.integer))):
        got = f"{type(scale).__name__} {scale!r}" if dtype is None else f"dtype {dtype}"
        raise TypeError(
            f"unitscale.ScaledArray: scale must be None, a number or a real array; got {got}"
        )
    scale = jnp.asarray(scale)
    keep = scale.dtype in (jnp.float8_e8m0fnu, jnp.float8_e4m3fn, jnp.float32, jnp.float64)
    return scale if keep else scale.astype(jnp.float32)


def broadcasts(scale_shape: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Return whether a scale of one shape broadcasts against data of another."""
    try:
        return jnp.broadcast_shapes(scale_shape, shape) == shape
    except ValueError:
        return False


def check_shapes(data: Any, scale: Scale, block_shape: tuple[int, ...] | None) -> None:
    """Raise a ValueError if a scale does not fit its data."""
    shape, scale_shape = jnp.shape(data), () if scale is None else jnp.shape(scale)
    if block_shape is None:
        if not broadcasts(scale_shape, shape):
            raise ValueError(
                f"unitscale.ScaledArray: scale must broadcast against data; got data {shape}, "
                f"scale {scale_shape}. Give it size-1 dimensions, or block_shape= for blocks."
            )
        return
    blocks = None
    if len(block_shape) == len(shape) and all(size > 0 for size in block_shape):
        blocks = tuple(-(-n // size) for n, size in zip(shape, block_shape, strict=True))
    if scale_shape != blocks:
        raise ValueError(
            "unitscale.ScaledArray: block_shape needs one positive size per dimension of data, and "
            f"scale one entry per block; got data {shape}, block_shape {block_shape}, scale "
            f"{scale_shape}"
        )


def to_float(scale: Scale) -> jax.Array:
    """Return a scale as a float32 (or float64) array without a gradient; None counts as 1."""
    if scale is None:
        return jnp.float32(1)
    array = lax.stop_gradient(scale)
    return array.astype(jnp.float32) if array.dtype.itemsize == 1 else array


def scalar_scale(scale: Scale) -> Scale:
    """Reshape a scale that has one entry to a scalar."""
    return None if scale is None else jnp.reshape(scale, ())


def safe_scale(scale: jax.Array) -> jax.Array:
    """Replace scales that are not positive and finite by 1.

    For example, an all-zero tensor has RMS 0, and dividing by it would turn zeros into NaN.
    """
    scale = jnp.asarray(scale)
    return jnp.where((scale > 0) & (scale < jnp.inf), scale, jnp.ones_like(scale))


def divisor(scale: jax.Array) -> jax.Array:
    """Clamp a scale to 2^126, because XLA multiplies by its inverse, and flushes 2^-127 to 0."""
    return jnp.where(scale < jnp.inf, jnp.minimum(scale, _LARGEST), scale)


def scale_near(size: jax.Array, rounding: Rounding = "nearest") -> jax.Array:
    """Round an RMS or amax to a power of two to use as a scale; 1 for zero, infinity and NaN."""
    return safe_scale(divisor(round_to_pow2(size, rounding)))


def common_scale(left: Scale, right: Scale) -> Scale:
    """Return the scale of a sum: the larger one. If only one scale is None, it counts as 1.

    For powers of two it is sqrt(left**2 + right**2), the scale for independent terms, rounded to a
    power of two.
    """
    if left is None and right is None:
        return None
    return jnp.maximum(to_float(left), to_float(right))


# Products and quotients of scales are clamped to 2^-126 ... 2^126, whose inverses are normal, too.
# These functions return the clamped scale, and a remainder that is multiplied into the data.


def bounded_product(left: Scale, right: Scale) -> tuple[Scale, jax.Array | int]:
    """Return left * right, clamped to 2^-126 ... 2^126, and the remainder."""
    if left is None or right is None:
        return right if left is None else left, 1
    a, b = to_float(left), to_float(right)
    scale, low, high = a * b, jnp.minimum(a, b), jnp.maximum(a, b)
    near = _normal(scale, low > 0)
    # In this order no intermediate result leaves the range of float32.
    return near, jnp.where(near == scale, 1, high / near * low)


def _bounded_quotient(left: Scale, right: Scale) -> tuple[Scale, jax.Array | int]:
    if right is None:
        return left, 1
    a, b = to_float(left), to_float(right)
    scale = a / b
    near = _normal(scale, (a > 0) & (b > 0))
    return near, jnp.where(near == scale, 1, a / near / b)


def _normal(scale: jax.Array, positive: jax.Array) -> jax.Array:
    return jnp.where(positive, jnp.clip(scale, 1 / _LARGEST, _LARGEST), scale)


# -- operands --------------------------------------------------------------------------------


def _promoted(data: jax.Array) -> Any:
    if is_floating(data) and data.dtype.itemsize == 1:
        return jnp.bfloat16
    return float if is_floating(data) and getattr(data, "weak_type", False) else data.dtype


def result_dtype(*data: jax.Array) -> np.dtype:
    """Return the promoted data type of operands, with 8-bit floats promoted to bfloat16."""
    return np.dtype(jnp.result_type(*map(_promoted, data)))


def summable(value: jax.Array) -> jax.Array:
    """Convert 8-bit values to bfloat16, because JAX would not sum them in float32."""
    return value.astype(result_dtype(value))


def operand(x: Any, beside: Scale = None) -> Pair | None:
    """Convert an operand to a pair; return None if it is not a real array or number.

    Python numbers are split exactly into weakly typed data of magnitude near 1 and a power of two.
    Zero, infinity and NaN get the scale of the other operand, ``beside``.
    """
    if hasattr(x, "map_data"):
        return x.pair
    if isinstance(x, (bool, int, float)) and not isinstance(x, np.generic):
        if x == 0 or not math.isfinite(x):
            return jnp.asarray(float(x)), beside
        # The data holds the remainder of the clamped scale.
        scale = min(max(static_pow2(abs(x)), 1 / _LARGEST), _LARGEST)
        return jnp.asarray(x / scale), None if scale == 1 else jnp.float32(scale)
    if isinstance(x, (jax.Array, np.ndarray, np.generic)):
        is_real = not jnp.issubdtype(x.dtype, jnp.complexfloating)
        if is_real and (jnp.issubdtype(x.dtype, jnp.number) or x.dtype == bool):
            return jnp.asarray(x), None
        return None
    return operand(x.__jax_array__(), beside) if hasattr(x, "__jax_array__") else None


def value(data: jax.Array, scale: Scale) -> jax.Array:
    """Return ``data * scale``; the data itself if the scale is None."""
    if scale is None:
        return data
    return widen(data) * to_float(scale)


def at_scale(data: jax.Array, scale: Scale, target: Scale, dtype: Any) -> jax.Array:
    """Return the data of a pair at another scale: ``data * (scale / target)``.

    The ratio is applied in float32. A target of 0, which only occurs for zeros, counts as 1.
    """
    if scale is target:
        return data.astype(dtype)
    ratio = to_float(scale) / safe_scale(to_float(target))
    return (widen(data) * ratio).astype(dtype)


# -- operations ------------------------------------------------------------------------------


def _aligned(operation: Callable[..., jax.Array], left: Pair, right: Pair) -> Pair:
    """Add or subtract at the larger of two scales."""
    scale = left[1] if left[1] is right[1] else common_scale(left[1], right[1])
    dtype = result_dtype(left[0], right[0])
    x, y = (at_scale(*pair, scale, wide_dtype(dtype)) for pair in (left, right))
    return operation(x, y).astype(dtype), scale


add, subtract = partial(_aligned, jnp.add), partial(_aligned, jnp.subtract)


def multiply(left: Pair, right: Pair) -> Pair:
    """Return left * right: data times data, and scale times scale."""
    dtype = result_dtype(left[0], right[0])
    scale, rest = bounded_product(left[1], right[1])
    return (_times(left[0], rest) * widen(right[0])).astype(dtype), scale


def _times(data: jax.Array, rest: jax.Array | int) -> jax.Array:
    """Multiply data by the remainder of a clamped scale."""
    return widen(data) if isinstance(rest, int) else widen(data) * rest


def divide(left: Pair, right: Pair) -> Pair:
    """Return left / right: data over data, and scale over scale."""
    dtype = result_dtype(left[0], right[0])
    scale, rest = _bounded_quotient(left[1], right[1])
    return (_times(left[0], rest) / widen(right[0])).astype(dtype), scale


def power(x: Pair, exponent: int) -> Pair:
    """Return x**exponent for a static integer: data and scale are both raised to it."""
    data, scale = x
    rest = 1
    if scale is not None:
        base, times = to_float(scale), max(abs(exponent), 1)
        largest = 2.0 ** (MAX_EXPONENT // times)
        near = jnp.clip(base, 1 / largest, largest)
        scale, rest = near**exponent, base / near
    return (_times(data, rest) ** exponent).astype(result_dtype(data)), scale


def general_power(base: Pair, exponent: Pair) -> Pair:
    """Return base**exponent, computed from values; the result has no scale."""
    return widen(value(*base)) ** widen(value(*exponent)), None


def matmul(left: Pair, right: Pair) -> Pair:
    """Return left @ right, with the power of two nearest sqrt(contracted size) moved to the scale.

    A scale that varies along the contracted dimension is applied first; the result has no scale.
    """
    (x, x_scale), (y, y_scale) = left, right
    dtype = result_dtype(x, y)
    if x.ndim and y.ndim:
        y_axis = max(y.ndim - 2, 0)
        if varies_over(x, x_scale, x.ndim - 1) or varies_over(y, y_scale, y_axis):
            x, x_scale, y, y_scale = value(*left), None, value(*right), None
            dtype = wide_dtype(dtype)
        if y.ndim == 1:
            x_scale = reduce_scale(x_scale, x.ndim - 1)
        if x.ndim == 1:
            y_scale = reduce_scale(y_scale, y_axis)
    if x.dtype != y.dtype:
        x, y = x.astype(dtype), y.astype(dtype)
    total = jnp.matmul(x, y, preferred_element_type=wide_dtype(dtype))
    scale, rest = bounded_product(x_scale, y_scale)
    return _normalized(_times(total, rest), scale, x.shape[-1], dtype)


def _normalized(total: jax.Array, scale: Scale, count: int, dtype: Any) -> Pair:
    """Move the growth of a sum, the power of two nearest sqrt(count), from data to scale."""
    if scale is None or (norm := static_pow2_sqrt(count)) == 1:
        return total.astype(dtype), scale
    scale, rest = bounded_product(to_float(scale), jnp.float32(norm))
    return (_times(total, rest) / norm).astype(dtype), scale


def reduce_sum(x: Pair, axis: Any, keepdims: bool) -> Pair:
    """Return the sum over axes, with the power of two nearest sqrt(count) moved to the scale."""
    data, scale = x
    total = jnp.sum(widen(data), axis=axis, keepdims=keepdims)
    if scale is None:
        return total.astype(result_dtype(data)), None
    scale, count = reduce_scale(scale, axis, keepdims), data.size // max(total.size, 1)
    return _normalized(total, scale, count, result_dtype(data))


def reduce_scale(scale: Scale, axis: Any, keepdims: bool = False) -> Scale:
    """Return the scale of a reduction over ``axis``, along which the scale has size 1."""
    if scale is None or jnp.size(scale) == 1:
        return scalar_scale(scale)
    return jnp.max(to_float(scale), axis=axis, keepdims=keepdims)


def varies_over(data: jax.Array, scale: Scale, axis: Any) -> bool:
    """Return whether a scale has more than one entry along the axes."""
    if scale is None or jnp.size(scale) == 1:
        return False
    shape = (1,) * (data.ndim - scale.ndim) + scale.shape
    axes = range(data.ndim) if axis is None else np.atleast_1d(axis)
    return any(shape[a] != 1 for a in axes)


def compare(op: Callable[..., jax.Array], left: Pair, right: Pair) -> jax.Array:
    """Compare the data if both operands have the same scale; else compare values in float32."""
    if left[1] is right[1]:
        return op(widen(left[0]), widen(right[0]))
    return op(widen(value(*left)), widen(value(*right)))
