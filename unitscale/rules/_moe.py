"""Factors of a mixture of experts: router, grouped products, and the sum of the chosen experts.

Each token is seen by few experts, each expert by few tokens: the numbers of terms that sums have
are those of an even division, as that of an embedding's rows is.
"""

from __future__ import annotations

import math

from ._checks import positive_number, positive_sizes
from ._constraints import Constraint, constrain
from ._factors import Factors
from ._gate_moments import gate_moments
from ._linear import dense


def grouped_dense(
    in_features: int,
    out_features: int,
    rows: int,
    groups: int,
    *,
    constraint: Constraint = "to_output_scale",
) -> Factors:
    """Return the factors of a dense layer of which each group of rows has its own kernel.

    Scaling:
        Forward `in^-1/2` and input gradient `out^-1/2`, constrained together. A kernel's gradient
        sums over the rows of its group, `rows / groups` on average: kernels and biases, which are
        cut edges, have `(groups / rows)^1/2`. The RMS over all kernels is then 1 however the rows
        are divided: it only moves between groups.

    Args:
        in_features: Size of the contracted dimension.
        out_features: Size of the output's last dimension.
        rows: Number of rows of all groups.
        groups: Number of groups.
        constraint: How the output and the input gradient come to share a factor.

    Returns:
        Factors with `bwd = (x, kernel, bias)`.

    Raises:
        TypeError: If a size is not a static integer.
        ValueError: If a size is not positive, or the constraint does not fit one operand.

    Example:
        >>> grouped_dense(16, 64, rows=32, groups=8)
        Factors(fwd=0.25, bwd=(0.25, 0.5, 0.5))

    References:
        Unit Scaling: Blake, Orr, Luschi, ICML 2023, arXiv 2303.11257, the rule for cut edges.
    """
    positive_sizes("grouped_dense", {"rows": rows, "groups": groups})
    one = dense(in_features, out_features, 1, constraint=constraint)
    weight = math.sqrt(groups / rows)
    return Factors(one.fwd, (one.bwd[0], weight, weight))


def mixture(experts: int, top_k: int, *, mult: float = 1.0, renormalize: bool = True) -> Factors:
    """Return the factors of the sum of the chosen experts, weighted by their gates.

    Scaling:
        Forward `c = E[sum g^2]^-1/2` over the gates g of a token: 1 for one gate of 1, `k^1/2` for
        k equal ones. The expectation over independent unit normal logits is computed exactly.
        Backward the true derivative: `c` by the gates; by an expert's output the cotangent `c g dy`
        has RMS `k^-1/2`, and is multiplied by `k^1/2` more, which the gradient of the token that
        the expert read is divided by again: gradients inside of the experts are unit. Assumes
        experts that are independent and unit.

    Args:
        experts: Number of experts.
        top_k: Number of experts of each token.
        mult: Multiplier of the router's logits (inverse temperature).
        renormalize: Whether the gates of a token sum to 1, as the softmax over the chosen experts;
            else they are entries of the softmax over all.

    Returns:
        Factors with `bwd = (expert's output, gate, expert's input)`, the last one on top of the
        derivative of copying the token.

    Raises:
        TypeError: If a size is not a static integer.
        ValueError: If a size or mult is not positive, or there are fewer experts than top_k.

    Example:
        >>> mixture(8, 1)
        Factors(fwd=1.0, bwd=(1.0, 1.0, 1.0))
        >>> round(mixture(8, 2).fwd, 2)
        1.34

    References:
        Mixtral: Jiang et al., 2024, arXiv 2401.04088, equations 1 and 2.
        u-muP: Blake et al., 2024, arXiv 2407.17465, appendix G (the factor applied at the split).
    """
    mult = _checked("mixture", experts, top_k, mult)
    output = 1 / math.sqrt(gate_moments(experts, top_k, mult, renormalize).square)
    return Factors(output, (output * math.sqrt(top_k), output, 1 / math.sqrt(top_k)))


def router(
    in_features: int,
    experts: int,
    tokens: int,
    *,
    top_k: int,
    out_features: int | None = None,
    mult: float = 1.0,
    renormalize: bool = True,
    constraint: Constraint = "to_output_scale",
) -> Factors:
    """Return the factors of the product that makes the router's logits.

    Scaling:
        Forward `in^-1/2`: unit logits, whatever the width. The input gradient has the same factor,
        as the token goes to the experts too. A gate's gradient is `c <f, dy>`, of RMS `c out^1/2`
        for unit outputs f and cotangents dy, c being that of `mixture`; by a logit its mean square
        is `(c mult)^2 out / experts * E[sum g^2 - 2 g^3 + (sum g^2)^2]` (for renormalized gates),
        and the kernel, a cut edge, has 1 over its root, times `tokens^-1/2`. Where the gates are
        constant (one renormalized gate), it has `tokens^-1/2`.

    Args:
        in_features: Size of the token.
        experts: Number of experts.
        tokens: Number of tokens.
        top_k: Number of experts of each token.
        out_features: Size of the experts' outputs; in_features by default.
        mult: Multiplier of the logits (inverse temperature).
        renormalize: Whether the gates of a token sum to 1.
        constraint: How the output and the input gradient come to share a factor.

    Returns:
        Factors with `bwd = (x, kernel)`.

    Raises:
        TypeError: If a size is not a static integer.
        ValueError: If a size or mult is not positive, there are fewer experts than top_k, or the
            constraint does not fit one operand.

    Example:
        >>> router(16, 8, 4, top_k=1).fwd
        0.25

    References:
        Mixtral: Jiang et al., 2024, arXiv 2401.04088, equations 1 and 2.
        u-muP: Blake et al., 2024, arXiv 2407.17465, table 2 (hidden weights).
    """
    mult = _checked("router", experts, top_k, mult)
    width = in_features if out_features is None else out_features
    positive_sizes("router", {"in_features": in_features, "tokens": tokens, "out_features": width})
    output, x = constrain(constraint, 1 / math.sqrt(in_features), 1 / math.sqrt(experts))
    moments = gate_moments(experts, top_k, mult, renormalize)
    slope = mult * math.sqrt(width * moments.gradient / moments.square / experts)
    return Factors(output, (x, 1 / math.sqrt(tokens) / (slope or 1.0)))


def _checked(rule: str, experts: int, top_k: int, mult: float) -> float:
    positive_sizes(rule, {"experts": experts, "top_k": top_k})
    if top_k > experts:
        raise ValueError(
            f"unitscale.rules.{rule}: top_k must be at most the number of experts; got {top_k} of "
            f"{experts}."
        )
    return positive_number(rule, "mult", mult)
