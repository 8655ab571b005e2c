"""Evaluate a jaxpr on plain and scaled values, with one rule per primitive.

The program is traced on the values of its arguments, in float32 for data of 16 bits or fewer. Then:

1. A scaled value is *stored* (data in its own type, with a scale) or *wide* (float32 or wider, at
   scale 1, within a chain of element-wise operations and reductions, which XLA keeps in registers).
   A plain array has no scale, until an operation combines it with a scaled value.
2. *Movers* (reshape, slice, gather, negate, multiply by a power of two, max of operands with one
   scale, ...) act on data, and their results are stored or wide as their operands are.
3. *Contractions* (matmul, convolution, attention) of stored operands are stored: data times data,
   scale times scale, and the data is divided by its static growth, a power of two. The third
   contraction in a row without a measured size is computed wide, and so is one with a plain array.
   The size of a part of an array, or of a choice among several, counts as unknown.
4. *Everything else* is computed on ``data * scale``, in float32 or wider, and its result is wide.
5. A wide value is stored where it becomes the operand of a contraction or the carry of a loop, or
   leaves the program, a loop iteration or a device. Its scale is then 1 in types with the range of
   float32 (such as bfloat16). In narrow types (float16, FP8) it is the power of two nearest the RMS
   of the data, read at run time, or a larger one if the largest entry needs it. A carry that starts
   plain or wide stays wide, as do results of branches.

XLA would keep some float32 arrays in memory across a contraction, such as residuals for gradients.
They are recomputed from stored arrays if these take no more bytes than three 16-bit arrays. If they
take more, element-wise results of stored arrays are stored where they are computed.

An argument that is returned unchanged keeps its scale. The result of a contraction gets a new scale
where it leaves the program; otherwise the scale of a state that every step updates could drift away
from its data.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Primitive, primitives as exported
from jax.interpreters import ad

from ..core import last_uses, match_varying
from ._values import Value, aval_of, data_dtype, is_float, plain, same_type, wide_value


@dataclass(frozen=True)
class Default:
    """A line of the program that takes the default rule: dequantize, apply, rescale.

    Attributes:
        primitive: name of the primitive.
        source: ``file:line (function)`` of the user's code, where known.

    Example:
        >>> print(Default("cholesky", "model.py:7 (whiten)"))
        cholesky at model.py:7 (whiten)
    """

    primitive: str
    source: str

    def __str__(self) -> str:
        return f"{self.primitive} at {self.source}"


# Operations whose results are recomputed where that is cheaper than keeping them in memory.
_ELEMENTWISE = """
    abs add add_any broadcast_in_dim convert_element_type cos div erf erfc exp exp2 expm1
    integer_pow log log1p logistic max min mul neg pow reshape rsqrt select_n sign sin sqrt
    square squeeze sub tanh
