"""Weights of residual connections, and how they vary with depth.

`out = (tau * branch + skip) / (1 + tau^2)^1/2` is unit for every tau; the sequence of taus decides
how much each branch contributes to the final sum. It is written here once so that the split (which
applies the branch's factor to the cotangent) and the sum (which applies it to the value) cannot
disagree.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from ._checks import positive_number, positive_sizes

ResidualScheme: TypeAlias = Literal["fixed", "running_mean", "depth"]
"""Name of a rule for the tau of each branch: see `residual_taus`."""

RESIDUAL_SCHEMES: tuple[ResidualScheme, ...] = ("fixed", "running_mean", "depth")
"""Every valid scheme of `residual_taus`."""


@dataclass(frozen=True)
class ResidualFactors:
    """The two weights of a residual sum; their squares sum to 1.

    Args:
        branch: Factor on the branch.
        skip: Factor on the skip connection. `ops.residual` takes arrays too, for both.

    Example:
        >>> ResidualFactors(branch=0.6, skip=0.8).skip
        0.8
    """

    branch: Any
    skip: Any


def residual(tau: float) -> ResidualFactors:
    """Return the weights of `(tau * branch + skip) / (1 + tau^2)^1/2`.

    Scaling:
        Branch `tau / (1 + tau^2)^1/2`, skip `1 / (1 + tau^2)^1/2`. Assumes independent unit branch
        and skip. Applied to the cotangent at the split in place of the sum, the branch's factor
        leaves the total gradient true and the gradients inside the branch unit.

    Args:
        tau: Ratio of branch to skip, positive.

    Returns:
        The two factors.

    Raises:
        TypeError: If tau is not a static real number.
        ValueError: If tau is not positive and finite.

    Example:
        >>> residual(0.75)
        ResidualFactors(branch=0.6, skip=0.8)

    References:
        Unit Scaling: Blake, Orr, Luschi, ICML 2023, arXiv 2303.11257, weighted addition.
        u-muP: Blake et al., 2024, arXiv 2407.17465, appendix G.
    """
    tau = positive_number("residual", "tau", tau)
    length = math.hypot(1.0, tau)
    return ResidualFactors(branch=tau / length, skip=1 / length)


def residual_taus(
    scheme: ResidualScheme,
    num_branches: int,
    *,
    tau: float = 0.5,
    mult: float = 1.0,
    attn_ratio: float = 1.0,
) -> tuple[float, ...]:
    """Return the tau of every residual branch of a network, first to last.

    Scaling:
        `fixed`: `tau` for all; the default 0.5 gives a branch a fifth of the variance of the sum.
        `running_mean`: `tau_l^2 = 1 / l`, l = 1..L, so that the embedding and all branches
        contribute equally.
        `depth`: branches alternate attention, MLP, ...; with `a_mlp^2 = 2 mult^2 / (attn_ratio^2 +
        1)`, `a_attn^2 = attn_ratio^2 a_mlp^2` and `k = floor((l - 1) / 2)`, `tau_l^2 = a_attn^2 /
        (L/2 + k a_attn^2 + k a_mlp^2)` for odd l and `tau_l^2 = a_mlp^2 / (L/2 + (k + 1) a_attn^2 +
        k a_mlp^2)` for even l. The contributions of embedding, one attention and one MLP branch to
        the final variance are then as `L/2 : a_attn^2 : a_mlp^2`.

    Args:
        scheme: "fixed", "running_mean" or "depth".
        num_branches: Number L of residual branches: twice the number of transformer layers.
        tau: Ratio of every branch; used by "fixed" alone.
        mult: Ratio of all branches together to the embedding; used by "depth" alone.
        attn_ratio: Ratio of attention branches to MLP branches; used by "depth" alone.

    Returns:
        One tau per branch.

    Raises:
        TypeError: If a number is not static.
        ValueError: If the scheme is unknown, or a number is not positive.

    Example:
        >>> residual_taus("running_mean", 4)[3]
        0.5

    References:
        Unit Scaling: Blake, Orr, Luschi, ICML 2023, arXiv 2303.11257, residual schemes.
        u-muP: Blake et al., 2024, arXiv 2407.17465, appendix G (the final residual scheme).
    """
    positive_sizes("residual_taus", {"num_branches": num_branches})
    tau = positive_number("residual_taus", "tau", tau)
    mult = positive_number("residual_taus", "mult", mult)
    attn_ratio = positive_number("residual_taus", "attn_ratio", attn_ratio)
    if scheme == "fixed":
        return (tau,) * num_branches
    if scheme == "running_mean":
        return tuple(1 / math.sqrt(branch) for branch in range(1, num_branches + 1))
    if scheme == "depth":
        return _depth_taus(num_branches, mult, attn_ratio)
    near = difflib.get_close_matches(str(scheme), RESIDUAL_SCHEMES, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"unitscale.rules.residual_taus: unknown scheme {scheme!r}; expected one of "
        f"{', '.join(map(repr, RESIDUAL_SCHEMES))}.{hint}"
    )


def _depth_taus(num_branches: int, mult: float, attn_ratio: float) -> tuple[float, ...]:
    mlp = 2 * mult**2 / (attn_ratio**2 + 1)
    attn = attn_ratio**2 * mlp
    taus = []
    before = num_branches / 2
    for index in range(num_branches):
        own = mlp if index % 2 else attn
        taus.append(math.sqrt(own / before))
        before += own
    return tuple(taus)
