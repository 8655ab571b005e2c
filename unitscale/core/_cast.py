"""Saturating and stochastic casts between floating-point formats.

``astype`` never saturates: float32 above 464 becomes NaN in float8_e4m3fn, and float8_e5m2
becomes infinite from 61440. Every quantization in the library goes through `cast`.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._compat import custom_vjp
from ._formats import Format, format_of, wide_dtype
from ._scale import exponent_of, pow2

_NAMES = ("float8_e4m3fn", "float8_e5m2")


def is_float8(dtype: Any) -> bool:
    """Whether `encode_float8` and `decode_float8` know a format."""
    return dtype is not None and jnp.dtype(dtype).name in _NAMES


def encode_float8(
    x: jax.Array, fmt: Format, elsewhere: Callable[[jax.Array], jax.Array], *, infinity: bool
) -> jax.Array:
    """Rounds to the nearest FP8 number (ties to even) and saturates; NaN stays NaN.

    XLA's CPU backend converts to FP8 element by element, several times slower than everything
    around it, so a program traced on a CPU rounds in float32 first. The result is the same.

    Args:
        x: floating array, float32 or narrower.
        fmt: a format for which `is_float8` is true.
        elsewhere: the conversion on other platforms.
        infinity: whether infinity stays infinity, if the format has it; otherwise it becomes NaN.
    """
    if jax.default_backend() == "cpu":
        return _encode(x.astype(jnp.float32), fmt, infinity and fmt.has_inf)
    return elsewhere(x)


def decode_float8(data: jax.Array) -> jax.Array:
    """Returns FP8 numbers in float32; infinity may be NaN."""
    return _decode(data) if jax.default_backend() == "cpu" else data.astype(jnp.float32)


def _encode(x: jax.Array, fmt: Format, infinity: bool) -> jax.Array:
    bounded = lax.clamp(np.float32(-fmt.max), x, np.float32(fmt.max))
    normal = lax.reduce_precision(bounded, exponent_bits=8, mantissa_bits=fmt.mantissa_bits)
    steps = lax.round(bounded * (1 / fmt.smallest_subnormal), lax.RoundingMethod.TO_NEAREST_EVEN)
    is_subnormal = lax.abs(bounded) < 2.0**fmt.min_exponent
    rounded = lax.select(is_subnormal, steps * fmt.smallest_subnormal, normal)
    beyond = x if infinity else lax.full_like(x, jnp.nan)
    return lax.select(lax.is_finite(x), rounded, beyond).astype(fmt.name)


def _decode(data: jax.Array) -> jax.Array:
    fmt = format_of(data.dtype)
    bias = 1 - fmt.min_exponent
    code = lax.bitcast_convert_type(data, jnp.uint8).astype(jnp.uint32)
    magnitude = code & jnp.uint32(0x7F)
    exponent = jnp.uint32((127 - bias) << 23)
    normal = lax.bitcast_convert_type(
        (magnitude << (23 - fmt.mantissa_bits)) + exponent, jnp.float32
    )
    subnormal = magnitude.astype(jnp.int32).astype(jnp.float32) * fmt.smallest_subnormal
    x = jnp.where(magnitude < jnp.uint32(1 << fmt.mantissa_bits), subnormal, normal)
    largest = np.asarray(fmt.max, data.dtype).view(np.uint8)
    x = jnp.where(magnitude > jnp.uint32(largest), jnp.nan, x)
    return jnp.where(code >= jnp.uint32(0x80), -x, x)


# An odd number: 2^32 over the golden ratio. Places side by side then differ in many bits.
_SPREAD = 0x9E3779B9


def rounding_noise(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns 32 random bits for each entry: a hash of its index and of two words of the key.

    The bits of `jax.random` cost about a hundred integer operations each, which on a GPU takes
    longer than the rest of an optimizer step. The hash is `lowbias32`, a bijection, with the second
    word mixed in between its two rounds. It is good enough for rounding, not for sampling.

    References:
        Wellons, "Prospecting for Hash Functions", 2018, nullprogram.com/blog/2018/07/31
        (lowbias32).
    """
    first, second = jax.random.bits(key, (2,), jnp.uint32)
    place = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        stride = jnp.uint32(math.prod(shape[axis + 1 :]) * _SPREAD % 2**32)
        place += lax.broadcasted_iota(jnp.uint32, shape, axis) * stride
    return _hash(place + first, second)


