"""Scales read from the data at run time."""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp
from jax import lax

from ..core import amax, rms, round_to_pow2, safe_scale

Statistic = Literal["rms", "amax"]


def unit_of(data: Any, statistic: Statistic = "rms") -> Any:
    """Returns the power of two nearest the RMS (or largest magnitude) of the finite elements.

    1 for data without finite elements other than zero. Not differentiated.

    Example:
        >>> print(unit_of(jnp.array([3e5, jnp.inf])))
        262144.0
    """
    data = lax.stop_gradient(data)
    finite = jnp.where(jnp.isfinite(data), data, 0)
    size = rms(finite) if statistic == "rms" else amax(finite)
    return safe_scale(round_to_pow2(size).astype(jnp.float32))
