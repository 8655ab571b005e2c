"""Taking operands apart: every op accepts arrays and ScaledArrays, and starts here."""

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from ..core import Scale, ScaledArray, is_static, is_zero, result_dtype, safe_scale, to_float, widen

ArrayLike: TypeAlias = jax.Array | ScaledArray
"""What every op accepts, such as `dense`: an array, or a ScaledArray."""


def unpack(op: str, name: str, x: Any) -> tuple[jax.Array, Scale]:
    """Returns ``(data, scale)`` of an operand; a plain array has scale 1, zeros are made real."""
    data, scale = unpack_term(op, name, x)
    return data, 1 if is_zero(scale) else scale


def unpack_term(op: str, name: str, x: Any) -> tuple[jax.Array, Scale]:
    """As `unpack`, but a zero array keeps its static scale 0, so that it adapts to any other."""
    try:
        data, scale = x.pair if isinstance(x, ScaledArray) else (jnp.asarray(x), 1)
    except (TypeError, ValueError):
        data, scale = None, 1
    if data is None or not jnp.issubdtype(data.dtype, jnp.floating):
        got = type(x).__name__ if data is None else f"dtype {data.dtype}"
        raise TypeError(
            f"unitscale.ops.{op}: {name} must be a floating array or a ScaledArray; got {got}. "
            f"Cast it first, for example {name}.astype(jnp.float32)."
        )
    if is_zero(scale):
        return jnp.zeros_like(data), 0
    return data, 1 if scale is None else scale


def unpack_uniform(op: str, name: str, x: Any, axes: tuple[int, ...]) -> tuple[jax.Array, Scale]:
    """As `unpack`, with a scale that is constant along ``axes``.

    A scale that varies there cannot be taken out of a contraction or normalization. Its maximum
    along them is; the rest, at most 1, is multiplied into float32 data, which stays in range.
    """
    data, scale = unpack(op, name, x)
    if is_static(scale) or jnp.size(scale) == 1:
        return data, scale if is_static(scale) else jnp.reshape(scale, ())
    full = jnp.reshape(scale, (1,) * (data.ndim - jnp.ndim(scale)) + jnp.shape(scale))
    axes = tuple(sorted({axis % data.ndim for axis in axes}))
    if all(full.shape[axis] == 1 for axis in axes):
        return data, full
    full = to_float(full)
    largest = safe_scale(jnp.max(full, axis=axes, keepdims=True))
    data = widen(data) * (full / largest)
    return data, jnp.reshape(largest, ()) if largest.size == 1 else largest


def output_dtype(*operands: Any) -> Any:
    """Returns the dtype of an op's result: the promoted one, 8-bit data counting as bfloat16."""
    return result_dtype(
        *(x.data if isinstance(x, ScaledArray) else jnp.asarray(x) for x in operands)
    )


def scale_argument(scale: Scale) -> jax.Array | None:
    """The scale as an argument of a wide op: None where it is the static 1."""
    return None if is_static(scale) else to_float(scale)


def shape_error(op: str, expected: str, advice: str, **shapes: tuple[int, ...]) -> ValueError:
    """Builds the error for operands whose shapes do not fit."""
    got = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
    return ValueError(f"unitscale.ops.{op}: {expected}; got {got}. {advice}")
