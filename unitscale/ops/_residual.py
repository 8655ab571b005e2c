"""Sums of activations (add, weighted_add, residual branches), and inputs used several times."""

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import rules
from ..core import (
    ScaledArray,
    common_scale,
    custom_vjp,
    materialize,
    narrow,
    result_dtype,
    scale_bwd,
    wide_dtype,
    widen,
)
from ..rules import Constraint
from ._operands import (
    ArrayLike,
    Operand,
    broadcast_shapes,
    combine,
    num_sharing,
    shape_error,
    unpack,
)

Tau = float | rules.ResidualFactors
"""Weight of a residual branch: a number, or the result of `rules.residual` (arrays allowed)."""

_NUMBER = int, float, np.integer, np.floating


def add(
    x: ArrayLike | float, y: ArrayLike | float, *, constraint: Constraint = "to_output_scale"
) -> ScaledArray:
    """Add two independent activations.

    Scaling: `rules.add`. The result has the larger of the scales of x and y. Adding a Python or
    NumPy number keeps scale and gradient.

    Args:
        x: operand; or a number, if ``y`` is an array.
        y: operand that broadcasts with ``x``; or a number.
        constraint: see `unitscale.ops`; None is correct if both operands are cut edges.
    """
    if isinstance(x, _NUMBER) and not isinstance(y, _NUMBER):
        x, y = y, x
    left = unpack("add", "x", x)
    if isinstance(y, _NUMBER):
        number = jnp.asarray(y, wide_dtype(left[0].dtype)), None
        return combine(left, number, bwd=(1.0, 0.0), out=result_dtype(left[0]))
    right = unpack("add", "y", y)
    a, b = left[0], right[0]
    shape = broadcast_shapes("add", "x and y must broadcast", x=a.shape, y=b.shape)

    def repeats(x: jax.Array, other: jax.Array) -> int:
        is_broadcast = x.ndim < len(shape) or x.shape[:1] != shape[:1]
        own = math.prod(shape) // max(x.size, 1) or 1
        return own * num_sharing(x, other, is_broadcast)

    factors = rules.add(
        left_repeats=repeats(a, b), right_repeats=repeats(b, a), constraint=constraint
    )
    return _aligned(left, right, (factors.fwd, factors.fwd), factors.bwd)


def weighted_add(
    x: ArrayLike, y: ArrayLike, *, weights: Sequence[float] = (1.0, 1.0)
) -> ScaledArray:
    """Add two independent activations with static weights.

    Scaling: `rules.weighted_add`: (w0 * x + w1 * y) / sqrt(w0^2 + w1^2), with the scale of `add`
    and exact gradients.
    """
    if len(weights) != 2:
        raise ValueError(
            f"unitscale.ops.weighted_add: weights must be two numbers; got {len(weights)}"
        )
    normalized = rules.normalized_weights(tuple(weights))
    left, right = unpack("weighted_add", "x", x), unpack("weighted_add", "y", y)
    shapes = {"x": left[0].shape, "y": right[0].shape}
    broadcast_shapes("weighted_add", "x and y must broadcast", **shapes)
    return _aligned(left, right, normalized, normalized)


def _aligned(left: Operand, right: Operand, weights: Any, bwd: Any, out: Any = None) -> ScaledArray:
    """Combine two operands at their common scale."""
    out = result_dtype(left[0], right[0]) if out is None else out
    scale = common_scale(left[1], right[1])
    return combine(left, right, weights=weights, bwd=bwd, scale=scale, out=out)


