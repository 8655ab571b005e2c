"""Factors of element-wise functions and pooling, by numerical integration over normal inputs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import jax
import numpy as np
from jax.sharding import AbstractMesh

from ._linear import Constraint, Factors, constrain, per_dimension, positive_number, real_number

_LIMIT = 12.0
_HERMITE_TERMS = 24
_Statistics = tuple[float, float, float]
# Weak keys, because a function may refer to a whole model.
_cache: WeakKeyDictionary[Callable[..., Any], dict[float, _Statistics]] = WeakKeyDictionary()


def elementwise(
    f: Callable[..., Any], *, mult: float = 1.0, constraint: Constraint = "to_output_scale"
) -> Factors:
    """Return the factors of `f(mult * x)` for any scalar function, with `bwd = (x,)`.

    Scaling:
        The forward factor is `1 / std(f(mult * x))`; before the constraint, the backward factor is
        `1 / RMS(d/dx f(mult * x))`, both for `x ~ N(0, 1)`. They are integrated numerically,
        including across a kink at 0, as in relu. The mean of `f` is not removed. If the derivative
        is zero almost everywhere (sign, round), the backward factor is the forward one.

    Raises:
        TypeError: If `f` does not map a scalar to a real scalar.
        ValueError: If `f` is constant, not finite, or grows too fast to integrate.

    Example:
        >>> factors = elementwise(jax.nn.relu, constraint=None)
        >>> round(factors.fwd, 3), round(factors.bwd[0], 3)
        (1.713, 1.414)

    References:
        Unit Scaling, arXiv 2303.11257, factors of activations.
    """
    std, _, slope = _statistics(f, positive_number("elementwise", "mult", mult))
    if std == 0:
        raise ValueError(
            f"unitscale.rules.elementwise: {_name(f)} is constant on unit normal inputs "
            f"(mult={mult}), so no factor gives it RMS 1."
        )
    output, x = constrain(constraint, 1 / std, 1 / (slope or std))
    return Factors(output, (x,))


def glu(
    f: Callable[..., Any], *, mult: float = 1.0, constraint: Constraint = "to_output_scale"
) -> Factors:
    """Return the factors of the gated linear unit `x * f(mult * gate)`, with `bwd = (x, gate)`.

    Scaling:
        The factors of output and x are `1 / RMS(f(mult * gate))`. The factor of gate is `1 /
        RMS(d/dgate f(mult * gate))`. Both are for `gate ~ N(0, 1)`, before the constraint (left is
        x, right is gate). Assumes independent unit x and gate with zero mean.

    References:
        u-muP, arXiv 2407.17465, unit-scaled gated SiLU.
    """
    _, rms, slope = _statistics(f, positive_number("glu", "mult", mult))
    if rms == 0:
        raise ValueError(
            f"unitscale.rules.glu: {_name(f)} is zero on unit normal inputs (mult={mult}), so no "
            "factor gives it RMS 1."
        )
    output, x, gate = constrain(constraint, 1 / rms, 1 / rms, 1 / (slope or rms))
    return Factors(output, (x, gate))


def dropout(rate: float) -> Factors:
    """Return the factors of dropout, `x * mask / (1 - rate)`, with `bwd = (x,)`.

    Scaling:
        `x * mask / (1 - rate)` has mean square `1 / (1 - rate)` for unit `x`, so both factors are
        `(1 - rate)^1/2`. The op computes `x * mask * (1 - rate)^-1/2`.

    References:
        Unit Scaling, arXiv 2303.11257, the unit-variance rule.
    """
    rate = real_number("dropout", "rate", rate)
    if not 0 <= rate < 1:
        raise ValueError(f"unitscale.rules.dropout: rate must be in [0, 1); got {rate}.")
    factor = math.sqrt(1 - rate)
    return Factors(factor, (factor,))


def avg_pool(
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    *,
    constraint: Constraint = "to_output_scale",
) -> Factors:
    """Return the factors of the mean over windows, with `bwd = (x,)`.

    Scaling:
        The forward factor is `n^1/2` with `n = prod(window_shape)`, because the mean of n
        independent unit values has RMS `n^-1/2`. An entry lies in `n / prod(strides)` windows on
        average and gets `1 / n` of the cotangent of each. Before the constraint its backward factor
        is therefore `(n * prod(strides))^1/2`. Assumes interior windows, without padding.

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
        The forward factor is `1 / std` of the largest of `n = prod(window_shape)` independent unit
        normal values, whose density is `n phi(x) Phi(x)^(n-1)`. Its mean is not removed. The
        cotangent of every window goes to one entry, so before the constraint the backward factor is
        `prod(strides)^1/2`. Assumes interior windows, without padding.

    References:
        Unit Scaling, arXiv 2303.11257, factors of activations; David, Nagaraja, "Order
        Statistics", 2003, equation 2.1.6 (density of the maximum).
    """
    entries, step = _window("max_pool", window_shape, strides)
    output, x = constrain(constraint, 1 / _std_of_maximum(entries), math.sqrt(step))
    return Factors(output, (x,))


def _window(rule: str, shape: Sequence[int], strides: Sequence[int] | None) -> tuple[int, int]:
    shape = per_dimension(rule, "window_shape", shape, len(shape))
    strides = per_dimension(rule, "strides", 1 if strides is None else strides, len(shape))
    return math.prod(shape), math.prod(strides)


@functools.lru_cache(maxsize=256)
def _std_of_maximum(n: int) -> float:
    """Return the standard deviation of the maximum of n independent unit normal values."""
    nodes, weights = quadrature()
    above = np.array([math.erfc(x / math.sqrt(2)) / 2 for x in nodes])
    # P(all others are below), in logarithms because `above` may be tiny.
    with np.errstate(divide="ignore"):
        density = n * weights * np.exp((n - 1) * np.log1p(-above)) if n > 1 else weights
    mean = density @ nodes
    return math.sqrt(density @ (nodes - mean) ** 2)


@functools.lru_cache(maxsize=256)
def correlation_kernel(f: Callable[..., Any], mult: float = 1.0) -> np.ndarray:
    """Return coefficients c of `E[f(mult * x) f(mult * y)] / Var f = sum c_k rho^k`.

    Here x and y are unit normal with correlation rho, and c_k is proportional to a_k^2 for `f(x) =
    sum a_k He_k(x) / sqrt(k!)` (Mehler's formula). The last term, c_24, includes all later ones.
    """
    nodes, weights = quadrature()
    with compile_time():
        y = np.asarray(jax.vmap(f)(np.asarray(mult * nodes, np.float32)), np.float64)
    coefficients = []
    before, term = np.zeros_like(nodes), np.ones_like(nodes)
    for k in range(_HERMITE_TERMS):
        coefficients.append(float(weights @ (y * term)) ** 2)
        # He_k / sqrt(k!), by its recurrence.
        before, term = term, (nodes * term - np.sqrt(k) * before) / np.sqrt(k + 1)
    power = float(weights @ y**2)
    coefficients.append(max(power - sum(coefficients), 0.0))
    return np.asarray(coefficients) / (power - coefficients[0])


@functools.cache
def quadrature() -> tuple[np.ndarray, np.ndarray]:
    """Return nodes and weights to integrate over N(0, 1); nodes are denser near 0."""
    uniform = np.arange(1, 32 * int(_LIMIT) + 1) / 32
    graded = 2.0 ** -np.arange(6, 25)
    positive = np.unique(np.concatenate([graded, uniform]))
    edges = np.concatenate([-positive[::-1], [0.0], positive])
    points, masses = np.polynomial.legendre.leggauss(8)
    center, half = (edges[1:] + edges[:-1]) / 2, (edges[1:] - edges[:-1]) / 2
    nodes = (center[:, None] + half[:, None] * points).ravel()
    weights = (half[:, None] * masses).ravel() * np.exp(-(nodes**2) / 2)
    return nodes, weights / weights.sum()


@contextmanager
def compile_time() -> Iterator[None]:
    """Evaluate JAX operations on concrete arrays now, even while JAX traces another function."""
    # Inside `jax.shard_map` over some of the mesh axes, JAX would treat new arrays as shards.
    no_mesh = AbstractMesh((), ())
    with jax.ensure_compile_time_eval(), jax.sharding.use_abstract_mesh(no_mesh):
        yield


def _statistics(f: Callable[..., Any], mult: float) -> _Statistics:
    """Return std and RMS of f(mult x), and RMS of its derivative in x, for unit normal x."""
    try:
        known = _cache.setdefault(f, {})
    except TypeError:  # f is not hashable, or does not allow weak references
        return _integrate(f, mult)
    if mult not in known:
        known[mult] = _integrate(f, mult)
    return known[mult]


def _integrate(f: Callable[..., Any], mult: float) -> _Statistics:
    nodes, weights = quadrature()
    with compile_time():
        x = np.asarray(mult * nodes, np.float32)
        value, slope = jax.jvp(jax.vmap(f), (x,), (np.ones_like(x),))
        y, dy = np.asarray(value), np.asarray(slope)
    if y.shape != x.shape or not np.issubdtype(y.dtype, np.floating):
        raise TypeError(
            f"unitscale.rules.elementwise: {_name(f)} must map a real scalar to a real scalar; "
            f"vmapped over {x.shape} float32 it returned {y.shape} {y.dtype}."
        )
    y, dy = y.astype(np.float64), mult * dy.astype(np.float64)
    if not (np.isfinite(y).all() and np.isfinite(dy).all()):
        bad = nodes[~(np.isfinite(y) & np.isfinite(dy))]
        raise ValueError(
            f"unitscale.rules.elementwise: {_name(f)} or its derivative is not finite for unit "
            f"normal inputs (mult={mult}), for instance at mult * {bad[np.abs(bad).argmin()]:.4g}. "
            "Restrict its domain (clip or abs) or lower mult."
        )
    deviation = y - weights @ y
    rms, slope_rms = math.sqrt(weights @ y**2), math.sqrt(weights @ dy**2)
    std = math.sqrt(weights @ deviation**2)
    edge = np.abs(nodes) > _LIMIT - 1
    for squares in (deviation**2, dy**2):
        if weights[edge] @ squares[edge] > 1e-4 * (weights @ squares):
            raise ValueError(
                f"unitscale.rules.elementwise: {_name(f)} grows too fast (mult={mult}): rare "
                "inputs dominate its variance. Lower mult or bound the function."
            )
    noise = 8 * float(np.finfo(np.float32).eps) * rms
    return (std if std > noise else 0.0), rms, slope_rms


def _name(f: Callable[..., Any]) -> str:
    return getattr(f, "__name__", None) or repr(f)
