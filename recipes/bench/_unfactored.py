"""The same program with every factor set to 1, which ops then leave out."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from unitscale import rules


@contextmanager
def unfactored() -> Iterator[None]:
    """Within the block, what is traced has no factors: the rules return 1 for each of them.

    `rules.logit_factor` stays: dividing logits is part of attention, scaled or not.
    """
    with ExitStack() as stack:
        for name, rule in vars(rules).items():
            if _is_rule(rule):
                stack.enter_context(mock.patch.object(rules, name, _ones(name, rule)))
        yield


def _is_rule(value: Any) -> bool:
    own = getattr(value, "__module__", "").startswith(rules.__name__)
    return callable(value) and own and not isinstance(value, type)


def _ones(name: str, rule: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(rule)
    def call(*args, **kwargs):
        result = rule(*args, **kwargs)
        if isinstance(result, rules.Factors):
            return rules.Factors(1.0, (1.0,) * len(result.bwd))
        if isinstance(result, rules.Simulation):
            ones = rules.Factors(1.0, (1.0,) * len(result.factors.bwd))
            return dataclasses.replace(result, factors=ones)
        if isinstance(result, rules.ResidualFactors):
            return rules.ResidualFactors(branch=1.0, skip=1.0)
        if name == "normalized_weights":
            return (1.0,) * len(result)
        return result

    return call
