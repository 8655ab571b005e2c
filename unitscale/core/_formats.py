"""Floating-point element formats and their facts.

Every limit that the library clamps to or rounds with (largest value, smallest normal, smallest
subnormal, epsilon) is read from here, so that no number such as 448 stands anywhere else.
"""

import dataclasses
import functools
import re
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

_SIMULATED = re.compile(r"E(\d+)M(\d+)", re.IGNORECASE)

# Names that users write, beside every name that NumPy or ml_dtypes knows.
_ALIASES = {
    "e4m3fn": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    "e4m3fnuz": "float8_e4m3fnuz",
    "e5m2fnuz": "float8_e5m2fnuz",
    "e4m3b11fnuz": "float8_e4m3b11fnuz",
    "e4m3": "float8_e4m3",
    "e3m4": "float8_e3m4",
    "e8m0": "float8_e8m0fnu",
    "e2m3": "float6_e2m3fn",
    "e3m2": "float6_e3m2fn",
    "e2m1": "float4_e2m1fn",
    "half": "float16",
}


@dataclasses.dataclass(frozen=True)
class Format:
    """A floating-point element type and its facts.

    Attributes:
        name: canonical name, such as ``"float8_e4m3fn"`` or ``"E4M3"`` (simulated).
        dtype: JAX dtype that stores it; None for a simulated format, whose values are kept in a
            wider type (the FP6 types too, which XLA has no arrays of).
        exponent_bits: width of the exponent field.
        mantissa_bits: explicit mantissa bits (the rounding error is at most ``2**-(m + 1)``).
        max: largest finite value.
        smallest_normal: smallest positive normal value.
        smallest_subnormal: smallest positive value.
        has_inf: whether infinity is encoded.
        has_nan: whether NaN is encoded.
        signed: whether negative values are encoded.

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
    has_inf: bool
    has_nan: bool
    signed: bool

    @property
    def simulated(self) -> bool:
        """Whether values of this format are kept in a wider type."""
        return self.dtype is None

    @property
    def eps(self) -> float:
        """Distance from 1 to the next larger value, ``2**-mantissa_bits``."""
        return 2.0**-self.mantissa_bits

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal value."""
        return int(np.log2(self.smallest_normal))


def _encodes(dtype: np.dtype, value: float, test) -> bool:
    with np.errstate(all="ignore"):
        try:
            return bool(test(np.asarray(value).astype(dtype).astype(np.float32)))
        except ValueError:
            return False


@functools.cache
def _real_format(dtype: np.dtype) -> Format:
    info = ml_dtypes.finfo(dtype)
    normal = float(info.smallest_normal)
    subnormal = float(info.smallest_subnormal)
    exponent_bits = int(info.nexp)
    return Format(
        name=dtype.name,
        dtype=None if dtype.name.startswith("float6_") else dtype,
        exponent_bits=exponent_bits,
        mantissa_bits=int(info.nmant),
        max=float(info.max),
        smallest_normal=normal,
        smallest_subnormal=subnormal,
        has_inf=_encodes(dtype, np.inf, np.isinf),
        has_nan=_encodes(dtype, np.nan, np.isnan),
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
        has_inf=True,
        has_nan=True,
        signed=True,
    )


def format_of(dtype: Any) -> Format:
    """Returns the facts of a floating-point format.

    Args:
        dtype: a Format, a floating dtype, its name, a short name (``"e4m3fn"``, ``"e5m2"``,
            ``"e8m0"``, ``"e2m1"``, ...), or ``"E<e>M<m>"`` in capitals for a simulated IEEE-style
            format with e exponent and m mantissa bits, whose values live in a wider type.

    Returns:
        The Format.

    Raises:
        ValueError: if the name is not that of a floating-point format.

    Example:
        >>> format_of("e4m3fn").max
        448.0
        >>> format_of("E4M3").max  # simulated, with an exponent kept for infinity
        240.0
    """
    if isinstance(dtype, Format):
        return dtype
    if dtype is None:
        raise ValueError("unitscale.core.format_of: expected a floating-point format; got None")
    if isinstance(dtype, str):
        if dtype[:1] == "E" and (match := _SIMULATED.fullmatch(dtype)):
            return _simulated_format(int(match[1]), int(match[2]))
        dtype = _ALIASES.get(dtype, dtype)
    try:
        dtype = np.dtype(getattr(ml_dtypes, dtype, dtype) if isinstance(dtype, str) else dtype)
    except TypeError:
        raise ValueError(
            f"unitscale.core.format_of: {dtype!r} is not a floating-point format; use a float "
            "dtype such as 'float16', 'bfloat16' or 'float8_e4m3fn', one of "
            f"{sorted(_ALIASES)}, or 'E<e>M<m>' for a simulated one"
        ) from None
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"unitscale.core.format_of: expected a floating-point format; got {dtype.name}"
        )
    return _real_format(dtype)


def wide_dtype(dtype: Any) -> np.dtype:
    """Returns the dtype that values are computed in: float32, or float64 for float64."""
    return np.dtype(np.float64 if np.dtype(dtype) == np.float64 else np.float32)
