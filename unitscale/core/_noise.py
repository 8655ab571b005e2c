"""Random bits for stochastic rounding, cheap enough to be drawn for every number of a model.

The bits of `jax.random` cost some hundred integer operations each, which on a GPU takes several
times as long as all the rest of an optimizer step. Rounding needs less: bits that are uniform, and
that do not follow one another from number to number, key to key and step to step.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

# An odd number: 2^32 over the golden ratio. Places side by side then differ in many bits.
_SPREAD = 0x9E3779B9


def rounding_noise(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns 32 random bits for each entry: a hash of its place and of two words of the key.

    The hash `lowbias32`, a bijection in which every bit of the input moves every bit of the output
    with a probability near 1/2, the second word between its two rounds. Under one key no two of
    2^32 entries have the same bits. For rounding, not for sampling.

    Args:
        key: `jax.random` key of any implementation.
        shape: of the result.

    Returns:
        uint32 array.

    Example:
        >>> bits = rounding_noise(jax.random.key(0), (1000,))
        >>> print((bits / 2.0**32).mean().round(1))
        0.5

    References:
        Wellons, "Prospecting for Hash Functions", 2018, nullprogram.com/blog/2018/07/31
        (lowbias32).
    """
    first, second = jax.random.bits(key, (2,), jnp.uint32)
    place = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        stride = jnp.uint32(math.prod(shape[axis + 1 :]) * _SPREAD % 2**32)
        place += lax.broadcasted_iota(jnp.uint32, shape, axis) * stride
    return _hash(place + first, second)


def carried(bits: jax.Array, noise: jax.Array, dropped: int) -> jax.Array:
    """Returns bits of float32 without the last ones, into the rest of which their noise carries.

    Args:
        bits: uint32, of numbers or of their magnitudes.
        noise: 32 random bits for each.
        dropped: how many bits of the mantissa are lost.
    """
    return ((bits + (noise >> (32 - dropped))) >> dropped) << dropped


def dithered(x: jax.Array, mantissa_bits: int) -> jax.Array:
    """Returns numbers rounded to so many mantissa bits, up or down so that their mean stays.

    Stochastic rounding where sums over many numbers must stay and there is no key: the noise is a
    multiple of their own bits. A cast to a format of so many bits, at any scale that is a power of
    two and by way of any wider format, then changes nothing, but for what it makes subnormal: that
    is rounded to the nearest.

    Args:
        x: float32 array.
        mantissa_bits: of the format.

    Returns:
        float32 array; zeros, subnormal numbers of float32, those from 2^127 on, infinities and NaN
        as they were.

    Example:
        >>> print(dithered(jnp.array([1.3, 1.31, 1.32, 1.33]), 2))
        [1.25 1.5  1.25 1.25]
        >>> print(dithered(jnp.linspace(14.4, 14.6, 1000), 2).mean().round(1))
        14.5
    """
    return _dithered(x.astype(jnp.float32), mantissa_bits)


@partial(jax.jit, static_argnums=1)  # by its name analysis knows it for a rounding
def _dithered(x: jax.Array, mantissa_bits: int) -> jax.Array:
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    rounded = carried(bits, bits * jnp.uint32(_SPREAD), 23 - mantissa_bits)
    exponent = bits >> 23 & 0xFF
    is_normal = (exponent > 0) & (exponent < 0xFE)
    return jnp.where(is_normal, lax.bitcast_convert_type(rounded, jnp.float32), x)


def _hash(x: jax.Array, second: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D) ^ second
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
