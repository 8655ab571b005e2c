"""Programs whose operations are counted: shapes only, so that no model has to fit in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from unitscale import nn, ops

from ..config import Config
from ..gpt import build


class Bert(nnx.Module):
    """A masked language model of BERT's shape: post-norm, not causal, tied readout.

    Segment embeddings are left out: they add no product. Every position is predicted.

    Args:
      vocab: Number of token ids.
      width: Size of the residual stream.
      layers: Number of Transformer layers.
      heads: Number of attention heads.
      context: Sequence length.
      policy: Formats, as `unitscale.nn` takes them.
      rngs: Streams `params` and `dropout`.
    """

    def __init__(
        self,
        vocab: int,
        width: int,
        layers: int,
        heads: int,
        context: int,
        *,
        policy: str = "float32",
        rngs: nnx.Rngs,
    ):
        self.embed = nn.Embed(vocab, width, policy=policy, rngs=rngs)
        self.positions = nn.PositionalEmbed(context, width, policy=policy, rngs=rngs)
        self.norm = nn.LayerNorm(width, policy=policy)
        self.stack = nn.TransformerStack(
            layers,
            width,
            heads,
            norm="layer",
            norm_placement="post",
            max_length=context,
            policy=policy,
            rngs=rngs,
        )
        self.head = nn.Dense(width, width, policy=policy, rngs=rngs)
        self.head_norm = nn.LayerNorm(width, policy=policy)

    def loss(self, ids: jax.Array, targets: jax.Array, *, deterministic: bool = True) -> jax.Array:
        """Mean cross entropy of targets (batch, time), a float32 scalar in nats per token."""
        x = self.norm(self.positions(self.embed(ids)))
        x = self.stack(x, deterministic=deterministic)
        x = self.head_norm(ops.gelu(self.head(x)))
        return ops.softmax_cross_entropy(self.embed.attend(x), targets)


def gpt(config: Config) -> Callable[[], Any]:
    """What makes the GPT of a config."""
    return lambda: build(config)


def bert_large(policy: str = "float32", **shape: int) -> Callable[[], Bert]:
    """What makes a model of BERT Large's shape, or of another."""
    sizes = {"vocab": 30522, "width": 1024, "layers": 24, "heads": 16, "context": 512} | shape
    return lambda: Bert(**sizes, policy=policy, rngs=nnx.Rngs(0))


def flops(make: Callable[[], Any], batch: int, time: int) -> float:
    """Floating-point operations of the loss and its gradient, before XLA optimizes the program.

    Args:
      make: Makes a model with `loss(ids, targets)`; it is only traced.
      batch: Number of sequences.
      time: Tokens of each.

    Returns:
      What XLA's cost analysis of the lowered program counts.
    """
    graphdef, params, rest = nnx.split(nnx.eval_shape(make), nnx.Param, ...)

    def loss(params, rest, ids, targets):
        return nnx.merge(graphdef, params, rest).loss(ids, targets, deterministic=True)

    ids = jax.ShapeDtypeStruct((batch, time), jnp.int32)
    program = jax.jit(jax.value_and_grad(loss)).lower(params, rest, ids, ids)
    analysis: Any = program.cost_analysis()
    return float(analysis["flops"])
