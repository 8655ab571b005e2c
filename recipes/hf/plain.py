"""The GPT in plain `flax.nnx`: the baseline that the unitscale model is measured against.

The same pre-norm decoder as `recipes.gpt.model` (positions, MLPs, grouped-query attention, key and
value cache), with GPT-2's initialisation and neither scales nor loss scaling. With `config.decoder`
it is also any decoder of the Llama family.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from unitscale.core import shard_activations

from ..config import GPTModelConfig, PrecisionConfig
from .layers import ACTIVATIONS, Parts, attend, frequencies, rotate


class KVCache(NamedTuple):
    """Keys and values of the tokens seen so far.

    keys and values have one (batch, length, kv_heads, head_dim) array per layer; `position` is the
    number of tokens already in them.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    position: jax.Array


def _last(config: GPTModelConfig) -> float:
    """Standard deviation of a branch's last kernel: 0.02 / sqrt(number of branches) (GPT-2)."""
    return 0.02 / (2 * config.layers) ** 0.5


class Attention(nnx.Module):
    """Self-attention with grouped queries, causal by default."""

    def __init__(self, parts: Parts, index: int):
        config, own = parts.config, parts.config.variant
        local = index in own.local_layers
        self.heads, self.head_dim = config.heads, config.head_dim
        self.kv_heads = config.kv_heads or config.heads
        self.window, self.cap = own.window if local else None, own.attention_cap
        self.scale = own.attention_scale
        self.rope = (local and own.local_rope) or own.rope if config.positions == "rope" else None
        width, inner, bias = config.width, self.heads * self.head_dim, "qkv" in config.biases
        self.query = parts.linear(width, inner, bias=bias)
        self.key = parts.linear(width, self.kv_heads * self.head_dim, bias=bias)
        self.value = parts.linear(width, self.kv_heads * self.head_dim, bias=bias)
        self.query_norm, self.key_norm = (
            parts.norm(self.head_dim) if own.query_key_norms else None for _ in range(2)
        )
        self.out = parts.linear(inner, width, stddev=_last(config), bias="out" in config.biases)

    def __call__(self, x, positions, past=None, mask=None):
        """x (batch, time, width) at positions (time,); `past` is a layer's (keys, values).

        `mask`, which broadcasts to (batch, heads, time, keys), says what is attended to in place of
        all that came before.
        """
        batch, time, _ = x.shape
        q = self.query(x).reshape(batch, time, self.heads, self.head_dim)
        k = self.key(x).reshape(batch, time, self.kv_heads, self.head_dim)
        v = self.value(x).reshape(batch, time, self.kv_heads, self.head_dim)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if self.rope is not None:
            turns, factor = frequencies(self.head_dim, self.rope), self.rope.attention_factor
            q, k = (rotate(x, positions, turns, factor) for x in (q, k))
        if past is not None:
            put = jax.lax.dynamic_update_slice_in_dim
            k, v = past = put(past[0], k, positions[0], 1), put(past[1], v, positions[0], 1)
        options: dict[str, Any] = {"scale": self.scale, "cap": self.cap}
        if mask is not None:
            options["mask"] = mask
        elif past is None and self.window is None and self.cap is None:
            options["is_causal"] = True
        else:
            behind = positions[:, None] - jnp.arange(k.shape[1])
            seen = behind >= 0 if self.window is None else (behind >= 0) & (behind < self.window)
            options["mask"] = seen[None, None]
        return self.out(attend(q, k, v, **options).reshape(batch, time, -1)), past


class MLP(nnx.Module):
    """gelu(x W) V, or gated (act(x G) * x W) V."""

    def __init__(self, parts: Parts):
        config, bias = parts.config, "mlp" in parts.config.biases
        self.activation = config.variant.activation
        self.up = parts.linear(config.width, config.hidden, bias=bias)
        gated = config.mlp == "gated"
        self.gate = parts.linear(config.width, config.hidden, bias=bias) if gated else None
        self.down = parts.linear(config.hidden, config.width, stddev=_last(config), bias=bias)

    def __call__(self, x):
        hidden = self.up(x)
        if self.gate is None:
            return self.down(jax.nn.gelu(hidden))
        return self.down(ACTIVATIONS[self.activation](self.gate(x)) * hidden)


