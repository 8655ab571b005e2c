"""The BERT in plain `flax.nnx`: the baseline that the unitscale model is measured against.

The same pre-norm encoder and head for hidden tokens as `recipes.bert.model`, of the layers of the
plain GPT with attention to both sides, with GPT-2's initialisation and no scales.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from ..config import GPTModelConfig
from ..hf.plain import Layer, Parts
from .config import SEGMENTS, BertModelConfig

SHARED = "vocab", "width", "layers", "heads", "mlp_ratio", "context", "positions", "dropout"
"""What layers of the plain GPT are told of a BERT's shape."""


class Encoder(nnx.Module):
    """Embeddings of tokens, positions and segments, and a Transformer over them."""

    def __init__(self, parts: Parts):
        config: GPTModelConfig = parts.config
        self.embed, self.segments = parts.embed(config.vocab), parts.embed(SEGMENTS)
        learned = config.positions == "learned"
        self.positions = parts.embed(config.context or 0) if learned else None
        self.dropout = parts.dropout()
        self.layers = nnx.List([Layer(parts, index) for index in range(config.layers)])
        self.norm = parts.norm()

    def __call__(
        self, ids: jax.Array, segments: jax.Array, *, deterministic: bool = True
    ) -> jax.Array:
        """Outputs (batch, time, width) of tokens: ids and segments are int32 (batch, time)."""
        places = jnp.arange(ids.shape[1])
        x = self.embed(ids) + self.segments(segments)
        x = x if self.positions is None else x + self.positions(places)
        x = self.dropout(x, deterministic=deterministic)
        both_sides = jnp.ones((1, 1, len(places), len(places)), bool)
        for layer in self.layers:
            x, _ = layer(x, places, mask=both_sides, deterministic=deterministic)
        return self.norm(x)


class Bert(nnx.Module):
    """A BERT that predicts hidden tokens."""

    def __init__(self, config: BertModelConfig, *, dtype: Any = jnp.float32, rngs: nnx.Rngs):
        taken = config.model_dump(include=set(SHARED))
        shape = GPTModelConfig(**taken, library="plain", norm="layer", bias=True)
        parts = Parts(shape, dtype, jnp.float32, None, rngs)
        self.encoder = Encoder(parts)
        self.dense, self.norm = parts.linear(shape.width, shape.width), parts.norm()
        self.readout = nnx.data(
            None if config.tied_readout else parts.linear(shape.width, shape.vocab, bias=False)
        )

    def predict(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Logits (batch, n, vocab) of the tokens at positions (batch, n), from the outputs x."""
        rows = jnp.take_along_axis(x, positions[..., None], axis=1)
        rows = self.norm(jax.nn.gelu(self.dense(rows)))
        return self.encoder.embed.attend(rows) if self.readout is None else self.readout(rows)

    def loss(
        self,
        ids: jax.Array,
        segments: jax.Array,
        positions: jax.Array,
        targets: jax.Array,
        counts: jax.Array,
        *,
        deterministic: bool = True,
    ) -> jax.Array:
        """Mean cross entropy of the hidden tokens; arguments as those of `recipes.bert.model`."""
        x = self.encoder(ids, segments, deterministic=deterministic)
        logits = self.predict(x, positions).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return jnp.sum(losses, where=counts) / jnp.maximum(counts.sum(), 1)
