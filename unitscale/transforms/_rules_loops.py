"""Rules of loops: scan and while carry data, and scales that change between iterations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

from ..core import match_varying, scan_counts, wide_dtype
from ._interpreter import Interpreter, register
from ._values import (
    ONE,
    Scale,
    Value,
    aval_of,
    data_dtype,
    is_complex,
    is_float,
    narrow,
    scale_of,
    spans,
    wide_value,
)


class Carry(NamedTuple):
    """The form in which a loop carries one leaf; ``dtype`` is None for a plain leaf.

    A leaf that starts plain or wide is carried wide, because rounding could stop a running sum.
    """

    dtype: Any = None
    wide: bool = False

    @classmethod
    def of(cls, value: Value) -> Carry:
        """Return the form for an initial value."""
        return cls() if value.scale is None else cls(value.dtype, not value.is_stored)

    def joined(self, result: Value) -> Carry:
        """Return the form that can carry both this form and the result of an iteration."""
        if result.scale is None:
            return self
        if self.dtype is None:
            return Carry(result.dtype, wide=True)
        return self._replace(dtype=np.dtype(jnp.result_type(self.dtype, result.dtype)))

    def leave(self, value: Value, aval: Any) -> list[Any]:
        """Return the value's data in this form and, if the type is narrow, its scale."""
        if self.dtype is None:
            return [value.data]
        if self.wide or is_complex(value.data):
            dtype = aval.dtype if is_complex(value.data) else wide_dtype(aval.dtype)
            return [lax.convert_element_type(value.wide(), dtype)]
        if spans(self.dtype):
            return [narrow(value.wide(), self.dtype)]
        value = wide_value(value.wide(), self.dtype) if value.dtype != self.dtype else value
        value = value.leaving() if not scale_of(value).ndim else value.uniform().stored()
        scale = lax.stop_gradient(jnp.asarray(scale_of(value).factor()))
        return match_varying([value.data, scale])  # or the type could change between iterations


def _crossing(values: Sequence[Value], forms: Sequence[Carry], avals: Sequence[Any]) -> list[Any]:
    """Return the arrays of all carried leaves: their data, then the scales."""
    pairs = [f.leave(v, a) for v, f, a in zip(values, forms, avals, strict=True)]
    return [p[0] for p in pairs] + [p[1] for p in pairs if len(p) > 1]


def _enter(arrays: Sequence[Any], forms: Sequence[Carry]) -> list[Value]:
    """Rebuild carried values from the arrays of `_crossing`."""
    scales = iter(arrays[len(forms) :])
    values = []
    for data, form in zip(arrays, forms, strict=False):
        if form.dtype is None:
            values.append(Value(data))
        elif form.wide or is_complex(data) or spans(form.dtype):
            values.append(Value(data, ONE, form.dtype))
        else:
            values.append(Value(data, Scale(0, next(scales)), form.dtype, 0))
    return values


def _fixed_point(forms: list[Carry], turn: Any) -> tuple[ClosedJaxpr, list[Carry]]:
    """Trace the body until its results have the same forms as its operands."""
    while True:
        closed, results = turn(forms)
        found = [f.joined(r) for f, r in zip(forms, results, strict=True)]
        if found == forms:
            return closed, forms
        forms = found


# -- scan --------------------------------------------------------------------------------------


def _per_item(value: Value, length: int) -> tuple[Value, Any]:
    """Return a scanned value, and its vector of scales if it has one scale per item, else None."""
    if value.scale is None or not value.scale.ndim:
        return value, None
    scale = value.scale.factor()
    if scale.shape[0] != length or scale.size != length:
        return value.uniform(), None
    return value, jnp.reshape(scale, (length,))


def _item(array: Any) -> jax.ShapeDtypeStruct:
    if not array.shape[0]:  # a loop without iterations
        return jax.ShapeDtypeStruct(array.shape[1:], array.dtype)
    return jax.eval_shape(lambda x: lax.index_in_dim(x, 0, keepdims=False), array)


