"""Factors of dot-product attention, also for inputs that the layers below have correlated."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from ..core import check_choice
from ._elementwise import correlation_kernel, dropout
from ._linear import Constraint, Factors, check_sizes, constrain, positive_number
from ._residual import residual
from ._softmax import SoftmaxMoments, causal_softmax_moments, moments_by_size, softmax_moments

NormPlacement = Literal["pre", "post", "none"]
"""Position of the norm in an `AttentionContext`: before a branch, after the sum, or none."""

# Limits on groups of positions: groups of one position, further groups, groups per window, and
# windows (positions after the last window have the same statistics).
_SINGLE_POSITIONS, _GROUPS, _GROUPS_PER_WINDOW, _WINDOWS = 64, 96, 8, 32


def logit_factor(head_dim: int, mult: float = 1.0) -> float:
    """Return the factor on `q . k`: `mult / head_dim`.

    Scaling:
        `1 / d` instead of `d^-1/2` keeps logits bounded when q and k become correlated in training.
        For independent unit q and k the logits have standard deviation `mult * d^-1/2`.

    References:
        u-muP, arXiv 2407.17465, attention logits.
    """
    check_sizes("logit_factor", head_dim=head_dim)
    return positive_number("logit_factor", "mult", mult) / head_dim


def dot_product_attention(
    head_dim: int,
    key_length: int,
    *,
    is_causal: bool,
    keys_per_query: int | None = None,
    mult: float = 1.0,
    dropout_rate: float = 0.0,
    mean_square: float | None = None,
    constraint: Constraint = "to_output_scale",
) -> Factors:
    """Return the factors of `dropout(softmax(mult / d * q @ k.T)) @ v`, `bwd = (q, k, v)`.

    Scaling:
        For unit q, k and v the logits are normal with standard deviation `mult * d^-1/2`, and the
        mean square of the output is `E[sum p^2]` over the softmax weights p of a query. A query has
        `key_length` keys, or with a causal mask 1, 2, ..., key_length (averaged), but at most
        `keys_per_query`, the size of a window. The forward factor is the inverse root of the mean
        square, times `(1 - dropout_rate)^1/2`. Before the constraint, v has the same factor; the
        factor of q and k is 1 over the RMS of the softmax's gradient times the logits' standard
        deviation. Assumes as many queries as keys, and no mask except the causal one and the
        window. `mean_square` replaces `E[sum p^2]` if values are correlated (`AttentionContext`).

    References:
        u-muP, arXiv 2407.17465, unit-scaled dot-product attention, with the exact expectation in
        place of its empirical fit in log(sequence length).
    """
    check_sizes("dot_product_attention", head_dim=head_dim, key_length=key_length)
    spread = positive_number("dot_product_attention", "mult", mult) / math.sqrt(head_dim)
    keep = dropout(dropout_rate).fwd
    length = int(key_length)
    keys = min(length, length if keys_per_query is None else int(keys_per_query))
    moments = (causal_softmax_moments if is_causal else softmax_moments)(keys, spread)
    if is_causal and keys < length:  # the first queries see 1, 2, ..., keys, the others all keys
        share, full = keys / length, softmax_moments(keys, spread)
        pairs = zip(moments, full, strict=True)
        moments = SoftmaxMoments(*(share * one + (1 - share) * other for one, other in pairs))
    if mean_square is None:
        mean_square = moments.square
    values = keep / math.sqrt(positive_number("dot_product_attention", "mean_square", mean_square))
    slope = spread * math.sqrt(moments.gradient)
    logits = keep / slope if slope else values
    output, q, k, v = constrain(constraint, values, logits, logits, values)
    return Factors(output, (q, k, v))


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionContext:
    """The residual branches below an attention layer: attention, MLP, attention, MLP, ...

    Above the first layer, values at different positions are correlated, and averaging does not make
    their common part smaller. Factors for independent values would be several times too large.

    Scaling:
        Let `S` be the covariance matrix of the residual stream between positions, initially the
        identity, and `R` the same after a norm. Each branch of covariance `B` gives `S <- (tau^2 B
        + S) / (1 + tau^2)`. For attention, `B` is `A R A^T` divided by the mean of its diagonal,
        where `A` are the attention weights (on the diagonal, with their exact mean square). For the
        MLP, `B = E[f(x) f(y)]` for normal x and y with correlation `R`. The mean square of
        attention's output is the mean of the diagonal of `A R A^T`.

    Args:
        taus_below: Residual weights of the branches below, alternately attention and MLP; an even
            number. Empty for the first layer.
        activation: Activation of the MLPs, a scalar function such as `jax.nn.gelu`.
        gated: Whether the activation gates a second projection.
        mlp_mult: Multiplier of the activation's argument.
        norm_placement: "pre", "post" or "none". With "none" the result is only an estimate.

    Example:
        >>> for layer in range(3):
        ...     context = AttentionContext(taus_below=(0.5, 0.5) * layer)
        ...     print(round(context.mean_square(32, 128, is_causal=True), 3))
        0.043
        0.215
        0.37

    References:
        Mehler's formula (MLP); u-muP, arXiv 2407.17465 (attention and residual connections).
    """

    taus_below: tuple[float, ...] = ()
    activation: Callable[..., Any] = jax.nn.gelu
    gated: bool = False
    mlp_mult: float = 1.0
    norm_placement: NormPlacement = "pre"

    def __post_init__(self) -> None:
        positive_number("AttentionContext", "mlp_mult", self.mlp_mult)
        object.__setattr__(self, "taus_below", tuple(map(float, self.taus_below)))
        if len(self.taus_below) % 2:
            raise ValueError(
                "unitscale.rules.AttentionContext: taus_below must hold one tau for each attention "
                f"and MLP branch below, an even number; got {len(self.taus_below)}"
            )
        name = "unitscale.rules.AttentionContext"
        check_choice(name, "norm_placement", self.norm_placement, NormPlacement)

    def mean_square(
        self,
        head_dim: int,
        key_length: int,
        *,
        is_causal: bool,
        keys_per_query: int | None = None,
        mult: float = 1.0,
    ) -> float:
        """Return the argument `mean_square` of `dot_product_attention`, from its other arguments.

        Assumes that the attention layers below have the same arguments. `keys_per_query` is used
        only with a causal mask.
        """
        name = "AttentionContext.mean_square"
        check_sizes(name, head_dim=head_dim, key_length=key_length)
        spread = positive_number(name, "mult", mult) / math.sqrt(head_dim)
        length = int(key_length)
        keys = min(length, length if keys_per_query is None else int(keys_per_query))
        attention = _Attention(length, bool(is_causal), spread, keys)
        return attention.mean(attention(_normalize(_stream(self, attention))).variance)


class _Covariance(NamedTuple):
    """Covariance between positions, by group: `pair` of two positions, `variance` of one."""

    pair: np.ndarray
    variance: np.ndarray


class _Attention(NamedTuple):
    """Maps the covariance of values at all positions to the covariance of attention's outputs."""

    length: int
    is_causal: bool
    spread: float
    keys_per_query: int  # at most; with a causal mask

    def __call__(self, values: _Covariance) -> _Covariance:
        groups = _groups(self)
        own = values.variance - np.diag(values.pair)
        counts = np.outer(groups.count, groups.count)
        pair = groups.seen @ values.pair @ groups.seen.T / counts
        variance = np.diag(pair) + groups.square * (groups.seen @ own) / groups.count
        # Sum `own` over the positions that two queries both attend to.
        total = np.concatenate([[0.0], np.cumsum(groups.size * own)])
        first = np.maximum.outer(groups.first, groups.first)
        last = np.maximum(np.minimum.outer(groups.last, groups.last), first)
        shared = np.interp(last, groups.edge, total) - np.interp(first, groups.edge, total)
        return _Covariance(pair + shared / counts, variance)

    def mean(self, x: np.ndarray) -> float:
        """Average x over all positions; those beyond the last group are like those in it."""
        size = _groups(self).size.copy()
        size[-1] += self.length - size.sum()
        return float(x @ size / self.length)


