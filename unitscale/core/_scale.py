"""Powers of two, exactly, and the arithmetic of scales.

A scale is None (a plain array, which costs nothing) or a float array (float32, or float8_e8m0fnu).
Powers of two are built and read on the bits of float32, because XLA may flush subnormal numbers and
because log2 and exp2 are not exact on every backend.
"""

import functools
import math
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Scale: TypeAlias = jax.Array | None
"""A scale: None (a plain array) or an array: see `as_scale`."""
Rounding = Literal["nearest", "up", "down"]
"""Which power of two a number rounds to: see `round_to_pow2`."""

_MANTISSA_BITS = 23
_MANTISSA = 0x007FFFFF
_EXPONENT = 0x7F800000
_SIGN = 0x80000000
_BIAS = 127
_MIN_EXPONENT = 1 - _BIAS - _MANTISSA_BITS
_MAX_EXPONENT = 127

# -- powers of two ---------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="rounding", inline=True)
def round_to_pow2(x: jax.Array, rounding: Rounding = "nearest") -> jax.Array:
    """Rounds the magnitude of every element to a power of two, keeping its sign.

    Subnormal numbers round to subnormal powers of two. Zero, infinity and NaN are returned
    unchanged. A result above 2**127 saturates there.

    Args:
        x: floating array of any shape; 16-bit and 8-bit types are widened to float32 first.
        rounding: "nearest" (in value; ties go up), "up" or "down" (in magnitude).

    Returns:
        float32 array of the same shape.

    Raises:
        ValueError: if the rounding mode is unknown.

    Example:
        >>> print(round_to_pow2(jnp.array([0.7, 1.4, 1.5, -5.0, 0.0])))
        [ 0.5  1.   2.  -4.   0. ]
    """
    if rounding not in get_args(Rounding):
        raise ValueError(
            "unitscale.core.round_to_pow2: rounding must be one of "
            f"{', '.join(get_args(Rounding))}; got {rounding!r}"
        )
    bits = lax.bitcast_convert_type(jnp.asarray(x).astype(jnp.float32), jnp.uint32)
    sign, magnitude = bits & jnp.uint32(_SIGN), bits & jnp.uint32(~_SIGN & 0xFFFFFFFF)
    # The unit of the position at which to cut: the leading one of a subnormal number, the implicit
    # one above the mantissa of a normal number.
    normal = magnitude > _MANTISSA
    leading = jnp.uint32(31) - lax.clz(jnp.maximum(magnitude, 1))
    subnormal_unit = jnp.uint32(1) << leading
    unit = jnp.where(normal, jnp.uint32(_MANTISSA + 1), subnormal_unit)
    floor = jnp.where(normal, magnitude & jnp.uint32(_EXPONENT), subnormal_unit)
    above = jnp.where(normal, floor + unit, subnormal_unit << 1)
    above = jnp.minimum(above, jnp.uint32((_MAX_EXPONENT + _BIAS) << _MANTISSA_BITS))
    remainder = magnitude - floor
    if rounding == "nearest":
        # 2 * remainder >= unit, on integers; a subnormal with leading bit 0 has no remainder.
        go_up = (remainder != 0) & (remainder >= unit - remainder)
    else:
        go_up = (remainder != 0) & (rounding == "up")
    rounded = jnp.where(go_up, above, floor)
    keep = (magnitude == 0) | (magnitude >= _EXPONENT)
    rounded = jnp.where(keep, magnitude, rounded)
    return lax.bitcast_convert_type(rounded | sign, jnp.float32)


@functools.partial(jax.jit, inline=True)
def exponent_of(x: jax.Array) -> jax.Array:
    """Returns floor(log2(abs(x))) as int32, exactly; -150 for zero, 128 for infinity and NaN."""
    bits = lax.bitcast_convert_type(jnp.asarray(x).astype(jnp.float32), jnp.uint32)
    magnitude = bits & jnp.uint32(~_SIGN & 0xFFFFFFFF)
    exponent = (magnitude >> _MANTISSA_BITS).astype(jnp.int32) - _BIAS
    leading = 31 - lax.clz(magnitude).astype(jnp.int32)
    return jnp.where(magnitude > _MANTISSA, exponent, leading + _MIN_EXPONENT)


