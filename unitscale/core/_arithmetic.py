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
from ._pow2 import static_pow2, static_pow2_sqrt
from ._scale import (
    Scale,
    common_scale,
    divide_scales,
    is_static,
    multiply_scales,
    safe_scale,
    to_float,
)

Pair: TypeAlias = tuple[jax.Array, Scale]


def is_zero(scale: Scale) -> bool:
    """Whether a scale is the static zero."""
    return is_static(scale) and scale == 0 and scale is not None


def result_dtype(*data: jax.Array) -> np.dtype:
    """Returns the data type of a result; 8-bit types count as bfloat16, which holds them."""
    types = [d.dtype for d in data]
    return np.dtype(
        jnp.result_type(*(t if t.itemsize > 1 or t.kind in "biu" else jnp.bfloat16 for t in types))
    )


def scalar_pair(x: float) -> Pair:
    """Splits a Python number exactly into data of magnitude near 1 and a power-of-two scale."""
    if x == 0 or not np.isfinite(x):
        return jnp.asarray(x, jnp.float32), 0 if x == 0 else 1
    scale = static_pow2(abs(x))
    return jnp.asarray(x / scale, jnp.float32), 1 if scale == 1 else jnp.float32(scale)


def value(data: jax.Array, scale: Scale) -> jax.Array:
    """Returns ``data * scale``; the data itself for the special scales None and 1."""
    if is_static(scale):
        return jnp.zeros_like(data) if is_zero(scale) else data
    scale = to_float(scale)
    return (widen(data) * scale).astype(jnp.result_type(widen(data).dtype, scale.dtype))


def at_scale(data: jax.Array, scale: Scale, target: Scale, dtype: Any) -> jax.Array:
    """Returns the data that represents a pair at another scale: ``data * (scale / target)``.

    The ratio is applied in float32. A target of zero can only hold zeros.
    """
    if is_zero(scale):
        return jnp.zeros(data.shape, dtype)
    if is_static(target) and is_static(scale):
        return data.astype(dtype)
    if scale is target:
        return data.astype(dtype)
    ratio = to_float(scale) / safe_scale(to_float(target))
    return (widen(data) * ratio).astype(dtype)


def align(left: Pair, right: Pair) -> tuple[jax.Array, jax.Array, Scale]:
    """Brings two pairs to their common scale; returns both data and that scale."""
    scale = common_scale(left[1], right[1])
    dtype = result_dtype(left[0], right[0])
    return at_scale(*left, scale, dtype), at_scale(*right, scale, dtype), scale


def add(left: Pair, right: Pair) -> Pair:
    """Returns left + right at the scale sqrt(s1**2 + s2**2), rounded to a power of two."""
    x, y, scale = align(left, right)
    return (widen(x) + widen(y)).astype(x.dtype), scale


def negate(x: Pair) -> Pair:
    """Returns -x, exactly."""
    return -x[0], x[1]


def multiply(left: Pair, right: Pair) -> Pair:
    """Returns left * right: the data are multiplied, and so are the scales."""
    dtype = result_dtype(left[0], right[0])
    return (widen(left[0]) * widen(right[0])).astype(dtype), multiply_scales(left[1], right[1])


def divide(left: Pair, right: Pair) -> Pair:
    """Returns left / right; a divisor whose scale is zero is divided by as the zeros it is."""
    dtype = result_dtype(left[0], right[0])
    # Static zeros divide as the zeros they are: the data decides between 0, infinity and NaN.
    (x, x_scale), (y, y_scale) = (
        (jnp.zeros_like(data), 1) if is_zero(scale) else (data, scale)
        for data, scale in (left, right)
    )
    return (widen(x) / widen(y)).astype(dtype), divide_scales(x_scale, y_scale)


def power(x: Pair, exponent: int) -> Pair:
    """Returns x**exponent for a static integer: data and scale are raised alike."""
    data = (widen(x[0]) ** exponent).astype(result_dtype(x[0]))
    if is_static(x[1]):
        return data, (1 if exponent == 0 and is_zero(x[1]) else x[1])
    return data, to_float(x[1]) ** exponent


def matmul(left: Pair, right: Pair) -> Pair:
    """Returns left @ right; the data is divided by the power of two nearest sqrt(contraction)."""
    dtype = result_dtype(left[0], right[0])
    norm = static_pow2_sqrt(left[0].shape[-1])
    data = jnp.matmul(left[0], right[0], preferred_element_type=widen(jnp.zeros((), dtype)).dtype)
    scale = multiply_scales(left[1], right[1])
    if scale is None:
        return data.astype(dtype), None
    scale = scale if is_zero(scale) or norm == 1 else to_float(scale) * norm
    return (data / norm).astype(dtype), scale


def reduce_sum(x: Pair, axis: Any, keepdims: bool) -> Pair:
    """Returns the sum over axes; the data is divided by the power of two nearest sqrt(count)."""
    data, scale = x
    total = jnp.sum(widen(data), axis=axis, keepdims=keepdims)
    if scale is None or is_zero(scale):
        return total.astype(result_dtype(data)), scale
    norm = static_pow2_sqrt(data.size // max(total.size, 1))
    scale = scale if norm == 1 else to_float(reduce_scale(scale, data, axis, keepdims)) * norm
    return (total / norm).astype(result_dtype(data)), scale


def reduce_scale(scale: Scale, data: jax.Array, axis: Any, keepdims: bool) -> Scale:
    """Returns the scale that a reduction over ``axis`` leaves: its size-1 axes are dropped."""
    if is_static(scale) or jnp.ndim(scale) == 0:
        return scale
    full = jnp.reshape(scale, (1,) * (data.ndim - scale.ndim) + scale.shape)
    return jnp.max(full, axis=axis, keepdims=keepdims)


def varies_over(scale: Scale, data: jax.Array, axis: Any) -> bool:
    """Whether a scale has more than one entry along the reduced axes."""
    if is_static(scale) or jnp.size(scale) == 1:
        return False
    shape = (1,) * (data.ndim - scale.ndim) + scale.shape
    axes = range(data.ndim) if axis is None else np.atleast_1d(axis)
    return any(shape[a] != 1 for a in axes)


def compare(op: Callable[..., jax.Array], left: Pair, right: Pair) -> jax.Array:
    """Compares values: exactly on data if the scales are the same, else in float32."""
    if left[1] is right[1] or (is_static(left[1]) and left[1] == right[1]):
        return op(left[0], right[0])
    return op(value(*left), value(*right))
