"""Keeps data at unit size: by the static estimate where that is enough, else by its statistics."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from ._doubt import DOUBT, UNKNOWN, Doubt
from ._dynamic import unit_of
from ._lazy_scale import LazyScale, clipped
from ._values import (
    MOST_LOG2,
    ONE,
    Value,
    is_complex,
    narrow,
    saturate,
    spans,
    times,
    widen,
)

# Data wider than 16 bits may drift this far (in powers of two) before it costs a multiplication.
_SLACK = 24
# A scale that is a longer product than this becomes one array.
_DEGREE = 4
# How far scales of narrow data may go, in powers of two, where they are chosen at run time.
_LIMIT = 100
# What leaves a program is the input of the next step: its scale is read from the data unless one
# element-wise product, or less, made it. In a narrow type that of a product is read too: of two
# arrays that are large in different places it is small.
_CERTAIN = Doubt(2 * DOUBT.off)
# A sum with a scale that was read from data is not certain: it may be the update of an input that
# grows, step by step, under a scale that stays.
_MEASURED = DOUBT + Doubt(0.1)


def finish(
    data: Any,
    scale: LazyScale,
    drift: float,
    dtype: Any,
    *,
    doubt: Doubt = DOUBT,
) -> Value:
    """Returns a scaled value from wide data, which is rounded where it ends: by `ready`.

    A chain of such results is rounded once, before a product of matrices, a loop, or as it leaves
    the program: differences of sums, and what is small beside 1, have the digits of float32 until
    then. 16-bit data is brought to unit size in the multiplication before that rounding, wider data
    where its drift is large. Where the estimate for 16-bit data has become too uncertain, the value
    is at scale 1, as in the program itself, and measured where it is rounded.

    Args:
        data: the result of an operation on wide data.
        scale: its scale.
        drift: the expected log2 of the RMS of data.
        dtype: the type of the result.
        doubt: what the estimate may be wrong by.

    Example:
        >>> found = finish(jnp.full(2, 8.0), ONE, 3.0, jnp.float16)
        >>> print(found.data, ready(found).data, ready(found).scale.array())
        [8. 8.] [1. 1.] 8.0
    """
    if abs(scale.log2) > MOST_LOG2 or (scale.degree > _DEGREE and spans(dtype)):
        data, scale, drift, doubt = times(data, scale), ONE, 0.0, UNKNOWN
    elif scale.degree > _DEGREE:
        # Scales that multiply on and on leave the range of float32, data in the other direction.
        scale, rest = clipped(scale, _LIMIT)
        data = times(data, rest)
    value = Value(data, scale, drift, dtype, doubt=doubt)
    if is_complex(data):
        return value
    if is_uncertain(doubt, dtype):
        return value.at_one()
    return value if abs(drift) <= _SLACK else ready(value)


def is_uncertain(doubt: Doubt, dtype: Any) -> bool:
    """Whether a result of a type stays at scale 1 until it is measured."""
    return doubt.is_great and not spans(dtype)


def is_wide(value: Value) -> bool:
    """Whether data is wider than the type that it is to be rounded to."""
    if value.scale is None:
        return False
    return np.dtype(value.dtype).itemsize < 4 <= jnp.result_type(value.data).itemsize


def ready(value: Value) -> Value:
    """Returns the value with data of its own type, at unit size if that has 16 bits or fewer."""
    if value.scale is None or is_complex(value.data):
        return value
    kept = np.dtype(value.dtype)
    if jnp.result_type(value.data).itemsize < kept.itemsize:
        return value
    return value.once("ready", lambda: _ready(value, kept))


def _ready(value: Value, kept: np.dtype[Any]) -> Value:
    if is_uncertain(value.doubt, kept):
        value = measured(value)
    if kept.itemsize < 4 or abs(value.drift) > _SLACK:
        value = _shifted(value, round(value.drift))
    return _with_type(value, kept)


def _with_type(value: Value, dtype: Any) -> Value:
    if jnp.result_type(value.data) == dtype:
        return value
    return value.with_data(narrow(saturate(value.data, dtype), dtype))


def _shifted(value: Value, steps: int) -> Value:
    """Moves a power of two from the data to the scale; not of data with a range that it lacks."""
    if not steps or value.scale is None or jnp.result_type(value.data).itemsize > 4:
        return value
    data = times(widen(value.data), LazyScale(-steps))
    dtype = jnp.result_type(value.data)
    return Value(
        narrow(data, dtype),
        value.scale.shift(steps),
        value.drift - steps,
        value.dtype,
        value.const,
        value.doubt,
    )


def rounded(value: Value) -> Value:
    """As `ready`, but for data of which the size is in doubt: it is measured where a chain ends."""
    return value if is_uncertain(value.doubt, value.dtype) else ready(value)


def measured(value: Value) -> Value:
    """Brings data to unit size by the power of two nearest its RMS, read at run time."""
    if value.scale is None or not jnp.size(value.data) or value.is_fill:
        return value
    unit = LazyScale.of(unit_of(value.data), "the size of its data")
    data = narrow(times(widen(value.data), ONE / unit), jnp.result_type(value.data))
    return Value(data, value.scale * unit, 0.0, value.dtype, doubt=_MEASURED)


def shortened(*values: Value) -> list[Value]:
    """Turns long products among the scales of factors into single arrays, or into 1.

    Before the factors are multiplied: data that is far from unit size would leave its range.
    """
    if sum(v.scale.degree for v in values if v.scale is not None) <= _DEGREE:
        return list(values)
    return [_short(v, v.scale) if v.scale is not None and v.scale.degree > 1 else v for v in values]


def _short(value: Value, scale: LazyScale) -> Value:
    if spans(value.dtype):
        return value.at_one()
    near, rest = clipped(scale, _LIMIT)
    data = times(widen(value.data), rest)
    dtype = jnp.result_type(value.data)
    return Value(narrow(data, dtype), near, value.drift, value.dtype, value.const, value.doubt)


def settle(value: Value) -> Value:
    """Brings the data of a scaled value to unit size, as far as the static estimate knows it."""
    if value.scale is None or is_complex(value.data):
        return value
    return _shifted(value, round(value.drift))


def sized(value: Value) -> Value:
    """Brings data to unit size before it is narrowed: measured if its size is in doubt."""
    return measured(value) if value.doubt.is_great else settle(value)


def leaving(value: Value) -> Value:
    """Returns the value as it leaves a program or a turn of a loop, to be the input of the next.

    Where the static estimate is not certain, the scale of narrow data is read from it, and that of
    data with the range of float32 is 1. The scale of an input that is updated again and again then
    has a fixed point.
    """
    if value.scale is None or is_complex(value.data):
        return value
    # Data with the range of float32 has room for terms of one sign.
    doubt = Doubt(value.doubt.off) if spans(value.dtype) else value.doubt
    if doubt.within(_CERTAIN if spans(value.dtype) else DOUBT):
        return ready(settle(value))
    if not spans(value.dtype):
        return ready(measured(value))
    # A scale that is an operand's own does not run away.
    return ready(value if value.scale.is_bare else value.at_one())
