"""From a config to a model."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx

from ..config import Config
from . import plain


def build(config: Config) -> nnx.Module:
    """The GPT that a config describes, its parameters drawn from `config.seed`."""
    rngs = nnx.Rngs(config.seed)
    shape = config.model.model_copy(update={"context": config.context})
    return plain.GPT(shape, dtype=jnp.dtype(config.policy), rngs=rngs)
