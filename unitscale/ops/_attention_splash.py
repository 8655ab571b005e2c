"""Attention by JAX's splash kernel for TPUs, which never has a time x source array in memory."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..core import BATCH_AXES, CONTEXT_AXES, TENSOR_AXES, dividing_axes

LANES = 128
"""Of a TPU: lengths are multiples of this."""
_BLOCKS = (512, 384, 256, LANES)


def splash(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    is_causal: bool,
    factor: float,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Softmax(factor q k^T) v, and its gradients, by a kernel that passes over the keys once.

    Under the mesh of `jax.set_mesh` each device has whole heads of some items of the batch: the
    kernel itself knows nothing of several devices.

    Args:
        q: (batch, time, heads, d) in bfloat16; `LANES` divides time and source.
        k: (batch, source, kv_heads, d); kv_heads divides heads.
        v: (batch, source, kv_heads, d).
        is_causal: whether query t sees only keys up to t.
        factor: static; q is multiplied by it and rounded, which a power of two is not.
        interpret: whether the kernel is computed by XLA, on any device.

    Returns:
        (batch, time, heads, d) in the dtype of ``v``; sums are float32.

    Example:
        >>> x = jnp.ones((1, 128, 2, 64), jnp.bfloat16)
        >>> splash(x, x, x, True, 1.0, interpret=True).shape
        (1, 128, 2, 64)

    References:
        Dao et al., "FlashAttention", 2022, arXiv 2205.14135;
        `jax.experimental.pallas.ops.tpu.splash_attention`.
    """
    q = (q.astype(jnp.float32) * factor).astype(q.dtype)
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    attend = partial(_attend, is_causal=is_causal, interpret=interpret)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jnp.swapaxes(attend(q, k, v), 1, 2)
    spec, own = _spec(mesh, q.shape[0], q.shape[1], k.shape[1]), jax.typeof(q).sharding
    if mesh.explicit_axes:
        q, k, v = (jax.sharding.reshard(x, spec) for x in (q, k, v))
    # The results of a kernel have no types that say over which axes they vary.
    attend = jax.shard_map(attend, in_specs=(spec, spec, spec), out_specs=spec, check_vma=False)
    y = attend(q, k, v)
    return jnp.swapaxes(jax.sharding.reshard(y, own) if mesh.explicit_axes else y, 1, 2)


def _spec(mesh: Any, batch: int, *heads: int) -> PartitionSpec:
    """Where a device's part of (batch, heads, time, d) lies: what the axes divide, whole else."""
    axes = {name: size for name, size in mesh.shape.items() if size > 1}
    rows = dividing_axes(BATCH_AXES, axes, batch)
    return PartitionSpec(
        rows or None, dividing_axes((*TENSOR_AXES, *CONTEXT_AXES), axes, *heads) or None
    )


def _attend(
    q: jax.Array, k: jax.Array, v: jax.Array, *, is_causal: bool, interpret: bool
) -> jax.Array:
    """The kernel on (batch, heads, time, d), its own gradients included."""
    # Imported where a TPU is: JAX's kernels for it take a second to import.
    from jax.experimental.pallas.ops.tpu.splash_attention import (  # noqa: PLC0415
        splash_attention_kernel as kernels,
        splash_attention_mask as masks,
    )

    time, source = q.shape[2], k.shape[2]
    mask = (masks.CausalMask if is_causal else masks.FullMask)((time, source))
    rows, columns = (next(b for b in _BLOCKS if n % b == 0) for n in (time, source))
    blocks = kernels.BlockSizes(
        block_q=rows,
        block_kv=columns,
        block_kv_compute=columns,
        block_q_dkv=rows,
        block_kv_dkv=columns,
        block_kv_dkv_compute=columns,
        block_q_dq=rows,
        block_kv_dq=columns,
    )
    kernel = kernels.make_splash_mha(
        masks.MultiHeadMask([mask] * q.shape[1]),
        block_sizes=blocks,
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    y: Any = jax.vmap(kernel)(q, k, v)
    return y
