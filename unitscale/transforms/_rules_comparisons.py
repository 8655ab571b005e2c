"""Comparisons, choices and extremes of values at different scales."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from ._align import align, is_neutral
from ._doubt import UNKNOWN, Doubt
from ._interpreter import Interpreter
from ._registry import register
from ._rules_products import wide_operands
from ._settle import finish, is_wide, rounded
from ._values import Value, is_float, numeric, shaped, spread, uniform, widen


def _comparable(values: list[Value]) -> list[Any]:
    x, y = values
    if x.scale == y.scale:
        same = jnp.result_type(x.data) == jnp.result_type(y.data)
        return [x.data, y.data] if same else [widen(x.data), widen(y.data)]
    for i, v in enumerate(values):
        if is_neutral(v):
            data = [widen(v.data), widen(v.data)]
            data[1 - i] = widen(values[1 - i].data)
            return data
    return [widen(numeric(v)) for v in values]


@register("comparison", "eq", "ne", "lt", "le", "gt", "ge", "eq_to", "lt_to", "le_to")
def compare(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """Compares data where the scales are the same or one side is 0 or infinite, else values."""
    return Value(interpreter.bind(eqn, wide_operands(*_comparable(values))))


@register("comparison", "is_finite", "argmax", "argmin")
def of_data(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """Answered by data: a scale is positive and finite."""
    return Value(interpreter.bind(eqn, [uniform(values[0]).data]))


def _doubt_of_choice(cases: list[Value], doubt: Doubt) -> Doubt:
    """What is chosen of arrays may all be small; a number may be a mask, of no size."""
    is_numbered = any(c.is_fill and c.const != 0.0 for c in cases)
    return doubt if is_numbered else UNKNOWN


@register("comparison", "max", "min")
def extreme(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """The larger or smaller at the scale at which they meet; 0 and infinities cost nothing."""
    x, y = values
    if x.const == 0.0 and y.const == 0.0:
        return x.with_data(shaped(x.data, x, y))
    arrays, scale, drift, dtype, doubt = align(interpreter, values, masks=True)
    doubt = _doubt_of_choice(values, doubt)
    operation = lax.max if eqn.primitive.name == "max" else lax.min
    # Not rounded: the gradient asks which operand the result is equal to.
    return finish(shaped(operation(*arrays), x, y), scale, drift, dtype, doubt=doubt)


@register("comparison", "clamp")
def clamp(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """Clamps at the scale at which the operands meet."""
    arrays, scale, drift, dtype, doubt = align(interpreter, values, masks=True)
    return finish(lax.clamp(*arrays), scale, drift, dtype, doubt=_doubt_of_choice(values, doubt))


@register("comparison", "select_n")
def select_n(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """Chooses at the scale at which the cases meet; constant fills take that of the others."""
    which, *cases = values
    if which.scale is not None:
        return interpreter.default(eqn, values)
    if not any(is_float(c.data) for c in cases):
        return Value(interpreter.bind(eqn, [v.data for v in values]))
    scaled = [c for c in cases if c.scale is not None and not is_neutral(c)]
    if not scaled:
        zeros = [c for c in cases if c.scale is not None]
        if all(c.const == 0.0 for c in cases):
            return zeros[0].with_data(zeros[0].data)
    arrays, scale, drift, dtype, doubt = align(interpreter, cases, masks=True)
    like = max((c.data for c in cases), key=jnp.ndim)
    arrays = [spread(a, like) for a in arrays]
    chosen, doubt = lax.select_n(which.data, *arrays), _doubt_of_choice(cases, doubt)
    found = finish(chosen, scale, drift, dtype, doubt=doubt)
    return found if any(map(is_wide, cases)) else rounded(found)


def is_infinite(value: Value) -> bool:
    """Whether a value is known to be infinite everywhere."""
    return value.const is not None and math.isinf(value.const)
