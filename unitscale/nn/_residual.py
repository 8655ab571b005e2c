"""Residual connections."""

from collections.abc import Callable
from typing import Any

from flax import nnx

from .. import ops, rules
from ..core import ScaledArray
from ._param import set_depth


class Residual(nnx.Module):
    """A residual branch: ``(tau * branch(x) + x) / (1 + tau^2)^1/2``.

    Scaling:
        `ops.residual`: unit output for unit branch and skip; the branch's own gradients are unit
        scaled, because its weight tau is applied where the branch begins. The sum keeps the dtype
        of the input, whatever the branch computes in.

    Args:
        branch: a module (or function) that keeps the shape of its input.
        tau: positive ratio of branch to skip; see `unitscale.rules.residual_taus`.
        depth: number of residual branches in the stack, recorded on the parameters of ``branch``
            for u-muP learning rates.

    Raises:
        ValueError: if tau is not positive; when called, if the branch changes the shape.

    Example:
        >>> import jax.numpy as jnp
        >>> from unitscale import nn
        >>> layer = Residual(nn.Dense(4, 4, rngs=nnx.Rngs(0)), tau=0.5)
        >>> layer(jnp.ones((2, 4))).shape
        (2, 4)

    References:
        Blake et al., "u-muP", 2024, arXiv 2407.17465, appendix G.
    """

    def __init__(self, branch: Callable[..., Any], *, tau: float, depth: int = 1) -> None:
        rules.residual(tau)
        self.branch, self.tau = branch, float(tau)
        if isinstance(branch, nnx.Module):
            set_depth(branch, depth)

    def __call__(self, x: ops.ArrayLike, *args: Any, **kwargs: Any) -> ScaledArray:
        """Applies the branch, with any further arguments, and adds the skip connection."""
        return ops.residual(lambda h: self.branch(h, *args, **kwargs), x, self.tau)
