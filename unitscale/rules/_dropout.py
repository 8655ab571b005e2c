"""Factors of dropout.

Dropout keeps the mean and raises the variance; unit scaling takes the variance back.
"""

from __future__ import annotations

import math

from ._checks import real_number
from ._factors import Factors


def dropout(rate: float) -> Factors:
    """Return the factors of dropout relative to the usual inverse scaling.

    Scaling:
        Inverse-scaled dropout, `x * mask / (1 - rate)`, has mean square `1 / (1 - rate)` for unit
        `x`. Both factors are therefore `(1 - rate)^1/2`, multiplied in *on top of* the `1 / (1 -
        rate)`, so that the whole op is `x * mask * (1 - rate)^-1/2` and its gradient is the true
        one.

    Args:
        rate: Probability of zeroing an element, in [0, 1).

    Returns:
        Factors with `bwd = (x,)`.

    Raises:
        TypeError: If the rate is not a static real number.
        ValueError: If the rate is outside [0, 1).

    Example:
        >>> dropout(0.75)
        Factors(fwd=0.5, bwd=(0.5,))

    References:
        Unit Scaling: Blake, Orr, Luschi, ICML 2023, arXiv 2303.11257, the unit-variance rule.
    """
    rate = real_number("dropout", "rate", rate)
    if not 0 <= rate < 1:
        raise ValueError(
            f"unitscale.rules.dropout: rate must be in [0, 1); got {rate}. "
            "It is the probability of dropping, not of keeping."
        )
    factor = math.sqrt(1 - rate)
    return Factors(factor, (factor,))
