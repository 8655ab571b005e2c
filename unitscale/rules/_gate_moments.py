"""Moments of the gates of the largest few of normal logits, exact for every number of experts.

Given the largest logit t that is not kept, the kept ones are independent normal logits above t, and
the others independent ones below. As in `_softmax_moments`, the normalizer is removed by `Z^-k =
int s^(k-1) e^(-s Z) ds / (k-1)!`, which leaves products of one-logit expectations, here cut at t,
and an integral over t.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from ._softmax_moments import SoftmaxMoments, softmax_moments

_REACH = 8.0
_STEP = 0.02
_LOG_STEP = 0.25
_LARGEST = 24.0


@functools.lru_cache(maxsize=1024)
def gate_moments(experts: int, top_k: int, spread: float, renormalize: bool) -> SoftmaxMoments:
    """Return the moments of the gates of the top k of normal logits.

    Args:
        experts: Number of logits.
        top_k: How many of the largest are kept.
        spread: Standard deviation m of the logits; above 24 it counts as 24.
        renormalize: Whether the gates are the softmax of the kept logits; else they are their
            entries in the softmax of all.

    Returns:
        `square`, the expected sum of the squared gates, and `gradient`, the expected sum of the
        squared gradients by the m-scaled logits, for unit cotangents of the kept gates.
    """
    if top_k == experts:
        return softmax_moments(experts, spread)
    if top_k == 1 and renormalize:
        return SoftmaxMoments(1.0, 0.0)
    m = min(spread, _LARGEST)
    x = np.arange(-_REACH, _REACH + _STEP / 2, _STEP)
    u = np.arange(-(math.log(experts) + 10 * m + 24), 10 * m + 8, _LOG_STEP)
    v = u[:, None] + m * x
    decay = np.exp(-np.exp(np.minimum(v, 100.0)))
    density = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    others = experts - top_k - 1
    # h[j] = e^(j v - e^v) at t, above[j] and below[j] its integrals on either side of t.
    h = [np.exp(np.minimum(j * v, 600.0)) * decay for j in range(5)]
    above = [_above(density * h_j) for h_j in h]
    if renormalize:
        rest = density * _below(density) ** others
        rest_square: np.ndarray | float = 0.0
    else:
        below, below_square = _below(density * h[0]), _below(density * h[2])
        rest = density * h[0] * below**others
        rest_square = density * h[2] * below**others
        if others:
            rest_square += density * h[0] * others * below_square * below ** (others - 1)
    one = top_k * above[0] ** (top_k - 1)
    two = top_k * (top_k - 1) * above[0] ** (top_k - 2) if top_k > 1 else 0.0
    total = np.sum(density * _below(density) ** others * _above(density) ** top_k)
    size = _LOG_STEP / total
    square = np.sum(one * above[2] * rest) * size
    cube = np.sum(one * above[3] * rest) * size / 2
    fourth = (one * above[4] + two * above[2] ** 2) * rest + one * above[2] * rest_square
    return SoftmaxMoments(float(square), float(square - 2 * cube + np.sum(fourth) * size / 6))


def _below(f: np.ndarray) -> np.ndarray:
    """The integral of a function up to each point of the grid, by trapezoids."""
    steps = (f[..., 1:] + f[..., :-1]) * (_STEP / 2)
    return np.concatenate([np.zeros_like(f[..., :1]), np.cumsum(steps, -1)], -1)


def _above(f: np.ndarray) -> np.ndarray:
    return _below(f[..., ::-1])[..., ::-1]
