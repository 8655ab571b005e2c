"""The primitive of norms: what is subtracted from activations, and what they are divided by.

Narrow in, wide inside, narrow out, as `wide_op`. Beside the operands the statistics are kept for
the backward: the gradient of the input then takes two averages of each row, and those of gain and
bias, sums over rows, read every row once.
"""

import dataclasses
import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..core import custom_vjp, narrow, round_to_pow2, widen


class Statistics(NamedTuple):
    """What is subtracted, and what the rest is multiplied by.

    Example:
        >>> Standardize(0.0).statistics(jnp.zeros(1), None, jnp.zeros(1), jnp.ones(1)).inverse
        Array([1.], dtype=float32)
    """

    mean: jax.Array | None
    inverse: jax.Array
    scale: jax.Array | None = None  # of data whose values the mean is one of


@dataclasses.dataclass(frozen=True)
class Normalize:
    """``(x - mean) / sqrt(var + eps / scale^2)``, the mean only if centered.

    Data is normalized, not the value: dividing eps by scale^2 gives the same result, without a
    product that could leave the range. With ``groups``, the last axis is divided into them before
    ``axes`` are averaged over.

    Example:
        >>> how, x = Normalize(0.0, centered=True), jnp.array([[1.0, 3.0]])
        >>> print(how.apply(x, how.statistics(x, None)))
        [[-1.  1.]]
    """

    eps: float
    centered: bool
    axes: tuple[int, ...] = (-1,)
    groups: int | None = None

    def statistics(self, x: jax.Array, scale: jax.Array | None) -> Statistics:
        """Those of ``x``, computed once: else XLA does so again in everything that reads them."""
        data, mean = self._grouped(x), None
        x = widen(data)
        if self.groups is not None and scale is not None and scale.ndim:
            scale = scale[..., None]
        average = partial(jnp.mean, axis=self.axes, keepdims=True)
        if not self.centered:
            square = average(jnp.square(x))
        elif self.axes == (-1,):
            mean, square = _moments(data)
        else:
            mean = average(x)
            square = average(jnp.square(x - mean))
        return lax.optimization_barrier(Statistics(mean, _inverse_root(square, self.eps, scale)))

    def apply(self, x: jax.Array, statistics: Statistics) -> jax.Array:
        """Returns x normalized."""
        return _standardized(self._grouped(x), statistics).reshape(x.shape)

    def gradient(self, dy: jax.Array, y: jax.Array, statistics: Statistics) -> jax.Array:
        """That by x, of the cotangent of ``y = apply(x)``."""
        dy, shape = self._grouped(dy), dy.shape
        y = self._grouped(y)
        along = y * jnp.mean(dy * y, axis=self.axes, keepdims=True)
        if self.centered:
            along = along + jnp.mean(dy, axis=self.axes, keepdims=True)
        return ((dy - along) * statistics.inverse).reshape(shape)

    def _grouped(self, x: jax.Array) -> jax.Array:
        *rows, features = x.shape
        if self.groups is None:
            return x
        return x.reshape(*rows, self.groups, features // self.groups)


def _moments(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean and variance of each row, which is read once.

    Both of the distance from the row's first entry: as that is one of n entries, its own distance
    from the mean is at most n^1/2 standard deviations, and what the difference of squares loses is
    at most n roundings of the variance.
    """
    first, x = widen(x[..., :1]), widen(x)
    mean = jnp.mean(x - first, -1, keepdims=True)
    square = jnp.mean(jnp.square(x - first), -1, keepdims=True)
    return first + mean, jnp.maximum(square - jnp.square(mean), 0)


def _inverse_root(square: jax.Array, eps: float, scale: jax.Array | None) -> jax.Array:
    """Returns (square + eps / scale^2)^-1/2.

    A constant where the square is 0, so that a derivative beyond the range is not multiplied by 0.
    """
    scale = jnp.ones((), square.dtype) if scale is None else scale.astype(square.dtype)
    root = math.sqrt(eps)
    is_zero = square == 0
    # The square of eps^1/2 / scale would leave the range at scales below 2^-64 eps^1/2.
    unit = jnp.clip(round_to_pow2(root / scale), 1, 2.0**126).astype(square.dtype)
    share = jnp.where(is_zero, 1, square) / unit / unit
    inverse = lax.rsqrt(share + jnp.square(root / scale / unit)) / unit
    return jnp.where(is_zero, scale / root, inverse)


@dataclasses.dataclass(frozen=True)
class Standardize:
    """``(x - mean) / sqrt(var + eps)`` of values, with a given mean and variance.

    Example:
        >>> how, x = Standardize(0.0), jnp.array([[1.0, 3.0]])
        >>> print(how.apply(x, how.statistics(x, 2.0, jnp.zeros(2), jnp.full(2, 4.0))))
        [[1. 3.]]
    """

    eps: float

    def statistics(self, x: jax.Array, scale: Any, mean: jax.Array, var: jax.Array) -> Statistics:
        """Those that are given."""
        return Statistics(mean, lax.rsqrt(var + self.eps), scale)

    def apply(self, x: jax.Array, statistics: Statistics) -> jax.Array:
        """Returns x normalized."""
        return _standardized(x, statistics)

    def gradient(self, dy: jax.Array, y: jax.Array, statistics: Statistics) -> jax.Array:
        """That by x, of the cotangent of ``y = apply(x)``."""
        dx = dy * statistics.inverse
        return dx if statistics.scale is None else dx * statistics.scale


def _standardized(x: jax.Array, statistics: Statistics) -> jax.Array:
    mean, inverse, scale = statistics
    x = x if scale is None else x * scale
    return (x if mean is None else x - mean) * inverse


class Affine(NamedTuple):
    """Gain and bias, or what stands beside them: their scales, their gradients.

    Example:
        >>> print(Affine(bias=jnp.ones(2)).apply(jnp.zeros((1, 2)), Affine(bias=4.0)))
        [[4. 4.]]
    """

    gain: Any = None
    bias: Any = None

    def apply(self, y: jax.Array, scales: "Affine") -> jax.Array:
        """Returns y times the gain plus the bias."""
        leading = tuple(range(y.ndim - 1))
        gain, bias = (
            None if p is None else jnp.expand_dims(p if s is None else p * s, leading)
            for p, s in zip(self, scales, strict=True)
        )
        y = y if gain is None else y * gain
        return y if bias is None else y + bias


@partial(custom_vjp, nondiff_argnums=(0, 1, 2))
def normalized(how, factors, out_dtype, x, affine, constants):
    """Normalizes ``x``, and multiplies and adds what ``affine`` has.

    Args:
        how: `Normalize` or `Standardize`.
        factors: static factors, of `rules.norm`.
        out_dtype: of the result.
        x: data, floating.
        affine: data of gain and bias.
        constants: scale of x; scales of ``affine``; statistics that are given to `Standardize`.
            They have no gradient.

    Example:
        >>> from unitscale import rules
        >>> constants = None, Affine(), ()
        >>> how, x = Normalize(1e-6, centered=True), jnp.array([[1.0, 3.0]])
        >>> print(normalized(how, rules.norm(2, 2), x.dtype, x, Affine(), constants).round(3))
        [[-1.  1.]]
    """
    return _normalized_fwd(how, factors, out_dtype, x, affine, constants)[0]


def _normalized_fwd(how, factors, out_dtype, x, affine, constants):
    scale, scales, given = constants
    wide = widen(x)
    statistics = how.statistics(x, scale, *given)
    y = jax.tree.map(widen, affine).apply(how.apply(wide, statistics), scales)
    return narrow(_times(y, factors.fwd), out_dtype), (x, affine, constants, statistics)


def _normalized_bwd(how, factors, out_dtype, residuals, cotangent):
    x, affine, constants, statistics = residuals
    _, scales, _ = constants
    y = how.apply(widen(x), statistics)
    _, vjp = jax.vjp(lambda y, affine: affine.apply(y, scales), y, jax.tree.map(widen, affine))
    dy, daffine = vjp(widen(cotangent))
    dx = how.gradient(dy, y, statistics)
    dx, *daffine = (
        None if gradient is None else narrow(_times(gradient, factor), own.dtype)
        for own, factor, gradient in zip((x, *affine), factors.bwd, (dx, *daffine), strict=True)
    )
    return dx, Affine(*daffine), jax.tree.map(jnp.zeros_like, constants)


normalized.defvjp(_normalized_fwd, _normalized_bwd)


def _times(x: jax.Array, factor: float) -> jax.Array:
    return x if factor == 1 else x * factor
