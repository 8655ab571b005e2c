"""Products: data is multiplied, and so are the scales."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from ..core._lazy_scale import LazyScale
from ._align import split
from ._interpreter import Interpreter
from ._registry import register
from ._rules_functions import unbounded
from ._values import (
    ONE,
    Value,
    data_dtype,
    finish,
    narrow,
    shortened,
    uniform,
    widen,
)


def pair_of(value: Value) -> tuple[Any, LazyScale]:
    """Returns wide data and scale; a known number is split into both, exactly."""
    if value.scale is not None:
        return widen(value.data), value.scale
    number = value.const
    if number is None or number == 0 or not math.isfinite(number):
        return widen(value.data), ONE
    mantissa, exponent = split(number)
    data = np.asarray(mantissa, widen(jnp.zeros((), jnp.result_type(value.data))).dtype)
    return data, LazyScale(exponent)


def wide_operands(x: Any, y: Any) -> tuple[Any, Any]:
    """Gives two wide operands one type."""
    wide = jnp.promote_types(jnp.result_type(x), jnp.result_type(y))
    x, y = (d if jnp.result_type(d) == wide else lax.convert_element_type(d, wide) for d in (x, y))
    return x, y


def shaped(data: Any, *values: Value) -> Any:
    """Broadcasts data to the shape that element-wise operands have together."""
    shape = np.broadcast_shapes(*(v.shape for v in values))
    return data if jnp.shape(data) == shape else jnp.broadcast_to(data, shape)


@register("product", "mul")
def mul(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """x y: data times data, scale times scale; a power of two among constants costs nothing."""
    x, y = shortened(*values)
    if x.is_plain and x.is_fill:
        x, y = y, x
    dtype = data_dtype(x, y)
    (data, scale), (other, other_scale) = pair_of(x), pair_of(y)
    if y.is_plain and y.is_fill and y.const:
        mantissa = float(np.asarray(other))
        if abs(mantissa) == 1:
            moved = x.data if mantissa > 0 else lax.neg(x.data)
            moved = shaped(moved, x, y)
            return Value(moved, scale * other_scale, x.drift, dtype, doubt=x.doubt)
    product = lax.mul(*wide_operands(data, other))
    doubt = x.doubt + y.doubt if not y.is_fill else x.doubt
    drift = x.drift + y.drift
    return finish(shaped(product, x, y), scale * other_scale, drift, dtype, doubt=doubt)


@register("product", "square", "integer_pow")
def power(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """x**n: data and scale are raised alike."""
    (x,) = values
    exponent = eqn.params.get("y", 2)
    if abs(exponent) > 4:
        return unbounded(interpreter, eqn, values)
    x, *_ = shortened(*[x] * abs(exponent), x)
    data = interpreter.bind(eqn, [widen(x.data)])
    drift, doubt = x.drift * exponent, x.doubt * abs(exponent)
    clamp = exponent != 2
    return finish(data, x.scale**exponent, drift, x.dtype, clamp=clamp, doubt=doubt)


def contraction_operands(x: Value, y: Value, dtype: Any) -> tuple[Any, Any]:
    """Returns the data of two operands as a matrix unit takes it: 8-bit only if both are."""
    types = [jnp.result_type(v.data) for v in (x, y)]
    if all(t.itemsize == 1 for t in types):
        return x.data, y.data
    if types[0] == types[1]:
        return x.data, y.data
    wide = jnp.result_type(*(v.dtype if t.itemsize == 1 else t for v, t in zip((x, y), types)))
    return narrow(x.data, wide), narrow(y.data, wide)


def _product_type(dtype: Any, preferred: Any) -> Any:
    """The type that a contraction accumulates into: bfloat16 has the range of float32."""
    if dtype == jnp.bfloat16:
        return dtype
    return widen(jnp.zeros((), dtype)).dtype if preferred is None else np.dtype(
        widen(jnp.zeros((), preferred)).dtype
    )


def _contract(
    interpreter: Interpreter, eqn: JaxprEqn, values: list[Value], terms: int, **changes: Any
) -> Value:
    x, y, *rest = values
    x, y = shortened(uniform(x), uniform(y))
    dtype = data_dtype(x, y)
    left, right = contraction_operands(x, y, dtype)
    if not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.complexfloating):
        preferred = _product_type(dtype, eqn.params["preferred_element_type"])
        changes["preferred_element_type"] = preferred
    data = interpreter.bind(eqn, [left, right, *(r.data for r in rest)], **changes)
    scale = pair_scale(x) * pair_scale(y)
    drift = x.drift + y.drift + interpreter.growth(eqn.primitive.name, terms)
    return finish(data, scale, drift, dtype, doubt=x.doubt + y.doubt)


def pair_scale(value: Value) -> LazyScale:
    """Returns the scale of a value, 1 for a plain one."""
    return ONE if value.scale is None else value.scale


@register("product", "dot_general")
def dot_general(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """x @ y: data is multiplied, the root of the contracted size is kept for the scale."""
    contracted = eqn.params["dimension_numbers"][0][0]
    terms = math.prod(values[0].shape[axis] for axis in contracted)
    return _contract(interpreter, eqn, values, terms)


@register("product", "ragged_dot_general")
def ragged_dot_general(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """As dot_general, for rows in groups."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    contracted = numbers.dot_dimension_numbers[0][0]
    terms = math.prod(values[0].shape[axis] for axis in contracted)
    return _contract(interpreter, eqn, values, terms)


@register("product", "conv_general_dilated")
def conv_general_dilated(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """As dot_general; the terms of an output are the kernel's elements per output feature."""
    spec = eqn.params["dimension_numbers"].rhs_spec
    kernel = values[1].shape
    terms = math.prod(kernel) // max(kernel[spec[0]], 1)
    return _contract(interpreter, eqn, values, terms)