@functools.partial(jax.jit, inline=True)
def pow2(exponent: jax.Array) -> jax.Array:
    """Returns 2**exponent as float32, exactly; zero below -149, infinity above 127."""
    exponent = jnp.asarray(exponent, jnp.int32)
    normal = jnp.clip(exponent + _BIAS, 1, 255).astype(jnp.uint32) << _MANTISSA_BITS
    shift = jnp.clip(exponent - _MIN_EXPONENT, 0, _MANTISSA_BITS).astype(jnp.uint32)
    subnormal = jnp.where(exponent < _MIN_EXPONENT, jnp.uint32(0), jnp.uint32(1) << shift)
    return lax.bitcast_convert_type(jnp.where(exponent >= -126, normal, subnormal), jnp.float32)


def normal_pow2(exponent: jax.Array) -> jax.Array:
    """Returns 2**exponent as float32 for integers from -126 to 127 (unchecked).

    It takes two operations, which XLA repeats where they are needed instead of storing the result.
    """
    bits = (jnp.asarray(exponent, jnp.int32) + _BIAS) << _MANTISSA_BITS
    return lax.bitcast_convert_type(bits, jnp.float32)


def static_pow2(x: float) -> float:
    """Returns the power of two nearest to a positive Python number, in log2."""
    if not (x > 0 and math.isfinite(x)):
        raise ValueError(
            f"unitscale.core.static_pow2: expected a positive finite number; got {x!r}"
        )
    return 2.0 ** round(math.log2(x))


def static_pow2_sqrt(n: int) -> float:
    """Returns the power of two nearest to sqrt(n), in log2; 1 for n = 0.

    It is the static scale of a sum of n independent terms of unit variance (Scalify, Balanca et
    al., 2024, arXiv 2407.17353).
    """
    return static_pow2(math.sqrt(n)) if n > 0 else 1.0


# -- scales ----------------------------------------------------------------------------------


def as_scale(scale: Any) -> Scale:
    """Returns None, a float array or a number as a scale.

    A number becomes a float32 array, even if it is 1: the structure of a program never depends on
    the value of a scale. float8_e8m0fnu arrays are kept.
    """
    if scale is None:
        return None
    is_number = isinstance(scale, (int, float, np.number)) and not isinstance(
        scale, (bool, complex)
    )
    if is_number and not isinstance(scale, np.ndarray):
        if not (np.isfinite(scale) and scale > 0):
            raise ValueError(
                f"unitscale.ScaledArray: scale must be positive and finite; got {scale!r}. Put "
                "sign and zeros into data."
            )
        single = np.finfo(np.float32)
        if not float(single.tiny) <= float(scale) <= float(single.max):
            raise ValueError(
                "unitscale.ScaledArray: scale must be a normal float32 number; got "
                f"{scale!r}. Multiply data by a part of it."
            )
        return jnp.float32(scale)
    if not hasattr(scale, "dtype"):
        raise TypeError(
            "unitscale.ScaledArray: scale must be None, a number or a float array; got "
            f"{type(scale).__name__} {scale!r}"
        )
    scale = jnp.asarray(scale)
    if scale.dtype == jnp.float8_e8m0fnu or scale.dtype in (jnp.float32, jnp.float64):
        return scale
    if jnp.issubdtype(scale.dtype, jnp.floating) or jnp.issubdtype(scale.dtype, jnp.integer):
        return scale.astype(jnp.float32)
    raise TypeError(f"unitscale.ScaledArray: scale must be a float array; got dtype {scale.dtype}")


def expand_blocks(scale: jax.Array, shape: tuple[int, ...], block: tuple[int, ...]) -> jax.Array:
    """Repeats a scale per block to the shape of the data."""
    for axis, size in enumerate(block):
        if size == 1:
            continue
        # Without total_repeat_length this is a broadcast, with it a gather. JAX asks for a sharding
        # on explicit mesh axes.
        own = jax.typeof(scale).sharding
        repeated = jnp.repeat(scale, size, axis=axis, out_sharding=own if any(own.spec) else None)
        scale = lax.slice_in_dim(repeated, 0, shape[axis], axis=axis)
    return scale