@register("control flow", "scan")
def scan(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """Scan the scaled body; stored outputs of a narrow type have one scale per iteration."""
    params = eqn.params
    inner, length = params["jaxpr"], params["length"]
    consts, carried = scan_counts(params)
    constants, start = values[:consts], values[consts : consts + carried]
    avals = [aval_of(v) for v in eqn.invars[consts : consts + carried]]
    pairs = [_per_item(v, length) for v in values[consts + carried :]]
    items = [v.data for v, _ in pairs], [s for _, s in pairs if s is not None]
    found: dict[str, list[Value]] = {}

    def seen(data: Any, value: Value, scales: Any, own: Any) -> Value:
        if scales is None:
            return value.with_part(data)
        return Value(data, Scale(0, own), value.dtype, value.steps)

    def turn(forms: list[Carry]) -> tuple[ClosedJaxpr, list[Value]]:
        def body(carry: list[Any], xs: list[Any], scales: list[Any]) -> Any:
            rest = iter(scales)
            given = [
                seen(x, v, s, None if s is None else next(rest))
                for x, (v, s) in zip(xs, pairs, strict=True)
            ]
            inputs = [*constants, *_enter(carry, forms), *given]
            results = Interpreter(interpreter.settings).run(inner.jaxpr, inner.consts, inputs)
            after = results[:carried]
            ys = [v.uniform().leaving() for v in results[carried:]]
            found.update(carry=after, ys=ys)
            settled = [f.joined(r) for f, r in zip(forms, after, strict=True)] == forms
            made = [lax.stop_gradient(jnp.asarray(scale_of(v).factor())) for v in ys if _varies(v)]
            return _crossing(after, forms, avals) if settled else [], [v.data for v in ys], made

        examples = _crossing(start, forms, avals), *([_item(x) for x in p] for p in items)
        return jax.make_jaxpr(body)(*examples), found["carry"]

    closed, forms = _fixed_point([Carry.of(v) for v in start], turn)
    initial = _crossing(start, forms, avals)
    run = jaxpr_as_fun(closed)

    def step(carry: Any, xs: Any) -> tuple[Any, Any]:
        results = run(*carry, *xs[0], *xs[1])
        return results[: len(initial)], results[len(initial) :]

    options = {key: params[key] for key in ("reverse", "unroll")}
    # A length that is symbolic in an export must be taken from the items.
    final, results = lax.scan(step, initial, items, None if items[0] else length, **options)
    ys = found["ys"]
    scales = iter(results[len(ys) :])
    outputs = [
        _stacked(data, y, next(scales)) if _varies(y) else y.with_data(data)
        for data, y in zip(results[: len(ys)], ys, strict=True)
    ]
    return [*_enter(final, forms), *outputs]


def _varies(value: Value) -> bool:
    return value.scale is not None and value.scale.array is not None


def _stacked(data: Any, item: Value, scales: Any) -> Value:
    scale = Scale(0, jnp.reshape(scales, scales.shape + (1,) * (data.ndim - 1)))
    return Value(data, scale, item.dtype, item.steps)


# -- while -------------------------------------------------------------------------------------


def stops_on_floats(condition: ClosedJaxpr, body: ClosedJaxpr, first: int, second: int) -> bool:
    """Return whether the exit depends on floats; ``first``, ``second`` are counts of constants."""

    def reads_floats(program: ClosedJaxpr, read: Sequence[bool]) -> bool:
        used = zip(program.in_avals, read, strict=True)
        return any(is_float(aval) for aval, is_read in used if is_read)

    _, read = dce_jaxpr(condition.jaxpr, [True])
    decides, floats = read[first:], reads_floats(condition, read)
    while True:
        _, read = dce_jaxpr(body.jaxpr, decides)
        floats = floats or reads_floats(body, read)
        more = [a or b for a, b in zip(decides, read[second:], strict=True)]
        if more == decides:
            return floats
        decides = more


def _of_examples(condition: ClosedJaxpr, body: ClosedJaxpr, first: int, second: int) -> Any:
    """Return condition and body of a vmapped loop, in which each example stops separately.

    Both take the constants of the condition and of the body, then the carry.
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


def _in_float32(value: Value) -> Value:
    """Return the same value in float32, which makes everything computed from it float32."""
    if value.dtype is None or value.dtype.itemsize >= 4:
        return value
    return wide_value(value.wide(), wide_dtype(value.dtype))


@register("control flow", "while")
def while_loop(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """Loop over the scaled body, in float32 if the exit depends on floats that might round."""
    settings, params = interpreter.settings, eqn.params
    condition, body = params["cond_jaxpr"], params["body_jaxpr"]
    first, second = params["cond_nconsts"], params["body_nconsts"]
    tests, known = values[:first], values[first : first + second]
    start = original = values[first + second :]
    avals = [aval_of(v) for v in eqn.outvars]
    if condition.out_avals[0].shape:
        condition, body = _of_examples(condition, body, first, second)
        tests = known = [*tests, *known]
        first = second = len(known)
    scaled = [v for v in values if v.scale is not None]
    wide = stops_on_floats(condition, body, first, second)
    if wide:
        tests, known, start = (list(map(_in_float32, vs)) for vs in (tests, known, start))
    found: dict[str, Any] = {}

    def turn(forms: list[Carry]) -> tuple[ClosedJaxpr, list[Value]]:
        def once(*arrays: Any) -> list[Any]:
            inputs = [*known, *_enter(arrays, forms)]
            results = Interpreter(settings).run(body.jaxpr, body.consts, inputs)
            found["carry"] = results
            settled = [f.joined(r) for f, r in zip(forms, results, strict=True)] == forms
            return _crossing(results, forms, avals) if settled else []

        return jax.make_jaxpr(once)(*_crossing(start, forms, avals)), found["carry"]

    closed, forms = _fixed_point([Carry.of(v) for v in start], turn)
    run = jaxpr_as_fun(closed)

    def test(arrays: Any) -> Any:
        inputs = [*tests, *_enter(arrays, forms)]
        (result,) = Interpreter(settings).run(condition.jaxpr, condition.consts, inputs)
        return result.data

    final = lax.while_loop(test, lambda arrays: run(*arrays), _crossing(start, forms, avals))
    results = _enter(final, forms)
    if not wide or not scaled:
        return results
    return [  # in the type of the initial value; if that is plain, in the type of the operands
        v if v.scale is None else Value(v.data, v.scale, s.dtype or data_dtype(*scaled), v.steps)
        for v, s in zip(results, original, strict=True)
    ]
