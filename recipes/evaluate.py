"""Validation loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def make_evaluation(graphdef: nnx.GraphDef) -> Callable[..., jax.Array]:
    """The compiled loss of one batch, dropout off: `(params, rest, batch) -> float32 scalar`."""

    @jax.jit
    def evaluate(params, rest, batch):
        model = nnx.merge(graphdef, params, rest)
        return model.loss(batch[:, :-1], batch[:, 1:], deterministic=True)

    return evaluate


def mean_loss(evaluate: Callable[..., jax.Array], params, rest, batches: Iterable) -> float:
    """Mean loss over batches of one size, in nats per token; waits for the device once."""
    losses = [evaluate(params, rest, np.asarray(batch)) for batch in batches]
    return float(jnp.mean(jnp.stack(losses)))
