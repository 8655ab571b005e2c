"""ModernBERT in plain `flax.nnx`: the layers of a GPT, which attend both ways, without the first
attention's norm, and a head of one more layer for each task.

References:
  Warner et al., 2024, Smarter, Better, Faster, Longer.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from ._bert import ACTIVATIONS, Bert, Classification, MaskedLM, QuestionAnswering
from ._config import ModernBertConfig, Task
from .layers import Parts
from .plain import Layer


class _Same(nnx.Module):
    def __call__(self, x):
        return x


class Encoder(nnx.Module):
    """Embeddings and layers: ids (batch, time) to states (batch, time, width)."""

    def __init__(self, parts: Parts):
        config = parts.config
        self.local, self.window = config.variant.local_layers, config.variant.window
        self.embed, self.norm = parts.embed(config.vocab), parts.norm()
        self.dropout = parts.dropout()
        layers: Any = [Layer(parts, index) for index in range(config.layers)]
        layers[0].attention_norm = _Same()
        self.layers = nnx.List(layers)
        self.last_norm = parts.norm()

    def __call__(self, ids, segments=None, mask=None, *, deterministic=True):
        """`segments` has no effect: there is none."""
        positions = jnp.arange(ids.shape[1])
        shown = jnp.ones(ids.shape, bool) if mask is None else jnp.asarray(mask) != 0
        whole = shown[:, None, None, :]
        near = whole & (jnp.abs(positions[:, None] - positions) < (self.window or 0))
        x = self.dropout(self.norm(self.embed(ids)), deterministic=deterministic)
        for index, layer in enumerate(self.layers):
            seen = near if index in self.local else whole
            x, _ = layer(x, positions, mask=seen, deterministic=deterministic)
        return self.last_norm(x)


class _Modern(Bert):
    config: ModernBertConfig
    encoder_class = Encoder


class ModernMaskedLM(_Modern, MaskedLM):
    """Logits (batch, time, vocab) of every token."""


class _Head(nnx.Module):
    """norm(act(x W)), before the last product of each task."""

    def __init__(self, parts: Parts):
        config = parts.config
        self.activation = config.head_activation
        self.transform = parts.linear(config.width, config.width, bias=config.head_bias)
        self.norm = parts.norm()

    def __call__(self, x):
        return self.norm(ACTIVATIONS[self.activation](self.transform(x)))


class ModernQuestionAnswering(_Modern, QuestionAnswering):
    """Logits (batch, time, 2) of the first and the last token of the answer."""

    def _add_head(self, parts: Parts) -> None:
        self.head, self.ends = _Head(parts), parts.linear(parts.config.width, 2)

    def __call__(self, ids, segments=None, mask=None, *, deterministic=True):
        return self.ends(self.head(self.encoder(ids, segments, mask, deterministic=deterministic)))


class ModernClassification(_Modern, Classification):
    """Logits (batch, classes) of the whole sequence, from its first token or from the mean."""

    def _add_head(self, parts: Parts) -> None:
        config = parts.config
        self.head, self.dropout = _Head(parts), parts.dropout()
        self.classes = parts.linear(config.width, config.classes)

    def __call__(self, ids, segments=None, mask=None, *, deterministic=True):
        x = self.encoder(ids, segments, mask, deterministic=deterministic)
        if self.config.pooling == "cls":
            pooled = x[:, 0]
        else:
            shown = jnp.ones(ids.shape) if mask is None else jnp.asarray(mask) != 0
            pooled = jnp.mean(x, axis=1, where=shown[..., None].astype(bool))
        return self.classes(self.dropout(self.head(pooled), deterministic=deterministic))


MODERN: dict[Task, type[Bert]] = {
    "masked_lm": ModernMaskedLM,
    "question_answering": ModernQuestionAnswering,
    "classification": ModernClassification,
}
"""The model for each task."""
