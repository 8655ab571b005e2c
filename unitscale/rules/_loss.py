"""Factors of the losses.

A loss ends the graph, so its gradient may be scaled freely: every parameter's gradient changes by
the same constant. The value is left alone, because people read it.
"""

from __future__ import annotations

import math

from ._checks import positive_number, positive_sizes
from ._factors import Factors


def softmax_cross_entropy(vocab: int, *, mult: float = 1.0) -> Factors:
    """Return the factors of the softmax cross entropy of `mult * logits`.

    Scaling:
        Forward 1: the value is the ordinary loss. The gradient of one example's loss is `mult * (p
        - y)`; for uniform `p` its mean square is `mult^2 (V - 1) / V^2`, so the backward factor is
        `V / ((V - 1)^1/2 * mult)`. Assumes logits that are small at initialisation, as `readout`
        makes them, and that the op keeps the `1 / N` of a mean over examples out of the backward.

    Args:
        vocab: Number of classes V, at least 2.
        mult: Multiplier of the logits (inverse temperature).

    Returns:
        Factors with `bwd = (logits,)`.

    Raises:
        TypeError: If vocab is not a static integer.
        ValueError: If vocab is less than 2, or mult is not positive.

    Example:
        >>> softmax_cross_entropy(2).bwd
        (2.0,)

    References:
        Unit Scaling: Blake, Orr, Luschi, ICML 2023, arXiv 2303.11257, softmax cross entropy.
        u-muP: Blake et al., 2024, arXiv 2407.17465, the multiplier of the loss softmax.
    """
    positive_sizes("softmax_cross_entropy", {"vocab": vocab})
    mult = positive_number("softmax_cross_entropy", "mult", mult)
    if vocab < 2:
        raise ValueError(
            "unitscale.rules.softmax_cross_entropy: vocab must be at least 2; got "
            f"{vocab}. The loss of a single class is always zero."
        )
    return Factors(1.0, (vocab / math.sqrt(vocab - 1) / mult,))


def mse_loss() -> Factors:
    """Return the factors of the mean squared error.

    Scaling:
        Forward 1. The gradient of one squared error is `2 (pred - target)`; the difference of two
        independent unit values has variance 2, so its RMS is `8^1/2` and both backward factors are
        `8^-1/2`. Assumes that the op keeps the `1 / N` of the mean out of the backward.

    Returns:
        Factors with `bwd = (pred, target)`.

    Example:
        >>> mse_loss().fwd
        1.0

    References:
        Unit Scaling: Blake, Orr, Luschi, ICML 2023, arXiv 2303.11257, the unit-variance rule.
    """
    return Factors(1.0, (1 / math.sqrt(8),) * 2)
