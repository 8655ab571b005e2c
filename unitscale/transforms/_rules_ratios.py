"""Ratios, roots and other homogeneous functions: the scale follows from the degree."""

from __future__ import annotations

import math

from jax import lax
from jax.extend.core import JaxprEqn

from ._align import align
from ._doubt import UNKNOWN, Doubt
from ._interpreter import Interpreter
from ._registry import register
from ._rules_products import at_one, number_of, pair_of, size_of, wide_operands
from ._settle import finish, is_uncertain, shortened
from ._values import ONE, Terms, Value, aval_of, data_dtype, scale_of, shaped, widen

_POSITIVE = ("exp", "exp2", "square", "abs", "logistic")


def _summed(interpreter: Interpreter, eqn: JaxprEqn, x: Value) -> Terms | None:
    """Of x / x.sum(), where no x is negative: how many terms the sum has."""
    share, total = eqn.invars
    maker = interpreter.maker(share)
    if maker is None or maker.primitive.name not in _POSITIVE:
        return None
    maker = interpreter.maker(total)
    places = range(len(aval_of(total).shape))  # the axis of x that each one of the sum lies along
    while maker is not None and maker.primitive is lax.broadcast_in_dim_p:
        places = [places[axis] for axis in maker.params["broadcast_dimensions"]]
        maker = interpreter.maker(maker.invars[0])
    if maker is None or maker.primitive is not lax.reduce_sum_p or maker.invars[0] is not share:
        return None
    summed = maker.params["axes"]
    if list(places) != [axis for axis in range(len(x.shape)) if axis not in summed]:
        return None
    return Terms.of(x.shape[axis] for axis in summed)


@register("ratio", "div")
def div(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """X / y: data over data, scale over scale; of known size is a share, as in a softmax."""
    x, y = shortened(*values)
    dtype = data_dtype(x, y)
    (data, scale), (other, other_scale) = pair_of(x, dtype), pair_of(y, dtype)
    if y.is_plain and y.is_fill and y.const and abs(number := number_of(y, other)) == 1:
        moved = x.data if number > 0 else lax.neg(x.data)
        moved = shaped(moved, x, y)
        return Value(moved, scale / other_scale, x.drift, dtype, doubt=x.doubt)
    (above, doubt), (below, more) = size_of(x, data), size_of(y, other)
    if is_uncertain(doubt + more, dtype):
        (data, other), scale, other_scale = at_one(x, y), ONE, ONE
    quotient = shaped(lax.div(*wide_operands(data, other)), x, y)
    # Of elements that are smaller than others the reciprocals are larger.
    one = y.is_fill or not y.shape
    scale, drift = scale / other_scale, above - below
    doubt = doubt + more if one else UNKNOWN
    if scale.is_static and (terms := _summed(interpreter, eqn, x)) is not None:
        # The RMS of n numbers with sum 1 is between 1 / n, of equal ones, and the root of that.
        size = math.log2(terms.count)
        drift, doubt = -0.75 * size - scale.log2, Doubt(0.25 * size) + terms.doubt
    return finish(quotient, scale, drift, dtype, doubt=doubt)


@register("ratio", "rem")
def rem(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """The remainder at the scale at which the operands meet: homogeneous of degree 1."""
    arrays, scale, _, dtype, _ = align(interpreter, values)
    data = shaped(lax.rem(*arrays), *values)
    return finish(data, scale, 0.0, dtype, doubt=UNKNOWN)


@register("ratio", "atan2")
def atan2(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """The angle of the operands' data at one scale: homogeneous of degree 0; it may be small."""
    arrays, _, _, dtype, _ = align(interpreter, values)
    data = shaped(lax.atan2(*arrays), *values)
    return finish(data, ONE, 0.0, dtype, doubt=UNKNOWN)


@register("ratio", "sign")
def sign(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """The sign of data: homogeneous of degree 0."""
    (x,) = values
    return Value(lax.sign(x.data), ONE, 0.0, x.dtype)


@register("ratio", "sqrt", "rsqrt")
def root(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """The root of data, and of the scale where that is known while tracing; else of the value."""
    (x,) = values
    scale = scale_of(x).root()
    if scale is None:
        if (apart := interpreter.decoupled(eqn, values)) is not None:
            return apart
        data = interpreter.bind(eqn, [x.wide()])
        return finish(data, ONE, 0.0, x.dtype, doubt=UNKNOWN)
    data = interpreter.bind(eqn, [widen(x.data)])
    power = -1 if eqn.primitive.name == "rsqrt" else 1
    return finish(data, scale**power, power * x.drift / 2, x.dtype, doubt=x.doubt * 0.5)
