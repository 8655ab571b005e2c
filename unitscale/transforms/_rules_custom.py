"""Functions with a derivative of the user's own: kept, so that it is used outside of scalify too.

The user's rule is written in values, while JAX differentiates data with scales held constant. With
y = f(x) and values ``data * scale``, the tangent of data is that of the value over the scale, and
the cotangent of data is that of the value times the scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun
from jax.interpreters import ad

from ._align import at_scale
from ._interpreter import Interpreter, Settings
from ._lazy_scale import LazyScale
from ._packing import Packed, Spec, Traced, pack, trace, unpack
from ._registry import register
from ._values import ONE, Value, aval_of, is_float, narrow, numeric, scale_of, widen


@jax.tree_util.register_static
class _Static:
    """Specs as a part of a tree's structure."""

    def __init__(self, specs: tuple[Spec, ...]):
        self.specs = specs

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and self.specs == other.specs

    def __hash__(self) -> int:
        return hash(self.specs)


def _interpret(
    settings: Settings, function: Any, values: Sequence[Value], avals: Sequence[Any]
) -> list[Value]:
    """Traces a function of arrays on the types of the program, and evaluates it on values."""
    shapes = [jax.ShapeDtypeStruct(jnp.shape(a), a.dtype) for a in avals]
    closed: ClosedJaxpr = jax.make_jaxpr(function)(*shapes)
    return Interpreter(settings).run(closed.jaxpr, closed.consts, values)


def _in_data(value: Value, scale: LazyScale | None, like: Any) -> Any:
    """Returns the data of a derivative at a scale, in the type of its primal's data."""
    dtype = jnp.result_type(like)
    if scale is None:
        return narrow(widen(numeric(value)), dtype)
    return narrow(at_scale(Value(value.data, value.scale or ONE), scale, dtype), dtype)


def _zero(x: Any) -> Any:
    if is_float(x):
        return jnp.zeros_like(x)
    return _float0(jnp.shape(x))


