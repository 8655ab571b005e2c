"""Flax modules for tests, with parameters drawn by NumPy, and losses as functions of these."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from unitscale import nn

Module = TypeVar("Module", bound=nnx.Module)
Loss = Callable[[Any], jax.Array]

FLOAT64 = nn.Policy(param_dtype="float64", compute_dtype="float64")
"""The policy of models whose gradients are checked, under `jax.enable_x64(True)`."""


def build(make: Callable[[], Module], seed: int = 0) -> Module:
    """Return `make()` with parameters from N(0, 1), and gains and biases from 0.3 * N(0, 1).

    NumPy draws them, because JAX would compile a program for every shape.
    """
    graphdef, params, rest = nnx.split(nnx.eval_shape(make), nnx.Param, ...)
    rng = np.random.default_rng(seed)

    def draw(leaf: Any) -> jax.Array:
        size = 0.3 if leaf.ndim == 1 else 1.0
        return jnp.asarray((size * rng.normal(size=leaf.shape)).astype(leaf.dtype))

    if jax.tree.leaves(rest):
        rest = jax.jit(lambda: nnx.split(make(), nnx.Param, ...)[2])()
    return nnx.merge(graphdef, jax.tree.map(draw, params), rest)


def model_loss(model: nnx.Module, f: Callable[[Any], jax.Array]) -> tuple[Loss, Any]:
    """Return `f(model)` as a function of the model's parameters, and the parameters.

    All other state, such as random keys, is the same in every call.
    """
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    return lambda params: f(nnx.merge(graphdef, params, rest, copy=True)), params
