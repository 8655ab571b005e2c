"""Factors of pooling: the mean and the maximum over windows, channels last."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

from ._checks import positive_sizes
from ._constraints import Constraint, constrain
from ._elementwise import quadrature
from ._factors import Factors


def avg_pool(
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    *,
    constraint: Constraint = "to_output_scale",
) -> Factors:
    """Return the factors of the mean over windows.

    Scaling:
        Forward `n^1/2` with `n = prod(window)`, as the mean of n independent unit values has RMS
        `n^-1/2`. An entry lies in `n / prod(strides)` windows on average and gets `1 / n` of each
        one's cotangent: before the constraint its gradient has `(n * prod(strides))^1/2`. Assumes
        interior windows: padding, which leaves fewer terms near the border, is not counted.

    Args:
        window_shape: Size of the window in each spatial dimension.
        strides: Step from window to window in each dimension; by default 1.
        constraint: How the output and the input gradient come to share a factor.

    Returns:
        Factors with `bwd = (x,)`.

    Raises:
        TypeError: If a size is not a static integer.
        ValueError: If a size is not positive, or window and strides differ in length.

    Example:
        >>> avg_pool((2, 2), (2, 2), constraint=None)
        Factors(fwd=2.0, bwd=(4.0,))

    References:
        Unit Scaling: Blake, Orr, Luschi, ICML 2023, arXiv 2303.11257, the unit-variance rule.
    """
    entries, step = _sizes("avg_pool", window_shape, strides)
    output, x = constrain(constraint, math.sqrt(entries), math.sqrt(entries * step))
    return Factors(output, (x,))


def max_pool(
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    *,
    constraint: Constraint = "to_output_scale",
) -> Factors:
    """Return the factors of the maximum over windows.

    Scaling:
        Forward `1 / std` of the largest of `n = prod(window)` independent unit normal values, whose
        density is `n phi(x) Phi(x)^(n-1)`; its mean is not removed. Every window's cotangent goes
        to one entry, so before the constraint the input gradient has `prod(strides)^1/2`. Assumes
        interior windows. Arguments, result and errors are those of `avg_pool`.

    Example:
        >>> round(max_pool((2, 1)).fwd, 3)  # the variance is 1 - 1 / pi
        1.211

    References:
        Unit Scaling: Blake, Orr, Luschi, ICML 2023, arXiv 2303.11257, factors of activations;
        David, Nagaraja, "Order Statistics", 2003, equation 2.1.6 (density of the maximum).
    """
    entries, step = _sizes("max_pool", window_shape, strides)
    output, x = constrain(constraint, 1 / _std_of_maximum(entries), math.sqrt(step))
    return Factors(output, (x,))


@functools.lru_cache(maxsize=256)
def _std_of_maximum(n: int) -> float:
    """Return the standard deviation of the maximum of n independent unit normal values."""
    nodes, weights = quadrature()
    above = np.array([math.erfc(x / math.sqrt(2)) / 2 for x in nodes])
    # P(all others are below), in logarithms: above is tiny where the maximum of many values lies.
    with np.errstate(divide="ignore"):
        density = n * weights * np.exp((n - 1) * np.log1p(-above)) if n > 1 else weights
    mean = density @ nodes
    return math.sqrt(density @ (nodes - mean) ** 2)


def _sizes(rule: str, window: Sequence[int], strides: Sequence[int] | None) -> tuple[int, int]:
    window = tuple(window)
    strides = (1,) * len(window) if strides is None else tuple(strides)
    if len(strides) != len(window):
        raise ValueError(
            f"unitscale.rules.{rule}: strides must have one entry for each of window_shape; got "
            f"window_shape {window}, strides {strides}."
        )
    positive_sizes(rule, {f"window_shape[{i}]": size for i, size in enumerate(window)})
    positive_sizes(rule, {f"strides[{i}]": size for i, size in enumerate(strides)})
    return math.prod(window), math.prod(strides)
