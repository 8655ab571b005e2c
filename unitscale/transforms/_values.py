"""What an interpreted program computes with: plain arrays and scaled ones, and what is known of them.

A `Value` knows while tracing whether it is one constant everywhere, which formula its scale has, and
how far its data may have drifted from unit size. So nothing is rescaled for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..core import ScaledArray, format_of, is_zero, result_dtype, wide_dtype
from ..core._arithmetic import reduce_scale
from ..core._lazy_scale import Atom, LazyScale, clipped
from ._dynamic import unit_of

ONE = LazyScale()

# Data wider than 16 bits may drift this far (in powers of two) before it costs a multiplication.
_SLACK = 24
# A scale that is a longer product than this, or a larger power of two, becomes one array.
_DEGREE = 3
# A scale rounded to a power of two is off by half a power at most; float16 data may be off by this
# many, in a chain of products, before its size is read from it.
_DOUBT = 0.5
_MOST_DOUBT = 4.0
_LOG2 = 60


def scale_limit(dtype: Any) -> int:
    """Returns how far scales may go (in powers of two) where they are chosen at run time.

    Data of a wide type can take what is beyond; data of 16 bits has no room for it.
    """
    return 100 if np.dtype(dtype) == np.float16 else 30



class Value:
    """An array of the interpreted program: ``data * scale``, or ``data`` itself if scale is None.

    Args:
        data: the array.
        scale: formula of the scale; None for a plain array.
        drift: expected log2 of the RMS of data; 0 if nothing is known.
        dtype: type that results computed from this value take; None for a plain array, which never
            widens the data that it meets.
        doubt: by how many powers of two the estimate may be wrong, if every factor was off by half.
        const: the number that every element is, if known while tracing (the value, not the data).
    """

    __slots__ = ("const", "data", "doubt", "drift", "dtype", "scale")

    def __init__(
        self,
        data: Any,
        scale: LazyScale | None = None,
        drift: float = 0.0,
        dtype: Any = None,
        const: float | None = None,
        doubt: float = _DOUBT,
    ):
        """Builds a value; see the class."""
        self.doubt = doubt
        self.data = data
        self.scale = scale
        self.drift = drift
        self.dtype = dtype if scale is None or dtype is not None else result_dtype(data)
        self.const = const

    @property
    def is_plain(self) -> bool:
        """Whether the value has no scale."""
        return self.scale is None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of data."""
        return jnp.shape(self.data)

    @property
    def is_fill(self) -> bool:
        """Whether every element is one known number."""
        return self.const is not None

    def with_data(self, data: Any, **changes: Any) -> Value:
        """Returns the same scale, drift and type with other data."""
        keep = {
            "drift": self.drift,
            "dtype": self.dtype,
            "const": self.const,
            "doubt": self.doubt,
        }
        return Value(data, self.scale, **{**keep, **changes})


def constant_of(data: Any) -> float | None:
    """Returns the number that a concrete scalar is, else None."""
    if isinstance(data, jax.core.Tracer) or np.ndim(data) or not hasattr(data, "dtype"):
        return None
    if not jnp.issubdtype(data.dtype, jnp.floating):
        return None
    return float(np.asarray(data).astype(np.float64))


def plain(data: Any) -> Value:
    """Wraps an array that has no scale."""
    return Value(data, const=constant_of(data))


def is_float(x: Any) -> bool:
    """Whether an array, or the type of one, holds real or complex floating numbers."""
    return jnp.issubdtype(getattr(x, "dtype", x), jnp.inexact)


def widen(data: Any) -> Any:
    """Converts real data below 32 bits to float32; everything else is kept."""
    dtype = jnp.result_type(data)
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize >= 4:
        return data
    return lax.convert_element_type(data, wide_dtype(dtype))


def times(data: Any, scale: LazyScale) -> Any:
    """Returns ``data * scale`` in the type of data, which must be wide."""
    if scale.is_static and scale.log2 == 0:
        return data
    factor = scale.array()
    if scale.is_static and abs(scale.log2) > 120:
        half = scale.log2 // 2
        return times(times(data, LazyScale(half)), LazyScale(scale.log2 - half))
    factor = lax.convert_element_type(factor, jnp.result_type(data))
    if jnp.ndim(factor) and jnp.shape(factor) != jnp.shape(data):
        factor = jnp.broadcast_to(factor, jnp.shape(data))
    return lax.mul(data, factor)


def saturate(data: Any, dtype: Any) -> Any:
    """Clamps wide finite data to the largest number of a narrow type; infinities are kept."""
    if np.dtype(dtype) != np.float16 or jnp.result_type(data).itemsize <= 2:
        return data
    largest = np.asarray(format_of(dtype).max, jnp.result_type(data))
    return lax.select(lax.is_finite(data), lax.clamp(-largest, data, largest), data)


def narrow(data: Any, dtype: Any) -> Any:
    """Rounds data to a type; complex data keeps its own."""
    if jnp.result_type(data) == dtype or jnp.issubdtype(jnp.result_type(data), jnp.complexfloating):
        return data
    return lax.convert_element_type(data, dtype)


