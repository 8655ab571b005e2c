"""Evaluates a jaxpr on plain and scaled values, one rule per primitive."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from ..core import last_uses
from ._decouple import Branches, decoupled, limits
from ._doubt import UNKNOWN
from ._lazy_scale import Atom, LazyScale, largest
from ._plain import result_of_plain
from ._registry import rule_of
from ._report import Default, Exponent, Report
from ._settle import measured
from ._strategies import Growth
from ._values import (
    Value,
    aval_of,
    constant_of,
    data_dtype,
    is_float,
    known_atoms,
    numeric,
    plain,
    uniform,
)


@dataclass
class Settings:
    """What every level of one interpretation shares.

    Attributes:
        growth: static strategy: the growth of data that a primitive is expected to cause.
        report: what was met so far that a user may want to know.
        traces: scaled programs of inner jaxprs, by jaxpr and by what is known of its operands; the
            jaxpr is kept alive with them.
        calls: the equations being applied, the outermost first.
        seen: scales that were reported.
        decouple: whether functions of a value are computed in float16 where that is safe.
        branches: what counts how often that is so, if anybody asks.
    """

    growth: Growth
    decouple: bool = False
    branches: Branches | None = None
    report: Report = field(default_factory=Report)
    traces: dict[Any, Any] = field(default_factory=dict)
    calls: list[JaxprEqn] = field(default_factory=list)
    seen: set[Atom] = field(default_factory=set)

    def see(self, maker: str, source: str | None, atoms: set[Atom]) -> None:
        """Reports new scales that are known at run time only; by default at the present line."""
        atoms = atoms - self.seen
        self.seen |= atoms
        if atoms:
            source = self.source() if source is None else source
            reasons = sorted(atom.reason for atom in atoms)
            self.report.exponents.extend(Exponent(maker, source, r) for r in reasons)

    def source(self) -> str:
        """Returns where the user's code made the equation being applied.

        Within a function of JAX that is where the function was called.
        """
        found = (source_of(eqn) for eqn in reversed(self.calls))
        return next((source for source in found if source), "unknown")


class Interpreter:
    """Evaluates the equations of one jaxpr; inner jaxprs get interpreters of their own."""

    def __init__(self, settings: Settings):
        """Starts an empty environment."""
        self.settings = settings
        self._makers: dict[Any, JaxprEqn] = {}
        self._largest: dict[frozenset[LazyScale], LazyScale] = {}

    # -- what rules are written with ---------------------------------------------------------

    def growth(self, primitive: str, terms: int) -> float:
        """Returns log2 of the growth of data that the static strategy expects."""
        return self.settings.growth(primitive, terms)

    def largest(self, x: LazyScale, y: LazyScale) -> LazyScale:
        """Returns the larger scale; the same pair gives the same scale."""
        pair = frozenset((x, y))
        if pair not in self._largest:
            self._largest[pair] = largest(x, y)
        return self._largest[pair]

    def maker(self, operand: Any) -> JaxprEqn | None:
        """Returns the equation of this jaxpr that an operand of another is a result of."""
        return None if isinstance(operand, Literal) else self._makers.get(operand)

    def bind(self, eqn: JaxprEqn, arrays: Sequence[Any], **changes: Any) -> Any:
        """Applies the primitive of an equation to arrays."""
        params = eqn.primitive.get_bind_params({**eqn.params, **changes})
        return eqn.primitive.bind(*arrays, **params)

    def decoupled(self, eqn: JaxprEqn, values: Sequence[Value]) -> Value | None:
        """Computes a function in float16 where that is safe, if it is to be; else returns None."""
        name, settings = eqn.primitive.name, self.settings
        safe = limits(name, values) if settings.decouple else None
        if safe is None:
            return None
        watch = settings.branches and functools.partial(
            settings.branches.watch, name, settings.source()
        )
        return decoupled(safe, lambda data: self.bind(eqn, [data]), values[0], watch)

    def default(
        self, eqn: JaxprEqn, values: Sequence[Value], clean: Callable[[Any], Any] | None = None
    ) -> Any:
        """Takes the values out of their scales, applies the primitive, and rescales the results.

        Args:
            eqn: the equation.
            values: its operands.
            clean: applied to each result first, where a primitive leaves elements undefined.
        """
        self.settings.report.append(Default(eqn.primitive.name, self.settings.source()))
        dtype = data_dtype(*(v for v in values if v.dtype is not None))
        arrays = [
            numeric(uniform(v), aval_of(var).dtype if v.scale is not None else None)
            for v, var in zip(values, eqn.invars, strict=True)
        ]
        results = self.bind(eqn, arrays)
        if clean is not None:
            results = clean(results)
        if not eqn.primitive.multiple_results:
            return rescaled(results, dtype)
        return [rescaled(r, dtype) for r in results]

    # -- evaluation --------------------------------------------------------------------------

    def run(self, jaxpr: Jaxpr, consts: Sequence[Any], values: Sequence[Value]) -> list[Value]:
        """Evaluates a jaxpr.

        Args:
            jaxpr: the program.
            consts: values of its constants.
            values: one per input.

        Returns:
            One value per output.
        """
        env: dict[Any, Value] = {}

        def read(atom: Any) -> Value:
            if isinstance(atom, Literal):
                return Value(atom.val, const=constant_of(atom.val))
            return env[atom]

        env.update(zip(jaxpr.constvars, map(plain, consts), strict=True))
        env.update(zip(jaxpr.invars, values, strict=True))
        last_use = last_uses(jaxpr)
        for index, eqn in enumerate(jaxpr.eqns):
            operands = [read(atom) for atom in eqn.invars]
            self.settings.calls.append(eqn)
            with eqn.ctx.manager:
                results = self._apply(eqn, operands)
            self.settings.calls.pop()
            env.update(zip(eqn.outvars, results, strict=True))
            self._makers.update(dict.fromkeys(eqn.outvars, eqn))
            for var in last_use.get(index, ()):
                del env[var]
        return [read(atom) for atom in jaxpr.outvars]

    def _apply(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        rule = rule_of(eqn.primitive)
        if all(v.scale is None for v in operands) and not (
            rule is not None and rule.category in ("call", "marker")
        ):
            results = self.bind(eqn, [v.data for v in operands])
            if eqn.primitive.multiple_results:
                return [Value(r) for r in results]
            return [result_of_plain(eqn, operands, results)]
        apply = Interpreter.default if rule is None else rule.function
        results = apply(self, eqn, operands)
        results = list(results) if eqn.primitive.multiple_results else [results]
        # What a call made inside was seen there.
        if rule is None or rule.category != "call":
            made = known_atoms(results) - known_atoms(operands)
            self.settings.see(eqn.primitive.name, None, made)
        return results


def rescaled(data: Any, dtype: Any) -> Value:
    """Wraps the result of a default rule: real data is brought near RMS 1, by a power of two."""
    from_jax = hasattr(data, "dtype")
    if not from_jax or not is_float(data) or _is_reference(data):
        return Value(data)
    if jnp.issubdtype(data.dtype, jnp.complexfloating) or not data.size:
        return Value(data, LazyScale(), dtype=dtype, doubt=UNKNOWN)
    return dynamic(data, dtype)


def _is_reference(data: Any) -> bool:
    """Whether data is a `jax.new_ref`, which holds plain values."""
    return hasattr(jax.typeof(data), "inner_aval")


def dynamic(data: Any, dtype: Any) -> Value:
    """Scales wide data by the power of two nearest its RMS, read from the data at run time.

    It is rounded where a chain ends: parts of different size, as the two factors of `lu`, that the
    next primitive takes apart, are not lost beside each other.
    """
    return measured(Value(data, LazyScale(), 0.0, dtype))


def source_of(eqn: JaxprEqn) -> str | None:
    """Returns where the user's code made an equation, as ``file:line (function)``, if known."""
    traceback = eqn.source_info.traceback
    own = (sys.modules["jax"].__path__[0], __file__.rsplit("/", 1)[0])
    for frame in traceback.frames if traceback is not None else ():
        if not frame.file_name.startswith(own):
            return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"
    return None
