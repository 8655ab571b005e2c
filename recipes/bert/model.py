"""BERT in `unitscale.nn`, an encoder and the heads that it is pretrained with, and in plain Flax.

Unit scaling multiplies the gradient of each head's loss by a constant of its own. Where losses are
summed, the constants have to be made equal, or the sum's gradient points elsewhere.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from unitscale import ScaledArray, batch_size, nn, ops, rules
from unitscale.core import num_batch_shards

from ..config import GPTModelConfig
from ..hf.plain import Layer, Parts
from ..pooling import mean_of_tokens
from .config import SEGMENTS, BertModelConfig, Pairs, Pooling


def head_constant(classes: int, rows: int, tokens: int, width: int) -> float:
    """The gradient at the encoder's output over the true gradient of the mean loss of a head.

    The head reads `rows` of the encoder's `tokens` outputs, into `classes`. `mean_loss` multiplies
    by `rows`; cross entropy, readout and look-up by their backward over their forward factors.
    """
    loss = rules.softmax_cross_entropy(classes)
    readout = rules.readout(width, classes, rows)
    looked_up = rules.embed(tokens, rows)
    constant = rows * (loss.bwd[0] / loss.fwd) * (readout.bwd[0] / readout.fwd)
    return constant * (looked_up.bwd[0] / looked_up.fwd)


def rows_of(x: ops.ArrayLike, positions: jax.Array) -> ScaledArray:
    """The outputs (batch, n, width) at positions (batch, n) of x (batch, time, width).

    A look-up in a table of all outputs, so that a gradient that reaches few of them is unit over
    all, as in `ops.embed`; a tied readout's gradient and the look-up's have one constant then.
    """
    batch, time, width = x.shape
    start = time * jnp.arange(batch)[:, None]
    with batch_size(positions.size):  # devices that divide the batch divide the table as well
        return ops.embed(start + positions, x.reshape(batch * time, width))


def mean_loss(logits: ops.ArrayLike, labels, where=None, *, share: float = 1.0) -> jax.Array:
    """Mean cross entropy of the labels (...) that count of logits (..., classes), in float32."""
    total = ops.softmax_cross_entropy(logits, labels, where=where, reduction="sum")
    return _mean_of(total, labels, where, share)


def _mean_of(total: jax.Array, labels, where, share: float = 1.0) -> jax.Array:
    # A constant: also labels of other devices and those that do not count.
    count = labels.size if where is None else jnp.maximum(jnp.sum(where), 1)
    return ops.scale_bwd(total / count, share * labels.size * num_batch_shards(labels))


class Encoder(nnx.Module):
    """Embeddings of tokens, positions and segments, and a Transformer over them."""

    def __init__(self, config: BertModelConfig, *, policy: str | nn.Policy, rngs: nnx.Rngs):
        assert config.context is not None, "a recipe fills in the longest sequence"
        width, options = config.width, {"policy": policy, "rngs": rngs}
        padding, learned = config.vocab_multiple, config.positions == "learned"
        self.post = config.norm_placement == "post"
        self.embed = nn.Embed(config.vocab, width, pad_to_multiple_of=padding, **options)
        self.positions = nn.PositionalEmbed(config.context, width, **options) if learned else None
        self.segments = nn.Embed(SEGMENTS, width, **options)
        # Before the stack as in BERT, or after it, where the layers leave their sum as it is.
        self.norm = nn.LayerNorm(width, policy=policy)
        self.dropout = nn.Dropout(config.dropout, rngs=rngs)
        sizes = config.layers, width, config.heads, config.hidden
        placement: Any = {"norm": "layer", "norm_placement": config.norm_placement}
        self.stack = nn.TransformerStack(*sizes, **placement, **config.stack_options, **options)

    def __call__(self, ids, segments, *, mask=None, deterministic: bool = True) -> ops.ArrayLike:
        """Outputs (batch, time, width) of int32 ids and segments, 0 or 1, both (batch, time).

        `mask` is bool (batch, time), False on padding.
        """
        x = self.embed(ids)
        x = x if self.positions is None else self.positions(x)
        # Two parts and one, so that three tables weigh the same.
        x = ops.weighted_add(x, self.segments(segments), weights=(math.sqrt(2), 1.0))
        x = self.norm(x) if self.post else x
        x = self.dropout(x, deterministic=deterministic)
        keys = None if mask is None else mask[:, None, None, :]
        x = self.stack(x, mask=keys, deterministic=deterministic)
        return x if self.post else self.norm(x)


class Pooler(nnx.Module):
    """A dense layer and tanh over the output of the first token, [CLS], or the mean of all."""

    def __init__(self, width: int, pooling: Pooling = "cls", **options: Any):
        self.pooling = pooling
        self.dense = nn.Dense(width, width, **options)

    def __call__(self, x: ops.ArrayLike, mask: jax.Array | None = None) -> ScaledArray:
        """Maps outputs (batch, time, width) to (batch, width); `mask` is False on padding."""
        if self.pooling == "mean":
            return ops.tanh(self.dense(mean_of_tokens(x, mask)))
        first = rows_of(x, jnp.zeros((x.shape[0], 1), jnp.int32))
        return ops.tanh(self.dense(first.reshape(x.shape[0], -1)))


class Bert(nnx.Module):
    """A BERT with its pretraining heads."""

    def __init__(self, config: BertModelConfig, pairs: Pairs = "none", **options: Any):
        width, asked, readout = config.width, pairs != "none", None
        self.vocab = config.vocab
        self.encoder = Encoder(config, **options)
        self.dense = nn.Dense(width, width, **options)
        self.norm = nn.LayerNorm(width, policy=options["policy"])
        if not config.tied_readout:
            padding = config.vocab_multiple
            readout = nn.Readout(width, config.vocab, pad_to_multiple_of=padding, **options)
        self.readout = nnx.data(readout)
        self.pooler = nnx.data(Pooler(width, **options) if asked else None)
        self.pair_readout = nnx.data(nn.Readout(width, SEGMENTS, **options) if asked else None)

    def predict(self, x: ops.ArrayLike, positions: jax.Array) -> ScaledArray:
        """Logits (batch, n, vocab) of the tokens at positions (batch, n), from the outputs x."""
        x = self._states(x, positions)
        return self.encoder.embed.attend(x) if self.readout is None else self.readout(x)

    def _states(self, x: ops.ArrayLike, positions: jax.Array) -> ScaledArray:
        """Compute the readout's inputs (batch, n, width) at positions (batch, n)."""
        return self.norm(ops.gelu(self.dense(rows_of(x, positions))))

    def loss(
        self, ids, segments, positions, targets, counts, answers=None, *, deterministic=True
    ) -> jax.Array:
        """Mean cross entropy of the hidden tokens, and where pairs are asked that of the answers.

        Ids and segments are (batch, time); tokens are predicted at `positions` (batch, n), where
        `targets` are, but for predictions that only fill up n, whose `counts` is False. `answers`
        (batch,), 0 or 1, are what is asked of each pair.
        """
        x = self.encoder(ids, segments, deterministic=deterministic)
        total = (self.readout or self.encoder.embed).cross_entropy(
            self._states(x, positions), targets, where=counts, reduction="sum"
        )
        if self.pooler is None or self.pair_readout is None or answers is None:
            return _mean_of(total, targets, counts)
        # One constant for both gradients, and a unit sum.
        heads = (self.vocab, positions.size), (SEGMENTS, answers.size)
        sizes = ids.size, x.shape[-1]
        first, second = rules.normalized_weights([1 / head_constant(*h, *sizes) for h in heads])
        loss = _mean_of(total, targets, counts, first)
        return loss + mean_loss(self.pair_readout(self.pooler(x)), answers, share=second)


