"""How far data is expected to grow in a primitive: the static choice of scales."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, TypeAlias

Growth: TypeAlias = Callable[[str, int], float]
StaticScaling: TypeAlias = str | Callable[[str, int], float]
"""A name in `STRATEGIES`, or the growth by primitive and number of terms: see `growth_of`."""


ScaleRounding = Literal["carried", "nearest", "down", "up"]
"""How the growth of one primitive becomes a power of two; see `growth_of`."""

_ROUND: dict[str, Callable[[float], float]] = {
    "carried": lambda steps: steps,
    "nearest": round,
    "down": math.floor,
    "up": math.ceil,
}


def _unit(primitive: str, terms: int) -> float:
    return math.sqrt(terms)


def _identity(primitive: str, terms: int) -> float:
    return 1.0


STRATEGIES: dict[str, Callable[[str, int], float]] = {"unit": _unit, "identity": _identity}
"""The static strategies that have a name; see `growth_of`."""


def growth_of(strategy: StaticScaling, rounding: ScaleRounding = "carried") -> Growth:
    """Returns the strategy as a function that gives log2 of the growth.

    Scaling:
        The data of a sum of n terms grows by sqrt(n) if they are independent ("unit"); "identity"
        expects no growth, so that scales only multiply. The accumulated growth is divided out of
        data, rounded to the nearest power of two (in log2), and what rounding leaves is "carried"
        along, so that it does not add up in a chain. The other roundings make a power of two of the
        growth of every primitive by itself ("nearest", "down", "up"), and nothing is left.

    Args:
        strategy: "unit", "identity", or a function of the primitive's name and the number of terms
            that it sums, returning the expected growth of RMS.
        rounding: "carried", "nearest", "down" or "up".

    Returns:
        The function of the same arguments, in powers of two.

    Raises:
        ValueError: if a name is not registered, or the function returns no positive number.
        TypeError: if the strategy is neither a name nor a function.

    Example:
        >>> growth_of("unit")("dot_general", 64), growth_of("unit", "down")("dot_general", 48)
        (3.0, 2)

    References:
        Balanca et al., "Scalify", 2024, arXiv 2407.17353, table 1.
    """
    if rounding not in _ROUND:
        raise ValueError(
            f"unitscale.scalify: scale_rounding must be one of {', '.join(_ROUND)}; got "
            f"{rounding!r}"
        )
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
        return _ROUND[rounding](math.log2(result))

    return growth
