"""BERT, RoBERTa and ModernBERT in plain `flax.nnx`, with a head for each task.

References:
  Devlin et al., 2018, BERT. Liu et al., 2019, RoBERTa. Warner et al., 2024, Smarter, Better,
  Faster, Longer (ModernBERT).
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from ..config import PrecisionConfig
from ._config import EncoderConfig, Task
from .plain import ACTIVATIONS, Attention, Layer, Parts


class PostNormLayer(nnx.Module):
    """A post-norm Transformer layer, with the call signature of the GPT's `Layer`."""

    def __init__(self, parts: Parts, index: int):
        config = parts.config
        self.activation = ACTIVATIONS[config.variant.activation]
        self.attention, self.attention_norm = Attention(parts, index), parts.norm()
        self.up = parts.linear(config.width, config.hidden)
        self.down = parts.linear(config.hidden, config.width)
        self.mlp_norm, self.dropout = parts.norm(), parts.dropout()

    def __call__(self, x, positions, *, mask, deterministic=True):
        branch, _ = self.attention(x, positions, mask=mask)
        x = self.attention_norm(x + self.dropout(branch, deterministic=deterministic))
        branch = self.down(self.activation(self.up(x)))
        return self.mlp_norm(x + self.dropout(branch, deterministic=deterministic)), None


class _Same(nnx.Module):
    def __call__(self, x):
        return x


class Encoder(nnx.Module):
    """Maps ids (batch, time) to outputs (batch, time, width)."""

    def __init__(self, parts: Parts):
        config = self.config = parts.config
        self.embed = parts.embed(config.vocab)
        self.positions = None if config.modern else parts.embed(config.context)
        self.segments = None if config.modern else parts.embed(config.segments)
        self.norm, self.dropout = parts.norm(), parts.dropout()
        kind: Any = Layer if config.modern else PostNormLayer
        layers = [kind(parts, index) for index in range(config.layers)]
        if config.modern:
            layers[0].attention_norm = _Same()
        self.last_norm = parts.norm() if config.modern else None
        self.layers = nnx.List(layers)

    def __call__(self, ids, segments=None, mask=None, *, deterministic=True):
        places, padding = jnp.arange(ids.shape[1]), self.config.padding
        x = self.embed(ids)
        if self.positions is not None and self.segments is not None:
            positions = places
            if padding is not None:  # RoBERTa: padding is at this position, tokens follow it
                real = (ids != padding).astype(jnp.int32)
                positions = jnp.cumsum(real, axis=1) * real + padding
            x = x + self.segments(jnp.zeros_like(ids) if segments is None else segments)
            x = x + self.positions(positions)
        x = self.dropout(self.norm(x), deterministic=deterministic)
        shown = jnp.ones(ids.shape, bool) if mask is None else jnp.asarray(mask) != 0
        whole = shown[:, None, None, :]
        near = whole & (jnp.abs(places[:, None] - places) < (self.config.variant.window or 0))
        for index, layer in enumerate(self.layers):
            seen = near if index in self.config.variant.local_layers else whole
            x, _ = layer(x, places, mask=seen, deterministic=deterministic)
        return x if self.last_norm is None else self.last_norm(x)


class Head(nnx.Module):
    """The hidden layer of a head, norm(act(x W))."""

    def __init__(self, parts: Parts):
        config = parts.config
        self.activation = ACTIVATIONS[config.head_activation]
        self.transform = parts.linear(config.width, config.width, bias=config.head_bias)
        self.norm = parts.norm()

    def __call__(self, x):
        return self.norm(self.activation(self.transform(x)))


class Bert(nnx.Module):
    """An encoder with the head of a task.

    Takes `ids`, int32 (batch, time), and optionally `segments` (0 by default) and `mask` (0 or
    False on padding). Returns logits: (batch, time, vocab) for masked_lm, (batch, time, 2) of start
    and end for question_answering, or (batch, classes) for classification.
    """

    def __init__(
        self,
        config: EncoderConfig,
        task: Task,
        *,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        precision: PrecisionConfig | None = None,
        rngs: nnx.Rngs,
    ):
        parts = Parts(config, dtype, param_dtype, precision, rngs, norm_bias=config.norm_bias)
        width, modern = config.width, config.modern
        masked, pooled = task == "masked_lm", task == "classification"
        self.config, self.task = config, task
        self.encoder = Encoder(parts)
        parts.product = jax.lax.dot_general
        self.head = Head(parts) if modern or masked else None
        self.pooler = parts.linear(width, width) if pooled and not modern else None
        own = masked and not config.tied_readout
        self.readout = parts.linear(width, config.vocab, bias=False) if own else None
        zeros = jnp.zeros(config.vocab, param_dtype)
        self.bias = nnx.Param(zeros) if masked and config.readout_bias else None
        self.ends = parts.linear(width, 2) if task == "question_answering" else None
        self.classes = parts.linear(width, config.classes) if pooled else None
        self.dropout = parts.dropout() if pooled else None

    def __call__(self, ids, segments=None, mask=None, *, deterministic=True) -> jax.Array:
        x = self.encoder(ids, segments, mask, deterministic=deterministic)
        if self.classes is not None and self.config.pooling == "mean":
            shown = jnp.ones(ids.shape, bool) if mask is None else jnp.asarray(mask) != 0
            x = jnp.mean(x, axis=1, where=shown[..., None])
        elif self.classes is not None:
            x = x[:, 0]
        x = x if self.pooler is None else jnp.tanh(self.pooler(x))
        x = x if self.head is None else self.head(x)
        if self.classes is not None and self.dropout is not None:
            return self.classes(self.dropout(x, deterministic=deterministic))
        if self.ends is not None:
            return self.ends(x)
        logits = self.encoder.embed.attend(x) if self.readout is None else self.readout(x)
        return logits if self.bias is None else logits + self.bias[...]

    def loss(self, ids, segments, mask, *labels, deterministic=True) -> jax.Array:
        """Return the mean cross entropy in nats; negative labels do not count."""
        logits = self(ids, segments, mask, deterministic=deterministic).astype(jnp.float32)
        wanted = labels[0]
        if len(labels) > 1:
            logits, wanted = logits.swapaxes(1, 2), jnp.stack(labels, axis=-1)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(wanted, 0))
        chosen = wanted >= 0
        return jnp.where(chosen, losses, 0.0).sum() / jnp.maximum(chosen.sum(), 1)
