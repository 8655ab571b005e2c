"""BERT in `unitscale.nn`: a bidirectional encoder, and the heads that it is pretrained with."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from unitscale import ScaledArray, nn, ops

from ..pooling import mean_of_tokens
from .config import SEGMENTS, BertModelConfig, Pairs, Pooling
from .heads import Head, mean_loss, mean_of, rows_of, shares


class Encoder(nnx.Module):
    """Embeddings of tokens, positions and segments, and a Transformer over them."""

    def __init__(self, config: BertModelConfig, *, policy: str | nn.Policy, rngs: nnx.Rngs):
        if config.context is None:
            raise ValueError(
                "recipes.bert.model.Encoder: config.context must be a number of positions; got "
                "None; set it to the longest sequence"
            )
        width = config.width
        self.post = config.norm_placement == "post"
        self.embed = nn.Embed(
            config.vocab,
            width,
            pad_to_multiple_of=config.vocab_multiple,
            policy=policy,
            rngs=rngs,
        )
        self.positions = (
            nn.PositionalEmbed(config.context, width, policy=policy, rngs=rngs)
            if config.positions == "learned"
            else None
        )
        self.segments = nn.Embed(SEGMENTS, width, policy=policy, rngs=rngs)
        # Before the stack as in BERT, or after it, where the layers leave their sum as it is.
        self.norm = nn.LayerNorm(width, policy=policy)
        self.dropout = nn.Dropout(config.dropout, rngs=rngs)
        self.stack = nn.TransformerStack(
            config.layers,
            width,
            config.heads,
            config.hidden,
            norm="layer",
            norm_placement=config.norm_placement,
            **config.stack_options,
            policy=policy,
            rngs=rngs,
        )

    def __call__(
        self,
        ids: jax.Array,
        segments: jax.Array,
        *,
        mask: jax.Array | None = None,
        deterministic: bool = True,
    ) -> ops.ArrayLike:
        """Outputs (batch, time, width) of tokens.

        Args:
          ids: int32 (batch, time).
          segments: int32 (batch, time), 0 or 1.
          mask: bool (batch, time), False where a token is padding; None for none.
          deterministic: Leaves dropout out.
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

    def __init__(
        self, width: int, pooling: Pooling = "cls", *, policy: str | nn.Policy, rngs: nnx.Rngs
    ):
        self.pooling = pooling
        self.dense = nn.Dense(width, width, policy=policy, rngs=rngs)

    def __call__(self, x: ops.ArrayLike, mask: jax.Array | None = None) -> ScaledArray:
        """Maps the encoder's outputs (batch, time, width) to (batch, width).

        Args:
          x: The outputs.
          mask: bool (batch, time), False where a token is padding; None for none.
        """
        if self.pooling == "mean":
            return ops.tanh(self.dense(mean_of_tokens(x, mask)))
        first = rows_of(x, jnp.zeros((x.shape[0], 1), jnp.int32))
        return ops.tanh(self.dense(first.reshape(x.shape[0], -1)))


class Bert(nnx.Module):
    """A BERT with its pretraining heads."""

    def __init__(
        self,
        config: BertModelConfig,
        pairs: Pairs = "none",
        *,
        policy: str | nn.Policy,
        rngs: nnx.Rngs,
    ):
        width = config.width
        self.vocab = config.vocab
        self.encoder = Encoder(config, policy=policy, rngs=rngs)
        self.dense = nn.Dense(width, width, policy=policy, rngs=rngs)
        self.norm = nn.LayerNorm(width, policy=policy)
        self.readout = nnx.data(
            None
            if config.tied_readout
            else nn.Readout(
                width,
                config.vocab,
                pad_to_multiple_of=config.vocab_multiple,
                policy=policy,
                rngs=rngs,
            )
        )
        asked = pairs != "none"
        self.pooler = nnx.data(Pooler(width, policy=policy, rngs=rngs) if asked else None)
        self.pair_readout = nnx.data(
            nn.Readout(width, SEGMENTS, policy=policy, rngs=rngs) if asked else None
        )

    def predict(self, x: ops.ArrayLike, positions: jax.Array) -> ScaledArray:
        """Logits (batch, n, vocab) of the tokens at positions (batch, n), from the outputs x."""
        x = self._states(x, positions)
        return self.encoder.embed.attend(x) if self.readout is None else self.readout(x)

    def _states(self, x: ops.ArrayLike, positions: jax.Array) -> ScaledArray:
        """What the readout reads at positions (batch, n): (batch, n, width)."""
        return self.norm(ops.gelu(self.dense(rows_of(x, positions))))

    def loss(
        self,
        ids: jax.Array,
        segments: jax.Array,
        positions: jax.Array,
        targets: jax.Array,
        counts: jax.Array,
        answers: jax.Array | None = None,
        *,
        deterministic: bool = True,
    ) -> jax.Array:
        """Mean cross entropy of the hidden tokens, and where pairs are asked that of the answers.

        Args:
          ids: int32 (batch, time).
          segments: int32 (batch, time), 0 or 1.
          positions: int32 (batch, n), where tokens are predicted.
          targets: int32 (batch, n), the tokens that are there.
          counts: bool (batch, n), False for predictions that only fill up n.
          answers: int32 (batch,), 0 or 1: what is asked of each pair.
          deterministic: Leaves dropout out.
        """
        x = self.encoder(ids, segments, deterministic=deterministic)
        width, tokens = x.shape[-1], ids.size
        hidden = Head(self.vocab, positions.size, tokens, width)
        total = (self.readout or self.encoder.embed).cross_entropy(
            self._states(x, positions), targets, where=counts, reduction="sum"
        )
        if self.pooler is None or self.pair_readout is None or answers is None:
            return mean_of(total, targets, counts)
        first, second = shares([hidden, Head(SEGMENTS, answers.size, tokens, width)])
        loss = mean_of(total, targets, counts, share=first)
        return loss + mean_loss(self.pair_readout(self.pooler(x)), answers, share=second)