class PlainEncoder(nnx.Module):
    """The pre-norm encoder of the layers of the plain GPT, with attention to both sides."""

    def __init__(self, parts: Parts):
        config: GPTModelConfig = parts.config
        self.embed, self.segments = parts.embed(config.vocab), parts.embed(SEGMENTS)
        learned = config.positions == "learned"
        self.positions = parts.embed(config.context or 0) if learned else None
        self.dropout = parts.dropout()
        self.layers = nnx.List([Layer(parts, index) for index in range(config.layers)])
        self.norm = parts.norm()

    def __call__(self, ids, segments, *, deterministic: bool = True) -> jax.Array:
        """Outputs (batch, time, width) of int32 ids and segments (batch, time)."""
        places = jnp.arange(ids.shape[1])
        x = self.embed(ids) + self.segments(segments)
        x = x if self.positions is None else x + self.positions(places)
        x = self.dropout(x, deterministic=deterministic)
        both_sides = jnp.ones((1, 1, len(places), len(places)), bool)
        for layer in self.layers:
            x, _ = layer(x, places, mask=both_sides, deterministic=deterministic)
        return self.norm(x)


class PlainBert(nnx.Module):
    """The baseline: a BERT that predicts hidden tokens, with GPT-2's initialisation, no scales."""

    def __init__(self, config: BertModelConfig, *, dtype: Any = jnp.float32, rngs: nnx.Rngs):
        keys = "vocab", "width", "layers", "heads", "mlp_ratio", "context", "positions", "dropout"
        taken = config.model_dump(include={*keys})
        shape = GPTModelConfig(**taken, library="plain", norm="layer", bias=True)
        parts = Parts(shape, dtype, jnp.float32, None, rngs)
        self.encoder = PlainEncoder(parts)
        self.dense, self.norm = parts.linear(shape.width, shape.width), parts.norm()
        tied, sizes = config.tied_readout, (shape.width, shape.vocab)
        self.readout = nnx.data(None if tied else parts.linear(*sizes, bias=False))

    def predict(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Logits (batch, n, vocab) of the tokens at positions (batch, n), from the outputs x."""
        rows = jnp.take_along_axis(x, positions[..., None], axis=1)
        rows = self.norm(jax.nn.gelu(self.dense(rows)))
        return self.encoder.embed.attend(rows) if self.readout is None else self.readout(rows)

    def loss(self, ids, segments, positions, targets, counts, *, deterministic=True) -> jax.Array:
        """Mean cross entropy of the hidden tokens; arguments as those of `Bert.loss`."""
        x = self.encoder(ids, segments, deterministic=deterministic)
        logits = self.predict(x, positions).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return jnp.sum(losses, where=counts) / jnp.maximum(counts.sum(), 1)
