"""What an interpreted program computes with: plain and scaled arrays, and what is known of them.

A `Value` knows while tracing whether it is one constant everywhere, which formula its scale has,
and how far its data may have drifted from unit size. So nothing is rescaled for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from ..core import format_of, result_dtype, wide_dtype
from ._doubt import DOUBT, UNKNOWN, Doubt
from ._dynamic import unit_of
from ._lazy_scale import Atom, LazyScale, made_once

ONE = LazyScale()

# Times this many powers of two a scale within 2^100 is one of float32 still.
MOST_LOG2 = 26


def spans(dtype: Any) -> bool:
    """Whether a type has the range of float32, so that it holds values at scale 1.

    Nothing is measured for such types, and operands of different scales meet at their values.
    """
    return jnp.finfo(dtype).nexp >= 8


class Multiple(NamedTuple):
    """Wide data times a number of its type; another number is multiplied with that, not with data.

    Attributes:
        data: an array.
        number: a scalar.
    """

    data: Any
    number: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of data."""
        return jnp.shape(self.data)

    @property
    def dtype(self) -> Any:
        """Type of data."""
        return self.data.dtype

    def times(self, scale: LazyScale) -> Multiple:
        """Returns the multiple that is larger by a scalar scale."""
        factor = lax.convert_element_type(scale.array(), self.dtype)
        return Multiple(self.data, lax.mul(factor, self.number))

    def array(self) -> Any:
        """Returns the product."""
        return lax.mul(self.data, self.number)


class Value:
    """An array of the interpreted program: ``data * scale``, or ``data`` itself if scale is None.

    Args:
        data: the array.
        scale: formula of the scale; None for a plain array.
        drift: expected log2 of the RMS of data; 0 if nothing is known.
        dtype: type that results computed from this value take; None for a plain array, which never
            widens the data that it meets.
        doubt: what the estimate may be wrong by.
        const: the number that every element is, if known while tracing (the value, not the data).
        nonzero: a plain value with all elements but for signs and zeros, of a plain array that has
            zeros beside them.

    Example:
        >>> print(Value(jnp.ones(2), LazyScale(3)).wide())
        [8. 8.]
    """

    __slots__ = ("_data", "_made", "const", "doubt", "drift", "dtype", "nonzero", "scale")

    def __init__(
        self,
        data: Any,
        scale: LazyScale | None = None,
        drift: float = 0.0,
        dtype: Any = None,
        const: float | None = None,
        doubt: Doubt = DOUBT,
        nonzero: Value | None = None,
    ):
        """Builds a value; see the class. Data may be a `Multiple`, made when it is asked for."""
        self._made: dict[str, tuple[Any, Any]] = {}
        self._data = data
        self.doubt = doubt
        self.scale = scale
        self.drift = drift
        self.dtype = dtype if scale is None or dtype is not None else result_dtype(data)
        self.const = const
        self.nonzero = nonzero

    @property
    def data(self) -> Any:
        """The array."""
        data = self._data
        return self.once("data", data.array) if isinstance(data, Multiple) else data

    @property
    def is_plain(self) -> bool:
        """Whether the value has no scale."""
        return self.scale is None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of data."""
        return jnp.shape(self._data)

    @property
    def is_fill(self) -> bool:
        """Whether every element is one known number."""
        return self.const is not None

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Returns what is made of the value under a name; once, however many operations ask."""
        return made_once(self._made, name, make)

    def split(self) -> tuple[Any, LazyScale]:
        """Splits a plain scalar into wide data of unit size and a power of two, read at run time.

        Once, however many operands the scalar meets.
        """

        def make() -> tuple[Any, LazyScale]:
            wide = widen(self.data)
            unit = LazyScale.of(unit_of(wide), "the size of a number")
            return times(wide, ONE / unit), unit

        return self.once("split", make)

    def wide(self) -> Any:
        """Returns ``data * scale``, wide; once, however many operations see it."""
        scale, data = self.scale, self._data
        if scale is None or scale == ONE:
            return widen(self.data)
        if isinstance(data, Multiple) and not scale.ndim and not scale.is_static:
            return self.once("wide", lambda: data.times(scale).array())
        return self.once("wide", lambda: times(widen(self.data), scale))

    def at_one(self) -> Value:
        """Returns the value at scale 1, wide; nothing is known of the size of its data."""
        return Value(self.wide(), ONE, 0.0, self.dtype, self.const, UNKNOWN)

    def with_data(self, data: Any, **changes: Any) -> Value:
        """Returns the same scale, drift and type with other data."""
        keep = {
            "drift": self.drift,
            "dtype": self.dtype,
            "const": self.const,
            "doubt": self.doubt,
        }
        return Value(data, self.scale, **{**keep, **changes})


def scale_of(value: Value) -> LazyScale:
    """Returns the scale of a value; 1 for a plain one.

    Example:
        >>> scale_of(Value(jnp.ones(2))) == ONE
        True
    """
    return ONE if value.scale is None else value.scale


def aval_of(var: Any) -> Any:
    """Returns shape and dtype of a variable of a jaxpr."""
    return var.aval


def constant_of(data: Any) -> float | None:
    """Returns the number that a concrete scalar is, else None."""
    if isinstance(data, Tracer) or np.ndim(data) or not hasattr(data, "dtype"):
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


