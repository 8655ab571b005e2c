"""Arithmetic on (data, scale) pairs: the traced-scale rules, written once.

A pair stands for the value ``data * scale``. Each function returns a pair whose value is the
ordinary result up to rounding, computed in float32 and rounded once to the result's data type, and
whose scale is chosen statically (square-root rules), so that unit data stays near unit.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ._cast import widen
from ._formats import wide_dtype
from ._scale import (
    Scale,
    bounded_power,
    bounded_product,
    bounded_quotient,
    common_scale,
    safe_scale,
    static_pow2,
    static_pow2_sqrt,
    to_float,
)

Pair: TypeAlias = tuple[jax.Array, Scale]


def _promoted(data: jax.Array) -> Any:
    if jnp.issubdtype(data.dtype, jnp.floating) and data.dtype.itemsize == 1:
        return jnp.bfloat16
    if jnp.issubdtype(data.dtype, jnp.floating) and getattr(data, "weak_type", False):
        return float
    return data.dtype


def result_dtype(*data: jax.Array) -> np.dtype:
    """Returns the data type of a result, as JAX promotes; 8-bit floats count as bfloat16."""
    return np.dtype(jnp.result_type(*map(_promoted, data)))


def summable(value: jax.Array) -> jax.Array:
    """Returns a value in a type that JAX reduces in float32, which 8-bit types are not."""
    value = jnp.asarray(value)
    return value.astype(result_dtype(value))


def scalar_pair(x: float, beside: Scale = None) -> Pair:
    """Splits a Python number exactly into data of magnitude near 1 and a power-of-two scale.

    Data is weakly typed, so that a number does not widen the array that it meets. Zero, infinity
    and NaN take the scale ``beside`` them.
    """
    if x == 0 or not np.isfinite(x):
        return jnp.asarray(float(x)), beside
    # A scale outside the normal numbers of float32 would be lost; data can be.
    scale = min(max(static_pow2(abs(x)), 2.0**-126), 2.0**127)
    return jnp.asarray(x / scale), None if scale == 1 else jnp.float32(scale)


def operand(x: Any, beside: Scale = None) -> Pair | None:
    """Returns an operand as a pair, or None if it is not a real array or number.

    Args:
        x: ScaledArray, real array, an object with ``__jax_array__`` such as `nnx.Param`, or a
            Python number (weakly typed).
        beside: the scale for zero, infinity and NaN; see `scalar_pair`.
    """
    if hasattr(x, "map_data"):
        return x.pair
    if isinstance(x, (bool, int, float)) and not isinstance(x, np.generic):
        return scalar_pair(float(x), beside)
    if isinstance(x, (jax.Array, np.ndarray, np.generic)):
        is_real = not jnp.issubdtype(x.dtype, jnp.complexfloating)
        if is_real and (jnp.issubdtype(x.dtype, jnp.number) or x.dtype == bool):
            return jnp.asarray(x), None
        return None
    return operand(x.__jax_array__(), beside) if hasattr(x, "__jax_array__") else None


def scalar_scale(scale: Scale) -> Scale:
    """Returns a scale of one entry as a scalar."""
    return None if scale is None else jnp.reshape(scale, ())


def value(data: jax.Array, scale: Scale) -> jax.Array:
    """Returns ``data * scale``; the data itself for the scale None."""
    if scale is None:
        return data
    scale = to_float(scale)
    return (widen(data) * scale).astype(jnp.result_type(widen(data).dtype, scale.dtype))


def at_scale(data: jax.Array, scale: Scale, target: Scale, dtype: Any) -> jax.Array:
    """Returns the data that represents a pair at another scale: ``data * (scale / target)``.

    The ratio is applied in float32. A target of zero can only hold zeros.
    """
    if scale is target:
        return data.astype(dtype)
    ratio = to_float(scale) / safe_scale(to_float(target))
    return (widen(data) * ratio).astype(dtype)


def add(left: Pair, right: Pair) -> Pair:
    """Returns left + right at the scale sqrt(s1**2 + s2**2), rounded to a power of two."""
    return _aligned(jnp.add, left, right)


def subtract(left: Pair, right: Pair) -> Pair:
    """Returns left - right, at the scale of the sum."""
    return _aligned(jnp.subtract, left, right)


def _aligned(operation: Callable[..., jax.Array], left: Pair, right: Pair) -> Pair:
    """Applies an operation to data at one scale, in the wide type."""
    scale = left[1] if left[1] is right[1] else common_scale(left[1], right[1])
    dtype = result_dtype(left[0], right[0])
    x, y = (at_scale(*pair, scale, wide_dtype(dtype)) for pair in (left, right))
    return operation(x, y).astype(dtype), scale


def negate(x: Pair) -> Pair:
    """Returns -x, exactly."""
    return -x[0], x[1]


def multiply(left: Pair, right: Pair) -> Pair:
    """Returns left * right: the data are multiplied, and so are the scales."""
    dtype = result_dtype(left[0], right[0])
    scale, rest = bounded_product(left[1], right[1])
    return (_times(left[0], rest) * widen(right[0])).astype(dtype), scale


def _times(data: jax.Array, rest: jax.Array | int) -> jax.Array:
    """Multiplies data by what was left of a scale that is bounded."""
    return widen(data) if isinstance(rest, int) else widen(data) * rest


def divide(left: Pair, right: Pair) -> Pair:
    """Returns left / right; a divisor with scale zero divides by its zeros."""
    dtype = result_dtype(left[0], right[0])
    scale, rest = bounded_quotient(left[1], right[1])
    return (_times(left[0], rest) / widen(right[0])).astype(dtype), scale


def power(x: Pair, exponent: int) -> Pair:
    """Returns x**exponent for a static integer: data and scale are raised alike."""
    data, scale = x
    scale, rest = bounded_power(scale, exponent)
    return (_times(data, rest) ** exponent).astype(result_dtype(data)), scale


def general_power(base: Pair, exponent: Pair) -> Pair:
    """Returns base**exponent of values; the result has no scale."""
    return widen(value(*base)) ** widen(value(*exponent)), None


def matmul(left: Pair, right: Pair) -> Pair:
    """Returns left @ right; the data is divided by the power of two nearest sqrt(contraction).

    A scale that varies along the contraction is multiplied in first, and the result has none.
    """
    (x, x_scale), (y, y_scale) = left, right
    dtype = result_dtype(x, y)
    if x.ndim and y.ndim:
        y_axis = max(y.ndim - 2, 0)
        if varies_over(x, x_scale, x.ndim - 1) or varies_over(y, y_scale, y_axis):
            x, x_scale, y, y_scale = value(*left), None, value(*right), None
            dtype = wide_dtype(dtype)
        if y.ndim == 1:
            x_scale = _drop_axis(x_scale, x.ndim - 1)
        if x.ndim == 1:
            y_scale = _drop_axis(y_scale, y_axis)
    if x.dtype != y.dtype:
        x, y = x.astype(dtype), y.astype(dtype)
    total = jnp.matmul(x, y, preferred_element_type=wide_dtype(dtype))
    norm = static_pow2_sqrt(x.shape[-1])
    scale, rest = bounded_product(x_scale, y_scale)
    if scale is None:
        return total.astype(dtype), None
    return _normalized(_times(total, rest), scale, norm, dtype)


def _normalized(total: jax.Array, scale: Scale, norm: float, dtype: Any) -> Pair:
    """Moves a norm from a sum into its scale."""
    if norm == 1:
        return total.astype(dtype), scale
    scale, rest = bounded_product(to_float(scale), jnp.float32(norm))
    return (_times(total, rest) / norm).astype(dtype), scale


def _drop_axis(scale: Scale, axis: int) -> Scale:
    if scale is None or jnp.size(scale) == 1:
        return scalar_scale(scale)
    return jnp.squeeze(scale, axis)


def reduce_sum(x: Pair, axis: Any, keepdims: bool) -> Pair:
    """Returns the sum over axes; the data is divided by the power of two nearest sqrt(count)."""
    data, scale = x
    total = jnp.sum(widen(data), axis=axis, keepdims=keepdims)
    if scale is None:
        return total.astype(result_dtype(data)), scale
    norm = static_pow2_sqrt(data.size // max(total.size, 1))
    scale = reduce_scale(scale, data, axis, keepdims)
    return _normalized(total, scale, norm, result_dtype(data))


def reduce_scale(scale: Scale, data: jax.Array, axis: Any, keepdims: bool) -> Scale:
    """Returns the scale that a reduction over ``axis`` leaves: its size-1 axes are dropped."""
    if scale is None or jnp.size(scale) == 1:
        return scalar_scale(scale)
    return jnp.max(to_float(scale), axis=axis, keepdims=keepdims)


def varies_over(data: jax.Array, scale: Scale, axis: Any) -> bool:
    """Whether a scale has more than one entry along the axes."""
    if scale is None or jnp.size(scale) == 1:
        return False
    shape = (1,) * (data.ndim - scale.ndim) + scale.shape
    axes = range(data.ndim) if axis is None else np.atleast_1d(axis)
    return any(shape[a] != 1 for a in axes)


def compare(op: Callable[..., jax.Array], left: Pair, right: Pair) -> jax.Array:
    """Compares values: exactly on data if the scales are the same, else in float32."""
    if left[1] is right[1]:
        return op(widen(left[0]), widen(right[0]))
    return op(widen(value(*left)), widen(value(*right)))
