"""Calls of an inner program: jit, remat, and calls that leave no trace of their own."""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun

from ._interpreter import Interpreter
from ._packing import Packed, Traced, pack, trace
from ._registry import register
from ._values import Value

# What jit says of a result whose sharding the compiler chooses; JAX has no public name for it.
with jax.disable_jit(False):  # as the environment may have it disabled
    _UNSPECIFIED = jax.make_jaxpr(jax.jit(lambda x: x))(0.0).eqns[0].params["out_shardings"][0]


def without_consts(traced: Traced, packed: Packed) -> tuple[ClosedJaxpr, list[Any]]:
    """Turns the constants of a traced jaxpr into leading operands; returns them too."""
    closed = traced.closed
    if not closed.consts:
        return closed, []
    count = len(closed.consts)

    def function(*arrays: Any) -> list[Any]:
        return jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, arrays[:count]))(*arrays[count:])

    return jax.make_jaxpr(function)(*closed.consts, *packed.arrays), list(closed.consts)


@register("call", "jit")
def jit(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """The same jit on the scaled program: its name, shardings, layouts and donations are kept."""
    packed = pack(values)
    traced = trace(interpreter.settings, eqn.params["jaxpr"], packed)
    closed, consts = without_consts(traced, packed)
    params = eqn.params
    atoms, made = len(packed.atoms), len(closed.out_avals) - len(traced.specs)

    def extended(name: str, fill: Any, before: int, after: int) -> tuple[Any, ...]:
        return (*[fill] * before, *params[name], *[fill] * after)

    results = interpreter.bind(
        eqn,
        [*consts, *packed.arrays],
        jaxpr=closed,
        in_shardings=extended("in_shardings", _UNSPECIFIED, len(consts), atoms),
        in_layouts=extended("in_layouts", None, len(consts), atoms),
        donated_invars=extended("donated_invars", False, len(consts), atoms),
        out_shardings=extended("out_shardings", _UNSPECIFIED, 0, made),
        out_layouts=extended("out_layouts", None, 0, made),
    )
    return traced.rebuild(results, packed.atoms, packed.values)


@register("call", "remat2", "remat_opt", "checkpoint")
def remat(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """The same checkpoint on the scaled program: its policy is kept."""
    packed = pack(values)
    inner = ClosedJaxpr(eqn.params["jaxpr"], ())
    traced = trace(interpreter.settings, _kept(interpreter, inner), packed)
    closed, consts = without_consts(traced, packed)
    results = interpreter.bind(eqn, [*consts, *packed.arrays], jaxpr=closed.jaxpr)
    return traced.rebuild(results, packed.atoms, packed.values)


def _kept(interpreter: Interpreter, closed: ClosedJaxpr) -> ClosedJaxpr:
    """Returns the same object for the same open jaxpr, which is what traces are found by."""
    return interpreter.settings.traces.setdefault(("open", id(closed.jaxpr)), closed)


def _inner_program(params: dict[str, Any]) -> ClosedJaxpr:
    for name in ("call_jaxpr", "jaxpr", "call"):
        program = params.get(name)
        if isinstance(program, ClosedJaxpr):
            return program
        if isinstance(program, Jaxpr):
            return ClosedJaxpr(program, ())
    raise AssertionError(f"a call has an inner program; got {sorted(params)}")


_INLINE = ("closed_call", "core_closed_call", "call", "composite", "custom_vmap_call")


@register("call", *_INLINE, "xla_metadata_call")
def inline(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """Evaluated in place."""
    program = _inner_program(eqn.params)
    return Interpreter(interpreter.settings).run(program.jaxpr, program.consts, values)


@register("call", "custom_lin", "call_hi_primitive", "eval_jaxpr", "stage")
def internal(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> Any:
    """Dequantize, apply, rescale: made by JAX itself, not by programs."""
    if all(v.scale is None for v in values):
        results = interpreter.bind(eqn, [v.data for v in values])
        return list(map(Value, results)) if eqn.primitive.multiple_results else Value(results)
    return interpreter.default(eqn, values)
