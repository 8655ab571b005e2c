"""Flax modules whose parameters NumPy draws: JAX compiles a program for every shape it draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

Module = TypeVar("Module", bound=nnx.Module)


def build(make: Callable[[], Module], seed: int = 0) -> Module:
    """Returns `make()`, but all its parameters from N(0, 1), gains and biases at 0.3 of it."""
    graphdef, params, rest = nnx.split(nnx.eval_shape(make), nnx.Param, ...)
    rng = np.random.default_rng(seed)

    def draw(leaf: Any) -> jax.Array:
        size = 0.3 if leaf.ndim == 1 else 1.0
        return jnp.asarray((size * rng.normal(size=leaf.shape)).astype(leaf.dtype))

    if jax.tree.leaves(rest):
        rest = jax.jit(lambda: nnx.split(make(), nnx.Param, ...)[2])()
    return nnx.merge(graphdef, jax.tree.map(draw, params), rest)
