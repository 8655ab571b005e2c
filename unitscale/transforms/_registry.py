"""Which rule each primitive has: registration, look-up, and the table of all rules.

Rules are registered by primitive object. A primitive that JAX exports under no public name is
registered by its name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from jax import lax
from jax.extend.core import Primitive, primitives as exported
from jax.interpreters import ad

Function = Callable[..., Any]


@dataclass(frozen=True)
class Rule:
    """How one primitive acts on scaled values; see `register`."""

    name: str
    category: str
    function: Function


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
