"""What the layers below an attention layer do to it.

`rules.dot_product_attention` takes the values at different positions as independent. In the first
layer of a stack they are. Every layer above averages values over positions, and its non-linear
functions have means, so that tokens come to share a component. Averaging does not shrink what is
shared: a factor made for independent values is then several times too large. How much tokens
share follows from the architecture alone, through the covariance of positions, layer by layer.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from ._checks import positive_number, positive_sizes
from ._hermite import correlation_kernel
from ._residual import residual
from ._softmax_moments import moments_by_size

NormPlacement = Literal["pre", "post", "none"]
"""Where a branch of an `AttentionContext` has its norm: before it, after the sum, or nowhere."""

_SINGLE_POSITIONS = 64
_GROUPS = 96


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionContext:
    """The residual branches below an attention layer: attention, MLP, attention, MLP, ...

    Scaling:
        Let `S` be the covariance of the residual stream at two positions, at first the identity,
        and `R` the same after a norm. A branch adds its own, `S <- (tau^2 B + S) / (1 + tau^2)`:
        attention `B = A R A^T` over its mean diagonal, with `A` the averaging weights (for a causal
        query at t, `1 / t` for every key it sees; on the diagonal their mean square is exact), and
        the MLP `B = E[f(x) f(y)]` for normal x and y correlated as `R` says. The mean square of
        attention's output is then the mean diagonal of `A R A^T`, and its factor the inverse root.

    Args:
        taus_below: Residual weights of the branches below, alternately attention and MLP; an even
            number. Empty for the first layer.
        activation: The MLPs' function from a scalar to a scalar, as `jax.nn.gelu`.
        gated: Whether the activation gates a second projection.
        mlp_mult: Multiplier of the activation's argument.
        norm_placement: "pre", "post" or "none". Without norms it is an estimate: an MLP is taken to
            scale with its input, and larger keys to be attended to no more than others.

    Raises:
        ValueError: If mlp_mult is not positive, norm_placement unknown, or the number of taus odd.

    Example:
        >>> for layer in range(3):
        ...     context = AttentionContext(taus_below=(0.5, 0.5) * layer)
        ...     print(round(context.mean_square(32, 128, is_causal=True), 3))
        0.043
        0.215
        0.37

    References:
        Mehler's formula for the MLP; the rest is a consequence of the rules for attention (u-muP:
        Blake et al., 2024, arXiv 2407.17465) and residual branches.
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
        if self.norm_placement not in ("pre", "post", "none"):
            raise ValueError(
                "unitscale.rules.AttentionContext: norm_placement must be pre, post or none; got "
                f"{self.norm_placement!r}"
            )

    def mean_square(
        self, head_dim: int, key_length: int, *, is_causal: bool, mult: float = 1.0
    ) -> float:
        """Return the mean square of the attention average of unit values in this context.

        The attention layers below are taken to be like this one.

        Args:
            head_dim: Size d of a head.
            key_length: Number of positions.
            is_causal: Whether query t sees only keys 1..t.
            mult: Multiplier of the logits.

        Returns:
            The mean over all positions, which `dot_product_attention` takes as its `mean_square`.

        Raises:
            TypeError: If a size is not a static integer.
            ValueError: If a size or mult is not positive.
        """
        name = "AttentionContext.mean_square"
        positive_sizes(name, {"head_dim": head_dim, "key_length": key_length})
        spread = positive_number(name, "mult", mult) / math.sqrt(head_dim)
        attention = _Attention(int(key_length), bool(is_causal), spread)
        return attention.mean(attention(_normalize(_stream(self, attention))).variance)


class _Covariance(NamedTuple):
    """Of positions: `pair[c, d]` of two different ones in groups c and d, `variance[c]` of one."""

    pair: np.ndarray
    variance: np.ndarray


class _Attention(NamedTuple):
    """Averages over positions: from the covariance of the values to that of the averages."""

    length: int
    is_causal: bool
    spread: float

    @property
    def sizes(self) -> np.ndarray:
        """Positions in each group. Without a causal mask every position is as any other."""
        return _groups(self.length) if self.is_causal else np.array([float(self.length)])

    def __call__(self, values: _Covariance) -> _Covariance:
        count, square, earlier = _keys(self)
        own = values.variance - np.diag(values.pair)
        pair = self._seen(self._seen(values.pair).T) / np.outer(count, count)
        seen = self._seen(own)
        variance = np.diag(pair) + square * seen / count
        # Two queries meet where both see the same position: all that the earlier one sees.
        return _Covariance(pair + seen[earlier] / np.outer(count, count), variance)

    def _seen(self, x: np.ndarray) -> np.ndarray:
        """The sum of x over the positions that a query of each group sees."""
        size = self.sizes.reshape(-1, *(1,) * (x.ndim - 1))
        if not self.is_causal:
            return np.broadcast_to((size * x).sum(0), x.shape)
        # Of its own group a position sees, on average, half of the others and itself.
        return np.cumsum(size * x, 0) - (size - 1) / 2 * x

    def mean(self, x: np.ndarray) -> float:
        """The mean over all positions."""
        size = self.sizes
        return float(x @ size / size.sum())


@functools.lru_cache(maxsize=64)
def _keys(attention: _Attention) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """How many keys a query of each group sees, their weights' mean square, and the earlier group.

    The last is the index of the earlier of two groups.
    """
    groups = np.arange(attention.sizes.size)
    count = attention._seen(np.ones(groups.size))
    square, _ = moments_by_size(count, attention.spread)
    return count, square, np.minimum.outer(groups, groups)


@functools.lru_cache(maxsize=64)
def _groups(length: int) -> np.ndarray:
    """Sizes of groups of neighbours treated alike: 1 for the first, then growing geometrically."""
    first = np.arange(min(length, _SINGLE_POSITIONS) + 1)
    later = np.round(np.geomspace(first[-1], length, _GROUPS)).astype(int)
    return np.diff(np.unique(np.concatenate([first, later]))).astype(np.float64)


@functools.lru_cache(maxsize=128)
def _stream(context: AttentionContext, attention: _Attention) -> _Covariance:
    """The covariance of the residual stream above all branches of a context."""
    if not context.taus_below:
        groups = attention.sizes.size
        return _Covariance(np.zeros((groups, groups)), np.ones(groups))
    *below, attention_tau, mlp_tau = context.taus_below
    stream = _stream(dataclasses.replace(context, taus_below=tuple(below)), attention)
    attended = attention(_normalize(stream) if context.norm_placement == "pre" else stream)
    # What the layer's own factor makes of it: unit on average.
    unit = attention.mean(attended.variance)
    attended = _Covariance(attended.pair / unit, attended.variance / unit)
    stream = _add(context, stream, attended, attention_tau)
    return _add(context, stream, _mlp(context, stream), mlp_tau)


def _add(
    context: AttentionContext, skip: _Covariance, branch: _Covariance, tau: float
) -> _Covariance:
    weights = residual(tau)
    total = _Covariance(
        *(weights.branch**2 * b + weights.skip**2 * s for b, s in zip(branch, skip, strict=True))
    )
    return _normalize(total) if context.norm_placement == "post" else total


def _normalize(x: _Covariance) -> _Covariance:
    """After a norm: the correlation."""
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
