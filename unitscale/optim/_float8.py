"""Conversions to and from FP8 on integers, bit for bit those of `core.cast`.

XLA has no FP8 arithmetic on a CPU and converts element by element in several times as long as all
the rest of an optimizer step takes. These conversions are vectorized with it. GPUs have
instructions for it.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..core import format_of
from ._rounding import round_finite

_NAMES = ("float8_e4m3fn", "float8_e5m2")
_NAN, _INFINITY = np.uint32(0x7F), np.uint32(0x7F800000)  # codes of FP8 and of float32


def has_fast_path(dtype: Any) -> bool:
    """Whether `encode` and `decode` know a format."""
    return jnp.dtype(dtype).name in _NAMES


def encode(x: jax.Array, dtype: Any) -> jax.Array:
    """Rounds float32 to nearest even and saturates; what is not finite becomes NaN."""
    return lax.platform_dependent(
        x,
        cpu=lambda x: _encode(x, dtype),
        default=lambda x: round_finite(x, dtype),
    )


def decode(data: jax.Array) -> jax.Array:
    """Returns FP8 numbers in float32; infinity, which `encode` never returns, may be NaN."""
    return lax.platform_dependent(data, cpu=_decode, default=lambda data: data.astype(jnp.float32))


def _encode(x: jax.Array, dtype: Any) -> jax.Array:
    fmt = format_of(dtype)
    dropped, bias = 23 - fmt.mantissa_bits, 1 - fmt.min_exponent
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    sign, magnitude = (bits >> 24) & jnp.uint32(0x80), bits & jnp.uint32(0x7FFFFFFF)
    is_finite = magnitude < _INFINITY
    magnitude = jnp.minimum(magnitude, np.float32(fmt.max).view(np.uint32))
    odd = (magnitude >> dropped) & 1
    rounded = (magnitude + jnp.uint32((1 << (dropped - 1)) - 1) + odd) >> dropped
    normal = rounded - jnp.uint32((127 - bias) << fmt.mantissa_bits)
    # Added to a number whose last bit is worth one subnormal step, a subnormal is its own code.
    offset = jnp.float32(fmt.smallest_subnormal * 2.0**23)
    subnormal = lax.bitcast_convert_type(jnp.abs(x) + offset, jnp.uint32) & jnp.uint32(0xFF)
    is_subnormal = magnitude < jnp.uint32((fmt.min_exponent + 127) << 23)
    code = sign | jnp.where(is_finite, jnp.where(is_subnormal, subnormal, normal), _NAN)
    return lax.bitcast_convert_type(code.astype(jnp.uint8), jnp.dtype(dtype))


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
