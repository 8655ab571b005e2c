"""Factors of dot-product attention.

Attention averages values with softmax weights, so its output shrinks with the number of keys it
attends to, and under a causal mask by a different amount at every position. One static factor
serves all positions: the one that makes the mean square over the whole sequence 1.
"""

from __future__ import annotations

import math

from ._checks import positive_number, positive_sizes
from ._constraints import Constraint, constrain
from ._dropout import dropout
from ._factors import Factors
from ._softmax_moments import causal_softmax_moments, softmax_moments


def logit_factor(head_dim: int, mult: float = 1.0) -> float:
    """Return the factor on `q . k`: `mult / head_dim`.

    Scaling:
        `1 / d` in place of `d^-1/2` keeps logits bounded when q and k correlate in training. For
        independent unit q and k the logits have standard deviation `mult * d^-1/2`.

    Args:
        head_dim: Size d of a head.
        mult: Multiplier of the logits.

    Returns:
        The static factor.

    Raises:
        TypeError: If head_dim is not a static integer.
        ValueError: If head_dim or mult is not positive.

    Example:
        >>> logit_factor(64, 2.0)
        0.03125

    References:
        u-muP: Blake et al., 2024, arXiv 2407.17465, attention logits.
    """
    positive_sizes("logit_factor", {"head_dim": head_dim})
    return positive_number("logit_factor", "mult", mult) / head_dim


def dot_product_attention(
    head_dim: int,
    key_length: int,
    *,
    is_causal: bool,
    mult: float = 1.0,
    dropout_rate: float = 0.0,
    mean_square: float | None = None,
    constraint: Constraint = "to_output_scale",
) -> Factors:
    """Return the factors of `dropout(softmax(mult / d * q @ k.T)) @ v`.

    Scaling:
        For unit q, k and v the logits are normal of standard deviation `mult * d^-1/2`, and the
        output's mean square is `E[sum p^2]` over the keys a query sees: `key_length` of them, or,
        when causal, the average over 1, 2, ..., key_length. Forward is its inverse root, times `(1
        - dropout_rate)^1/2`. Before the constraint v has the forward factor, and q and k `1 / RMS`
        of the softmax's gradient times the logits' spread. Assumes as many queries as keys, and no
        mask besides the causal one. With a single key no gradient reaches q and k, whose factor is
        then the forward one.

    Args:
        head_dim: Size d of a head.
        key_length: Number of keys.
        is_causal: Whether query t sees only keys 1..t.
        mult: Multiplier of the logits.
        dropout_rate: Rate of (inverse-scaled) dropout on the attention weights.
        mean_square: Mean square of the output before factor and dropout, where the values at
            different positions are not independent: see `AttentionContext`.
        constraint: How output, q, k and v come to share a factor: an operand-specific one does not
            fit.

    Returns:
        Factors with `bwd = (q, k, v)`.

    Raises:
        TypeError: If a size is not a static integer.
        ValueError: If a size, mult or the rate is out of range, or the constraint does not fit
            three operands.

    Example:
        >>> round(dot_product_attention(64, 256, is_causal=False).fwd, 1)
        15.9

    References:
        u-muP: Blake et al., 2024, arXiv 2407.17465, unit-scaled dot-product attention,
        whose empirical fit in log(sequence length) is replaced here by the exact expectation.
    """
    positive_sizes("dot_product_attention", {"head_dim": head_dim, "key_length": key_length})
    spread = positive_number("dot_product_attention", "mult", mult) / math.sqrt(head_dim)
    keep = dropout(dropout_rate).fwd
    moments = (causal_softmax_moments if is_causal else softmax_moments)(int(key_length), spread)
    if mean_square is None:
        mean_square = moments.square
    values = keep / math.sqrt(positive_number("dot_product_attention", "mean_square", mean_square))
    slope = spread * math.sqrt(moments.gradient)
    logits = keep / slope if slope else values
    output, q, k, v = constrain(constraint, values, logits, logits, values)
    return Factors(output, (q, k, v))
