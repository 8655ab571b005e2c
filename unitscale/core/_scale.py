"""Arithmetic of scales: an array each, or None, which is pruned while tracing.

A scale is None (a plain array) or a float array (float32, or float8_e8m0fnu). Every traced-scale
rule of the library is composed of the functions in this module, so that None is treated in one
place.
"""

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ._pow2 import Rounding, round_to_pow2

Scale: TypeAlias = jax.Array | None
"""A scale: None (a plain array) or an array: see `as_scale`."""


def as_scale(scale: Any) -> Scale:
    """Returns ``scale`` in canonical form.

    A number becomes a float32 array, 1 too: whether a value happens to be 1 (or a leaf all zero)
    never changes the structure of a program. float8_e8m0fnu arrays are kept.

    Raises:
        TypeError: if the scale is not a real number or a floating or integer array.
        ValueError: if a number is not positive, infinite, NaN or out of float32's range.

    Example:
        >>> as_scale(1.0), as_scale(None)
        (Array(1., dtype=float32), None)
    """
    if scale is None:
        return None
    if isinstance(scale, (bool, str, bytes, complex)):
        raise TypeError(
            "unitscale.ScaledArray: scale must be None, a number or a float array; got "
            f"{type(scale).__name__} {scale!r}"
        )
    if isinstance(scale, (int, float, np.number)) and not isinstance(scale, np.ndarray):
        if not (np.isfinite(scale) and scale > 0):
            raise ValueError(
                f"unitscale.ScaledArray: scale must be positive and finite; got {scale!r}. Put "
                "sign and zeros into data."
            )
        single = np.finfo(np.float32)
        if not float(single.tiny) <= float(scale) <= float(single.max):
            raise ValueError(
                "unitscale.ScaledArray: scale must be a normal float32 number; got "
                f"{scale!r}. Multiply data by a part of it."
            )
        return jnp.float32(scale)
    if not hasattr(scale, "dtype"):
        raise TypeError(
            "unitscale.ScaledArray: scale must be None, a number or a float array; got "
            f"{type(scale).__name__}"
        )
    scale = jnp.asarray(scale)
    if scale.dtype == jnp.float8_e8m0fnu or scale.dtype in (jnp.float32, jnp.float64):
        return scale
    if jnp.issubdtype(scale.dtype, jnp.floating) or jnp.issubdtype(scale.dtype, jnp.integer):
        return scale.astype(jnp.float32)
    raise TypeError(f"unitscale.ScaledArray: scale must be a float array; got dtype {scale.dtype}")


def scale_text(scale: Scale) -> str:
    """A scale as representations show it: None, the number of one entry, or type and shape."""
    if scale is None:
        return "None"
    concrete = isinstance(scale, (np.ndarray, np.generic, jax.Array))
    if isinstance(scale, Tracer) or not concrete or scale.size != 1:
        return f"{getattr(scale, 'dtype', '?')}{list(getattr(scale, 'shape', ()))}"
    return f"{float(np.asarray(scale, np.float32).reshape(())):g}"


def expand_blocks(scale: jax.Array, shape: tuple[int, ...], block: tuple[int, ...]) -> jax.Array:
    """Returns a scale per block in the shape of the data."""
    for axis, size in enumerate(block):
        if size == 1:
            continue
        # Without total_repeat_length a broadcast, with it a gather.
        own = jax.typeof(scale).sharding  # JAX wants to be told where explicit axes are to lie
        repeated = jnp.repeat(scale, size, axis=axis, out_sharding=own if any(own.spec) else None)
        scale = jax.lax.slice_in_dim(repeated, 0, shape[axis], axis=axis)
    return scale


