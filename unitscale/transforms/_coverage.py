"""The table of all primitives and their rules, and the page that shows it."""

from __future__ import annotations

import jax

from ._registry import rules


def coverage() -> str:
    """Returns the table of primitives and their rules, as Markdown.

    One line per rule of the library, with the primitives that it serves, sorted by category.

    Example:
        >>> print(coverage().splitlines()[0])
        | category | rule | primitives |
    """
    groups: dict[tuple[str, str], list[str]] = {}
    own = [r for r in rules() if r.function.__module__.startswith("unitscale.")]
    for rule in sorted(own, key=lambda r: (r.category, _summary(r.function), r.name)):
        groups.setdefault((rule.category, _summary(rule.function)), []).append(f"`{rule.name}`")
    lines = ["| category | rule | primitives |", "| --- | --- | --- |"]
    lines += [f"| {c} | {s} | {', '.join(names)} |" for (c, s), names in groups.items()]
    return "\n".join(lines)


def _summary(function: object) -> str:
    return (function.__doc__ or "").strip().partition("\n")[0]


def coverage_page() -> str:
    """Returns `coverage` as a page of its own, which names the version of JAX it was made with.

    Example:
        >>> print(coverage_page().splitlines()[0])
        # What scalify does with each primitive
    """
    return f"""# What scalify does with each primitive

Made by `python -m unitscale.transforms` with JAX {jax.__version__}: every primitive that this JAX
can differentiate, and those that only pass through. A primitive that is not listed takes the
default rule: its operands are taken out of their scales, it is applied, and its results are
rescaled. Names that this JAX does not have are those of other versions.
`scalify(f).report(*args)` lists the lines of a program that take the default rule.

{coverage()}
"""
