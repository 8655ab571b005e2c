"""A BERT's encoder under the head of a task."""

from __future__ import annotations

import jax
from flax import nnx

from unitscale import nn, ops

from ..bert.config import BertModelConfig
from ..bert.heads import mean_loss
from ..bert.model import Encoder, Pooler


class SpanModel(nnx.Module):
    """Scores each token as the first and as the last of an answer.

    Args:
      config: The shape of the encoder.
      policy: Formats, a `unitscale.nn.Policy` or the name of a preset.
      rngs: Streams `params` and `dropout`.
    """

    def __init__(self, config: BertModelConfig, *, policy: str | nn.Policy, rngs: nnx.Rngs):
        self.encoder = Encoder(config, policy=policy, rngs=rngs)
        self.readout = nn.Readout(config.width, 2, use_bias=True, policy=policy, rngs=rngs)

    def __call__(
        self, ids: jax.Array, segments: jax.Array, mask: jax.Array, *, deterministic: bool = True
    ) -> ops.ArrayLike:
        """Logits (batch, time, 2); arguments as for the encoder, the mask 1 on tokens."""
        x = self.encoder(ids, segments, mask=mask > 0, deterministic=deterministic)
        return self.readout(x)

    def loss(
        self,
        ids: jax.Array,
        segments: jax.Array,
        mask: jax.Array,
        start: jax.Array,
        end: jax.Array,
        *,
        deterministic: bool = True,
    ) -> jax.Array:
        """Mean cross entropy over positions of start and end (batch,), a float32 scalar."""
        logits = self(ids, segments, mask, deterministic=deterministic)
        losses = [mean_loss(logits[..., i], label) for i, label in enumerate((start, end))]
        return (losses[0] + losses[1]) / 2


class ClassificationModel(nnx.Module):
    """Scores the labels of a text, or of a pair of texts.

    Args:
      config: The shape of the encoder.
      classes: Number of labels.
      policy: Formats, a `unitscale.nn.Policy` or the name of a preset.
      rngs: Streams `params` and `dropout`.
    """

    def __init__(
        self, config: BertModelConfig, classes: int, *, policy: str | nn.Policy, rngs: nnx.Rngs
    ):
        self.encoder = Encoder(config, policy=policy, rngs=rngs)
        self.pooler = Pooler(config.width, policy=policy, rngs=rngs)
        self.dropout = nn.Dropout(config.dropout, rngs=rngs)
        self.readout = nn.Readout(config.width, classes, use_bias=True, policy=policy, rngs=rngs)

    def __call__(
        self, ids: jax.Array, segments: jax.Array, mask: jax.Array, *, deterministic: bool = True
    ) -> ops.ArrayLike:
        """Logits (batch, classes); arguments as for the encoder, the mask 1 on tokens."""
        x = self.encoder(ids, segments, mask=mask > 0, deterministic=deterministic)
        return self.readout(self.dropout(self.pooler(x), deterministic=deterministic))

    def loss(
        self,
        ids: jax.Array,
        segments: jax.Array,
        mask: jax.Array,
        label: jax.Array,
        *,
        deterministic: bool = True,
    ) -> jax.Array:
        """Mean cross entropy of label (batch,), a float32 scalar."""
        return mean_loss(self(ids, segments, mask, deterministic=deterministic), label)
