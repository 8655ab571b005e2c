"""Checksums of what a checkpoint holds."""

import json
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .placement import whole


def text_checksum(*values: Any) -> int:
    """Of JSON values."""
    return zlib.crc32(json.dumps(values).encode())


def checksums(arrays: dict[str, jax.Array]) -> dict[str, str]:
    """Of arrays by name, computed where they lie, which may be on any mesh."""
    # One after another: devices that share a processor may wait for each other in different sums.
    return {name: f"{int(_checksum(array)):08x}" for name, array in arrays.items()}


def crc32s(arrays: dict[str, jax.Array]) -> dict[str, int]:
    """The same as version 0.1 computed them: of each array, whole on the host."""
    return {name: zlib.crc32(np.asarray(whole(x)).tobytes()) for name, x in arrays.items()}


@jax.jit
def _checksum(array: jax.Array) -> jax.Array:
    """The sum of the hashes of all words, of 8, 16 or 32 bits.

    Changing one word always changes it: its hash, with its place, is a bijection (the finalizer of
    MurmurHash3). Of other changes it misses one in 2^32.
    """
    array = array.astype(jnp.uint8) if array.dtype == bool else array
    bits = lax.bitcast_convert_type(array, jnp.dtype(f"uint{min(8 * array.dtype.itemsize, 32)}"))
    place = jnp.uint32(0)
    for axis, size in enumerate(bits.shape):
        place = place * np.uint32(size) + lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
    word = bits.astype(jnp.uint32) ^ place * np.uint32(0x9E3779B1)
    word = (word ^ word >> 16) * np.uint32(0x85EBCA6B)
    word = (word ^ word >> 13) * np.uint32(0xC2B2AE35)
    return jnp.sum(word ^ word >> 16, dtype=jnp.uint32)
