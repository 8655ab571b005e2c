"""Parameters: unit variance at initialisation, and the metadata that optimizers read."""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from ..rules import ROLES
from ._policy import Policy


def weight(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    policy: Policy,
    *,
    role: str = "weight",
    fan_in: int,
    fan_out: int,
) -> nnx.Param:
    """Returns a weight drawn from N(0, 1), with its role, fan-in, fan-out and residual depth.

    ``depth`` is the number of residual branches of the stack that the weight belongs to, 1
    outside of any; `set_depth` sets it.
    """
    assert role in ROLES, f"unknown role {role}"
    value = rngs.params.normal(shape, dtype=jnp.float32).astype(policy.param_dtype)
    return nnx.Param(value, role=role, fan_in=fan_in, fan_out=fan_out, depth=1)


def constant(value: float, shape: tuple[int, ...], policy: Policy, *, role: str) -> nnx.Param:
    """Returns a bias or gain, set to a constant."""
    assert role in ROLES, f"unknown role {role}"
    filled = jnp.full(shape, value, policy.param_dtype)
    return nnx.Param(filled, role=role, fan_in=1, fan_out=shape[-1], depth=1)


def set_depth(module: nnx.Module, depth: int) -> None:
    """Sets the residual depth of every parameter below a module."""
    for _, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Param):
            node.set_metadata(depth=depth)


def read(parameter: nnx.Param | None) -> Any:
    """Returns a parameter's array or ScaledArray; None stays None."""
    return None if parameter is None else parameter.get_value()
