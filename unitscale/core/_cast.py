"""Saturating and stochastic casts between floating-point formats.

``astype`` never saturates: float32 above 464 becomes NaN in float8_e4m3fn, and float8_e5m2
becomes infinite from 61440. Every quantization in the library goes through `cast`.
"""

from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from ._formats import Format, format_of, wide_dtype
from ._pow2 import exponent_of, pow2
from ._vjp import custom_vjp

CastRounding = Literal["nearest", "stochastic"]
"""How a cast rounds: to the nearest value (ties to even), or up or down at random, unbiased."""


def _clamp(x: jax.Array, fmt: Format) -> jax.Array:
    """Clamps to the largest finite values of ``fmt``; NaN stays NaN, infinity saturates."""
    own = format_of(x.dtype)
    bound = min(fmt.max, own.max)
    low = -bound if fmt.signed else fmt.smallest_subnormal
    return jnp.clip(x, jnp.asarray(low, x.dtype), jnp.asarray(bound, x.dtype))


def _round_to_grid(x: jax.Array, fmt: Format, noise: jax.Array | None) -> jax.Array:
    """Rounds float32 values to the grid of ``fmt``, subnormal numbers of ``fmt`` included.

    ``noise`` in [0, 1) makes the rounding stochastic; None rounds to nearest, ties to even.
    """
    exponent = jnp.maximum(exponent_of(x), fmt.min_exponent) - fmt.mantissa_bits
    # Two exact multiplications, so that neither power of two leaves the normal range of float32.
    half = exponent // 2
    steps = x * pow2(-half) * pow2(half - exponent)
    rounded = jnp.round(steps) if noise is None else jnp.floor(steps + noise)
    # Above 2**23 steps every float32 is a whole number already, and so are inf and NaN.
    rounded = jnp.where(jnp.abs(steps) < 2.0**23, rounded, steps)
    result = rounded * pow2(half) * pow2(exponent - half)
    return jnp.where(jnp.isfinite(x), result, x)


def _noise(x: jax.Array, key: jax.Array | None) -> jax.Array:
    if key is None:
        raise ValueError(
            'unitscale.cast: rounding="stochastic" needs key=, a jax.random key; got None'
        )
    # 23 random bits: the widest noise that float32 adds to a step count without rounding.
    bits = jax.random.bits(key, x.shape, jnp.uint32) >> 9
    return bits.astype(jnp.float32) * 2.0**-23


def _cast_array(x, key, fmt, stochastic, saturate):
    noise = _noise(x, key) if stochastic else None
    if fmt.simulated or stochastic:
        dtype = x.dtype if fmt.simulated else fmt.dtype
        y = _round_to_grid(x.astype(jnp.float32), fmt, noise)
        if saturate:
            y = _clamp(y, fmt)
        elif fmt.simulated:
            y = jnp.where(jnp.abs(y) > fmt.max, jnp.sign(y) * jnp.inf, y)
        return y.astype(dtype)
    return (_clamp(x, fmt) if saturate else x).astype(fmt.dtype)


@partial(custom_vjp, nondiff_argnums=(2, 3, 4))
def _cast(x, key, fmt, stochastic, saturate):
    return _cast_array(x, key, fmt, stochastic, saturate)


def _cast_fwd(x, key, fmt, stochastic, saturate):
    return _cast_array(x, key, fmt, stochastic, saturate), jnp.zeros((0,), x.dtype)


def _cast_bwd(fmt, stochastic, saturate, like, cotangent):
    return cotangent.astype(like.dtype), None


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
        identity: the cotangent is cast to the dtype of ``x``, also where the forward saturated.

    Args:
        x: floating array or ScaledArray, any shape.
        dtype: a float dtype, a name that `format_of` knows, or a simulated ``"E<e>M<m>"``, whose
            values stay in the dtype of ``x``.
        rounding: "nearest" (ties to even) or "stochastic" (up with probability equal to the
            fraction, so that the expected value is ``x``; from float32, 23 random bits).
        key: `jax.random` key, needed for stochastic rounding.
        saturate: clamp to the largest finite value (infinity too, NaN stays NaN). If False,
            overflow does what the format does: infinity, or NaN where there is none.

    Returns:
        The same type and shape as ``x`` in the new format.

    Raises:
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
        _noise(x, None)
    return _cast(x, key if stochastic else None, fmt, stochastic, saturate)


def narrow(x: jax.Array, dtype: Any) -> jax.Array:
    """Returns ``x`` rounded to a dtype; 8-bit types and narrower, most without infinity, saturate.

    Example:
        >>> print(narrow(jnp.float32(1e6), jnp.float16), narrow(jnp.float32(1e6), "float8_e4m3fn"))
        inf 448
    """
    dtype = jnp.dtype(dtype)
    return _cast_array(x, None, format_of(dtype), False, dtype.itemsize == 1)


def widen(x: jax.Array) -> jax.Array:
    """Returns ``x`` in the dtype that its values are computed in (float32, or float64).

    Example:
        >>> widen(jnp.ones(2, jnp.float8_e4m3fn)).dtype.name
        'float32'
    """
    return lax.convert_element_type(x, wide_dtype(x.dtype))
