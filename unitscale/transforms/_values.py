"""Values of an interpreted program, and how they are stored.

A value is *plain* (an array without a scale) or *scaled*: ``data * scale``. A scaled value is
*stored* if its data has the value's own type. It is *wide* if its data is float32 (or wider) at
scale 1, as within a chain of element-wise operations and reductions.
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

# Number of contractions in a row after which the size of the data must be measured again.
MOST_STEPS = 2
# Number of results that are measured together; more of them take longer to compile.
_TOGETHER = 16


class Scale:
    """The scale ``2**log2 * array``: a static power of two times an array known at run time.

    The array is a scalar or has the rank of the data; None stands for 1.
    """

    __slots__ = ("array", "log2", "vector")

    def __init__(self, log2: int = 0, array: Any = None, vector: Any = None):
        """Build the scale; ``vector`` is the array and the index that it was taken from, if any."""
        self.log2 = log2
        self.array = array
        self.vector = vector

    @property
    def is_one(self) -> bool:
        """Return whether the scale is known to be 1 while tracing."""
        return self.array is None and not self.log2

    @property
    def ndim(self) -> int:
        """The number of dimensions: 0 for one scale per tensor."""
        return 0 if self.array is None else jnp.ndim(self.array)

    def same(self, other: Scale | None) -> bool:
        """Return whether the scales are equal, as far as is known while tracing."""
        return other is not None and self.log2 == other.log2 and self.array is other.array

    def __mul__(self, other: Scale) -> Scale:
        arrays = [a for a in (self.array, other.array) if a is not None]
        array = _bounded(lax.mul(*arrays)) if len(arrays) == 2 else (arrays or [None])[0]
        return Scale(self.log2 + other.log2, array)

    def apart(self, number: int) -> Scale:
        """Return the scale behind a numbered barrier, which keeps XLA from merging its uses."""
        array, index = (self.factor(), ()) if self.vector is None else self.vector
        array, _ = lax.optimization_barrier((jnp.asarray(array), np.float32(number)))
        return Scale(0 if self.vector is None else self.log2, array[index])

    def shift(self, log2: int) -> Scale:
        """Return the scale times ``2**log2``."""
        return Scale(self.log2 + log2, self.array)

    def inverse(self) -> Scale:
        """Return one over the scale."""
        array = None if self.array is None else lax.div(np.float32(1), self.array)
        return Scale(-self.log2, array)

    def factor(self) -> Any:
        """Return the scale as a float32 array, clamped to the normal numbers of float32."""
        static = np.float32(2.0 ** min(max(self.log2, -126), 127))
        if self.array is None:
            return static
        return _bounded(lax.mul(self.array, static)) if self.log2 else self.array


def _bounded(x: Any) -> Any:
    return lax.clamp(np.float32(2.0**-126), x, np.float32(2.0**127))


ONE = Scale()


class Origin(NamedTuple):
    """How to recompute an element-wise result: by ``depth`` operations from ``roots``."""

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
        steps: for narrow data, the number of contractions since its size was last known; None if
            its size is unknown.
        const: for a plain array, the number that all its elements equal, if known.

    Attributes:
        origin: how to recompute a wide element-wise result, if that is cheap.
        is_from_stored: whether it was computed from a stored array with as many elements.
        turns: number of times that results of a stored value have been recomputed.
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
        self.data = data
        self.scale = scale
        # Typed as Any, because it is None only where the scale is None.
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
        """The shape of the array."""
        return jnp.shape(self.data)

    @property
    def is_stored(self) -> bool:
        """Return whether the value is scaled, and its data no wider than its storage type."""
        if self.scale is None or is_complex(self.data):
            return False
        return jnp.result_type(self.data).itemsize <= self.dtype.itemsize

    @property
    def is_sized(self) -> bool:
        """Return whether data of a narrow type is known to be near RMS 1."""
        return self.is_stored and not spans(self.dtype) and not self.steps

    @property
    def is_neutral(self) -> bool:
        """Return whether every element is 0, infinite or NaN, and so the same at any scale."""
        return self.const is not None and (self.const == 0 or not math.isfinite(self.const))

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Return ``make()``, cached for this value under a name within a trace."""
        level = get_opaque_trace_state(convention="flax")
        if name not in self._made or self._made[name][0] != level:
            self._made[name] = level, make()
        return self._made[name][1]

    def wide(self) -> Any:
        """Return ``data * scale`` in float32 or wider."""
        scale = self.scale
        if scale is None or scale.is_one:
            return widen(self.data)
        return self.once("wide", lambda: times(widen(self.data), scale))

    def numeric(self, dtype: Any = None) -> Any:
        """Return the value as a plain array, in ``dtype`` if it is floating."""
        data = self.data if self.scale is None else self.wide()
        return data if dtype is None or not is_float(data) else narrow(data, dtype)

    def uniform(self) -> Value:
        """Return the value with one scale for all elements."""
        if self.scale is None or not self.scale.ndim:
            return self
        return wide_value(self.wide(), self.dtype)

    def made_by(self, apply: Callable[[list[Value]], Value], operands: list[Value]) -> None:
        """Remember how to recompute a wide element-wise result, if that is cheap."""
        is_traced = isinstance(self.data, Tracer)  # otherwise nothing is fused
        if self.scale is None or self.is_stored or self.dtype.itemsize > 2 or not is_traced:
            return
        origins = [v.origin or Origin(apply, [], [v], 0) for v in operands]
        roots = {id(root): root for origin in origins for root in origin.roots}
        depth = 1 + max(origin.depth for origin in origins)
        size = _example_size(self.data)
        large = [r for r in roots.values() if r.const is None and _example_size(r.data) >= size]
        self.is_from_stored = any(r.is_stored for r in large)
        read = sum(jnp.result_type(r.data).itemsize for r in large)
        # Storing float32 costs 8 bytes (a write and a read); reading three 16-bit arrays costs 6.
        if read <= 6 and depth <= 64 and len(roots) <= 16:
            self.origin = Origin(apply, operands, list(roots.values()), depth)

    def again(self, done: dict[int, Value] | None = None) -> Value:
        """Recompute a chain of element-wise operations from the arrays that it started with.

        Barriers around the scales of stored arrays keep XLA from merging this with the first
        computation, which would keep its float32 results in memory. Each barrier has a number.
        """
        done = {} if done is None else done
        if self.origin is None or id(self) in done:
            return done.get(id(self), self)
        for root in self.origin.roots:
            if root.is_stored and id(root) not in done:
                root.turns += 1
                data = times(widen(root.data), scale_of(root).apart(root.turns))
                done[id(root)] = wide_value(data, root.dtype)
        value = self.origin.apply([v.again(done) for v in self.origin.operands])
        if value.scale is not None and not value.is_stored:
            value.origin, value.is_from_stored = self.origin, self.is_from_stored
        done[id(self)] = value
        return value

    def with_data(self, data: Any) -> Value:
        """Return a value with other data, and the same scale, type and size."""
        return Value(data, self.scale, self.dtype, self.steps)

    def with_part(self, data: Any) -> Value:
        """Return a value with other data of unknown size, and the same scale and type."""
        is_known = self.dtype is None or spans(self.dtype)
        return Value(data, self.scale, self.dtype, self.steps if is_known else None)

    def stored(self) -> Value:
        """Return the value with one scale and data of its own type.

        The scale of wide data is 1 in a type with the range of float32, and measured in another.
        """
        if self.scale is None or is_complex(self.data) or (self.is_stored and not self.scale.ndim):
            return self
        if spans(self.dtype) or not jnp.size(self.data):
            return self.once(
                "stored", lambda: Value(narrow(self.wide(), self.dtype), ONE, self.dtype)
            )
        return self.once("stored", self.measured)

    def measured(self, fitting: Any = None) -> Value:
        """Return the value stored at the power of two nearest its RMS, read from the data.

        All finite data fits into its type, and into the type ``fitting``.
        """
        x = self.uniform()
        assert x.scale is not None, "a measured value is scaled"
        name, largest = "rms", format_of(self.dtype).max
        if fitting is not None:
            name, largest = f"rms for {fitting}", min(largest, format_of(fitting).max)
        unit = x.once(name, lambda: unit_of(x.apart().data, largest=largest))
        data = times(widen(x.apart().data), Scale(0, _inverse(unit)))
        # All finite float32 numbers fit, so that they need not saturate.
        is_half = self.dtype == np.float16 and data.dtype == np.float32
        data = narrow(data, self.dtype) if is_half else fit(data, self.dtype)
        return Value(data, x.scale * Scale(0, unit), self.dtype, 0)

    def apart(self) -> Value:
        """Return the value, recomputed if that is cheap, so XLA need not keep it in float32."""
        return self.again() if self.is_from_stored else self

    def kept(self) -> Value:
        """Return the stored value behind a barrier, so that XLA does not keep it in float32."""
        x = self.stored()
        return x.with_data(lax.optimization_barrier(x.data))

    def leaving(self) -> Value:
        """Return the value as it leaves a program or a loop iteration.

        Results of contractions are measured, or the scale of a training state could drift away.
        """
        x = self if self.scale is None or self.scale.ndim else self.stored()
        if x.scale is None or is_complex(x.data) or x.scale.ndim or not x.steps:
            return x
        return wide_value(x.wide(), x.dtype).stored() if spans(x.dtype) else x.measured()


