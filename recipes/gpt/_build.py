"""From a config to a model."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx

from ..hf import plain
from ..run.monitor import monitored
from . import model
from .config import GPTConfig

GPT = model.GPT | plain.GPT


def build(config: GPTConfig) -> GPT:
    """The GPT that a config describes, its parameters drawn from `config.seed`."""
    rngs = nnx.Rngs(config.seed)
    shape = config.model.model_copy(update={"context": config.context})
    if config.model.library == "plain":
        return plain.GPT(shape, dtype=jnp.dtype(config.policy), scalify=config.scalify, rngs=rngs)
    return model.GPT(shape, policy=monitored(config), rngs=rngs)
