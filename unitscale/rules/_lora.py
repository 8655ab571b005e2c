"""Factors of a low-rank update beside a dense layer."""

from __future__ import annotations

import math

from ._checks import positive_sizes
from ._constraints import Constraint
from ._factors import Factors
from ._linear import dense


def lora(
    in_features: int,
    rank: int,
    out_features: int,
    batch: int,
    *,
    constraint: Constraint = "to_output_scale",
) -> tuple[Factors, Factors]:
    """Return the factors of the two products of `x @ a @ b`, beside a dense layer's `x @ kernel`.

    Scaling:
        Forward that of `dense`, then `rank^-1/2`. The gradient of what lies between the products
        has `out^-1/2`, so that it is unit and with it the gradient of `a`; what this differs from
        the forward factor is taken back in the gradient of `x`, which has the factor of `dense`
        times `rank^-1/2` in all: the input is no cut edge, the dense layer reads it too. Gradients
        of `a` and `b` have `batch^-1/2`. Assumes independent unit inputs, weights and cotangents.

    Args:
        in_features: Size of the input's last dimension.
        rank: Size between the two products.
        out_features: Size of the output's last dimension.
        batch: Number of rows: the product of all leading dimensions.
        constraint: That of the dense layer.

    Returns:
        Factors of the first product with `bwd = (x, a)`, and of the second, `bwd = (h, b)`.

    Raises:
        TypeError: If a size is not a static integer.
        ValueError: If a size is not positive, or the constraint does not fit one operand.

    Example:
        >>> lora(16, 4, 64, 4)
        (Factors(fwd=0.25, bwd=(1.0, 0.5)), Factors(fwd=0.5, bwd=(0.125, 0.5)))

    References:
        Hu et al., "LoRA", 2021, arXiv 2106.09685; Unit Scaling: Blake, Orr, Luschi, ICML 2023,
        arXiv 2303.11257, scaling factors of matmul.
    """
    positive_sizes("lora", {"rank": rank})
    beside = dense(in_features, out_features, batch, constraint=constraint)
    x, weight, _ = beside.bwd
    between, forward = 1 / math.sqrt(out_features), 1 / math.sqrt(rank)
    first = Factors(beside.fwd, (x * forward / between, weight))
    return first, Factors(forward, (between, weight))
