"""Factors of norms, softmax, losses and pooling, and the moments of softmax and gates.

Softmax moments are exact: the normalizer `Z = sum(e^z)` is removed by `Z^-k = int s^(k-1) e^(-s Z)
ds / (k-1)!`, which turns a moment of independent normal logits into a one-dimensional integral of
products of one-logit expectations `H_k(u) = E[e^(k v - e^v)]`, `v = u + m x`, `s = e^u`. The
trapezoid rule computes it almost to machine precision.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ._elementwise import quadrature
from ._factors import (
    Constraint,
    Factors,
    check_per_dimension,
    check_sizes,
    constrain,
    positive_number,
)

_LARGEST_SPREAD = 24.0  # of logits; beyond it softmax moments follow their asymptote in 1 / spread
_STEP = 0.25  # of the integral over u = log s
_WIDTH = 10.0  # of the normal distribution, in standard deviations
_GATE_WIDTH, _GATE_STEP = 8.0, 0.02


def norm(features: int, size: int) -> Factors:
    """Return the factors of a layer, RMS, group or batch norm, with `bwd = (x, gain, bias)`.

    Scaling:
        Forward 1, input gradient 1. For an input of `size` elements whose last axis has `features`,
        gain and bias are cut edges whose gradients sum over `size / features` rows: `(features /
        size)^1/2`. Assumes unit inputs, a unit gain, and cotangents independent of the input.

    Example:
        >>> norm(64, 1024)
        Factors(fwd=1.0, bwd=(1.0, 0.25, 0.25))

    References:
        Unit Scaling, arXiv 2303.11257, the rule for cut edges.
    """
    check_sizes("norm", features=features, size=size)
    if size % features:
        raise ValueError(
            "unitscale.rules.norm: size must be a multiple of features; got "
            f"size={size}, features={features}. Pass the input's total number of elements."
        )
    weight = math.sqrt(features / size)
    return Factors(1.0, (1.0, weight, weight))


def softmax(
    axis_size: int, *, mult: float = 1.0, constraint: Constraint = "to_output_scale"
) -> Factors:
    """Return the factors of `softmax(mult * x)`, with `bwd = (x,)`.

    Scaling:
        For `n = axis_size` entries, forward `1 / std(p)`: the mean of p is exactly `1 / n`, so
        `var(p) = E[sum p^2] / n - 1 / n^2`. Backward `1 / RMS(dx)` before the constraint: `dx =
        mult * p * (g - sum(p g))`, so for unit g its mean square is `mult^2 / n * E[sum p^2 - 2 p^3
        + (sum p^2)^2]`. The expectations over independent unit normal logits are exact; for large n
        the factors tend to `n / (e^(mult^2) - 1)^1/2` and `n e^(-mult^2 / 2) / mult`. A softmax
        over a single entry is the constant 1; its factors are 1.

    Example:
        >>> round(softmax(4096).fwd / 4096, 3)
        0.764

    References:
        Unit Scaling, arXiv 2303.11257, scaling factors of softmax.
    """
    check_sizes("softmax", axis_size=axis_size)
    mult = positive_number("softmax", "mult", mult)
    if axis_size == 1:
        output, x = constrain(constraint, 1.0, 1.0)
        return Factors(output, (x,))
    moments = softmax_moments(int(axis_size), mult)
    if mult < 1e-3:
        # The difference below would cancel; here p is linear in x to within mult^2.
        std = mult * math.sqrt(axis_size - 1) / axis_size**1.5
    else:
        std = math.sqrt((moments.square - 1 / axis_size) / axis_size)
    slope = mult * math.sqrt(moments.gradient / axis_size)
    output, x = constrain(constraint, 1 / std, 1 / slope)
    return Factors(output, (x,))


def softmax_cross_entropy(vocab: int, *, mult: float = 1.0) -> Factors:
    """Return the factors of the softmax cross entropy of `mult * logits`, `bwd = (logits,)`.

    Scaling:
        Forward 1: the value is the ordinary loss. The gradient of one example's loss is `mult * (p
        - y)`; for uniform `p` over `V = vocab` classes (at least 2) its mean square is `mult^2 (V -
        1) / V^2`, so the backward factor is `V / ((V - 1)^1/2 * mult)`. It may differ from the
        forward factor because a loss ends the graph. Assumes small logits, as those of `readout` at
        initialization, and that the op omits the `1 / N` of a mean from the backward pass.

    Example:
        >>> softmax_cross_entropy(2).bwd
        (2.0,)

    References:
        Unit Scaling, arXiv 2303.11257, softmax cross entropy.
        u-muP, arXiv 2407.17465, the multiplier of the loss softmax.
    """
    check_sizes("softmax_cross_entropy", vocab=vocab)
    mult = positive_number("softmax_cross_entropy", "mult", mult)
    if vocab < 2:
        raise ValueError(
            "unitscale.rules.softmax_cross_entropy: vocab must be at least 2; got "
            f"{vocab}. The loss of a single class is always zero."
        )
    return Factors(1.0, (vocab / math.sqrt(vocab - 1) / mult,))


def mse_loss() -> Factors:
    """Return the factors of the mean squared error, with `bwd = (pred, target)`.

    Scaling:
        Forward 1. The gradient of one squared error is `2 (pred - target)`; the difference of two
        independent unit values has variance 2, so its RMS is `8^1/2` and both backward factors are
        `8^-1/2`. Assumes that the op omits the `1 / N` of the mean from the backward pass.

    References:
        Unit Scaling, arXiv 2303.11257, the unit-variance rule.
    """
    return Factors(1.0, (1 / math.sqrt(8),) * 2)


def avg_pool(
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    *,
    constraint: Constraint = "to_output_scale",
) -> Factors:
    """Return the factors of the mean over windows, with `bwd = (x,)`.

    Scaling:
        Forward `n^1/2` with `n = prod(window_shape)`, as the mean of n independent unit values has
        RMS `n^-1/2`. An entry lies in `n / prod(strides)` windows on average and gets `1 / n` of
        the cotangent of each: before the constraint its gradient has `(n * prod(strides))^1/2`.
        Assumes interior windows, without padding.

    Example:
        >>> avg_pool((2, 2), (2, 2), constraint=None)
        Factors(fwd=2.0, bwd=(4.0,))

    References:
        Unit Scaling, arXiv 2303.11257, the unit-variance rule.
    """
    entries, step = _window("avg_pool", window_shape, strides)
    output, x = constrain(constraint, math.sqrt(entries), math.sqrt(entries * step))
    return Factors(output, (x,))


def max_pool(
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    *,
    constraint: Constraint = "to_output_scale",
) -> Factors:
    """Return the factors of the maximum over windows, with `bwd = (x,)`.

    Scaling:
        Forward `1 / std` of the largest of `n = prod(window_shape)` independent unit normal values,
        whose density is `n phi(x) Phi(x)^(n-1)`; its mean is not removed. The cotangent of every
        window goes to one entry, so before the constraint the input gradient has
        `prod(strides)^1/2`. Assumes interior windows.

    Example:
        >>> round(max_pool((2, 1)).fwd, 3)  # the variance is 1 - 1 / pi
        1.211

    References:
        Unit Scaling, arXiv 2303.11257, factors of activations; David, Nagaraja, "Order
        Statistics", 2003, equation 2.1.6 (density of the maximum).
    """
    entries, step = _window("max_pool", window_shape, strides)
    output, x = constrain(constraint, 1 / _std_of_maximum(entries), math.sqrt(step))
    return Factors(output, (x,))


def _window(rule: str, shape: Sequence[int], strides: Sequence[int] | None) -> tuple[int, int]:
    shape = tuple(shape)
    strides = (1,) * len(shape) if strides is None else tuple(strides)
    check_per_dimension(rule, len(shape), window_shape=shape, strides=strides)
    return math.prod(shape), math.prod(strides)


@functools.lru_cache(maxsize=256)
def _std_of_maximum(n: int) -> float:
    """Return the standard deviation of the maximum of n independent unit normal values."""
    nodes, weights = quadrature()
    above = np.array([math.erfc(x / math.sqrt(2)) / 2 for x in nodes])
    # P(all others are below), in logarithms: above is tiny where the maximum of many values lies.
    with np.errstate(divide="ignore"):
        density = n * weights * np.exp((n - 1) * np.log1p(-above)) if n > 1 else weights
    mean = density @ nodes
    return math.sqrt(density @ (nodes - mean) ** 2)


class SoftmaxMoments(NamedTuple):
    """Expected moments of `p = softmax(m * x)`, `x ~ N(0, 1)`.

    `square` is `E[sum p^2]`, the mean square of a p-weighted mean of independent unit values.
    `gradient` is `E[sum p^2 - 2 p^3 + (sum p^2)^2]`, the summed mean square of the softmax's input
    gradient for a unit cotangent, before the multiplier.
    """

    square: float
    gradient: float


@functools.lru_cache(maxsize=4096)
def softmax_moments(size: int, spread: float) -> SoftmaxMoments:
    """Return the moments of the softmax of `size` logits with standard deviation `spread`."""
    square, gradient = moments_by_size(np.asarray([size]), spread)
    return SoftmaxMoments(float(square[0]), float(gradient[0]))


@functools.lru_cache(maxsize=4096)
def causal_softmax_moments(length: int, spread: float) -> SoftmaxMoments:
    """Return the moments averaged over rows of 1, 2, ..., `length` logits."""
    rows = np.arange(1, length + 1)
    parts = [moments_by_size(part, spread) for part in np.array_split(rows, -(-length // 2048))]
    square, gradient = (float(np.concatenate(moment).mean()) for moment in zip(*parts, strict=True))
    return SoftmaxMoments(square, gradient)


def moments_by_size(sizes: np.ndarray, spread: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the softmax moments of many sizes, as two arrays; a size need not be an integer."""
    m = min(spread, _LARGEST_SPREAD)
    u = np.arange(-(math.log(sizes.max()) + _WIDTH * m + 24), _WIDTH * m + 8, _STEP)
    half = math.ceil(_WIDTH * max(m, 1.0) / _STEP)
    x = np.arange(-half, half + 1) * (_WIDTH / half)
    density = np.exp(-(x**2) / 2)
    density /= density.sum()
    s = np.exp(np.minimum(u[:, None] + m * x, 100.0))
    decay = np.exp(-s)
    h2, h3, h4 = ((decay * power) @ density for power in (s * s, s * s * s, s * s * s * s))
    log_h0 = np.log1p(-np.minimum(-np.expm1(-s) @ density, 1 - 1e-16))
    n = sizes[:, None].astype(np.float64)
    others = np.exp((n - 1) * log_h0)
    pairs = (n - 1) * np.exp(np.maximum(n - 2, 0) * log_h0)
    square = others @ h2
    cube = others @ h3 / 2
    squared_square = (others @ h4 + pairs @ h2**2) / 6
    square, cube, squared_square = (sizes * _STEP * x for x in (square, cube, squared_square))
    gradient = np.where(sizes == 1, 0.0, square - 2 * cube + squared_square)
    # Two logits of a large spread compete only if closer than order 1: probability ~ 1 / spread.
    ratio = m / spread
    return 1 - (1 - square) * ratio, gradient * ratio


@functools.lru_cache(maxsize=1024)
def gate_moments(experts: int, top_k: int, spread: float, renormalize: bool) -> SoftmaxMoments:
    """Return the moments of the gates of the top k of normal logits; a spread over 24 counts as 24.

    Given the largest logit t that is not chosen, the chosen ones are independent normal logits
    above t and the others below it, which leaves an integral over t of one-logit expectations.
    """
    if top_k == experts:
        return softmax_moments(experts, spread)
    if top_k == 1 and renormalize:
        return SoftmaxMoments(1.0, 0.0)
    m = min(spread, _LARGEST_SPREAD)
    x = np.arange(-_GATE_WIDTH, _GATE_WIDTH + _GATE_STEP / 2, _GATE_STEP)
    u = np.arange(-(math.log(experts) + _WIDTH * m + 24), _WIDTH * m + 8, _STEP)
    s = np.exp(np.minimum(u[:, None] + m * x, 100.0))
    density = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    others = experts - top_k - 1
    # h[j] = s^j e^-s at t; above[j] is its integral over logits larger than t.
    h = [np.exp(-s)]
    for _ in range(4):
        h.append(h[-1] * s)
    above = [_integral_above(density * h_j) for h_j in h]
    # Logits that are not chosen count in the normalizer only without renormalization.
    weight, weight_square = (1.0, 0.0) if renormalize else (h[0], h[2])
    below = _integral_below(density * weight)
    rest = density * weight * below**others
    pairs = others * _integral_below(density * weight_square) * below ** max(others - 1, 0)
    rest_square = density * (weight_square * below**others + weight * pairs)
    one = top_k * above[0] ** (top_k - 1)
    two = top_k * (top_k - 1) * above[0] ** max(top_k - 2, 0)
    total = np.sum(density * _integral_below(density) ** others * _integral_above(density) ** top_k)
    size = _STEP / total
    square = np.sum(one * above[2] * rest) * size
    cube = np.sum(one * above[3] * rest) * size / 2
    fourth = (one * above[4] + two * above[2] ** 2) * rest + one * above[2] * rest_square
    return SoftmaxMoments(float(square), float(square - 2 * cube + np.sum(fourth) * size / 6))


def _integral_below(f: np.ndarray) -> np.ndarray:
    """Return the integral of f up to each point of the grid of logits, by trapezoids."""
    steps = (f[..., 1:] + f[..., :-1]) * (_GATE_STEP / 2)
    return np.concatenate([np.zeros_like(f[..., :1]), np.cumsum(steps, -1)], -1)


def _integral_above(f: np.ndarray) -> np.ndarray:
    return _integral_below(f[..., ::-1])[..., ::-1]
