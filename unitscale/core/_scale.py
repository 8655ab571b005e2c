"""Arithmetic of scales, with the special scales that let work be pruned while tracing.

A scale is None (a plain array), the static 1, the static 0 (an array of zeros), or a float array
(float32, or float8_e8m0fnu). Every traced-scale rule of the library is composed of the functions in
this module, so that special scales are treated in one place.
"""

from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ._pow2 import round_to_pow2

if TYPE_CHECKING:
    from typing_extensions import TypeIs

Scale: TypeAlias = int | jax.Array | None
"""A scale: None (a plain array), a static 1, a static 0 (a zero array), or an array: `as_scale`."""


def is_static(scale: Scale) -> "TypeIs[int | None]":
    """Whether a scale is one of the special scales None, 1 and 0, known while tracing.

    Example:
        >>> is_static(1), is_static(jnp.float32(1))
        (True, False)
    """
    return scale is None or (isinstance(scale, int) and not isinstance(scale, bool))


def as_scale(scale: Any) -> Scale:
    """Returns ``scale`` in canonical form.

    Python and NumPy scalars equal to 1 or 0 become the special scales, every other number becomes a
    float32 array, and float8_e8m0fnu arrays are kept.

    Raises:
        TypeError: if the scale is not a real number or a floating or integer array.
        ValueError: if a Python number is negative, infinite, NaN or out of float32's range.

    Example:
        >>> as_scale(1.0), as_scale(None)
        (1, None)
    """
    if scale is None:
        return None
    if isinstance(scale, (bool, str, bytes, complex)):
        raise TypeError(
            "unitscale.ScaledArray: scale must be None, a number or a float array; got "
            f"{type(scale).__name__} {scale!r}"
        )
    if isinstance(scale, (int, float, np.number)) and not isinstance(scale, np.ndarray):
        if not (np.isfinite(scale) and scale >= 0):
            raise ValueError(
                "unitscale.ScaledArray: scale must be finite and not negative; got "
                f"{scale!r}. Put the sign into data."
            )
        if scale in (0, 1):
            return int(scale)
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


def to_float(scale: Scale) -> jax.Array:
    """Returns a scale as a float32 (or float64) array; None counts as 1.

    Example:
        >>> print(to_float(None))
        1.0
    """
    if scale is None:
        return jnp.float32(1)
    if is_static(scale):
        return jnp.float32(scale)
    scale = jax.lax.stop_gradient(scale)
    return scale.astype(jnp.float32) if scale.dtype == jnp.float8_e8m0fnu else scale


def multiply_scales(left: Scale, right: Scale) -> Scale:
    """Returns left * right; 1 is neutral, 0 absorbs, and None is a neutral without a scale.

    Example:
        >>> multiply_scales(1, 0), multiply_scales(None, 1), multiply_scales(None, None)
        (0, 1, None)
    """
    if left is None:
        return right
    if right is None:
        return left
    if is_static(left):
        return right if left == 1 else 0
    if is_static(right):
        return left if right == 1 else 0
    return to_float(left) * to_float(right)


def divide_scales(left: Scale, right: Scale) -> Scale:
    """Returns left / right; a divisor of static 0 counts as 1, its sign of zero being in the data.

    Example:
        >>> divide_scales(1, 1), divide_scales(0, 1)
        (1, 0)
    """
    if right is None or (is_static(right) and right in (0, 1)):
        return left
    if left is not None and is_static(left) and left == 0:
        return 0
    return to_float(left) / to_float(right)


def bounded_product(left: Scale, right: Scale) -> tuple[Scale, jax.Array | int]:
    """Returns left * right within the normal numbers of float32, and what is left for the data.

    Example:
        >>> scale, rest = bounded_product(jnp.float32(2.0**80), jnp.float32(2.0**50))
        >>> float(scale) == 2.0**127, float(rest)
        (True, 8.0)
    """
    scale = multiply_scales(left, right)
    if is_static(left) or is_static(right):
        return scale, 1
    a, b = to_float(left), to_float(right)
    low, high = jnp.minimum(a, b), jnp.maximum(a, b)
    near = _normal(jnp.asarray(scale), low > 0)
    # In this order no part is out of range.
    return near, jnp.where(near == scale, 1, high / near * low)


def bounded_quotient(left: Scale, right: Scale) -> tuple[Scale, jax.Array | int]:
    """Returns left / right within the normal numbers of float32, and what is left for the data.

    Example:
        >>> scale, rest = bounded_quotient(1, jnp.float32(2.0**127))
        >>> float(scale) == 2.0**-126, float(rest)
        (True, 0.5)
    """
    scale = divide_scales(left, right)
    if scale is left or is_static(scale):
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
    if is_static(scale):
        return scale, 1
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


def common_scale(left: Scale, right: Scale) -> Scale:
    """Returns the scale at which two operands of a sum meet.

    sqrt(left**2 + right**2) rounded to a power of two, as independent terms add in variance. A
    static zero takes the scale of the other operand; None counts as 1 beside a scale.

    Example:
        >>> common_scale(0, 1), common_scale(None, None)
        (1, None)
        >>> print(common_scale(jnp.float32(4), jnp.float32(1)))
        4.0
    """
    if left is None and right is None:
        return None
    if is_static(left) and left == 0:
        return right
    if is_static(right) and right == 0:
        return left
    if is_static(left) and is_static(right):
        return 1
    a, b = to_float(left), to_float(right)
    larger = jnp.maximum(a, b)
    ratio = jnp.minimum(a, b) / safe_scale(larger)
    # larger * sqrt(1 + ratio**2) neither overflows nor underflows.
    return round_to_pow2(larger * jnp.sqrt(1 + ratio * ratio))
