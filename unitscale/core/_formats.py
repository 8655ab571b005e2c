"""Floating-point formats, exact powers of two, and casts between formats.

The library reads the limits of formats (largest value, smallest normal, epsilon) only from
`format_of`. Every quantization saturates as in `cast`, because ``astype`` never does: numbers above
464 become NaN in float8_e4m3fn, and numbers from 61440 become infinite in float8_e5m2.
Powers of two are computed with integer operations on the bits of float32, because XLA may flush
subnormal numbers, and log2 and exp2 are not exact on every backend.
"""

import dataclasses
import difflib
import functools
import math
import re
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from ._compat import custom_vjp

CastRounding = Literal["nearest", "stochastic"]
"""How `cast` rounds: to nearest (ties to even), or stochastically."""
Rounding = Literal["nearest", "up", "down"]
"""How `round_to_pow2` rounds."""


def check_choice(owner: str, name: str, value: object, choices: Any) -> None:
    """Raise a ValueError that suggests the closest choice, unless ``value`` is a valid one.

    ``owner`` is the full name of the function or class; ``choices`` is a sequence or a Literal.
    """
    choices = get_args(choices) or choices
    if value in choices:
        return
    names = [choice for choice in choices if isinstance(choice, str)]
    spelled = re.sub(r"^(b?)fp?(16|32)$", r"\1float\2", str(value).lower())  # such as bf16
    near = difflib.get_close_matches(spelled, names, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"{owner}: {name} must be one of {', '.join(map(str, choices))}; got {value!r}.{hint}"
    )


# -- formats ---------------------------------------------------------------------------------

_SIMULATED = re.compile(r"E(\d+)M(\d+)")

# Short names of formats, in addition to the names that NumPy and ml_dtypes know.
_ALIASES = {
    "e8m0": "float8_e8m0fnu",
    "e2m3": "float6_e2m3fn",
    "e3m2": "float6_e3m2fn",
    "e2m1": "float4_e2m1fn",
}
for _name in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e4m3b11fnuz", "e4m3", "e3m4"):
    _ALIASES[_name] = f"float8_{_name}"


