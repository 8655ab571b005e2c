"""Values of an interpreted program, and how they are stored.

A value is *plain* (an array that no scale belongs to) or *scaled*: ``data * scale``. A scaled value
is *stored* while its data has the value's own type, and *wide* while it is float32 (or wider) at
scale 1, within a chain of element-wise operations and reductions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend.core import get_opaque_trace_state

from ..core import cast, format_of, result_dtype, wide_dtype

Statistic = Literal["rms", "amax"]
"""The statistic that `dynamic_rescale` brings near 1: the RMS or the largest magnitude."""

# Number of contractions after which the size of data is measured again.
MOST_STEPS = 2


class Scale:
    """The scale ``2**log2 * array``: a static power of two, and one that is known at run time.

    The array is a scalar or of the rank of its data; None is 1.
    """

    __slots__ = ("array", "log2")

    def __init__(self, log2: int = 0, array: Any = None):
        """Builds the scale; see the class."""
        self.log2 = log2
        self.array = array

    @property
    def is_one(self) -> bool:
        """Return whether the scale is known to be 1 while tracing."""
        return self.array is None and not self.log2

    @property
    def ndim(self) -> int:
        """Number of dimensions: 0 for one scale per tensor."""
        return 0 if self.array is None else jnp.ndim(self.array)

    def same(self, other: Scale | None) -> bool:
        """Return whether another scale is known to be equal while tracing."""
        return other is not None and self.log2 == other.log2 and self.array is other.array

    def __mul__(self, other: Scale) -> Scale:
        arrays = [a for a in (self.array, other.array) if a is not None]
        array = _bounded(lax.mul(*arrays)) if len(arrays) == 2 else (arrays or [None])[0]
        return Scale(self.log2 + other.log2, array)

    def shift(self, log2: int) -> Scale:
        """Returns the scale times ``2**log2``."""
        return Scale(self.log2 + log2, self.array)

    def inverse(self) -> Scale:
        """Returns one over the scale."""
        array = None if self.array is None else lax.div(np.float32(1), self.array)
        return Scale(-self.log2, array)

    def factor(self) -> Any:
        """Returns the scale as a float32 array within the normal numbers of float32."""
        static = np.float32(2.0 ** min(max(self.log2, -126), 127))
        if self.array is None:
            return static
        return _bounded(lax.mul(self.array, static)) if self.log2 else self.array


def _bounded(x: Any) -> Any:
    return lax.clamp(np.float32(2.0**-126), x, np.float32(2.0**127))


ONE = Scale()


class Origin(NamedTuple):
    """How an element-wise result was made: in ``depth`` operations from ``roots``."""

    apply: Callable[[list[Value]], Value]
    operands: list[Value]
    roots: list[Value]
    depth: int


class Value:
    """An array of the interpreted program.

    Args:
        data: the array.
        scale: its scale; None for a plain array.
        dtype: the type that the value is stored in; None for a plain array.
        steps: how many contractions made narrow data since its size was last known.
        const: of a plain array, the number that all of its elements are, if known.

    Attributes:
        origin: how a wide element-wise result was made, if that is cheap to do again.
        is_from_stored: whether it was computed from a stored array of as many elements.
        turns: how many times results of a stored value have been computed again.
    """

    __slots__ = (
        "_made",
        "const",
        "data",
        "dtype",
        "is_from_stored",
        "origin",
        "scale",
        "steps",
        "turns",
    )

    def __init__(
        self,
        data: Any,
        scale: Scale | None = None,
        dtype: Any = None,
        steps: int | None = None,
        const: float | None = None,
    ):
        """Builds a value; see the class."""
        self.data = data
        self.scale = scale
        # Any, since it is None only where scale is.
        self.dtype: Any = None
        if scale is not None:
            self.dtype = np.dtype(result_dtype(data) if dtype is None else dtype)
        unsized = 0 if self.dtype is None or spans(self.dtype) else MOST_STEPS
        self.steps = unsized if steps is None else steps
        self.const = const
        self.origin: Origin | None = None
        self.is_from_stored = False
        self.turns = 0
        self._made: dict[str, tuple[Any, Any]] = {}

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return jnp.shape(self.data)

    @property
    def is_stored(self) -> bool:
        """Return whether the value is scaled and its data as narrow as the type it is stored in."""
        if self.scale is None or is_complex(self.data):
            return False
        return jnp.result_type(self.data).itemsize <= self.dtype.itemsize

    @property
    def is_sized(self) -> bool:
        """Return whether data of a narrow type is known to be near RMS 1."""
        return self.is_stored and not spans(self.dtype) and not self.steps

    @property
    def is_neutral(self) -> bool:
        """Return whether the value is zero, infinity or NaN everywhere, which any scale holds."""
        return self.const is not None and (self.const == 0 or not math.isfinite(self.const))

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Returns what is made of the value under a name, made once in each trace."""
        level = get_opaque_trace_state(convention="flax")
        if name not in self._made or self._made[name][0] != level:
            self._made[name] = level, make()
        return self._made[name][1]

    def wide(self) -> Any:
        """Returns ``data * scale`` in float32 or wider."""
        scale = self.scale
        if scale is None or scale.is_one:
            return widen(self.data)
        return self.once("wide", lambda: times(widen(self.data), scale))

    def numeric(self, dtype: Any = None) -> Any:
        """Returns the array that the value stands for, in ``dtype`` if its numbers are floating."""
        data = self.data if self.scale is None else self.wide()
        return data if dtype is None or not is_float(data) else narrow(data, dtype)

    def uniform(self) -> Value:
        """Returns the value with one scale for all elements."""
        if self.scale is None or not self.scale.ndim:
            return self
        return wide_value(self.wide(), self.dtype)

    def made_by(self, apply: Callable[[list[Value]], Value], operands: list[Value]) -> None:
        """Remembers how a wide element-wise result was made, if that is cheap to do again."""
        is_traced = isinstance(self.data, Tracer)  # otherwise nothing is fused
        if self.scale is None or self.is_stored or self.dtype.itemsize > 2 or not is_traced:
            return
        origins = [v.origin or Origin(apply, [], [v], 0) for v in operands]
        roots = {id(root): root for origin in origins for root in origin.roots}
        depth = 1 + max(origin.depth for origin in origins)
        large = [
            r for r in roots.values() if r.const is None and jnp.size(r.data) >= jnp.size(self.data)
        ]
        self.is_from_stored = any(r.is_stored for r in large)
        read = sum(jnp.result_type(r.data).itemsize for r in large)
        # Float32 would be written (4 bytes) and read (4): up to three arrays of 16 bits are less.
        if read <= 6 and depth <= 64 and len(roots) <= 16:
            self.origin = Origin(apply, operands, list(roots.values()), depth)

    def again(self, done: dict[int, Value] | None = None) -> Value:
        """Computes a chain of element-wise operations anew, from what it began with.

        XLA would merge it with the first time, and keep float32 in memory until now, if the scales
        of stored arrays were not behind barriers. A number tells each barrier from those before.
        """
        done = {} if done is None else done
        if self.origin is None or id(self) in done:
            return done.get(id(self), self)
        for root in self.origin.roots:
            if root.is_stored and id(root) not in done:
                root.turns += 1
                scale = jnp.asarray(scale_of(root).factor())
                scale, _ = lax.optimization_barrier((scale, np.float32(root.turns)))
                data = times(widen(root.data), Scale(0, scale))
                done[id(root)] = wide_value(data, root.dtype)
        value = self.origin.apply([v.again(done) for v in self.origin.operands])
        if value.scale is not None and not value.is_stored:
            value.origin, value.is_from_stored = self.origin, self.is_from_stored
        done[id(self)] = value
        return value

    def with_data(self, data: Any) -> Value:
        """Returns a value of the same scale, type and size with other data."""
        return Value(data, self.scale, self.dtype, self.steps)

    def with_part(self, data: Any) -> Value:
        """Returns a value of the same scale and type with data of unknown size."""
        is_known = self.dtype is None or spans(self.dtype)
        return Value(data, self.scale, self.dtype, self.steps if is_known else None)

    def stored(self) -> Value:
        """Returns the value with one scale and data of its own type.

        The scale of wide data is 1 in a type with the range of float32, and measured in another.
        """
        if self.scale is None or is_complex(self.data) or (self.is_stored and not self.scale.ndim):
            return self
        if spans(self.dtype) or not jnp.size(self.data):
            at_one = lambda: Value(narrow(self.wide(), self.dtype), ONE, self.dtype)  # noqa: E731
            return self.once("stored", at_one)
        return self.once("stored", self.measured)

    def measured(self, statistic: Statistic = "rms") -> Value:
        """Returns the value stored at the power of two nearest its size, read from the data."""
        x = self.uniform()
        assert x.scale is not None, "a measured value is scaled"
        # Computed once to be measured and once to be stored, so that float32 is not kept between.
        first, second = (x.again(), x.again()) if x.is_from_stored else (x, x)
        unit = Scale(0, unit_of(first.data, statistic, format_of(self.dtype).max))
        data = fit(times(widen(second.data), unit.inverse()), self.dtype)
        return Value(data, x.scale * unit, self.dtype, 0)

    def kept(self) -> Value:
        """Returns the value stored, behind a barrier: XLA would not round, and keep float32."""
        x = self.stored()
        return x.with_data(lax.optimization_barrier(x.data))

    def leaving(self) -> Value:
        """Returns the value as it leaves a program or a turn of a loop, to be an input again.

        The scale of what a contraction made would run away if it were an input again and again.
        """
        x = self if self.scale is None or self.scale.ndim else self.stored()
        if x.scale is None or is_complex(x.data) or x.scale.ndim or not x.steps:
            return x
        return wide_value(x.wide(), x.dtype).stored() if spans(x.dtype) else x.measured()


