"""Carriers: primitives that move or pick elements, or change their sign, and keep the scale.

Their data is not touched. A scale with one entry per item is reduced to one per tensor first where
elements change places.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from ._align import align_uniform
from ._doubt import UNKNOWN, Doubt
from ._interpreter import Interpreter
from ._registry import register
from ._settle import finish, is_wide, measured, rounded
from ._values import Value, is_float, spans, uniform, widen

_SAME_PLACE = ("neg", "abs", "copy", "stop_gradient", "name", "conj")


_PLACED = ("sharding_constraint", "layout_constraint", "unitscale_row_major", "xla_metadata_value")


@register("carrier", *_SAME_PLACE, *_PLACED)
def same_place(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """Applied to data; every element keeps its scale."""
    (x,) = values
    const = x.const if eqn.primitive.name in ("copy", "stop_gradient", "name") else None
    const = 0.0 if x.const == 0.0 else const
    return x.with_data(interpreter.bind(eqn, [x.data]), const=const)


@register("carrier", "real", "imag")
def part(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """Applied to data; either part may be far smaller than the whole, so its size is in doubt."""
    (x,) = values
    const = 0.0 if x.const == 0.0 else None
    result = x.with_data(interpreter.bind(eqn, [x.data]), const=const, doubt=UNKNOWN)
    return result if x.dtype is None or spans(x.dtype) else measured(result)


_MOVES = (
    "broadcast_in_dim",
    "reshape",
    "transpose",
    "squeeze",
    "rev",
    "tile",
    "reshard",
    "relayout",
    "with_memory_space_constraint",
)


@register("carrier", *_MOVES)
def move(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """Applied to data; the result has the operand's scale."""
    x = uniform(values[0])
    return x.with_data(interpreter.bind(eqn, [x.data]))


def part_of(x: Value, data: Any, **changes: Any) -> Value:
    """Returns some elements of an array: at its scale, and of a size that is not known.

    They may be far smaller than what is beside them, or larger: columns of other units, a row that
    was trained of a table that was not.
    """
    known = x.is_plain or x.is_fill
    return x.with_data(data, doubt=x.doubt if known else UNKNOWN, **changes)


_PARTS = (
    "slice",
    "dynamic_slice",
    "cummax",
    "cummin",
    "reduce_window_max",
    "reduce_window_min",
)


@register("carrier", *_PARTS)
def sliced(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """Applied to data; the result has the operand's scale, its size is in doubt."""
    x, *rest = values
    x = uniform(x)
    # A dynamic slice may come with float indices only by mistake; they are integers, so plain.
    return part_of(x, interpreter.bind(eqn, [x.data, *(r.data for r in rest)]))


@register("carrier", "reduce_max", "reduce_min")
def reduce_extreme(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """Applied to data; in doubt as a slice is, and wide, as what is compared with it is."""
    x = uniform(values[0])
    return part_of(x, widen(interpreter.bind(eqn, [x.data])))


@register("carrier", "split", "unstack")
def split_up(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """Applied to data; every part has the operand's scale, its size is in doubt."""
    x = uniform(values[0])
    return [part_of(x, part) for part in interpreter.bind(eqn, [x.data])]


@register("carrier", "sort", "optimization_barrier", "device_put", "tie", "dce_sink")
def each(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """Applied to the data of all operands together; each result has the scale of its operand."""
    values = [uniform(v) for v in values]
    results = interpreter.bind(eqn, [v.data for v in values])
    return [v.with_data(r) for v, r in zip(values, results, strict=True)]


@register("carrier", "top_k", "approx_top_k")
def pick(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """As a slice; indices of what is picked have no scale."""
    x = uniform(values[0])
    results = interpreter.bind(eqn, [x.data, *(v.data for v in values[1:])])
    return [part_of(x, r, const=None) if is_float(r) else Value(r) for r in results]


@register("carrier", "gather")
def gather(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """As a slice; a fill value other than 0 and NaN is divided by the scale."""
    x, indices = uniform(values[0]), values[1]
    number = eqn.params.get("fill_value")
    if number is None or number == 0 or not np.isfinite(number):
        return part_of(x, interpreter.bind(eqn, [x.data, indices.data]), const=None)
    return interpreter.default(eqn, values)


_CHOICES = ("concatenate", "stack", "pad", "dynamic_update_slice")


def _put_together(
    interpreter: Interpreter, values: list[Value], apply: Callable[..., Any], more: Doubt
) -> Value:
    floats = [i for i, v in enumerate(values) if v.scale is not None or is_float(v.data)]
    parts = [values[i] for i in floats]
    arrays, scale, drift, dtype, doubt = align_uniform(interpreter, parts)
    operands: list[Any] = [v.data for v in values]
    for index, array in zip(floats, arrays, strict=True):
        operands[index] = array
    found = finish(apply(*operands), scale, drift, dtype, doubt=doubt + more)
    # A wide element stays as it is: a gradient asks which one an extreme is equal to.
    return found if any(map(is_wide, parts)) else rounded(found)


@register("carrier", *_CHOICES)
def put_together(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """Float operands are brought to one scale, constants giving way; then applied to data."""

    def apply(*arrays: Any) -> Any:
        return interpreter.bind(eqn, arrays)

    return _put_together(interpreter, values, apply, Doubt(0.0))


def scattered(eqn: JaxprEqn, *arrays: Any) -> Any:
    """Applies a scatter to arrays of any one type.

    The function in its parameters, which combines two elements, has the types of the program.
    """
    params = {k: v for k, v in eqn.params.items() if not k.startswith("update_")}
    return getattr(lax, eqn.primitive.name.replace("-", "_"))(*arrays, **params)


@register("carrier", "scatter", "scatter_max", "scatter_min")
def scatter(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Value:
    """Operand and updates are brought to one scale; the default where a function is applied."""
    if eqn.primitive is lax.scatter_p and eqn.params["update_jaxpr"] is not None:
        return interpreter.default(eqn, values)
    # What is left of the operand, or chosen, may all be small.
    return _put_together(interpreter, values, functools.partial(scattered, eqn), UNKNOWN)
