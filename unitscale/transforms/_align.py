"""Brings the operands of a sum, a comparison or a choice to one scale."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ..core import format_of, static_pow2
from ._doubt import DOUBT, UNKNOWN, Doubt, most
from ._dynamic import MASK, MASK_ROOM, room_of
from ._interpreter import Interpreter
from ._lazy_scale import LazyScale, ratio
from ._settle import is_wide
from ._values import (
    ONE,
    Value,
    data_dtype,
    is_float,
    narrow,
    saturate,
    scale_of,
    shaped,
    spans,
    spread,
    times,
    uniform,
    widen,
)

# A chosen fill beyond this is taken for a mask: it stands for infinity, and need not be exact. What
# is smaller leaves float16 the room that it needs for data of unit size.
_MASK_LOG2 = round(math.log2(MASK))
_MASK_SCALE_LOG2 = round(math.log2(MASK_ROOM))
# A number below this keeps clear of a scale, by which it would be divided to nothing.
_TINY_LOG2 = -64
# Data this many powers of two below unit size keeps the precision of float16, or nearly.
_ROOM = 8
_OWN = "the size of an array that has no scale"


def split(number: float) -> tuple[float, int]:
    """Splits a finite number into a mantissa of magnitude near 1 and an exponent of two."""
    exponent = round(math.log2(static_pow2(abs(number))))
    return math.ldexp(number, -exponent), exponent


def is_neutral(value: Value) -> bool:
    """Whether a value is zero, infinite or NaN everywhere: such a value has any scale."""
    const = value.const
    return const is not None and (const == 0 or not math.isfinite(const))


def fill_scale(number: float, dtype: Any, *, masks: bool = True) -> LazyScale:
    """Returns the smallest scale at which a type holds a constant fill.

    A fill far beyond the range of 16 bits may be a mask, and gets a scale at which it is far below
    (or above) everything that an exponential distinguishes.
    """
    _, exponent = split(number)
    largest = math.floor(math.log2(format_of(dtype).max))
    needed = exponent + 1 - largest
    if masks and not spans(dtype) and exponent >= _MASK_LOG2:
        needed = min(needed, _MASK_SCALE_LOG2)
    return LazyScale(needed)


def fill(value: Value, scale: LazyScale, dtype: Any) -> Any:
    """Returns wide data of a constant at a scale, within the range of ``dtype``.

    At scale 1 within that of a type which spans all that float32 has, but for its last numbers:
    float32's largest is infinite in bfloat16. A narrower type takes it where it is rounded.
    """
    number = value.const
    assert number is not None, "a fill is a constant"
    wide = widen(jnp.zeros((), dtype)).dtype
    if number == 0 or not math.isfinite(number):
        return np.asarray(number, wide)
    largest = np.asarray(format_of(dtype).max, wide)
    if scale == ONE:
        data = np.asarray(number, wide)
        return np.asarray(np.clip(data, -largest, largest)) if spans(dtype) else data
    data = times(np.asarray(number, wide), ONE / scale)
    return jnp.clip(data, -largest, largest)


def at_scale(value: Value, scale: LazyScale, dtype: Any) -> Any:
    """Returns the wide data that represents a value at another scale."""
    if value.scale is not None and scale == ONE:
        return value.wide()
    if value.scale is not None:
        return times(widen(value.data), ratio(value.scale, scale))
    if value.const is not None and not value.shape:
        return fill(value, scale, dtype)
    return times(widen(value.data), ONE / scale)


class Aligned(NamedTuple):
    """Operands at one scale.

    Attributes:
        arrays: their data, wide.
        scale: at which they meet.
        drift: expected log2 of the RMS of a result of their size.
        dtype: type of a result.
        doubt: what that may be wrong by.

    Example:
        >>> Aligned([jnp.ones(2)], ONE, 0.0, jnp.float16, DOUBT).scale == ONE
        True
    """

    arrays: list[Any]
    scale: LazyScale
    drift: float
    dtype: Any
    doubt: Doubt


def meet(
    interpreter: Interpreter, values: Sequence[Value], dtype: Any, *, masks: bool = False
) -> tuple[LazyScale, Doubt]:
    """Returns the scale at which operands meet, and the doubt that is left.

    Scales of one formula meet at the larger one, known while tracing, and constant fills give way.
    Others meet at 1, at their values, which float32 holds as the program itself does; at the larger
    scale, found at run time, only where both are near what they scale, and where narrow data meets
    plain arrays, whose size is read from them, and masks.
    """
    deciding = [v for v in values if v.scale is not None and not is_neutral(v)]
    doubt = most(v.doubt for v in deciding)
    # Data that has room for it keeps its drift.
    drifts = [0 if spans(dtype) else round(v.drift) for v in deciding]
    scales = [scale_of(v).shift(d) for v, d in zip(deciding, drifts, strict=True)]
    others = [v for v in values if v.scale is None and not is_neutral(v)]
    uncertain, near = not doubt.within(DOUBT), list(scales)
    for value in others:
        own, size = _scale_of_plain(value, dtype, known=bool(deciding), masks=masks)
        near += [] if size is None else [LazyScale(size)]
        uncertain = uncertain and (size is not None or spans(dtype))
        scales.append(own)
    if not scales:
        return ONE, doubt
    if uncertain and any(s.powers != scales[0].powers for s in scales):
        return ONE, UNKNOWN
    apart = not spans(dtype) and _far_apart(near)
    return functools.reduce(interpreter.largest, scales), UNKNOWN if apart else doubt


def _far_apart(scales: Sequence[LazyScale]) -> bool:
    """Whether scales may lie further apart than float16 has room for."""
    log2s = [s.log2 for s in scales]
    differ = any(s.powers != scales[0].powers for s in scales)
    return differ or max(log2s, default=0) - min(log2s, default=0) > _ROOM


def _scale_of_plain(
    value: Value, dtype: Any, *, known: bool, masks: bool
) -> tuple[LazyScale, float | None]:
    """Returns the scale that a plain operand asks for, and log2 of its size.

    The size is None for arrays, of which it is read at run time, and for fills that may be masks:
    these must not have that of the result.
    """
    if value.const is None:
        return scale_of_array(value, dtype), None if value.shape else 0.0
    exponent = split(value.const)[1]
    own = fill_scale(value.const, dtype, masks=masks) if known else LazyScale(exponent)
    return own, None if masks and exponent >= _MASK_LOG2 else exponent


def scale_of_array(value: Value, dtype: Any) -> LazyScale:
    """Returns the scale that an array without one asks for: its size, where a type needs to know.

    As a batch, a target or a state may have any size, which nothing but the array tells.
    """
    data = value.data
    if spans(dtype) or not jnp.issubdtype(data.dtype, jnp.floating) or not jnp.size(data):
        return LazyScale(round(value.drift))
    if (nonzero := value.nonzero) is not None:
        return nonzero.once("room", lambda: LazyScale.of(room_of(nonzero.data, zeros=True), _OWN))
    return value.once("room", lambda: LazyScale.of(room_of(data), _OWN))


def held(value: Value, dtype: Any) -> Value:
    """Returns a plain value as a scaled one of a type, at a scale of its own size."""
    if is_neutral(value):
        return Value(value.data, ONE, dtype=dtype, const=value.const)
    if value.const is None:
        scale = scale_of_array(value, dtype)
    else:
        exponent = split(value.const)[1]
        scale = fill_scale(value.const, dtype) if exponent >= _MASK_LOG2 else LazyScale(exponent)
    return Value(at_scale(value, scale, dtype), scale, dtype=dtype)


def align(interpreter: Interpreter, values: Sequence[Value], *, masks: bool = False) -> Aligned:
    """Brings operands, at least one of them scaled, to one scale.

    Args:
        interpreter: remembers which scales have met before.
        values: plain and scaled operands.
        masks: whether elements of one or another are chosen: large fills may then be masks, and
            arrays without a scale meet others at their values.

    Example:
        >>> from unitscale.transforms._interpreter import Settings
        >>> x = Value(jnp.ones(2), LazyScale(3))
        >>> found = align(Interpreter(Settings(lambda name, terms: 0.0)), [x, Value(jnp.ones(2))])
        >>> print(found.arrays, found.scale.array())
        [Array([1., 1.], dtype=float32), Array([0.125, 0.125], dtype=float32)] 8.0
    """
    if masks and any(v.scale is None and v.const is None for v in values):
        return _at_their_values(values)
    if any(map(_is_tiny, values)):
        return _at_their_values(values)
    dtype = data_dtype(*values)
    scale, doubt = meet(interpreter, values, dtype, masks=masks)
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
    arrays = _of_one_type(arrays)
    if scale.ndim:
        arrays = [shaped(a, *values) for a in arrays]
    deciding = [v for v in values if v.scale is not None and not is_neutral(v)]
    own = [v.drift + scale_of(v).log2 - scale.log2 for v in deciding]
    met = all(scale_of(v).powers == scale.powers for v in deciding)
    drifts = own if met else [v.drift - round(v.drift) for v in deciding]
    return Aligned(arrays, scale, max(drifts, default=0.0), dtype, doubt)


def _is_tiny(value: Value) -> bool:
    """Whether a value is a plain number such as the floor of a logarithm or of a divisor."""
    number = value.const
    if number is None or value.scale is not None or is_neutral(value):
        return False
    return split(number)[1] < _TINY_LOG2


def _of_one_type(arrays: Sequence[Any]) -> list[Any]:
    wide = jnp.result_type(*map(jnp.result_type, arrays))
    return [a if jnp.result_type(a) == wide else jnp.asarray(a, wide) for a in arrays]


def _at_their_values(values: Sequence[Value]) -> Aligned:
    """Operands as they are in the program: an array without a scale may have any size.

    Beside numbers at a scale of that size those that are chosen in their place would be lost, and
    so would be a tiny number.
    """
    arrays = _of_one_type([value.wide() for value in values])
    return Aligned(arrays, ONE, 0.0, data_dtype(*values), UNKNOWN)


def align_uniform(interpreter: Interpreter, values: Sequence[Value]) -> Aligned:
    """As `align`, with one scale per tensor and data rounded to the type of the result.

    For primitives that move elements between places. Data of which the size is in doubt is wide,
    and so is all where some of it is.
    """
    values = [uniform(v) for v in values]
    found = align(interpreter, values, masks=True)
    if found.doubt.is_great or any(map(is_wide, values)):
        return found
    return found._replace(
        arrays=[narrow(saturate(a, found.dtype), found.dtype) for a in found.arrays]
    )
