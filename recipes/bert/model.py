"""BERT with its pretraining heads, in `unitscale.nn` and in plain Flax.

Unit scaling multiplies the gradient of each head's loss by a constant, which differs between heads.
Before losses are summed, the constants are made equal, to keep the direction of the gradient.
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
    """Return the constant that multiplies a head's gradient at the encoder's output.

    The head classifies `rows` of the encoder's `tokens` outputs into `classes`. The constant is
    `rows`, from `mean_loss`, times the backward factors over the forward factors of its three ops.
    """
    loss = rules.softmax_cross_entropy(classes)
    readout = rules.readout(width, classes, rows)
    looked_up = rules.embed(tokens, rows)
    constant = rows * (loss.bwd[0] / loss.fwd) * (readout.bwd[0] / readout.fwd)
    return constant * (looked_up.bwd[0] / looked_up.fwd)


def rows_of(x: ops.ArrayLike, positions: jax.Array) -> ScaledArray:
    """Select the rows (batch, n, width) of x (batch, time, width) at positions (batch, n)."""
    # `ops.embed` gives the gradient unit RMS over all rows of x, though it is zero at most of them,
    # and scales it like that of a tied readout.
    batch, time, width = x.shape
    start = time * jnp.arange(batch)[:, None]
    with batch_size(positions.size):  # global counts, because devices also shard the table
        return ops.embed(start + positions, x.reshape(batch * time, width))


def mean_loss(logits: ops.ArrayLike, labels, where=None, *, share: float = 1.0) -> jax.Array:
    """Average the cross entropy of labels (...), where `where` is True, in float32."""
    total = ops.softmax_cross_entropy(logits, labels, where=where, reduction="sum")
    return _mean_of(total, labels, where, share)


def _mean_of(total: jax.Array, labels, where, share: float = 1.0) -> jax.Array:
    # The backward factor must be a constant: it counts all labels, also those of other devices.
    count = labels.size if where is None else jnp.maximum(jnp.sum(where), 1)
    return ops.scale_bwd(total / count, share * labels.size * num_batch_shards(labels))


class Encoder(nnx.Module):
    """A Transformer over the sum of token, position and segment embeddings."""

    def __init__(self, config: BertModelConfig, *, policy: str | nn.Policy, rngs: nnx.Rngs):
        assert config.context is not None, "a recipe fills in the longest sequence"
        width, options = config.width, {"policy": policy, "rngs": rngs}
        padding, learned = config.vocab_multiple, config.positions == "learned"
        self.post = config.norm_placement == "post"
        self.embed = nn.Embed(config.vocab, width, pad_to_multiple_of=padding, **options)
        self.positions = nn.PositionalEmbed(config.context, width, **options) if learned else None
        self.segments = nn.Embed(SEGMENTS, width, **options)
        # Before the stack as in BERT (post-norm), or after it (pre-norm).
        self.norm = nn.LayerNorm(width, policy=policy)
        self.dropout = nn.Dropout(config.dropout, rngs=rngs)
        sizes = config.layers, width, config.heads, config.hidden
        placement: Any = {"norm": "layer", "norm_placement": config.norm_placement}
        self.stack = nn.TransformerStack(*sizes, **placement, **config.stack_options, **options)

    def __call__(self, ids, segments, *, mask=None, deterministic: bool = True) -> ops.ArrayLike:
        """Map int32 ids and segments (0 or 1), both (batch, time), to outputs (batch, time, width).

        `mask` is bool (batch, time), False on padding.
        """
        x = self.embed(ids)
        x = x if self.positions is None else self.positions(x)
        # x is already the sum of two embeddings: with these weights all three contribute equally.
        x = ops.weighted_add(x, self.segments(segments), weights=(math.sqrt(2), 1.0))
        x = self.norm(x) if self.post else x
        x = self.dropout(x, deterministic=deterministic)
        keys = None if mask is None else mask[:, None, None, :]
        x = self.stack(x, mask=keys, deterministic=deterministic)
        return x if self.post else self.norm(x)


class Pooler(nnx.Module):
    """A dense layer and tanh, applied to the first token's output or to the mean of all."""

    def __init__(self, width: int, pooling: Pooling = "cls", **options: Any):
        self.pooling = pooling
        self.dense = nn.Dense(width, width, **options)

    def __call__(self, x: ops.ArrayLike, mask: jax.Array | None = None) -> ScaledArray:
        """Map outputs (batch, time, width) to (batch, width); `mask` is False on padding."""
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
        """Return logits (batch, n, vocab) at positions (batch, n), given the encoder's outputs."""
        x = self._states(x, positions)
        return self.encoder.embed.attend(x) if self.readout is None else self.readout(x)

    def _states(self, x: ops.ArrayLike, positions: jax.Array) -> ScaledArray:
        """Compute the readout's inputs (batch, n, width) at positions (batch, n)."""
        return self.norm(ops.gelu(self.dense(rows_of(x, positions))))

    def loss(
        self, ids, segments, positions, targets, counts, answers=None, *, deterministic=True
    ) -> jax.Array:
        """Return the mean cross entropy of hidden tokens, plus that of `answers` about pairs.

        Ids and segments are (batch, time). At `positions` (batch, n), the model predicts `targets`;
        `counts` is False for entries that only pad to n. `answers` (batch,) are 0 or 1.
        """
        x = self.encoder(ids, segments, deterministic=deterministic)
        total = (self.readout or self.encoder.embed).cross_entropy(
            self._states(x, positions), targets, where=counts, reduction="sum"
        )
        if self.pooler is None or self.pair_readout is None or answers is None:
            return _mean_of(total, targets, counts)
        # Weights that give both gradients the same constant, and their sum unit RMS.
        heads = (self.vocab, positions.size), (SEGMENTS, answers.size)
        sizes = ids.size, x.shape[-1]
        first, second = rules.normalized_weights([1 / head_constant(*h, *sizes) for h in heads])
        loss = _mean_of(total, targets, counts, first)
        return loss + mean_loss(self.pair_readout(self.pooler(x)), answers, share=second)


