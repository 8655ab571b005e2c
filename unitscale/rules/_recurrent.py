"""Weights inside a recurrence.

A recurrent state is read by its own update, so no edge of it is a cut edge and no factor may differ
between the two passes. What can be chosen is the weight of the candidate: it changes the unit that
the state is stored in, and nothing else. A factor on the whole update would instead be multiplied
in at every step, and a state that its gate keeps would grow without bound.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from ._checks import positive_number, positive_sizes
from ._elementwise import glu
from ._factors import Factors
from ._hermite import correlation_kernel

_LAGS = 48  # a gate keeps half of the state: what is older has weight 2^-48
_ROUNDS = 64
_MEAN = 0.5  # of the logistic function of a unit normal


def gated_update(share: float = 0.5, *, reset: bool = False, period: int = 1) -> float:
    """Return the weight of the candidate in `gate * state + (1 - gate) * weight * candidate`.

    Scaling:
        The weight that makes the variance of the stationary state 1, for a logistic gate of a unit
        normal and a unit tanh candidate. With `q = E[sigmoid^2]`, `weight^2 q + q + 2 weight (1/2 -
        q) c = 1`, where c is the covariance of candidate and state. Were candidates of different
        steps independent, c would be 0 and the weight `(1 / q - 1)^1/2 = 1.552`. But the same
        kernel reads a slowly changing state at each step, so they are correlated: with `R(k)` the
        autocorrelation of the state and K that of tanh of a normal (Mehler), `R_n(k) = K(share
        R(k))`, `S(k) = weight / 2 * sum_j 2^-j R_n(k + j)`, `R(k) = weight / 2 * S(k) + R(k - 1) /
        2` and `c = S(1)`, solved together. Assumes wide layers, white inputs and gates that are
        independent of one another over time; the more slowly gates change, the smaller the variance
        (by a tenth where they never change). The weight multiplies the gradient too: every
        gradient is the true one.

    Args:
        share: Share of the candidate's argument that the state contributes, in variance.
        reset: Whether a second gate multiplies what the candidate reads of the state, as in a GRU:
            it makes candidates less correlated, and a little smaller.
        period: Number of updates after which the same kernel is used again: the depth of a
            recurrent highway cell.

    Returns:
        The weight.

    Raises:
        TypeError: If a number is not static.
        ValueError: If the share is not in (0, 1], or the period is not positive.

    Example:
        >>> round(gated_update(0.5, reset=True), 3)
        1.38

    References:
        Unit Scaling: Blake, Orr, Luschi, ICML 2023, arXiv 2303.11257, weighted addition; derived
        here for gates. Cho et al., 2014, arXiv 1406.1078 (GRU); Zilly et al., 2017, arXiv
        1607.03474 (recurrent highway).
    """
    share = _checked(share, "gated_update")
    positive_sizes("gated_update", {"period": period})
    second = _second_moment()
    if not reset:
        return _solve(share, _MEAN - second, period)
    # What a gate multiplies is no longer normal, so that the candidate is a little smaller.
    weight = _solve(share * _MEAN**2 / second, _MEAN - second, period)
    return weight / math.sqrt(_reset_power(share))


def gated_sum(share: float = 0.5) -> float:
    """Return the weight of the candidate in `forget * state + input * weight * candidate`.

    Scaling:
        As `gated_update` with two independent logistic gates, whose product has mean 1/4: the
        weight that solves `weight^2 q + q + weight c / 2 = 1`.

    Args:
        share: Share of the candidate's argument that the hidden state contributes, in variance.

    Returns:
        The weight.

    Raises:
        TypeError: If the share is not a static real number.
        ValueError: If it is not in (0, 1].

    Example:
        >>> round(gated_sum(), 3)
        1.29

    References:
        Unit Scaling: Blake, Orr, Luschi, ICML 2023, arXiv 2303.11257, weighted addition; derived
        here for gates. Hochreiter, Schmidhuber, "Long Short-Term Memory", 1997.
    """
    return _solve(_checked(share, "gated_sum"), _MEAN**2, 1)


def recurrent_kernel(steps: int) -> Factors:
    """Return the factors of a weight that a recurrence uses at every step.

    Scaling:
        Forward 1; backward `steps^-1/2`, because the gradient sums that many contributions, each of
        them already scaled by `dense` for the batch. The weight is a cut edge. Assumes
        contributions of different steps to be independent.

    Args:
        steps: Number of steps.

    Returns:
        Factors with `bwd = (weight,)`.

    Raises:
        TypeError: If the number of steps is not a static integer.
        ValueError: If it is not positive.

    Example:
        >>> recurrent_kernel(16)
        Factors(fwd=1.0, bwd=(0.25,))

    References:
        Unit Scaling: Blake, Orr, Luschi, ICML 2023, arXiv 2303.11257, scaling factors of matmul.
    """
    positive_sizes("recurrent_kernel", {"steps": steps})
    return Factors(1.0, (1 / math.sqrt(steps),))


def _checked(share: float, rule: str) -> float:
    share = positive_number(rule, "share", share)
    if share > 1:
        raise ValueError(f"unitscale.rules.{rule}: share must be in (0, 1]; got {share}.")
    return share


def _second_moment() -> float:
    """E[sigmoid(x)^2] of a unit normal x."""
    return glu(jax.nn.sigmoid).fwd ** -2


@functools.lru_cache(maxsize=256)
def _reset_power(share: float) -> float:
    """E[tanh^2] where a gate multiplies the state's share of the argument, over a normal's."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    weights = weights / weights.sum()
    gate = 1 / (1 + np.exp(-nodes))
    variance = 1 - share + share * gate**2 / (weights @ gate**2)
    power = np.tanh(np.sqrt(variance)[:, None] * nodes) ** 2 @ weights
    return float(weights @ power / (np.tanh(nodes) ** 2 @ weights))


@functools.lru_cache(maxsize=256)
def _solve(share: float, cross: float, period: int) -> float:
    """The weight at which the stationary state has variance 1, by bisection."""
    second = _second_moment()
    low, high = 0.0, math.sqrt(1 / second - 1)
    for _ in range(_ROUNDS):
        weight = (low + high) / 2
        covariance = _covariance(weight, share, period)
        if second * (1 + weight**2) + 2 * weight * cross * covariance > 1:
            high = weight
        else:
            low = weight
    return low


def _covariance(weight: float, share: float, period: int) -> float:
    """Of the candidate and the state before it, for a state of variance 1."""
    lags = np.arange(_LAGS + 1)
    # E[tanh tanh] over its variance is a power series in the correlation of the arguments.
    kernel = correlation_kernel(jnp.tanh)[::-1]
    repeats = lags % period == 0
    decay = np.triu(_MEAN ** np.abs(lags[None, :] - lags[:, None]))
    state, covariances = _MEAN**lags, np.zeros(_LAGS + 1)
    for _ in range(_ROUNDS):
        candidates = np.where(repeats, np.polyval(kernel, share * state), 0.0)
        covariances = weight * _MEAN * (decay @ candidates)
        change = np.concatenate([[1.0], weight * _MEAN * covariances[1:]])
        state = np.clip(decay.T @ change, -1.0, 1.0)
    return float(covariances[1])
