"""BERT, RoBERTa and ModernBERT in plain `flax.nnx`, as published, with a head for each task.

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
from ._config import Task
from ._shapes import BertConfig, ModernBertConfig
from .layers import ACTIVATIONS, Parts, attend
from .plain import Layer as GPTLayer


class Attention(nnx.Module):
    """Bidirectional self-attention."""

    def __init__(self, parts: Parts):
        width, self.heads = parts.config.width, parts.config.heads
        self.query, self.key, self.value, self.out = (parts.linear(width, width) for _ in range(4))

    def __call__(self, x, mask):
        split = (*x.shape[:-1], self.heads, x.shape[-1] // self.heads)
        q, k, v = (each(x).reshape(split) for each in (self.query, self.key, self.value))
        return self.out(attend(q, k, v, mask=mask).reshape(x.shape))


class Layer(nnx.Module):
    """A post-norm Transformer layer."""

    def __init__(self, parts: Parts):
        config = parts.config
        self.activation = ACTIVATIONS[config.activation]
        self.attention, self.attention_norm = Attention(parts), parts.norm()
        self.up = parts.linear(config.width, config.hidden)
        self.down = parts.linear(config.hidden, config.width)
        self.mlp_norm, self.dropout = parts.norm(), parts.dropout()

    def __call__(self, x, mask, *, deterministic=True):
        branch = self.attention(x, mask)
        x = self.attention_norm(x + self.dropout(branch, deterministic=deterministic))
        branch = self.down(self.activation(self.up(x)))
        return self.mlp_norm(x + self.dropout(branch, deterministic=deterministic))


class Encoder(nnx.Module):
    """The encoder of BERT and RoBERTa: ids (batch, time) to states (batch, time, width)."""

    def __init__(self, parts: Parts):
        config = parts.config
        self.padding = config.padding
        self.embed = parts.embed(config.vocab)
        self.positions, self.segments = parts.embed(config.context), parts.embed(config.segments)
        self.norm, self.dropout = parts.norm(), parts.dropout()
        self.layers = nnx.List([Layer(parts) for _ in range(config.layers)])

    def __call__(self, ids, segments=None, mask=None, *, deterministic=True):
        segments = jnp.zeros_like(ids) if segments is None else segments
        visible = None if mask is None else (jnp.asarray(mask) != 0)[:, None, None, :]
        positions = jnp.arange(ids.shape[1])
        if self.padding is not None:  # RoBERTa counts from the padding's id on, which padding has
            real = (ids != self.padding).astype(jnp.int32)
            positions = jnp.cumsum(real, axis=1) * real + self.padding
        x = self.embed(ids) + self.segments(segments) + self.positions(positions)
        x = self.dropout(self.norm(x), deterministic=deterministic)
        for layer in self.layers:
            x = layer(x, visible, deterministic=deterministic)
        return x


class _Same(nnx.Module):
    def __call__(self, x):
        return x


class ModernEncoder(nnx.Module):
    """The encoder of ModernBERT: bidirectional GPT layers, without the first attention norm."""

    def __init__(self, parts: Parts):
        config = parts.config
        self.local, self.window = config.variant.local_layers, config.variant.window
        self.embed, self.norm = parts.embed(config.vocab), parts.norm()
        self.dropout = parts.dropout()
        layers: Any = [GPTLayer(parts, index) for index in range(config.layers)]
        layers[0].attention_norm = _Same()
        self.layers = nnx.List(layers)
        self.last_norm = parts.norm()

    def __call__(self, ids, segments=None, mask=None, *, deterministic=True):
        """Encode ids; `segments` is ignored."""
        positions = jnp.arange(ids.shape[1])
        shown = jnp.ones(ids.shape, bool) if mask is None else jnp.asarray(mask) != 0
        whole = shown[:, None, None, :]
        near = whole & (jnp.abs(positions[:, None] - positions) < (self.window or 0))
        x = self.dropout(self.norm(self.embed(ids)), deterministic=deterministic)
        for index, layer in enumerate(self.layers):
            seen = near if index in self.local else whole
            x, _ = layer(x, positions, mask=seen, deterministic=deterministic)
        return self.last_norm(x)


class Head(nnx.Module):
    """norm(act(x W)), the hidden layer of a head."""

    def __init__(self, parts: Parts):
        config = parts.config
        self.activation = ACTIVATIONS[config.head_activation]
        self.transform = parts.linear(config.width, config.width, bias=config.head_bias)
        self.norm = parts.norm()

    def __call__(self, x):
        return self.norm(self.activation(self.transform(x)))


class Bert(nnx.Module):
    """An encoder with the head of a task.

    It is called with `ids`, int32 (batch, time), and optionally `segments` of the same shape (0 by
    default) and `mask` (0 or False where there is padding). Logits are (batch, time, vocab) of each
    token (masked_lm), (batch, time, 2) of the first and the last token of the answer
    (question_answering), or (batch, classes) of the sequence (classification), which is read from
    its first token or, as an option of ModernBERT, from the mean.
    """

    def __init__(
        self,
        config: BertConfig | ModernBertConfig,
        task: Task,
        *,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        precision: PrecisionConfig | None = None,
        rngs: nnx.Rngs,
    ):
        parts = Parts(config, dtype, param_dtype, precision, rngs, norm_bias=config.norm_bias)
        width, modern = config.width, isinstance(config, ModernBertConfig)
        masked, pooled = task == "masked_lm", task == "classification"
        self.config, self.task = config, task
        self.encoder = ModernEncoder(parts) if modern else Encoder(parts)
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
        """Return the mean cross entropy in nats over labels that are not negative.

        Labels are (batch, time) for masked tokens, (batch,) for classes, and for an answer two of
        (batch,), the positions of its first and last token.
        """
        logits = self(ids, segments, mask, deterministic=deterministic).astype(jnp.float32)
        wanted = labels[0]
        if len(labels) > 1:
            logits, wanted = logits.swapaxes(1, 2), jnp.stack(labels, axis=-1)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(wanted, 0))
        chosen = wanted >= 0
        return jnp.where(chosen, losses, 0.0).sum() / jnp.maximum(chosen.sum(), 1)
