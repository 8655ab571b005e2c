"""Attention in chunks of queries and of keys: exact, and never a time x source array in memory.

The softmax over all keys is put together from chunks, with the largest logit so far as its unit.
The backward pass computes the weights again, chunk by chunk, from that maximum and the sum.
"""

import itertools
import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..core import custom_vjp, match_varying, to_float, wide_dtype, widen
from ._attention_path import target

# Small ones stay in a CPU's cache; large ones are fewer kernels.
_CHUNK = {"cpu": 128}
_CHUNK_ELSEWHERE = 512


class _Plan(NamedTuple):
    """What is static: `queries` and `keys` are those of one chunk, heads divide into kv_heads."""

    batch: int
    kv_heads: int
    groups: int
    time: int
    source: int
    queries: int
    keys: int
    is_causal: bool
    factor: float

    def pairs(self) -> tuple[jax.Array, jax.Array]:
        """Numbers of the chunks of queries and of keys that meet; in others none sees the other."""
        counts = -(-self.time // self.queries), -(-self.source // self.keys)
        met = [
            (i, j)
            for i, j in itertools.product(*map(range, counts))
            if not self.is_causal or j * self.keys < (i + 1) * self.queries
        ]
        i, j = np.reshape(np.asarray(met, np.int32), (-1, 2)).T
        return jnp.asarray(i), jnp.asarray(j)


def attend_in_chunks(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None,
    is_causal: bool,
    factor: float,
    logit_scales: tuple[jax.Array, ...] = (),
    *,
    chunk: int | None = None,
) -> jax.Array:
    """Returns the average of v under the softmax of `factor * q k^T`, times the logits' scales.

    Args:
        q: (batch, time, heads, d), as k and v in one dtype.
        k: (batch, source, kv_heads, d).
        v: (batch, source, kv_heads, d).
        mask: boolean, four dimensions that broadcast to (batch, heads, time, source), or None.
        is_causal: whether query t sees only keys up to t.
        factor: static.
        logit_scales: scalars, or (batch, 1, 1, 1).
        chunk: the most queries, and the most keys, of one chunk; by default as the platform likes.
    """
    batch, time, heads, d = q.shape
    source, kv_heads = k.shape[1:3]
    if not q.size or not k.size:
        return jnp.zeros(q.shape, v.dtype)
    chunk = chunk or _CHUNK.get(target(), _CHUNK_ELSEWHERE)
    queries, keys = _size(time, chunk), _size(source, chunk)
    groups, counts = heads // kv_heads, (-(-time // queries), -(-source // keys))
    plan = _Plan(batch, kv_heads, groups, time, source, queries, keys, is_causal, factor)
    # Chunks first: (chunk, batch, kv_heads, rows, d). Batch and heads stay apart, as they may be
    # divided over devices.
    rows = _padded(q, 1, queries).reshape(batch, counts[0], queries, kv_heads, groups, d)
    rows = rows.transpose(1, 0, 3, 4, 2, 5)
    rows = rows.reshape(counts[0], batch, kv_heads, groups * queries, d)
    columns = (
        _padded(x, 1, keys).reshape(batch, counts[1], keys, kv_heads, d).transpose(1, 0, 3, 2, 4)
        for x in (k, v)
    )
    parts = None if mask is None else _parts_of(mask, plan)
    y = _attend(plan, rows, *columns, parts, tuple(map(to_float, logit_scales)))
    y = y.reshape(counts[0], batch, kv_heads, groups, queries, d).transpose(1, 0, 4, 2, 3, 5)
    y = y.reshape(batch, counts[0] * queries, heads, d)[:, :time]
    return y if mask is None else _mean_where_nothing(y, v, mask, is_causal)


def _size(length: int, most: int) -> int:
    """The size of equal chunks, none above `most`, that leave the least over."""
    return math.ceil(length / math.ceil(length / most))


def _padded(x: jax.Array, axis: int, multiple: int) -> jax.Array:
    missing = -x.shape[axis] % multiple
    return jnp.pad(x, [(0, missing if a == axis else 0) for a in range(x.ndim)]) if missing else x


def _parts_of(mask: jax.Array, plan: _Plan) -> jax.Array:
    """A mask as (batch, kv_heads, groups, time, source), each whole chunks or 1."""
    batch, heads, *lengths = mask.shape
    split = (1, 1) if heads == 1 else (plan.kv_heads, plan.groups)
    mask = mask.reshape(batch, *split, *lengths)
    for axis, size in ((3, plan.queries), (4, plan.keys)):
        mask = mask if mask.shape[axis] == 1 else _padded(mask, axis, size)
    return mask


def _mean_where_nothing(y: jax.Array, v: jax.Array, mask: jax.Array, is_causal: bool) -> jax.Array:
    """Gives queries with nothing to attend to the mean of all values, as equal weights would."""
    if is_causal:
        mask = mask & jnp.tril(jnp.ones((y.shape[1], v.shape[1]), bool))
    mean = jnp.repeat(jnp.mean(widen(v), 1, keepdims=True), y.shape[2] // v.shape[2], 2)
    sees = jnp.any(mask, -1).swapaxes(1, 2)[..., None]
    return jnp.where(sees, y, mean.astype(y.dtype))


def _product(a: jax.Array, b: jax.Array, axis_a: int, axis_b: int) -> jax.Array:
    """Products of matrices, one a head, that contract an axis of each; wide."""
    numbers = (((axis_a,), (axis_b,)), ((0, 1), (0, 1)))
    return lax.dot_general(a, b, numbers, preferred_element_type=wide_dtype(a.dtype))


def _logits(plan: _Plan, i, j, q, k, parts, scales) -> jax.Array:
    """Of chunk i of the queries and chunk j of the keys; -inf where a query does not see a key."""
    logits = _product(q, k, 3, 3) * plan.factor
    for scale in scales:
        logits = logits * scale
    row = i * plan.queries + lax.iota(jnp.int32, plan.queries)[:, None]
    column = j * plan.keys + lax.iota(jnp.int32, plan.keys)
    allowed = []
    if plan.source % plan.keys:
        allowed.append(column < plan.source)
    if plan.is_causal:
        allowed.append(row >= column)
    if parts is not None:
        for axis, index, size in ((3, i, plan.queries), (4, j, plan.keys)):
            if parts.shape[axis] != 1:
                parts = lax.dynamic_slice_in_dim(parts, index * size, size, axis)
        allowed.append(parts)
    if not allowed:
        return logits
    together = allowed[0]
    for more in allowed[1:]:
        together = together & more
    apart = (plan.batch, plan.kv_heads, plan.groups, plan.queries, plan.keys)
    return jnp.where(together, logits.reshape(apart), -jnp.inf).reshape(logits.shape)


@partial(custom_vjp, nondiff_argnums=(0,))
def _attend(plan: _Plan, q, k, v, parts, scales) -> jax.Array:
    return _forward(plan, q, k, v, parts, scales)[0]


def _forward(plan: _Plan, q, k, v, parts, scales) -> tuple[jax.Array, tuple]:
    wide = wide_dtype(v.dtype)

    def add(carry: tuple, pair: tuple[jax.Array, jax.Array]) -> tuple[tuple, None]:
        i, j = pair
        average, top, total = (_at(x, i) for x in carry)
        logits = _logits(plan, i, j, _at(q, i), _at(k, j), parts, scales)
        higher = jnp.maximum(top, jnp.max(logits, -1, keepdims=True))
        unit = _finite(higher)
        weights, shrink = jnp.exp(logits - unit), jnp.exp(top - unit)
        average = average * shrink + _product(weights.astype(v.dtype), _at(v, j), 3, 2)
        total = total * shrink + jnp.sum(weights, -1, keepdims=True)
        return tuple(_put(*xs, i) for xs in zip(carry, (average, higher, total), strict=True)), None

    empty, column = (jnp.zeros_like(x, dtype=wide) for x in (q, q[..., :1]))
    start, _ = match_varying(((empty, jnp.full_like(column, -jnp.inf), column), q))
    (average, top, total), _ = lax.scan(add, start, plan.pairs())
    share = 1 / jnp.where(total == 0, 1, total)
    y = (average * share).astype(v.dtype)
    # Apart, since a large logit swallows the logarithm of their sum.
    return y, (q, k, v, parts, scales, y, _finite(top), share)


def _backward(plan: _Plan, saved: tuple, dy: jax.Array) -> tuple:
    q, k, v, parts, scales, y, top, share = saved
    wide = wide_dtype(v.dtype)
    # The gradient of float16's logits, before the factor shrinks it, may be beyond its range.
    narrow = wide if v.dtype == jnp.float16 else v.dtype
    mean = jnp.sum(widen(dy) * widen(y), -1, keepdims=True)

    def add(carry: tuple, pair: tuple[jax.Array, jax.Array]) -> tuple[tuple, None]:
        i, j = pair
        dq, dk, dv = carry
        queries, keys, cotangent = _at(q, i), _at(k, j), _at(dy, i)
        logits = _logits(plan, i, j, queries, keys, parts, scales)
        weights = jnp.exp(logits - _at(top, i)) * _at(share, i)
        by_weights = _product(cotangent, _at(v, j), 3, 3)
        by_logits = weights * (by_weights - _at(mean, i)) * plan.factor
        for scale in scales:
            by_logits = by_logits * scale
        by_logits, queries, keys = (x.astype(narrow) for x in (by_logits, queries, keys))
        dq = _put(dq, _at(dq, i) + _product(by_logits, keys, 3, 2), i)
        dk = _put(dk, _at(dk, j) + _product(by_logits, queries, 2, 2), j)
        dv = _put(dv, _at(dv, j) + _product(weights.astype(v.dtype), cotangent, 2, 2), j)
        return (dq, dk, dv), None

    start, _ = match_varying((tuple(jnp.zeros_like(x, dtype=wide) for x in (q, k, v)), q))
    grads, _ = lax.scan(add, start, plan.pairs())
    dq, dk, dv = (g.astype(x.dtype) for g, x in zip(grads, (q, k, v), strict=True))
    return dq, dk, dv, None, tuple(map(jnp.zeros_like, scales))


_attend.defvjp(_forward, _backward)


def _finite(top: jax.Array) -> jax.Array:
    """The largest logit; of a query that sees nothing, whose weights are to be 0 and not NaN, 0."""
    return jnp.where(top == -jnp.inf, 0.0, top)


def _at(x: jax.Array, i: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(x, i, 0, keepdims=False)


def _put(x: jax.Array, chunk: jax.Array, i: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(x, chunk, i, 0)