@dataclasses.dataclass(frozen=True)
class Format:
    """A floating-point element type and its limits.

    Attributes:
        name: canonical name, such as ``"float8_e4m3fn"`` or ``"E4M3"`` (simulated).
        dtype: JAX dtype that stores it; None for simulated formats and FP6, whose values are kept
            in a wider dtype.
        exponent_bits: width of the exponent field.
        mantissa_bits: number of explicit mantissa bits m; rounding errors are at most 2**-(m + 1).
        max: largest finite value.
        smallest_normal: smallest positive normal value.
        smallest_subnormal: smallest positive value.
        has_inf: whether the format has infinity.
        has_nan: whether the format has NaN.
        signed: whether the format has negative values.

    Example:
        >>> fmt = format_of("float16")
        >>> fmt.max, fmt.eps, fmt.min_exponent
        (65504.0, 0.0009765625, -14)
    """

    name: str
    dtype: np.dtype | None
    exponent_bits: int
    mantissa_bits: int
    max: float
    smallest_normal: float
    smallest_subnormal: float
    has_inf: bool = True
    has_nan: bool = True
    signed: bool = True

    @property
    def simulated(self) -> bool:
        """Return whether values of this format are stored in a wider dtype."""
        return self.dtype is None

    @property
    def eps(self) -> float:
        """Distance from 1 to the next larger value, ``2**-mantissa_bits``."""
        return 2.0**-self.mantissa_bits

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal value."""
        return int(np.log2(self.smallest_normal))


@functools.cache
def _real_format(dtype: np.dtype) -> Format:
    info = ml_dtypes.finfo(dtype)
    with np.errstate(all="ignore"):
        infinity, nan = np.array([np.inf, np.nan]).astype(dtype).astype(np.float32)
    return Format(
        name=dtype.name,
        dtype=None if dtype.name.startswith("float6_") else dtype,
        exponent_bits=int(info.nexp),
        mantissa_bits=int(info.nmant),
        max=float(info.max),
        smallest_normal=float(info.smallest_normal),
        smallest_subnormal=float(info.smallest_subnormal),
        has_inf=bool(np.isinf(infinity)),
        has_nan=bool(np.isnan(nan)),
        signed=float(info.min) < 0,
    )


def _simulated_format(exponent_bits: int, mantissa_bits: int) -> Format:
    if not (2 <= exponent_bits <= 8 and 0 <= mantissa_bits <= 23):
        raise ValueError(
            "unitscale.core.format_of: a simulated format E<e>M<m> needs 2 <= e <= 8 and "
            f"0 <= m <= 23, so that float32 holds its values; got E{exponent_bits}M{mantissa_bits}"
        )
    bias = 2 ** (exponent_bits - 1) - 1
    return Format(
        name=f"E{exponent_bits}M{mantissa_bits}",
        dtype=None,
        exponent_bits=exponent_bits,
        mantissa_bits=mantissa_bits,
        max=2.0**bias * (2.0 - 2.0**-mantissa_bits),
        smallest_normal=2.0 ** (1 - bias),
        smallest_subnormal=2.0 ** (1 - bias - mantissa_bits),
    )


def format_of(dtype: Any) -> Format:
    """Return the limits of a floating-point format.

    Args:
        dtype: a Format, a floating dtype, its name, a short name (``"e4m3fn"``, ``"e5m2"``,
            ``"e8m0"``, ``"e2m1"``, ...), or ``"E<e>M<m>"`` in capitals for a simulated IEEE-style
            format with e exponent and m mantissa bits, whose values are stored in a wider dtype.

    Raises:
        ValueError: if the name does not belong to a floating-point format.

    Example:
        >>> format_of("e4m3fn").max
        448.0
        >>> format_of("E4M3").max  # simulated; one exponent is reserved for infinity
        240.0
    """
    if isinstance(dtype, Format):
        return dtype
    found = dtype
    if isinstance(dtype, str):
        if match := _SIMULATED.fullmatch(dtype):
            return _simulated_format(int(match[1]), int(match[2]))
        name = _ALIASES.get(dtype, dtype)
        found = getattr(ml_dtypes, name, name)
    try:
        found = None if found is None else np.dtype(found)
    except (TypeError, ValueError, SyntaxError):
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating) or found.itemsize > 8:
        raise ValueError(
            f"unitscale.core.format_of: expected a floating-point format; got {dtype}. Use a "
            "float dtype such as 'float16', 'bfloat16' or 'float8_e4m3fn', one of "
            f"{', '.join(sorted(_ALIASES))}, or 'E<e>M<m>' for a simulated one."
        )
    return _real_format(found)


def storage_of(argument: str, dtype: Any) -> Format:
    """Return a format in which arrays can be stored or sent; raise for any other.

    ``argument`` is the function and its argument, such as ``"optim.scaled: weights"``.
    """
    fmt = format_of(dtype)
    packed = fmt.name.startswith("float4")
    if fmt.dtype is None or fmt.dtype.itemsize > 4 or not fmt.signed or packed:
        raise ValueError(
            f"unitscale.{argument} must be a float8, float16, bfloat16 or float32 format; got "
            f"{fmt.name}"
        )
    return fmt


def gradients_format(where: str, dtype: Any) -> Any:
    """Return the dtype that gradients are stored in, or None for float32."""
    fmt = format_of("float32" if dtype is None else dtype)
    if fmt.name in ("float32", "bfloat16") or is_float8(fmt.dtype):
        return None if fmt.name == "float32" else fmt.dtype
    raise ValueError(
        f"unitscale.{where}: gradients_dtype must be float32, bfloat16, float8_e4m3fn or "
        f"float8_e5m2; got {fmt.name}. Gradients do not fit into the range of other formats."
    )


# Whether `narrow_gradients` is active; part of JAX's cache keys, so that traces are not reused.
_NARROW: Any = jax.make_user_context(None)


def narrow_gradients(dtype: Any) -> Any:
    """Return a context in which FP8 matmuls write gradients of weights in bfloat16."""
    return _NARROW(None if dtype is None else True)


def weight_gradient_dtype(dtype: Any) -> Any:
    """Return the dtype in which an FP8 matmul writes the gradient of a weight of ``dtype``."""
    return jnp.dtype(jnp.bfloat16) if _NARROW.value and dtype == jnp.float32 else dtype


def is_floating(x: Any) -> bool:
    """Return whether ``x`` has a floating dtype."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def wide_dtype(dtype: Any) -> np.dtype:
    """Return the dtype to compute in: float32, or float64 for float64."""
    return np.dtype(np.float64 if np.dtype(dtype) == np.float64 else np.float32)


def widen(x: jax.Array) -> jax.Array:
    """Convert an array to the dtype to compute in: float32, or float64 for float64."""
    return lax.convert_element_type(x, wide_dtype(x.dtype))


