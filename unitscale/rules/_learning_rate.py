"""Learning-rate factors of u-muP."""

from __future__ import annotations

import difflib
import math

from ._checks import positive_sizes

_ROLES = ("weight", "readout", "embedding", "bias", "norm")


def umup_learning_rate(role: str, *, fan_in: int, fan_out: int, depth: int = 1) -> float:
    """Return what a parameter's learning rate is multiplied by, for Adam-like optimizers.

    Scaling:
        weight: `fan_in^-1/2`; embedding: `fan_out^-1/2`; readout, bias and norm: 1. Each times
        `depth^-1/2`, depth being the number of residual branches of the stack that the parameter is
        in (1 outside of any). With these the best global learning rate does not move with width or
        depth. For weights of unit variance whose updates are of unit size, as Adam's are.

    Args:
        role: Role of the parameter: "weight", "readout", "embedding", "bias" or "norm".
        fan_in: Number of inputs that each output sums over.
        fan_out: Number of outputs.
        depth: Number of residual branches.

    Returns:
        The static factor.

    Raises:
        TypeError: If a size is not a static integer.
        ValueError: If the role is unknown or a size is not positive.

    Example:
        >>> umup_learning_rate("weight", fan_in=64, fan_out=256, depth=4)
        0.0625

    References:
        u-muP: Blake et al., 2024, arXiv 2407.17465, table 2 (learning rates) and appendix G
        (depth).
    """
    positive_sizes("umup_learning_rate", {"fan_in": fan_in, "fan_out": fan_out, "depth": depth})
    if role not in _ROLES:
        near = difflib.get_close_matches(str(role), _ROLES, 1)
        raise ValueError(
            f"unitscale.rules.umup_learning_rate: role must be one of {', '.join(_ROLES)}; got "
            f"{role!r}." + (f" Did you mean {near[0]!r}?" if near else "")
        )
    fan = {"weight": fan_in, "embedding": fan_out}.get(role, 1)
    return 1 / math.sqrt(fan * depth)