def residual_split(x: ArrayLike, tau: Tau) -> tuple[ScaledArray, ScaledArray]:
    """Split the residual stream into the input of a branch and the skip connection.

    Scaling: `rules.residual`. In the backward pass the weights of `residual_add` are applied here,
    so that gradients inside the branch are unit scaled.

    Args:
        x: operand.
        tau: positive static weight of the branch relative to the skip connection, or the result of
            `rules.residual`, whose weights may be arrays.

    Returns:
        ``(branch, skip)``, both equal to ``x``.
    """
    whole = ScaledArray(*unpack("residual_split", "x", x))
    factors = _factors(tau)
    branch, skip = fan_out(whole, 2) if whole.dtype.itemsize == 1 else (whole, whole)
    if skip.dtype.itemsize == 2:  # every later layer reads it: make XLA store it in 16 bits
        skip = skip.map_data(materialize)
    return _multiply_gradient(branch, factors.branch), _multiply_gradient(skip, factors.skip)


def residual_add(branch: ArrayLike, skip: ArrayLike, tau: Tau) -> ScaledArray:
    """Add a residual branch to its skip connection.

    Scaling: `rules.residual`: (tau * branch + skip) / (1 + tau^2)^1/2, with the scale of `add`; the
    cotangent passes unchanged to both. Shapes must be equal; the result has the dtype of ``skip``.
    """
    left = unpack("residual_add", "branch", branch)
    right = unpack("residual_add", "skip", skip)
    if left[0].shape != right[0].shape:
        shapes = {"branch": left[0].shape, "skip": right[0].shape}
        raise shape_error("residual_add", "branch and skip must have the same shape", **shapes)
    factors = _factors(tau)
    weights = factors.branch, factors.skip
    return _aligned(left, right, weights, (1.0, 1.0), result_dtype(right[0]))


def residual(fn: Callable[[ScaledArray], Any], x: ArrayLike, tau: Tau) -> ScaledArray:
    """Apply a residual branch: ``(tau * fn(x) + x) / (1 + tau^2)^1/2``.

    Scaling: `residual_split`, ``fn``, `residual_add`.
    """
    branch, skip = residual_split(x, tau)
    return residual_add(fn(branch), skip, tau)


def _factors(tau: Tau) -> rules.ResidualFactors:
    return tau if isinstance(tau, rules.ResidualFactors) else rules.residual(tau)


@custom_vjp
def _scale_bwd(x: jax.Array, factor: jax.Array) -> jax.Array:
    return x


def _scale_bwd_bwd(factor: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, None]:
    return narrow(widen(cotangent) * factor, cotangent.dtype), None


_scale_bwd.defvjp(lambda x, factor: (x, factor), _scale_bwd_bwd)


def _multiply_gradient(x: ScaledArray, factor: Any) -> ScaledArray:
    if isinstance(factor, jax.Array):
        return x.map_data(lambda data: _scale_bwd(data, factor))
    return scale_bwd(x, factor)


def fan_out(x: ArrayLike, count: int) -> tuple[ScaledArray, ...]:
    """Return ``count`` copies of an activation, for several matmuls such as query, key and value.

    Scaling: none. Gradients are added in the order of the copies, so that XLA accumulates them
    inside the matmuls (cuBLAS's beta term).

    References:
        NVIDIA, cuBLAS library, cublasLtMatmul: D = alpha * A B + beta * C.
    """
    if count < 1:
        raise ValueError(f"unitscale.ops.fan_out: count must be at least 1; got {count}")
    data, scale = unpack("fan_out", "x", x)
    return tuple(ScaledArray(each, scale) for each in _fan_out(data, count))


@partial(custom_vjp, nondiff_argnums=(1,))
def _fan_out(x: jax.Array, count: int) -> tuple[jax.Array, ...]:
    return (x,) * count


def _fan_out_bwd(count: int, _: None, gradients: Any) -> tuple[jax.Array]:
    dtype = gradients[0].dtype
    if dtype.itemsize == 1:  # sums in 8 bits would round at each step and not saturate
        gradients = map(widen, gradients)
    return (narrow(reduce(lambda total, gradient: gradient + total, gradients), dtype),)


_fan_out.defvjp(lambda x, count: ((x,) * count, None), _fan_out_bwd)