class PlainEncoder(nnx.Module):
    """A pre-norm encoder made of the plain GPT's layers, with bidirectional attention."""

    def __init__(self, parts: Parts):
        config: GPTModelConfig = parts.config
        self.embed, self.segments = parts.embed(config.vocab), parts.embed(SEGMENTS)
        learned = config.positions == "learned"
        self.positions = parts.embed(config.context or 0) if learned else None
        self.dropout = parts.dropout()
        self.layers = nnx.List([Layer(parts, index) for index in range(config.layers)])
        self.norm = parts.norm()

    def __call__(self, ids, segments, *, deterministic: bool = True) -> jax.Array:
        """Map int32 ids and segments (batch, time) to outputs (batch, time, width)."""
        places = jnp.arange(ids.shape[1])
        x = self.embed(ids) + self.segments(segments)
        x = x if self.positions is None else x + self.positions(places)
        x = self.dropout(x, deterministic=deterministic)
        both_sides = jnp.ones((1, 1, len(places), len(places)), bool)
        for layer in self.layers:
            x, _ = layer(x, places, mask=both_sides, deterministic=deterministic)
        return self.norm(x)


class PlainBert(nnx.Module):
    """The baseline in plain Flax: predicts hidden tokens, with GPT-2's initialization."""

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
        """Return logits (batch, n, vocab) at positions (batch, n), given the encoder's outputs."""
        rows = jnp.take_along_axis(x, positions[..., None], axis=1)
        rows = self.norm(jax.nn.gelu(self.dense(rows)))
        return self.encoder.embed.attend(rows) if self.readout is None else self.readout(rows)

    def loss(self, ids, segments, positions, targets, counts, *, deterministic=True) -> jax.Array:
        """Return the mean cross entropy of hidden tokens; for the arguments see `Bert.loss`."""
        x = self.encoder(ids, segments, deterministic=deterministic)
        logits = self.predict(x, positions).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return jnp.sum(losses, where=counts) / jnp.maximum(counts.sum(), 1)
