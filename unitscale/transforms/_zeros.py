"""Arrays that happen to be zero: their scale says nothing, and must not decide where a sum meets.

A moment that starts at zero with a scale of 1 would take what is added to it, 1e-12 perhaps, to
that scale, which float16 cannot hold. So zeros are given a scale far below their own while a
program runs; what leaves it has a scale of 1 again, at which data can be differentiated.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

# How far below; a scale of 1 becomes the smallest that is chosen for float16 at run time.
BELOW = 2.0**-100
_SMALLEST = np.float32(2.0**-126)


def matters(dtype: Any) -> bool:
    """Whether a type has so little range that the scale of zeros matters."""
    return np.dtype(dtype) == np.float16


def scale_inside(data: Any, scale: Any) -> Any:
    """Returns the scale of an argument while the program runs: smaller where all data is zero."""
    below = lax.max(scale * np.float32(BELOW), lax.full_like(scale, _SMALLEST))
    return lax.select(_zero(data, scale), below, scale)


def scale_outside(data: Any, scale: Any) -> Any:
    """Returns the scale of a result: 1 where all data is zero."""
    return lax.select(_zero(data, scale), lax.full_like(scale, 1), scale)


def _zero(data: Any, scale: Any) -> Any:
    """For every entry of a scale, whether all that it multiplies is zero."""
    rank, shape = jnp.ndim(data), jnp.shape(scale)
    shared = tuple(i for i in range(rank) if not shape or shape[i] == 1)
    return jnp.all(lax.stop_gradient(data) == 0, axis=shared, keepdims=bool(shape))
