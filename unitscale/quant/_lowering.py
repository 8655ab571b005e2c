"""Workarounds for how XLA compiles matmuls (seen with jax 0.10.2, on CPUs and for an H200).

None of them changes a result. They depend on the backend on which a program is traced, which keeps
programs small.
"""

import math
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import NamedSharding, PartitionSpec

from ..core import ScaledArray, gpu_capability, is_float8, is_scaled, widen


def dot(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: Any,
    dtype: Any,
    sharding: Any,
    exact: bool = False,
) -> jax.Array:
    """Call `lax.dot_general` with result ``dtype``, in a form that is fast on CPUs.

    XLA uses fast accumulation for FP8 matmuls unless the precision is "highest" (``exact``).

    XLA's CPU backend has no kernel for bfloat16 x bfloat16 -> float32 in some layouts, so operands
    are widened. For a sum over several leading dimensions, as in a weight gradient, it would
    transpose the left operand, which takes as long as the matmul, so these dimensions are merged.
    """
    multiply = partial(lax.dot_general, preferred_element_type=dtype, out_sharding=sharding)
    if exact and lhs.dtype.itemsize == rhs.dtype.itemsize == 1:
        multiply = partial(multiply, precision=lax.Precision.HIGHEST)
    (summed, other), (batch, _) = dimension_numbers
    count = len(summed)
    # Do not merge with several devices: each dimension may be sharded over its own mesh axis.
    merge = count > 1 and not batch and summed == other == tuple(range(count))
    merge = merge and jax.device_count() == 1
    widens = lhs.dtype == jnp.bfloat16 and dtype == jnp.float32
    fits = widens or (merge and lhs.dtype.itemsize >= 4)
    if jax.default_backend() != "cpu" or not fits:
        return multiply(lhs, rhs, dimension_numbers)
    lhs, rhs = widen(lhs), widen(rhs)
    if merge:
        lhs, rhs = (x.reshape(math.prod(x.shape[:count]), *x.shape[count:]) for x in (lhs, rhs))
        dimension_numbers = ((0,), (0,)), ((), ())
    return multiply(lhs, rhs, dimension_numbers)


# Elements per block of the formats that NVIDIA's block-scaled kernels multiply: data and scale.
_BLOCK_SIZES = {
    ("float8_e4m3fn", "float8_e8m0fnu"): 32,
    ("float8_e5m2", "float8_e8m0fnu"): 32,
    ("float4_e2m1fn", "float8_e4m3fn"): 16,
}


def block_scaled_dot(
    lhs: Any, rhs: Any, spec: Any, order: list[str], out_dtype: Any
) -> jax.Array | None:
    """Multiply MXFP8 or NVFP4 operands with cuDNN's kernel; return None if it does not apply.

    The kernel needs an NVIDIA GPU from compute capability 10.0 (Blackwell), and both operands in
    whole blocks along the same summed dimension. Blocks may be square. The result has the
    dimensions ``order`` (batch, then the others of lhs and of rhs), in bfloat16 or float32.

    Programs were compiled for a B200 with jax 0.11.2, but never run.
    """
    if jax.default_backend() != "gpu" or (gpu_capability() or 0) < 10:
        return None
    sides = ((lhs, spec.lhs), (rhs, spec.rhs))
    along = {_blocked_label(x, labels, spec.summed) for x, labels in sides}
    if None in along or len(along) > 1:
        return None
    (last,) = along
    batch = [c for c in order if c in spec.lhs and c in spec.rhs]
    operands, scales = [], []
    for x, labels in sides:
        scale = x.scale
        for axis, size in enumerate(x.block_shape):
            if labels[axis] != last and size > 1:
                scale = jnp.repeat(scale, size, axis, total_repeat_length=x.shape[axis])
        other = [c for c in order if c in labels and c not in batch]
        summed = [c for c in spec.summed if c != last] + [last]
        permutation = [labels.index(c) for c in (*batch, *other, *summed)]
        for array, moved in ((x.data, operands), (scale, scales)):
            array = lax.transpose(array, permutation)
            rows = array.shape[len(batch) : len(batch) + len(other)]
            shape = math.prod(array.shape[: len(batch)]), math.prod(rows), -1
            moved.append(array.reshape(shape))
    dtype = jnp.bfloat16 if out_dtype == jnp.bfloat16 else jnp.float32
    y = jax.nn.scaled_matmul(*operands, *scales, preferred_element_type=dtype)
    sizes = dict(zip(spec.lhs + spec.rhs, lhs.shape + rhs.shape, strict=True))
    return y.reshape([sizes[c] for c in order])


def _blocked_label(x: Any, labels: str, summed: str) -> str | None:
    """Return the summed label along which an operand has blocks; None if no kernel takes them."""
    sharded = any(jax.typeof(data_of(x)).sharding.spec)
    if sharded or not is_scaled(x) or not x.block_shape or x.scale is None:
        return None
    wanted = _BLOCK_SIZES.get((x.dtype.name, x.scale.dtype.name))
    blocks = zip(labels, x.block_shape, x.shape, strict=True)
    found = [c for c, size, n in blocks if c in summed and size == wanted and n % size == 0]
    return found[0] if len(found) == 1 else None


