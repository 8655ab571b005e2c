"""Submodules of a model by dotted path, and rules that assign values to paths."""

import difflib
import sys
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from flax import nnx

Value = TypeVar("Value")


def nodes_of(node: Any, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield every module and container of a model once, with its dotted path, sorted by name."""
    seen = set() if seen is None else seen
    if id(node) in seen:
        return
    seen.add(id(node))
    yield path, node
    for name, child in children_of(node):
        yield from nodes_of(child, join(path, name), seen)


def join(path: str, name: Any) -> str:
    """Return the dotted path of a child."""
    return f"{path}.{name}" if path else str(name)


def children_of(node: Any) -> list[tuple[Any, Any]]:
    """Return the children of a module, mapping or sequence, sorted by name."""
    if isinstance(node, nnx.Pytree):
        children = [(k, v) for k, v in vars(node).items() if not k.startswith("_pytree__")]
    elif isinstance(node, Mapping):
        children = list(node.items())
    elif isinstance(node, list | tuple):
        children = list(enumerate(node))
    else:
        children = []
    # Splitting and merging a module changes the order of its attributes.
    return sorted(children, key=_natural)


def _natural(child: tuple[Any, Any]) -> tuple[int, str]:
    """Sort numbers by value, before names."""
    name = str(child[0])
    return (int(name), "") if name.isdecimal() else (sys.maxsize, name)


def assign(
    rules: Mapping[str, Value], paths: Iterable[str], owner: str, none: str = "there are none"
) -> dict[str, tuple[str, Value]]:
    """Return the first rule whose pattern matches each path, and the value of that rule.

    ``none`` says in the error why a model has no paths at all.

    Raises:
        ValueError: if a rule matches no path, or only paths that an earlier rule has taken.
    """
    paths = list(paths)
    found = {}
    for path in paths:
        rule = next((pattern for pattern in rules if fnmatchcase(path, pattern)), None)
        if rule is not None:
            found[path] = (rule, rules[rule])
    used = {rule for rule, _ in found.values()}
    for pattern in (rule for rule in rules if rule not in used):
        taken = [path for path in paths if fnmatchcase(path, pattern)]
        if taken:
            raise ValueError(
                f"unitscale.nn.{owner}: every layer that {pattern!r} matches is taken by an "
                f"earlier rule, such as {taken[0]} by {found[taken[0]][0]!r}. The first rule that "
                "matches a layer counts: move this one up?"
            )
        near = difflib.get_close_matches(pattern.strip("*."), paths, 3, cutoff=0.0)
        raise ValueError(
            f"unitscale.nn.{owner}: no layer matches {pattern!r}; "
            + (f"nearest are {', '.join(near)}" if near else none)
        )
    return found


def table(rows: list[tuple[str, ...]]) -> list[str]:
    """Return the lines of a table with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
