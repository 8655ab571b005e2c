"""Loops: scan and while, on data and those scales that change from one turn to the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun

from ..core import scan_counts
from ._carry import Form, crossing, enter, first_form, joined
from ._interpreter import Interpreter
from ._lazy_scale import LazyScale
from ._registry import register
from ._rules_carriers import part_of
from ._settle import leaving
from ._stop import stops_on_floats, to_be_rounded, wide_results
from ._values import Value, known_atoms, uniform


def _sliced(array: Any) -> jax.ShapeDtypeStruct:
    if not array.shape[0]:  # a loop without turns
        return jax.ShapeDtypeStruct(array.shape[1:], array.dtype)
    return jax.eval_shape(lambda x: lax.index_in_dim(x, 0, keepdims=False), array)


def _per_item(value: Value, length: int) -> tuple[Value, Any]:
    """Splits a scanned value into what a turn sees and the scales that are scanned with it."""
    if value.scale is None or not value.scale.ndim:
        return value, None
    scale = value.scale.array()
    if scale.shape[0] != length or scale.size != length:
        return uniform(value), None
    return value, jnp.reshape(scale, (length,))


def _item(data: Any, value: Value, scale: LazyScale | None) -> Value:
    """Returns one item of a scanned value; without a scale of its own its size is in doubt."""
    if scale is None:
        return part_of(value, data, const=None)
    return Value(data, scale, value.drift, value.dtype, doubt=value.doubt)


def _fixed_point(
    forms: list[Form], turn: Callable[[list[Form]], tuple[Any, list[Value]]]
) -> tuple[Any, list[Form]]:
    """Traces turns until what comes out has the forms of what went in."""
    while True:
        traced, results = turn(forms)
        found = [joined(f, r) for f, r in zip(forms, results, strict=True)]
        if found == forms:
            return traced, forms
        forms = found


@register("control flow", "scan")
def scan(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """The same scan; carried scales reach a fixed point, scanned ones have one entry per item."""
    params = eqn.params
    inner, length = params["jaxpr"], params["length"]
    consts, carried = scan_counts(params)
    constants, start = values[:consts], values[consts : consts + carried]
    pairs = [_per_item(v, length) for v in values[consts + carried :]]
    items = [v.data for v, _ in pairs], [s for _, s in pairs if s is not None]
    outside = known_atoms(values)
    found: dict[str, Any] = {}

    def turn(forms: list[Form]) -> tuple[Any, list[Value]]:
        def body(carry: list[Any], xs: list[Any], scales: list[Any]) -> tuple[Any, Any, Any]:
            rest = iter(scales)
            seen = [
                _item(x, v, None if s is None else LazyScale.of(next(rest), "one for each turn"))
                for x, (v, s) in zip(xs, pairs, strict=True)
            ]
            inputs = [*constants, *enter(carry, forms), *seen]
            results = Interpreter(interpreter.settings).run(inner.jaxpr, inner.consts, inputs)
            after, ys = results[:carried], [leaving(uniform(v)) for v in results[carried:]]
            stacked = [not known_atoms([v]) <= outside for v in ys]
            found.update(carry=after, ys=ys, stacked=stacked)
            settled = [joined(f, r) for f, r in zip(forms, after, strict=True)] == forms
            made = [_array(v) for v, s in zip(ys, stacked, strict=True) if s]
            return crossing(after, forms) if settled else [], [v.data for v in ys], made

        examples = crossing(start, forms), *([_sliced(x) for x in part] for part in items)
        return jax.make_jaxpr(body)(*examples), found["carry"]

    closed, forms = _fixed_point([first_form(v) for v in start], turn)
    initial = crossing(start, forms)
    run = jaxpr_as_fun(closed)

    def step(carry: Any, xs: Any) -> tuple[Any, Any]:
        results = run(*carry, *xs[0], *xs[1])
        return results[: len(initial)], results[len(initial) :]

    final, results = lax.scan(
        step, initial, items, length=length, reverse=params["reverse"], unroll=params["unroll"]
    )
    ys = found["ys"]
    scales = iter(results[len(ys) :])
    outputs = [
        _stacked(data, y, next(scales) if s else None)
        for data, y, s in zip(results[: len(ys)], ys, found["stacked"], strict=True)
    ]
    return [*enter(final, forms), *outputs]


def _array(value: Value) -> Any:
    assert value.scale is not None, "only scaled results have a scale of their own"
    return lax.stop_gradient(jnp.asarray(value.scale.array()))


def _stacked(data: Any, item: Value, scales: Any) -> Value:
    if scales is None:
        return item.with_data(data)
    stacked = jnp.reshape(scales, scales.shape + (1,) * (data.ndim - 1))
    scale = LazyScale.of(stacked, "one for each turn")
    return Value(data, scale, item.drift, item.dtype)


def _of_examples(condition: ClosedJaxpr, body: ClosedJaxpr, first: int, second: int) -> Any:
    """Returns test and body of a loop over examples of which each stops by itself.

    It goes on while any of them does, and those that have stopped keep what they carry. Both take
    the constants of the two, then what is carried.
    """
    tests, known = condition.in_avals[:first], body.in_avals[:second]
    avals = [*tests, *known, *condition.in_avals[first:]]

    def going(arrays: Sequence[Any]) -> Any:
        return jaxpr_as_fun(condition)(*arrays[:first], *arrays[first + second :])[0]

    def turn(*arrays: Any) -> list[Any]:
        which, before = going(arrays), arrays[first + second :]
        after = jaxpr_as_fun(body)(*arrays[first:])
        return [
            lax.select(lax.broadcast_in_dim(which, x.shape, range(which.ndim)), y, x)
            for x, y in zip(before, after, strict=True)
        ]

    return [jax.make_jaxpr(f)(*avals) for f in (lambda *arrays: [jnp.any(going(arrays))], turn)]


@register("control flow", "while")
def while_loop(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """The same loop; carried scales reach a fixed point. Wide if it stops on what it computes."""
    settings, params = interpreter.settings, eqn.params
    condition, body = params["cond_jaxpr"], params["body_jaxpr"]
    first, second = params["cond_nconsts"], params["body_nconsts"]
    tests, known = values[:first], values[first : first + second]
    start = values[first + second :]
    if condition.out_avals[0].shape:
        condition, body = _of_examples(condition, body, first, second)
        tests = known = [*tests, *known]
        first = second = len(known)
    wide = stops_on_floats(condition, body, first, second)
    before = [*tests, *known, *start]
    if wide:
        tests, known, start = (list(map(wide_results, vs)) for vs in (tests, known, start))
    found: dict[str, Any] = {}

    def turn(forms: list[Form]) -> tuple[Any, list[Value]]:
        def once(*arrays: Any) -> list[Any]:
            inputs = [*known, *enter(list(arrays), forms)]
            results = Interpreter(settings).run(body.jaxpr, body.consts, inputs)
            found["carry"] = results
            own = [joined(f, r) for f, r in zip(forms, results, strict=True)] == forms
            return crossing(results, forms) if own else []

        return jax.make_jaxpr(once)(*crossing(start, forms)), found["carry"]

    closed, forms = _fixed_point([first_form(v) for v in start], turn)
    run = jaxpr_as_fun(closed)

    def test(arrays: Any) -> Any:
        inputs = [*tests, *enter(list(arrays), forms)]
        (result,) = Interpreter(settings).run(condition.jaxpr, condition.consts, inputs)
        return result.data

    final = lax.while_loop(test, lambda arrays: run(*arrays), crossing(start, forms))
    results = enter(list(final), forms)
    if not wide:
        return results
    carried = before[len(tests) + len(known) :]
    return [to_be_rounded(v, s, before) for v, s in zip(results, carried, strict=True)]
