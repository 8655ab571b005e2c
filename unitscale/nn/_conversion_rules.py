"""Formats and strategies by name, and which layers a rule names."""

import difflib
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeAlias, TypeVar

from ..quant import Block, Delayed, Dynamic, MatmulConfig, Static

# Gradients of a model that is not unit scaled need the range of E5M2.
CONVERSIONS: Mapping[str, MatmulConfig] = {
    "fp8_unit": MatmulConfig(cotangent="float8_e5m2"),
    "fp8_dynamic": MatmulConfig(cotangent="float8_e5m2", strategy=Dynamic()),
    "fp8_delayed": MatmulConfig(cotangent="float8_e5m2", strategy=Delayed()),
    "fp8_static": MatmulConfig(cotangent="float8_e5m2", strategy=Static()),
    "mxfp8": MatmulConfig(strategy=Block()),
}
"""The configs that `convert` accepts by name."""

# What to say of a model without a layer that an owner of rules looks for.
_NONE = {
    "convert": "the model has no layers of plain Flax with products of matrices. What is of "
    "unitscale.nn takes its formats from policy=, or from nn.set_policies",
    "set_policies": "the model has no layers of unitscale.nn. nn.convert gives formats to those of "
    "plain Flax",
}

ConfigLike: TypeAlias = MatmulConfig | str
"""A config, or the name of a preset: see `convert`."""

Value = TypeVar("Value")


def as_config(config: ConfigLike, owner: str = "convert") -> MatmulConfig:
    """Returns a MatmulConfig from itself or from the name of a preset.

    Raises:
        ValueError: if the preset is unknown.
        TypeError: if it is neither a MatmulConfig nor a name.

    Example:
        >>> as_config("fp8_dynamic").strategy
        Dynamic(granularity='tensor', margin=0)
    """
    if isinstance(config, MatmulConfig):
        return config
    if not isinstance(config, str):
        raise TypeError(
            f"unitscale.nn.{owner}: a rule must give a MatmulConfig, the name of a preset or "
            f"None; got {config!r}"
        )
    if config not in CONVERSIONS:
        near = difflib.get_close_matches(config, CONVERSIONS, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        if config == "fp8":  # a policy
            hint = " Values of a plain model are not near RMS 1: fp8_dynamic measures them."
        raise ValueError(
            f"unitscale.nn.{owner}: a preset must be one of {', '.join(CONVERSIONS)}; got "
            f"{config!r}.{hint}"
        )
    return CONVERSIONS[config]


def _likeness(pattern: str, path: str) -> float:
    """How well the names in a pattern fit those in a path."""
    names = [name for name in re.split(r"[.*?]+", pattern) if name]
    return sum(
        max(difflib.SequenceMatcher(None, name, part).ratio() for part in path.split("."))
        for name in names
    )


def assign(
    rules: Mapping[str, Value], paths: Iterable[str], owner: str
) -> dict[str, tuple[str, Value]]:
    """Returns for each path the first rule whose pattern matches it, and what the rule gives.

    Raises:
        ValueError: if a rule matches no path, or only paths that an earlier rule has taken.

    Example:
        >>> assign({"mlp.*": 1, "*": 2}, ["mlp.up", "head"], "convert")
        {'mlp.up': ('mlp.*', 1), 'head': ('*', 2)}
    """
    paths = list(paths)
    found = {}
    for path in paths:
        rule = next((pattern for pattern in rules if fnmatchcase(path, pattern)), None)
        if rule is not None:
            found[path] = (rule, rules[rule])
    used = {rule for rule, _ in found.values()}
    for pattern in rules:
        if pattern in used:
            continue
        taken = [path for path in paths if fnmatchcase(path, pattern)]
        if taken:
            raise ValueError(
                f"unitscale.nn.{owner}: an earlier rule has every layer that {pattern!r} "
                f"matches, such as {taken[0]} ({found[taken[0]][0]!r}). The first rule that "
                "matches counts: put it earlier?"
            )
        near = sorted(paths, key=lambda path: -_likeness(pattern, path))[:3]
        raise ValueError(
            f"unitscale.nn.{owner}: no layer matches {pattern!r}; "
            + (f"nearest are {', '.join(near)}" if near else _NONE.get(owner, "there are none"))
        )
    return found


def check_rules(rules: Any, owner: str) -> Mapping[str, Any]:
    """Returns rules as a mapping; a config or a preset alone stands for every layer.

    Raises:
        TypeError: if they are neither these nor pairs, or a pattern is not text.
    """
    if isinstance(rules, MatmulConfig | str):
        return {"*": rules}
    if isinstance(rules, list | tuple) and all(
        isinstance(pair, list | tuple) and len(pair) == 2 for pair in rules
    ):
        rules = dict(rules)
    if not isinstance(rules, Mapping) or not all(isinstance(key, str) for key in rules):
        raise TypeError(
            f"unitscale.nn.{owner}: rules must map patterns of dotted paths, such as "
            f"'layers.*.mlp.*', to configs; got {rules!r}"
        )
    return rules
