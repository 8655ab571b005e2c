"""Rounding of weights and moments into their formats."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ..core import CastRounding, Format, cast, encode_float8, format_of, is_float8


def round_finite(
    x: jax.Array, dtype: Any, rounding: CastRounding = "nearest", key: jax.Array | None = None
) -> jax.Array:
    """Rounds float32 and saturates; what is not finite becomes NaN, as it is to be seen.

    In fewer operations than a `cast` that saturates, which lets infinity be.
    """
    fmt = format_of(dtype)
    if rounding == "nearest" and is_float8(fmt.dtype):
        return encode_float8(x, fmt, partial(_round_by_cast, fmt=fmt), infinity=False)
    return _round_by_cast(x, fmt, rounding, key)


def _round_by_cast(
    x: jax.Array, fmt: Format, rounding: CastRounding = "nearest", key: jax.Array | None = None
) -> jax.Array:
    x = jnp.where(jnp.isinf(x), jnp.nan, x)
    if fmt.exponent_bits >= 8:
        return cast(x, fmt, rounding, key)
    return cast(jnp.clip(x, -fmt.max, fmt.max), fmt, rounding, key, saturate=False)