# -- powers of two ---------------------------------------------------------------------------

_BIAS, _MANTISSA_BITS = 127, 23  # of float32
_INFINITY, _TOP = 0x7F800000, (127 + _BIAS) << _MANTISSA_BITS  # bits of infinity and of 2**127


def _bits(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return sign and magnitude bits of float32 or float64 numbers."""
    bits = lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    magnitude = bits & np.array(np.iinfo(bits.dtype).max >> 1, bits.dtype)
    return bits ^ magnitude, magnitude


@partial(jax.jit, static_argnames="rounding", inline=True)
def round_to_pow2(x: jax.Array, rounding: Rounding = "nearest") -> jax.Array:
    """Round the magnitude of every element to a power of two, keeping its sign.

    Subnormal numbers round to subnormal powers of two. Zero, infinity and NaN are unchanged.
    Results are at most 2**127.

    Args:
        x: floating array of any shape.
        rounding: "nearest" (ties go up), "up" or "down" (in magnitude).

    Returns:
        float32 array of the same shape.

    Example:
        >>> print(round_to_pow2(jnp.array([0.7, 1.4, 1.5, -5.0, 0.0])))
        [ 0.5  1.   2.  -4.   0. ]
    """
    check_choice("unitscale.core.round_to_pow2", "rounding", rounding, Rounding)
    sign, magnitude = _bits(jnp.asarray(x).astype(jnp.float32))
    # ``unit`` is the leading bit: explicit in a subnormal number, implicit in a normal one. The
    # bits below it are rounded away.
    leading = 31 - lax.clz(jnp.maximum(magnitude, 1))
    unit = jnp.uint32(1) << jnp.minimum(leading, _MANTISSA_BITS)
    carry = {"nearest": unit >> 1, "up": unit - 1, "down": jnp.uint32(0)}[rounding]
    rounded = jnp.minimum((magnitude + carry) & ~(unit - 1), _TOP)
    rounded = jnp.where(magnitude >= _INFINITY, magnitude, rounded)
    return lax.bitcast_convert_type(sign | rounded, jnp.float32)


@partial(jax.jit, inline=True)
def exponent_of(x: jax.Array) -> jax.Array:
    """Return exact floor(log2(abs(x))) as int32; -150 for zero, 128 for infinity and NaN."""
    _, magnitude = _bits(jnp.asarray(x).astype(jnp.float32))
    exponent = (magnitude >> _MANTISSA_BITS).astype(jnp.int32) - _BIAS
    leading = 31 - lax.clz(magnitude).astype(jnp.int32)
    return jnp.where(exponent > -_BIAS, exponent, leading - 149)


@partial(jax.jit, inline=True)
def pow2(exponent: jax.Array) -> jax.Array:
    """Return exact 2**exponent as float32; zero below -149, infinity above 127."""
    exponent = jnp.asarray(exponent, jnp.int32)
    normal = jnp.clip(exponent + _BIAS, 1, 255) << _MANTISSA_BITS
    subnormal = jnp.where(exponent < -149, 0, 1 << jnp.clip(exponent + 149, 0, _MANTISSA_BITS))
    return lax.bitcast_convert_type(jnp.where(exponent >= -126, normal, subnormal), jnp.float32)


def normal_pow2(exponent: jax.Array) -> jax.Array:
    """Return 2**exponent as float32 for integers from -126 to 127 (unchecked).

    It takes only two operations, so XLA recomputes the result instead of storing it.
    """
    bits = (jnp.asarray(exponent, jnp.int32) + _BIAS) << _MANTISSA_BITS
    return lax.bitcast_convert_type(bits, jnp.float32)


def static_pow2(x: float) -> float:
    """Return the power of two nearest to a positive Python number, by the difference of log2."""
    return 2.0 ** round(math.log2(x))


def static_pow2_sqrt(n: int) -> float:
    """Return the power of two nearest to sqrt(n), by the difference of log2; 1 for n = 0.

    The scale of a sum of n independent terms of unit variance (Scalify, Balanca et al., 2024, arXiv
    2407.17353).
    """
    return static_pow2(math.sqrt(n)) if n > 0 else 1.0


# -- FP8 -------------------------------------------------------------------------------------


def is_float8(dtype: Any) -> bool:
    """Return whether a format is float8_e4m3fn or float8_e5m2, the FP8 formats of matmuls."""
    return dtype is not None and jnp.dtype(dtype).name in ("float8_e4m3fn", "float8_e5m2")


def _to_float8(x: jax.Array, fmt: Format) -> jax.Array:
    """Round to the nearest FP8 number (ties to even), with saturation, as `_convert` does.

    On CPUs, integer operations on the bits of float32 take half the time of XLA's conversion to FP8
    (jax 0.10.2).
    """
    if jax.default_backend() != "cpu":
        return _convert(x, fmt)
    as_float = partial(lax.bitcast_convert_type, new_dtype=jnp.float32)
    as_bits = partial(lax.bitcast_convert_type, new_dtype=jnp.uint32)
    smallest = np.float32(fmt.smallest_normal).view(np.uint32)
    dropped = _MANTISSA_BITS - fmt.mantissa_bits
    sign, magnitude = _bits(x.astype(jnp.float32))
    finite = lax.min(magnitude, lax.full_like(magnitude, np.float32(fmt.max).view(np.uint32)))
    power = lax.max(finite & _INFINITY, lax.full_like(magnitude, smallest))
    # The last mantissa bit of this sum is one step of the format, so its mantissa counts steps.
    steps = as_bits(as_float(finite) + as_float(power + (dropped << _MANTISSA_BITS)))
    code = steps + (power >> dropped) - (smallest >> dropped)
    not_finite = lax.full_like(code, 0x7F)  # NaN of both formats
    if fmt.has_inf:
        not_finite = lax.select(magnitude == _INFINITY, lax.full_like(code, 0x7C), not_finite)
    code = lax.select(magnitude < _INFINITY, code, not_finite) | (sign >> 24)
    return lax.bitcast_convert_type(code.astype(jnp.uint8), jnp.dtype(fmt.name))


# -- random and dithered rounding --------------------------------------------------------------

# 2^32 over the golden ratio, an odd number: multiples of neighboring indices differ in many bits.
_SPREAD = 0x9E3779B9


def rounding_noise(key: Any, shape: tuple[int, ...]) -> jax.Array:
    """Return 32 random bits for each entry: a hash of its index and of two words from the key.

    ``key`` is a `jax.random` key, or a tuple of the two words as uint32 scalars.

    On a GPU, `jax.random` would take longer than the rest of an optimizer step, with about a
    hundred integer operations per word. The hash is `lowbias32`, with the second word mixed in
    between its two rounds. It is good enough for rounding, but not for sampling.

    References:
        Wellons, "Prospecting for Hash Functions", 2018, nullprogram.com/blog/2018/07/31
        (lowbias32).
    """
    first, second = key if isinstance(key, tuple) else jax.random.bits(key, (2,), jnp.uint32)
    x = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        stride = jnp.uint32(math.prod(shape[axis + 1 :]) * _SPREAD % 2**32)
        x += lax.broadcasted_iota(jnp.uint32, shape, axis) * stride
    x += first
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D) ^ second
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _carried(bits: jax.Array, noise: jax.Array, dropped: int) -> jax.Array:
    """Add noise to the last ``dropped`` bits, with carry into the others; then clear them."""
    size = 8 * bits.dtype.itemsize
    noise = noise.astype(bits.dtype) << (size - 32) if size > 32 else noise
    return ((bits + (noise >> (size - dropped))) >> dropped) << dropped


def dithered(x: jax.Array, target: int | Format) -> jax.Array:
    """Round to fewer mantissa bits with pseudo-random noise, without bias over many numbers.

    Use it where rounding to nearest would bias sums over many numbers. It needs no key: the noise
    is a hash of the number's own bits. A later cast to the format does not change the result (in
    the normal range, if ``target`` is a number of bits).

    Args:
        x: floating array.
        target: number of explicit mantissa bits to keep, or a format, whose subnormal numbers are
            then respected too.

    Returns:
        float32 array. Infinity and NaN are unchanged. If ``target`` is a number of bits, so are
        zero, subnormal numbers of float32, and magnitudes of 2^127 and above.

    Example:
        >>> print(dithered(jnp.array([1.3, 1.31, 1.32, 1.33]), 2))
        [1.25 1.5  1.25 1.25]
    """
    return _dithered(x.astype(jnp.float32), target)


@partial(jax.jit, static_argnums=1)  # `unitscale.analysis` recognizes rounding by this name
def _dithered(x: jax.Array, target: int | Format) -> jax.Array:
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    noise = bits * jnp.uint32(_SPREAD)
    if isinstance(target, Format):
        clamped = jnp.where(jnp.isfinite(x), _clamp(x, target), x)
        return _round_to_grid(clamped, target, noise)
    rounded = _carried(bits, noise, _MANTISSA_BITS - target)
    exponent = bits >> _MANTISSA_BITS & 0xFF
    is_normal = (exponent > 0) & (exponent < 0xFE)
    return jnp.where(is_normal, lax.bitcast_convert_type(rounded, jnp.float32), x)


# -- casts -----------------------------------------------------------------------------------


def _clamp(x: jax.Array, fmt: Format) -> jax.Array:
    """Clamp to the largest finite values of ``fmt``; NaN stays NaN, infinity saturates."""
    with np.errstate(over="ignore"):
        representable = float(np.float64(fmt.max).astype(x.dtype)) == fmt.max
    x = x if representable else widen(x)
    high = jnp.asarray(min(fmt.max, format_of(x.dtype).max), x.dtype)
    if fmt.min_exponent > -126:
        return jnp.clip(x, -high, high)
    # XLA may flush subnormal numbers of float32 in a clip.
    return jnp.where(jnp.abs(x) > high, jnp.where(x > 0, high, -high), x)


def _saturate(x: jax.Array, fmt: Format, is_infinite: jax.Array) -> jax.Array:
    """Clamp finite values; infinity stays infinity, or becomes NaN in a format without it.

    Where possible, infinity is handled before the clamp, so that XLA sees a clamp followed by a
    convert.
    """
    if fmt.has_inf:
        clamped = _clamp(x, fmt)
        return jnp.where(is_infinite, x.astype(clamped.dtype), clamped)
    if fmt.has_nan or fmt.simulated:
        x = jnp.where(is_infinite, jnp.nan, x)
    return _clamp(x, fmt)


def _round_to_grid(x: jax.Array, fmt: Format, noise: jax.Array | None) -> jax.Array:
    """Round to the mantissa bits and subnormal steps of ``fmt``, in the wide dtype.

    ``noise`` (32 random bits per value) makes the rounding stochastic; None rounds to nearest, ties
    to even. The result may exceed the largest value of ``fmt``.
    """
    x = widen(x)
    info = jnp.finfo(x.dtype)
    dropped = info.nmant - fmt.mantissa_bits
    if dropped <= 0:
        return x
    sign, magnitude = _bits(x)
    if noise is None:
        below_half = (1 << (dropped - 1)) - 1
        rounded = ((magnitude + below_half + (magnitude >> dropped & 1)) >> dropped) << dropped
    else:
        rounded = _carried(magnitude, noise, dropped)
    if fmt.min_exponent > info.minexp:
        steps = jnp.abs(x) * (1 / fmt.smallest_subnormal)
        if noise is None:
            steps = jnp.round(steps)
        else:
            # Compare instead of adding noise to ``steps``: that sum would be rounded, and change
            # values on the grid. ``uniform`` is an odd multiple of 2**-24 below 1, with mean 1/2.
            uniform = ((noise >> 9).astype(jnp.float32) + 0.5) * 2.0**-23
            below = jnp.floor(steps)
            steps = below + (uniform < steps - below).astype(x.dtype)
        _, subnormal = _bits(steps * fmt.smallest_subnormal)
        smallest = np.array(fmt.smallest_normal, x.dtype).view(magnitude.dtype)
        rounded = jnp.where(magnitude < smallest, subnormal, rounded)
    return jnp.where(jnp.isfinite(x), lax.bitcast_convert_type(sign | rounded, x.dtype), x)


def _to_e8m0(x: jax.Array, noise: jax.Array | None, saturate: bool) -> jax.Array:
    """Round to e8m0 with integer operations, because 2**-127 is subnormal in float32.

    Ties go up, as in ml_dtypes. Zero and negative numbers become 2**-127 if ``saturate``, else NaN.
    Infinity becomes NaN.
    """
    sign, magnitude = _bits(x.astype(jnp.float32))
    half = jnp.uint32(1 << 22)
    code = (magnitude + (half if noise is None else noise >> 9)) >> _MANTISSA_BITS
    # Codes 0 and 1 are 2**-127 and 2**-126; numbers between them are subnormal in float32.
    code = jnp.where(magnitude < (1 << 23), (magnitude >= 3 * (1 << 21)).astype(jnp.uint32), code)
    not_positive = (sign != 0) | (magnitude == 0)
    code = jnp.where(not_positive, 0 if saturate else 255, jnp.minimum(code, 254 + (not saturate)))
    code = jnp.where(jnp.isfinite(x), code, 255)
    return lax.bitcast_convert_type(code.astype(jnp.uint8), jnp.float8_e8m0fnu)


def _within(fmt: Format, dtype: Any) -> Format:
    """Return ``fmt`` with its largest value limited to the range of ``dtype``."""
    own = format_of(dtype)
    bits = min(fmt.mantissa_bits, own.mantissa_bits) + 1
    fraction, exponent = math.frexp(min(fmt.max, own.max))
    largest = math.ldexp(math.floor(math.ldexp(fraction, bits)), exponent - bits)
    return dataclasses.replace(fmt, max=largest)


def _convert(x: jax.Array, fmt: Format) -> jax.Array:
    """Clamp, and convert with XLA."""
    if fmt.has_nan and not fmt.has_inf:
        # x + 0 * x turns infinity into NaN. It is computed in the wide dtype, like neighboring
        # operations, so that XLA fuses them without conversions.
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
    # XLA converts float64 to 16 bits through float32, which rounds twice.
    twice = x.dtype == jnp.float64 and fmt.dtype is not None and fmt.dtype.itemsize == 2
    if not (fmt.simulated or stochastic or twice):
        if not saturate:
            return x.astype(fmt.dtype)
        if is_float8(fmt.dtype) and wide_dtype(x.dtype) == jnp.float32:
            return _to_float8(x, fmt)
        return _convert(x, fmt)
    y = _round_to_grid(x, fmt, noise)
    if fmt.simulated:
        fmt = _within(fmt, x.dtype)
    if saturate or not fmt.has_nan:
        # Test x, because rounding may have made y infinite.
        y = _saturate(y, fmt, jnp.isinf(x))
    elif fmt.simulated:
        y = jnp.where(jnp.abs(y) > fmt.max, jnp.where(y > 0, jnp.inf, -jnp.inf), y)
    return y.astype(x.dtype if fmt.simulated else fmt.dtype)


@partial(custom_vjp, nondiff_argnums=(2, 3, 4))
def _cast(x, key, fmt, stochastic, saturate):
    return _cast_array(x, key, fmt, stochastic, saturate)


_cast.defvjp(
    lambda x, *args: (_cast_array(x, *args), jnp.zeros((0,), x.dtype)),
    lambda fmt, stochastic, saturate, like, cotangent: (narrow(cotangent, like.dtype), None),
)


def cast(
    x: Any,
    dtype: Any,
    rounding: CastRounding = "nearest",
    key: jax.Array | None = None,
    saturate: bool = True,
) -> Any:
    """Cast to a floating-point format, saturating at its largest finite value.

    Scaling:
        A ScaledArray keeps its scale. The gradient is straight-through: the cotangent is cast to
        the dtype of ``x``, even where values saturate. A result in e8m0 has no gradient.

    Args:
        x: floating array or ScaledArray of any shape.
        dtype: a float dtype, a name that `format_of` knows, or a simulated ``"E<e>M<m>"``. Values
            of simulated and FP6 formats stay in the dtype of ``x``.
        rounding: "nearest" (ties to even) or "stochastic" (unbiased, with 23 random bits).
        key: `jax.random` key, required for stochastic rounding.
        saturate: whether to clamp finite values to the format's largest. Infinity stays infinity,
            or becomes NaN in a format without it (e4m3fn, e8m0), or the largest value in
            float4_e2m1fn, which has neither. If False, overflow behaves as in ``astype``.

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
    check_choice("unitscale.cast", "rounding", rounding, CastRounding)
    fmt = format_of(dtype)
    if hasattr(x, "map_data"):
        return x.map_data(lambda data: cast(data, fmt, rounding, key, saturate))
    x = jnp.asarray(x)
    if not is_floating(x):
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
    """Round to a dtype; finite values saturate in types of at most 8 bits."""
    dtype = jnp.dtype(dtype)
    if x.dtype == dtype:
        return x
    return _cast_array(x, None, format_of(dtype), False, dtype.itemsize == 1)


def upcast(x: Any, dtype: Any) -> Any:
    """Convert an array or ScaledArray to a wider dtype; 8-bit cotangents saturate."""
    return cast(x, dtype) if x.dtype.itemsize == 1 else x.astype(dtype)


def materialize(x: jax.Array) -> jax.Array:
    """Force XLA to store an array in its dtype.

    Otherwise XLA may remove a conversion to a narrow format and back, and store a wider array.
    """
    return lax.optimization_barrier(x)
