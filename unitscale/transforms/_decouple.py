"""Compute functions of float16 data in float16 where that is safe (``decouple=True``).

An experiment. `scalify` computes functions in float32, whatever type stores their data. Here scale
and largest entry decide at run time whether float16 gives the same result up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..core import round_to_pow2
from ._values import Scale, Value, scale_of, wide_value, widen

_LARGEST = float(np.finfo(np.float16).max)
_TINY = float(np.finfo(np.float16).tiny)
_LOG = float(np.log(16.0))
# For each function, the conditions for float16: maximum amax of the value, minimum scale, minimum
# amax. At powers of two of 1 or more, data * scale is exact; at smaller ones small entries lose
# bits, which matters unless the function is flat at 0. Functions that XLA builds from others (exp2,
# log1p, pow, tan) are not safe.
_SAFE: dict[str, tuple[float, float, float]] = {
    "exp": (_LOG, _TINY, 0.0),
    "cosh": (_LOG, _TINY, 0.0),
    "cos": (_LARGEST, _TINY, 0.0),
    "erfc": (2.0, _TINY, 0.0),
    "log": (_LARGEST, 1.0, 0.0),
    "log2": (_LARGEST, 1.0, 0.0),
    "sinh": (_LOG, 1.0, 1 / 16),
    "tanh": (_LARGEST, 1.0, 1 / 16),
    "erf": (_LARGEST, 1.0, 1 / 16),
    "sin": (_LARGEST, 1.0, 1 / 16),
    "atan": (_LARGEST, 1.0, 1 / 16),
    "sqrt": (256.0, 1.0, 1 / 16),
}


def can_decouple(primitive: str, operands: Sequence[Value]) -> bool:
    """Return whether a function is in the table and its operand is float16 data with one scale."""
    x = operands[0]
    is_half = x.scale is not None and jnp.result_type(x.data) == np.float16
    return primitive in _SAFE and is_half and not scale_of(x).ndim and jnp.size(x.data) > 0


def decoupled(primitive: str, x: Value, apply: Callable[[Any], Any]) -> Value:
    """Compute a function of float16 data in float16 where that is safe, else in float32."""
    largest, smallest_scale, smallest = _SAFE[primitive]
    scale = jnp.asarray(scale_of(x).factor())
    most = widen(jnp.max(jnp.abs(lax.stop_gradient(x.data)))) * scale
    # A larger scale would be infinite in float16, and infinity times 0 is NaN.
    safe = (scale >= smallest_scale) & (scale <= 2.0**15) & (most <= largest) & (most >= smallest)
    safe &= round_to_pow2(scale) == scale

    def in_float16() -> tuple[Any, Any]:
        # The new scale is 1, computed from `safe` so that both branches shard it alike.
        return apply(x.data * scale.astype(np.float16)), safe.astype(np.float32)

    def in_float32() -> tuple[Any, Any]:
        value = wide_value(apply(x.wide()), np.float16).measured()
        return value.data, scale_of(value).factor()

    data, unit = lax.cond(safe, in_float16, in_float32)
    return Value(data, Scale(0, unit), x.dtype)
