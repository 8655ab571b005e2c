"""Factors of softmax.

A softmax over n entries gives values near `1 / n` with a spread near `1 / n`: the op that shrinks
its input the most, and so the first to underflow in 8 bits.
"""

from __future__ import annotations

import math

from ._checks import positive_number, positive_sizes
from ._constraints import Constraint, constrain
from ._factors import Factors
from ._softmax_moments import softmax_moments

_LINEAR = 1e-3


def softmax(
    axis_size: int,
    *,
    mult: float = 1.0,
    constraint: Constraint = "to_output_scale",
) -> Factors:
    """Return the factors of `softmax(mult * x)`.

    Scaling:
        Forward `1 / std(p)`: the mean of p is exactly `1 / n`, so `var(p) = E[sum p^2] / n - 1 /
        n^2`. Backward `1 / RMS(dx)` before the constraint: `dx = mult * p * (g - sum(p g))`, so for
        unit g its mean square is `mult^2 / n * E[sum p^2 - 2 p^3 + (sum p^2)^2]`. The expectations
        over independent unit normal logits are computed exactly. For large n they tend to `n /
        (e^(mult^2) - 1)^1/2` and `n e^(-mult^2 / 2) / mult`; for large mult, where p tends to
        one-hot, the forward factor tends to `n / (n - 1)^1/2`. A softmax over a single entry is the
        constant 1 and passes no gradient; its factors are 1.

    Args:
        axis_size: Number n of entries along the axis.
        mult: Multiplier of the logits (inverse temperature).
        constraint: How the output and the input gradient come to share a factor.

    Returns:
        Factors with `bwd = (x,)`.

    Raises:
        TypeError: If the size is not a static integer.
        ValueError: If the size or mult is not positive, or the constraint does not fit one operand.

    Example:
        >>> round(softmax(4096).fwd / 4096, 3)
        0.764

    References:
        Unit Scaling: Blake, Orr, Luschi, ICML 2023, arXiv 2303.11257, scaling factors of softmax.
    """
    positive_sizes("softmax", {"axis_size": axis_size})
    mult = positive_number("softmax", "mult", mult)
    if axis_size == 1:
        output, x = constrain(constraint, 1.0, 1.0)
        return Factors(output, (x,))
    moments = softmax_moments(int(axis_size), mult)
    if mult < _LINEAR:
        # The difference below would cancel; here p is linear in x to within mult^2.
        std = mult * math.sqrt(axis_size - 1) / axis_size**1.5
    else:
        std = math.sqrt((moments.square - 1 / axis_size) / axis_size)
    slope = mult * math.sqrt(moments.gradient / axis_size)
    output, x = constrain(constraint, 1 / std, 1 / slope)
    return Factors(output, (x,))
