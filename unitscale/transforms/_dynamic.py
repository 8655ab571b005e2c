"""Scales read from the data at run time."""

from __future__ import annotations

import math
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..core import wide_dtype

Statistic = Literal["rms", "amax"]
"""What `dynamic_rescale` takes the size of data for."""

_EXPONENT_BITS = np.int32(0x7F800000)
# A number of a program beyond this is taken for a mask where it is chosen, and beside smaller ones.
MASK = np.float32(2.0**22)
# At this scale the largest float16 is far beyond everything that an exponential distinguishes.
MASK_ROOM = np.float32(2.0**-6)
_TINY = np.float32(2.0**-126)
# What is larger stands for infinity: beside it other numbers would be lost, at a scale of its size.
_MASK = np.float32(2.0**108)
# Squares of float32 are taken of numbers times this: they do not overflow below a mask. Where their
# mean is less than the second, an RMS below 2^-1.5, other squares count, as `_up` says.
_DOWN, _LEAST = np.float32(2.0**-46), np.float32(2.0**-95)
# What a mask counts among the first: 2^30 of them are less than the least.
_TRACE = np.float32(2.0**-63)


def unit_of(data: Any, statistic: Statistic = "rms") -> Any:
    """Returns the power of two nearest the RMS (or largest magnitude) of the finite elements.

    The RMS is that of elements below 2^108, if there are any but zeros; 2^126 for larger ones, and
    1 for data without finite elements other than zero. Not differentiated.

    Example:
        >>> print(unit_of(jnp.array([3e5, jnp.inf])))
        262144.0
    """
    data = lax.stop_gradient(jnp.asarray(data))
    if not data.size:
        return jnp.ones((), jnp.float32)
    if not jnp.iscomplexobj(data):
        data = lax.convert_element_type(data, wide_dtype(data.dtype))
    size = lax.abs(data)
    # A comparison, as XLA makes an array of `is_finite`. Neither infinity nor NaN is less.
    finite = lax.le(size, _as(jnp.finfo(size.dtype).max, size))
    finite = lax.select(finite, size, lax.full_like(size, 0))
    if not size.ndim:
        size = finite
    elif statistic == "rms":
        size = _rms(finite)
    else:
        size = lax.reduce_max(finite, tuple(range(size.ndim)))
    return _nearest_pow2(lax.convert_element_type(size, np.float32))


def _rms(size: Any) -> Any:
    """Returns the RMS of magnitudes below 2^108; infinity if they are zero, and others are not.

    A program measures often, so this is one reduction, which XLA fuses into what made the data: two
    sums of squares, of large and of small numbers, as the parts of a complex one.
    """
    usual = lax.lt(size, _as(_MASK, size))
    up = _up(size)
    large = lax.select(usual, lax.mul(size, _each(_DOWN, size)), lax.full_like(size, _TRACE))
    most = lax.full_like(size, up / 2)
    small = lax.select(usual, lax.min(lax.mul(size, _each(up, size)), most), lax.full_like(size, 0))
    squares = lax.complex(lax.mul(large, large), lax.mul(small, small))
    sums = lax.reduce_sum(squares, tuple(range(size.ndim)))
    large, small = lax.real(sums), lax.imag(sums)
    is_large = lax.ge(large, _as(_LEAST, large))
    unit = lax.select(is_large, _as(1 / _DOWN, large), _as(1 / up, large))
    root = lax.mul(lax.sqrt(lax.select(is_large, large, small)), unit)
    alone = lax.bitwise_and(lax.eq(small, _as(0, small)), lax.gt(large, _as(0, large)))
    return lax.select(alone, _as(np.inf, large), root)


def room_of(data: Any, *, zeros: bool = False) -> Any:
    """Returns the power of two nearest the largest finite element, masks left out.

    A mask is one number beyond 2^22, or several of nearly its size, beside others: an array such as
    0 and -1e9, added to logits. What is left of it has at least 2^-6. The smallest power of float32
    for zeros, which have room anywhere. Not differentiated.

    Args:
        data: an array.
        zeros: whether zeros stand beside its elements, that are not in it.

    Example:
        >>> print(room_of(jnp.array([3.0, -1e9])), room_of(jnp.array([1e5, -1e9, 1e12])))
        4.0 1.0995116e+12
    """
    data = lax.stop_gradient(jnp.asarray(data))
    size = lax.abs(lax.convert_element_type(data, wide_dtype(data.dtype)))
    size = lax.select(lax.is_finite(size), size, lax.full_like(size, 0))
    axes = tuple(range(size.ndim))
    beyond = lax.ge(size, _as(MASK, size))
    usual = lax.reduce_max(lax.select(beyond, lax.full_like(size, 0), size), axes)
    least = lax.reduce_min(lax.select(beyond, size, lax.full_like(size, np.inf)), axes)
    largest = lax.reduce_max(size, axes)
    smallest = lax.full_like(largest, 0) if zeros else lax.reduce_min(size, axes)
    one_cluster = lax.le(largest, lax.mul(least, _as(4.0, least)))
    beside = lax.ne(lax.lt(smallest, _as(MASK, smallest)), lax.lt(largest, _as(MASK, largest)))
    masked = lax.bitwise_and(one_cluster, beside)
    unmasked = lax.max(usual, _as(MASK_ROOM, usual))
    size = lax.convert_element_type(lax.select(masked, unmasked, largest), np.float32)
    return lax.select(lax.gt(size, np.float32(0)), _nearest_pow2(size), _TINY)


def _up(like: Any) -> np.float32:
    """What small numbers are multiplied by before they are squared.

    No number that counts is more than half of it then, and no sum of the squares overflows: of
    equal numbers XLA makes a complex product, in which infinity times zero is NaN.
    """
    terms = max(like.size, 1) if isinstance(like.size, int) else 2**20
    return np.float32(2.0 ** (64 - math.ceil(math.log2(terms) / 2)))


def _each(number: Any, like: Any) -> Any:
    """A number over the root of how many elements an array has, which an export may leave open."""
    if isinstance(like.size, int):
        return _as(number / np.sqrt(like.size), like)
    return lax.mul(_as(number, like), lax.rsqrt(jnp.asarray(like.size, like.dtype)))


def _as(number: Any, like: Any) -> Any:
    return np.asarray(number, like.dtype)


def _nearest_pow2(size: Any) -> Any:
    """Rounds to a power of two, 1.5 upwards; 1 for zero and subnormal numbers."""
    # Times 4/3 the numbers from 1.5 on reach the next exponent, which the mask keeps.
    size = lax.min(lax.mul(size, np.float32(4 / 3)), np.float32(2.0**126))
    bits = lax.bitcast_convert_type(size, np.int32)
    power = lax.bitcast_convert_type(lax.bitwise_and(bits, _EXPONENT_BITS), np.float32)
    return lax.select(lax.gt(power, np.float32(0)), power, lax.full_like(power, 1))
