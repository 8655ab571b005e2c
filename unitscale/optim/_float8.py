"""Conversions to and from FP8 on integers, bit for bit those of `core.cast`.

XLA has no FP8 arithmetic on a CPU and converts element by element in several times as long as all
the rest of an optimizer step takes. These conversions are vectorized with it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..core import format_of

_NAMES = ("float8_e4m3fn", "float8_e5m2")


def has_fast_path(dtype: Any) -> bool:
    """Whether `encode` and `decode` know a format."""
    return jnp.dtype(dtype).name in _NAMES


def encode(x: jax.Array, dtype: Any) -> jax.Array:
    """Rounds float32 to nearest even; magnitudes must be finite and below the format's maximum."""
    fmt = format_of(dtype)
    dropped, bias = 23 - fmt.mantissa_bits, 1 - fmt.min_exponent
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    sign, magnitude = (bits >> 24) & jnp.uint32(0x80), bits & jnp.uint32(0x7FFFFFFF)
    odd = (magnitude >> dropped) & 1
    rounded = (magnitude + jnp.uint32((1 << (dropped - 1)) - 1) + odd) >> dropped
    normal = rounded - jnp.uint32((127 - bias) << fmt.mantissa_bits)
    # Added to a number whose last bit is worth one subnormal step, a subnormal is its own code.
    offset = jnp.float32(fmt.smallest_subnormal * 2.0**23)
    subnormal = lax.bitcast_convert_type(jnp.abs(x) + offset, jnp.uint32) & jnp.uint32(0xFF)
    is_subnormal = magnitude < jnp.uint32((fmt.min_exponent + 127) << 23)
    code = sign | jnp.where(is_subnormal, subnormal, normal)
    return lax.bitcast_convert_type(code.astype(jnp.uint8), jnp.dtype(dtype))


def decode(data: jax.Array) -> jax.Array:
    """Returns finite FP8 numbers in float32."""
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
    return jnp.where(code >= jnp.uint32(0x80), -x, x)
