"""Powers of two, exactly: rounding to them, reading and building exponents.

All of it is integer arithmetic on the bits of float32, because XLA may flush subnormal numbers and
because log2 and exp2 are not exact on every backend. Each function is one program where nothing is
traced, and is traced once for each shape where something is.
"""

import functools
import math
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

Rounding = Literal["nearest", "up", "down"]
"""Which power of two a number rounds to: see `round_to_pow2`."""

_MANTISSA_BITS = 23
_MANTISSA = 0x007FFFFF
_EXPONENT = 0x7F800000
_SIGN = 0x80000000
_BIAS = 127
_MIN_EXPONENT = 1 - _BIAS - _MANTISSA_BITS
_MAX_EXPONENT = 127


@functools.partial(jax.jit, static_argnames="rounding", inline=True)
def round_to_pow2(x: jax.Array, rounding: Rounding = "nearest") -> jax.Array:
    """Rounds the magnitude of every element to a power of two, keeping its sign.

    Subnormal numbers are rounded within the subnormal powers of two. Zero, infinity and NaN are
    returned as they are. A result above 2**127 saturates there.

    Args:
        x: floating array of any shape; 16-bit and 8-bit types are widened to float32 first.
        rounding: "nearest" (in value: above 1.5 * 2**e goes to 2**(e + 1), as does the tie), "up"
            (towards infinity in magnitude) or "down" (towards zero in magnitude).

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
    # The unit of the position in which the power of two is cut: the leading one of a subnormal,
    # the implicit one above the mantissa of a normal number.
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
    """Returns floor(log2(abs(x))) as int32, exactly, subnormal numbers included.

    Zero gives -150, one below the smallest float32 exponent; infinity and NaN give 128.

    Example:
        >>> print(exponent_of(jnp.array([1.0, 0.75, 6.0, 0.0])))
        [   0   -1    2 -150]
    """
    bits = lax.bitcast_convert_type(jnp.asarray(x).astype(jnp.float32), jnp.uint32)
    magnitude = bits & jnp.uint32(~_SIGN & 0xFFFFFFFF)
    exponent = (magnitude >> _MANTISSA_BITS).astype(jnp.int32) - _BIAS
    leading = 31 - lax.clz(magnitude).astype(jnp.int32)
    return jnp.where(magnitude > _MANTISSA, exponent, leading + _MIN_EXPONENT)


@functools.partial(jax.jit, inline=True)
def pow2(exponent: jax.Array) -> jax.Array:
    """Returns 2**exponent as float32, exactly, from an integer array.

    Exponents below -149 give zero and exponents above 127 give infinity.

    Example:
        >>> print(pow2(jnp.array([-1, 0, 10])))
        [5.000e-01 1.000e+00 1.024e+03]
    """
    exponent = jnp.asarray(exponent, jnp.int32)
    normal = jnp.clip(exponent + _BIAS, 1, 255).astype(jnp.uint32) << _MANTISSA_BITS
    shift = jnp.clip(exponent - _MIN_EXPONENT, 0, _MANTISSA_BITS).astype(jnp.uint32)
    subnormal = jnp.where(exponent < _MIN_EXPONENT, jnp.uint32(0), jnp.uint32(1) << shift)
    return lax.bitcast_convert_type(jnp.where(exponent >= -126, normal, subnormal), jnp.float32)


def normal_pow2(exponent: jax.Array) -> jax.Array:
    """Returns 2**exponent as float32 for integers from -126 to 127, which are not looked at.

    In two operations, which XLA repeats where they are needed rather than store the result.

    Example:
        >>> print(normal_pow2(jnp.array([-1, 0, 10])))
        [5.000e-01 1.000e+00 1.024e+03]
    """
    bits = (jnp.asarray(exponent, jnp.int32) + _BIAS) << _MANTISSA_BITS
    return lax.bitcast_convert_type(bits, jnp.float32)


def static_pow2(x: float) -> float:
    """Returns the power of two nearest to a positive Python number, in log2.

    Example:
        >>> static_pow2(48.0)
        64.0
    """
    if not (x > 0 and math.isfinite(x)):
        raise ValueError(
            f"unitscale.core.static_pow2: expected a positive finite number; got {x!r}"
        )
    return 2.0 ** round(math.log2(x))


def static_pow2_sqrt(n: int) -> float:
    """Returns the power of two nearest to sqrt(n), in log2; 1 for n = 0.

    The static scale of a sum of n independent terms of unit variance (Scalify, Balanca et al.,
    2024, arXiv 2407.17353).

    Example:
        >>> static_pow2_sqrt(1024), static_pow2_sqrt(48)
        (32.0, 8.0)
    """
    return static_pow2(math.sqrt(n)) if n > 0 else 1.0
