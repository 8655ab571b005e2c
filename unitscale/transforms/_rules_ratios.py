"""Ratios, roots and other homogeneous functions: the scale follows from the degree."""

from __future__ import annotations

import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from ..core._lazy_scale import LazyScale, pow2_root
from ._align import align
from ._interpreter import Interpreter
from ._registry import register
from ._rules_products import doubt_of, pair_of, wide_operands
from ._settle import MOST_DOUBT, finish, keeps_wide, shortened
from ._values import ONE, Value, data_dtype, scale_of, shaped, times, widen


@register("ratio", "div")
def div(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """X / y: data over data, scale over scale; a power of two among constants costs nothing."""
    x, y = shortened(*values)
    dtype = data_dtype(x, y)
    (data, scale), (other, other_scale) = pair_of(x), pair_of(y)
    if y.is_plain and y.is_fill and y.const and abs(float(np.asarray(other))) == 1:
        moved = x.data if float(np.asarray(other)) > 0 else lax.neg(x.data)
        moved = shaped(moved, x, y)
        return Value(moved, scale / other_scale, x.drift, dtype, doubt=x.doubt)
    quotient = lax.div(*wide_operands(data, other))
    drift = x.drift - y.drift
    doubt = doubt_of(x, data) + doubt_of(y, other)
    data = shaped(quotient, x, y)
    wide = keeps_wide(data.shape, *values)
    return finish(data, scale / other_scale, drift, dtype, doubt=doubt, wide=wide)


@register("ratio", "rem")
def rem(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """The remainder at the scale at which the operands meet: homogeneous of degree 1."""
    arrays, scale, _, dtype = align(interpreter, values)
    data = shaped(lax.rem(*arrays), *values)
    return finish(data, scale, 0.0, dtype, doubt=2 * MOST_DOUBT, wide=True)


@register("ratio", "atan2")
def atan2(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """The angle of the operands' data at one scale: homogeneous of degree 0; it may be small."""
    arrays, _, _, dtype = align(interpreter, values)
    data = shaped(lax.atan2(*arrays), *values)
    return finish(data, ONE, 0.0, dtype, doubt=2 * MOST_DOUBT, wide=True)


@register("ratio", "sign")
def sign(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """The sign of data: homogeneous of degree 0."""
    (x,) = values
    return Value(lax.sign(x.data), ONE, 0.0, x.dtype)


def _root_of(scale: LazyScale) -> tuple[LazyScale, LazyScale]:
    """Returns a scale near the square root, and the scale over the square of that root.

    A formula of even powers has its root while tracing. An odd power of two leaves a 2, and an
    unknown array leaves the square of what a power of two does not reach, which is below 4.
    """
    odd = scale.log2 % 2
    root = scale.shift(-odd).root()
    if root is not None:
        return root, LazyScale(odd)
    root = LazyScale.of(pow2_root(scale.array()))
    return root, scale / root / root


@register("ratio", "sqrt", "rsqrt")
def root(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """The root of data; the scale is the power of two below its own root, or one over that."""
    (x,) = values
    scale, rest = _root_of(scale_of(x))
    data = interpreter.bind(eqn, [times(widen(x.data), rest)])
    inverse = eqn.primitive.name == "rsqrt"
    drift = -x.drift / 2 if inverse else x.drift / 2
    scale = ONE / scale if inverse else scale
    return finish(data, scale, drift, x.dtype, doubt=x.doubt / 2, wide=True)
