"""The GPT in plain `flax.nnx`: the baseline for the unitscale model.

It is the same pre-norm decoder as in `recipes.gpt.task`, with GPT-2's initialization and without
scales. With `config.decoder` it is also any decoder of the Llama family. Other plain models use its
layers.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from unitscale import ops, to_array, transforms
from unitscale.core import shard_activations

from ..config import GPTModelConfig, PrecisionConfig, RopeConfig

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": jax.nn.gelu,
}
MOST_LOGITS = 2**24  # in a block of `frozen_cross_entropy`


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, *, stored=None, cap: float | None = None, **options
) -> jax.Array:
    """Call `jax.nn.dot_product_attention`, with cuDNN's kernel where it supports the call.

    `stored` is the dtype at run time, if it differs from v's: scalify traces in float32. On a CPU,
    float16 is cast to float32, as `jax.nn` cannot attend in float16 there. With a `cap`, scores s
    become cap tanh(s / cap) (Gemma 2), without a kernel; `options` are then mask and scale.
    """
    if v.dtype == jnp.float16 and jax.default_backend() == "cpu":
        wide = (x.astype(jnp.float32) for x in (q, k, v))
        return attend(*wide, stored=stored, cap=cap, **options).astype(jnp.float16)
    if cap is not None:
        return _attend_capped(q, k, v, cap, **options)
    asked: Any = {k: options[k] for k in ("is_causal", "local_window_size") if k in options}
    path = ops.attention_path(q, k, stored or v.dtype, mask="mask" in options, **asked)
    kernel = "cudnn" if path.implementation == "cudnn" else None
    return jax.nn.dot_product_attention(q, k, v, implementation=kernel, **options)


def _attend_capped(q, k, v, cap: float, *, mask: jax.Array, scale: float | None = None):
    """Attend with capped scores: q (batch, time, heads, size); k and v may have fewer heads."""
    batch, time, heads, size = q.shape
    grouped = q.reshape(batch, time, k.shape[2], heads // k.shape[2], size)
    scores = jnp.einsum("btkgd,bskd->bkgts", grouped, k, preferred_element_type=jnp.float32)
    scores = cap * jnp.tanh(scores * ((size**-0.5 if scale is None else scale) / cap))
    scores = jnp.where(mask[:, :, None], scores, 0.5 * jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bskd->btkgd", weights, v).reshape(q.shape)


def frequencies(size: int, rope: RopeConfig) -> np.ndarray:
    """Return RoPE's frequencies in radians per position, float32 (size / 2,).

    References:
      Su et al., 2021, RoFormer. Grattafiori et al., 2024, The Llama 3 Herd of Models. Peng et al.,
      2023, YaRN, section 3.2, with the band's ends as in `transformers`.
    """
    pairs = np.arange(size // 2, dtype=np.float64)
    kept = rope.base ** (-2 * pairs / size)
    share = np.ones_like(kept)  # 1 keeps a frequency, 0 divides it by rope.factor
    if rope.scaling == "linear":
        share = np.zeros_like(kept)
    if rope.scaling == "llama3":
        turns = rope.context * kept / (2 * np.pi)
        share = np.clip((turns - rope.low_factor) / (rope.high_factor - rope.low_factor), 0, 1)
    if rope.scaling == "yarn":  # pair i makes context / (2 pi base^(2 i / size)) rotations
        low, high = (
            size * math.log(rope.context / (turns * 2 * math.pi)) / (2 * math.log(rope.base))
            for turns in (rope.fast, rope.slow)
        )
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        share = 1 - np.clip((pairs - low) / (high - low if high != low else 0.001), 0, 1)
    return (kept * (share + (1 - share) / rope.factor)).astype(np.float32)


def rotate(
    x: jax.Array, positions: jax.Array, frequency: np.ndarray, factor: float = 1.0
) -> jax.Array:
    """Rotate the pairs of features i, i + head_dim / 2 of x (batch, time, heads, head_dim)."""
    angle = positions[:, None, None].astype(jnp.float32) * frequency
    cos, sin = factor * jnp.cos(angle), factor * jnp.sin(angle)
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return turned.astype(x.dtype)


def make_product(
    precision: PrecisionConfig | None,
    product: Callable[..., jax.Array] = jax.lax.dot_general,
    gradients: str = "float8_e5m2",
) -> Callable[..., jax.Array]:
    """Make a matmul run in FP8 under `unitscale.scalify`, if `precision.matmuls` is fp8."""
    if precision is None or precision.matmuls != "fp8":
        return product

    def narrowed(x, kernel, *args, **options):
        x, kernel = (transforms.cast_data(array, "float8_e4m3fn") for array in (x, kernel))
        y = product(x, kernel, *args, **options)
        return transforms.cast_data(y, gradients, on="backward")

    return narrowed


class OffsetNorm(nnx.Module):
    """x / RMS(x) * (1 + scale), computed in float32 (Gemma)."""

    def __init__(self, width: int, *, epsilon: float = 1e-6, dtype, param_dtype, rngs: nnx.Rngs):
        self.epsilon, self.dtype = epsilon, dtype
        self.scale = nnx.Param(jnp.zeros(width, param_dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        wide, scale = x.astype(jnp.float32), self.scale[...].astype(jnp.float32)
        square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        return (wide * jax.lax.rsqrt(square + self.epsilon) * (1 + scale)).astype(self.dtype)


class Parts:
    """Factory of layers in one dtype, with matmuls in the formats of `precision`."""

    def __init__(
        self,
        config: Any,
        dtype,
        param_dtype,
        precision: PrecisionConfig | None,
        rngs: nnx.Rngs,
        *,
        norm: str = "layer",
        norm_bias: bool = True,
    ):
        self.config, self.kind, self.norm_bias = config, norm, norm_bias
        self.options: Any = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.product = make_product(precision)
        self.stored = jnp.dtype((precision and precision.scalify) or dtype)

    def linear(
        self, features_in: int, features_out: int, *, stddev: float = 0.02, bias: bool = True
    ) -> nnx.Linear:
        return nnx.Linear(
            features_in,
            features_out,
            use_bias=bias,
            kernel_init=nnx.initializers.normal(stddev),
            dot_general=self.product,
            **self.options,
        )

    def norm(self, width: int | None = None) -> nnx.RMSNorm | nnx.LayerNorm | OffsetNorm:
        """Make a norm, of the model's width by default."""
        width, eps = int(width or self.config.width), self.config.variant.norm_eps
        options = self.options if eps is None else {**self.options, "epsilon": eps}
        if self.kind == "offset":
            return OffsetNorm(width, **options)
        if self.kind == "rms":
            return nnx.RMSNorm(width, **options)
        # Flax's fast variance, E[x^2] - E[x]^2, is inaccurate if the mean is large.
        return nnx.LayerNorm(width, use_bias=self.norm_bias, use_fast_variance=False, **options)

    def embed(self, rows: int) -> nnx.Embed:
        init = nnx.initializers.normal(0.02)
        return nnx.Embed(rows, self.config.width, embedding_init=init, **self.options)

    def dropout(self) -> nnx.Dropout:
        return nnx.Dropout(self.config.dropout, rngs=self.options["rngs"])


