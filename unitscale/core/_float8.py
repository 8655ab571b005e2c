"""Conversions to and from FP8 on integers, for CPUs: bit for bit those of other platforms.

XLA has no FP8 arithmetic on a CPU and converts element by element in several times as long as all
that stands around it takes. These conversions are vectorized with it. GPUs have instructions for
it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._formats import Format, format_of

_NAMES = ("float8_e4m3fn", "float8_e5m2")
_INFINITY = np.uint32(0x7F800000)  # of float32
_NAN, _INFINITE = np.uint32(0x7F), np.uint32(0x7C)  # of both formats, and of e5m2


def is_float8(dtype: Any) -> bool:
    """Whether `encode_float8` and `decode_float8` know a format.

    Example:
        >>> is_float8("float8_e5m2"), is_float8("float8_e5m2fnuz")
        (True, False)
    """
    return dtype is not None and jnp.dtype(dtype).name in _NAMES


def encode_float8(
    x: jax.Array, fmt: Format, elsewhere: Callable[[jax.Array], jax.Array], *, infinity: bool
) -> jax.Array:
    """Rounds to nearest even and saturates; NaN stays NaN.

    Args:
        x: floating array, float32 or narrower.
        fmt: of `is_float8`.
        elsewhere: the same conversion, for platforms that are no CPU.
        infinity: whether infinity stays infinity, in a format that has it; otherwise it is NaN.

    Example:
        >>> fmt = format_of("float8_e4m3fn")
        >>> print(
        ...     encode_float8(jnp.float32(17.0), fmt, lambda x: x.astype(fmt.dtype), infinity=True)
        ... )
        16
    """

    def on_cpu(x: jax.Array) -> jax.Array:
        return _encode(x.astype(jnp.float32), fmt, infinity and fmt.has_inf)

    return lax.platform_dependent(x, cpu=on_cpu, default=elsewhere)


def decode_float8(data: jax.Array) -> jax.Array:
    """Returns FP8 numbers in float32; infinity may be NaN.

    Example:
        >>> print(decode_float8(jnp.float8_e5m2(0.25)))
        0.25
    """
    return lax.platform_dependent(data, cpu=_decode, default=lambda data: data.astype(jnp.float32))


def _encode(x: jax.Array, fmt: Format, infinity: bool) -> jax.Array:
    dropped, bias = 23 - fmt.mantissa_bits, 1 - fmt.min_exponent
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    sign, magnitude = (bits >> 24) & jnp.uint32(0x80), bits & jnp.uint32(0x7FFFFFFF)
    is_finite = magnitude < _INFINITY
    beyond = jnp.where(magnitude == _INFINITY, _INFINITE, _NAN) if infinity else _NAN
    magnitude = jnp.minimum(magnitude, np.float32(fmt.max).view(np.uint32))
    odd = (magnitude >> dropped) & 1
    rounded = (magnitude + jnp.uint32((1 << (dropped - 1)) - 1) + odd) >> dropped
    normal = rounded - jnp.uint32((127 - bias) << fmt.mantissa_bits)
    # Added to a number whose last bit is worth one subnormal step, a subnormal is its own code.
    offset = jnp.float32(fmt.smallest_subnormal * 2.0**23)
    subnormal = lax.bitcast_convert_type(jnp.abs(x) + offset, jnp.uint32) & jnp.uint32(0xFF)
    is_subnormal = magnitude < jnp.uint32((fmt.min_exponent + 127) << 23)
    code = sign | jnp.where(is_finite, jnp.where(is_subnormal, subnormal, normal), beyond)
    return lax.bitcast_convert_type(code.astype(jnp.uint8), jnp.dtype(fmt.name))


def _decode(data: jax.Array) -> jax.Array:
    fmt = format_of(data.dtype)
    bias = 1 - fmt.min_exponent
    code = lax.bitcast_convert_type(data, jnp.uint8).astype(jnp.uint32)
    magnitude = code & jnp.uint32(0x7F)
    exponent = jnp.uint32((127 - bias) << 23)
    normal = lax.bitcast_convert_type(
        (magnitude << (23 - fmt.mantissa_bits)) + exponent, jnp.float32
    )
    subnormal = magnitude.astype(jnp.int32).astype(jnp.float32) * fmt.smallest_subnormal
    x = jnp.where(magnitude < jnp.uint32(1 << fmt.mantissa_bits), subnormal, normal)
    largest = np.asarray(fmt.max, data.dtype).view(np.uint8)
    x = jnp.where(magnitude > jnp.uint32(largest), jnp.nan, x)
    return jnp.where(code >= jnp.uint32(0x80), -x, x)
