"""Saturating and stochastic casts between floating-point formats.

``astype`` never saturates: float32 above 464 becomes NaN in float8_e4m3fn, and float8_e5m2
becomes infinite from 61440. Every quantization in the library goes through `cast`.
"""

import dataclasses
import math
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._float8 import encode_float8, is_float8
from ._formats import Format, format_of, wide_dtype
from ._noise import carried, rounding_noise
from ._pow2 import exponent_of, pow2
from ._vjp import custom_vjp

CastRounding = Literal["nearest", "stochastic"]
"""How `cast` rounds: to the nearest value (ties to even), or up or down at random, unbiased."""


# Where float32 arithmetic would meet subnormal numbers of float32, which XLA may flush to zero.
_SMALLEST_EXPONENT = -126


def _clamp(x: jax.Array, fmt: Format) -> jax.Array:
    """Clamps to the largest finite values of ``fmt``; NaN stays NaN, infinity saturates."""
    with np.errstate(over="ignore"):
        representable = float(np.float64(fmt.max).astype(x.dtype)) == fmt.max
    if not representable:
        x = x.astype(wide_dtype(x.dtype))
    bound = min(fmt.max, format_of(x.dtype).max)
    high = jnp.asarray(bound, x.dtype)
    if fmt.min_exponent > _SMALLEST_EXPONENT:
        return jnp.clip(x, -high, high)
    return jnp.where(jnp.abs(x) > high, jnp.where(x > 0, high, -high), x)


def _saturate(x: jax.Array, fmt: Format, is_infinite: jax.Array) -> jax.Array:
    """Clamps what is finite; infinity stays infinity, or is NaN in a format that has none.

    The select fuses with the clamp. It stands before it where it can (for e4m3fn), so that a
    quantization ends in clamp and convert.
    """
    if fmt.has_inf:
        clamped = _clamp(x, fmt)
        return jnp.where(is_infinite, x.astype(clamped.dtype), clamped)
    if fmt.has_nan or fmt.simulated:
        x = jnp.where(is_infinite, jnp.nan, x)
    return _clamp(x, fmt)