def carried(bits: jax.Array, noise: jax.Array, dropped: int) -> jax.Array:
    """Adds noise below the kept bits of float32 numbers, and clears the ``dropped`` last bits."""
    return ((bits + (noise >> (32 - dropped))) >> dropped) << dropped


def dithered(x: jax.Array, mantissa_bits: int) -> jax.Array:
    """Rounds to a number of mantissa bits, up or down such that the mean is kept, without a key.

    Use it where rounding to nearest would bias sums over many numbers. The noise is a multiple of
    the number's own bits. A later cast to a format with that many mantissa bits changes nothing,
    except for results that are subnormal in that format: those round to nearest.

    Args:
        x: floating array.
        mantissa_bits: explicit mantissa bits to keep.

    Returns:
        float32 array. Zero, subnormal numbers of float32, magnitudes from 2^127, infinity and NaN
        are unchanged.

    Example:
        >>> print(dithered(jnp.array([1.3, 1.31, 1.32, 1.33]), 2))
        [1.25 1.5  1.25 1.25]
        >>> print(dithered(jnp.linspace(14.4, 14.6, 1000), 2).mean().round(1))
        14.5
    """
    return _dithered(x.astype(jnp.float32), mantissa_bits)


@partial(jax.jit, static_argnums=1)  # by its name analysis knows it for a rounding
def _dithered(x: jax.Array, mantissa_bits: int) -> jax.Array:
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    rounded = carried(bits, bits * jnp.uint32(_SPREAD), 23 - mantissa_bits)
    exponent = bits >> 23 & 0xFF
    is_normal = (exponent > 0) & (exponent < 0xFE)
    return jnp.where(is_normal, lax.bitcast_convert_type(rounded, jnp.float32), x)


def _hash(x: jax.Array, second: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D) ^ second
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


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
    """Clamps finite values; infinity stays infinity, or becomes NaN in a format without it.

    Where possible the select comes before the clamp, so that a quantization ends in clamp and
    convert.
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
    """As `_round_steps` for float32 with noise, in less than half the operations."""
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
    """Rounds to powers of two on integers: float32 holds 2**-127 only as a subnormal number.

    Ties go up, as in ml_dtypes. Zero and negative numbers become 2**-127 if they saturate, else
    NaN; infinity is NaN.
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
        The scale of a ScaledArray is kept; only its data is cast. The gradient is straight-through:
        the cotangent is cast to the dtype of ``x``, also where the forward saturated. A result in
        e8m0, which has no sign and no zero, is a constant.

    Args:
        x: floating array or ScaledArray, any shape.
        dtype: a float dtype, a name that `format_of` knows, or a simulated ``"E<e>M<m>"``. Values
            of simulated and FP6 formats stay in the dtype of ``x``.
        rounding: "nearest" (ties to even) or "stochastic" (up with probability equal to the
            fraction, so that the expected value is ``x``; 23 random bits).
        key: `jax.random` key, needed for stochastic rounding.
        saturate: clamp finite values to the largest one of the format. Infinity stays infinity, or
            becomes NaN in a format without it (e4m3fn, e8m0); float4_e2m1fn, which has neither,
            gives its largest value. If False, overflow does what the format does.

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
    """Rounds to a dtype; finite values saturate in 8-bit types and narrower."""
    dtype = jnp.dtype(dtype)
    if x.dtype == dtype:
        return x
    return _cast_array(x, None, format_of(dtype), False, dtype.itemsize == 1)


def upcast(x: Any, dtype: Any) -> Any:
    """Returns an array or ScaledArray in a wider dtype; the cotangent saturates in 8 bits."""
    return cast(x, dtype) if x.dtype.itemsize == 1 else x.astype(dtype)


def materialize(x: jax.Array) -> jax.Array:
    """Forces XLA to round an array to its dtype and to keep it in that dtype.

    Otherwise XLA removes a conversion to a narrow format and back, and stores the wide array.
    """
    return lax.optimization_barrier(x)


def widen(x: jax.Array) -> jax.Array:
    """Returns ``x`` in the dtype in which it is computed with: float32, or float64 for float64."""
    return lax.convert_element_type(x, wide_dtype(x.dtype))
