"""Rotary position embedding."""

import dataclasses

import jax
import jax.numpy as jnp

from ..core import ScaledArray
from ._operands import ArrayLike, output_dtype, shape_error, unpack_uniform
from ._wide import wide_op


@dataclasses.dataclass(frozen=True)
class _Rotate:
    base: float

    def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        half = x.shape[-1] // 2
        frequencies = self.base ** (-jnp.arange(half, dtype=jnp.float32) / half)
        angles = jnp.multiply.outer(positions.astype(jnp.float32), frequencies)
        of_heads = (1,) * (x.ndim - 1 - angles.ndim) + (*positions.shape, 1, half)
        cos, sin = (f(angles).reshape(of_heads) for f in (jnp.cos, jnp.sin))
        first, second = x[..., :half], x[..., half:]
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def rotary(x: ArrayLike, positions: jax.Array, *, base: float = 10000.0) -> ScaledArray:
    """Rotates pairs of features by an angle proportional to the position.

    Scaling:
        A rotation keeps variances, so every factor is 1; the scale is carried. Backward the true
        derivative, the inverse rotation. Computed in float32 and rounded once.

    Args:
        x: (..., time, heads, d) with even d; feature i is paired with i + d / 2.
        positions: (..., time) integers, broadcasting with the leading dimensions.
        base: wavelengths run from 2 pi to 2 pi * base.

    Returns:
        ScaledArray of the shape and dtype of ``x`` (bfloat16 for 8-bit data).

    Raises:
        TypeError: if ``x`` is not floating.
        ValueError: if d is odd or the positions do not fit.

    Example:
        >>> x = jnp.ones((1, 3, 2, 4))
        >>> print(rotary(x, jnp.arange(3)).data[0, 0, 0])
        [1. 1. 1. 1.]

    References:
        Su et al., "RoFormer", 2021, arXiv 2104.09864, equation 34.
    """
    data, scale = unpack_uniform("rotary", "x", x, (-1,))
    positions = jnp.asarray(positions)
    if data.ndim < 3 or data.shape[-1] % 2:
        raise shape_error(
            "rotary",
            "x must be (..., time, heads, d) with even d",
            "Split the features into heads first.",
            x=data.shape,
        )
    times = data.shape[:-2]
    if positions.ndim > len(times) or any(
        n not in (1, t) for n, t in zip(positions.shape[::-1], times[::-1], strict=False)
    ):
        raise shape_error(
            "rotary",
            "positions must broadcast to (..., time)",
            "Give one position per time step.",
            x=data.shape,
            positions=positions.shape,
        )
    y = wide_op(
        _Rotate(float(base)),
        data,
        fwd=1.0,
        bwd=(1.0,),
        constants=(positions,),
        out_dtype=output_dtype(x),
    )
    return ScaledArray(y, scale)