def _bits(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns sign and magnitude bits of float32 values."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return bits & jnp.uint32(0x80000000), bits & jnp.uint32(0x7FFFFFFF)


def _exponent(x: jax.Array) -> jax.Array:
    if x.dtype == jnp.float32:
        return exponent_of(x)
    bits = lax.bitcast_convert_type(x, jnp.uint64)
    return ((bits >> 52) & jnp.uint64(0x7FF)).astype(jnp.int32) - 1023


def _round_bits(x: jax.Array, fmt: Format, noise: jax.Array | None) -> jax.Array:
    """Rounds float32 to a format of the same exponents, on integers, subnormal numbers included."""
    sign, magnitude = _bits(x)
    dropped = 23 - fmt.mantissa_bits
    if noise is None:
        below_half = jnp.uint32((1 << (dropped - 1)) - 1)
        magnitude += below_half + ((magnitude >> dropped) & 1)
        magnitude = (magnitude >> dropped) << dropped
    else:
        magnitude = carried(magnitude, noise, dropped)
    return lax.bitcast_convert_type(sign | magnitude, jnp.float32)


def _round_steps(x: jax.Array, fmt: Format, noise: jax.Array | None) -> jax.Array:
    """Rounds float32 or float64 to multiples of the distance between neighbours in ``fmt``."""
    exponent = jnp.clip(_exponent(x), fmt.min_exponent, 127) - fmt.mantissa_bits
    # Two exact multiplications, so that neither power of two leaves the normal range of float32.
    half = exponent // 2
    steps = jnp.abs(x) * pow2(-half).astype(x.dtype) * pow2(half - exponent).astype(x.dtype)
    if noise is None:
        rounded = jnp.round(steps)
    else:
        # A comparison: a sum of steps and noise would itself be rounded, and move exact values.
        # The odd multiples of 2**-24 below 1 are 23 random bits, centred.
        uniform = ((noise >> 9).astype(jnp.float32) + 0.5) * 2.0**-23
        below = jnp.floor(steps)
        rounded = below + (uniform < steps - below).astype(below.dtype)
    # Above 2**23 steps every float32 is a whole number already (float64: 2**52).
    rounded = jnp.where(steps < 1 / jnp.finfo(x.dtype).eps, rounded, steps)
    rounded = rounded * pow2(half).astype(x.dtype) * pow2(exponent - half).astype(x.dtype)
    return jnp.where(jnp.signbit(x), -rounded, rounded)


def _round_at_random(x: jax.Array, fmt: Format, noise: jax.Array) -> jax.Array:
    """As `_round_steps`, of float32, in less than half the operations.

    Where numbers are normal in ``fmt`` the bits that are dropped carry into those that are kept.
    """
    sign, magnitude = _bits(x)
    normal = carried(magnitude, noise, 23 - fmt.mantissa_bits)
    steps = jnp.abs(x) * (1 / fmt.smallest_subnormal)
    below = jnp.floor(steps)
    up = ((noise >> 9).astype(jnp.float32) + 0.5) * 2.0**-23 < steps - below
    subnormal = (below + up.astype(jnp.float32)) * fmt.smallest_subnormal
    smallest = np.float32(2.0**fmt.min_exponent).view(np.uint32)
    subnormal = lax.bitcast_convert_type(subnormal, jnp.uint32)
    rounded = jnp.where(magnitude < smallest, subnormal, normal)
    return lax.bitcast_convert_type(sign | rounded, jnp.float32)


def _round_to_grid(x: jax.Array, fmt: Format, noise: jax.Array | None) -> jax.Array:
    """Rounds to the grid of ``fmt``, subnormal numbers of ``fmt`` included, in the wide dtype.

    ``noise`` (32 random bits each) makes the rounding stochastic; None rounds to nearest, ties to
    even. Finite values may leave the range of ``fmt``.
    """
    x = x.astype(wide_dtype(x.dtype))
    if fmt.mantissa_bits >= jnp.finfo(x.dtype).nmant:
        return x
    if x.dtype == jnp.float32 and fmt.min_exponent <= _SMALLEST_EXPONENT:
        rounded = _round_bits(x, fmt, noise)
    elif x.dtype == jnp.float32 and noise is not None and fmt.smallest_subnormal > 2.0**-100:
        rounded = _round_at_random(x, fmt, noise)
    else:
        rounded = _round_steps(x, fmt, noise)
    return jnp.where(jnp.isfinite(x), rounded, x)


def _to_e8m0(x: jax.Array, noise: jax.Array | None, saturate: bool) -> jax.Array:
    """Rounds to powers of two, on integers: float32 holds 2**-127 as a subnormal number only.

    Ties go up, as in ml_dtypes. Zero and negative numbers become 2**-127 if they saturate, else
    NaN; infinities are NaN.
    """
    sign, magnitude = _bits(x.astype(jnp.float32))
    half = jnp.uint32(1 << 22)
    code = (magnitude + (half if noise is None else noise >> 9)) >> 23
    # Codes 0 and 1 are 2**-127 and 2**-126; between them float32 counts in subnormal numbers.
    code = jnp.where(magnitude < (1 << 23), (magnitude >= 3 * (1 << 21)).astype(jnp.uint32), code)
    not_positive = (sign != 0) | (magnitude == 0)
    code = jnp.where(not_positive, 0 if saturate else 255, jnp.minimum(code, 254 + (not saturate)))
    code = jnp.where(jnp.isfinite(x), code, 255)
    return lax.bitcast_convert_type(code.astype(jnp.uint8), jnp.float8_e8m0fnu)


def _within(fmt: Format, dtype: Any) -> Format:
    """Returns ``fmt`` with the largest value that the dtype which keeps its values holds too."""

    def cut(value: float, bits: int) -> float:
        fraction, exponent = math.frexp(value)
        return math.ldexp(math.floor(math.ldexp(fraction, bits + 1)), exponent - bits - 1)

    own = format_of(dtype)
    largest = min(cut(fmt.max, own.mantissa_bits), cut(own.max, fmt.mantissa_bits))
    return dataclasses.replace(fmt, max=largest)


def _convert(x: jax.Array, fmt: Format) -> jax.Array:
    """Clamps, and rounds by XLA's own conversion."""
    if fmt.has_nan and not fmt.has_inf:
        # An infinity plus 0 times itself is NaN. Wide, as what makes and what rounds x is: they
        # fuse, and XLA drops the conversions in between.
        x = widen(x)
        x = _clamp(x + 0 * x, fmt)
    else:
        x = _saturate(x, fmt, jnp.isinf(x))
    return x.astype(fmt.dtype)


@partial(jax.jit, static_argnums=(2, 3, 4), inline=True)
def _cast_array(x, key, fmt, stochastic, saturate):
    noise = rounding_noise(key, x.shape) if stochastic else None
    if fmt.dtype == jnp.float8_e8m0fnu:
        return _to_e8m0(x, noise, saturate)
    # XLA converts float64 to 16 bits by way of float32, which rounds twice.
    twice = x.dtype == jnp.float64 and fmt.dtype is not None and fmt.dtype.itemsize == 2
    if not (fmt.simulated or stochastic or twice):
        if not saturate:
            return x.astype(fmt.dtype)
        if is_float8(fmt.dtype) and wide_dtype(x.dtype) == jnp.float32:
            return encode_float8(x, fmt, partial(_convert, fmt=fmt), infinity=True)
        return _convert(x, fmt)
    y = _round_to_grid(x, fmt, noise)
    if fmt.simulated:
        fmt = _within(fmt, x.dtype)
    if saturate or not fmt.has_nan:
        # Asked of x: rounding to the grid may have gone beyond float32.
        y = _saturate(y, fmt, jnp.isinf(x))
    elif fmt.simulated:
        y = jnp.where(jnp.abs(y) > fmt.max, jnp.where(y > 0, jnp.inf, -jnp.inf), y)
    return y.astype(x.dtype if fmt.simulated else fmt.dtype)


@partial(custom_vjp, nondiff_argnums=(2, 3, 4))
def _cast(x, key, fmt, stochastic, saturate):
    return _cast_array(x, key, fmt, stochastic, saturate)


def _cast_fwd(x, key, fmt, stochastic, saturate):
    return _cast_array(x, key, fmt, stochastic, saturate), jnp.zeros((0,), x.dtype)


def _cast_bwd(fmt, stochastic, saturate, like, cotangent):
    return narrow(cotangent, like.dtype), None


_cast.defvjp(_cast_fwd, _cast_bwd)


def cast(
    x: Any,
    dtype: Any,
    rounding: CastRounding = "nearest",
    key: jax.Array | None = None,
    saturate: bool = True,
) -> Any:
    """Casts to a floating-point format, saturating at its largest finite value.

    Scaling:
        The scale of a ScaledArray is kept; only its data is cast. Backward is the straight-through
        identity: the cotangent, in the new format by JAX's own rule, is cast to that of ``x``,
        also where the forward saturated. A result in e8m0, which has no sign and no zero, is a
        constant.

    Args:
        x: floating array or ScaledArray, any shape.
        dtype: a float dtype, a name that `format_of` knows, or a simulated ``"E<e>M<m>"``. The
            values of simulated and FP6 formats stay in the dtype of ``x``.
        rounding: "nearest" (ties to even) or "stochastic" (up with probability equal to the
            fraction, so that the expected value is ``x``; from float32, 23 random bits).
        key: `jax.random` key, needed for stochastic rounding.
        saturate: clamp finite values to the largest one of the format. Infinity and NaN are not
            hidden: infinity stays, or becomes NaN in a format without it (e4m3fn, e8m0); only
            float4_e2m1fn has neither, and shows its largest value. e8m0 clamps to its smallest
            value as well. If False, overflow does what the format does: infinity, NaN where there
            is none, the largest value where there is neither.

    Returns:
        The same type and shape as ``x`` in the new format.

    Raises:
        TypeError: if ``x`` is not floating.
        ValueError: if the format or rounding is unknown, or the key is missing.

    Example:
        >>> print(cast(jnp.float32(1000.0), "e4m3fn"))
        448
        >>> print(cast(jnp.float32(1.2), "E5M2"))
        1.25

    References:
        Micikevicius et al., "FP8 Formats for Deep Learning", 2022, arXiv 2209.05433, section 3;
        Croci et al., "Stochastic rounding", 2022, arXiv 2103.13445 (the rounding rule).
    """
    if rounding not in get_args(CastRounding):
        raise ValueError(
            f"unitscale.cast: rounding must be 'nearest' or 'stochastic'; got {rounding!r}"
        )
    fmt = format_of(dtype)
    if hasattr(x, "map_data"):
        return x.map_data(lambda data: cast(data, fmt, rounding, key, saturate))
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"unitscale.cast: expected a floating array; got dtype {x.dtype}")
    stochastic = rounding == "stochastic"
    if stochastic and key is None:
        raise ValueError(
            'unitscale.cast: rounding="stochastic" needs key=, a jax.random key; got None'
        )
    if fmt.dtype == jnp.float8_e8m0fnu:
        x = lax.stop_gradient(x)
    return _cast(x, key if stochastic else None, fmt, stochastic, saturate)


