"""Evenly spaced entries of large arrays, from which scales are chosen."""

import math
from collections.abc import Sequence
from typing import Any

# All entries of an array that has at most so many are looked at.
_ALL = 2**16
# Of a larger one at most so many in rows, about so many in columns, and so many for each of many
# scales.
_IN_ROWS = 2**14
_IN_COLUMNS = 2**13
_OF_ITEM = 2**10


def is_sampled(shape: tuple[int, ...], axes: Sequence[int]) -> bool:
    """Whether an array has more entries than are looked at for the scales shared along axes."""
    return math.prod(shape) > max(_ALL, _least(shape, axes))


def parts(x: Any, axes: Sequence[int]) -> list[Any]:
    """All of a small array; rows and columns of a large one, which are seldom all unlike the rest.

    Every 64th row of a layer behind a flattened map of 64 channels belongs to one channel. Rows
    see all columns and columns almost all rows, so that what is chosen by the larger of both fits.
    """
    return [rows(x, axes), columns(x, axes)] if is_sampled(x.shape, axes) else [x]


def rows(x: Any, axes: Sequence[int]) -> Any:
    """Evenly spaced rows of a large array, for the scales that are shared along axes.

    At most 2^14 entries, or 2^10 for each of many scales. The first axes are thinned out first, and
    may be left with one item; `columns` has entries of all.
    """
    return _thinned(x, axes, _IN_ROWS)


def columns(x: Any, axes: Sequence[int]) -> Any:
    """A few evenly spaced columns of a large array, of almost all rows.

    A GPU reads 32 bytes for each entry of a column.
    """
    stride = max(1, min(x.shape[-1], x.size // _IN_COLUMNS))
    return _thinned(x[..., ::stride], axes, _ALL)


def _thinned(x: Any, axes: Sequence[int], entries: int) -> Any:
    entries, size = max(entries, _least(x.shape, axes)), x.size
    strides = [1] * x.ndim
    for axis in axes:  # those that come first are thinned out first
        others = size // x.shape[axis]
        strides[axis] = -(-x.shape[axis] // max(1, entries // others))
        size = others * -(-x.shape[axis] // strides[axis])
    return x[tuple(slice(None, None, stride) for stride in strides)]


def _least(shape: tuple[int, ...], axes: Sequence[int]) -> int:
    return _OF_ITEM * math.prod(n for axis, n in enumerate(shape) if axis not in axes)
