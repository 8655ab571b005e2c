"""Casts: to another float type the data is cast, to anything else the value is."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from ..core import cast
from ._align import align
from ._interpreter import Interpreter
from ._registry import register
from ._rules_carriers import same_place
from ._rules_functions import function_of
from ._rules_sums import doubt_of_sum
from ._settle import finish, rounded, sized
from ._values import (
    ONE,
    Terms,
    Value,
    aval_of,
    is_float,
    narrow,
    numeric,
    scale_of,
    spans,
    uniform,
    widen,
)


def narrowed(value: Value, dtype: object) -> Value:
    """Casts the data of a scaled value to an 8-bit type, saturating, at unit size.

    The value remembers the type it came from: that is the type of results computed from it.
    """
    value = sized(value)
    return value.with_data(cast(value.data, dtype))


@register("cast", "convert_element_type")
def convert(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """Float to float casts data (saturating below 16 bits) and keeps the scale; else the value."""
    (x,) = values
    dtype = eqn.params["new_dtype"]
    if jnp.issubdtype(dtype, jnp.bool_):
        return Value(lax.ne(x.data, jnp.zeros_like(x.data)))
    if not is_float(dtype):
        return Value(interpreter.bind(eqn, [numeric(x, aval_of(eqn.invars[0]).dtype)]))
    if aval_of(eqn.invars[0]).dtype == dtype:
        return x
    if dtype.itemsize == 1:
        return narrowed(x, dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        data = lax.convert_element_type(x.data, dtype)
        return Value(data, x.scale, x.drift, x.dtype, doubt=x.doubt)
    if jnp.issubdtype(jnp.result_type(x.data), jnp.complexfloating):
        return finish(lax.real(x.data), scale_of(x), x.drift, dtype, doubt=x.doubt)
    x = x if spans(dtype) else sized(x)
    wide = jnp.promote_types(dtype, widen(x.data).dtype)
    return rounded(finish(narrow(x.data, wide), scale_of(x), x.drift, dtype, doubt=x.doubt))


@register("cast", "reduce_precision")
def reduce_precision(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """Rounds the value; to its own precision, which only keeps it from being fused, data."""
    own = jnp.finfo(aval_of(eqn.invars[0]).dtype)
    if (own.nexp, own.nmant) == (eqn.params["exponent_bits"], eqn.params["mantissa_bits"]):
        return same_place(interpreter, eqn, values)
    return function_of(interpreter, eqn, values)


@register("cast", "bitcast_convert_type")
def bitcast(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """The bits of the value; a float of other bits starts at scale 1."""
    (x,) = values
    data = interpreter.bind(eqn, [numeric(uniform(x), aval_of(eqn.invars[0]).dtype)])
    return Value(data, ONE, 0.0, x.dtype) if is_float(data) else Value(data)


@register("cast", "complex")
def make_complex(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """Real and imaginary part at the scale at which they meet."""
    arrays, scale, drift, dtype, doubt = align(interpreter, values)
    return Value(interpreter.bind(eqn, arrays), scale, drift, dtype, doubt=doubt)


@register("cast", "fft")
def fft(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """Linear, so applied to data; it grows by the root of its length, the inverse shrinks."""
    x = uniform(values[0])
    terms = Terms.of(eqn.params["fft_lengths"])
    growth = interpreter.growth("fft", terms.count)
    inverse = "I" in str(eqn.params["fft_type"]).rsplit(".", 1)[-1]
    data = interpreter.bind(eqn, [widen(x.data)])
    drift = x.drift + (-growth if inverse else growth)
    return finish(data, scale_of(x), drift, x.dtype, doubt=doubt_of_sum(x, terms))