def _example_size(data: Any) -> int:
    """Return the number of elements, with 1,024 for each size that is symbolic in an export."""
    return math.prod(n if isinstance(n, int) else 2**10 for n in jnp.shape(data))


def leaving(values: Sequence[Value]) -> list[Value]:
    """Return the results of a program as they leave it: see `Value.leaving`.

    Results of one shape are measured together, because small kernels take a GPU as long for one
    array as for many.
    """
    groups: dict[Any, list[Value]] = {}
    for v in values:
        is_narrow = v.scale is not None and not is_complex(v.data) and not spans(v.dtype)
        if is_narrow and not scale_of(v).ndim and not v.is_sized and jnp.size(v.data):
            # Arrays that `jax.vmap` maps have a class of their own; do not stack them with others.
            groups.setdefault((type(v.data), jax.typeof(v.data), v.dtype), []).append(v)
    for (_, _, dtype), group in groups.items():
        for start in range(0, len(group), _TOGETHER):
            some = group[start : start + _TOGETHER]
            units = units_of([v.apart().data for v in some], format_of(dtype).max)
            for v, unit in zip(some, units, strict=True):
                v.once("rms", lambda unit=unit: unit)
    return [v.leaving() for v in values]


def scale_of(value: Value) -> Scale:
    """Return the scale of a value; 1 for a plain array."""
    return ONE if value.scale is None else value.scale


