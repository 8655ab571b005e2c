"""Rules of custom_jvp and custom_vjp: keep custom derivatives, also outside of scalify.

The user's derivative is written for values, while JAX differentiates data with constant scales. As
value = data * scale, the data's tangent is the value's tangent divided by the scale, and the data's
cotangent is the value's cotangent multiplied by the scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, jaxpr_as_fun
from jax.interpreters import ad

from ._interpreter import Interpreter, Settings, register
from ._rules_calls import Spec, pack, trace, unpack
from ._values import Scale, Value, aval_of, data_at, is_float, narrow, widen


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Static:
    """Specs, and dtypes of residuals in the user's program, as a static node of a pytree."""

    specs: tuple[Spec, ...]
    types: tuple[Any, ...]


def _interpret(
    settings: Settings, function: Any, values: Sequence[Value], types: Sequence[Any]
) -> tuple[list[Value], list[Any]]:
    """Trace a function for arrays of these types, sharded like the values, and evaluate it.

    Return its results, and their types in the traced program.
    """
    avals = [jax.typeof(v.data).update(dtype=t) for v, t in zip(values, types, strict=True)]
    closed = jax.make_jaxpr(function)(*avals)
    results = Interpreter(settings).run(closed.jaxpr, closed.consts, values)
    return results, [aval.dtype for aval in closed.out_avals]


def _derivative(value: Value, scale: Scale | None, like: Any) -> Any:
    """Return the data of a derivative at a given scale, in the type of its primal's data."""
    if scale is None:
        return narrow(widen(value.numeric()), jnp.result_type(like))
    return data_at(value, scale, jnp.result_type(like))


def _zero(x: Any) -> Any:
    return jnp.zeros_like(x) if is_float(x) else np.zeros(jnp.shape(x), jax.dtypes.float0)


@register("call", "custom_jvp_call")
def custom_jvp(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """Make a custom_jvp of the scaled program; interpret the user's rule on scaled tangents."""
    settings = interpreter.settings
    packed = pack(values)
    traced = trace(settings, eqn.params["call_jaxpr"], packed)
    primal = jaxpr_as_fun(traced.closed)
    function = jax.custom_jvp(lambda *arrays: primal(*arrays))
    _, rule = eqn.primitive.get_bind_params(eqn.params)["subfuns"]
    types = [aval_of(v).dtype for v in eqn.invars]
    floats = [i for i, dtype in enumerate(types) if is_float(dtype)]
    count = len(types)

    def derivative(*arrays: Any) -> list[Any]:
        given = dict(zip(floats, arrays[count:], strict=True))
        full = [given[i] if i in given else _zero(a) for i, a in enumerate(arrays[:count])]
        return rule.call_wrapped(*arrays[:count], *full)

    @function.defjvp
    def _(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        inner = unpack(packed.specs, primals)
        directions = [Value(tangents[i], inner[i].scale, inner[i].dtype) for i in floats]
        every = [*types, *(types[i] for i in floats)]
        found, _ = _interpret(settings, derivative, [*inner, *directions], every)
        results = primal(*primals)
        outputs = traced.rebuild(results, primals[count:])
        slopes = [
            _derivative(c, y.scale, y.data) if is_float(y.data) else _zero(y.data)
            for c, y in zip(found[len(outputs) :], outputs, strict=True)
        ]
        return results, [*slopes, *(_zero(r) for r in results[len(outputs) :])]

    return traced.rebuild(function(*packed.arrays), packed.scales)


@register("call", "custom_vjp_call")
def custom_vjp(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """Make a custom_vjp of the scaled program; interpret the user's rules on scaled cotangents."""
    settings = interpreter.settings
    packed = pack(values)
    traced = trace(settings, eqn.params["call_jaxpr"], packed)
    primal = jaxpr_as_fun(traced.closed)
    function = jax.custom_vjp(lambda *arrays: primal(*arrays))
    _, forward, backward = eqn.primitive.get_bind_params(eqn.params)["subfuns"]
    in_types, out_avals = [aval_of(v).dtype for v in eqn.invars], list(map(aval_of, eqn.outvars))

    def fwd(*arrays: Any) -> tuple[list[Any], Any]:
        def rule(*xs: Any) -> list[Any]:
            return forward.call_wrapped(*(item for x in xs for item in (x, True)))

        inputs = unpack(packed.specs, arrays)
        found, types = _interpret(settings, rule, inputs, in_types)
        results = primal(*arrays)
        outputs = traced.rebuild(results, arrays[len(inputs) :])
        # Residuals that are inputs are not among the results.
        _, _, forwarded = eqn.params["out_trees"]()
        rest = zip(found, types, strict=True)
        residuals = [next(rest) if f is None else (inputs[f], in_types[f]) for f in forwarded]
        # The backward pass needs the scales of inputs and outputs, but not their data.
        empty = [
            Value(
                jnp.zeros((0,), v.data.dtype if is_float(v.data) else np.float32), v.scale, v.dtype
            )
            for v in (*inputs, *outputs)
        ]
        saved = pack([*(value for value, _ in residuals), *empty])
        return results, (saved.arrays, _Static(saved.specs, tuple(t for _, t in residuals)))

    def bwd(saved: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        arrays, static = saved
        values = unpack(static.specs, arrays)
        first, last = len(values) - len(in_types) - len(out_avals), len(values) - len(out_avals)
        residuals, xs, ys = values[:first], values[first:last], values[last:]
        floats = [i for i, aval in enumerate(out_avals) if is_float(aval)]
        given = [Value(cotangents[i], _inverse(ys[i].scale), ys[i].dtype) for i in floats]
        kept: list[int] = []

        def rule(*items: Any) -> list[Any]:
            known = dict(zip(floats, items[first:], strict=True))
            full = [
                known.get(i, np.zeros(aval.shape, jax.dtypes.float0))
                for i, aval in enumerate(out_avals)
            ]
            # One per input; newer releases of JAX return them in a nested list.
            grads = jax.tree.leaves(backward.call_wrapped(*items[:first], *full), is_leaf=_is_none)
            kept[:] = [i for i, g in enumerate(grads) if not _is_none(g) and is_float(g)]
            return [grads[i] for i in kept]

        types = [*static.types, *(out_avals[i].dtype for i in floats)]
        results: list[Any] = [None] * len(packed.arrays)
        found, _ = _interpret(settings, rule, [*residuals, *given], types)
        for i, change in zip(kept, found, strict=True):
            results[i] = _derivative(change, _inverse(xs[i].scale), xs[i].data)
        return tuple(results)

    function.defvjp(fwd, bwd)
    return traced.rebuild(function(*packed.arrays), packed.scales)


def _inverse(scale: Scale | None) -> Scale | None:
    return None if scale is None else scale.inverse()


def _is_none(x: Any) -> bool:
    return x is None or isinstance(x, ad.Zero)
