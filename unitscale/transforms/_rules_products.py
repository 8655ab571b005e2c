"""Products: data is multiplied, and so are the scales."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from ._align import is_neutral, split
from ._doubt import DOUBT, MOST_DOUBT, Doubt
from ._interpreter import Interpreter
from ._lazy_scale import LazyScale
from ._registry import register
from ._rules_functions import function_of
from ._settle import finish, is_uncertain, ready, rounded, shortened
from ._values import (
    MOST_LOG2,
    ONE,
    Multiple,
    Terms,
    Value,
    aval_of,
    data_dtype,
    is_complex,
    narrow,
    saturate,
    scale_of,
    shaped,
    spans,
    times,
    uniform,
    widen,
)

# A number within this power of two of 1 multiplies data of 32 bits as it is.
_WHOLE = 16


def pair_of(value: Value, dtype: Any) -> tuple[Any, LazyScale]:
    """Returns wide data and scale; a number is split into both, exactly.

    One that is not known while tracing is split only for a result of a narrow type, and one that
    is no power of two stays whole in a type that has room for it.
    """
    if value.scale is not None:
        return widen(value.data), value.scale
    number = value.const
    if number is None and not value.shape and not is_complex(value.data) and not spans(dtype):
        return value.split()
    is_double = np.dtype(dtype).itemsize == 8  # whose numbers a scale, of float32, may not hold
    if number is None:
        return widen(value.data), ONE
    mantissa, exponent = number, 0
    if number != 0 and math.isfinite(number) and not is_double:
        mantissa, exponent = split(number)
        if spans(dtype) and abs(mantissa) != 1 and abs(exponent) <= _WHOLE:
            mantissa, exponent = number, 0
    # The number, not the value's data: inside of a call that is traced.
    data = np.asarray(mantissa, widen(jnp.zeros((), jnp.result_type(value.data))).dtype)
    return data, LazyScale(exponent)


def wide_operands(x: Any, y: Any) -> tuple[Any, Any]:
    """Gives two wide operands one type."""
    wide = jnp.promote_types(jnp.result_type(x), jnp.result_type(y))
    x, y = (d if jnp.result_type(d) == wide else lax.convert_element_type(d, wide) for d in (x, y))
    return x, y


def size_of(value: Value, data: Any) -> tuple[float, Doubt]:
    """Returns drift and doubt of the wide data of an operand: nothing is known of a plain array."""
    if value.scale is not None:
        return value.drift, value.doubt
    if is_neutral(value):
        return value.drift, Doubt(0.0)
    if value.const is not None:
        mantissa, exponent = split(number_of(value, data))
        return value.drift + exponent, Doubt(abs(math.log2(abs(mantissa))))
    return value.drift, Doubt(MOST_DOUBT) if value.shape else DOUBT


def at_one(*values: Value) -> list[Any]:
    """Returns the operands of a product whose result is to stay at scale 1.

    Data in place of them, of which one may be far below unit size and the other too, might leave
    the range though the product does not.
    """
    return [v.wide() for v in values]


def number_of(value: Value, data: Any) -> float:
    """Returns what every element of the wide data of a known number is."""
    number = value.const if np.ndim(data) else np.asarray(data)
    assert number is not None, "the value is a known number"
    return float(np.real(number))  # a complex array may be one real number


def _is_multiple(x: Value, number: Value, dtype: Any) -> bool:
    """Whether a product of wide data and a known number can wait for what else multiplies it."""
    return (
        x.scale is not None
        and not x.scale.is_static
        and number.is_plain
        and number.is_fill
        and not number.shape
        and not is_complex(x.data)
        and np.dtype(dtype).itemsize >= 4
        and jnp.result_type(x.data) == dtype
    )


def _doubt_of_square(x: Value) -> Doubt:
    """Of few large elements it is larger than a product of two arrays: n^2 / n, of one in n."""
    return DOUBT + Doubt(0.0, above=math.log2(Terms.of(x.shape).count))


@register("product", "mul")
def mul(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """X y: data times data, scale times scale; a power of two among constants costs nothing."""
    x, y = shortened(*values)
    if x.is_plain and x.is_fill:
        x, y = y, x
    if x.const == 0.0 and y.is_plain and y.is_fill and math.isfinite(y.const or 0.0):
        return x.with_data(shaped(x.data, x, y))
    dtype = data_dtype(x, y)
    (data, scale), (other, other_scale) = pair_of(x, dtype), pair_of(y, dtype)
    if y.is_plain and y.is_fill and not is_neutral(y):
        mantissa = number_of(y, other)
        if abs(mantissa) == 1:
            moved = x.data if mantissa > 0 else lax.neg(x.data)
            moved = shaped(moved, x, y)
            return Value(moved, scale * other_scale, x.drift, dtype, doubt=x.doubt)
    (drift, doubt), (other_drift, other_doubt) = size_of(x, data), size_of(y, other)
    drift, doubt = drift + other_drift, doubt + other_doubt
    if _is_multiple(x, y, dtype) and abs((scale * other_scale).log2) <= MOST_LOG2:
        number = np.asarray(other, jnp.result_type(data))
        return Value(Multiple(data, number), scale * other_scale, drift, dtype, doubt=doubt)
    if is_uncertain(doubt, dtype):
        (data, other), scale, other_scale = at_one(x, y), ONE, ONE
    product = shaped(lax.mul(*wide_operands(data, other)), x, y)
    doubt += _doubt_of_square(x) if eqn.invars[0] is eqn.invars[1] else Doubt(0.0)
    return finish(product, scale * other_scale, drift, dtype, doubt=doubt)


@register("product", "square", "integer_pow")
def power(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """x**2: data and scale are squared alike. Other powers of a few elements are far larger."""
    (x,) = values
    exponent = eqn.params.get("y", 2)
    if exponent not in (1, 2):
        return function_of(interpreter, eqn, values)
    x, *_ = shortened(*[x] * exponent, x)
    data = interpreter.bind(eqn, [widen(x.data)])
    doubt = x.doubt * exponent + (_doubt_of_square(x) if exponent == 2 else Doubt(0.0))
    drift = x.drift * exponent
    return finish(data, scale_of(x) ** exponent, drift, x.dtype, doubt=doubt)


def contraction_operands(x: Value, y: Value, primitive: str) -> tuple[Any, Any]:
    """Returns the data of two operands as a matrix unit takes it: 8-bit only if both are.

    Of the contractions only dot_general takes two different 8-bit types.
    """
    types = [jnp.result_type(v.data) for v in (x, y)]
    narrowest = all(t.itemsize == 1 for t in types) and primitive == "dot_general"
    if types[0] == types[1] or narrowest:
        return x.data, y.data
    wide = jnp.result_type(
        *(v.dtype if t.itemsize == 1 else t for v, t in zip((x, y), types, strict=True))
    )
    return narrow(x.data, wide), narrow(y.data, wide)


def _product_type(dtype: Any, preferred: Any) -> Any:
    """The type that a contraction accumulates into: bfloat16 has the range of float32."""
    if dtype == jnp.bfloat16:
        return dtype
    return (
        widen(jnp.zeros((), dtype)).dtype
        if preferred is None
        else np.dtype(widen(jnp.zeros((), preferred)).dtype)
    )


def _contract(
    interpreter: Interpreter, eqn: JaxprEqn, values: list[Value], terms: Terms, **changes: Any
) -> Value:
    x, y, *rest = values
    x, y = shortened(ready(uniform(x)), ready(uniform(y)))
    dtype = data_dtype(x, y)
    left, right = contraction_operands(x, y, eqn.primitive.name)
    types = jnp.result_type(left), jnp.result_type(right)
    if not jnp.issubdtype(aval_of(eqn.outvars[0]).dtype, jnp.complexfloating):
        preferred = _product_type(dtype, eqn.params["preferred_element_type"])
        # A plain operand may be wider than what comes out; JAX asks for no narrower sum.
        wider = types[0].itemsize > preferred.itemsize
        changes["preferred_element_type"] = types[0] if wider else preferred
    scale = scale_of(x) * scale_of(y)
    (drift, doubt), (other, more) = size_of(x, x.data), size_of(y, y.data)
    drift += other + interpreter.growth(eqn.primitive.name, terms.count)
    doubt += more + terms.doubt + Doubt(0.0, above=math.log2(terms.count) / 2)

    def wide(left: Any, right: Any) -> Any:
        return interpreter.bind(eqn, [left, right, *(r.data for r in rest)], **changes)

    if not (types == (np.float16, np.float16) and dtype == np.float16 and _is_sure(drift, doubt)):
        return rounded(finish(wide(left, right), scale, drift, dtype, doubt=doubt))
    down = LazyScale(-round(drift))

    def after(left: Any, right: Any) -> Any:
        return narrow(saturate(times(wide(left, right), down), dtype), dtype)

    def inside(left: Any, right: Any) -> Any:
        # By the matrix unit, which writes two bytes then in place of four. What is summed is made
        # small before: the sum itself has no room in float16.
        if Terms.of(left.shape).count < Terms.of(right.shape).count:
            left = times(left, down)
        else:
            right = times(right, down)
        narrowed = {**changes, "preferred_element_type": dtype}
        return interpreter.bind(eqn, [left, right, *(r.data for r in rest)], **narrowed)

    # XLA's CPU backend adds in the type that it writes.
    data = lax.platform_dependent(left, right, cpu=after, default=inside)
    return Value(data, scale / down, drift + down.log2, dtype, doubt=doubt)


def _is_sure(drift: float, doubt: Doubt) -> bool:
    """Whether a product may leave the matrix unit in float16, after one operand was made small.

    2^10 times smaller it has lost nothing that its product would show: subnormal numbers begin
    2^14 below unit size. Where the estimate is wrong by its doubt nothing is infinite yet.
    """
    return 0 <= round(drift) <= 10 and doubt.off <= MOST_DOUBT - 1 and not doubt.is_great


@register("product", "dot_general")
def dot_general(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """X @ y: data is multiplied, the root of the contracted size is kept for the scale."""
    contracted = eqn.params["dimension_numbers"][0][0]
    terms = Terms.of(values[0].shape[axis] for axis in contracted)
    return _contract(interpreter, eqn, values, terms)


@register("product", "ragged_dot_general")
def ragged_dot_general(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """As dot_general, for rows in groups."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    contracted = numbers.dot_dimension_numbers[0][0]
    terms = Terms.of(values[0].shape[axis] for axis in contracted)
    return _contract(interpreter, eqn, values, terms)


@register("product", "conv_general_dilated")
def conv_general_dilated(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """As dot_general; the terms of an output are the kernel's elements per output feature."""
    spec = eqn.params["dimension_numbers"].rhs_spec
    kernel = values[1].shape
    terms = Terms.of(n for axis, n in enumerate(kernel) if axis != spec[0])
    return _contract(interpreter, eqn, values, terms)
