"""Pooling, channels last, of any rank."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import rules
from ..core import ScaledArray
from ..rules import Constraint, Factors
from ._conv import Padding, per_axis, sides
from ._operands import ArrayLike, output_dtype, shape_error, unpack, unpack_uniform
from ._wide import wide_op


@dataclasses.dataclass(frozen=True)
class _Windows:
    """Windows over the dimensions before the last: a hashable function of an array."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    padding: str | tuple[tuple[int, int], ...]

    def reduce(self, x: jax.Array, init: float, f: Callable[..., jax.Array]) -> jax.Array:
        leading = (1,) * (x.ndim - len(self.shape) - 1)
        pads = self.pads(x.shape)
        return lax.reduce_window(
            x,
            init,
            f,
            (*leading, *self.shape, 1),
            (*leading, *self.strides, 1),
            ((0, 0),) * len(leading) + pads + ((0, 0),),
        )

    def pads(self, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        spatial = shape[-1 - len(self.shape) : -1]
        if isinstance(self.padding, str):
            return tuple(lax.padtype_to_pads(spatial, self.shape, self.strides, self.padding))
        return self.padding


@dataclasses.dataclass(frozen=True)
class _Mean(_Windows):
    count_padding: bool

    def __call__(self, x: jax.Array) -> jax.Array:
        total = self.reduce(x, 0.0, lax.add)
        return total / (math.prod(self.shape) if self.count_padding else self.counts(x.shape))

    def counts(self, shape: tuple[int, ...]) -> np.ndarray:
        """Entries of each window that are no padding; 1 where all are, whose mean is then 0."""
        spatial = shape[-1 - len(self.shape) : -1]
        each = []
        for size, window, stride, (low, high) in zip(
            spatial, self.shape, self.strides, self.pads(shape), strict=True
        ):
            start = np.arange(0, low + size + high - window + 1, stride) - low
            each.append(np.clip(np.minimum(start + window, size) - np.maximum(start, 0), 0, None))
        whole = reduce(np.multiply.outer, each)
        leading = (1,) * (len(shape) - len(self.shape) - 1)
        return np.maximum(whole, 1).astype(np.float32).reshape(*leading, *whole.shape, 1)


class _Maximum(_Windows):
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.reduce(x, -jnp.inf, lax.max)


def avg_pool(
    x: ArrayLike,
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: Padding = "VALID",
    count_include_pad: bool = True,
    *,
    constraint: Constraint = "to_output_scale",
) -> ScaledArray:
    """Takes the mean over windows, as `flax.linen.avg_pool`, scaled to unit variance.

    Scaling:
        data = n^1/2 * mean of x.data, n = prod(window), scale = x.scale. Before the constraint dx
        has factor (n * prod(strides))^1/2. Computed in float32, rounded once. See
        `rules.avg_pool`. Entries are taken as independent: the mean of entries that agree, as of
        neighbours in an image, is larger.

    Args:
        x: (..., *spatial, features), floating; any number of leading dimensions, also none.
        window_shape: size of the window in each spatial dimension.
        strides: step from window to window in each; by default 1.
        padding: as of `conv`: "SAME", "VALID", "CAUSAL" (one spatial dimension), an integer for
            both sides of every dimension, or one integer or (low, high) pair for each.
        count_include_pad: whether the zeros of the padding count as entries of the mean.
        constraint: how the output and the input gradient come to share a factor.

    Returns:
        ScaledArray (..., *output spatial, features) in the dtype of ``x`` (bfloat16 for 8-bit
        data).

    Raises:
        TypeError: if ``x`` is not floating.
        ValueError: if window, strides or padding do not fit, or the constraint is unknown.

    Example:
        >>> print(avg_pool(jnp.ones((1, 4, 4, 3)), (2, 2), (2, 2)).data[0, 0, 0])
        [2. 2. 2.]

    References:
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, the unit-variance rule.
    """
    op = _Mean(*_windows("avg_pool", x, window_shape, strides, padding), count_include_pad)
    return _pool("avg_pool", op, x, rules.avg_pool(op.shape, op.strides, constraint=constraint))


def max_pool(
    x: ArrayLike,
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: Padding = "VALID",
    *,
    constraint: Constraint = "to_output_scale",
) -> ScaledArray:
    """Takes the maximum over windows, as `flax.linen.max_pool`, scaled to unit variance.

    Scaling:
        data = fwd * maximum of x.data, scale = x.scale, with fwd = 1 / std of the maximum of
        prod(window) independent normal values (1.426 for 4); its mean is not removed. Before the
        constraint dx has factor prod(strides)^1/2. See `rules.max_pool`.

    Args:
        x: (..., *spatial, features), floating; any number of leading dimensions, also none.
        window_shape: size of the window in each spatial dimension.
        strides: step from window to window in each; by default 1.
        padding: as of `avg_pool`; the padding is -inf, so that it is never the maximum of a
            window with an entry.
        constraint: how the output and the input gradient come to share a factor.

    Returns:
        ScaledArray (..., *output spatial, features) in the dtype of ``x`` (bfloat16 for 8-bit
        data). Of equal entries the first gets the gradient.

    Raises:
        TypeError: if ``x`` is not floating.
        ValueError: if window, strides or padding do not fit, or the constraint is unknown.

    Example:
        >>> print(max_pool(jnp.array([[1.0], [3.0], [2.0]]), (2,)).data.ravel().round(3))
        [3.634 3.634]

    References:
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, factors of activations.
    """
    op = _Maximum(*_windows("max_pool", x, window_shape, strides, padding))
    return _pool("max_pool", op, x, rules.max_pool(op.shape, op.strides, constraint=constraint))


def _windows(
    op, x, window_shape, strides, padding
) -> tuple[tuple[int, ...], tuple[int, ...], str | tuple[tuple[int, int], ...]]:
    data, _ = unpack(op, "x", x)
    window = tuple(window_shape)
    if not window or data.ndim < len(window) + 1:
        raise shape_error(
            op,
            "x must be (..., *spatial, features) with a spatial dimension for each of window_shape",
            "Channels are last.",
            x=data.shape,
            window_shape=window,
        )
    window = per_axis(op, "window_shape", window, len(window))
    strides = per_axis(op, "strides", 1 if strides is None else strides, len(window))
    return window, strides, sides(op, padding, window, (1,) * len(window))


def _pool(name: str, op: _Mean | _Maximum, x: ArrayLike, factors: Factors) -> ScaledArray:
    axes = tuple(range(-1 - len(op.shape), -1))
    data, scale = unpack_uniform(name, "x", x, axes)
    y = wide_op(op, data, fwd=factors.fwd, bwd=factors.bwd, out_dtype=output_dtype(x))
    return ScaledArray(y, scale)
