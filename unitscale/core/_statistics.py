"""Statistics from which scales are chosen: amax, RMS, and the scale of least quantization error."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ._cast import cast, widen
from ._formats import format_of
from ._pow2 import pow2
from ._scale import scale_near

Axis = int | Sequence[int] | None


def amax(x: jax.Array, axis: Axis = None) -> jax.Array:
    """Returns the largest magnitude over ``axis``, kept as size-1 dimensions unless axis is None.

    Computed in float32. NaN and infinity are propagated: whoever records a history decides. Its
    derivative is zero.

    Example:
        >>> print(amax(jnp.array([1.0, -3.0])))
        3.0
    """
    return _amax(x, _hashable(axis))


def rms(x: jax.Array, axis: Axis = None) -> jax.Array:
    """Returns sqrt(mean(x**2)) over ``axis``, kept as size-1 dimensions unless axis is None.

    Computed in float32, of formats whose squares it does not hold on values divided by a power of
    two near their amax, so that they neither overflow nor underflow. Zero for empty or all-zero
    input.

    Example:
        >>> print(rms(jnp.full(4, 1e30)))
        1e+30
    """
    return _rms(x, _hashable(axis))


def _hashable(axis: Axis) -> int | tuple[int, ...] | None:
    return tuple(axis) if isinstance(axis, Sequence) else axis


# One program where nothing is traced; traced once for each shape where something is.
@functools.partial(jax.jit, static_argnums=1, inline=True)
def _amax(x: jax.Array, axis: Axis) -> jax.Array:
    x = jnp.abs(widen(x))
    # As integers, which order magnitudes as floats do, and NaN above infinity: of a large array's
    # maximum XLA's CPU backend leaves NaN out.
    bits = lax.bitcast_convert_type(x, f"int{8 * x.dtype.itemsize}")
    most = jnp.max(bits, axis=axis, keepdims=axis is not None, initial=0)
    return lax.bitcast_convert_type(most, x.dtype)


@functools.partial(jax.jit, static_argnums=1, inline=True)
def _rms(x: jax.Array, axis: Axis) -> jax.Array:
    keep, squares_fit = axis is not None, _squares_fit(x.dtype)
    x = widen(x)
    if x.size == 0:
        return jnp.sum(x, axis=axis, keepdims=keep)
    if squares_fit:
        return jnp.sqrt(jnp.mean(jnp.square(x), axis=axis, keepdims=keep))
    unit = scale_near(amax(x, axis))
    return unit * jnp.sqrt(jnp.mean(jnp.square(x / unit), axis=axis, keepdims=keep))


def _squares_fit(dtype: Any) -> bool:
    """Whether float32 holds the squares of a format, as it does those of 5 bits of exponent."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).nexp <= 5


def optimal_scale(
    x: jax.Array, dtype: Any, axis: Axis = None, *, search: tuple[int, int] = (-24, 24)
) -> jax.Array:
    """Returns the power-of-two scale of least mean squared quantization error for a format.

    Every exponent of ``search`` around the RMS is tried: s minimizes
    mean((cast(x / s, dtype) * s - x)**2).

    Args:
        x: floating array.
        dtype: target format, as for `cast`.
        axis: axes that share a scale; None for one scale.
        search: first and last exponent tried, relative to the RMS rounded to a power of two.

    Returns:
        float32 scale, with size-1 dimensions where ``axis`` was reduced; 1 for an all-zero tensor.

    Raises:
        ValueError: if the format is unknown or the search range is empty.

    Example:
        >>> print(optimal_scale(jnp.array([1e-5, 2e-5]), "e4m3fn") < 1e-4)
        True
    """
    fmt = format_of(dtype)
    low, high = search
    if low > high:
        raise ValueError(
            f"unitscale.optimal_scale: search must be (low, high), low <= high; got {search}"
        )
    center = scale_near(rms(x, axis))
    unit = widen(x) / center
    keepdims = axis is not None

    def error(exponent):
        step = pow2(exponent)
        rounded = widen(cast(unit / step, fmt)) * step
        return jnp.mean(jnp.square(rounded - unit), axis=axis, keepdims=keepdims)

    exponents = jnp.arange(low, high + 1)
    errors = lax.map(error, exponents)
    # Among equals the exponent nearest to the RMS: exact values have error zero for many scales.
    tie_break = jnp.abs(exponents).reshape((-1,) + (1,) * (errors.ndim - 1))
    is_best = errors == jnp.min(errors, axis=0)
    best = jnp.argmin(jnp.where(is_best, tie_break, jnp.iinfo(jnp.int32).max), axis=0)
    return center * pow2(exponents[best])
