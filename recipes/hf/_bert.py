"""BERT and RoBERTa in plain `flax.nnx`, as published: post-norm, and a head for each task."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from ..config import ScalifyConfig
from ._config import BertConfig, ModernBertConfig, Task
from .layers import Parts, attend

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_new": jax.nn.gelu,
    "relu": jax.nn.relu,
}


class Attention(nnx.Module):
    """Self-attention of every token to all that the mask shows."""

    def __init__(self, parts: Parts):
        width, self.heads = parts.config.width, parts.config.heads
        self.query, self.key, self.value, self.out = (parts.linear(width, width) for _ in range(4))

    def __call__(self, x, mask):
        split = (*x.shape[:-1], self.heads, x.shape[-1] // self.heads)
        q, k, v = (each(x).reshape(split) for each in (self.query, self.key, self.value))
        return self.out(attend(q, k, v, mask=mask).reshape(x.shape))


class Layer(nnx.Module):
    """Attention and MLP; a norm follows each sum."""

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
    """Embeddings and layers: ids (batch, time) to states (batch, time, width)."""

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
        x = self.embed(ids) + self.segments(segments) + self.positions(self._places(ids))
        x = self.dropout(self.norm(x), deterministic=deterministic)
        for layer in self.layers:
            x = layer(x, visible, deterministic=deterministic)
        return x

    def _places(self, ids):
        """Positions from 0; RoBERTa's from the padding's id on, which padding has itself."""
        if self.padding is None:
            return jnp.arange(ids.shape[1])
        real = (ids != self.padding).astype(jnp.int32)
        return jnp.cumsum(real, axis=1) * real + self.padding


class Bert(nnx.Module):
    """An encoder with the head of a task.

    Every head is called with `ids`, int32 (batch, time), and optionally `segments` of the same
    shape (0 by default) and `mask` (0 or False where there is padding).
    """

    encoder_class: Callable[[Parts], Any] = Encoder

    def __init__(
        self,
        config: BertConfig | ModernBertConfig,
        *,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        scalify: ScalifyConfig | None = None,
        rngs: nnx.Rngs,
    ):
        parts = Parts(config, dtype, param_dtype, scalify, rngs, norm_bias=config.norm_bias)
        self.config = config
        self.encoder = self.encoder_class(parts)
        parts.product = jax.lax.dot_general
        self._add_head(parts)

    def _add_head(self, parts: Parts) -> None:
        raise NotImplementedError("Bert is the base of a model for each task")


class MaskedLM(Bert):
    """Logits (batch, time, vocab) of every token."""

    def _add_head(self, parts: Parts) -> None:
        config = parts.config
        self.activation = ACTIVATIONS[config.head_activation]
        self.transform = parts.linear(config.width, config.width, bias=config.head_bias)
        self.norm = parts.norm()
        self.readout = (
            None if config.tied_readout else parts.linear(config.width, config.vocab, bias=False)
        )
        self.bias = (
            nnx.Param(jnp.zeros(config.vocab, parts.options["param_dtype"]))
            if config.readout_bias
            else None
        )

    def __call__(self, ids, segments=None, mask=None, *, deterministic=True):
        x = self.encoder(ids, segments, mask, deterministic=deterministic)
        x = self.norm(self.activation(self.transform(x)))
        logits = self.encoder.embed.attend(x) if self.readout is None else self.readout(x)
        return logits if self.bias is None else logits + self.bias[...]

    def loss(self, ids, labels, segments=None, mask=None, *, deterministic=True) -> jax.Array:
        """Mean cross entropy where labels (batch, time) are not negative, in nats per token."""
        logits = self(ids, segments, mask, deterministic=deterministic).astype(jnp.float32)
        chosen = labels >= 0
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0))
        return jnp.where(chosen, losses, 0.0).sum() / jnp.maximum(chosen.sum(), 1)


class QuestionAnswering(Bert):
    """Logits (batch, time, 2) of the first and the last token of the answer."""

    def _add_head(self, parts: Parts) -> None:
        self.ends = parts.linear(parts.config.width, 2)

    def __call__(self, ids, segments=None, mask=None, *, deterministic=True):
        return self.ends(self.encoder(ids, segments, mask, deterministic=deterministic))

    def loss(self, ids, labels, segments=None, mask=None, *, deterministic=True) -> jax.Array:
        """Mean cross entropy of labels (batch, 2), the positions of the first and last token."""
        logits = self(ids, segments, mask, deterministic=deterministic).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits.swapaxes(1, 2), labels)
        return losses.mean()


class Classification(Bert):
    """Logits (batch, classes) of the whole sequence, from its first token."""

    def _add_head(self, parts: Parts) -> None:
        config = parts.config
        self.pooler = parts.linear(config.width, config.width)
        self.classes, self.dropout = parts.linear(config.width, config.classes), parts.dropout()

    def __call__(self, ids, segments=None, mask=None, *, deterministic=True):
        x = self.encoder(ids, segments, mask, deterministic=deterministic)
        pooled = jnp.tanh(self.pooler(x[:, 0]))
        return self.classes(self.dropout(pooled, deterministic=deterministic))

    def loss(self, ids, labels, segments=None, mask=None, *, deterministic=True) -> jax.Array:
        """Mean cross entropy of labels (batch,)."""
        logits = self(ids, segments, mask, deterministic=deterministic).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


BERTS: dict[Task, type[Bert]] = {
    "masked_lm": MaskedLM,
    "question_answering": QuestionAnswering,
    "classification": Classification,
}
"""The model for each task."""