@register("call", "custom_jvp_call")
def custom_jvp(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """A custom_jvp of the scaled program with the user's rule on scaled tangents."""
    settings = interpreter.settings
    packed = pack(values)
    traced = trace(settings, eqn.params["call_jaxpr"], packed)
    primal = jaxpr_as_fun(traced.closed)
    function = jax.custom_jvp(lambda *arrays: primal(*arrays))
    _, rule = eqn.primitive.get_bind_params(eqn.params)["subfuns"]
    avals = [v.aval for v in eqn.invars]
    floats = [i for i, aval in enumerate(avals) if is_float(aval)]

    @function.defjvp
    def _(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        inner, atoms = unpack(packed.specs, primals)
        directions = [Value(tangents[i], inner[i].scale, 0.0, inner[i].dtype) for i in floats]
        count = len(inner)

        def derivative(*arrays: Any) -> list[Any]:
            given = dict(zip(floats, arrays[count:], strict=True))
            full = [given[i] if i in given else _zero(a) for i, a in enumerate(arrays[:count])]
            return rule.call_wrapped(*arrays[:count], *full)

        types = [*avals, *(avals[i] for i in floats)]
        changes = _interpret(settings, derivative, [*inner, *directions], types)
        results = primal(*primals)
        outputs = traced.rebuild(results, atoms)
        changes = changes[len(outputs) :]
        slopes = [
            _in_data(c, y.scale, y.data) if is_float(y.data) else _zero(y.data)
            for c, y in zip(changes, outputs, strict=True)
        ]
        return results, [*slopes, *(_zero(r) for r in results[len(outputs) :])]

    return traced.rebuild(function(*packed.arrays), packed.atoms)


def _empty_like(data: Any) -> Any:
    return jnp.zeros((0,), jnp.result_type(data) if is_float(data) else np.float32)


def _residuals(eqn: JaxprEqn, found: list[Value], inputs: list[Value]) -> list[Value]:
    """Returns the residuals; those that are inputs are not among what was found."""
    _, _, forwarded = eqn.params["out_trees"]()
    rest = iter(found)
    return [next(rest) if f is None else inputs[f] for f in forwarded]


@register("call", "custom_vjp_call")
def custom_vjp(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """A custom_vjp of the scaled program with the user's rules on scaled cotangents."""
    settings = interpreter.settings
    packed = pack(values)
    traced = trace(settings, eqn.params["call_jaxpr"], packed)
    primal = jaxpr_as_fun(traced.closed)
    _, forward, backward = eqn.primitive.get_bind_params(eqn.params)["subfuns"]
    scales = len(packed.atoms)
    function = jax.custom_vjp(lambda *arrays: primal(*arrays))
    function.defvjp(
        lambda *arrays: _forward(settings, eqn, forward, primal, packed, traced, arrays),
        lambda saved, cotangents: _backward(settings, eqn, backward, scales, saved, cotangents),
    )
    return traced.rebuild(function(*packed.arrays), packed.atoms)


def _forward(
    settings: Settings,
    eqn: JaxprEqn,
    forward: Any,
    primal: Any,
    packed: Packed,
    traced: Traced,
    arrays: Sequence[Any],
) -> tuple[list[Any], Any]:
    inputs, atoms = unpack(packed.specs, arrays)

    def function(*xs: Any) -> list[Any]:
        return forward.call_wrapped(*(item for x in xs for item in (x, True)))

    found = _interpret(settings, function, inputs, [v.aval for v in eqn.invars])
    results = primal(*arrays)
    outputs = traced.rebuild(results, atoms)
    residuals = _residuals(eqn, found[: len(found) - len(outputs)], inputs)
    # Inputs and outputs are saved for their scales; their data is dead and not kept.
    empty = [Value(_empty_like(v.data), v.scale) for v in (*inputs, *outputs)]
    saved = pack([*residuals, *empty])
    return results, (saved.arrays, _Static(saved.specs))


def _backward(
    settings: Settings,
    eqn: JaxprEqn,
    backward: Any,
    scales: int,
    saved: Any,
    cotangents: Sequence[Any],
) -> tuple[Any, ...]:
    arrays, static = saved
    values, _ = unpack(static.specs, arrays)
    inputs, outputs = len(eqn.invars), len(eqn.outvars)
    first = len(values) - inputs - outputs
    residuals, xs, ys = values[:first], values[first : first + inputs], values[first + inputs :]
    floats = [i for i, var in enumerate(eqn.outvars) if is_float(var.aval)]
    given = [_cotangent(cotangents[i], ys[i]) for i in floats]
    kept: list[int] = []

    def function(*items: Any) -> list[Any]:
        known = dict(zip(floats, items[first:], strict=True))
        full = [known.get(i, _float0(aval_of(v).shape)) for i, v in enumerate(eqn.outvars)]
        # One per input; newer releases of JAX give them in a list of their own.
        results = jax.tree.leaves(
            backward.call_wrapped(*items[:first], *full), is_leaf=_is_no_change
        )
        kept[:] = [i for i, r in enumerate(results) if _is_change(r)]
        return [results[i] for i in kept]

    types = [_type_of(v) for v in residuals] + [eqn.outvars[i].aval for i in floats]
    changes = _interpret(settings, function, [*residuals, *given], types)
    results: list[Any] = [None] * inputs
    for i, change in zip(kept, changes, strict=True):
        scale = None if xs[i].scale is None else ONE / scale_of(xs[i])
        results[i] = _in_data(change, scale, xs[i].data)
    return (*results, *[None] * scales)


def _cotangent(data: Any, output: Value) -> Value:
    if output.scale is None:
        return Value(data)
    return Value(data, ONE / output.scale, 0.0, output.dtype)


def _is_no_change(x: Any) -> bool:
    return x is None or isinstance(x, ad.Zero)


def _is_change(x: Any) -> bool:
    return not _is_no_change(x) and is_float(x)


def _float0(shape: tuple[int, ...]) -> Any:
    return np.zeros(shape, jax.dtypes.float0)


def _type_of(value: Value) -> Any:
    data = value.data if value.scale is None else widen(value.data)
    return jax.ShapeDtypeStruct(jnp.shape(data), jnp.asarray(data).dtype)
