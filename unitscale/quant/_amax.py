"""From the largest magnitude of a tensor to its scale, exactly."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..core import Format, amax, exponent_of, format_of, pow2

# Both 2**k and 2**-k are normal numbers of float32.
MIN_EXPONENT, MAX_EXPONENT = -126, 126


def needs_scale(dtype: Any) -> bool:
    """Whether a format is narrower in range than float32: others are cast at scale 1.

    Example:
        >>> needs_scale("float8_e4m3fn"), needs_scale("bfloat16")
        (True, False)
    """
    return format_of(dtype).exponent_bits < format_of("float32").exponent_bits


def _mantissa(x: jax.Array | np.ndarray) -> Any:
    if isinstance(x, np.ndarray):
        return x.view(np.uint32) & 0x007FFFFF
    return lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0x007FFFFF)


def needed_exponent(largest: jax.Array, fmt: Format) -> jax.Array:
    """Returns the least k with ``largest <= fmt.max * 2**k`` as int32, within -126 ... 126.

    Comparing exponents and mantissas makes it exact. The numbers that zero, infinity and NaN give
    are for the caller to replace.

    Example:
        >>> print(needed_exponent(jnp.array([448.0, 448.1, 1.0]), format_of("float8_e4m3fn")))
        [ 0  1 -8]
    """
    largest = largest.astype(jnp.float32)
    top = int(_mantissa(np.asarray(fmt.max, np.float32)))
    above = (_mantissa(largest) > top).astype(jnp.int32)
    exponent = exponent_of(largest) - (math.frexp(fmt.max)[1] - 1) + above
    return jnp.clip(exponent, MIN_EXPONENT, MAX_EXPONENT)


def is_measurable(largest: jax.Array) -> jax.Array:
    """Whether an amax says anything of a scale: not that of zeros, infinity or NaN.

    Example:
        >>> print(is_measurable(jnp.array([0.0, 2.0, jnp.nan])))
        [False  True False]
    """
    return (largest > 0) & (largest < jnp.inf)


def scale_from(largest: jax.Array, fmt: Format, margin: int) -> jax.Array:
    """Returns the power-of-two scale for an amax, 1 where it says nothing.

    Example:
        >>> print(scale_from(jnp.array([0.0, 896.0]), format_of("float8_e4m3fn"), 1))
        [1. 4.]
    """
    exponent = jnp.minimum(needed_exponent(largest, fmt) + margin, MAX_EXPONENT)
    return jnp.where(is_measurable(largest), pow2(exponent), jnp.float32(1))


def tensor_scale(
    x: jax.Array, fmt: Format, margin: int = 0, axis: tuple[int, ...] | None = None
) -> jax.Array:
    """Returns the scale of a tensor, or of its slices along ``axis`` (kept with size 1).

    Example:
        >>> print(tensor_scale(jnp.array([[1.0, 500.0], [2.0, 0.0]]), format_of("e4m3fn"), 0, (1,)))
        [[2.      ]
         [0.0078125]]
    """
    return lax.stop_gradient(scale_from(amax(x, axis), fmt, margin))
