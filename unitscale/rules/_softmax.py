"""Factors of softmax, losses and mixtures of experts, and the moments of softmax and gates.

Softmax moments are exact. The identity `Z^-k = int s^(k-1) e^(-s Z) ds / (k-1)!` removes the
normalizer `Z = sum(e^z)`. A moment for independent normal logits is then a one-dimensional integral
over products of one-logit expectations `H_k(u) = E[e^(k v - e^v)]`, where `v = u + m x` and `s =
e^u`. The trapezoid rule computes it almost to machine precision.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from ._linear import Constraint, Factors, check_sizes, constrain, positive_number

_LARGEST_SPREAD = 24.0  # of logits; above it softmax moments are extrapolated in 1 / spread
_STEP = 0.25  # step of the integral over u = log s
_WIDTH = 10.0  # half-width of the integral over normal x, in standard deviations
_GATE_WIDTH, _GATE_STEP = 8.0, 0.02


def softmax(
    axis_size: int, *, mult: float = 1.0, constraint: Constraint = "to_output_scale"
) -> Factors:
    """Return the factors of `softmax(mult * x)`, with `bwd = (x,)`.

    Scaling:
        For `n = axis_size` entries, the forward factor is `1 / std(p)`. The mean of p is exactly `1
        / n`, so `var(p) = E[sum p^2] / n - 1 / n^2`. Before the constraint, the backward factor is
        `1 / RMS(dx)`. With `dx = mult * p * (g - sum(p g))` and unit g, the mean square of dx is
        `mult^2 / n * E[sum p^2 - 2 p^3 + (sum p^2)^2]`. Expectations over independent unit normal
        logits are exact. For large n the factors approach `n / (e^(mult^2) - 1)^1/2` and `n
        e^(-mult^2 / 2) / mult`.

    Example:
        >>> round(softmax(4096).fwd / 4096, 3)
        0.764

    References:
        Unit Scaling, arXiv 2303.11257, scaling factors of softmax.
    """
    check_sizes("softmax", axis_size=axis_size)
    mult = positive_number("softmax", "mult", mult)
    std = slope = 1.0
    if axis_size > 1:
        moments = softmax_moments(int(axis_size), mult)
        slope = mult * math.sqrt(moments.gradient / axis_size)
        std = math.sqrt(max(moments.square - 1 / axis_size, 0) / axis_size)
        if mult < 1e-3:  # the difference above is inaccurate; p is nearly linear in x
            std = mult * math.sqrt(axis_size - 1) / axis_size**1.5
    output, x = constrain(constraint, 1 / std, 1 / slope)
    return Factors(output, (x,))


def softmax_cross_entropy(vocab: int, *, mult: float = 1.0) -> Factors:
    """Return the factors of the softmax cross entropy of `mult * logits`, `bwd = (logits,)`.

    Scaling:
        The forward factor is 1. The gradient of one example's loss is `mult * (p - y)`. For uniform
        `p` over `V = vocab` classes (at least 2) its mean square is `mult^2 (V - 1) / V^2`, so the
        backward factor is `V / ((V - 1)^1/2 * mult)`. Assumes small logits, like those of `readout`
        at initialization, and an op that omits the `1 / N` of a mean in the backward pass.

    References:
        Unit Scaling, arXiv 2303.11257, softmax cross entropy; u-muP, arXiv 2407.17465 (`mult`).
    """
    check_sizes("softmax_cross_entropy", vocab=vocab)
    mult = positive_number("softmax_cross_entropy", "mult", mult)
    if vocab < 2:
        raise ValueError(
            f"unitscale.rules.softmax_cross_entropy: vocab must be at least 2; got {vocab}."
        )
    return Factors(1.0, (vocab / math.sqrt(vocab - 1) / mult,))


def mse_loss() -> Factors:
    """Return the factors of the mean squared error, with `bwd = (pred, target)`.

    Scaling:
        The forward factor is 1. The gradient `2 (pred - target)` of a squared error has RMS `8^1/2`
        for unit values, so both backward factors are `8^-1/2`. The op omits the 1/N of the mean.

    References:
        Unit Scaling, arXiv 2303.11257, the unit-variance rule.
    """
    return Factors(1.0, (1 / math.sqrt(8),) * 2)


def mixture(experts: int, top_k: int, *, mult: float = 1.0, renormalize: bool = True) -> Factors:
    """Return the factors of the sum of the chosen experts' outputs, weighted by their gates.

    Scaling:
        `bwd = (expert's output, gate, expert's input)`. The forward factor is `c = E[sum g^2]^-1/2`
        over the gates g of a token, exact for independent unit normal logits. The gates have the
        same factor, so their gradient is exact. The cotangent of an expert's output, `c g dy`, has
        RMS `k^-1/2` for `k = top_k`. A further `k^1/2` makes gradients inside the experts unit, and
        `k^-1/2` on the gradient of the expert's input cancels it. With `renormalize` gates are the
        softmax over the chosen experts, otherwise entries of the softmax over all. Assumes
        independent unit outputs.

    Example:
        >>> round(mixture(8, 2).fwd, 2)
        1.34

    References:
        Mixtral: Jiang et al., 2024, arXiv 2401.04088, equations 1 and 2.
        u-muP, arXiv 2407.17465, appendix G (the factor applied at the split).
    """
    mult = _check_experts("mixture", experts, top_k, mult)
    output = 1 / math.sqrt(gate_moments(experts, top_k, mult, renormalize).square)
    return Factors(output, (output * math.sqrt(top_k), output, 1 / math.sqrt(top_k)))


def router(
    in_features: int,
    experts: int,
    tokens: int,
    *,
    top_k: int,
    out_features: int | None = None,
    mult: float = 1.0,
    renormalize: bool = True,
    constraint: Constraint = "to_output_scale",
) -> Factors:
    """Return the factors of the matmul that computes router logits, with `bwd = (x, kernel)`.

    Scaling:
        The forward factor `in^-1/2` and the input gradient's `experts^-1/2` are constrained
        together, because the experts use the tokens too. The gradient of a gate is `c <f, dy>`,
        with c the forward factor of `mixture`. Its RMS is `c out^1/2` for unit outputs f and
        cotangents dy, where out is `out_features`, by default `in_features`. The mean square of a
        logit's gradient is then `(c mult)^2 out / experts * E[sum g^2 - 2 g^3 + (sum g^2)^2]`. The
        kernel is a cut edge: its factor is the inverse root of this mean square times
        `tokens^-1/2`, or `tokens^-1/2` if the gates are constant.

    References:
        Mixtral: Jiang et al., 2024, arXiv 2401.04088, equations 1 and 2.
        u-muP, arXiv 2407.17465, table 2 (hidden weights).
    """
    mult = _check_experts("router", experts, top_k, mult)
    width = in_features if out_features is None else out_features
    check_sizes("router", in_features=in_features, tokens=tokens, out_features=width)
    output, x = constrain(constraint, 1 / math.sqrt(in_features), 1 / math.sqrt(experts))
    moments = gate_moments(experts, top_k, mult, renormalize)
    slope = mult * math.sqrt(width * moments.gradient / moments.square / experts)
    return Factors(output, (x, 1 / math.sqrt(tokens) / (slope or 1.0)))


def _check_experts(rule: str, experts: int, top_k: int, mult: float) -> float:
    check_sizes(rule, experts=experts, top_k=top_k)
    if top_k > experts:
        raise ValueError(
            f"unitscale.rules.{rule}: top_k must be at most experts; got {top_k} of {experts}."
        )
    return positive_number(rule, "mult", mult)


class SoftmaxMoments(NamedTuple):
    """Expected moments of `p = softmax(m * x)`, `x ~ N(0, 1)`.

    `square` is `E[sum p^2]`, the mean square of a p-weighted mean of independent unit values.
    `gradient` is `E[sum p^2 - 2 p^3 + (sum p^2)^2]`: for a unit cotangent, the mean square of the
    input gradient without the multiplier m, summed over inputs.
    """

    square: float
    gradient: float


@functools.lru_cache(maxsize=4096)
def softmax_moments(size: int, spread: float) -> SoftmaxMoments:
    """Return the moments of the softmax of `size` logits with standard deviation `spread`."""
    return SoftmaxMoments(*(float(x[0]) for x in moments_by_size(np.asarray([size]), spread)))


@functools.lru_cache(maxsize=4096)
def causal_softmax_moments(length: int, spread: float) -> SoftmaxMoments:
    """Return the moments of softmax over 1, 2, ..., `length` logits, averaged."""
    rows = np.arange(1, length + 1)
    parts = [moments_by_size(part, spread) for part in np.array_split(rows, -(-length // 2048))]
    square, gradient = (float(np.concatenate(moment).mean()) for moment in zip(*parts, strict=True))
    return SoftmaxMoments(square, gradient)


def moments_by_size(sizes: np.ndarray, spread: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the softmax moments of many sizes, as two arrays; sizes may be fractional."""
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
    # At a large spread the largest logit gets all the weight, unless another is within about 1 of
    # it, which has a probability proportional to 1 / spread.
    ratio = m / spread
    return 1 - (1 - square) * ratio, gradient * ratio


@functools.lru_cache(maxsize=1024)
def gate_moments(experts: int, top_k: int, spread: float, renormalize: bool) -> SoftmaxMoments:
    """Return the moments of the gates of the top k normal logits; spreads above 24 count as 24.

    Given the largest logit t that is not chosen, the chosen logits are independent normals above t,
    and the others below it. The moments are integrals over t of one-logit expectations.
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
    # Logits that are not chosen are part of the normalizer only without renormalization.
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
    """Return the integral of f up to each point of the grid of logits (trapezoid rule)."""
    steps = (f[..., 1:] + f[..., :-1]) * (_GATE_STEP / 2)
    return np.concatenate([np.zeros_like(f[..., :1]), np.cumsum(steps, -1)], -1)


def _integral_above(f: np.ndarray) -> np.ndarray:
    return _integral_below(f[..., ::-1])[..., ::-1]
