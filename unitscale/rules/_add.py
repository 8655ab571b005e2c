"""Factors of sums.

Adding two independent unit values doubles the variance. An operand that the sum broadcasts gets the
summed cotangents of all its copies, which is where the ideal factors of its two sides differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ._checks import positive_sizes, real_number
from ._constraints import Constraint, constrain
from ._factors import Factors


def add(
    *,
    left_repeats: int = 1,
    right_repeats: int = 1,
    constraint: Constraint = "to_output_scale",
) -> Factors:
    """Return the factors of `left + right`.

    Scaling:
        Forward `2^-1/2`. Before the constraint, a gradient has `repeats^-1/2`, as it sums that many
        cotangents: 1 for an operand that is not broadcast. The constraint binds both operands,
        because a broadcast one need not be a cut edge, as in `x + mean(x)`. Where it is one, such
        as a table of positions, None makes its gradient unit.

    Args:
        left_repeats: Number of output elements that each left element is copied to.
        right_repeats: Number of output elements that each right element is copied to.
        constraint: How output, left and right come to share a factor.

    Returns:
        Factors with `bwd = (left, right)`.

    Raises:
        TypeError: If a number of repeats is not a static integer.
        ValueError: If it is not positive, or the constraint does not fit two operands.

    Example:
        >>> add(right_repeats=4, constraint=None).bwd
        (1.0, 0.5)

    References:
        Unit Scaling: Blake, Orr, Luschi, ICML 2023, arXiv 2303.11257, weighted addition.
    """
    positive_sizes("add", {"left_repeats": left_repeats, "right_repeats": right_repeats})
    output, left, right = constrain(
        constraint, math.sqrt(0.5), 1 / math.sqrt(left_repeats), 1 / math.sqrt(right_repeats)
    )
    return Factors(output, (left, right))


def weighted_add(weights: Sequence[float]) -> Factors:
    """Return the factors of `sum(w * x)`.

    Scaling:
        Forward and backward `1 / norm(weights)`. The backward is the true derivative: the cotangent
        of operand `i` is multiplied by its weight and by this factor, that is by
        `normalized_weights(weights)[i]`. Assumes independent unit operands.

    Args:
        weights: One static real weight per operand; signs and single zeros are allowed.

    Returns:
        Factors with one (equal) backward factor per operand.

    Raises:
        TypeError: If a weight is not a static real number.
        ValueError: If there is no weight, if all are zero, or if one is not finite.

    Example:
        >>> weighted_add((3.0, 4.0))
        Factors(fwd=0.2, bwd=(0.2, 0.2))

    References:
        Unit Scaling: Blake, Orr, Luschi, ICML 2023, arXiv 2303.11257, weighted addition.
    """
    weights = tuple(real_number("weighted_add", f"weights[{i}]", w) for i, w in enumerate(weights))
    size = math.hypot(*weights)
    if not (math.isfinite(size) and size > 0):
        raise ValueError(
            f"unitscale.rules.weighted_add: weights must be finite and not all zero; got {weights}."
        )
    return Factors(1 / size, (1 / size,) * len(weights))


def normalized_weights(weights: Sequence[float]) -> tuple[float, ...]:
    """Return the weights divided by their norm, so that the weighted sum of unit values is unit.

    Args:
        weights: One static real weight per operand.

    Returns:
        `w_i / norm(weights)` for each, whose squares sum to 1.

    Raises:
        TypeError: If a weight is not a static real number.
        ValueError: If there is no weight, if all are zero, or if one is not finite.

    Example:
        >>> tuple(round(w, 12) for w in normalized_weights((3.0, -4.0)))
        (0.6, -0.8)

    References:
        Unit Scaling: Blake, Orr, Luschi, ICML 2023, arXiv 2303.11257, weighted addition.
    """
    factor = weighted_add(weights).fwd
    return tuple(float(weight) * factor for weight in weights)