class Layer(nnx.Module):
    """A pre-norm Transformer layer, optionally with a second norm after each branch (Gemma)."""

    def __init__(self, parts: Parts, index: int):
        self.attention_norm, self.attention = parts.norm(), Attention(parts, index)
        self.mlp_norm, self.mlp = parts.norm(), MLP(parts)
        self.post_attention_norm, self.post_mlp_norm = (
            parts.norm() if parts.config.variant.post_norms else None for _ in range(2)
        )
        self.dropout = parts.dropout()

    def __call__(self, x, positions, past=None, mask=None, *, deterministic=True):
        branch, past = self.attention(self.attention_norm(x), positions, past, mask)
        if self.post_attention_norm is not None:
            branch = self.post_attention_norm(branch)
        x = x + self.dropout(branch, deterministic=deterministic)
        branch = self.mlp(self.mlp_norm(x))
        if self.post_mlp_norm is not None:
            branch = self.post_mlp_norm(branch)
        return x + self.dropout(branch, deterministic=deterministic), past


class GPT(nnx.Module):
    """A decoder-only language model."""

    def __init__(
        self,
        config: GPTModelConfig,
        *,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        precision: PrecisionConfig | None = None,
        rngs: nnx.Rngs,
    ):
        norm = "offset" if config.variant.norm_offset else config.norm
        parts = Parts(config, dtype, param_dtype, precision, rngs, norm=norm)
        self.config, self.dtype, self.remat = config, dtype, config.remat
        self.embed = parts.embed(config.vocab)
        if config.positions == "learned" and config.context is None:
            raise ValueError(
                "recipes.hf.plain.GPT: learned positions need config.context; got None; set it to "
                "the longest sequence"
            )
        self.positions = parts.embed(config.context or 0) if config.positions == "learned" else None
        self.dropout = parts.dropout()
        self.layers = nnx.List([Layer(parts, index) for index in range(config.layers)])
        self.norm = parts.norm()
        parts.product = jax.lax.dot_general
        self.readout = (
            None if config.tied_readout else parts.linear(config.width, config.vocab, bias=False)
        )

    def __call__(self, ids, *, deterministic=True, cache: KVCache | None = None):
        """Return logits (batch, time, vocab) of next tokens; with `cache`, also the new cache."""
        start = 0 if cache is None else cache.position
        positions = start + jnp.arange(ids.shape[1])
        x = self.embed(ids)
        if self.config.variant.embedding_scale:
            x = x * jnp.asarray(self.config.width**0.5, x.dtype)
        if self.positions is not None:
            x = x + self.positions(positions)
        x = shard_activations(self.dropout(x, deterministic=deterministic))

        def apply(layer, x, positions, past):
            return layer(x, positions, past, deterministic=deterministic)

        if self.remat == "layer" and cache is None:
            apply = nnx.remat(apply)
        kept = []
        for index, layer in enumerate(self.layers):
            past = None if cache is None else (cache.keys[index], cache.values[index])
            x, past = apply(layer, x, positions, past)
            x = shard_activations(x)
            kept.append(past)
        x = self.norm(x)
        logits = self.embed.attend(x) if self.readout is None else self.readout(x)
        if (cap := self.config.variant.logit_cap) is not None:
            logits = cap * jnp.tanh(logits / cap)
        if cache is None:
            return logits
        keys, values = zip(*kept, strict=True)
        return logits, KVCache(keys, values, cache.position + ids.shape[1])

    def init_cache(self, batch: int, length: int) -> KVCache:
        """Return an empty cache for `length` tokens of each of `batch` sequences."""
        config = self.config
        shape = (batch, length, config.kv_heads or config.heads, config.head_dim)
        empty = tuple(jnp.zeros(shape, self.dtype) for _ in range(config.layers))
        return KVCache(empty, empty, jnp.zeros((), jnp.int32))

    def loss(self, ids, targets, *, deterministic=True) -> jax.Array:
        """Return the mean cross entropy of targets (batch, time) in nats per token, in float32."""
        logits = jnp.asarray(self(ids, deterministic=deterministic), jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
