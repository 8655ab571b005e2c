"""Programs whose operations are counted: shapes only, so that no model has to fit in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..bert.config import BertModelConfig
from ..bert.model import Bert
from ..gpt import build
from ..gpt.config import GPTConfig


def gpt(config: GPTConfig) -> Callable[[], Any]:
    """What makes the GPT of a config."""
    return lambda: build(config)


def bert_large(policy: str = "float32", **shape: int) -> Callable[[], Bert]:
    """What makes a model of BERT Large's shape, or of another."""
    sizes = {"vocab": 30522, "width": 1024, "layers": 24, "heads": 16, "context": 512} | shape
    config = BertModelConfig.model_validate({**sizes, "dropout": 0.0})
    return lambda: Bert(config, policy=policy, rngs=nnx.Rngs(0))


def _inputs(model: Any, batch: int, time: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes of what the model's loss takes; a BERT predicts 15% of the tokens."""
    ids = jax.ShapeDtypeStruct((batch, time), jnp.int32)
    if not isinstance(model, Bert):
        return ids, ids
    positions = jax.ShapeDtypeStruct((batch, max(1, round(0.15 * time))), jnp.int32)
    counts = jax.ShapeDtypeStruct(positions.shape, jnp.bool)
    return ids, ids, positions, positions, counts


def flops(make: Callable[[], Any], batch: int, time: int) -> float:
    """Floating-point operations of the loss and its gradient, before XLA optimizes the program.

    Args:
      make: Makes a GPT or a BERT; it is only traced.
      batch: Number of sequences.
      time: Tokens of each.

    Returns:
      What XLA's cost analysis of the lowered program counts.
    """
    model = nnx.eval_shape(make)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, rest, *inputs):
        return nnx.merge(graphdef, params, rest).loss(*inputs, deterministic=True)

    inputs = _inputs(model, batch, time)
    program = jax.jit(jax.value_and_grad(loss)).lower(params, rest, *inputs)
    analysis: Any = program.cost_analysis()
    return float(analysis["flops"])
