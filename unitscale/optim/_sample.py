"""Evenly spaced entries of large arrays, from which scales are chosen."""

import math
from collections.abc import Sequence

import jax

# About so many entries at most are looked at, of an array and for one of many scales.
_ENTRIES = 2**16
_OF_ITEM = 2**10
_IN_COLUMNS = 2**13


def is_sampled(shape: tuple[int, ...], axes: Sequence[int]) -> bool:
    """Whether an array has more entries than are looked at for the scales shared along axes."""
    return math.prod(shape) > _entries(shape, axes)


def rows(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    """Evenly spaced rows of an array for each scale that is shared along axes; all if small."""
    entries, size = _entries(x.shape, axes), x.size
    strides = [1] * x.ndim
    for axis in axes:  # those that come first are thinned out first
        strides[axis] = max(1, min(x.shape[axis], size // entries))
        size //= strides[axis]
    return x[tuple(slice(None, None, stride) for stride in strides)]


def columns(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    """A few evenly spaced columns in evenly spaced rows, more of these than `rows` has.

    A GPU reads 32 bytes for each entry of a column.
    """
    stride = max(1, min(x.shape[-1], x.size // _IN_COLUMNS))
    return rows(x[..., ::stride], axes)


def _entries(shape: tuple[int, ...], axes: Sequence[int]) -> int:
    scales = math.prod(n for axis, n in enumerate(shape) if axis not in axes)
    return max(_ENTRIES, scales * _OF_ITEM)