def finish(
    data: Any,
    scale: LazyScale,
    drift: float,
    dtype: Any,
    *,
    clamp: bool = False,
    doubt: float = _DOUBT,
) -> Value:
    """Returns a scaled value from wide data, bringing drifted data back to unit size.

    16-bit data is brought back at once, in the multiplication before its one rounding. Wider data
    waits until it leaves the program, or until the drift is large. float16 data of a long chain of
    products is measured: the estimate has become too uncertain.
    """
    if scale.degree > _DEGREE or abs(scale.log2) > _LOG2:
        # Scales that multiply on and on leave the range of float32, data in the other direction.
        near = clipped(scale, scale_limit(dtype))
        data, scale = times(data, scale / near), near
    if jnp.issubdtype(jnp.result_type(data), jnp.complexfloating):
        return Value(data, scale, drift, dtype)
    if doubt > _MOST_DOUBT and np.dtype(dtype) == np.float16 and jnp.size(data):
        unit = LazyScale.of(unit_of(data))
        data, scale, drift, doubt = times(data, ONE / unit), scale * unit, 0.0, _DOUBT
    steps = round(drift) if math.isfinite(drift) else 0
    if steps and (np.dtype(dtype).itemsize < 4 or abs(drift) > _SLACK):
        data, scale, drift = times(data, LazyScale(-steps)), scale.shift(steps), drift - steps
    if clamp:
        data = saturate(data, dtype)
    return Value(narrow(data, dtype), scale, drift, dtype, doubt=min(doubt, 2 * _MOST_DOUBT))


def correction(value: Value, *, exactly: bool = False) -> float:
    """Returns the power of two by which the data of a value is estimated to be off unit size."""
    if exactly and abs(value.drift) > 1e-3:
        return value.drift
    return round(value.drift)


def shortened(*values: Value) -> list[Value]:
    """Turns long products among the scales of factors into single arrays, within their limit.

    Before the factors are multiplied: data that is far from unit size would leave its range.
    """
    if sum(v.scale.degree for v in values if v.scale is not None) <= _DEGREE:
        return list(values)
    return [v if v.scale is None or v.scale.degree < 2 else _short(v) for v in values]


def _short(value: Value) -> Value:
    assert value.scale is not None, "only a scale can be a long product"
    near = clipped(value.scale, scale_limit(value.dtype))
    data = times(widen(value.data), value.scale / near)
    dtype = jnp.result_type(value.data)
    return Value(narrow(data, dtype), near, value.drift, value.dtype, value.const, value.doubt)


def settle(value: Value, *, exactly: bool = False) -> Value:
    """Brings the data of a scaled value to unit size, as far as the static estimate knows it.

    Args:
        value: any value; plain ones are returned.
        exactly: correct the remainder below a factor of two as well, so that the drift of a loop
            does not add up; the scale then is no power of two.
    """
    if value.scale is None or jnp.issubdtype(jnp.result_type(value.data), jnp.complexfloating):
        return value
    steps = correction(value, exactly=exactly)
    if not steps:
        return value
    dtype = jnp.result_type(value.data)
    data = narrow(times(widen(value.data), LazyScale(-steps)), dtype)
    return Value(
        data, value.scale.shift(steps), value.drift - steps, value.dtype, value.const, value.doubt
    )


def numeric(value: Value, dtype: Any = None) -> Any:
    """Returns the plain array that a value stands for, in ``dtype``."""
    if value.scale is None:
        data = value.data
        return data if dtype is None or not is_float(data) else narrow(data, dtype)
    data = times(widen(value.data), value.scale)
    return data if dtype is None else narrow(data, dtype)


def uniform(value: Value) -> Value:
    """Returns the value with one scale for all of its elements."""
    if value.scale is None or not value.scale.ndim:
        return value
    scales = value.scale.array()
    one = LazyScale.of(reduce_scale(scales, scales, None, False))
    dtype = jnp.result_type(value.data)
    data = narrow(times(widen(value.data), value.scale / one), dtype)
    return Value(data, one, value.drift, value.dtype, value.const)


def data_dtype(*values: Value) -> Any:
    """Returns the type of a result: that of the scaled operands; plain ones never widen it."""
    types = [v.dtype for v in values if v.dtype is not None]
    return np.dtype(jnp.result_type(*types)) if len(types) > 1 else np.dtype(types[0])


def known_atoms(values: Iterable[Value]) -> set[Atom]:
    """Returns the atoms that the scales of values are made of."""
    return {atom for v in values if v.scale is not None for atom in v.scale.powers}


def from_input(leaf: Any) -> Value:
    """Turns an argument into a value."""
    if not isinstance(leaf, ScaledArray):
        return Value(leaf)
    data, scale = leaf.pair
    if scale is None:
        return Value(data)
    if is_zero(scale):
        return Value(jnp.zeros_like(data), ONE, const=0.0)
    if isinstance(scale, int):
        return Value(data, ONE)
    scale = lax.stop_gradient(lax.convert_element_type(scale, np.float32))
    if jnp.ndim(scale) and jnp.size(scale) == 1:
        scale = jnp.reshape(scale, ())
    elif jnp.ndim(scale):
        scale = jnp.reshape(scale, (1,) * (data.ndim - scale.ndim) + scale.shape)
    return Value(data, LazyScale.of(scale))


def traced_aval(leaf: Any) -> Any:
    """Returns what a program is traced on: values, so float32 where a scale multiplies 16 bits."""
    if not isinstance(leaf, ScaledArray):
        return leaf
    dtype = leaf.dtype if leaf.scale is None else wide_dtype(leaf.dtype)
    return jax.ShapeDtypeStruct(leaf.shape, dtype)


def to_output(value: Value) -> Any:
    """Turns a value into a result: a ScaledArray, or a plain array if it met no scale.

    Complex results are plain too: a ScaledArray is real.
    """
    if value.scale is None:
        return jnp.asarray(value.data)
    if jnp.issubdtype(jnp.result_type(value.data), jnp.complexfloating):
        return times(value.data, value.scale)
    value = settle(value)
    assert value.scale is not None, "settling keeps the scale"
    if value.const == 0.0:
        return ScaledArray(value.data, 0)
    if value.scale.is_static and value.scale.log2 == 0:
        return ScaledArray(value.data, 1)
    scale = value.scale.array()
    return ScaledArray(value.data, lax.stop_gradient(jnp.asarray(scale)))