def wide_value(data: Any, dtype: Any) -> Value:
    """Wrap a result that was computed wide; ``dtype`` is the type to store it in later."""
    return Value(data, ONE, dtype)


def plain(data: Any) -> Value:
    """Wrap an array without a scale; record the number of a concrete scalar as ``const``."""
    is_scalar = not isinstance(data, Tracer) and not np.ndim(data) and hasattr(data, "dtype")
    if not is_scalar or not jnp.issubdtype(data.dtype, jnp.floating):
        return Value(data)
    return Value(data, const=float(np.asarray(data).astype(np.float64)))


# -- types -------------------------------------------------------------------------------------


def spans(dtype: Any) -> bool:
    """Return whether a type has the range of float32, so that it holds values at scale 1."""
    return jnp.finfo(dtype).nexp >= 8


def aval_of(var: Any) -> Any:
    """Return the shape and dtype of a jaxpr's variable."""
    return var.aval


def is_float(x: Any) -> bool:
    """Return whether an array or a type is floating, real or complex."""
    return jnp.issubdtype(getattr(x, "dtype", x), jnp.inexact)


def is_complex(data: Any) -> bool:
    """Return whether an array holds complex numbers."""
    return jnp.issubdtype(jnp.result_type(data), jnp.complexfloating)


def data_dtype(*values: Value) -> Any:
    """Return the promoted type of the scaled operands; plain operands do not widen a result."""
    return np.dtype(jnp.result_type(*[v.dtype for v in values if v.dtype is not None]))


def widen(data: Any) -> Any:
    """Convert real data below 32 bits to float32; leave other data unchanged."""
    dtype = jnp.result_type(data)
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize >= 4:
        return data
    return lax.convert_element_type(data, wide_dtype(dtype))