def narrow(x: jax.Array, dtype: Any) -> jax.Array:
    """Returns ``x`` rounded to a dtype; finite values saturate in 8-bit types and narrower.

    Example:
        >>> print(narrow(jnp.float32(1e6), jnp.float16), narrow(jnp.float32(1e6), "float8_e4m3fn"))
        inf 448
    """
    dtype = jnp.dtype(dtype)
    if x.dtype == dtype:
        return x
    return _cast_array(x, None, format_of(dtype), False, dtype.itemsize == 1)


def upcast(x: Any, dtype: Any) -> Any:
    """Returns an array or ScaledArray in a dtype that holds its values.

    JAX rounds the cotangent to the dtype of ``x``; to 8 bits it saturates, as in `cast`.

    Example:
        >>> x = jnp.ones((), jnp.float8_e4m3fn)
        >>> print(jax.grad(lambda x: 1e3 * upcast(x, jnp.float32))(x))
        448
    """
    return cast(x, dtype) if x.dtype.itemsize == 1 else x.astype(dtype)


def materialize(x: jax.Array) -> jax.Array:
    """Returns an array that XLA rounds to its dtype and keeps in it.

    Otherwise XLA drops a conversion to a narrow format and back, and the rounding with it: what is
    read again is kept wide, at twice the bytes or four times.

    Example:
        >>> print(materialize(jnp.bfloat16(0.3)))
        0.300781
    """
    return lax.optimization_barrier(x)


def widen(x: jax.Array) -> jax.Array:
    """Returns ``x`` in the dtype that its values are computed in (float32, or float64).

    Example:
        >>> widen(jnp.ones(2, jnp.float8_e4m3fn)).dtype.name
        'float32'
    """
    return lax.convert_element_type(x, wide_dtype(x.dtype))
