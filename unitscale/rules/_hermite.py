"""How a function of normal inputs turns the correlation of its inputs into that of its outputs.

In the Hermite expansion `f(x) = sum a_k He_k(x) / sqrt(k!)` the terms of correlated normal inputs
meet only their equals: `E[f(x) f(y)] = sum a_k^2 rho^k` (Mehler's formula).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ._compile_time import compile_time
from ._elementwise import quadrature

_TERMS = 24


@functools.lru_cache(maxsize=256)
def correlation_kernel(f: Callable[..., Any], mult: float = 1.0) -> np.ndarray:
    """Return coefficients c of `E[f(mult * x) f(mult * y)] / Var f = sum c_k rho^k`.

    Args:
        f: Function from a scalar to a scalar that `jax` can trace.
        mult: Multiplier of the input.

    Returns:
        Coefficients of the powers 0 to 24 of the correlation rho of x and y. The first is the
        square of the mean; the last holds the power of all further terms too, so that the sum is
        exact at rho = 1.
    """
    nodes, weights = quadrature()
    with compile_time():
        y = np.asarray(jax.vmap(f)(np.asarray(mult * nodes, np.float32)), np.float64)
    coefficients = []
    before, term = np.zeros_like(nodes), np.ones_like(nodes)
    for k in range(_TERMS):
        coefficients.append(float(weights @ (y * term)) ** 2)
        # He_k / sqrt(k!), by its recurrence.
        before, term = term, (nodes * term - np.sqrt(k) * before) / np.sqrt(k + 1)
    power = float(weights @ y**2)
    coefficients.append(max(power - sum(coefficients), 0.0))
    return np.asarray(coefficients) / (power - coefficients[0])