def broadcasts(scale_shape: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a scale of one shape broadcasts against data of another."""
    try:
        return jnp.broadcast_shapes(scale_shape, shape) == shape
    except ValueError:
        return False


def check_shapes(data: Any, scale: Scale, block_shape: tuple[int, ...] | None) -> None:
    """Raises a ValueError if a scale does not fit its data."""
    shape, scale_shape = jnp.shape(data), () if scale is None else jnp.shape(scale)
    if block_shape is None:
        if not broadcasts(scale_shape, shape):
            raise ValueError(
                f"unitscale.ScaledArray: scale must broadcast against data; got data {shape}, "
                f"scale {scale_shape}. Give it size-1 dimensions, or block_shape= for blocks."
            )
        return
    if len(block_shape) != len(shape) or any(b < 1 for b in block_shape):
        raise ValueError(
            "unitscale.ScaledArray: block_shape needs one positive size per dimension of data; got "
            f"data {shape}, block_shape {block_shape}"
        )
    blocks = tuple(-(-n // b) for n, b in zip(shape, block_shape, strict=True))
    if scale_shape != blocks:
        raise ValueError(
            f"unitscale.ScaledArray: data {shape} in blocks of {block_shape} needs a scale of "
            f"shape {blocks}; got {scale_shape}"
        )


def to_float(scale: Scale) -> jax.Array:
    """Returns a scale as a float32 (or float64) array without a gradient; None counts as 1."""
    if scale is None:
        return jnp.float32(1)
    array = lax.stop_gradient(scale)
    return array.astype(jnp.float32) if array.dtype == jnp.float8_e8m0fnu else array


# Products of scales are kept within the normal numbers of float32: each of these functions returns
# a scale and the rest, which multiplies the data.


def bounded_product(left: Scale, right: Scale) -> tuple[Scale, jax.Array | int]:
    """Returns left * right within the normal numbers of float32, and the rest for the data."""
    if left is None or right is None:
        return right if left is None else left, 1
    a, b = to_float(left), to_float(right)
    scale, low, high = a * b, jnp.minimum(a, b), jnp.maximum(a, b)
    near = _normal(scale, low > 0)
    # In this order no factor leaves the range of float32.
    return near, jnp.where(near == scale, 1, high / near * low)


def bounded_quotient(left: Scale, right: Scale) -> tuple[Scale, jax.Array | int]:
    """Returns left / right within the normal numbers of float32, and the rest for the data."""
    if right is None:
        return left, 1
    a, b = to_float(left), to_float(right)
    scale = a / b
    near = _normal(scale, (a > 0) & (b > 0))
    return near, jnp.where(near == scale, 1, a / near / b)


def bounded_power(scale: Scale, exponent: int) -> tuple[Scale, jax.Array | int]:
    """Returns scale**exponent within the normal numbers of float32, and the rest.

    The rest multiplies the data before it is raised to the power itself.
    """
    if scale is None:
        return None, 1
    base, times = to_float(scale), max(abs(exponent), 1)
    near = jnp.clip(base, 2.0 ** -(126 // times), 2.0 ** (127 // times))
    return near**exponent, base / near


def _normal(scale: jax.Array, positive: jax.Array) -> jax.Array:
    return jnp.where(positive, jnp.clip(scale, 2.0**-126, 2.0**127), scale)


def safe_scale(scale: jax.Array) -> jax.Array:
    """Replaces scales that cannot divide (zero, infinity, NaN) by 1.

    An all-zero tensor has RMS 0; dividing by it would turn zeros into NaN.
    """
    scale = jnp.asarray(scale)
    return jnp.where((scale > 0) & (scale < jnp.inf), scale, jnp.ones_like(scale))


def scale_near(size: jax.Array, rounding: Rounding = "nearest") -> jax.Array:
    """Returns the power of two nearest to a size as a scale; 1 for zero, infinity and NaN."""
    return safe_scale(divisor(round_to_pow2(size, rounding)))


def divisor(scale: jax.Array) -> jax.Array:
    """Limits a scale to 2^126: XLA multiplies by the inverse, and flushes that of 2^127 to 0."""
    return jnp.where(scale < jnp.inf, jnp.minimum(scale, 2.0**126), scale)


def common_scale(left: Scale, right: Scale) -> Scale:
    """Returns the scale of a sum: sqrt(left**2 + right**2), rounded to a power of two.

    Independent terms add in variance. None counts as 1 beside a scale.
    """
    if left is None and right is None:
        return None
    a, b = to_float(left), to_float(right)
    larger = jnp.maximum(a, b)
    ratio = jnp.minimum(a, b) / safe_scale(larger)
    # larger * sqrt(1 + ratio**2) neither overflows nor underflows.
    return round_to_pow2(larger * jnp.sqrt(1 + ratio * ratio))
