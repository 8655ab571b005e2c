"""Taking operands apart: every op accepts arrays and ScaledArrays, and starts here."""

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from ..core import Scale, ScaledArray, is_static, is_zero, to_float

ArrayLike: TypeAlias = jax.Array | ScaledArray


def unpack(op: str, name: str, x: Any) -> tuple[jax.Array, Scale]:
    """Returns ``(data, scale)`` of an operand; a plain array has scale 1, zeros are made real."""
    if isinstance(x, ScaledArray):
        data, scale = x.pair
        if is_zero(scale):
            return jnp.zeros_like(data), 1
        return data, 1 if scale is None else scale
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(
            f"unitscale.ops.{op}: {name} must be a floating array or a ScaledArray; got dtype "
            f"{x.dtype}. Cast it first, for example {name}.astype(jnp.float32)."
        )
    return x, 1


def unpack_uniform(op: str, name: str, x: Any, axes: tuple[int, ...]) -> tuple[jax.Array, Scale]:
    """As `unpack`, with a scale that is constant along ``axes``.

    A scale that varies there cannot be taken out of a contraction or normalization: it is
    multiplied into float32 data.
    """
    data, scale = unpack(op, name, x)
    if is_static(scale) or jnp.size(scale) == 1:
        return data, scale if is_static(scale) else jnp.reshape(scale, ())
    full = (1,) * (data.ndim - jnp.ndim(scale)) + jnp.shape(scale)
    if any(full[axis] != 1 for axis in axes):
        return ScaledArray(data, scale).value, 1
    return data, jnp.reshape(scale, full)


def scale_argument(scale: Scale) -> jax.Array | None:
    """The scale as an argument of a wide op: None where it is the static 1."""
    return None if is_static(scale) else to_float(scale)


def shape_error(op: str, expected: str, advice: str, **shapes: tuple[int, ...]) -> ValueError:
    """Builds the error for operands whose shapes do not fit."""
    got = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
    return ValueError(f"unitscale.ops.{op}: {expected}; got {got}. {advice}")
