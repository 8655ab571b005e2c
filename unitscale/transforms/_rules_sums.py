"""Sums: operands meet at the larger scale; sums over n terms grow by the root of n."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from jax import lax
from jax.extend.core import JaxprEqn

from ._align import align
from ._doubt import UNKNOWN, Doubt
from ._interpreter import Interpreter
from ._registry import register
from ._rules_carriers import scattered
from ._rules_products import wide_operands
from ._settle import finish, rounded
from ._values import Terms, Value, data_dtype, scale_of, shaped, uniform, widen

# A sum is larger than its operands by one power of two at most; never is it certain.
_ADDED = Doubt(0.6)


@register("sum", "add", "sub", "add_any")
def add(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """X + y at the larger scale; a known zero costs nothing."""
    x, y = values
    if y.const == 0.0 and not x.is_plain:
        return x.with_data(shaped(x.data, x, y))
    if x.const == 0.0 and not y.is_plain:
        data = lax.neg(y.data) if eqn.primitive.name == "sub" else y.data
        const = y.const if y.const is None or eqn.primitive.name != "sub" else -y.const
        return y.with_data(shaped(data, x, y), const=const)
    arrays, scale, drift, dtype, doubt = align(interpreter, [x, y])
    is_difference = eqn.primitive.name == "sub"  # which may be far smaller than its operands
    data = shaped((lax.sub if is_difference else lax.add)(*arrays), x, y)
    return finish(data, scale, drift, dtype, doubt=UNKNOWN if is_difference else doubt + _ADDED)


def doubt_of_sum(x: Value, terms: Terms) -> Doubt:
    """The doubt of a sum of so many elements of a value."""
    # Terms of one sign grow by their number, not by its root.
    return x.doubt + Doubt(math.log2(terms.count) / 4) + terms.doubt


def _summed(
    interpreter: Interpreter, eqn: JaxprEqn, values: list[Value], dims: Iterable[Any]
) -> Value:
    x = uniform(values[0])
    data, terms = interpreter.bind(eqn, [widen(x.data)]), Terms.of(dims)
    drift = x.drift + interpreter.growth(eqn.primitive.name, terms.count)
    return finish(data, scale_of(x), drift, x.dtype, doubt=doubt_of_sum(x, terms))


@register("sum", "reduce_sum")
def reduce_sum(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """Applied to data; the scale grows by the root of the number of terms."""
    dims = [values[0].shape[axis] for axis in eqn.params["axes"]]
    return _summed(interpreter, eqn, values, dims)


@register("sum", "cumsum")
def cumsum(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """Applied to data; the scale grows by the root of the length; asked for are differences."""
    return _summed(interpreter, eqn, values, [values[0].shape[eqn.params["axis"]]])


@register("sum", "reduce_window_sum")
def reduce_window_sum(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """Applied to data; the scale grows by the root of the window."""
    return _summed(interpreter, eqn, values, eqn.params["window_dimensions"])


@register("sum", "scatter_add", "scatter_sub")
def scatter_add(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """Operand and updates meet at the larger scale; the indices are plain."""
    operand, indices, updates = values
    pair = [uniform(operand), uniform(updates)]
    (x, y), scale, drift, dtype, doubt = align(interpreter, pair)
    data = scattered(eqn, x, indices.data, y)
    # All may be of one sign, and of one place.
    window = eqn.params["dimension_numbers"].update_window_dims
    terms = Terms.of(size for axis, size in enumerate(updates.shape) if axis not in window)
    doubt += Doubt(0.0, above=math.log2(terms.count)) + terms.doubt
    return finish(data, scale, drift, dtype, doubt=doubt + _ADDED)


@register("sum", "select_and_scatter_add", "select_and_gather_add")
def chosen_sum(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """The gradient of a pooled maximum: the first operand's scale, chosen by the second's data."""
    source, operand = (uniform(v) for v in values)
    chosen = interpreter.bind(eqn, wide_operands(widen(source.data), widen(operand.data)))
    if source.is_plain:
        return Value(chosen)
    dtype = data_dtype(source)
    return rounded(finish(chosen, scale_of(source), source.drift, dtype, doubt=source.doubt))