def scale_of(value: Value) -> Scale:
    """Returns the scale of a value; 1 for a plain array."""
    return ONE if value.scale is None else value.scale


def wide_value(data: Any, dtype: Any) -> Value:
    """Wraps a result that was computed wide; ``dtype`` is the type that it is to be stored in."""
    return Value(data, ONE, dtype)


def plain(data: Any) -> Value:
    """Wraps an array without scale; a concrete scalar is known to be its number."""
    is_scalar = not isinstance(data, Tracer) and not np.ndim(data) and hasattr(data, "dtype")
    if not is_scalar or not jnp.issubdtype(data.dtype, jnp.floating):
        return Value(data)
    return Value(data, const=float(np.asarray(data).astype(np.float64)))


# -- types -------------------------------------------------------------------------------------


def spans(dtype: Any) -> bool:
    """Return whether a type has the range of float32, so that it holds values at scale 1."""
    return jnp.finfo(dtype).nexp >= 8


def aval_of(var: Any) -> Any:
    """Returns shape and dtype of a variable of a jaxpr."""
    return var.aval


def is_float(x: Any) -> bool:
    """Return whether an array, or a type, is of real or complex floating numbers."""
    return jnp.issubdtype(getattr(x, "dtype", x), jnp.inexact)


def is_complex(data: Any) -> bool:
    """Return whether an array holds complex numbers."""
    return jnp.issubdtype(jnp.result_type(data), jnp.complexfloating)


