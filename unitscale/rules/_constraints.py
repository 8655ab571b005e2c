"""Constraints: how edges that are not cut edges come to share one factor.

The ideal forward and backward factors of an op usually differ. On a cut edge (a weight) they may:
the whole gradient of that weight is then off by one constant. On any other edge a difference would
weigh the paths through the network unequally and give a wrong gradient, so a constraint replaces
them by one shared factor. The names form a closed set, so that a misspelt one is an error and not a
silent default.
"""

from __future__ import annotations

import difflib
import math
from typing import Literal, TypeAlias

Constraint: TypeAlias = (
    Literal[
        "to_output_scale",
        "to_grad_input_scale",
        "to_left_grad_scale",
        "to_right_grad_scale",
        "gmean",
        "hmean",
        "amean",
    ]
    | None
)
"""Name of a constraint of `constrain`, or None to leave the ideal factors unequal."""

CONSTRAINTS: tuple[Constraint, ...] = (
    "to_output_scale",
    "to_grad_input_scale",
    "to_left_grad_scale",
    "to_right_grad_scale",
    "gmean",
    "hmean",
    "amean",
    None,
)
"""Every valid constraint of `constrain`."""


def constrain(constraint: Constraint, output: float, *grad_inputs: float) -> tuple[float, ...]:
    """Make the forward factor and the factors of non-cut edges equal.

    Scaling:
        `to_output_scale` takes the output's factor for all; `to_grad_input_scale` the single
        operand's; `to_left_grad_scale` and `to_right_grad_scale` that operand's of two; `gmean`,
        `hmean` and `amean` the geometric, harmonic and arithmetic mean of them all; None changes
        nothing.

    Args:
        constraint: Name of the constraint, or None.
        output: Ideal factor of the output.
        *grad_inputs: Ideal factor of each operand's cotangent that must agree with it.

    Returns:
        The factors in the same order: output first, then one per operand.

    Raises:
        ValueError: If the name is unknown, or does not fit the number of operands.

    Example:
        >>> constrain("to_output_scale", 0.5, 0.25)
        (0.5, 0.5)
        >>> constrain("gmean", 4.0, 1.0)
        (2.0, 2.0)

    References:
        Unit Scaling: Blake, Orr, Luschi, ICML 2023, arXiv 2303.11257, constrained ops, cut edges.
    """
    factors = (output, *grad_inputs)
    if constraint is None:
        return factors
    _check_name(constraint)
    _check_operands(constraint, len(grad_inputs))
    if constraint == "to_output_scale":
        shared = output
    elif constraint in ("to_grad_input_scale", "to_left_grad_scale"):
        shared = grad_inputs[0]
    elif constraint == "to_right_grad_scale":
        shared = grad_inputs[1]
    elif constraint == "gmean":
        shared = math.exp(math.fsum(math.log(factor) for factor in factors) / len(factors))
    elif constraint == "hmean":
        shared = len(factors) / math.fsum(1 / factor for factor in factors)
    else:
        shared = math.fsum(factors) / len(factors)
    return (shared,) * len(factors)


def _check_name(constraint: object) -> None:
    names = [name for name in CONSTRAINTS if name is not None]
    if constraint in names:
        return
    near = difflib.get_close_matches(str(constraint), names, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"unitscale.rules.constrain: unknown constraint {constraint!r}; expected one of "
        f"{', '.join(map(repr, names))} or None.{hint}"
    )


def _check_operands(constraint: str, operands: int) -> None:
    needed = {"to_grad_input_scale": 1, "to_left_grad_scale": 2, "to_right_grad_scale": 2}
    if needed.get(constraint, operands) == operands:
        return
    if operands == 1:
        use = "use 'to_grad_input_scale' instead"
    elif operands == 2:
        use = "use 'to_left_grad_scale' or 'to_right_grad_scale' instead"
    else:
        use = "use 'to_output_scale', 'gmean', 'hmean', 'amean' or None instead"
    raise ValueError(
        f"unitscale.rules.constrain: {constraint!r} is for ops with {needed[constraint]} "
        f"constrained operand(s); this op has {operands}: {use}."
    )
