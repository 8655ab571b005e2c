"""Factors of the norm layers.

A norm layer makes its output unit by itself; only the sums in the gradients of gain and bias need a
factor.
"""

from __future__ import annotations

import math

from ._checks import positive_sizes
from ._factors import Factors


def norm(features: int, size: int) -> Factors:
    """Return the factors of a norm: of layers, by RMS, of groups, of batches.

    Scaling:
        Forward 1, input gradient 1. Gain and bias are cut edges whose gradients sum over the
        `size / features` rows: `(features / size)^1/2`. Assumes unit inputs, a unit gain, and
        cotangents independent of the input; the input gradient's RMS is then 1 up to order one
        over the number of elements that are normalized together.

    Args:
        features: Size of the last axis, which gain and bias have.
        size: Number of elements of the input.

    Returns:
        Factors with `bwd = (x, gain, bias)`.

    Raises:
        TypeError: If a size is not a static integer.
        ValueError: If a size is not positive, or `size` is not a multiple of `features`.

    Example:
        >>> norm(64, 1024)
        Factors(fwd=1.0, bwd=(1.0, 0.25, 0.25))

    References:
        Unit Scaling: Blake, Orr, Luschi, ICML 2023, arXiv 2303.11257, the rule for cut edges.
    """
    positive_sizes("norm", {"features": features, "size": size})
    if size % features:
        raise ValueError(
            "unitscale.rules.norm: size must be a multiple of features; got "
            f"size={size}, features={features}. Pass the input's total number of elements."
        )
    weight = math.sqrt(features / size)
    return Factors(1.0, (1.0, weight, weight))
