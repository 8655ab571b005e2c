"""Attention without all attention weights in memory: in chunks, with cuDNN, or with splash."""

import itertools
import math
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from ..core import (
    BATCH_AXES,
    custom_vjp,
    dividing_axes,
    match_varying,
    to_float,
    wide_dtype,
    widen,
)
from ._attention_path import HEAD_AXES, LANES, target

# Small chunks fit a CPU's cache; large ones need fewer kernel launches.
_CHUNK = {"cpu": 128}
_CHUNK_ELSEWHERE = 512
_SPLASH_BLOCKS = (512, 384, 256, LANES)


class Window(NamedTuple):
    """The largest distances from a query to keys before and after it; None if unlimited."""

    left: int | None
    right: int | None

    @property
    def keys(self) -> int | None:
        """Return the maximum number of keys per query; None if a side is unlimited."""
        left, right = self
        return None if left is None or right is None else left + 1 + right

    def masks(self, row: jax.Array, column: jax.Array) -> list[jax.Array]:
        """Return the masks of keys within the window, one per limited side."""
        left = [] if self.left is None else [row - column <= self.left]
        return left if self.right is None else [*left, column - row <= self.right]


def same_segment(rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Return the mask (batch, 1, rows, columns) of tokens with the same id."""
    return (rows[:, :, None] == columns[:, None, :])[:, None]


class _Plan(NamedTuple):
    """Static sizes; a chunk has `queries` x `keys` weights, and `groups` heads share a kv_head."""

    batch: int
    kv_heads: int
    groups: int
    time: int
    source: int
    queries: int
    keys: int
    window: Window
    factor: float

    def pairs(self) -> tuple[jax.Array, jax.Array]:
        """Return the pairs of query chunk and key chunk that are not masked completely."""
        counts = -(-self.time // self.queries), -(-self.source // self.keys)
        left, right = (math.inf if side is None else side for side in self.window)
        met = [
            (i, j)
            for i, j in itertools.product(*map(range, counts))
            if j * self.keys - ((i + 1) * self.queries - 1) <= right
            and i * self.queries - ((j + 1) * self.keys - 1) <= left
        ]
        i, j = np.reshape(np.asarray(met, np.int32), (-1, 2)).T
        return jnp.asarray(i), jnp.asarray(j)


def attend_in_chunks(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None,
    ids: jax.Array | None,
    window: Window,
    factor: float,
    logit_scales: tuple[jax.Array, ...] = (),
) -> jax.Array:
    """Compute attention in chunks with an online softmax; the backward pass recomputes weights."""
    batch, time, heads, d = q.shape
    source, kv_heads = k.shape[1:3]
    if not q.size or not k.size:
        return jnp.zeros(q.shape, v.dtype)
    chunk = _CHUNK.get(target(), _CHUNK_ELSEWHERE)
    queries, keys = _size(time, chunk), _size(source, chunk)
    groups, counts = heads // kv_heads, (-(-time // queries), -(-source // keys))
    plan = _Plan(batch, kv_heads, groups, time, source, queries, keys, window, factor)
    # Layout (chunk, batch, kv_heads, rows, d). Batch and heads stay separate dimensions because
    # they may be sharded.
    rows = _padded(q, 1, queries).reshape(batch, counts[0], queries, kv_heads, groups, d)
    rows = rows.transpose(1, 0, 3, 4, 2, 5)
    rows = rows.reshape(counts[0], batch, kv_heads, groups * queries, d)
    columns = (
        _padded(x, 1, keys).reshape(batch, counts[1], keys, kv_heads, d).transpose(1, 0, 3, 2, 4)
        for x in (k, v)
    )
    chunks = None if mask is None else _mask_chunks(mask, plan)
    by_chunk = (
        None
        if ids is None
        else tuple(
            _padded(ids, 1, size).reshape(batch, -1, size).swapaxes(0, 1)
            for size in (queries, keys)
        )
    )
    y = _attend(plan, rows, *columns, (chunks, by_chunk), tuple(map(to_float, logit_scales)))
    y = y.reshape(counts[0], batch, kv_heads, groups, queries, d).transpose(1, 0, 4, 2, 3, 5)
    y = y.reshape(batch, counts[0] * queries, heads, d)[:, :time]
    if mask is None:
        return y
    # A query whose keys are all masked returns the mean of all values.
    row, column = (lax.broadcasted_iota(jnp.int32, (1, 1, time, source), n) for n in (2, 3))
    mask = reduce(jnp.logical_and, window.masks(row, column), mask)
    if ids is not None:
        mask = mask & same_segment(ids, ids)
    mean = jnp.repeat(jnp.mean(widen(v), 1, keepdims=True), groups, 2)
    sees = jnp.any(mask, -1).swapaxes(1, 2)[..., None]
    return jnp.where(sees, y, mean.astype(y.dtype))


def _size(length: int, most: int) -> int:
    """Return the chunk size, at most `most`, that divides `length` with the least padding."""
    return math.ceil(length / math.ceil(length / most))


def _padded(x: jax.Array, axis: int, multiple: int) -> jax.Array:
    missing = -x.shape[axis] % multiple
    return jnp.pad(x, [(0, missing if a == axis else 0) for a in range(x.ndim)]) if missing else x


def _mask_chunks(mask: jax.Array, plan: _Plan) -> jax.Array:
    """Reshape a mask to (batch, kv_heads, groups, time, source), padded to whole chunks."""
    batch, heads, *lengths = mask.shape
    split = (1, 1) if heads == 1 else (plan.kv_heads, plan.groups)
    mask = mask.reshape(batch, *split, *lengths)
    for axis, size in ((3, plan.queries), (4, plan.keys)):
        mask = mask if mask.shape[axis] == 1 else _padded(mask, axis, size)
    return mask


def _matmul(a: jax.Array, b: jax.Array, axis_a: int, axis_b: int) -> jax.Array:
    """Contract one axis of each operand for every batch item and head, in the wide dtype."""
    numbers = (((axis_a,), (axis_b,)), ((0, 1), (0, 1)))
    return lax.dot_general(a, b, numbers, preferred_element_type=wide_dtype(a.dtype))


def _logits(plan: _Plan, i, j, q, k, masks, scales) -> jax.Array:
    """Return the logits of query chunk i and key chunk j, with -inf where masked."""
    mask, ids = masks
    logits = _matmul(q, k, 3, 3) * plan.factor
    for scale in scales:
        logits = logits * scale
    row = i * plan.queries + lax.broadcasted_iota(jnp.int32, (plan.queries, 1), 0)
    column = j * plan.keys + lax.broadcasted_iota(jnp.int32, (1, plan.keys), 1)
    allowed = plan.window.masks(row, column)
    if plan.source % plan.keys:
        allowed.append(column < plan.source)
    if ids is not None:
        allowed.append(same_segment(_at(ids[0], i), _at(ids[1], j))[:, None])
    if mask is not None:
        for axis, index, size in ((3, i, plan.queries), (4, j, plan.keys)):
            if mask.shape[axis] != 1:
                mask = lax.dynamic_slice_in_dim(mask, index * size, size, axis)
        allowed.append(mask)
    if not allowed:
        return logits
    apart = (plan.batch, plan.kv_heads, plan.groups, plan.queries, plan.keys)
    return jnp.where(reduce(jnp.logical_and, allowed), logits.reshape(apart), -jnp.inf).reshape(
        logits.shape
    )


@partial(custom_vjp, nondiff_argnums=(0,))
def _attend(plan: _Plan, q, k, v, mask, scales) -> jax.Array:
    return _attend_fwd(plan, q, k, v, mask, scales)[0]


def _attend_fwd(plan: _Plan, q, k, v, mask, scales) -> tuple[jax.Array, tuple]:
    wide = wide_dtype(v.dtype)

    def add(carry: tuple, pair: tuple[jax.Array, jax.Array]) -> tuple[tuple, None]:
        i, j = pair
        average, top, total = (_at(x, i) for x in carry)
        logits = _logits(plan, i, j, _at(q, i), _at(k, j), mask, scales)
        higher = jnp.maximum(top, jnp.max(logits, -1, keepdims=True))
        unit = _finite(higher)
        weights, shrink = jnp.exp(logits - unit), jnp.exp(top - unit)
        average = average * shrink + _matmul(weights.astype(v.dtype), _at(v, j), 3, 2)
        total = total * shrink + jnp.sum(weights, -1, keepdims=True)
        return tuple(_put(*xs, i) for xs in zip(carry, (average, higher, total), strict=True)), None

    # `zeros_like` gives the carry the explicit sharding of q.
    empty, column = (jnp.zeros_like(x, dtype=wide) for x in (q, q[..., :1]))
    start, _ = match_varying(((empty, jnp.full_like(column, -jnp.inf), column), q))
    (average, top, total), _ = lax.scan(add, start, plan.pairs())
    share = 1 / jnp.maximum(total, 1)  # total is 0 only for a query whose keys are all masked
    y = (average * share).astype(v.dtype)
    # Save maximum and share separately: their sum, logsumexp, would round log(total) away.
    return y, (q, k, v, mask, scales, y, _finite(top), share)


def _attend_bwd(plan: _Plan, saved: tuple, dy: jax.Array) -> tuple:
    q, k, v, mask, scales, y, top, share = saved
    wide = wide_dtype(v.dtype)
    # The gradient of the logits may exceed float16's range before the factor makes it small.
    narrow = wide if v.dtype == jnp.float16 else v.dtype
    mean = jnp.sum(widen(dy) * widen(y), -1, keepdims=True)

    def add(carry: tuple, pair: tuple[jax.Array, jax.Array]) -> tuple[tuple, None]:
        i, j = pair
        dq, dk, dv = carry
        queries, keys, cotangent = _at(q, i), _at(k, j), _at(dy, i)
        logits = _logits(plan, i, j, queries, keys, mask, scales)
        weights = jnp.exp(logits - _at(top, i)) * _at(share, i)
        by_weights = _matmul(cotangent, _at(v, j), 3, 3)
        by_logits = weights * (by_weights - _at(mean, i)) * plan.factor
        for scale in scales:
            by_logits = by_logits * scale
        by_logits, queries, keys = (x.astype(narrow) for x in (by_logits, queries, keys))
        dq = _put(dq, _at(dq, i) + _matmul(by_logits, keys, 3, 2), i)
        dk = _put(dk, _at(dk, j) + _matmul(by_logits, queries, 2, 2), j)
        dv = _put(dv, _at(dv, j) + _matmul(weights.astype(v.dtype), cotangent, 2, 2), j)
        return (dq, dk, dv), None

    start, _ = match_varying((tuple(jnp.zeros_like(x, dtype=wide) for x in (q, k, v)), q))
    grads, _ = lax.scan(add, start, plan.pairs())
    dq, dk, dv = (g.astype(x.dtype) for g, x in zip(grads, (q, k, v), strict=True))
    return dq, dk, dv, None, None


_attend.defvjp(_attend_fwd, _attend_bwd)


def _finite(top: jax.Array) -> jax.Array:
    """Replace the maximum -inf of a fully masked query by a finite number: its weights are 0."""
    return jnp.maximum(top, jnp.finfo(top.dtype).min)


def _at(x: jax.Array, i: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(x, i, 0, keepdims=False, allow_negative_indices=False)


def _put(x: jax.Array, chunk: jax.Array, i: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(x, chunk, i, 0, allow_negative_indices=False)


def attend_by_cudnn(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    ids: jax.Array | None,
    window: Window,
    factor: float,
) -> jax.Array:
    """Call cuDNN's fused kernel.

    The window, if any, must be causal. Segments become a bias (batch, 1, time, time), because
    `jax.nn` does not offer the kernel's packed layout; all heads and layers share it.
    """
    mask = None if ids is None else same_segment(ids, ids)
    q, k, v = match_varying((q, k, v))
    # JAX's batching rule for the kernel requires that vmap maps all operands and the cotangent.
    # This select, which XLA removes, makes each of them depend on all operands.
    never = jnp.any(jnp.stack([x[0, 0, 0, 0] for x in (q, k, v)]) == 0) & False
    q, k, v = (jnp.where(never, 0, x) for x in (q, k, v))
    y = jax.nn.dot_product_attention(
        q,
        k,
        v,
        mask=None if mask is None else mask | never,
        is_causal=window.right == 0,
        local_window_size=None if window.left is None else (window.left, 0),
        scale=factor,
        implementation="cudnn",
    )
    return jnp.where(never, 0, y)


def splash(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    ids: jax.Array | None,
    window: Window,
    factor: float,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Call JAX's splash kernel for TPUs, or interpret it on any device.

    The kernel does not communicate: each device of a mesh needs all tokens of its heads.
    """
    # Imported only where it is used, because the import takes a second.
    from jax.experimental.pallas.ops.tpu.splash_attention import (  # noqa: PLC0415
        splash_attention_kernel as kernels,
        splash_attention_mask as masks,
    )

    names = "block_kv", "block_kv_compute", "block_kv_dkv", "block_kv_dkv_compute", "block_kv_dq"

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array | None) -> Any:
        time, source = q.shape[2], k.shape[2]
        shape, is_full = (time, source), window == Window(None, None)
        mask = masks.FullMask(shape) if is_full else masks.LocalMask(shape, window, 0)
        rows, columns = (next(b for b in _SPLASH_BLOCKS if n % b == 0) for n in (time, source))
        blocks = kernels.BlockSizes(
            **dict.fromkeys(("block_q", "block_q_dkv", "block_q_dq"), rows),
            **dict.fromkeys(names, columns),
        )
        kernel = kernels.make_splash_mha(
            masks.MultiHeadMask([mask] * q.shape[1]),
            block_sizes=blocks,
            head_shards=1,
            q_seq_shards=1,
            interpret=interpret,
        )
        segments = None if ids is None else kernels.SegmentIds(q=ids, kv=ids)
        return jax.vmap(kernel)(q, k, v, segments)

    q = (q.astype(jnp.float32) * factor).astype(q.dtype)
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jnp.swapaxes(attend(q, k, v, ids), 1, 2)
    axes, own = {n: size for n, size in mesh.shape.items() if size > 1}, jax.typeof(q).sharding
    rows = dividing_axes(BATCH_AXES, axes, q.shape[0])
    heads = dividing_axes(HEAD_AXES, axes, q.shape[1], k.shape[1])
    spec, of_ids = PartitionSpec(rows or None, heads or None), PartitionSpec(rows or None)
    if mesh.explicit_axes:
        q, k, v = (jax.sharding.reshard(x, spec) for x in (q, k, v))
        ids = None if ids is None else jax.sharding.reshard(ids, of_ids)
    # check_vma=False, because the kernel does not declare over which mesh axes its results vary.
    specs = (spec, spec, spec, of_ids)
    y = jax.shard_map(attend, in_specs=specs, out_specs=spec, check_vma=False)(q, k, v, ids)
    return jnp.swapaxes(jax.sharding.reshard(y, own) if mesh.explicit_axes else y, 1, 2)
