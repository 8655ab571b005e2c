"""Factors of sums: additions, residual connections and gates; learning rates of u-muP."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ..core import check_choice
from ._elementwise import correlation_kernel, glu
from ._linear import Constraint, Factors, check_sizes, constrain, positive_number, real_number

ResidualScheme: TypeAlias = Literal["fixed", "running_mean", "depth"]
"""How `residual_taus` computes the tau of each branch."""

ROLES = ("weight", "bias", "norm", "readout", "embedding")
"""Roles of parameters, for `umup_learning_rate` and `unitscale.nn.Policy`."""

_MEAN_GATE = 0.5  # mean of the logistic function of a unit normal
_LAGS = 48  # number of past updates to include; older ones have weights below 2^-48
_ITERATIONS = 64


def add(
    *, left_repeats: int = 1, right_repeats: int = 1, constraint: Constraint = "to_output_scale"
) -> Factors:
    """Return the factors of `left + right`, with `bwd = (left, right)`.

    Scaling:
        The forward factor is `2^-1/2`. Before the constraint, a gradient has `repeats^-1/2`,
        because it sums that many cotangents. The constraint includes broadcast operands, because
        they need not be cut edges, as in `x + mean(x)`.

    References:
        Unit Scaling, arXiv 2303.11257, weighted addition.
    """
    check_sizes("add", left_repeats=left_repeats, right_repeats=right_repeats)
    output, left, right = constrain(
        constraint, math.sqrt(0.5), 1 / math.sqrt(left_repeats), 1 / math.sqrt(right_repeats)
    )
    return Factors(output, (left, right))


def weighted_add(weights: Sequence[float]) -> Factors:
    """Return the factors of `sum(w * x)`, with one (equal) backward factor per operand.

    Scaling:
        All factors are `1 / norm(weights)`. Gradients are exact, because each is also multiplied by
        its operand's weight. Assumes independent unit operands.

    References:
        Unit Scaling, arXiv 2303.11257, weighted addition.
    """
    weights = tuple(real_number("weighted_add", f"weights[{i}]", w) for i, w in enumerate(weights))
    size = math.hypot(*weights)
    if not (math.isfinite(size) and size > 0):
        raise ValueError(
            f"unitscale.rules.weighted_add: weights must be finite and not all zero; got {weights}."
        )
    return Factors(1 / size, (1 / size,) * len(weights))


def normalized_weights(weights: Sequence[float]) -> tuple[float, ...]:
    """Return the weights divided by their norm. Arguments and errors are as in `weighted_add`."""
    factor = weighted_add(weights).fwd
    return tuple(float(weight) * factor for weight in weights)


@dataclass(frozen=True)
class ResidualFactors:
    """The two weights of a residual sum, floats or arrays, whose squares sum to 1."""

    branch: Any
    skip: Any


def residual(tau: float) -> ResidualFactors:
    """Return the weights of `(tau * branch + skip) / (1 + tau^2)^1/2`.

    Scaling:
        The weights are `tau / (1 + tau^2)^1/2` for the branch and `1 / (1 + tau^2)^1/2` for the
        skip connection, both assumed independent and unit. The backward pass multiplies by them
        where the stream splits, not where it joins: the total gradient stays exact, and gradients
        inside the branch are unit.

    References:
        Unit Scaling, arXiv 2303.11257, weighted addition; u-muP, arXiv 2407.17465, appendix G.
    """
    tau = positive_number("residual", "tau", tau)
    length = math.hypot(1.0, tau)
    return ResidualFactors(branch=tau / length, skip=1 / length)


def residual_taus(
    scheme: ResidualScheme,
    num_branches: int,
    *,
    tau: float = 0.5,
    mult: float = 1.0,
    attn_ratio: float = 1.0,
) -> tuple[float, ...]:
    """Return the tau of every residual branch of a network, first to last.

    Scaling:
        `fixed`: `tau` for all. `running_mean`: `tau_l^2 = 1 / l` for l = 1..L, so that the
        embedding and all branches contribute equally.

        `depth`: branches alternate between attention and MLP. Let `a_mlp^2 = 2 mult^2 /
        (attn_ratio^2 + 1)`, `a_attn^2 = attn_ratio^2 a_mlp^2` and `k = floor((l - 1) / 2)`. Then
        `tau_l^2 = a_attn^2 / (L/2 + k a_attn^2 + k a_mlp^2)` for odd l and `tau_l^2 = a_mlp^2 /
        (L/2 + (k + 1) a_attn^2 + k a_mlp^2)` for even l. The embedding, each attention branch and
        each MLP branch contribute to the final variance in the ratio `L/2 : a_attn^2 : a_mlp^2`.

    Args:
        scheme: "fixed", "running_mean" or "depth".
        num_branches: Number L of residual branches: twice the number of transformer layers.
        tau: Weight of every branch relative to the skip connection; only for "fixed".
        mult: Weight of all branches together relative to the embedding; only for "depth".
        attn_ratio: Weight of attention branches relative to MLP branches; only for "depth".

    References:
        Unit Scaling, arXiv 2303.11257, residual schemes; u-muP, arXiv 2407.17465, appendix G.
    """
    check_choice("unitscale.rules.residual_taus", "scheme", scheme, ResidualScheme)
    check_sizes("residual_taus", num_branches=num_branches)
    tau = positive_number("residual_taus", "tau", tau)
    mult = positive_number("residual_taus", "mult", mult)
    attn_ratio = positive_number("residual_taus", "attn_ratio", attn_ratio)
    if scheme == "fixed":
        return (tau,) * num_branches
    if scheme == "running_mean":
        return tuple(1 / math.sqrt(branch) for branch in range(1, num_branches + 1))
    mlp = 2 * mult**2 / (attn_ratio**2 + 1)
    attn = attn_ratio**2 * mlp
    taus, before = [], num_branches / 2
    for index in range(num_branches):
        own = mlp if index % 2 else attn
        taus.append(math.sqrt(own / before))
        before += own
    return tuple(taus)


def umup_learning_rate(
    role: str,
    *,
    fan_in: int,
    fan_out: int,
    depth: int = 1,
    optimizer: str = "adam",
    readout_constraint: str | None = None,
) -> float:
    """Return the factor of a parameter's learning rate.

    Scaling:
        weight: `fan_in^-1/2`; embedding: `fan_out^-1/2`; readout, bias and norm: 1. All are
        multiplied by `depth^-1/2`, where depth is the number of residual branches in the stack that
        contains the parameter (1 outside a stack). The best global learning rate then does not
        change with width or depth, for weights of unit variance and updates of unit size: those of
        "adam" (use it for Lion too), or of "sgd" with unit-scaled gradients.

        "muon": weights have `min(1, fan_out / fan_in)^1/2`, the other roles Adam's factors. An
        orthogonalized update of RMS 1 has the spectral norm `max(fan_in, fan_out)^1/2`. A kernel W
        of unit variance acts as `fan_in^-1/2 W`. Its updates should have a spectral norm in
        proportion to `fan_out^1/2`, as those of Adam do once they are aligned.

        With SGD and a readout constrained `to_output_scale`, the readout's input gradient has the
        factor `width^-1`, and so do all gradients before it. Learning rates of these parameters are
        therefore multiplied by their width: weights have `fan_in^1/2`, embeddings `fan_out^1/2`,
        biases and norms `fan_out`. Do not pass `readout_constraint` for the readout's own bias.

    References:
        u-muP, arXiv 2407.17465, table 2 (learning rates) and appendix G (depth); unit-scaling,
        `optim.py` (SGD and the readout's constraint). Muon: Yang et al., 2023, arXiv 2310.17813
        (spectral condition); Qiu et al., 2025, arXiv 2512.05620. Lion: Chen et al., 2023, arXiv
        2302.06675.
    """
    where = "unitscale.rules.umup_learning_rate"
    check_sizes("umup_learning_rate", fan_in=fan_in, fan_out=fan_out, depth=depth)
    check_choice(where, "role", role, ROLES)
    check_choice(where, "optimizer", optimizer, ("adam", "sgd", "muon"))
    check_choice(where, "readout_constraint", readout_constraint, (None, "to_output_scale"))
    if optimizer == "muon" and role == "weight":
        return math.sqrt(min(1, fan_out / fan_in) / depth)
    fan = {"weight": fan_in, "embedding": fan_out}.get(role, 1)
    width = 1
    if optimizer == "sgd" and readout_constraint is not None and role != "readout":
        width = fan_in if role == "weight" else fan_out
    return width / math.sqrt(fan * depth)


def gated_update(share: float = 0.5, *, reset: bool = False, period: int = 1) -> float:
    """Return the weight of the candidate in `gate * state + (1 - gate) * weight * candidate`.

    A factor on the whole state would be applied again at every step; only this weight is free.

    Scaling:
        The weight gives the stationary state variance 1, for a logistic gate of a unit normal and a
        unit tanh candidate. It solves `weight^2 q + q + 2 weight (1/2 - q) c = 1` with `q =
        E[sigmoid^2]`. The covariance c of candidate and state is not 0, because the same kernel is
        applied to a slowly changing state at each step. Let `R(k)` be the autocorrelation of the
        state, and K the map from the correlation of two normals to that of their tanh (Mehler). The
        equations `R_n(k) = K(share R(k))`, `S(k) = weight / 2 * sum_j 2^-j R_n(k + j)`, `R(k) =
        weight / 2 * S(k) + R(k - 1) / 2` and `c = S(1)` are solved together. Assumes wide layers,
        and inputs and gates that are independent over time.

    Args:
        share: Fraction of the variance of the candidate's argument that comes from the state.
        reset: Whether a second gate multiplies the state in the candidate's argument (GRU).
        period: Number of updates after which the same kernel is used again (the depth of a
            recurrent highway cell).

    References:
        Unit Scaling, arXiv 2303.11257, weighted addition; derived here for gates. Cho et al., 2014,
        arXiv 1406.1078 (GRU); Zilly et al., 2017, arXiv 1607.03474 (recurrent highway).
    """
    share = _check_share("gated_update", share)
    check_sizes("gated_update", period=period)
    second = glu(jax.nn.sigmoid).fwd ** -2
    if not reset:
        return _unit_state_weight(share, _MEAN_GATE - second, period)
    # The reset gate makes the candidate's argument non-normal, and the candidate a little smaller.
    weight = _unit_state_weight(share * _MEAN_GATE**2 / second, _MEAN_GATE - second, period)
    return weight / math.sqrt(_reset_power(share))


def gated_sum(share: float = 0.5) -> float:
    """Return the weight of the candidate in `forget * state + input * weight * candidate`.

    Scaling:
        As in `gated_update`, with two independent logistic gates, whose product has mean 1/4: the
        weight solves `weight^2 q + q + weight c / 2 = 1`. `share` refers to the hidden state.

    References:
        Unit Scaling, arXiv 2303.11257, weighted addition; derived here for gates. Hochreiter,
        Schmidhuber, "Long Short-Term Memory", 1997.
    """
    return _unit_state_weight(_check_share("gated_sum", share), _MEAN_GATE**2, 1)


def _check_share(rule: str, share: float) -> float:
    share = positive_number(rule, "share", share)
    if share > 1:
        raise ValueError(f"unitscale.rules.{rule}: share must be in (0, 1]; got {share}.")
    return share


@functools.lru_cache(maxsize=256)
def _reset_power(share: float) -> float:
    """Return E[tanh^2] with a reset gate, divided by E[tanh^2] without one."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    weights = weights / weights.sum()
    gate = 1 / (1 + np.exp(-nodes))
    variance = 1 - share + share * gate**2 / (weights @ gate**2)
    power = np.tanh(np.sqrt(variance)[:, None] * nodes) ** 2 @ weights
    return float(weights @ power / (np.tanh(nodes) ** 2 @ weights))


@functools.lru_cache(maxsize=256)
def _unit_state_weight(share: float, cross: float, period: int) -> float:
    """Return the weight at which the stationary state has variance 1, by bisection."""
    second = glu(jax.nn.sigmoid).fwd ** -2
    # The correlation of tanh x and tanh y is a power series in the correlation of x and y.
    kernel = correlation_kernel(jnp.tanh)[::-1]
    lags = np.arange(_LAGS + 1)
    decay = np.triu(_MEAN_GATE ** np.abs(lags[None, :] - lags[:, None]))

    def covariance(weight: float) -> float:
        """Return the covariance of the candidate and the state before it (variance 1)."""
        state, covariances = _MEAN_GATE**lags, np.zeros(_LAGS + 1)
        for _ in range(_ITERATIONS):
            candidates = np.polyval(kernel, share * state)
            covariances = (
                weight * _MEAN_GATE * (decay @ np.where(lags % period == 0, candidates, 0.0))
            )
            change = np.concatenate([[1.0], weight * _MEAN_GATE * covariances[1:]])
            state = np.clip(decay.T @ change, -1.0, 1.0)
        return float(covariances[1])

    low, high = 0.0, math.sqrt(1 / second - 1)
    for _ in range(_ITERATIONS):
        weight = (low + high) / 2
        if second * (1 + weight**2) + 2 * weight * cross * covariance(weight) > 1:
            high = weight
        else:
            low = weight
    return low
