"""Random bits for stochastic rounding, cheap enough to be drawn for every number of a model.

The bits of `jax.random` cost some hundred integer operations each, which on a GPU takes several
times as long as all the rest of an optimizer step. Rounding needs less: bits that are uniform, and
that do not follow one another from number to number, key to key and step to step.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from ._pow2 import exponent_of, pow2

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


def dithered(x: jax.Array, mantissa_bits: int) -> jax.Array:
    """Returns numbers moved by up to half a step of a format, so that they round without bias.

    For a few numbers of which many more depend, where there is no key: by a hash of their own bits.
    Rounded to the nearest of so many mantissa bits afterwards, as by a cast at any scale that is a
    power of two, their mean stays (but beside a power of two, where steps change).

    Args:
        x: float32 array.
        mantissa_bits: of the format.

    Returns:
        float32 array.

    Example:
        >>> x = jnp.linspace(14.4, 14.6, 1000)
        >>> print(dithered(x, 2).astype("float8_e5m2").astype("float32").mean().round(1))
        14.5
    """
    bits = _hash(lax.bitcast_convert_type(x, jnp.uint32), jnp.uint32(_SPREAD))
    step = pow2(exponent_of(x) - mantissa_bits)
    return x + (bits.astype(jnp.float32) * 2.0**-32 - 0.5) * step


def _hash(x: jax.Array, second: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D) ^ second
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
