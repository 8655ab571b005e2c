"""Brings the operands of a sum, a comparison or a choice to one scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..core import format_of, static_pow2
from ..core._lazy_scale import LazyScale, ratio
from ._interpreter import Interpreter
from ._settle import MOST_DOUBT
from ._values import (
    DOUBT,
    ONE,
    Value,
    data_dtype,
    is_complex,
    is_float,
    narrow,
    saturate,
    scale_limit,
    shaped,
    spread,
    times,
    uniform,
    widen,
)
from ._zeros import matters

# A fill beyond this is taken for a mask: it stands for infinity, and need not be kept exactly.
_MASK_LOG2 = 16
_MASK_SCALE_LOG2 = -6
# Data this many powers of two below unit size keeps the precision of float16, or nearly.
_ROOM = 8


def split(number: float) -> tuple[float, int]:
    """Splits a finite number into a mantissa of magnitude near 1 and an exponent of two."""
    exponent = round(math.log2(static_pow2(abs(number))))
    return math.ldexp(number, -exponent), exponent


def is_neutral(value: Value) -> bool:
    """Whether a value is zero, infinite or NaN everywhere: such a value has any scale."""
    const = value.const
    return const is not None and (const == 0 or not math.isfinite(const))


def fill_scale(number: float, dtype: Any) -> LazyScale:
    """Returns the smallest scale at which a type holds a constant fill.

    A fill beyond the range of 16 bits is a mask, and gets a scale at which it is far below (or
    above) everything that an exponential distinguishes.
    """
    _, exponent = split(number)
    largest = math.floor(math.log2(format_of(dtype).max))
    needed = exponent + 1 - largest
    if np.dtype(dtype).itemsize < 4 and exponent >= _MASK_LOG2 and largest <= _MASK_LOG2:
        needed = min(needed, _MASK_SCALE_LOG2)
    return LazyScale(needed)


def fill(value: Value, scale: LazyScale, dtype: Any) -> Any:
    """Returns wide data of a constant at a scale, within the range of ``dtype``."""
    number = value.const
    assert number is not None, "a fill is a constant"
    wide = widen(jnp.zeros((), dtype)).dtype
    if number == 0 or not math.isfinite(number):
        return np.asarray(number, wide)
    data = times(np.asarray(number, wide), ONE / scale)
    largest = np.asarray(format_of(dtype).max, wide)
    return jnp.clip(data, -largest, largest)


def at_scale(value: Value, scale: LazyScale, dtype: Any) -> Any:
    """Returns the wide data that represents a value at another scale."""
    if value.scale is not None:
        return times(widen(value.data), ratio(value.scale, scale))
    if value.const is not None and not value.shape:
        return fill(value, scale, dtype)
    return times(widen(value.data), ONE / scale)


def meet(interpreter: Interpreter, values: Sequence[Value], dtype: Any) -> LazyScale:
    """Returns the scale at which operands meet: the largest, to which constant fills give way."""
    scale, limit = None, scale_limit(dtype)
    for value in values:
        if value.scale is not None and not is_neutral(value):
            own = value.scale.shift(round(value.drift))
            scale = own if scale is None else interpreter.largest(scale, own, limit)
    known = scale is not None
    for value in values:
        if value.scale is not None or is_neutral(value):
            continue
        if value.const is not None:
            own = fill_scale(value.const, dtype) if known else LazyScale(split(value.const)[1])
        elif not value.shape and not is_complex(value.data):
            own = value.split()[1]
        else:
            own = LazyScale(round(value.drift))
        scale = own if scale is None else interpreter.largest(scale, own, limit)
    return ONE if scale is None else scale


def doubt_among(values: Sequence[Value]) -> float:
    """Returns the doubt of operands that meet: the largest of those that decide the scale.

    An operand of the larger scale may happen to be zero. What the others are at that scale float16
    cannot hold if they are far below it, so there the size of the result is read from its data.
    """
    deciding = [v for v in values if v.scale is not None and not is_neutral(v)]
    doubt = max((v.doubt for v in deciding), default=DOUBT)
    if not deciding or not matters(data_dtype(*deciding)):
        return doubt
    return 2 * MOST_DOUBT if _far_apart([s for v in values for s in _own_scale(v)]) else doubt


def _own_scale(value: Value) -> list[LazyScale]:
    """The scale near which a value is, if that is known.

    Not of plain arrays and of large fills: as masks they must not have the size of the result.
    """
    if is_neutral(value):
        return []
    if value.scale is not None:
        return [value.scale]
    if value.const is not None:
        exponent = split(value.const)[1]
        return [LazyScale(exponent)] if exponent < _MASK_LOG2 else []
    return [] if value.shape or not is_float(value.data) else [value.split()[1]]


def _far_apart(scales: Sequence[LazyScale]) -> bool:
    """Whether scales may lie further apart than float16 has room for."""
    log2s = [s.log2 for s in scales]
    return any(s.powers != scales[0].powers for s in scales) or max(log2s) - min(log2s) > _ROOM


def align(
    interpreter: Interpreter, values: Sequence[Value]
) -> tuple[list[Any], LazyScale, float, Any]:
    """Brings operands to one scale.

    Args:
        interpreter: remembers which scales have met before.
        values: plain and scaled operands, at least one scaled.

    Returns:
        Their wide data, the scale, the expected drift, and the type of the result.
    """
    dtype = data_dtype(*values)
    scale = meet(interpreter, values, dtype)
    arrays = []
    for value in values:
        if value.const is not None and is_neutral(value):
            wide = widen(jnp.zeros((), dtype)).dtype
            data = value.data if is_float(value.data) else value.const
            arrays.append(jnp.asarray(data, wide) if value.scale is None else widen(value.data))
        elif value.const is not None and value.scale is None and value.shape:
            arrays.append(spread(fill(value, scale, dtype), value.data))
        else:
            arrays.append(at_scale(value, scale, dtype))
    wide = jnp.result_type(*(jnp.result_type(a) for a in arrays))
    arrays = [a if jnp.result_type(a) == wide else jnp.asarray(a, wide) for a in arrays]
    if scale.ndim:
        arrays = [shaped(a, *values) for a in arrays]
    drifts = [v.drift - round(v.drift) for v in values if v.scale is not None and not is_neutral(v)]
    return arrays, scale, max(drifts, default=0.0), dtype


def align_uniform(
    interpreter: Interpreter, values: Sequence[Value]
) -> tuple[list[Any], LazyScale, float, Any]:
    """As `align`, with one scale per tensor and data rounded to the type of the result.

    For primitives that move elements between places. Data of which the size is in doubt is wide.
    """
    values = [uniform(v) for v in values]
    arrays, scale, drift, dtype = align(interpreter, values)
    if doubt_among(values) > MOST_DOUBT:
        return arrays, scale, drift, dtype
    return [narrow(saturate(a, dtype), dtype) for a in arrays], scale, drift, dtype
