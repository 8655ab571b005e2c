"""Evaluates a jaxpr on plain and scaled values, with one rule per primitive.

The program is traced on values, in float32 where an argument has 16 bits or fewer. Then:

1. A scaled value is *stored* (data in its own type, with a scale) or *wide* (float32 or wider, at
   scale 1, within a chain of element-wise operations and reductions, which XLA keeps in registers).
   A plain array (no scale) stays plain until it meets a scaled one.
2. *Movers* (reshape, slice, gather, negate, multiply by a power of two, max of operands of one
   scale, ...) act on data and keep the state they find.
3. *Contractions* (matmul, convolution, attention) of stored operands are stored: data times data,
   scale times scale, the data divided by the static growth, a power of two. A contraction that
   would be the third since a size was last known, or one of a plain array, is computed wide; some
   of the elements of an array, or a choice among those of several, are of unknown size.
4. *Everything else is wide*: it is applied to ``data * scale``, in float32 or wider.
5. A wide value is stored where it must be: as operand of a contraction, as loop carry, where it
   leaves the program, a loop's turn or a device. In a type with the range of float32 (bfloat16
   too) its scale is then 1. In a narrow type (float16, FP8) it is the power of two nearest the RMS
   of the data, or larger where the largest entry needs room, read from the data at run time.
   A carry that starts plain or wide stays wide, as do results of branches.

What XLA would keep in float32 from before a contraction until after it (such as what gradients
need) is computed again from stored arrays, where these are at most three of 16 bits; else an
element-wise result of stored arrays is stored where it is made.

No rule looks at the magnitude of numbers to guess what they mean. A value that is stored as it came
in leaves as it is; contractions are stored anew where they leave, or the scale of a state that is
updated step after step could run away from its data.
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
    """One place where a program takes the default rule: dequantize, apply, rescale.

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


# Operations whose results are computed again where that is cheaper than to keep them.
ELEMENTWISE = frozenset(
    [
        "abs",
        "add",
        "add_any",
        "broadcast_in_dim",
        "convert_element_type",
        "cos",
        "div",
        "erf",
        "erfc",
        "exp",
        "exp2",
        "expm1",
        "integer_pow",
        "log",
        "log1p",
        "logistic",
        "max",
        "min",
        "mul",
        "neg",
        "pow",
        "reshape",
        "rsqrt",
        "select_n",
        "sign",
        "sin",
        "sqrt",
        "square",
        "squeeze",
        "sub",
        "tanh",
    ]
)


@dataclass
class Settings:
    """The state that all levels of one interpretation share.

    Attributes:
        growth: see `growth_of`.
        decouple: whether functions of float16 data are computed in float16 where that is safe.
        report: the default rules met so far.
        traces: scaled programs of inner jaxprs, by jaxpr and by the specs of operands; the jaxpr is
            kept alive with them.
        calls: the equations being applied, the outermost first.
    """

    growth: Any
    decouple: bool = False
    report: list[Default] = field(default_factory=list)
    traces: dict[Any, Any] = field(default_factory=dict)
    calls: list[JaxprEqn] = field(default_factory=list)

    def source(self) -> str:
        """Returns where the user's code made the equation being applied, or called its maker."""
        found = (source_of(eqn) for eqn in reversed(self.calls))
        return next((source for source in found if source), "unknown")