class _Groups(NamedTuple):
    """Groups of neighboring positions with similar statistics, and the keys they attend to."""

    edge: np.ndarray  # positions before each group, and before the end
    size: np.ndarray
    first: np.ndarray  # a query attends to positions above `first`, up to `last`
    last: np.ndarray
    seen: np.ndarray  # number of positions of each group (columns) that a query attends to
    count: np.ndarray  # of all groups
    square: np.ndarray  # mean square of the attention weights


@functools.lru_cache(maxsize=64)
def _groups(attention: _Attention) -> _Groups:
    length, window = attention.length, attention.keys_per_query
    edge = np.array([0, length])  # without a causal mask all positions have the same statistics
    if attention.is_causal:
        # Sizes are 1 at first, and grow up to a part of the window.
        length = min(length, _WINDOWS * window)
        single = np.arange(min(length, _SINGLE_POSITIONS) + 1)
        later = np.round(np.geomspace(single[-1], length, _GROUPS)).astype(int)
        even = np.arange(single[-1], length, max(1, window // _GROUPS_PER_WINDOW))
        edge = np.unique(np.concatenate([single, later, even]))
    size = np.diff(edge).astype(np.float64)
    last, first = np.full(size.size, float(length)), np.zeros(size.size)
    if attention.is_causal:
        # A query attends to itself and, on average, half of the others in its group.
        last = edge[:-1] + (size + 1) / 2
        first = np.maximum(last - window, 0)
    upto, before = (np.clip(x[:, None] - edge[:-1], 0, size) for x in (last, first))
    seen = upto - before
    square, _ = moments_by_size(seen.sum(1), attention.spread)
    return _Groups(edge, size, first, last, seen, seen.sum(1), square)


@functools.lru_cache(maxsize=128)
def _stream(context: AttentionContext, attention: _Attention) -> _Covariance:
    """Return the covariance of the residual stream above all branches of a context."""
    if not context.taus_below:
        groups = _groups(attention).size.size
        return _Covariance(np.zeros((groups, groups)), np.ones(groups))
    *below, attention_tau, mlp_tau = context.taus_below
    stream = _stream(dataclasses.replace(context, taus_below=tuple(below)), attention)
    attended = attention(_normalize(stream) if context.norm_placement == "pre" else stream)
    # The layer's factor makes its output unit on average.
    unit = attention.mean(attended.variance)
    attended = _Covariance(attended.pair / unit, attended.variance / unit)
    stream = _add_branch(context, stream, attended, attention_tau)
    return _add_branch(context, stream, _mlp(context, stream), mlp_tau)


def _add_branch(
    context: AttentionContext, skip: _Covariance, branch: _Covariance, tau: float
) -> _Covariance:
    weights = residual(tau)
    total = _Covariance(
        *(weights.branch**2 * b + weights.skip**2 * s for b, s in zip(branch, skip, strict=True))
    )
    return _normalize(total) if context.norm_placement == "post" else total


def _normalize(x: _Covariance) -> _Covariance:
    rms = np.sqrt(x.variance)
    return _Covariance(x.pair / np.outer(rms, rms), np.ones_like(rms))


def _mlp(context: AttentionContext, stream: _Covariance) -> _Covariance:
    inputs = _normalize(stream)
    kernel = correlation_kernel(context.activation, float(context.mlp_mult))
    if context.gated:
        kernel = np.concatenate([[0.0], kernel]) / kernel.sum()
    size = np.sqrt(stream.variance) if context.norm_placement == "none" else inputs.variance
    pair, variance = (np.polynomial.polynomial.polyval(r, kernel) for r in inputs)
    return _Covariance(pair * np.outer(size, size), variance * size**2)