def narrow(data: Any, dtype: Any) -> Any:
    """Round data to a type; leave complex data unchanged."""
    if jnp.result_type(data) == dtype or is_complex(data):
        return data
    return lax.convert_element_type(data, dtype)


def fit(data: Any, dtype: Any) -> Any:
    """Round wide data to a type; finite numbers beyond the range of a narrow type saturate."""
    if np.dtype(dtype).itemsize == 1:
        return cast(data, dtype)
    if spans(dtype) or is_complex(data) or jnp.result_type(data).itemsize <= 2:
        return narrow(data, dtype)
    wide = jnp.result_type(data)
    largest, finite = np.asarray(format_of(dtype).max, wide), np.asarray(jnp.finfo(wide).max, wide)
    # Add a difference instead of selecting by a mask, which XLA would write to memory. In this
    # order the difference of equal numbers is +0, so that -0 keeps its sign.
    beyond = lax.sub(lax.clamp(-finite, data, finite), data)
    return narrow(lax.sub(lax.clamp(-largest, data, largest), beyond), dtype)


def same_type(arrays: Sequence[Any]) -> list[Any]:
    """Widen the floating arrays among operands to one common type."""
    wide = [widen(a) if is_float(a) else a for a in arrays]
    types = {jnp.result_type(a) for a in wide if is_float(a)}
    if len(types) < 2 or len({jnp.issubdtype(t, jnp.complexfloating) for t in types}) > 1:
        return wide
    common = jnp.result_type(*types)
    return [narrow(a, common) if is_float(a) else a for a in wide]


# -- arithmetic on scales ------------------------------------------------------------------------


def spread(data: Any, like: Any) -> Any:
    """Broadcast data to the shape and the sharding of an array."""
    if jnp.shape(data) == jnp.shape(like):
        return data
    return jnp.broadcast_to(data, jnp.shape(like), out_sharding=jax.typeof(like).sharding)


def times(data: Any, scale: Scale) -> Any:
    """Return ``data * scale`` for wide data, in the type of the data."""
    if scale.is_one:
        return data
    factor = lax.convert_element_type(scale.factor(), jnp.result_type(data))
    return lax.mul(data, factor if not jnp.ndim(factor) else spread(factor, data))


def data_at(value: Value, scale: Scale, dtype: Any) -> Any:
    """Return the data, in the given type, that represents a value at the given scale."""
    if scale.same(value.scale):
        return narrow(value.data, dtype)
    return narrow(times(value.wide(), scale.inverse()), dtype)


def unit_of(data: Any, statistic: Statistic = "rms", largest: float = 2.0**127) -> Any:
    """Return the power of two nearest the RMS (or largest magnitude) of the finite elements.

    No finite element exceeds ``largest`` times the result. It is 1 if all finite elements are 0, or
    if there are more than 2^16 elements with an RMS below about 2^-90. It has no gradient.
    """
    size = _magnitudes(data)
    if not size.size:
        return jnp.ones((), jnp.float32)
    axes = tuple(range(size.ndim))
    if statistic == "amax" or not axes:
        return _nearest_pow2(lax.reduce_max(size, axes))
    return _unit(size.size, largest, _rms(size, axes), lambda: lax.reduce_max(size, axes))


def units_of(arrays: Sequence[Any], largest: float) -> list[Any]:
    """Return `unit_of` each of several arrays of one shape and sharding, in few operations."""
    sizes = [_magnitudes(x) for x in arrays]
    count, last = sizes[0].size, sizes[0].ndim - 1
    if _headroom(count, largest) is not None:  # of large arrays, stack the RMS of rows
        sizes = [_rms(size, (last,)) for size in sizes]
    elif not isinstance(count, int) or count > 2**16:
        return [unit_of(x, largest=largest) for x in arrays]
    stacked = jnp.stack(sizes)
    axes = tuple(range(1, stacked.ndim))
    rms, amax = _rms(stacked, axes), lax.reduce_max(stacked, axes)
    # Slice before `_unit`, because XLA fuses a slice only with operations that use it.
    return [_unit(count, largest, rms[i], lambda i=i: amax[i]) for i in range(len(arrays))]


