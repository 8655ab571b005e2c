"""The GPT in plain `flax.nnx`: the baseline that the unitscale model is measured against.

The same pre-norm decoder as `recipes.gpt.model` (positions, MLPs, grouped-query attention, key and
value cache), with GPT-2's initialisation and neither scales nor loss scaling.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from ..config import GPTModelConfig, ScalifyConfig
from .layers import Parts, attend


class KVCache(NamedTuple):
    """Keys and values of the tokens seen so far.

    keys and values have one (batch, length, kv_heads, head_dim) array per layer; `position` is the
    number of tokens already in them.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    position: jax.Array


def rotate(x: jax.Array, positions: jax.Array, base: float = 10000.0) -> jax.Array:
    """Rotary position embedding of x (batch, time, heads, head_dim) at positions (time,)."""
    half = x.shape[-1] // 2
    frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[:, None, None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return turned.astype(x.dtype)


def _last(config: GPTModelConfig) -> float:
    """A branch's last projection is smaller by the root of the number of branches (GPT-2)."""
    return 0.02 / (2 * config.layers) ** 0.5


class Attention(nnx.Module):
    """Causal self-attention with grouped queries."""

    def __init__(self, parts: Parts):
        config = parts.config
        self.heads, self.head_dim = config.heads, config.head_dim
        self.kv_heads = config.kv_heads or config.heads
        self.rope = config.positions == "rope"
        self.query = parts.linear(config.width, self.heads * self.head_dim)
        self.key = parts.linear(config.width, self.kv_heads * self.head_dim)
        self.value = parts.linear(config.width, self.kv_heads * self.head_dim)
        self.out = parts.linear(self.heads * self.head_dim, config.width, stddev=_last(config))

    def __call__(self, x, positions, past=None):
        """x (batch, time, width) at positions (time,); `past` is a layer's (keys, values)."""
        batch, time, _ = x.shape
        q = self.query(x).reshape(batch, time, self.heads, self.head_dim)
        k = self.key(x).reshape(batch, time, self.kv_heads, self.head_dim)
        v = self.value(x).reshape(batch, time, self.kv_heads, self.head_dim)
        if self.rope:
            q, k = rotate(q, positions), rotate(k, positions)
        if past is None:
            mixed = attend(q, k, v, is_causal=True)
        else:
            put = jax.lax.dynamic_update_slice_in_dim
            keys, values = put(past[0], k, positions[0], 1), put(past[1], v, positions[0], 1)
            visible = jnp.arange(keys.shape[1]) <= positions[:, None]
            past = keys, values
            mixed = attend(q, keys, values, mask=visible[None, None])
        return self.out(mixed.reshape(batch, time, -1)), past


class MLP(nnx.Module):
    """gelu(x W) V, or (silu(x G) * x W) V when gated."""

    def __init__(self, parts: Parts):
        config = parts.config
        self.up = parts.linear(config.width, config.hidden)
        self.gate = parts.linear(config.width, config.hidden) if config.mlp == "gated" else None
        self.down = parts.linear(config.hidden, config.width, stddev=_last(config))

    def __call__(self, x):
        hidden = self.up(x)
        hidden = jax.nn.gelu(hidden) if self.gate is None else jax.nn.silu(self.gate(x)) * hidden
        return self.down(hidden)


class Layer(nnx.Module):
    """Pre-norm attention and MLP, each added to the stream."""

    def __init__(self, parts: Parts):
        self.attention_norm, self.attention = parts.norm(), Attention(parts)
        self.mlp_norm, self.mlp = parts.norm(), MLP(parts)
        self.dropout = parts.dropout()

    def __call__(self, x, positions, past=None, *, deterministic=True):
        branch, past = self.attention(self.attention_norm(x), positions, past)
        x = x + self.dropout(branch, deterministic=deterministic)
        branch = self.mlp(self.mlp_norm(x))
        return x + self.dropout(branch, deterministic=deterministic), past


class GPT(nnx.Module):
    """A decoder-only language model."""

    def __init__(
        self,
        config: GPTModelConfig,
        *,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        scalify: ScalifyConfig | None = None,
        rngs: nnx.Rngs,
    ):
        options = {"bias": config.bias, "norm": config.norm}
        parts = Parts(config, dtype, param_dtype, scalify, rngs, **options)
        self.config, self.dtype = config, dtype
        self.embed = parts.embed(config.vocab)
        if config.positions == "learned" and config.context is None:
            raise ValueError(
                "recipes.hf.plain.GPT: learned positions need config.context; got None; set it to "
                "the longest sequence"
            )
        self.positions = parts.embed(config.context or 0) if config.positions == "learned" else None
        self.dropout = parts.dropout()
        self.layers = nnx.List([Layer(parts) for _ in range(config.layers)])
        self.norm = parts.norm()
        parts.product = jax.lax.dot_general
        self.readout = (
            None if config.tied_readout else parts.linear(config.width, config.vocab, bias=False)
        )

    def __call__(self, ids, *, deterministic=True, cache: KVCache | None = None):
        """Logits of the next token.
        Returns:
          Logits (batch, time, vocab), with `cache` the pair of logits and the new cache.
        """
        start = 0 if cache is None else cache.position
        positions = start + jnp.arange(ids.shape[1])
        x = self.embed(ids)
        if self.positions is not None:
            x = x + self.positions(positions)
        x = self.dropout(x, deterministic=deterministic)
        keys, values = [], []
        for index, layer in enumerate(self.layers):
            past = None if cache is None else (cache.keys[index], cache.values[index])
            x, past = layer(x, positions, past, deterministic=deterministic)
            if past is not None:
                keys.append(past[0])
                values.append(past[1])
        x = self.norm(x)
        logits = self.embed.attend(x) if self.readout is None else self.readout(x)
        if cache is None:
            return logits
        return logits, KVCache(tuple(keys), tuple(values), cache.position + ids.shape[1])

    def init_cache(self, batch: int, length: int) -> KVCache:
        """An empty cache for `length` tokens of each of `batch` sequences."""
        config = self.config
        shape = (batch, length, config.kv_heads or config.heads, config.head_dim)
        empty = tuple(jnp.zeros(shape, self.dtype) for _ in range(config.layers))
        return KVCache(empty, empty, jnp.zeros((), jnp.int32))

    def loss(self, ids, targets, *, deterministic=True) -> jax.Array:
        """Mean cross entropy of targets (batch, time), a float32 scalar in nats per token."""
        logits = jnp.asarray(self(ids, deterministic=deterministic), jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
