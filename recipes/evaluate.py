"""Validation loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
from flax import nnx

from .batch import loss_inputs
from .config import RunConfig, ScalifyConfig
from .scaling import plain, under


def make_evaluation(
    graphdef: nnx.GraphDef, scalify: ScalifyConfig | None = None
) -> Callable[..., jax.Array]:
    """The compiled loss of one batch, dropout off: `(params, rest, batch) -> float32 scalar`."""

    def loss(params, rest, batch):
        model = nnx.merge(graphdef, params, rest)
        return model.loss(*loss_inputs(batch), deterministic=True)

    @jax.jit
    def evaluate(params, rest, batch):
        return plain(scalify, under(scalify, loss)(params, rest, batch))

    return evaluate


def mean_loss(evaluate: Callable[..., jax.Array], params, rest, batches: Iterable) -> float:
    """Mean loss over batches of one size, in nats; waits for the device once."""
    losses = [evaluate(params, rest, batch) for batch in batches]
    return float(jnp.mean(jnp.stack(losses)))


def shown(config: RunConfig, loss: float) -> str:
    """A loss of a run in words.

    Example:
      >>> shown(RunConfig(recipe="gpt", name="a"), 2.0)
      '2.0000 nats per token, 2.8854 bits'
    """
    bits = f", {loss / math.log(2):.4f} bits" if config.loss_unit == "token" else ""
    return f"{loss:.4f} nats per {config.loss_unit}{bits}"
