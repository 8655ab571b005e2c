"""A BERT under the head of a task: that of a run, and that of a Hugging Face folder."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from unitscale import nn, ops

from ..bert.config import BertModelConfig, Pooling
from ..bert.heads import mean_loss
from ..bert.model import Encoder, Pooler


class TaskModel(nnx.Module):
    """Scores `classes` labels of a text or a pair; for None, each token as an answer's ends."""

    def __init__(
        self,
        config: BertModelConfig,
        classes: int | None,
        pooling: Pooling = "cls",
        *,
        policy: str | nn.Policy,
        rngs: nnx.Rngs,
    ):
        self.encoder = Encoder(config, policy=policy, rngs=rngs)
        pooled = classes is not None
        self.pooler = Pooler(config.width, pooling, policy=policy, rngs=rngs) if pooled else None
        self.dropout = nn.Dropout(config.dropout, rngs=rngs) if pooled else None
        self.readout = nn.Readout(
            config.width, classes or 2, use_bias=True, policy=policy, rngs=rngs
        )

    def __call__(
        self, ids: jax.Array, segments: jax.Array, mask: jax.Array, *, deterministic: bool = True
    ) -> ops.ArrayLike:
        """Logits (batch, classes) or (batch, time, 2); as for the encoder, the mask 1 on tokens."""
        x = self.encoder(ids, segments, mask=mask > 0, deterministic=deterministic)
        if self.pooler is not None and self.dropout is not None:
            x = self.dropout(self.pooler(x, mask > 0), deterministic=deterministic)
        return self.readout(x)

    def loss(
        self,
        ids: jax.Array,
        segments: jax.Array,
        mask: jax.Array,
        *labels: jax.Array,
        deterministic: bool = True,
    ) -> jax.Array:
        """Mean cross entropy of a label (batch,), or of two: the positions of start and end."""
        logits = self(ids, segments, mask, deterministic=deterministic)
        if self.pooler is not None:
            return mean_loss(logits, *labels)
        start, end = (mean_loss(logits[..., i], label) for i, label in enumerate(labels))
        return (start + end) / 2


class PlainModel(nnx.Module):
    """A model of `recipes.hf`, in standard parametrization, called as `TaskModel`."""

    def __init__(self, bert: Any):
        self.bert = bert

    def __call__(
        self, ids: jax.Array, segments: jax.Array, mask: jax.Array, *, deterministic: bool = True
    ) -> jax.Array:
        """Logits (batch, time, 2) or (batch, classes)."""
        return self.bert(ids, segments, mask, deterministic=deterministic)

    def loss(
        self,
        ids: jax.Array,
        segments: jax.Array,
        mask: jax.Array,
        *labels: jax.Array,
        deterministic: bool = True,
    ) -> jax.Array:
        """Mean cross entropy of a label (batch,), or of two: start and end."""
        label = labels[0] if len(labels) == 1 else jnp.stack(labels, axis=-1)
        return self.bert.loss(ids, label, segments, mask, deterministic=deterministic)
