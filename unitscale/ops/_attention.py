"""Dot-product attention: the op and its plain implementation."""

from functools import reduce
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import rules
from ..core import (
    BATCH_AXES,
    CONTEXT_AXES,
    TENSOR_AXES,
    ScaledArray,
    bounded_product,
    broadcasts,
    constrain_sharding,
    custom_vjp,
    result_dtype,
    scale,
    scale_bwd,
    to_float,
    upcast,
    wide_dtype,
    widen,
)
from ..rules import Constraint
from ._attention_kernels import (
    Window,
    attend_by_cudnn,
    attend_in_chunks,
    same_segment,
    splash,
)
from ._attention_path import HEAD_AXES, Implementation, take_path, whole_heads
from ._operands import ArrayLike, output_dtype, shape_error, unpack


def dot_product_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None,
    segment_ids: jax.Array | None = None,
    mult: float = 1.0,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    deterministic: bool = True,
    scale_length: int | None = None,
    scale_causal: bool | None = None,
    mean_square: float | None = None,
    constraint: Constraint = "to_output_scale",
    implementation: Implementation | Literal["xla"] | None = "auto",
) -> ScaledArray:
    """Compute scaled dot-product attention.

    Scaling: `rules.dot_product_attention`. The scales of q and k multiply the logits; the result
    keeps the scale of v.

    Args:
        q: (batch, time, heads, d), floating.
        k: (batch, source, kv_heads, d); kv_heads must divide heads (GQA, arXiv 2305.13245).
        v: (batch, source, kv_heads, d).
        mask: boolean, broadcasting to (batch, heads, time, source); True means attend.
        is_causal: whether query t attends only to keys 0 to t.
        local_window_size: (left, right), or one number for both: query t attends only to keys
            t - left to t + right, as in `jax.nn.dot_product_attention`. Needs time == source.
        segment_ids: (batch, time) integers, such as the document of each token in a packed
            sequence: tokens attend only to those with the same id. Needs time == source.
        mult: static multiplier of the logits (inverse temperature).
        dropout_rate: dropout rate of the attention weights.
        dropout_key: `jax.random` key for dropout.
        deterministic: whether to replace the random dropout mask by its expected value.
        scale_length: static number of keys to compute the factors from; by default the keys in k.
        scale_causal: whether to use causal factors; by default if causal, or a one-sided window.
        mean_square: static mean square of attention's output before the factor, if values at
            different positions are correlated (`rules.AttentionContext`); None if independent.
        constraint: see `unitscale.ops`.
        implementation: "plain" computes all attention weights at once, "chunked" recomputes them in
            chunks, "cudnn" and "splash" are fused kernels for NVIDIA GPUs and TPUs, and "auto"
            selects one (`attention_path`). None means "auto", "xla" means "plain".

    Returns:
        ScaledArray (batch, time, heads, d) in the dtype of ``v``. A query whose keys are all masked
        returns the mean of all values, not NaN.
    """
    (qd, qs), (kd, ks), (vd, vs) = (
        unpack("dot_product_attention", name, x, (-1, -2, -3))
        for name, x in (("q", q), ("k", k), ("v", v))
    )
    _check_shapes(qd, kd, vd)
    mask = _check_mask(mask, (qd.shape[0], qd.shape[2], qd.shape[1], kd.shape[1]))
    window = _check_window(local_window_size, is_causal, qd.shape[1], kd.shape[1])
    ids = _check_segment_ids(segment_ids, qd.shape, kd.shape)
    if dropout_rate and not deterministic and dropout_key is None:
        raise ValueError(
            "unitscale.ops.dot_product_attention: dropout_key must be a jax.random key unless "
            "deterministic=True; got None"
        )
    factors = rules.dot_product_attention(
        qd.shape[-1],
        kd.shape[1] if scale_length is None else scale_length,
        is_causal=0 in window if scale_causal is None else scale_causal,
        keys_per_query=window.keys,
        mult=mult,
        dropout_rate=dropout_rate,
        mean_square=mean_square,
        constraint=constraint,
    )
    dtype, shared = output_dtype(v), result_dtype(qd, kd, vd)
    # Multiply the cotangent by v's factor before the softmax makes it small. bfloat16 has the range
    # to multiply the gradients at the end instead, where XLA fuses the factors.
    common = 1.0 if shared == jnp.bfloat16 else factors.bwd[2]
    pairs = zip((qd, kd, vd), factors.bwd, strict=True)
    qd, kd, vd = (upcast(scale_bwd(x, factor / common), shared) for x, factor in pairs)
    rate = 0.0 if deterministic else dropout_rate
    scales = [s for s in bounded_product(qs, ks) if s is not None and not isinstance(s, int)]
    path = take_path(
        qd.shape,
        kd.shape,
        vd.dtype,
        mask=mask is not None,
        is_causal=is_causal,
        local_window_size=local_window_size,
        segment_ids=ids is not None,
        dropout_rate=rate,
        scaled=bool(scales),
        implementation=implementation,
    )
    if vd.dtype != jnp.float16:  # float16 may lack the range for q times its scale
        for s in scales:
            qd = (widen(qd) * to_float(s)).astype(qd.dtype)
        scales = []
    logit_factor = rules.logit_factor(qd.shape[-1], mult)
    moves = whole_heads(qd.shape[2], kd.shape[2])
    if moves:
        qd, kd, vd = (move_shards(x, to_heads=True) for x in (qd, kd, vd))
    if path == "cudnn":
        y = attend_by_cudnn(qd, kd, vd, ids, window, logit_factor)
    elif path == "splash":
        y = splash(qd, kd, vd, ids, window, logit_factor)
    elif path == "chunked":
        y = attend_in_chunks(qd, kd, vd, mask, ids, window, logit_factor, tuple(scales))
    else:
        y = _plain(qd, kd, vd, mask, ids, window, logit_factor, scales, rate, dropout_key)
    y = scale(move_shards(y, to_heads=False) if moves else y, factors.fwd, common)
    return ScaledArray(y.astype(dtype), vs)