def data_dtype(*values: Value) -> Any:
    """Returns the type of a result: that of the scaled operands; plain ones never widen it."""
    return np.dtype(jnp.result_type(*[v.dtype for v in values if v.dtype is not None]))


def widen(data: Any) -> Any:
    """Converts real data below 32 bits to float32; everything else is kept."""
    dtype = jnp.result_type(data)
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize >= 4:
        return data
    return lax.convert_element_type(data, wide_dtype(dtype))


def narrow(data: Any, dtype: Any) -> Any:
    """Rounds data to a type; complex data keeps its own."""
    if jnp.result_type(data) == dtype or is_complex(data):
        return data
    return lax.convert_element_type(data, dtype)


def fit(data: Any, dtype: Any) -> Any:
    """Rounds wide data to a type; finite numbers beyond a narrow one's range become its largest."""
    if np.dtype(dtype).itemsize == 1:
        return cast(data, dtype)
    if spans(dtype) or is_complex(data) or jnp.result_type(data).itemsize <= 2:
        return narrow(data, dtype)
    wide = jnp.result_type(data)
    largest, finite = np.asarray(format_of(dtype).max, wide), np.asarray(jnp.finfo(wide).max, wide)
    # The difference is 0, or infinite where data is. XLA would make an array of a mask; and in this
    # order the zero is positive, so that a negative zero keeps its sign.
    beyond = lax.sub(lax.clamp(-finite, data, finite), data)
    return narrow(lax.sub(lax.clamp(-largest, data, largest), beyond), dtype)


def same_type(arrays: Sequence[Any]) -> list[Any]:
    """Widens the floating arrays among operands, and gives them one type."""
    wide = [widen(a) if is_float(a) else a for a in arrays]
    types = {jnp.result_type(a) for a in wide if is_float(a)}
    if len(types) < 2 or len({jnp.issubdtype(t, jnp.complexfloating) for t in types}) > 1:
        return wide
    common = jnp.result_type(*types)
    return [narrow(a, common) if is_float(a) else a for a in wide]


# -- arithmetic on scales ------------------------------------------------------------------------


def spread(data: Any, like: Any) -> Any:
    """Broadcasts data to the shape of an array, laid out on the devices as that is."""
    if jnp.shape(data) == jnp.shape(like):
        return data
    return jnp.broadcast_to(data, jnp.shape(like), out_sharding=jax.typeof(like).sharding)


