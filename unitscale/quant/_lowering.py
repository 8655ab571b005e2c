"""Workarounds for how XLA lowers matmuls, as seen with jax 0.10.2 on CPU and compiled for an H200.

None of them changes a result.
"""

from collections.abc import Callable
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ..core import ScaledArray, is_float8, is_scaled, widen

_WORD = 4  # FP8 rows that are transposed together


def dot(
    lhs: jax.Array, rhs: jax.Array, dimension_numbers: Any, dtype: Any, sharding: Any
) -> jax.Array:
    """`lax.dot_general` into ``dtype``, in a form that XLA's CPU backend computes fast.

    On CPU, bfloat16 x bfloat16 -> float32 has no kernel for some layouts: operands are widened. A
    sum over several leading dimensions, as in a weight gradient, transposes the left operand, which
    takes as long as the matmul: these dimensions are merged.
    """

    def multiply(lhs: jax.Array, rhs: jax.Array, numbers: Any = dimension_numbers) -> jax.Array:
        return lax.dot_general(
            lhs, rhs, numbers, preferred_element_type=dtype, out_sharding=sharding
        )

    (summed, other), (batch, _) = dimension_numbers
    count = len(summed)
    # With several devices each dimension may be sharded over its own mesh axis: not merged.
    merge = count > 1 and not batch and summed == other == tuple(range(count))
    merge = merge and jax.device_count() == 1

    fits = (lhs.dtype == jnp.bfloat16 and dtype == jnp.float32) or (
        merge and lhs.dtype.itemsize >= 4
    )
    if jax.default_backend() != "cpu" or not fits:
        return multiply(lhs, rhs)
    lhs, rhs = widen(lhs), widen(rhs)
    if not merge:
        return multiply(lhs, rhs)
    lhs, rhs = (x.reshape(-1, *x.shape[count:]) for x in (lhs, rhs))
    return multiply(lhs, rhs, (((0,), (0,)), ((), ())))


def isolate(lhs: Any, rhs: Any, factors: tuple[Any, ...]) -> tuple[Any, Any, tuple[Any, ...]]:
    """Barriers around the left operand of the forward matmul and the right one of the backward.

    XLA merges matmuls that share an operand and then copies parts of the result, and it folds a
    factor into a GEMM only if no other matmul uses the same number. The other use of each operand
    needs the other layout and stays outside the barriers, so that XLA transposes where it casts.
    The second barrier excludes the left operand, which activation checkpointing may recompute.
    """
    used = {i: jnp.asarray(f) for i, f in enumerate(factors) if isinstance(f, jax.Array) or f != 1}
    forward = {i: f for i, f in used.items() if i == 0}
    backward = {i: f for i, f in used.items() if i > 0}
    lhs, forward, _ = lax.optimization_barrier((lhs, forward, rhs))
    rhs, backward = lax.optimization_barrier((rhs, backward))
    own = forward | backward
    return lhs, rhs, tuple(own.get(i, f) for i, f in enumerate(factors))


def fp8_weight_gradient(
    multiply: Callable[[Any, Any, bool], jax.Array], lhs: Any, rhs: Any, count: int
) -> jax.Array:
    """FP8 weight gradients in cuBLAS's TN layout; ``count`` leading dimensions are summed.

    XLA transposes both operands byte by byte: 245 microseconds on an H200 (jax 0.11.2) for 768 x
    3,072 over 8,192 tokens, against 75 in words of four rows, and 62 for the bfloat16 matmul.
    ``multiply`` takes both operands, and whether their summed dimensions were moved last.
    """

    def fits(x: Any) -> bool:
        if is_scaled(x) and (x.block_shape or (x.scale is not None and x.scale.ndim)):
            return False
        data = data_of(x)
        sharded = any(jax.typeof(data).sharding.spec)
        return is_float8(data.dtype) and not sharded and data.shape[count - 1] % _WORD == 0

    if not (count and jax.default_backend() == "gpu" and fits(lhs) and fits(rhs)):
        return multiply(lhs, rhs, False)

    def move(x: Any) -> Any:
        data = move_rows_last(data_of(x), count)
        return ScaledArray(data, x.scale) if is_scaled(x) else data

    return multiply(move(lhs), move(rhs), True)


def move_rows_last(x: jax.Array, count: int) -> jax.Array:
    """Move the first ``count`` dimensions of an FP8 array last, in words of four rows."""
    (*outer, last), rest = x.shape[:count], x.shape[count:]
    rows = lax.bitcast_convert_type(x, jnp.uint8).reshape(*outer, last // _WORD, _WORD, *rest)
    words = (
        lax.index_in_dim(rows, i, count, keepdims=False).astype(jnp.uint32) << jnp.uint32(8 * i)
        for i in range(_WORD)
    )
    word = reduce(lax.bitwise_or, words)
    word = lax.transpose(word, (*range(count, word.ndim), *range(count)))
    packed = lax.bitcast_convert_type(word, jnp.uint8)
    return lax.bitcast_convert_type(packed.reshape(*rest, *outer, last), x.dtype)


def transposed_copy(x: Any) -> ScaledArray | None:
    """Transpose an 8-bit matrix for cuBLAS's TN layout outside of a loop; None for other arrays."""
    one_scale = is_scaled(x) and (x.scale is None or x.scale.ndim == 0)
    return x.T if one_scale and x.dtype.itemsize == 1 else None


def data_of(x: jax.Array | ScaledArray) -> jax.Array:
    """The array that an operand multiplies with."""
    return x.data if isinstance(x, ScaledArray) else x


def sharding_of_sum(lhs: jax.Array, rhs: jax.Array, spec: Any, out: list[str]) -> Any:
    """The output sharding that `lax.dot_general` needs on explicit mesh axes; None if it does not.

    JAX requires it if a summed dimension is sharded, or if one mesh axis shards two dimensions (the
    first one keeps it).
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
    """Give a gradient its operand's sharding on explicit mesh axes; replicate it if none."""
    own, wanted = (jax.typeof(array).sharding for array in (x, like))
    if own.spec == wanted.spec:
        return x
    mesh = own.mesh if wanted.mesh.empty else wanted.mesh
    return jax.sharding.reshard(x, NamedSharding(mesh, wanted.spec))
