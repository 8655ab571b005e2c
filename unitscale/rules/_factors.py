"""The record that every rule returns, constraints between factors, and checks of arguments."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from .. import core

Constraint: TypeAlias = Literal[
    "to_output_scale",
    "to_grad_input_scale",
    "to_left_grad_scale",
    "to_right_grad_scale",
    "gmean",
    "hmean",
    "amean",
    None,
]
"""Name of a constraint of `constrain`, or None to leave the ideal factors unequal."""

_SHARED = {
    "to_output_scale": 0,
    "to_grad_input_scale": 1,
    "to_left_grad_scale": 1,
    "to_right_grad_scale": 2,
}
_OPERANDS = {"to_grad_input_scale": 1, "to_left_grad_scale": 2, "to_right_grad_scale": 2}


@dataclass(frozen=True)
class Factors:
    """The static floats that an op multiplies in, forward and backward; hashable.

    Scaling:
        The op computes `fwd * f(x, ...)`, and multiplies the cotangent of operand `i` of the
        *unscaled* `f` by `bwd[i]`. A backward factor equal to `fwd` gives the true derivative; any
        other is only correct on a cut edge.

    Args:
        fwd: Factor on the output.
        bwd: Factors on the operands' cotangents, in operand order.

    References:
        Unit Scaling, arXiv 2303.11257, scaled ops.
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


def constrain(constraint: Constraint, output: float, *grad_inputs: float) -> tuple[float, ...]:
    """Make the forward factor and the backward factors of non-cut edges equal.

    On a cut edge, such as a weight, they may differ: the gradient is then a constant times the true
    one. On any other edge a difference would weight the paths through the network unequally.

    Scaling:
        `to_output_scale` uses the output's factor for all; `to_grad_input_scale` that of the only
        operand; `to_left_grad_scale` and `to_right_grad_scale` that of one of two operands;
        `gmean`, `hmean` and `amean` the geometric, harmonic and arithmetic mean of all; None
        changes nothing.

    Args:
        constraint: Name of the constraint, or None.
        output: Ideal factor of the output.
        *grad_inputs: Ideal factor of each operand's cotangent that must agree with it.

    Example:
        >>> constrain("gmean", 4.0, 1.0)
        (2.0, 2.0)

    References:
        Unit Scaling, arXiv 2303.11257, constrained ops and cut edges.
    """
    factors = (output, *grad_inputs)
    if constraint is None:
        return factors
    check_choice("constrain", "constraint", constraint, get_args(Constraint))
    operands = len(grad_inputs)
    needed = _OPERANDS.get(constraint, operands)
    if needed != operands:
        use = {
            1: "'to_grad_input_scale'",
            2: "'to_left_grad_scale' or 'to_right_grad_scale'",
        }.get(operands, "'to_output_scale', 'gmean', 'hmean', 'amean' or None")
        raise ValueError(
            f"unitscale.rules.constrain: {constraint!r} is for ops with {needed} constrained "
            f"operand(s); this op has {operands}: use {use} instead."
        )
    if constraint in _SHARED:
        shared = factors[_SHARED[constraint]]
    elif constraint == "gmean":
        shared = math.exp(math.fsum(math.log(factor) for factor in factors) / len(factors))
    elif constraint == "hmean":
        shared = len(factors) / math.fsum(1 / factor for factor in factors)
    else:
        shared = math.fsum(factors) / len(factors)
    return (shared,) * len(factors)


def check_sizes(rule: str, **sizes: Any) -> None:
    """Check that every named size is a positive static integer."""
    for name, size in sizes.items():
        try:
            value = operator.index(size)
        except TypeError as error:
            raise TypeError(
                f"unitscale.rules.{rule}: {name} must be a static integer; got {size!r} of type "
                f"{type(size).__name__}. Take sizes from .shape, not from array values. If the "
                "batch size is symbolic, as in jax.export, trace inside unitscale.batch_size(n): "
                "n only affects gradients."
            ) from error
        if value < 1:
            raise ValueError(
                f"unitscale.rules.{rule}: {name} must be at least 1; got {value}. "
                "A factor is undefined for an empty dimension."
            )


def check_per_dimension(rule: str, rank: int, **sizes: Sequence[int]) -> None:
    """Check that each argument holds one positive static integer per spatial dimension."""
    for name, values in sizes.items():
        check_sizes(rule, **{f"{name}[{i}]": size for i, size in enumerate(values)})
        if len(values) != rank:
            raise ValueError(
                f"unitscale.rules.{rule}: {name} must have one entry for each of the {rank} "
                f"spatial dimensions; got {values}."
            )


def check_choice(rule: str, name: str, value: object, choices: Sequence[str | None]) -> None:
    """Check that an argument is one of a few names, and suggest the nearest one."""
    core.check_choice(f"unitscale.rules.{rule}", name, value, choices)


def real_number(rule: str, name: str, value: Any) -> float:
    """Return a static real number as a Python float."""
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"unitscale.rules.{rule}: {name} must be a static real number; got "
            f"{type(value).__name__}. Factors are fixed at trace time, so a traced array cannot "
            "set one."
        ) from error


def positive_number(rule: str, name: str, value: Any) -> float:
    """Return a static, positive and finite number as a Python float."""
    number = real_number(rule, name, value)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(
            f"unitscale.rules.{rule}: {name} must be positive and finite; got {value!r}."
        )
    return number
