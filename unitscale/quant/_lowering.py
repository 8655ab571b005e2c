"""Workarounds for how XLA compiles matmuls (seen with jax 0.10.2, on CPUs and for an H200).

None of them changes a result. They depend on the backend on which a program is traced, which keeps
programs small.
"""

from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from ..core import ScaledArray, is_float8, is_scaled, widen


def dot(
    lhs: jax.Array, rhs: jax.Array, dimension_numbers: Any, dtype: Any, sharding: Any
) -> jax.Array:
    """Call `lax.dot_general` with result ``dtype``, in a form that is fast on CPUs.

    XLA's CPU backend has no kernel for bfloat16 x bfloat16 -> float32 in some layouts: operands are
    widened. For a sum over several leading dimensions, as in a weight gradient, it would transpose
    the left operand, which takes as long as the matmul: these dimensions are merged.
    """
    multiply = partial(lax.dot_general, preferred_element_type=dtype, out_sharding=sharding)
    (summed, other), (batch, _) = dimension_numbers
    count = len(summed)
    # Do not merge with several devices: each dimension may be sharded over its own mesh axis.
    merge = count > 1 and not batch and summed == other == tuple(range(count))
    merge = merge and jax.device_count() == 1

    fits = (lhs.dtype == jnp.bfloat16 and dtype == jnp.float32) or (
        merge and lhs.dtype.itemsize >= 4
    )
    if jax.default_backend() != "cpu" or not fits:
        return multiply(lhs, rhs, dimension_numbers)
    lhs, rhs = widen(lhs), widen(rhs)
    if not merge:
        return multiply(lhs, rhs, dimension_numbers)
    lhs, rhs = (x.reshape(-1, *x.shape[count:]) for x in (lhs, rhs))
    return multiply(lhs, rhs, (((0,), (0,)), ((), ())))


def isolate(lhs: Any, rhs: Any, factors: tuple[Any, ...]) -> tuple[Any, Any, list[Any]]:
    """Put barriers on the left operand of the forward matmul and the right one of the backward.

    Without barriers XLA merges matmuls that share an operand and then copies parts of the result,
    and it folds a factor into a GEMM only if no other matmul uses the same number. Each operand's
    other use, which needs the transposed layout, gets no barrier: XLA can transpose while casting.
    The second barrier excludes the left operand, which activation checkpointing may recompute.
    """
    own = [jnp.asarray(f) if isinstance(f, jax.Array) or f != 1 else None for f in factors]
    lhs, own[0], _ = lax.optimization_barrier((lhs, own[0], rhs))
    rhs, own[1:] = lax.optimization_barrier((rhs, own[1:]))
    return lhs, rhs, [1.0 if f is None else f for f in own]


def saveable(x: jax.Array) -> jax.Array:
    """Name a quantized operand "quantized", for policies of `jax.checkpoint` that save it.

    JAX passes saved floating-point numbers through `lax.reduce_precision`, which makes numbers of
    float8_e4m3fn from 256 infinite, as IEEE formats have it (jax 0.10.2). So name its bits.
    """
    if x.dtype.itemsize > 1:
        return checkpoint_name(x, "quantized")
    bits = checkpoint_name(lax.bitcast_convert_type(x, jnp.uint8), "quantized")
    return lax.bitcast_convert_type(bits, x.dtype)


def packs(x: Any, count: int) -> bool:
    """Return whether `move_rows_last` can move the first ``count`` dimensions of an operand."""
    if is_scaled(x) and (x.block_shape or (x.scale is not None and x.scale.ndim)):
        return False
    data = data_of(x)
    sharded = any(jax.typeof(data).sharding.spec)
    return bool(count) and is_float8(data.dtype) and not sharded and not data.shape[count - 1] % 4


def move_rows_last(x: Any, count: int) -> Any:
    """Move the first ``count`` dimensions of an FP8 operand last, four bytes at a time.

    This gives weight gradients cuBLAS's TN layout. XLA transposes byte by byte: on an H200 (jax
    0.11.2) a gradient of 768 x 3,072 over 8,192 tokens then takes 245 microseconds. With words of
    four bytes it takes 75, and in bfloat16 62.
    """
    if is_scaled(x):
        return x.map_data(lambda data: move_rows_last(data, count))
    (*outer, last), rest = x.shape[:count], x.shape[count:]
    rows = lax.bitcast_convert_type(x, jnp.uint8).reshape(*outer, last // 4, 4, *rest)
    parts = lax.split(rows.astype(jnp.uint32), (1,) * 4, axis=count)
    word = reduce(lax.bitwise_or, (part << jnp.uint32(8 * i) for i, part in enumerate(parts)))
    word = lax.squeeze(word, (count,))
    word = lax.transpose(word, (*range(count, word.ndim), *range(count)))
    packed = lax.bitcast_convert_type(word, jnp.uint8)
    return lax.bitcast_convert_type(packed.reshape(*rest, *outer, last), x.dtype)


def transposed_copy(x: Any) -> ScaledArray | None:
    """Return the transpose of an 8-bit matrix, for cuBLAS's TN layout; None for other arrays."""
    one_scale = is_scaled(x) and (x.scale is None or x.scale.ndim == 0)
    return x.T if one_scale and x.dtype.itemsize == 1 else None


def data_of(x: jax.Array | ScaledArray) -> jax.Array:
    """Return the data of a ScaledArray; other arrays unchanged."""
    return x.data if isinstance(x, ScaledArray) else x


def output_sharding(lhs: jax.Array, rhs: jax.Array, spec: Any, out: list[str]) -> Any:
    """Return the output sharding for `lax.dot_general` on explicit mesh axes; None if not needed.

    JAX requires one if a summed dimension is sharded, or if one mesh axis shards two dimensions of
    the result (here the first keeps the axis).
    """
    placed: dict[str, Any] = {}
    for x, labels in ((rhs, spec.rhs), (lhs, spec.lhs)):
        placed.update(zip(labels, jax.typeof(x).sharding.spec, strict=True))
    if not any(placed.values()):
        return None
    used: set[str] = set()
    kept = []
    for axes in (placed[c] for c in out):
        names = set(jax.tree.leaves(axes))
        kept.append(None if used & names else axes)
        used |= names
    if kept == [placed[c] for c in out] and all(placed[c] is None for c in spec.summed):
        return None
    return NamedSharding(jax.typeof(lhs).sharding.mesh, PartitionSpec(*kept))


def reshard_like(x: jax.Array, like: jax.Array) -> jax.Array:
    """Reshard a gradient like its operand on explicit mesh axes; replicate it if that has none."""
    own, wanted = (jax.typeof(array).sharding for array in (x, like))
    if own.spec == wanted.spec:
        return x
    mesh = own.mesh if wanted.mesh.empty else wanted.mesh
    return jax.sharding.reshard(x, NamedSharding(mesh, wanted.spec))