def _headroom(count: Any, largest: float) -> int | None:
    """Return log2 of (least scale / RMS) of a large array; None for others, and if above 2.

    No entry exceeds sqrt(n) times the RMS of n elements. For large arrays this bound replaces the
    largest entry, so that they are read only once; their RMS is 0 if squares underflow.
    """
    if not isinstance(count, int) or count <= 2**16:
        return None  # the count is symbolic in an export
    shift = max(math.ceil(math.log2(count) / 2) - math.floor(math.log2(largest)) + 1, 0)
    return shift if shift <= 2 else None


def _unit(count: Any, largest: float, rms: Any, amax: Callable[[], Any]) -> Any:
    """Return the power of two nearest the RMS, or a larger one if the largest entry needs it."""
    shift = _headroom(count, largest)
    if shift is not None:
        return lax.min(lax.mul(_nearest_pow2(rms), np.float32(2.0**shift)), np.float32(2.0**126))
    unit = _nearest_pow2(lax.select(lax.gt(rms, np.float32(0)), rms, amax()))
    room = np.float32(2.0 ** (1 - math.floor(math.log2(largest))))
    return lax.max(unit, lax.mul(_nearest_pow2(amax()), room))


def _magnitudes(data: Any) -> Any:
    """Return the magnitudes of the finite elements in float32, and 0 for others."""
    data = lax.stop_gradient(jnp.asarray(data))
    size = lax.abs(data if jnp.iscomplexobj(data) else widen(data))
    most = np.asarray(jnp.finfo(size.dtype).max, size.dtype)
    # A comparison, which infinity and NaN fail, because XLA would write `is_finite` to memory.
    size = lax.select(lax.le(size, most), size, lax.full_like(size, 0))
    if size.dtype == np.float32:
        return size
    return lax.convert_element_type(lax.min(size, np.asarray(3e38, size.dtype)), np.float32)


def _rms(size: Any, axes: tuple[int, ...]) -> Any:
    """Return the RMS of float32 magnitudes; 0 below about 2^-90, where squares underflow.

    Squares are summed twice, with factors for large and for small numbers. Both sums are parts of
    one complex sum, which XLA fuses with the operation that computes the data.
    """
    count = math.prod(size.shape[axis] for axis in axes)
    terms = count if isinstance(count, int) else 2**20  # the size is symbolic in an export
    shift = math.ceil(math.log2(terms) / 2)
    # The first sum is exact for an RMS above 2^(8 + shift), the second below 2^(10 + shift).
    down, up = np.float32(2.0 ** (-66 - shift)), np.float32(2.0 ** (53 - 3 * shift))
    large = lax.mul(size, down)
    small = lax.min(lax.mul(size, up), np.float32(2.0 ** (63 - shift)))
    squares = lax.complex(lax.mul(large, large), lax.mul(small, small))
    sums = lax.reduce_sum(squares, axes)
    is_large = lax.ge(lax.real(sums), np.float32(2.0 ** (2 * shift - 116)))
    found = lax.select(is_large, lax.real(sums), lax.imag(sums))
    unit = lax.select(
        is_large, lax.full_like(found, 2.0**66), lax.full_like(found, 2.0 ** (2 * shift - 53))
    )
    # The mean over 4^shift: dividing by all terms could underflow.
    share = jnp.asarray(count, np.float32) * np.float32(4.0**-shift)
    return lax.mul(lax.sqrt(lax.div(found, share)), unit)


def _inverse(power: Any) -> Any:
    """Return one over a power of two between 2^-126 and 2^126, without a division."""
    # XLA runs a division in a kernel of its own, but fuses this with the operations that use it.
    bits = lax.sub(np.int32(254 << 23), lax.bitcast_convert_type(power, np.int32))
    return lax.bitcast_convert_type(bits, np.float32)


def _nearest_pow2(size: Any) -> Any:
    """Round to the nearest power of two (1.5 rounds up); return 1 for zero and subnormals."""
    # Multiplied by 4/3, numbers from 1.5 on reach the next exponent; the mask keeps the exponent.
    size = lax.min(lax.mul(size, np.float32(4 / 3)), np.float32(2.0**126))
    bits = lax.bitwise_and(lax.bitcast_convert_type(size, np.int32), np.int32(0x7F800000))
    power = lax.bitcast_convert_type(bits, np.float32)
    return lax.select(lax.gt(power, np.float32(0)), power, lax.full_like(power, 1))