class KVCache(NamedTuple):
    """Keys and values of the `position` tokens seen so far, (batch, length, kv_heads, head_dim)."""

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    position: jax.Array


def _last(config: GPTModelConfig) -> float:
    """Return the initial standard deviation of a branch's last kernel, as in GPT-2."""
    return 0.02 / (2 * config.layers) ** 0.5


class Attention(nnx.Module):
    """Self-attention with grouped queries, causal by default."""

    def __init__(self, parts: Parts, index: int):
        config, own = parts.config, parts.config.variant
        local = index in own.local_layers
        self.heads, self.head_dim = config.heads, config.head_dim
        self.kv_heads = config.kv_heads or config.heads
        self.window, self.cap = own.window if local else None, own.attention_cap
        self.scale, self.stored = own.attention_scale, parts.stored
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
        """Attend from x (batch, time, width) at positions (time,); `past` is (keys, values)."""
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
        options: dict[str, Any] = {"scale": self.scale, "cap": self.cap, "stored": self.stored}
        if mask is not None:
            options["mask"] = mask
        elif past is None and self.cap is None:
            options["is_causal"] = True
            if self.window is not None:
                options["local_window_size"] = (self.window - 1, 0)
        else:
            behind = positions[:, None] - jnp.arange(k.shape[1])
            seen = behind >= 0 if self.window is None else (behind >= 0) & (behind < self.window)
            options["mask"] = seen[None, None]
        return self.out(attend(q, k, v, **options).reshape(batch, time, -1)), past


