"""The record that every rule returns.

A rule maps shapes to static floats. Keeping them in one frozen, hashable record lets an op pass
them to `custom_vjp` as static arguments, and lets tests and documentation read them without running
the op.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Factors:
    """The static floats an op multiplies in on the way forward and backward.

    Scaling:
        The op computes `fwd * f(x, ...)`, and multiplies the cotangent of operand `i` of the
        *unscaled* `f` by `bwd[i]`. A backward factor equal to `fwd` is the true derivative; any
        other belongs on a cut edge.

    Args:
        fwd: Factor on the output.
        bwd: Factors on the operands' cotangents, in operand order.

    Raises:
        ValueError: If a factor is not positive and finite.

    Example:
        >>> Factors(0.5, (0.5, 0.25)).bwd[1]
        0.25

    References:
        Unit Scaling: Blake, Orr, Luschi, ICML 2023, arXiv 2303.11257, scaled ops.
    """

    fwd: float
    bwd: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "fwd", float(self.fwd))
        object.__setattr__(self, "bwd", tuple(float(factor) for factor in self.bwd))
        for factor in (self.fwd, *self.bwd):
            if not (math.isfinite(factor) and factor > 0):
                raise ValueError(
                    "unitscale.rules.Factors: factors must be positive and finite; got "
                    f"fwd={self.fwd}, bwd={self.bwd}."
                )
