"""Factors of element-wise functions, measured by quadrature.

Tables of constants cover only the functions that someone thought of. Here the mean and variance of
any function and of its derivative are integrated against the standard normal density, once per
function, so that a user's own activation gets factors as exact as the published ones.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import jax
import numpy as np

from ._checks import positive_number
from ._compile_time import compile_time
from ._constraints import Constraint, constrain
from ._factors import Factors

_LIMIT = 12.0
_Statistics = tuple[float, float, float]
# Weak, because a function may hold a whole model; its numbers by mult go when it goes.
_cache: WeakKeyDictionary[Callable[..., Any], dict[float, _Statistics]] = WeakKeyDictionary()


def elementwise(
    f: Callable[..., Any],
    *,
    mult: float = 1.0,
    constraint: Constraint = "to_output_scale",
) -> Factors:
    """Return the factors of `f(mult * x)`.

    Scaling:
        Forward `1 / std(f(mult * x))`; before the constraint, backward `1 / RMS(d/dx f(mult * x))`,
        both under `x ~ N(0, 1)`. The mean of `f` is not removed. The integrals use composite
        Gauss-Legendre panels that end at 0 and shrink towards it, so a kink there (relu) is exact
        for every mult. Where the derivative is zero almost everywhere (sign, round) there is no
        gradient to scale, and the forward factor serves.

    Args:
        f: Function from a scalar to a scalar of the same shape that `jax` can trace and
            differentiate.
        mult: Multiplier of the input.
        constraint: How the output and the input gradient come to share a factor.

    Returns:
        Factors with `bwd = (x,)`.

    Raises:
        TypeError: If `f` does not return one real number per input.
        ValueError: If `f` is constant, not finite, or grows too fast for its variance to be
            integrated.

    Example:
        >>> factors = elementwise(jax.nn.relu, constraint=None)
        >>> round(factors.fwd, 3), round(factors.bwd[0], 3)
        (1.713, 1.414)

    References:
        Unit Scaling: Blake, Orr, Luschi, ICML 2023, arXiv 2303.11257, factors of activations.
    """
    std, _, slope = _statistics(f, positive_number("elementwise", "mult", mult))
    if std == 0:
        raise ValueError(
            f"unitscale.rules.elementwise: {_name(f)} is constant on unit normal inputs "
            f"(mult={mult}), so no factor makes its output unit. "
            "Use it outside the unit-scaled graph."
        )
    output, x = constrain(constraint, 1 / std, 1 / (slope or std))
    return Factors(output, (x,))


def glu(
    f: Callable[..., Any],
    *,
    mult: float = 1.0,
    constraint: Constraint = "to_output_scale",
) -> Factors:
    """Return the factors of the gated linear unit `x * f(mult * gate)`.

    Scaling:
        Forward and x gradient `1 / RMS(f(mult * gate))`; gate gradient `1 / RMS(d/dgate f(mult *
        gate))`, under `gate ~ N(0, 1)`, then constrained as two operands, x left and gate right.
        Assumes x and gate are independent, zero mean and unit.

    Args:
        f: Function from a scalar to a scalar that `jax` can trace and differentiate.
        mult: Multiplier of the gate.
        constraint: How output, x and gate come to share a factor.

    Returns:
        Factors with `bwd = (x, gate)`.

    Raises:
        TypeError: If `f` does not return one real number per input.
        ValueError: If `f` is zero, not finite, or grows too fast for its variance to be integrated.

    Example:
        >>> round(glu(jax.nn.silu).fwd, 3)
        1.677

    References:
        u-muP: Blake et al., 2024, arXiv 2407.17465, unit-scaled gated SiLU.
    """
    _, rms, slope = _statistics(f, positive_number("glu", "mult", mult))
    if rms == 0:
        raise ValueError(
            f"unitscale.rules.glu: {_name(f)} is zero on unit normal inputs (mult={mult}), so no "
            "factor makes its output unit."
        )
    output, x, gate = constrain(constraint, 1 / rms, 1 / rms, 1 / (slope or rms))
    return Factors(output, (x, gate))


def _statistics(f: Callable[..., Any], mult: float) -> _Statistics:
    """Return std and RMS of f(mult x), and RMS of its derivative in x, for unit normal x."""
    try:
        known = _cache.setdefault(f, {})
    except TypeError:  # f has no hash, or allows no weak references
        return _integrate(f, mult)
    if mult not in known:
        known[mult] = _integrate(f, mult)
    return known[mult]


def _integrate(f: Callable[..., Any], mult: float) -> _Statistics:
    nodes, weights = quadrature()
    # Inside a trace of jit the constants are still needed as Python floats, now.
    with compile_time():
        x = np.asarray(mult * nodes, np.float32)
        value, slope = jax.jvp(jax.vmap(f), (x,), (np.ones_like(x),))
        y, dy = np.asarray(value), np.asarray(slope)
    if y.shape != x.shape or not np.issubdtype(y.dtype, np.floating):
        raise TypeError(
            f"unitscale.rules.elementwise: {_name(f)} must map a real scalar to a real scalar; "
            f"mapped over {x.shape} float32 it gave {y.shape} {y.dtype}."
        )
    y, dy = y.astype(np.float64), mult * dy.astype(np.float64)
    if not (np.isfinite(y).all() and np.isfinite(dy).all()):
        bad = nodes[~(np.isfinite(y) & np.isfinite(dy))]
        raise ValueError(
            f"unitscale.rules.elementwise: {_name(f)} or its derivative is not finite for unit "
            f"normal inputs (mult={mult}), for instance at mult * {bad[np.abs(bad).argmin()]:.4g}. "
            "Restrict its domain (clip or abs) or lower mult."
        )
    mean = weights @ y
    deviation = y - mean
    rms, slope_rms = math.sqrt(weights @ y**2), math.sqrt(weights @ dy**2)
    std = math.sqrt(weights @ deviation**2)
    edge = np.abs(nodes) > _LIMIT - 1
    for squares in (deviation**2, dy**2):
        if weights[edge] @ squares[edge] > 1e-4 * (weights @ squares):
            raise ValueError(
                f"unitscale.rules.elementwise: {_name(f)} grows too fast (mult={mult}): its "
                "variance under unit normal inputs comes from values no batch contains. "
                "Lower mult or bound the function."
            )
    noise = 8 * float(np.finfo(np.float32).eps) * rms
    return (std if std > noise else 0.0), rms, slope_rms


@functools.cache
def quadrature() -> tuple[np.ndarray, np.ndarray]:
    """Return nodes and normal weights: uniform panels, refined geometrically towards 0."""
    uniform = np.arange(1, 32 * int(_LIMIT) + 1) / 32
    graded = 2.0 ** -np.arange(6, 25)
    positive = np.unique(np.concatenate([graded, uniform]))
    edges = np.concatenate([-positive[::-1], [0.0], positive])
    points, masses = np.polynomial.legendre.leggauss(8)
    centre, half = (edges[1:] + edges[:-1]) / 2, (edges[1:] - edges[:-1]) / 2
    nodes = (centre[:, None] + half[:, None] * points).ravel()
    weights = (half[:, None] * masses).ravel() * np.exp(-(nodes**2) / 2)
    return nodes, weights / weights.sum()


def _name(f: Callable[..., Any]) -> str:
    return getattr(f, "__name__", None) or repr(f)
