"""Taking operands apart: every op accepts arrays and ScaledArrays, and starts here."""

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from ..core import (
    Scale,
    ScaledArray,
    bounded_product,
    narrow,
    num_batch_shards,
    result_dtype,
    safe_scale,
    to_float,
    widen,
)

ArrayLike: TypeAlias = jax.Array | ScaledArray
"""What every op accepts, such as `dense`: an array, or a ScaledArray."""


def unpack(op: str, name: str, x: Any) -> tuple[jax.Array, Scale]:
    """Returns ``(data, scale)`` of an operand; the scale of a plain array is None."""
    try:
        data, scale = x.pair if isinstance(x, ScaledArray) else (jnp.asarray(x), None)
    except (TypeError, ValueError):
        data, scale = None, None
    if data is None or not jnp.issubdtype(data.dtype, jnp.floating):
        got = type(x).__name__ if data is None else f"dtype {data.dtype}"
        raise TypeError(
            f"unitscale.ops.{op}: {name} must be a floating array or a ScaledArray; got {got}. "
            f"Cast it first, for example {name}.astype(jnp.float32)."
        )
    return data, scale


def unpack_uniform(op: str, name: str, x: Any, axes: tuple[int, ...]) -> tuple[jax.Array, Scale]:
    """As `unpack`, with a scale that is constant along ``axes``.

    A scale that varies there cannot be taken out of a contraction or normalization. Its maximum
    along them is; the rest, at most 1, is multiplied into the data, in bfloat16 or float32, which
    stays in range.
    """
    data, scale = unpack(op, name, x)
    if scale is None or jnp.size(scale) == 1:
        return data, None if scale is None else jnp.reshape(scale, ())
    full = jnp.reshape(scale, (1,) * (data.ndim - jnp.ndim(scale)) + jnp.shape(scale))
    axes = tuple(sorted({axis % data.ndim for axis in axes}))
    if all(full.shape[axis] == 1 for axis in axes):
        return data, full
    full = to_float(full)
    largest = safe_scale(jnp.max(full, axis=axes, keepdims=True))
    # Not above 1, so bfloat16 holds the product exactly; narrower exponents take float32.
    dtype = data.dtype if data.dtype == jnp.bfloat16 else widen(data).dtype
    data = (widen(data) * (full / largest)).astype(dtype)
    return data, jnp.reshape(largest, ()) if largest.size == 1 else largest


def times_scales(data: jax.Array, left: Scale, right: Scale) -> tuple[jax.Array, Scale]:
    """Returns the data and scale of a product of two operands, given the product of their data.

    What of the scale would leave the normal numbers of float32 moves into the data.
    """
    scale, rest = bounded_product(left, right)
    return data if isinstance(rest, int) else narrow(widen(data) * rest, data.dtype), scale


def output_dtype(*operands: Any) -> Any:
    """Returns the dtype of an op's result: the promoted one, 8-bit data counting as bfloat16."""
    return result_dtype(
        *(x.data if isinstance(x, ScaledArray) else jnp.asarray(x) for x in operands)
    )


def scale_argument(scale: Scale) -> jax.Array | None:
    """The scale as an argument of a wide op: None where there is none."""
    return None if scale is None else to_float(scale)


def sharers(x: jax.Array, other: jax.Array, is_broadcast: bool) -> int:
    """Number of parts of the batch that use the same ``x``, whose gradient sums over them all.

    Where both vary over the same devices, as far as JAX knows, it is the leading dimension that
    tells: what is broadcast over the batch is shared.
    """
    parts = num_batch_shards(x, other)
    return parts if is_broadcast else parts // num_batch_shards(x)


def shape_error(op: str, expected: str, advice: str, **shapes: tuple[int, ...]) -> ValueError:
    """Builds the error for operands whose shapes do not fit."""
    got = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
    return ValueError(f"unitscale.ops.{op}: {expected}; got {got}. {advice}")