def broadcasts(scale_shape: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a scale of one shape broadcasts against data of another.

    Example:
        >>> broadcasts((3, 1), (3, 2)), broadcasts((3, 1), (2,))
        (True, False)
    """
    try:
        return jnp.broadcast_shapes(scale_shape, shape) == shape
    except ValueError:
        return False


def check_shapes(data: Any, scale: Scale, block_shape: tuple[int, ...] | None) -> None:
    """Raises a ValueError if a scale does not fit its data."""
    shape, scale_shape = jnp.shape(data), () if scale is None else jnp.shape(scale)
    if block_shape is None:
        if not broadcasts(scale_shape, shape):
            raise ValueError(
                f"unitscale.ScaledArray: scale must broadcast against data; got data {shape}, "
                f"scale {scale_shape}. Give it size-1 dimensions, or block_shape= for blocks."
            )
        return
    if len(block_shape) != len(shape) or any(b < 1 for b in block_shape):
        raise ValueError(
            "unitscale.ScaledArray: block_shape needs one positive size per dimension of data; got "
            f"data {shape}, block_shape {block_shape}"
        )
    blocks = tuple(-(-n // b) for n, b in zip(shape, block_shape, strict=True))
    if scale_shape != blocks:
        raise ValueError(
            f"unitscale.ScaledArray: data {shape} in blocks of {block_shape} needs a scale of "
            f"shape {blocks}; got {scale_shape}"
        )


def to_float(scale: Scale) -> jax.Array:
    """Returns a scale as a float32 (or float64) array; None counts as 1.

    Example:
        >>> print(to_float(None))
        1.0
    """
    if scale is None:
        return jnp.float32(1)
    array = jax.lax.stop_gradient(scale)
    return array.astype(jnp.float32) if array.dtype == jnp.float8_e8m0fnu else array


def multiply_scales(left: Scale, right: Scale) -> Scale:
    """Returns left * right; None is neutral.

    Example:
        >>> multiply_scales(None, jnp.float32(2)), multiply_scales(None, None)
        (Array(2., dtype=float32), None)
    """
    if left is None:
        return right
    if right is None:
        return left
    return to_float(left) * to_float(right)


def divide_scales(left: Scale, right: Scale) -> Scale:
    """Returns left / right; None counts as 1.

    Example:
        >>> divide_scales(None, jnp.float32(2)), divide_scales(None, None)
        (Array(0.5, dtype=float32), None)
    """
    return left if right is None else to_float(left) / to_float(right)


def bounded_product(left: Scale, right: Scale) -> tuple[Scale, jax.Array | int]:
    """Returns left * right within the normal numbers of float32, and what is left for the data.

    Example:
        >>> scale, rest = bounded_product(jnp.float32(2.0**80), jnp.float32(2.0**50))
        >>> float(scale) == 2.0**127, float(rest)
        (True, 8.0)
    """
    scale = multiply_scales(left, right)
    if left is None or right is None:
        return scale, 1
    a, b = to_float(left), to_float(right)
    low, high = jnp.minimum(a, b), jnp.maximum(a, b)
    near = _normal(jnp.asarray(scale), low > 0)
    # In this order no part is out of range.
    return near, jnp.where(near == scale, 1, high / near * low)


def bounded_quotient(left: Scale, right: Scale) -> tuple[Scale, jax.Array | int]:
    """Returns left / right within the normal numbers of float32, and what is left for the data.

    Example:
        >>> scale, rest = bounded_quotient(None, jnp.float32(2.0**127))
        >>> float(scale) == 2.0**-126, float(rest)
        (True, 0.5)
    """
    scale = divide_scales(left, right)
    if scale is None or right is None:
        return scale, 1
    a, b = to_float(left), to_float(right)
    near = _normal(scale, (a > 0) & (b > 0))
    return near, jnp.where(near == scale, 1, a / near / b)


def bounded_power(scale: Scale, exponent: int) -> tuple[Scale, jax.Array | int]:
    """Returns scale**exponent within the normal numbers of float32, and what is left for the data.

    The latter is to multiply the data before it is raised to the power itself.

    Example:
        >>> scale, rest = bounded_power(jnp.float32(2.0**50), 3)
        >>> float(scale) == 2.0**126, float(rest)
        (True, 256.0)
    """
    if scale is None:
        return None, 1
    whole, times = to_float(scale), max(abs(exponent), 1)
    near = jnp.clip(whole, 2.0 ** -(126 // times), 2.0 ** (127 // times))
    return near**exponent, whole / near


def _normal(scale: jax.Array, positive: jax.Array) -> jax.Array:
    """The scale within the normal numbers of float32, where it is made of positive ones."""
    return jnp.where(positive, jnp.clip(scale, 2.0**-126, 2.0**127), scale)


def safe_scale(scale: jax.Array) -> jax.Array:
    """Replaces scales that cannot divide (zero, infinite, NaN) by 1.

    All-zero tensors have RMS 0; dividing by it would turn zeros into NaN.

    Example:
        >>> print(safe_scale(jnp.array([0.0, 2.0, jnp.inf])))
        [1. 2. 1.]
    """
    scale = jnp.asarray(scale)
    return jnp.where((scale > 0) & (scale < jnp.inf), scale, jnp.ones_like(scale))


def scale_near(size: jax.Array, rounding: Rounding = "nearest") -> jax.Array:
    """Returns the power of two nearest a size, for data to be divided by; 1 of what is no size.

    At most 2^126: XLA multiplies by the inverse of a scale, and flushes that of 2^127 to 0.

    Example:
        >>> print(scale_near(jnp.array([0.0, 3.1])), float(scale_near(3e38)) == 2.0**126)
        [1. 4.] True
    """
    return safe_scale(divisor(round_to_pow2(size, rounding)))


def divisor(scale: jax.Array) -> jax.Array:
    """Returns a scale as what data can be divided by: at most 2^126, see `scale_near`.

    Example:
        >>> print(divisor(jnp.float32(4.0)))
        4.0
    """
    return jnp.where(scale < jnp.inf, jnp.minimum(scale, 2.0**126), scale)


def common_scale(left: Scale, right: Scale) -> Scale:
    """Returns the scale at which two operands of a sum meet.

    sqrt(left**2 + right**2) rounded to a power of two, as independent terms add in variance. None
    counts as 1 beside a scale.

    Example:
        >>> common_scale(None, None)
        >>> print(common_scale(jnp.float32(4), None))
        4.0
    """
    if left is None and right is None:
        return None
    a, b = to_float(left), to_float(right)
    larger = jnp.maximum(a, b)
    ratio = jnp.minimum(a, b) / safe_scale(larger)
    # larger * sqrt(1 + ratio**2) neither overflows nor underflows.
    return round_to_pow2(larger * jnp.sqrt(1 + ratio * ratio))