def _check_shapes(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    fits = (
        q.ndim == k.ndim == v.ndim == 4
        and k.shape == v.shape
        and q.shape[0] == k.shape[0]
        and q.shape[3] == k.shape[3]
        and k.shape[2] > 0
        and q.shape[2] % k.shape[2] == 0
    )
    if not fits:
        raise shape_error(
            "dot_product_attention",
            "q must be (batch, time, heads, d) and k, v (batch, source, kv_heads, d) with "
            "kv_heads dividing heads",
            q=q.shape,
            k=k.shape,
            v=v.shape,
        )


def _check_mask(mask: Any, shape: tuple[int, ...]) -> jax.Array | None:
    """Return a mask with four dimensions that broadcast to (batch, heads, time, source)."""
    if mask is None:
        return None
    mask = jnp.asarray(mask)
    if mask.dtype != bool:
        raise TypeError(
            f"unitscale.ops.dot_product_attention: mask must be boolean; got dtype {mask.dtype}. "
            "True means attend."
        )
    if not broadcasts(mask.shape, shape):
        expected = f"mask must broadcast to (batch, heads, time, source) {shape}"
        raise shape_error("dot_product_attention", expected, mask=mask.shape)
    return mask.reshape((1,) * (4 - mask.ndim) + mask.shape)


def _check_window(window: Any, is_causal: bool, time: int, source: int) -> Window:
    """Return the largest distances to keys before and after a query; None where unlimited."""
    if window is None:
        return Window(None, 0 if is_causal else None)
    sides = tuple(window) if isinstance(window, tuple | list) else (window, window)
    fits = len(sides) == 2 and all(
        isinstance(side, int | np.integer) and side >= 0 for side in sides
    )
    if time != source or not fits:
        raise ValueError(
            "unitscale.ops.dot_product_attention: local_window_size must be one or two integers, "
            f"0 or more, and needs as many queries as keys; got {window!r}, {time} queries, "
            f"{source} keys. Pass a mask otherwise."
        )
    left, right = sides[0], 0 if is_causal else sides[1]
    return Window(*(None if side >= source - 1 else side for side in (left, right)))


def _check_segment_ids(ids: Any, q_shape: Any, k_shape: Any) -> jax.Array | None:
    if ids is None:
        return None
    ids = jnp.asarray(ids)
    if ids.shape != q_shape[:2] or q_shape[1] != k_shape[1]:
        raise shape_error(
            "dot_product_attention",
            "segment_ids must be (batch, time), with as many queries as keys",
            segment_ids=ids.shape,
            q=q_shape,
            k=k_shape,
        )
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(
            "unitscale.ops.dot_product_attention: segment_ids must be integers; got dtype "
            f"{ids.dtype}"
        )
    return ids.astype(jnp.int32)


def move_shards(x: jax.Array, to_heads: bool) -> jax.Array:
    """Reshard (batch, time, heads, d) between tokens and heads by an all-to-all, as in Ulysses."""
    # Constrain the array before and after, so that XLA does not reshard the neighboring matmuls.
    steps = ((CONTEXT_AXES, TENSOR_AXES), ((), HEAD_AXES))
    for axes in steps if to_heads else reversed(steps):
        x = constrain_sharding(x, BATCH_AXES, *axes)
    return x


def _plain(q, k, v, mask, ids, window, logit_factor, logit_scales, dropout_rate, dropout_key):
    """Compute attention with all attention weights in memory, in float32."""
    batch, time, heads, d = q.shape
    source, kv_heads = k.shape[1:3]
    groups = (batch, kv_heads, heads // kv_heads, time, source)
    q = q.reshape(batch, time, kv_heads, heads // kv_heads, d)
    wide = wide_dtype(v.dtype)
    logits = jnp.einsum("btkgd,bskd->bkgts", q, k, preferred_element_type=wide) * logit_factor
    for logit_scale in logit_scales:  # scalars, or one per item of the batch: (batch, 1, 1, 1)
        logits = logits * to_float(logit_scale)[..., None]
    row, column = (lax.broadcasted_iota(jnp.int32, (1, 1, time, source), n) for n in (2, 3))
    masks = window.masks(row, column)
    if mask is not None:
        masks.append(mask)
    if ids is not None:
        masks.append(same_segment(ids, ids))
    if masks:
        allowed = reduce(jnp.logical_and, masks)
        allowed = jnp.broadcast_to(allowed, (batch, heads, time, source)).reshape(groups)
        # Finite, so that a query whose keys are all masked returns the mean of the values, not NaN.
        logits = jnp.where(allowed, logits, jnp.finfo(wide).min / 2)
    weights = jax.nn.softmax(logits, axis=-1)
    if dropout_rate:
        keep = jax.random.bernoulli(dropout_key, 1 - dropout_rate, weights.shape)
        weights = jnp.where(keep, weights / (1 - dropout_rate), 0.0)
    y = _average(weights, v)
    return y.reshape(batch, time, heads, d).astype(v.dtype)


@custom_vjp
def _average(weights: jax.Array, v: jax.Array) -> jax.Array:
    """Average v; keep the gradient of the weights in float32, because float16 could overflow."""
    return jnp.einsum(
        "bkgts,bskd->btkgd", weights.astype(v.dtype), v, preferred_element_type=weights.dtype
    )


def _average_fwd(weights: jax.Array, v: jax.Array) -> tuple[jax.Array, tuple]:
    return _average(weights, v), (weights.astype(v.dtype), v)


def _average_bwd(saved: tuple, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    weights, v = saved
    cotangent, wide = cotangent.astype(v.dtype), cotangent.dtype
    by_weights = jnp.einsum("btkgd,bskd->bkgts", cotangent, v, preferred_element_type=wide)
    by_v = jnp.einsum("bkgts,btkgd->bskd", weights, cotangent, preferred_element_type=wide)
    return by_weights, by_v.astype(v.dtype)


_average.defvjp(_average_fwd, _average_bwd)
