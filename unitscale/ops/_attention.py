"""Dot-product attention: by a fused kernel, in chunks, or plainly, as `attention_path` says."""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from .. import rules
from ..core import (
    ScaledArray,
    bounded_product,
    custom_vjp,
    match_varying,
    result_dtype,
    scale,
    scale_bwd,
    to_float,
    upcast,
    wide_dtype,
    widen,
)
from ..rules import Constraint
from ._attention_chunked import attend_in_chunks
from ._attention_path import Implementation, take_path
from ._attention_splash import splash
from ._context_axis import by_heads, by_tokens, whole_heads
from ._operands import ArrayLike, output_dtype, shape_error, unpack_uniform


def dot_product_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    mask: jax.Array | None = None,
    is_causal: bool = False,
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
    """Attends from queries to keys and averages values.

    Scaling:
        data = fwd * softmax(mult / d * q k^T) v, scale = v.scale; the scales of q and k are folded
        into the logits. fwd is 1 / RMS of the average of unit values under the weights of
        independent unit q and k, over all positions of a sequence of ``scale_length``; before the
        constraint v has the same backward factor and q, k their own. See
        `rules.dot_product_attention`.

    Args:
        q: (batch, time, heads, d), floating.
        k: (batch, source, kv_heads, d); kv_heads divides heads (grouped-query attention).
        v: (batch, source, kv_heads, d).
        mask: boolean, broadcasting to (batch, heads, time, source); True attends.
        is_causal: whether query t sees only keys up to t.
        mult: static multiplier of the logits (inverse temperature).
        dropout_rate: rate of dropout on the attention weights.
        dropout_key: `jax.random` key for it.
        deterministic: whether dropout applies its expected value.
        scale_length: static sequence length that fwd is computed for; by default the number of
            keys. Fix it where one function must serve many lengths, as with a KV cache.
        scale_causal: whether fwd counts the keys of a causal mask; by default ``is_causal``. Set
            it where causality comes in through ``mask``.
        mean_square: static mean square of the average of the values over the attention weights,
            for values that share a component between positions, as above the first layer of a
            stack (`rules.AttentionContext`); by default that of independent values.
        constraint: how output and gradients come to share a factor.
        implementation: "cudnn", a fused kernel of NVIDIA GPUs; "splash", one for TPUs; "chunked",
            which computes weights in pieces, and again in the backward pass; "plain", which holds
            all of them; or "auto", the first of these that is there and fits the call.
            `attention_path` says which and why. None is "auto", "xla" is "plain".

    Returns:
        ScaledArray (batch, time, heads, d) in the dtype of ``v`` (bfloat16 for 8-bit data). A
        query whose keys are all masked gets the mean of all values, and never NaN.

    Raises:
        TypeError: if an operand is not floating or the mask not boolean.
        ValueError: if the shapes do not fit, dropout has no key, or an implementation was asked for
            that cannot be had.

    Example:
        >>> x = jax.random.normal(jax.random.key(0), (1, 128, 4, 16))
        >>> y = dot_product_attention(x, x[:, ::-1], x[::-1, :, ::-1])
        >>> y.shape
        (1, 128, 4, 16)

    References:
        Blake et al., "u-muP", 2024, arXiv 2407.17465, appendix B (attention);
        Ainslie et al., "GQA", 2023, arXiv 2305.13245.
    """
    operands = {"q": q, "k": k, "v": v}
    unpacked = {
        name: unpack_uniform("dot_product_attention", name, x, (-1, -2, -3))
        for name, x in operands.items()
    }
    (qd, qs), (kd, ks), (vd, vs) = unpacked.values()
    _check(qd, kd, vd)
    mask = _mask(mask, (qd.shape[0], qd.shape[2], qd.shape[1], kd.shape[1]))
    if dropout_rate and not deterministic and dropout_key is None:
        raise ValueError(
            "unitscale.ops.dot_product_attention: dropout_key must be a jax.random key unless "
            "deterministic=True; got None"
        )
    factors = rules.dot_product_attention(
        qd.shape[-1],
        kd.shape[1] if scale_length is None else scale_length,
        is_causal=is_causal if scale_causal is None else scale_causal,
        mult=mult,
        dropout_rate=dropout_rate,
        mean_square=mean_square,
        constraint=constraint,
    )
    dtype, shared = output_dtype(v), result_dtype(qd, kd, vd)
    # The cotangent is multiplied by v's factor before the softmax shrinks it; q and k differ from
    # it only where the constraint lets them. bfloat16 has the range for the gradients as they are,
    # whose factors fuse with what reads them; the cotangent of a fused kernel would be written.
    common = 1.0 if shared == jnp.bfloat16 else factors.bwd[2]
    qd, kd, vd = (
        upcast(scale_bwd(x, factor / common), shared)
        for x, factor in zip((qd, kd, vd), factors.bwd, strict=True)
    )
    rate = 0.0 if deterministic else dropout_rate
    # One that is static is 1.
    scales = [s for s in bounded_product(qs, ks) if s is not None and not isinstance(s, int)]
    path = take_path(
        qd.shape,
        kd.shape,
        vd.dtype,
        mask=mask is not None,
        is_causal=is_causal,
        dropout_rate=rate,
        scaled=bool(scales),
        implementation=implementation,
    )
    if vd.dtype != jnp.float16:  # whose range the product with a scale may leave
        for s in scales:
            qd = (widen(qd) * to_float(s)).astype(qd.dtype)
        scales = []
    call = mask, is_causal, rules.logit_factor(qd.shape[-1], mult)
    moves = whole_heads(qd.shape[2], kd.shape[2])
    if moves:
        qd, kd, vd = map(by_heads, (qd, kd, vd))
    if path == "cudnn":
        y = _fused(qd, kd, vd, *call)
    elif path == "splash":
        y = splash(qd, kd, vd, is_causal, call[2])
    elif path == "chunked":
        y = attend_in_chunks(qd, kd, vd, *call, tuple(scales))
    elif rate or vd.dtype in (jnp.float64, jnp.float16) or _is_strict():
        y = _attend(qd, kd, vd, *call, scales, rate, dropout_key)
    else:
        y = _plain(qd, kd, vd, *call)
    y = scale(by_tokens(y) if moves else y, factors.fwd, common)
    return ScaledArray(y.astype(dtype), vs)


