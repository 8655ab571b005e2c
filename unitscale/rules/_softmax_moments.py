"""Moments of the softmax of normal logits, exact for every size and spread.

The usual estimate, `E[sum p^2] = e^(m^2) / (n + e^(m^2) - 1)`, replaces the normalizer by its mean.
It is right while `m` is near 1 and fails when few logits dominate (at n = 64 and m = 3 the true
value is a third of it). The normalizer can be removed exactly instead: with `Z = sum(e^z)`,
`Z^-k = int s^(k-1) e^(-s Z) ds / (k-1)!` turns a moment of independent normal logits into a
one-dimensional integral of products of one-logit expectations `H_k(u) = E[e^(k v - e^v)]`, `v = u +
m x`, `s = e^u`. The integrands are smooth and decay fast, so the trapezoid rule is accurate to near
machine precision.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

_STEP = 0.25
_WIDTH = 10.0
_LARGEST = 24.0
_EXACT_SIZES = 64
_SAMPLED_SIZES = 160


class SoftmaxMoments(NamedTuple):
    """Expected moments of `p = softmax(m * x)`, `x ~ N(0, 1)`.

    Args:
        square: `E[sum p^2]`, the mean square of a p-weighted mean of independent unit values.
        gradient: `E[sum p^2 - 2 p^3 + (sum p^2)^2]`, the summed mean square of the softmax's input
            gradient for a unit cotangent, before the multiplier.
    """

    square: float
    gradient: float


@functools.lru_cache(maxsize=4096)
def softmax_moments(size: int, spread: float) -> SoftmaxMoments:
    """Return the moments of the softmax of `size` normal logits.

    Args:
        size: Number of logits.
        spread: Standard deviation m of the logits.

    Returns:
        The moments. Above a spread of 24 they follow their first-order asymptote in `1 / m`, which
        is within a few percent.
    """
    square, gradient = moments_by_size(np.asarray([size]), spread)
    return SoftmaxMoments(float(square[0]), float(gradient[0]))


@functools.lru_cache(maxsize=4096)
def causal_softmax_moments(length: int, spread: float) -> SoftmaxMoments:
    """Return the moments averaged over rows of 1, 2, ..., `length` logits.

    Args:
        length: Number of rows, and of logits in the last.
        spread: Standard deviation m of the logits.

    Returns:
        The averaged moments. Rows beyond the first 64 are interpolated on a geometric grid, along
        which the moments are close to a power law.
    """
    exact = np.arange(1, min(length, _EXACT_SIZES) + 1)
    sampled = np.round(np.geomspace(exact[-1], length, _SAMPLED_SIZES)).astype(int)
    sizes = np.unique(np.concatenate([exact, sampled]))
    every = np.arange(len(exact) + 1, length + 1)
    means = []
    for moment in moments_by_size(sizes, spread):
        total = moment[: len(exact)].sum()
        if every.size:
            # The first row has no gradient; the logarithm is taken beyond it.
            known = np.log(sizes[1:]), np.log(moment[1:])
            total += np.exp(np.interp(np.log(every), *known)).sum()
        means.append(float(total / length))
    return SoftmaxMoments(*means)


def moments_by_size(sizes: np.ndarray, spread: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the moments of many sizes, as two arrays; a size need not be an integer."""
    m = min(spread, _LARGEST)
    u, log_h0, h2, h3, h4 = _one_logit(m, math.log(sizes.max()))
    n = sizes[:, None].astype(np.float64)
    others = np.exp((n - 1) * log_h0)
    pairs = (n - 1) * np.exp(np.maximum(n - 2, 0) * log_h0)
    du = u[1] - u[0]
    square = (n * h2 * others).sum(-1) * du
    cube = (n * h3 * others).sum(-1) * du / 2
    squared_square = (n * (h4 * others + h2**2 * pairs)).sum(-1) * du / 6
    gradient = np.where(sizes == 1, 0.0, square - 2 * cube + squared_square)
    # Beyond the largest spread two logits compete only if closer than order 1: probability ~ 1 / m.
    ratio = m / spread
    return 1 - (1 - square) * ratio, gradient * ratio


def _one_logit(m: float, log_size: float) -> tuple[np.ndarray, ...]:
    """Return the grid u, log H_0, H_2, H_3 and H_4."""
    u = np.arange(-(log_size + _WIDTH * m + 24), _WIDTH * m + 8, _STEP)
    half = math.ceil(_WIDTH * max(m, 1.0) / _STEP)
    x = np.arange(-half, half + 1) * (_WIDTH / half)
    density = np.exp(-(x**2) / 2)
    density /= density.sum()
    expectations = np.empty((4, u.size))
    for index, shift in enumerate(u):
        s = np.exp(np.minimum(shift + m * x, 100.0))
        decay = np.exp(-s) * density
        expectations[:, index] = (
            -(np.expm1(-s) @ density),
            decay @ s**2,
            decay @ s**3,
            decay @ s**4,
        )
    below, h2, h3, h4 = expectations
    log_h0 = np.log1p(-np.minimum(below, 1 - 1e-16))
    return u, log_h0, h2, h3, h4