def is_complex(data: Any) -> bool:
    """Whether an array holds complex numbers."""
    return jnp.issubdtype(jnp.result_type(data), jnp.complexfloating)


def widen(data: Any) -> Any:
    """Converts real data below 32 bits to float32; everything else is kept."""
    dtype = jnp.result_type(data)
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize >= 4:
        return data
    return lax.convert_element_type(data, wide_dtype(dtype))


def spread(data: Any, like: Any) -> Any:
    """Broadcasts data to the shape of an array, and places it on the devices as that is."""
    if jnp.shape(data) == jnp.shape(like):
        return data
    return jnp.broadcast_to(data, jnp.shape(like), out_sharding=jax.typeof(like).sharding)


class Terms(NamedTuple):
    """How many numbers a sum adds up: a shape that is exported may have dimensions without one.

    Attributes:
        count: the product of those that are known.
        doubt: what the size of the sum is in doubt by for the others.
    """

    count: int
    doubt: Doubt = Doubt(0.0)

    @classmethod
    def of(cls, dims: Iterable[Any]) -> Terms:
        """Counts the items of a shape."""
        dims = list(dims)
        known = [n for n in dims if isinstance(n, int)]
        return cls(max(math.prod(known), 1), UNKNOWN if len(known) < len(dims) else Doubt(0.0))


def shaped(data: Any, *values: Value) -> Any:
    """Broadcasts data to the shape that element-wise operands have together."""
    shape = jnp.broadcast_shapes(*(v.shape for v in values))
    return data if jnp.shape(data) == shape else _together(data, *(v.data for v in values))


def _together(data: Any, *arrays: Any) -> Any:
    shape = jnp.broadcast_shapes(*map(jnp.shape, arrays))
    whole = [a for a in arrays if jnp.shape(a) == shape]
    return spread(data, whole[0]) if whole else jnp.broadcast_to(data, shape)


def times(data: Any, scale: LazyScale) -> Any:
    """Returns ``data * scale`` in the type of data, which must be wide.

    A large static part is a factor of its own, since its product with the rest may leave float32
    where data comes back: before the rest if it enlarges, and after it if not.
    """
    if scale.is_static and scale.log2 == 0:
        return data
    if not scale.is_static and abs(scale.log2) > MOST_LOG2:
        parts = [LazyScale(scale.log2), scale.shift(-scale.log2)]
        first, last = parts if scale.log2 > 0 else reversed(parts)
        # Else XLA multiplies the factors first.
        return times(lax.optimization_barrier(times(data, first)), last)
    factor = scale.array()
    if scale.is_static and abs(scale.log2) > 120:
        half = scale.log2 // 2
        return times(times(data, LazyScale(half)), LazyScale(scale.log2 - half))
    factor = lax.convert_element_type(factor, jnp.result_type(data))
    if not jnp.ndim(factor):
        return lax.mul(data, factor)
    # A number at a scale per item becomes one per item; a row at a scale per row, a matrix.
    return lax.mul(_together(data, data, factor), _together(factor, data, factor))


def saturate(data: Any, dtype: Any) -> Any:
    """Clamps wide finite data to the largest number of a narrow type; infinities are kept."""
    if np.dtype(dtype) != np.float16 or jnp.result_type(data).itemsize <= 2 or is_complex(data):
        return data
    wide = jnp.result_type(data)
    largest, finite = np.asarray(format_of(dtype).max, wide), np.asarray(jnp.finfo(wide).max, wide)
    # What is subtracted is zero, or an infinity: of a mask of what is finite XLA makes an array. In
    # this order the zero is positive, and a negative zero keeps its sign.
    beyond = lax.sub(lax.clamp(-finite, data, finite), data)
    return lax.sub(lax.clamp(-largest, data, largest), beyond)


def narrow(data: Any, dtype: Any) -> Any:
    """Rounds data to a type; complex data keeps its own."""
    if jnp.result_type(data) == dtype or is_complex(data):
        return data
    return lax.convert_element_type(data, dtype)


def numeric(value: Value, dtype: Any = None) -> Any:
    """Returns the plain array that a value stands for, in ``dtype``."""
    if value.scale is None:
        data = value.data
        return data if dtype is None or not is_float(data) else narrow(data, dtype)
    data = value.wide()
    return data if dtype is None else narrow(data, dtype)


def uniform(value: Value) -> Value:
    """Returns the value with one scale for all of its elements."""
    if value.scale is None or not value.scale.ndim:
        return value
    if not jnp.size(value.data):
        return Value(value.data, ONE, 0.0, value.dtype, value.const)
    return value.at_one()  # in a narrow type what has a small scale would be lost


def data_dtype(*values: Value) -> Any:
    """Returns the type of a result: that of the scaled operands; plain ones never widen it.

    Example:
        >>> x = Value(jnp.ones(2, jnp.float16), ONE)
        >>> data_dtype(x, Value(jnp.ones(2)))
        dtype('float16')
    """
    types = [v.dtype for v in values if v.dtype is not None]
    return np.dtype(jnp.result_type(*types)) if len(types) > 1 else np.dtype(types[0])


def known_atoms(values: Iterable[Value]) -> set[Atom]:
    """Returns the atoms that the scales of values are made of."""
    return {atom for v in values if v.scale is not None for atom in v.scale.powers}
