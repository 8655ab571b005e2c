"""What a learning rate of u-muP is to a plain model."""

import math
from typing import Any, NamedTuple

import jax

from ._roles import path_name
from ._umup import factor_of, has_role

# A kernel of unit variance, times this power of its inputs, is what a plain model multiplies by.
_FORWARD = {"weight": -0.5, "readout": -1.0}


class UmupRate(NamedTuple):
    """The learning rate of one parameter.

    Attributes:
        path: of the parameter.
        role: what it is for.
        factor: of u-muP, by which the global learning rate is multiplied.
        plain: what a global rate of 1 is as the Adam rate of a plain model's parameter, which is
            moved as far: the factor times that of the layer's forward.

    Example:
        >>> UmupRate("up.kernel", "weight", 2**-4, 2**-8).plain
        0.00390625
    """

    path: str
    role: str
    factor: float
    plain: float


class UmupRates(list[UmupRate]):
    """The learning rates of a model's parameters; prints as a table.

    Example:
        >>> print(f"{UmupRates([UmupRate('up.kernel', 'weight', 2**-4, 2**-8)]).start(1e-3):.3f}")
        0.256
    """

    def start(self, plain: float) -> float:
        """The global rate at which kernels move as those of a plain model at an Adam rate.

        The geometric mean over the kernels of hidden layers; where to begin a search.
        """
        logs = [math.log(rate.plain) for rate in self if rate.role == "weight"]
        return plain / math.exp(sum(logs) / len(logs)) if logs else plain

    def __str__(self) -> str:
        width = max((len(rate.path) for rate in self), default=0)
        rows = [
            f"{rate.path:<{width}}  {rate.role:<9}  {rate.factor:<9.4g}  {rate.plain:.4g}"
            for rate in self
        ]
        head = f"{'parameter':<{width}}  {'role':<9}  {'u-muP':<9}  as a plain model's"
        multiple = (
            f"of a plain model's Adam rate take {self.start(1.0):.4g} times, and search there"
        )
        return "\n".join([head, *rows, multiple])


def umup_rates(params: Any) -> UmupRates:
    """Lists what `umup` makes of the learning rate of every parameter, and of a plain model's.

    Scaling:
        A unit-scaled kernel W stands for W n^-1/2, n being its inputs, in a plain model; u-muP
        moves it by n^-1/2 of the learning rate. So a rate r is r / n to a plain model's kernel: at
        a width of 256, 0.5 here is 2e-3 there. Factors of depth are counted too. Embeddings, gains
        and biases are as in a plain model whose tables have unit variance.

    Args:
        params: the parameters, as variables that carry metadata: ``nnx.state(model, nnx.Param)``.

    Returns:
        One entry for each, in the order of the tree; as text a table, and what to start with.

    Raises:
        ValueError: if a parameter has no role.

    Example:
        >>> from flax import nnx
        >>> from unitscale import nn
        >>> rates = umup_rates(nnx.state(nn.Dense(256, 8, rngs=nnx.Rngs(0)), nnx.Param))
        >>> print(f"{rates.start(2e-3):.3f}")  # 256 times 2e-3
        0.512

    References:
        Blake et al., "u-muP", 2024, arXiv 2407.17465, table 2.
    """
    found = UmupRates()
    for path, variable in jax.tree.leaves_with_path(params, is_leaf=has_role):
        factor, role = factor_of(path, variable), variable.role
        forward = variable.fan_in ** _FORWARD.get(role, 0.0)
        found.append(UmupRate(path_name(path), role, factor, factor * forward))
    return found