class MLP(nnx.Module):
    """The MLP gelu(x W) V, or the gated MLP (act(x G) * x W) V."""

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


def _capped(logits: jax.Array, cap: float | None) -> jax.Array:
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def frozen_cross_entropy(
    x: jax.Array, kernel: Any, targets: jax.Array, axis: int, cap: float | None = None
) -> jax.Array:
    """Return the mean cross entropy of a readout that is not trained, without storing its logits.

    Computes the logits of one block of classes at a time, and again in the backward pass. An FP8
    kernel is cast block by block.

    Args:
      x: Inputs (..., width).
      kernel: Array or ScaledArray with classes on `axis`, 0 or 1, and width on the other.
      targets: Integers (...).
      axis: See `kernel`.
      cap: If given, logits z become cap tanh(z / cap).
    """
    classes = kernel.shape[axis]
    size = min(max(MOST_LOGITS // targets.size, 1024), classes)

    @jax.checkpoint
    def block(wide: jax.Array, first: jax.Array) -> tuple[jax.Array, jax.Array]:
        start = jnp.minimum(first, classes - size)  # the last block repeats classes: mask them
        ids = start + jnp.arange(size)
        ids = jnp.where(ids < first, -1, ids)
        part = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, start, size, axis), kernel)
        part = to_array(part).astype(x.dtype)
        logits = jnp.tensordot(wide.astype(x.dtype), part, (-1, 1 - axis))
        z = _capped(logits, cap).astype(jnp.float32)
        z = jnp.where(ids < 0, -jnp.inf, z)
        own = jnp.where(ids == targets[..., None], z, 0)
        return jax.nn.logsumexp(z, -1), jnp.sum(own, -1)

    wide = x.astype(jnp.float32)  # adds up the cotangents of blocks in float32
    norms, own = jax.lax.map(lambda first: block(wide, first), jnp.arange(0, classes, size))
    return jnp.mean(jax.nn.logsumexp(norms, 0) - jnp.sum(own, 0))


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
        learned = config.positions == "learned"
        assert config.context is not None or not learned, "learned positions need a context"
        self.positions = parts.embed(config.context or 0) if learned else None
        self.dropout = parts.dropout()
        self.layers = nnx.List([Layer(parts, index) for index in range(config.layers)])
        self.norm = parts.norm()
        parts.product = jax.lax.dot_general
        self.readout = (
            None if config.tied_readout else parts.linear(config.width, config.vocab, bias=False)
        )

    def __call__(self, ids, *, deterministic=True, cache: KVCache | None = None):
        """Return logits (batch, time, vocab) of next tokens; with `cache`, also the new cache."""
        x, cache = self._states(ids, deterministic, cache)
        logits = self.embed.attend(x) if self.readout is None else self.readout(x)
        logits = _capped(logits, self.config.variant.logit_cap)
        return logits if cache is None else (logits, cache)

    def _states(self, ids, deterministic: bool, cache: KVCache | None = None):
        """Compute the readout's inputs (batch, time, width), and the new cache."""
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
        if cache is not None:
            keys, values = zip(*kept, strict=True)
            cache = KVCache(keys, values, cache.position + ids.shape[1])
        return self.norm(x), cache

    def init_cache(self, batch: int, length: int) -> KVCache:
        """Make an empty cache for `length` tokens of each of `batch` sequences."""
        config = self.config
        shape = (batch, length, config.kv_heads or config.heads, config.head_dim)
        empty = tuple(jnp.zeros(shape, self.dtype) for _ in range(config.layers))
        return KVCache(empty, empty, jnp.zeros((), jnp.int32))

    def loss(self, ids, targets, *, deterministic=True) -> jax.Array:
        """Return the mean cross entropy of targets (batch, time) in nats per token, in float32."""
        kernel = self.embed.embedding if self.readout is None else self.readout.kernel
        if not isinstance(kernel, nnx.Param):  # frozen by LoRA
            x, _ = self._states(ids, deterministic)
            axis, cap = int(self.readout is not None), self.config.variant.logit_cap
            return frozen_cross_entropy(x, kernel.get_value(), targets, axis, cap)
        logits = jnp.asarray(self(ids, deterministic=deterministic), jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
