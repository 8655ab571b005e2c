"""The GPT in `unitscale.nn`: pre-norm decoder, unit scaled, in any format of a policy."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from unitscale import nn

from ..config import GPTModelConfig

Cache = tuple[nn.KVCache, ...]


class GPT(nnx.Module):
    """A decoder-only language model."""

    def __init__(self, config: GPTModelConfig, *, policy: str | nn.Policy, rngs: nnx.Rngs):
        assert config.context is not None, "a recipe fills in the longest sequence"
        width, options = config.width, {"policy": policy, "rngs": rngs}
        padding, learned = config.vocab_multiple, config.positions == "learned"
        self.config = config
        self.embed = nn.Embed(config.vocab, width, pad_to_multiple_of=padding, **options)
        self.positions = nn.PositionalEmbed(config.context, width, **options) if learned else None
        self.dropout = nn.Dropout(config.dropout, rngs=rngs)
        self.stack = nn.TransformerStack(
            config.layers,
            width,
            config.heads,
            config.hidden,
            num_kv_heads=config.kv_heads,
            norm=config.norm,
            activation="gelu" if config.mlp == "plain" else "silu_glu",
            is_causal=True,
            use_bias=config.bias,
            **config.stack_options,
            **options,
        )
        kind = nn.RMSNorm if config.norm == "rms" else nn.LayerNorm
        self.norm = kind(width, policy=policy)
        self.readout = (
            None
            if config.tied_readout
            else nn.Readout(width, config.vocab, pad_to_multiple_of=padding, **options)
        )

    def __call__(self, ids: jax.Array, *, deterministic: bool = True, cache: Cache | None = None):
        """Logits (batch, time, vocab) of the next token, a ScaledArray; with `cache` a new one."""
        x, cache = self._states(self.embed(ids), ids, deterministic=deterministic, cache=cache)
        logits = self.embed.attend(x) if self.readout is None else self.readout(x)
        return logits if cache is None else (logits, cache)

    def _states(
        self, x: Any, ids: jax.Array, *, deterministic: bool, cache: Cache | None = None
    ) -> tuple[Any, Cache | None]:
        """Compute the readout's inputs (batch, time, width) of embedded ids, and the new cache.

        A cache holds one document: `document_end` in `ids` separates none there.
        """
        if self.positions is not None:
            start = 0 if cache is None else cache[0].length
            x = self.positions(x, start + jnp.arange(ids.shape[1]))
        x = self.dropout(x, deterministic=deterministic)
        if cache is None:
            end = self.config.document_end
            mask = None if end is None else same_document(ids, end)
            x = self.stack(x, mask=mask, deterministic=deterministic)
        else:
            x, cache = self.stack.decode(x, cache)
        return self.norm(x), cache

    def init_cache(self, batch: int, length: int) -> Cache:
        """An empty cache for `length` tokens of each of `batch` sequences."""
        return self.stack.init_cache(batch, length)

    def loss(self, ids: jax.Array, targets: jax.Array, *, deterministic: bool = True) -> jax.Array:
        """Mean cross entropy of targets (batch, time), a float32 scalar in nats per token."""
        x, readout = (
            self.embed.tied(ids) if self.readout is None else (self.embed(ids), self.readout)
        )
        x, _ = self._states(x, ids, deterministic=deterministic)
        return readout.cross_entropy(x, targets)


def same_document(ids: jax.Array, end: int) -> jax.Array:
    """Mask (batch, 1, time, time) of pairs of ids in one document, which `end` ends.

    Example:
      >>> same_document(jnp.array([[5, 0, 7]]), 0)[0, 0].astype(int).tolist()
      [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    """
    ends = (ids == end).astype(jnp.int32)
    document = jnp.cumsum(ends, axis=1) - ends
    return (document[:, :, None] == document[:, None, :])[:, None]
