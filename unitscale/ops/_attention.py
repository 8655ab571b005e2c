"""Dot-product attention, built on `jax.nn.dot_product_attention` so that fused kernels are used."""

from typing import Any

import jax
import jax.numpy as jnp

from .. import rules
from ..core import ScaledArray, is_static, scale, scale_bwd, to_float, widen
from ..rules import Constraint
from ._operands import ArrayLike, shape_error, unpack_uniform


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
    constraint: Constraint = "to_output_scale",
    implementation: Any = None,
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
        constraint: how output and gradients come to share a factor.
        implementation: as for `jax.nn.dot_product_attention`: None, "xla" or "cudnn".

    Returns:
        ScaledArray (batch, time, heads, d) in the dtype of ``v``.

    Raises:
        TypeError: if an operand is not floating.
        ValueError: if the shapes do not fit, or dropout has no key.

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
        constraint=constraint,
    )
    for s in (qs, ks):
        if not is_static(s):
            qd = (widen(qd) * to_float(s)).astype(qd.dtype)
    # The cotangent is multiplied by v's factor before the softmax shrinks it; q and k differ from
    # it only where the constraint lets them.
    common = factors.bwd[2]
    qd, kd = scale_bwd(qd, factors.bwd[0] / common), scale_bwd(kd, factors.bwd[1] / common)
    logit_factor = rules.logit_factor(qd.shape[-1], mult)
    # XLA's CPU backend has no float16 attention, and jax.nn has no dropout.
    on_cpu_half = vd.dtype == jnp.float16 and jax.default_backend() == "cpu"
    if on_cpu_half or (dropout_rate and not deterministic):
        y = _attend(
            qd,
            kd,
            vd,
            mask,
            is_causal,
            logit_factor,
            dropout_rate if not deterministic else 0.0,
            dropout_key,
        )
    else:
        y = jax.nn.dot_product_attention(
            qd,
            kd,
            vd,
            mask=mask,
            is_causal=is_causal,
            scale=logit_factor,
            implementation=implementation,
        )
    y = scale(y, factors.fwd, common)
    return ScaledArray(y, vs)


def _attend(q, k, v, mask, is_causal, logit_factor, dropout_rate, dropout_key):
    """Plain attention: logits and softmax in float32, weights rounded to the dtype of v."""
    batch, time, heads, d = q.shape
    source, kv_heads = k.shape[1:3]
    q = q.reshape(batch, time, kv_heads, heads // kv_heads, d)
    wide = widen(jnp.zeros((), v.dtype)).dtype
    logits = jnp.einsum("btkgd,bskd->bkgts", q, k, preferred_element_type=wide) * logit_factor
    if is_causal:
        causal = jnp.tril(jnp.ones((time, source), bool))
        logits = jnp.where(causal, logits, -jnp.inf)
    if mask is not None:
        mask = jnp.broadcast_to(mask, (batch, heads, time, source))
        mask = mask.reshape(batch, kv_heads, heads // kv_heads, time, source)
        # Finite, so that a row with nothing to attend to gives the mean and not NaN.
        logits = jnp.where(mask, logits, jnp.finfo(wide).min / 2)
    weights = jax.nn.softmax(logits, axis=-1)
    if dropout_rate:
        keep = jax.random.bernoulli(dropout_key, 1 - dropout_rate, weights.shape)
        weights = jnp.where(keep, weights / (1 - dropout_rate), 0.0)
    y = jnp.einsum("bkgts,bskd->btkgd", weights.astype(v.dtype), v, preferred_element_type=wide)
    return y.reshape(batch, time, heads, d).astype(v.dtype)


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