def isolate(
    lhs: Any, rhs: Any, backward: Any, factors: tuple[Any, ...]
) -> tuple[Any, Any, Any, list[Any]]:
    """Put barriers on operands: ``lhs``, ``rhs``, and rhs of the ``backward`` matmul.

    Without barriers XLA merges matmuls that share an operand and then copies parts of the result,
    and it folds a factor into a GEMM only if no other matmul uses the same number. The left operand
    of the weight gradient gets none here, because activation checkpointing may recompute it.
    """
    own = [jnp.asarray(f) if isinstance(f, jax.Array) or f != 1 else None for f in factors]
    lhs, own[0], rhs = lax.optimization_barrier((lhs, own[0], rhs))
    backward, own[1:] = lax.optimization_barrier((backward, own[1:]))
    return lhs, rhs, backward, [1.0 if f is None else f for f in own]


# Whether operands get names. It is part of JAX's cache keys.
_NAMING: Any = jax.make_user_context(None)


def named_operands() -> Any:
    """Return a context in which FP8 matmuls name their quantized left operands "quantized".

    `jax.checkpoint_policies.save_only_these_names("quantized")` then saves them.
    """
    return _NAMING(True)


def are_named() -> bool:
    """Return whether this is traced inside `named_operands`."""
    return bool(_NAMING.value)


def named(x: jax.Array, name: str = "quantized") -> jax.Array:
    """Name a quantized operand for the policies of `jax.checkpoint`.

    Name the bits of 8-bit numbers: JAX passes saved floating-point numbers through
    `lax.reduce_precision`, which makes 256 and above infinite in float8_e4m3fn (jax 0.10.2).
    """
    if x.dtype.itemsize > 1:
        return checkpoint_name(x, name)
    code = jnp.uint4 if x.dtype == jnp.float4_e2m1fn else jnp.uint8
    bits = checkpoint_name(lax.bitcast_convert_type(x, code), name)
    return lax.bitcast_convert_type(bits, x.dtype)


class Moved(NamedTuple):
    """An operand whose first dimensions were moved last (`both_layouts`)."""

    x: Any


def both_layouts(x: Any, count: int, *, stored: bool) -> tuple[Any, Any]:
    """Return an FP8 operand, and a copy with the first ``count`` dimensions `Moved` last.

    cuBLAS multiplies FP8 only if the summed dimension is contiguous in both operands (TN layout),
    so an operand of two matmuls is needed in two layouts. On other backends, and where the copy is
    not supported, both results are ``x``.

    XLA transposes 8-bit numbers byte by byte: on an H200 (jax 0.11.2) a gradient of 768 x 3,072
    over 8,192 tokens then takes 245 microseconds, in words of four bytes 75, and in bfloat16 62.
    The layout constraints make XLA pack words before the transpose. If ``x`` is the cast of a
    ``stored`` array, such as a weight, one kernel writes both layouts, if both consist of words.
    Other operands result from longer computations, which XLA would repeat for the second layout;
    the barrier makes it read the FP8 result instead.
    """
    data = data_of(x)
    words = 0 < count < data.ndim and not (data.shape[count - 1] % 4 or data.shape[-1] % 4)
    fits = (
        words
        and not has_scales(x)
        and is_float8(data.dtype)
        and not any(jax.typeof(data).sharding.spec)
    )
    if jax.default_backend() != "gpu" or not fits or (stored and not _one_device()):
        return x, x
    if is_scaled(x):
        same, moved = both_layouts(x.data, count, stored=stored)
        return x.map_data(lambda _: same), Moved(x.map_data(lambda _: moved.x))
    same = x
    if stored:
        same = _bytes(_words(x, x.ndim - 1), x.dtype)
    else:
        x = lax.optimization_barrier(x)
    order = (*range(count, x.ndim), *range(count))
    words = _row_major(lax.transpose(_row_major(_words(x, count - 1)), order))
    return same, Moved(_bytes(words, x.dtype))


def _words(x: jax.Array, axis: int) -> jax.Array:
    """Pack groups of four 8-bit numbers along an axis into words, the first in the lowest byte."""
    codes = lax.bitcast_convert_type(x, jnp.uint8).astype(jnp.uint32)
    codes = codes.reshape(*x.shape[:axis], -1, 4, *x.shape[axis + 1 :])
    parts = (lax.index_in_dim(codes, i, axis + 1, keepdims=False) for i in range(4))
    return reduce(lax.bitwise_or, (part << jnp.uint32(8 * i) for i, part in enumerate(parts)))


def _bytes(words: jax.Array, dtype: Any) -> jax.Array:
    """Unpack words along the last axis."""
    codes = lax.bitcast_convert_type(words, jnp.uint8).reshape(*words.shape[:-1], -1)
    return lax.bitcast_convert_type(codes, dtype)


def _row_major(x: jax.Array) -> jax.Array:
    # With several devices XLA would gather an array to constrain its layout.
    return with_layout_constraint(x, Layout(tuple(range(x.ndim)))) if _one_device() else x


def _one_device() -> bool:
    return jax.device_count() == 1 and jax.sharding.get_abstract_mesh().empty


def transposed_copy(x: Any) -> ScaledArray | None:
    """Return the transpose of an 8-bit matrix, for cuBLAS's TN layout; None for other arrays."""
    return x.T if is_scaled(x) and not has_scales(x) and x.dtype.itemsize == 1 else None


def operand_of(x: Any) -> Any:
    """Return the operand in a `Moved`; other operands unchanged."""
    return x.x if isinstance(x, Moved) else x


def data_of(x: Any) -> jax.Array:
    """Return the data of an operand: an array, a ScaledArray, or one of them `Moved`."""
    x = operand_of(x)
    return x.data if isinstance(x, ScaledArray) else x


def has_scales(x: Any) -> bool:
    """Return whether an operand has several scales: one per channel or block."""
    return is_scaled(x) and x.scale is not None and x.scale.ndim > 0


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
