"""Learning-rate factors of u-muP."""

from __future__ import annotations

import difflib
import math

from ._checks import positive_sizes

ROLES = ("weight", "bias", "norm", "readout", "embedding")
"""What a parameter can be for: `umup_learning_rate` and `unitscale.nn.Policy` go by it."""

_OPTIMIZERS = ("adam", "sgd")
_CONSTRAINTS = (None, "to_output_scale")


def umup_learning_rate(
    role: str,
    *,
    fan_in: int,
    fan_out: int,
    depth: int = 1,
    optimizer: str = "adam",
    readout_constraint: str | None = None,
) -> float:
    """Return what a parameter's learning rate is multiplied by.

    Scaling:
        weight: `fan_in^-1/2`; embedding: `fan_out^-1/2`; readout, bias and norm: 1. Each times
        `depth^-1/2`, depth being the number of residual branches of the stack that the parameter is
        in (1 outside of any). With these the best global learning rate does not move with width or
        depth. For weights of unit variance whose updates are of unit size, as Adam's are, and those
        of SGD where gradients are unit scaled.

        For SGD with a readout constrained `to_output_scale`, all gradients but the readout's carry
        the factor of its input gradient, `width^-1` in place of the free one: what comes before it
        is multiplied by its width, which makes `fan_in^1/2` of a weight, `fan_out^1/2` of an
        embedding, and `fan_out` of a bias or norm. A bias of the readout itself has no such factor:
        leave it out there.

    Args:
        role: Role of the parameter: "weight", "readout", "embedding", "bias" or "norm".
        fan_in: Number of inputs that each output sums over.
        fan_out: Number of outputs.
        depth: Number of residual branches.
        optimizer: "adam" for every rule whose updates do not depend on the gradient's size; "sgd"
            for those in proportion to it, with momentum or without.
        readout_constraint: That of the model's readout, None or "to_output_scale".

    Returns:
        The static factor.

    Raises:
        TypeError: If a size is not a static integer.
        ValueError: If the role, the optimizer or the constraint is unknown, or a size is not
            positive.

    Example:
        >>> umup_learning_rate("weight", fan_in=64, fan_out=256, depth=4)
        0.0625

    References:
        u-muP: Blake et al., 2024, arXiv 2407.17465, table 2 (learning rates) and appendix G
        (depth); unit-scaling, `optim.py` (SGD and the readout's constraint).
    """
    positive_sizes("umup_learning_rate", {"fan_in": fan_in, "fan_out": fan_out, "depth": depth})
    if role not in ROLES:
        near = difflib.get_close_matches(str(role), ROLES, 1)
        raise ValueError(
            f"unitscale.rules.umup_learning_rate: role must be one of {', '.join(ROLES)}; got "
            f"{role!r}." + (f" Did you mean {near[0]!r}?" if near else "")
        )
    if optimizer not in _OPTIMIZERS:
        raise ValueError(
            "unitscale.rules.umup_learning_rate: optimizer must be adam or sgd; got "
            f"{optimizer!r}. Say adam for any rule whose updates are of unit size."
        )
    if readout_constraint not in _CONSTRAINTS:
        raise ValueError(
            "unitscale.rules.umup_learning_rate: readout_constraint must be None or "
            f"'to_output_scale'; got {readout_constraint!r}. Give the readout one of these."
        )
    fan = {"weight": fan_in, "embedding": fan_out}.get(role, 1)
    follows_gradient = optimizer == "sgd" and readout_constraint is not None
    width = 1 if role == "readout" or not follows_gradient else _width(role, fan_in, fan_out)
    return width / math.sqrt(fan * depth)


def _width(role: str, fan_in: int, fan_out: int) -> int:
    return fan_in if role == "weight" else fan_out
