"""Argument checks shared by the rules.

Every rule divides by a size or by the root of one, so a zero or a traced dimension must be refused
here, with the name of the rule and of the argument, and not surface as an infinite factor three
layers up.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import SupportsFloat, SupportsIndex, cast


def positive_sizes(rule: str, sizes: Mapping[str, object]) -> None:
    """Check that every named size is a positive static integer.

    Args:
        rule: Name of the calling rule, used in messages.
        sizes: Argument names and their values.

    Raises:
        TypeError: If a size is not an integer known at trace time.
        ValueError: If a size is zero or negative.
    """
    for name, size in sizes.items():
        try:
            value = operator.index(cast(SupportsIndex, size))
        except TypeError as error:
            raise TypeError(
                f"unitscale.rules.{rule}: {name} must be a static integer; got {size!r} of type "
                f"{type(size).__name__}. Take sizes from .shape, not from array values; where a "
                "batch is symbolic, as in jax.export, trace within unitscale.batch_size(n): n "
                "counts in gradients alone."
            ) from error
        if value < 1:
            raise ValueError(
                f"unitscale.rules.{rule}: {name} must be at least 1; got {value}. "
                "A factor is undefined for an empty dimension."
            )


def positive_number(rule: str, name: str, value: object) -> float:
    """Check that a number is static, positive and finite, and return it as a float.

    Args:
        rule: Name of the calling rule, used in messages.
        name: Name of the argument.
        value: The number.

    Returns:
        The number as a Python float.

    Raises:
        TypeError: If it is not a real number.
        ValueError: If it is zero, negative, infinite or not a number.
    """
    number = real_number(rule, name, value)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(
            f"unitscale.rules.{rule}: {name} must be positive and finite; got {value!r}."
        )
    return number


def real_number(rule: str, name: str, value: object) -> float:
    """Return a static real number as a float.

    Args:
        rule: Name of the calling rule, used in messages.
        name: Name of the argument.
        value: The number.

    Returns:
        The number as a Python float.

    Raises:
        TypeError: If it is not a real number known at trace time.
    """
    try:
        return float(cast(SupportsFloat, value))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"unitscale.rules.{rule}: {name} must be a static real number; got "
            f"{type(value).__name__}. Factors are fixed at trace time, so a traced "
            "array cannot set one."
        ) from error