class Interpreter:
    """Evaluates the equations of one jaxpr; inner jaxprs get interpreters of their own."""

    def __init__(self, settings: Settings):
        """Keeps the settings."""
        self.settings = settings

    # -- what rules are written with ---------------------------------------------------------

    def bind(self, eqn: JaxprEqn, arrays: Sequence[Any], **changes: Any) -> Any:
        """Applies the primitive of an equation to arrays."""
        params = eqn.primitive.get_bind_params({**eqn.params, **changes})
        return eqn.primitive.bind(*arrays, **params)

    def wide(self, eqn: JaxprEqn, values: Sequence[Value]) -> Any:
        """Applies the primitive to the operands' values, in float32 or wider."""
        arrays = same_type([v.wide() if is_float(v.data) else v.data for v in values])
        results = self.bind(eqn, match_varying(arrays) if len(arrays) > 1 else arrays)
        return self.wide_results(eqn, values, results)

    def wide_results(self, eqn: JaxprEqn, values: Sequence[Value], results: Any) -> Any:
        """Wraps results that were computed wide; those without floating numbers are plain."""
        dtype = data_dtype(*values)

        def wrap(data: Any) -> Value:
            # A `jax.new_ref` holds plain values.
            is_array = hasattr(data, "dtype") and not hasattr(jax.typeof(data), "inner_aval")
            return wide_value(data, dtype) if is_array and is_float(data) else Value(data)

        return list(map(wrap, results)) if eqn.primitive.multiple_results else wrap(results)

    def default(self, eqn: JaxprEqn, values: Sequence[Value]) -> Any:
        """Applies the primitive to the operands' values, in the types of the program."""
        self.settings.report.append(Default(eqn.primitive.name, self.settings.source()))
        arrays = [
            v.data if v.scale is None else v.numeric(aval_of(var).dtype)
            for v, var in zip(values, eqn.invars, strict=True)
        ]
        return self.wide_results(eqn, values, self.bind(eqn, arrays))

    # -- evaluation --------------------------------------------------------------------------

    def run(self, jaxpr: Jaxpr, consts: Sequence[Any], values: Sequence[Value]) -> list[Value]:
        """Evaluates a jaxpr on the arrays of its constants and one value per input."""
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
        again: dict[int, dict[int, Value]] = {}  # computed again, by stretch
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
    """Returns how many contractions come before equations and variables, and who is read later."""
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
    """The number that all elements of a result of one such operand are."""
    same = ("broadcast_in_dim", "reshape", "squeeze", "copy", "convert_element_type", "pvary")
    if eqn.primitive.name not in same or not jnp.issubdtype(result.dtype, jnp.floating):
        return None
    return operands[0].const if result.dtype.itemsize > 1 else None


def source_of(eqn: JaxprEqn) -> str | None:
    """Returns where the user's code made an equation, as ``file:line (function)``, if known."""
    traceback = eqn.source_info.traceback
    own = (sys.modules["jax"].__path__[0], __file__.rsplit("/", 1)[0])
    for frame in traceback.frames if traceback is not None else ():
        if not frame.file_name.startswith(own):
            return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"
    return None


# -- which rule each primitive has -----------------------------------------------------------------

Function = Callable[..., Any]


@dataclass(frozen=True)
class Rule:
    """How one primitive acts on scaled values; see `register`."""

    name: str
    category: str
    function: Function

    @property
    def takes_plain(self) -> bool:
        """Return whether it is applied although no operand has a scale."""
        return self.category in ("call", "marker") or self.name == "scatter-add"


_RULES: dict[Primitive | str, Rule] = {}


def _resolve(name: str) -> Primitive | str:
    for module in (exported, lax):
        found = getattr(module, f"{name}_p", None)
        if isinstance(found, Primitive):
            return found
    return name


def register(category: str, *targets: Primitive | str) -> Callable[[Function], Function]:
    """Registers a rule for primitives, or for the names of primitives that JAX does not export.

    Args:
        category: group of primitives that share the reasoning, such as "mover" or "product".
        *targets: primitives, or names (``"add"``).

    Returns:
        A decorator that returns the function as it is. The function is called with the interpreter,
        the equation and the operands; it returns one value, or a list of them for a primitive with
        several results.

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
    """Returns the rule of a primitive, or None if it is not listed."""
    return _RULES.get(primitive) or _RULES.get(primitive.name)


def coverage() -> str:
    """Returns the table of primitives and their rules, as Markdown.

    One line per rule of the library, with the primitives that it serves, sorted by category.

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
    """Returns the names of differentiable primitives of the running JAX that have no entry.

    They still work, through the default rule; a release of the library has none.

    Example:
        >>> unlisted()
        []
    """
    return [p.name for p in differentiable() if rule_of(p) is None]


# Primitives of Pallas whose rules other modules define.
_PALLAS = ("mpmd_map", "pallas_call")


def differentiable() -> list[Primitive]:
    """Returns the primitives that the running JAX can differentiate, sorted by name.

    Those with a forward-mode or a transposition rule of JAX's own, and the calls that
    differentiation goes through; not those of other libraries or of Pallas kernels.
    """
    calls = (exported.custom_jvp_call_p, exported.custom_vjp_call_p)
    rules = [*ad.primitive_jvps.items(), *ad.primitive_transposes.items()]
    found = {p for p, rule in rules if all(map(_is_of_jax, _parts(rule))) and p.name not in _PALLAS}
    return sorted({*found, *calls}, key=lambda p: p.name)


def _parts(rule: Any) -> Iterator[Any]:
    """The functions that a rule is made of: itself, or those that a partial one was given."""
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
