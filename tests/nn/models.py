"""A small language model of this library's layers."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from unitscale import nn, ops


class Decoder(nnx.Module):
    """A causal stack between an embedding and a readout; `options` are those of the stack."""

    def __init__(
        self,
        width: int,
        *,
        policy: Any = "float32",
        vocab: int = 11,
        layers: int = 2,
        context: int = 8,
        tied: bool = False,
        learned: bool = False,
        **options: Any,
    ) -> None:
        rngs = nnx.Rngs(0)
        options = {"use_bias": False, "max_length": context} | options
        self.embed = nn.Embed(vocab, width, policy=policy, rngs=rngs)
        self.positions = (
            nn.PositionalEmbed(context, width, policy=policy, rngs=rngs) if learned else None
        )
        self.stack = nn.TransformerStack(
            layers, width, 4, 2 * width, is_causal=True, **options, policy=policy, rngs=rngs
        )
        self.norm = nn.RMSNorm(width, policy=policy)
        self.readout = None if tied else nn.Readout(width, vocab, policy=policy, rngs=rngs)

    def __call__(self, ids: jax.Array, cache: Any = None) -> Any:
        x = self.embed(ids)
        if self.positions is not None:
            start = 0 if cache is None else cache[0].length
            x = self.positions(x, start + jnp.arange(ids.shape[1]))
        x, cache = (self.stack(x), None) if cache is None else self.stack.decode(x, cache)
        x = self.norm(x)
        logits = self.embed.attend(x) if self.readout is None else self.readout(x)
        return logits if cache is None else (logits, cache)

    def loss(self, ids: jax.Array, targets: jax.Array) -> jax.Array:
        return ops.softmax_cross_entropy(self(ids), targets)