def times(data: Any, scale: Scale) -> Any:
    """Returns ``data * scale`` in the type of data, which is wide."""
    if scale.is_one:
        return data
    factor = lax.convert_element_type(scale.factor(), jnp.result_type(data))
    return lax.mul(data, factor if not jnp.ndim(factor) else spread(factor, data))


def data_at(value: Value, scale: Scale, dtype: Any) -> Any:
    """Returns the data, in a type, that represents a value at a scale."""
    if scale.same(value.scale):
        return narrow(value.data, dtype)
    return narrow(times(value.wide(), scale.inverse()), dtype)


def unit_of(data: Any, statistic: Statistic = "rms", largest: float = math.inf) -> Any:
    """Returns the power of two nearest the RMS (or largest magnitude) of the finite elements.

    It is at least so large that no finite element is above ``largest`` times it; 1 for data without
    finite elements other than zero, and for more than 2^16 of an RMS below about 2^-90. Not
    differentiated.
    """
    data = lax.stop_gradient(jnp.asarray(data))
    if not data.size:
        return jnp.ones((), jnp.float32)
    size = lax.abs(data if jnp.iscomplexobj(data) else widen(data))
    most = np.asarray(jnp.finfo(size.dtype).max, size.dtype)
    # A comparison, as XLA makes an array of `is_finite`; neither infinity nor NaN is less.
    size = lax.select(lax.le(size, most), size, lax.full_like(size, 0))
    size = lax.convert_element_type(lax.min(size, np.asarray(3e38, size.dtype)), np.float32)
    axes, rms = tuple(range(size.ndim)), _rms(size)
    room = math.floor(math.log2(min(largest, 2.0**127)))
    # No entry is above the root of the number of terms times the RMS. Large arrays are read once,
    # with room for such an entry, and are zero where their squares underflow.
    if isinstance(size.size, int) and size.size > 2**16 and statistic == "rms":
        shift = max(math.ceil(math.log2(size.size) / 2) - (room - 1), 0)
        if shift <= 2:
            return lax.mul(_nearest_pow2(rms), np.float32(2.0**shift))
    amax = lax.reduce_max(size, axes)
    if statistic == "amax" or not size.ndim:
        return _nearest_pow2(amax)
    unit = _nearest_pow2(lax.select(lax.gt(rms, np.float32(0)), rms, amax))
    return lax.max(unit, lax.mul(_nearest_pow2(amax), np.float32(2.0 ** (1 - room))))


def _rms(size: Any) -> Any:
    """Returns the RMS of float32 magnitudes; 0 below about 2^-90, where squares underflow.

    Squares of large and small numbers are summed apart, each shifted so that the sum stays within
    float32. They are parts of one complex sum, which XLA fuses with what made the data.
    """
    terms = size.size if isinstance(size.size, int) else 2**20  # an export leaves sizes open
    shift = math.ceil(math.log2(terms) / 2)
    # The first sum is exact for an RMS above 2^(8 + shift), the second below 2^(10 + shift).
    down, up = np.float32(2.0 ** (-66 - shift)), np.float32(2.0 ** (53 - 3 * shift))
    large = lax.mul(size, down)
    small = lax.min(lax.mul(size, up), np.float32(2.0 ** (63 - shift)))
    squares = lax.complex(lax.mul(large, large), lax.mul(small, small))
    sums = lax.reduce_sum(squares, tuple(range(size.ndim)))
    is_large = lax.ge(lax.real(sums), np.float32(2.0 ** (2 * shift - 116)))
    found = lax.select(is_large, lax.real(sums), lax.imag(sums))
    unit = lax.select(
        is_large, lax.full_like(found, 2.0**66), lax.full_like(found, 2.0 ** (2 * shift - 53))
    )
    # The mean over 4^shift: dividing by all terms could underflow.
    share = jnp.asarray(size.size, np.float32) * np.float32(4.0**-shift)
    return lax.mul(lax.sqrt(lax.div(found, share)), unit)


_EXPONENT_BITS = np.int32(0x7F800000)


def _nearest_pow2(size: Any) -> Any:
    """Rounds to a power of two, 1.5 upwards; 1 for zero and subnormal numbers."""
    # Times 4/3 the numbers from 1.5 on reach the next exponent, which the mask keeps.
    size = lax.min(lax.mul(size, np.float32(4 / 3)), np.float32(2.0**126))
    bits = lax.bitcast_convert_type(size, np.int32)
    power = lax.bitcast_convert_type(lax.bitwise_and(bits, _EXPONENT_BITS), np.float32)
    return lax.select(lax.gt(power, np.float32(0)), power, lax.full_like(power, 1))
