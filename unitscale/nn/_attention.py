"""Multi-head attention and its key-value cache."""

import dataclasses
from functools import partial
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from .. import ops, rules
from ..core import ScaledArray, check_choice, widen
from ._linear import Dense, KernelOptions
from ._norm import Dropout, RngsLike
from ._params import (
    NO_METADATA,
    Initializer,
    Metadata,
    OutSharding,
    given,
    reshard_output,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of the tokens seen so far, for generation.

    Attributes:
        key: (batch, max_length, kv_heads, head_dim) in the compute dtype.
        value: the same shape.
        length: int32 scalar, the number of tokens in the cache.
    """

    key: jax.Array
    value: jax.Array
    length: jax.Array

    @classmethod
    def create(cls, batch: int, max_length: int, kv_heads: int, head_dim: int, dtype) -> "KVCache":
        """Return an empty cache."""
        shape = (batch, max_length, kv_heads, head_dim)
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.int32(0))

    def append(self, key: jax.Array, value: jax.Array) -> "KVCache":
        """Return the cache with the keys and values of new tokens appended.

        The length is known only at run time, so a full cache raises no error: if not all new tokens
        fit, they become NaN and overwrite the last entries, and so outputs that attend to them are
        NaN.

        Raises:
            ValueError: if the shapes do not fit, or there are more than ``max_length`` tokens.
        """
        batch, room, *rest = self.key.shape
        fits = (key.shape[0], *key.shape[2:]) == (batch, *rest) and key.shape[1] <= room
        if not fits or key.shape != value.shape:
            raise ValueError(
                "unitscale.nn.KVCache: expected keys and values of "
                f"{(batch, f'at most {room}', *rest)}; got {key.shape} and {value.shape}. Create "
                "the cache for this batch and a greater max_length."
            )
        start = (0, self.length, 0, 0)
        fits = self.length + key.shape[1] <= room
        key, value = (jnp.where(fits, x, jnp.nan) for x in (key, value))
        return KVCache(
            lax.dynamic_update_slice(self.key, key.astype(self.key.dtype), start),
            lax.dynamic_update_slice(self.value, value.astype(self.value.dtype), start),
            self.length + key.shape[1],
        )


class MultiHeadAttention(nnx.Module):
    """Multi-head attention, as `flax.nnx.MultiHeadAttention` (`ops.dot_product_attention`).

    Unlike Flax's layer, it supports rotary positions and a functional cache. Its factor depends on
    the number of keys. With ``max_length`` it is computed for that number, so that the layer is the
    same function for every sequence length, cached or not.

    Args:
        num_heads: as in Flax, like all arguments not described here or in `unitscale.nn`.
        in_features: size of the input's last axis.
        is_causal: whether each query ignores later keys.
        local_window_size: query t attends only to keys t - local_window_size to t; None for all
            earlier keys. Needs ``is_causal``.
        max_length: sequence length to compute the factor for; by default the length in each call.
        rotary_base: base of rotary positions (usually 10000.0); None disables them.
        mult: multiplier of the logits.
        broadcast_dropout: must be False: each attention weight is dropped independently.
        decode: must be False: use `init_cache` and the method `decode`.
        implementation: an `ops.Implementation`; `decode` always uses "auto".

    Example:
        >>> layer = MultiHeadAttention(4, 32, is_causal=True, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 10, 32))).shape
        (2, 10, 32)
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        in_kv_features: int | None = None,
        *,
        is_causal: bool = False,
        local_window_size: int | None = None,
        max_length: int | None = None,
        rotary_base: float | None = None,
        mult: float = 1.0,
        broadcast_dropout: bool = False,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        out_kernel_init: Initializer | None = None,
        out_bias_init: Initializer | None = None,
        use_bias: bool = True,
        decode: bool = False,
        implementation: ops.Implementation = "auto",
        keep_rngs: bool = True,
        out_kernel_metadata: Metadata = NO_METADATA,
        out_bias_metadata: Metadata = NO_METADATA,
        **options: Unpack[KernelOptions],
    ) -> None:
        if decode or broadcast_dropout:
            raise ValueError(
                "unitscale.nn.MultiHeadAttention: decode and broadcast_dropout must be False. For "
                "generation use init_cache and the method decode; attention weights are dropped "
                "independently"
            )
        qkv_features = in_features if qkv_features is None else qkv_features
        out_features = in_features if out_features is None else out_features
        in_kv_features = in_features if in_kv_features is None else in_kv_features
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads < 1 or qkv_features % num_heads:
            raise ValueError(
                "unitscale.nn.MultiHeadAttention: num_heads must divide qkv_features; got "
                f"num_heads {num_heads}, qkv_features {qkv_features}"
            )
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(
                "unitscale.nn.MultiHeadAttention: num_kv_heads must divide num_heads; got "
                f"num_kv_heads {num_kv_heads}, num_heads {num_heads}"
            )
        if local_window_size is not None and (not is_causal or local_window_size < 0):
            raise ValueError(
                "unitscale.nn.MultiHeadAttention: local_window_size must be None, or a number of "
                f"earlier keys with is_causal=True; got {local_window_size}, is_causal {is_causal}"
            )
        check_choice(
            "unitscale.nn.MultiHeadAttention", "implementation", implementation, ops.Implementation
        )
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim = qkv_features // num_heads
        if rotary_base is not None and self.head_dim % 2:
            raise ValueError(
                "unitscale.nn.MultiHeadAttention: rotary positions need an even head size; got "
                f"{self.head_dim} ({qkv_features} features in {num_heads} heads)"
            )
        self.is_causal, self.max_length, self.mult = is_causal, max_length, mult
        self.rotary_base, self.local_window_size = rotary_base, local_window_size
        self.context: rules.AttentionContext | None = None  # set by TransformerLayer
        self.implementation: ops.Implementation = implementation
        dense = partial(Dense, use_bias=use_bias)
        self.query = dense(in_features, qkv_features, **options)
        self.key = dense(in_kv_features, num_kv_heads * self.head_dim, **options)
        self.value = dense(in_kv_features, num_kv_heads * self.head_dim, **options)
        self.policy, rngs = self.query.policy, options["rngs"]
        out: Any = dict(options) | given(
            kernel_init=out_kernel_init,
            bias_init=out_bias_init,
            kernel_metadata=out_kernel_metadata,
            bias_metadata=out_bias_metadata,
        )
        self.out = dense(qkv_features, out_features, **out)
        kept = rngs if keep_rngs else None
        self.dropout = Dropout(dropout_rate, deterministic=deterministic, rngs=kept)

    def init_cache(self, batch: int, max_length: int) -> KVCache:
        """Return an empty cache for ``batch`` sequences of up to ``max_length`` tokens.

        Raises:
            ValueError: if the layer is not causal or has no ``max_length``.
        """
        self._check_cacheable()
        return KVCache.create(
            batch, max_length, self.num_kv_heads, self.head_dim, self.policy.compute_dtype
        )

    def __call__(
        self,
        inputs_q: ops.ArrayLike,
        inputs_k: ops.ArrayLike | None = None,
        inputs_v: ops.ArrayLike | None = None,
        *,
        mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        deterministic: bool | None = None,
        rngs: RngsLike = None,
        factor: jax.Array | None = None,
        out_sharding: OutSharding = None,
        qkv_sharding: OutSharding = None,
    ) -> ScaledArray:
        """Attend from ``inputs_q`` to ``inputs_k`` (itself by default).

        Args:
            inputs_q: (..., time, in_features).
            inputs_k: (..., source, in_kv_features), or None for self-attention.
            inputs_v: (..., source, in_kv_features); ``inputs_k`` by default.
            mask: booleans or numbers that broadcast to (..., heads, time, source), for example from
                `nnx.make_causal_mask`; queries attend to keys where it is nonzero.
            segment_ids: (..., time) integers: tokens attend only to tokens with the same id, for
                example in the same document of a packed sequence.
            positions: (time,) or (..., time), rotary positions of queries and keys alike; 0, 1, ...
                by default.
            deterministic: whether dropout is off; the layer's own setting by default.
            rngs: streams of keys for dropout, or a key; the layer's own by default.
            factor: multiplies the output; in a scan over layers, the layer's `factor_over`.
            out_sharding: sharding of the output.
            qkv_sharding: sharding of queries, keys and values (..., time, heads, head features).
        """
        inputs_k = inputs_q if inputs_k is None else inputs_k
        inputs_v = inputs_k if inputs_v is None else inputs_v
        q, k, v = (
            reshard_output(x, qkv_sharding)
            for x in self._project(inputs_q, inputs_k, inputs_v, positions)
        )
        y = self._attend(
            q,
            k,
            v,
            mask=mask,
            segment_ids=segment_ids,
            is_causal=self.is_causal,
            local_window_size=self.local_window_size,
            deterministic=deterministic,
            rngs=rngs,
            implementation=self.implementation,
        )
        if factor is not None:
            y = y.map_data(lambda data: (widen(data) * factor).astype(data.dtype))
        return reshard_output(self._merge(y), out_sharding)

    def factor_over(self, context: rules.AttentionContext | None, length: int) -> float:
        """Return the ratio of the factors with and without `context`, for ``length`` keys."""
        own, other = (
            rules.dot_product_attention(
                self.head_dim, keys, is_causal=self.is_causal, mult=self.mult, mean_square=m
            ).fwd
            for keys, m in (self._inputs_of(context, length), self._inputs_of(None, length))
        )
        return own / other

    def _inputs_of(self, context: rules.AttentionContext | None, length: int) -> tuple[int, Any]:
        """Return the length and the mean square that the factor depends on."""
        length = length if self.max_length is None else self.max_length
        keys = None if self.local_window_size is None else self.local_window_size + 1
        if context is None and keys is not None:  # `decode` passes no window to the op
            context = rules.AttentionContext()
        return length, context and context.mean_square(
            self.head_dim,
            length,
            is_causal=self.is_causal,
            keys_per_query=keys,
            mult=self.mult,
        )

    def decode(self, x: ops.ArrayLike, cache: KVCache) -> tuple[ScaledArray, KVCache]:
        """Attend from the next tokens (batch, time, in_features) to all tokens so far.

        Returns the same output as the uncached layer for these tokens, and the longer cache. Raises
        the errors of `init_cache` and `KVCache.append`.
        """
        self._check_cacheable()
        time = x.shape[1]
        positions = cache.length + jnp.arange(time)
        q, k, v = self._project(x, x, x, positions)
        cache = cache.append(k.value, v.value)
        distance = positions[:, None] - jnp.arange(cache.key.shape[1])
        seen = distance >= 0
        if self.local_window_size is not None:
            seen &= distance <= self.local_window_size
        y = self._attend(q, cache.key, cache.value, mask=seen[None, None], is_causal=False)
        return self._merge(y), cache

    def _check_cacheable(self) -> None:
        if not self.is_causal:
            raise ValueError(
                "unitscale.nn.MultiHeadAttention: a cache needs is_causal=True, because earlier "
                "tokens are not recomputed"
            )
        if self.max_length is None:
            raise ValueError(
                "unitscale.nn.MultiHeadAttention: a cache needs max_length= in the constructor; "
                "without it the layer's factor varies with each call's length, and cached tokens "
                "would differ from uncached ones"
            )

    def _project(self, inputs_q, inputs_k, inputs_v, positions):
        if inputs_q is inputs_k and inputs_k is inputs_v:
            inputs_k, inputs_v, inputs_q = ops.fan_out(inputs_q, 3)
        q, k, v = (
            y.reshape(*y.shape[:-1], y.shape[-1] // self.head_dim, self.head_dim)
            for y in (self.query(inputs_q), self.key(inputs_k), self.value(inputs_v))
        )
        if self.rotary_base is not None:
            for_q = jnp.arange(q.shape[-3]) if positions is None else positions
            for_k = jnp.arange(k.shape[-3]) if positions is None else positions
            q = ops.rotary(q, for_q, base=self.rotary_base)
            k = ops.rotary(k, for_k, base=self.rotary_base)
        return q, k, v

    def _attend(
        self,
        q,
        k,
        v,
        *,
        mask,
        is_causal,
        local_window_size=None,
        segment_ids=None,
        deterministic: bool | None = True,
        rngs=None,
        implementation: ops.Implementation = "auto",
    ):
        key = self.dropout.key(deterministic, rngs)
        batch = q.shape[:-3]
        mask = None if mask is None else jnp.asarray(mask).astype(bool)
        if len(batch) != 1:  # the op takes one batch axis
            q, k, v = (x.reshape(-1, *x.shape[-3:]) for x in (q, k, v))
            if mask is not None and mask.ndim > 3:
                mask = jnp.broadcast_to(mask, (*batch, *mask.shape[-3:]))
                mask = mask.reshape(-1, *mask.shape[-3:])
            if segment_ids is not None:
                segment_ids = segment_ids.reshape(-1, segment_ids.shape[-1])
        length, mean_square = self._inputs_of(self.context, k.shape[-3])
        y = ops.dot_product_attention(
            q,
            k,
            v,
            mask=mask,
            segment_ids=segment_ids,
            is_causal=is_causal,
            local_window_size=local_window_size,
            mult=self.mult,
            dropout_rate=self.dropout.rate,
            dropout_key=key,
            deterministic=key is None,
            scale_length=length,
            scale_causal=self.is_causal,
            mean_square=mean_square,
            implementation=implementation,
        )
        return y if len(batch) == 1 else y.reshape(*batch, *y.shape[-3:])

    def _merge(self, y: ScaledArray) -> ScaledArray:
        return self.out(y.reshape(*y.shape[:-2], self.num_heads * self.head_dim))
