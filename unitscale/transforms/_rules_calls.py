"""Rules of inner programs (jit, remat, cond and inlined calls), and how values enter them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun

from ._interpreter import ELEMENTWISE, Interpreter, Settings, register
from ._values import Scale, Value, aval_of, is_float, same_type, wide_value

# -- values as arrays that an inner program takes --------------------------------------------------


class Spec(NamedTuple):
    """Everything static about a value; ``index`` is the position of its scale in the scales' list.

    ``const`` is a string, because floats compare in the wrong way: NaN != NaN, and 0.0 == -0.0.
    """

    log2: int | None
    index: int | None
    dtype: Any
    steps: int
    const: str | None

    def unpack(self, data: Any, scales: Sequence[Any]) -> Value:
        """Rebuild the value."""
        const = None if self.const is None else float(self.const)
        if self.log2 is None:
            return Value(data, const=const)
        scale = Scale(self.log2, None if self.index is None else scales[self.index])
        return Value(data, scale, self.dtype, self.steps)


def _spec_of(value: Value, scales: list[Any]) -> Spec:
    """Describe a value, and append its scale to ``scales`` unless it is there already."""
    if value.scale is None:
        const = None if value.const is None else repr(float(value.const))
        return Spec(None, None, None, value.steps, const)
    index, array = None, value.scale.array
    if array is not None:
        index = next((i for i, known in enumerate(scales) if known is array), len(scales))
        scales.extend([array] if index == len(scales) else [])
    return Spec(value.scale.log2, index, value.dtype, value.steps, None)


class Packed(NamedTuple):
    """Values, split into data, the distinct arrays of their scales, and specs."""

    data: list[Any]
    scales: list[Any]
    specs: tuple[Spec, ...]

    @property
    def arrays(self) -> list[Any]:
        """Return all arrays: data, then scales."""
        return [*self.data, *self.scales]


def pack(values: Sequence[Value]) -> Packed:
    """Split values into arrays and specs."""
    scales: list[Any] = []
    specs = tuple(_spec_of(v, scales) for v in values)
    return Packed([v.data for v in values], scales, specs)


def unpack(specs: Sequence[Spec], arrays: Sequence[Any]) -> list[Value]:
    """Rebuild values from the arrays of `Packed.arrays`."""
    count = len(specs)
    return [s.unpack(a, arrays[count:]) for s, a in zip(specs, arrays[:count], strict=True)]


class Traced(NamedTuple):
    """An inner jaxpr that returns data and new scales, and the specs of its results."""

    closed: ClosedJaxpr
    specs: tuple[Spec, ...]

    def rebuild(self, results: Sequence[Any], scales: Sequence[Any]) -> list[Value]:
        """Turn results into values, given the scales of the operands."""
        count = len(self.specs)
        known = [*scales, *results[count:]]
        return [s.unpack(r, known) for s, r in zip(self.specs, results[:count], strict=True)]


def _key_of(array: Any) -> Any:
    aval = jax.typeof(array)
    return aval.shape, aval.dtype, getattr(aval, "weak_type", False), str(aval)


def trace(settings: Settings, jaxpr: ClosedJaxpr, packed: Packed) -> Traced:
    """Interpret an inner jaxpr, once for all operands with the same types and specs."""
    arrays = packed.arrays
    key = (id(jaxpr), packed.specs, tuple(map(_key_of, arrays)))
    if key not in settings.traces:
        specs: list[tuple[Spec, ...]] = []

        def scaled(*inner: Any) -> list[Any]:
            values = unpack(packed.specs, inner)
            results = Interpreter(settings).run(jaxpr.jaxpr, jaxpr.consts, values)
            scales = list(inner[len(packed.data) :])
            known = len(scales)
            specs.append(tuple(_spec_of(v, scales) for v in results))
            return [*(v.data for v in results), *scales[known:]]

        closed = jax.make_jaxpr(scaled)(*arrays)
        settings.traces[key] = (Traced(closed, specs[-1]), jaxpr)
    return settings.traces[key][0]


def _without_consts(traced: Traced, packed: Packed) -> tuple[ClosedJaxpr, list[Any]]:
    """Turn the constants of a traced jaxpr into leading operands; return the jaxpr and them."""
    closed = traced.closed
    if not closed.consts:
        return closed, []
    count = len(closed.consts)

    def function(*arrays: Any) -> list[Any]:
        return jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, arrays[:count]))(*arrays[count:])

    return jax.make_jaxpr(function)(*closed.consts, *packed.arrays), list(closed.consts)


# -- rules -------------------------------------------------------------------------------------

# jit's marker for a sharding that the compiler chooses; it has no public name in JAX.
with jax.disable_jit(False):  # in case JAX_DISABLE_JIT is set
    _UNSPECIFIED = jax.make_jaxpr(jax.jit(lambda x: x))(0.0).eqns[0].params["out_shardings"][0]


@register("call", "jit")
def jit(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """Apply jit to the scaled program, with the same name, shardings, layouts and donations."""
    inner, params = eqn.params["jaxpr"], eqn.params
    is_elementwise = all(e.primitive.name in ELEMENTWISE for e in inner.eqns)
    is_bare = {_UNSPECIFIED}.issuperset((*params["in_shardings"], *params["out_shardings"]))
    if is_elementwise and is_bare and not any(params["donated_invars"]):  # such as `jnp.where`
        return interpreter.run(inner.jaxpr, inner.consts, values)
    packed = pack(values)
    traced = trace(interpreter.settings, inner, packed)
    closed, consts = _without_consts(traced, packed)
    scales, made = len(packed.scales), len(closed.out_avals) - len(traced.specs)

    def extended(name: str, fill: Any, before: int, after: int) -> tuple[Any, ...]:
        return (*[fill] * before, *params[name], *[fill] * after)

    results = interpreter.bind(
        eqn,
        [*consts, *packed.arrays],
        jaxpr=closed,
        in_shardings=extended("in_shardings", _UNSPECIFIED, len(consts), scales),
        in_layouts=extended("in_layouts", None, len(consts), scales),
        donated_invars=extended("donated_invars", False, len(consts), scales),
        out_shardings=extended("out_shardings", _UNSPECIFIED, 0, made),
        out_layouts=extended("out_layouts", None, 0, made),
    )
    return traced.rebuild(results, packed.scales)


@register("call", "remat2", "checkpoint")
def remat(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """Apply `jax.checkpoint` to the scaled program, with the same policy."""
    settings, packed = interpreter.settings, pack(values)
    # Reuse one closed jaxpr per open jaxpr, because traces are cached by the closed jaxpr.
    opened = eqn.params["jaxpr"]
    inner = settings.traces.setdefault(("open", id(opened)), ClosedJaxpr(opened, ()))
    traced = trace(settings, inner, packed)
    closed, consts = _without_consts(traced, packed)
    results = interpreter.bind(eqn, [*consts, *packed.arrays], jaxpr=closed.jaxpr)
    return traced.rebuild(results, packed.scales)


@register(
    "call",
    *("closed_call", "core_closed_call", "call", "composite"),
    *("custom_vmap_call", "remat_opt", "xla_metadata_call"),
)
def inline(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """Evaluate the inner program in place."""
    found = (eqn.params.get(name) for name in ("call_jaxpr", "jaxpr", "call", "fwd_jaxpr"))
    program = next(p for p in found if isinstance(p, (Jaxpr, ClosedJaxpr)))
    if isinstance(program, Jaxpr):
        program = ClosedJaxpr(program, ())
    return Interpreter(interpreter.settings).run(program.jaxpr, program.consts, values)


@register("control flow", "cond")
def cond(interpreter: Interpreter, eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """Switch between scaled branches; a result that is scaled in any of them is wide in all."""
    index, *operands = values
    packed = pack(operands)
    branches = [trace(interpreter.settings, b, packed) for b in eqn.params["branches"]]
    places = list(zip(*(b.specs for b in branches), strict=True))
    scaled = [[s.dtype for s in specs if s.log2 is not None] for specs in places]
    types = [np.dtype(jnp.result_type(*ts)) if ts else None for ts in scaled]

    def leaving(branch: Traced) -> Callable[[], list[Any]]:
        def run() -> list[Any]:
            results = branch.rebuild(jaxpr_as_fun(branch.closed)(*packed.arrays), packed.scales)
            return [
                v.data if t is None else same_type([v.wide(), jnp.zeros((), aval_of(var).dtype)])[0]
                for v, t, var in zip(results, types, eqn.outvars, strict=True)
            ]

        return run

    runs = [leaving(b) for b in branches]
    platforms = eqn.params.get("branches_platforms")
    if platforms is None:
        results = lax.switch(index.numeric(np.int32), runs)
    else:  # a choice by platform, so that only the branch of this platform is compiled
        names = [ns or ("default",) for ns in platforms]
        chosen = {n: run for run, ns in zip(runs, names, strict=True) for n in ns}
        results = lax.platform_dependent(**chosen)
    pairs = zip(results, types, strict=True)
    return [Value(r) if t is None or not is_float(r) else wide_value(r, t) for r, t in pairs]