"""
ELEMENTWISE = frozenset(_ELEMENTWISE.split())


@dataclass
class Settings:
    """The state that all levels of one interpretation share.

    Attributes:
        growth: see `growth_of`.
        decouple: whether functions of float16 data are computed in float16 where that is safe.
        report: the default rules taken so far.
        traces: scaled programs of inner jaxprs, by jaxpr and by the specs of operands; they keep
            the jaxpr alive.
        calls: the equations being applied, outermost first.
    """

    growth: Any
    decouple: bool = False
    report: list[Default] = field(default_factory=list)
    traces: dict[Any, Any] = field(default_factory=dict)
    calls: list[JaxprEqn] = field(default_factory=list)

    def source(self) -> str:
        """Return the line of user code that the equation being applied comes from."""
        found = (source_of(eqn) for eqn in reversed(self.calls))
        return next((source for source in found if source), "unknown")


class Interpreter:
    """Evaluate the equations of one jaxpr; each inner jaxpr gets its own interpreter."""

    def __init__(self, settings: Settings):
        self.settings = settings

    # -- methods that rules call -------------------------------------------------------------

    def bind(self, eqn: JaxprEqn, arrays: Sequence[Any], **changes: Any) -> Any:
        """Apply the primitive of an equation to arrays."""
        params = eqn.primitive.get_bind_params({**eqn.params, **changes})
        return eqn.primitive.bind(*arrays, **params)

    def wide(self, eqn: JaxprEqn, values: Sequence[Value]) -> Any:
        """Apply the primitive to ``data * scale`` of the operands, in float32 or wider."""
        arrays = same_type([v.wide() if is_float(v.data) else v.data for v in values])
        results = self.bind(eqn, match_varying(arrays))
        return self.wide_results(eqn, values, results)

    def wide_results(self, eqn: JaxprEqn, values: Sequence[Value], results: Any) -> Any:
        """Wrap results that were computed wide; results that are not floating are plain."""
        dtype = data_dtype(*values)

        def wrap(data: Any) -> Value:
            # References, such as those of `jax.new_ref`, hold plain values.
            is_array = hasattr(data, "dtype") and not hasattr(jax.typeof(data), "inner_aval")
            return wide_value(data, dtype) if is_array and is_float(data) else Value(data)

        return list(map(wrap, results)) if eqn.primitive.multiple_results else wrap(results)

    def default(self, eqn: JaxprEqn, values: Sequence[Value]) -> Any:
        """Apply the primitive to ``data * scale`` of the operands, in the program's types."""
        self.settings.report.append(Default(eqn.primitive.name, self.settings.source()))
        pairs = zip(values, eqn.invars, strict=True)
        arrays = [v.data if v.scale is None else v.numeric(aval_of(x).dtype) for v, x in pairs]
        return self.wide_results(eqn, values, self.bind(eqn, arrays))

    # -- evaluation --------------------------------------------------------------------------

    def run(self, jaxpr: Jaxpr, consts: Sequence[Any], values: Sequence[Value]) -> list[Value]:
        """Evaluate a jaxpr, given the arrays of its constants and one value per input."""
        env: dict[Any, Value] = {}

        def read(atom: Any) -> Value:
            return plain(atom.val) if isinstance(atom, Literal) else env[atom]

        def read_again(atom: Any) -> Value:
            value = read(atom)
            stretch = places[index]
            is_old = value.is_from_stored and made.get(atom, stretch) < stretch
            return value.again(again.setdefault(stretch, {})) if is_old else value

        env.update(zip(jaxpr.constvars, map(plain, consts), strict=True))
        env.update(zip(jaxpr.invars, values, strict=True))
        last_use = last_uses(jaxpr)
        places, made, kept = _stretches(jaxpr)
        again: dict[int, dict[int, Value]] = {}  # recomputed values, by stretch
        for index, eqn in enumerate(jaxpr.eqns):
            is_elementwise = eqn.primitive.name in ELEMENTWISE
            self.settings.calls.append(eqn)
            with eqn.ctx.manager:
                operands = list(map(read_again if is_elementwise else read, eqn.invars))
                results = self._apply(eqn, operands)
                if is_elementwise and not any(results[0] is v for v in operands):
                    value = results[0]
                    value.made_by(lambda vs, eqn=eqn: self._apply(eqn, vs)[0], operands)
                    if value.is_from_stored and not value.origin and eqn.outvars[0] in kept:
                        results = [value.kept()]
            self.settings.calls.pop()
            env.update(zip(eqn.outvars, results, strict=True))
            for var in last_use.get(index, ()):
                del env[var]
        return [read(atom) for atom in jaxpr.outvars]

    def _apply(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        rule = rule_of(eqn.primitive)
        is_plain = all(v.scale is None for v in operands)
        if is_plain and not (rule is not None and rule.takes_plain):
            results = self.bind(eqn, [v.data for v in operands])
            if eqn.primitive.multiple_results:
                return list(map(Value, results))
            return [Value(results, const=_constant(eqn, operands, results))]
        results = (Interpreter.default if rule is None else rule.function)(self, eqn, operands)
        return list(results) if eqn.primitive.multiple_results else [results]


def _stretches(jaxpr: Jaxpr) -> tuple[list[int], dict[Any, int], set[Any]]:
    """Return the number of contractions before each equation, and before each variable.

    Also return the variables that are read again after a later contraction.
    """
    places: list[int] = []
    made: dict[Any, int] = {}
    kept: set[Any] = set()
    stretch = 0
    for eqn in jaxpr.eqns:
        places.append(stretch)
        read = [v for v in eqn.invars if not isinstance(v, Literal)]
        kept.update(v for v in read if made.get(v, stretch) < stretch)
        rule = rule_of(eqn.primitive)
        stretch += rule is not None and rule.category == "contraction"
        made.update(dict.fromkeys(eqn.outvars, stretch))
    return places, made, kept


def _constant(eqn: JaxprEqn, operands: Sequence[Value], result: Any) -> float | None:
    """Return the number that all elements of a result equal, if the operand determines it."""
    same = ("broadcast_in_dim", "reshape", "squeeze", "copy", "convert_element_type", "pvary")
    if eqn.primitive.name not in same or not jnp.issubdtype(result.dtype, jnp.floating):
        return None
    return operands[0].const if result.dtype.itemsize > 1 else None


def source_of(eqn: JaxprEqn) -> str | None:
    """Return the user code that an equation comes from, as ``file:line (function)``, if known."""
    traceback = eqn.source_info.traceback
    own = (f"{sys.modules['jax'].__path__[0]}/", __file__.rsplit("/", 1)[0])
    for frame in traceback.frames if traceback is not None else ():
        if not frame.file_name.startswith(own):
            return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"
    return None


# -- the table of rules ----------------------------------------------------------------------------

Function = Callable[..., Any]


@dataclass(frozen=True)
class Rule:
    """How one primitive acts on scaled values; see `register`."""

    name: str
    category: str
    function: Function

    @property
    def takes_plain(self) -> bool:
        """Return whether the rule also applies if no operand has a scale."""
        return self.category in ("call", "marker") or self.name == "scatter-add"


_RULES: dict[Primitive | str, Rule] = {}


def _resolve(name: str) -> Primitive | str:
    for module in (exported, lax):
        found = getattr(module, f"{name}_p", None)
        if isinstance(found, Primitive):
            return found
    return name


def register(category: str, *targets: Primitive | str) -> Callable[[Function], Function]:
    """Register a rule for primitives, or for the names of primitives that JAX does not export.

    Args:
        category: group of primitives that are handled alike, such as "mover" or "contraction".
        *targets: primitives, or names (``"add"``).

    Returns:
        A decorator that returns the function unchanged. The function is called with the
        interpreter, the equation and the operands; it returns one value, or a list of them for a
        primitive with several results.

    Raises:
        ValueError: if a primitive has a rule already.

    Example:
        >>> register("wide", "add")
        Traceback (most recent call last):
        ...
        ValueError: unitscale.transforms.register: 'add' has a rule already, in category 'wide'...
    """
    resolved = [_resolve(t) if isinstance(t, str) else t for t in targets]
    for target in resolved:
        if target in _RULES:
            rule = _RULES[target]
            raise ValueError(
                f"unitscale.transforms.register: {rule.name!r} has a rule already, in category "
                f"{rule.category!r}; a primitive has one rule"
            )

    def add(function: Function) -> Function:
        for target in resolved:
            name = target if isinstance(target, str) else target.name
            _RULES[target] = Rule(name, category, function)
        return function

    return add


def rule_of(primitive: Primitive) -> Rule | None:
    """Return the rule of a primitive, or None if it is not listed."""
    return _RULES.get(primitive) or _RULES.get(primitive.name)


def coverage() -> str:
    """Return a Markdown table of unitscale's own rules and the primitives that they apply to.

    Rows are sorted by category.

    Example:
        >>> print(coverage().splitlines()[0])
        | category | rule | primitives |
    """
    groups: dict[tuple[str, str], list[str]] = {}
    own = [r for r in _RULES.values() if r.function.__module__.startswith("unitscale.")]
    for rule in sorted(own, key=lambda r: (r.category, _summary(r.function), r.name)):
        groups.setdefault((rule.category, _summary(rule.function)), []).append(f"`{rule.name}`")
    lines = ["| category | rule | primitives |", "| --- | --- | --- |"]
    lines += [f"| {c} | {s} | {', '.join(names)} |" for (c, s), names in groups.items()]
    return "\n".join(lines)


def _summary(function: object) -> str:
    return (function.__doc__ or "").strip().partition("\n")[0]


def unlisted() -> list[str]:
    """Return the names of the installed JAX's differentiable primitives that have no rule.

    They still work, through the default rule. Releases of unitscale aim for an empty list.

    Example:
        >>> unlisted()
        []
    """
    return [p.name for p in differentiable() if rule_of(p) is None]


# Primitives of Pallas whose rules other modules define.
_PALLAS = ("mpmd_map", "pallas_call")


def differentiable() -> list[Primitive]:
    """Return the primitives that the installed JAX can differentiate, sorted by name.

    These have a JVP or transpose rule that JAX itself defines, or are calls that differentiation
    looks into. Primitives of other libraries and of Pallas kernels are left out.
    """
    calls = (exported.custom_jvp_call_p, exported.custom_vjp_call_p)
    rules = [*ad.primitive_jvps.items(), *ad.primitive_transposes.items()]
    found = {p for p, rule in rules if all(map(_is_of_jax, _parts(rule))) and p.name not in _PALLAS}
    return sorted({*found, *calls}, key=lambda p: p.name)


def _parts(rule: Any) -> Iterator[Any]:
    """Yield the functions that a rule consists of: itself, or the arguments of a partial."""
    if isinstance(rule, functools.partial):
        for part in (rule.func, *rule.args, *rule.keywords.values()):
            yield from _parts(part)
    elif isinstance(rule, (tuple, list)):
        for part in rule:
            yield from _parts(part)
    elif callable(rule):
        yield rule


def _is_of_jax(function: Any) -> bool:
    parts = (getattr(function, "__module__", None) or "jax").split(".")
    return parts[0] in ("jax", "jaxlib") and "pallas" not in parts
