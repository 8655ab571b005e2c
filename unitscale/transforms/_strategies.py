"""How far data is expected to grow in a primitive: the static choice of scales."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

Growth: TypeAlias = Callable[[str, int], float]
Strategy: TypeAlias = str | Callable[[str, int], float]


def _unit(primitive: str, terms: int) -> float:
    return math.sqrt(terms)


def _identity(primitive: str, terms: int) -> float:
    return 1.0


STRATEGIES: dict[str, Callable[[str, int], float]] = {"unit": _unit, "identity": _identity}


def growth_of(strategy: Strategy) -> Growth:
    """Returns the strategy as a function that gives log2 of the growth.

    Scaling:
        The data of a sum of n terms grows by sqrt(n) if they are independent ("unit"); "identity"
        expects no growth, so that scales only multiply. The accumulated growth is divided out of
        data, rounded to a power of two.

    Args:
        strategy: "unit", "identity", or a function of the primitive's name and the number of terms
            that it sums, returning the expected growth of RMS.

    Returns:
        The function of the same arguments, in powers of two.

    Raises:
        ValueError: if the name is not registered, or the function returns no positive number.
        TypeError: if the strategy is neither a name nor a function.

    Example:
        >>> growth_of("unit")("dot_general", 64)
        3.0

    References:
        Balanca et al., "Scalify", 2024, arXiv 2407.17353, table 1.
    """
    if isinstance(strategy, str):
        if strategy not in STRATEGIES:
            raise ValueError(
                f"unitscale.scalify: static_scaling must be one of {', '.join(STRATEGIES)} or a "
                f"function of (primitive, terms); got {strategy!r}"
            )
        function = STRATEGIES[strategy]
    elif callable(strategy):
        function = strategy
    else:
        raise TypeError(
            f"unitscale.scalify: static_scaling must be one of {', '.join(STRATEGIES)} or a "
            f"function of (primitive, terms); got {type(strategy).__name__}"
        )

    def growth(primitive: str, terms: int) -> float:
        if terms <= 1:
            return 0.0
        result = function(primitive, terms)
        if not (isinstance(result, (int, float)) and 0 < result < math.inf):
            raise ValueError(
                "unitscale.scalify: static_scaling must return a positive finite number; got "
                f"{result!r} for {primitive} over {terms} terms"
            )
        return math.log2(result)

    return growth