def _mask(mask: Any, shape: tuple[int, ...]) -> jax.Array | None:
    """Checks a mask against (batch, heads, time, source) and gives it four dimensions."""
    if mask is None:
        return None
    mask = jnp.asarray(mask)
    if mask.dtype != bool:
        raise TypeError(
            f"unitscale.ops.dot_product_attention: mask must be boolean; got dtype {mask.dtype}. "
            "True attends."
        )
    fits = mask.ndim <= 4 and all(
        m in (1, n) for m, n in zip(mask.shape[::-1], shape[::-1], strict=False)
    )
    if not fits:
        raise shape_error(
            "dot_product_attention",
            f"mask must broadcast to (batch, heads, time, source) {shape}",
            "Insert dimensions of size 1.",
            mask=mask.shape,
        )
    return mask.reshape((1,) * (4 - mask.ndim) + mask.shape)


def _fused(q, k, v, mask, is_causal, logit_factor):
    """By cuDNN, whose graph JAX builds with float32 for all that is neither operand nor result."""
    q, k, v = match_varying((q, k, v))
    # Its rule for vmap needs operands and cotangent all mapped. What is never so is gone when
    # compiled.
    never = jnp.any(jnp.stack([x[0, 0, 0, 0] for x in (q, k, v)]) == 0) & False
    q, k, v = (jnp.where(never, 0, x) for x in (q, k, v))
    y = jax.nn.dot_product_attention(
        q, k, v, is_causal=is_causal, scale=logit_factor, implementation="cudnn"
    )
    return jnp.where(never, 0, y)


def _plain(q, k, v, mask, is_causal, logit_factor):
    return jax.nn.dot_product_attention(
        q, k, v, mask=mask, is_causal=is_causal, scale=logit_factor, implementation="xla"
    )


def _is_strict() -> bool:
    """Whether types are not promoted: JAX's own attention promotes, when it is lowered too."""
    promotion = jax.config.jax_numpy_dtype_promotion  # pyright: ignore[reportAttributeAccessIssue]
    return promotion == "strict"


def _attend(q, k, v, mask, is_causal, logit_factor, logit_scales, dropout_rate, dropout_key):
    """What `_plain` has not: dropout, a softmax in float64, strict promotion, and float16.

    It rounds the gradient of the weights to float16, which overflows long before those of q, k and
    v do; and the product of q with its scale may leave that range, so here logits are scaled.
    """
    batch, time, heads, d = q.shape
    source, kv_heads = k.shape[1:3]
    groups = (batch, kv_heads, heads // kv_heads, time, source)
    q = q.reshape(batch, time, kv_heads, heads // kv_heads, d)
    wide = wide_dtype(v.dtype)
    logits = jnp.einsum("btkgd,bskd->bkgts", q, k, preferred_element_type=wide) * logit_factor
    for logit_scale in logit_scales:
        # A scalar, or one per batch item: (batch, 1, 1, 1).
        logits = logits * to_float(logit_scale)[..., None]
    allowed = jnp.tril(jnp.ones((time, source), bool)) if is_causal else jnp.ones((1, 1), bool)
    if mask is not None:
        allowed = allowed & mask
    allowed = jnp.broadcast_to(allowed, (batch, heads, time, source)).reshape(groups)
    # Finite, so that a row with nothing to attend to gives the mean and not NaN.
    logits = jnp.where(allowed, logits, jnp.finfo(wide).min / 2)
    weights = jax.nn.softmax(logits, axis=-1)
    if dropout_rate:
        keep = jax.random.bernoulli(dropout_key, 1 - dropout_rate, weights.shape)
        weights = jnp.where(keep, weights / (1 - dropout_rate), 0.0)
    y = _average(weights, v)
    return y.reshape(batch, time, heads, d).astype(v.dtype)


@custom_vjp
def _average(weights: jax.Array, v: jax.Array) -> jax.Array:
    """Averages v over float32 weights, rounded to its dtype; their gradient stays in float32.

    That gradient is a sum over a head's features, which the softmax's own gradient then shrinks by
    the number of keys: between the two, float16 would overflow.
    """
    return jnp.einsum(
        "bkgts,bskd->btkgd", weights.astype(v.dtype), v, preferred_element_type=weights.dtype
    )


def _average_forward(weights: jax.Array, v: jax.Array) -> tuple[jax.Array, tuple]:
    return _average(weights, v), (weights.astype(v.dtype), v)


def _average_backward(saved: tuple, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    weights, v = saved
    cotangent, wide = cotangent.astype(v.dtype), cotangent.dtype
    by_weights = jnp.einsum("btkgd,bskd->bkgts", cotangent, v, preferred_element_type=wide)
    by_v = jnp.einsum("bkgts,btkgd->bskd", weights, cotangent, preferred_element_type=wide)
    return by_weights, by_v.astype(v.dtype)


_average.defvjp(_average_forward, _average_backward)


def _check(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    shapes = {"q": q.shape, "k": k.shape, "v": v.shape}
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
            "Split the features into heads first.",
            **shapes,
        )
