"""Sums of activations: one primitive, and the ops that are its factors."""

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import rules
from ..core import (
    Scale,
    ScaledArray,
    common_scale,
    custom_vjp,
    materialize,
    narrow,
    result_dtype,
    safe_scale,
    to_float,
    widen,
)
from ..rules import Constraint
from ._operands import ArrayLike, shape_error, sharers, unpack

_NUMBER = int, float, np.integer, np.floating


@partial(custom_vjp, nondiff_argnums=(3, 4, 5))
def _combine(operands, ratios, traced, weights, bwd, out_dtype):
    terms = (
        _times(_times(_times(widen(x), weight), variable), ratio)
        for x, ratio, variable, weight in zip(operands, ratios, traced, weights, strict=True)
    )
    left, right = terms
    y = narrow(left + right, out_dtype)
    # What is read again by every later layer and its gradient, as a residual stream is.
    return materialize(y) if y.dtype.itemsize == 2 else y


def _combine_fwd(operands, ratios, traced, weights, bwd, out_dtype):
    shapes = tuple((x.shape, x.dtype) for x in operands)
    y = _combine(operands, ratios, traced, weights, bwd, out_dtype)
    return y, (_Static(shapes), ratios, traced)


def _combine_bwd(weights, bwd, out_dtype, residuals, cotangent):
    shapes, ratios, traced = residuals
    wide = widen(cotangent)
    grads = tuple(
        narrow(_unbroadcast(_times(wide, ratio), shape, factor), dtype)
        for (shape, dtype), ratio, factor in zip(shapes.value, ratios, bwd, strict=True)
    )
    return grads, jax.tree.map(jnp.zeros_like, ratios), jax.tree.map(jnp.zeros_like, traced)


_combine.defvjp(_combine_fwd, _combine_bwd)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Static:
    """A residual that is known while tracing."""

    value: Any


def _times(x: jax.Array, factor: Any) -> jax.Array:
    return x if factor is None or (isinstance(factor, float) and factor == 1) else x * factor


def _unbroadcast(x: jax.Array, shape: tuple[int, ...], factor: float) -> jax.Array:
    """Sums a gradient over the dimensions that its operand was broadcast over."""
    lead = x.ndim - len(shape)
    axes = tuple(range(lead)) + tuple(
        lead + i for i, n in enumerate(shape) if n == 1 and x.shape[lead + i] != 1
    )
    return _times(jnp.sum(x, axis=axes).reshape(shape) if axes else x, factor)


def combine(
    left: tuple[jax.Array, Scale],
    right: tuple[jax.Array, Scale],
    *,
    weights: tuple[Any, ...],
    bwd: tuple[float, ...],
    at: Any = "common",
    out: Any = None,
) -> ScaledArray:
    """Returns the weighted sum of two pairs, with its own backward factor for each.

    Scaling:
        data = sum of weights[i] * x[i].data * (x[i].scale / scale), dx[i] = bwd[i] *
        (x[i].scale / scale) * dy, summed over broadcast dimensions; all in float32, rounded once.
        scale is ``at``, by default the common scale of the two. Weights that are arrays are
        constants of differentiation too.
    """
    scale = common_scale(left[1], right[1]) if isinstance(at, str) else at
    ratios = tuple(_ratio(s, scale) for _, s in (left, right))
    dtype = result_dtype(left[0], right[0]) if out is None else out
    operands = (left[0], right[0])
    traced = tuple(w if isinstance(w, jax.Array) else None for w in weights)
    static = tuple(1.0 if isinstance(w, jax.Array) else float(w) for w in weights)
    y = _combine(operands, ratios, traced, static, tuple(map(float, bwd)), dtype)
    return ScaledArray(y, scale)


def _ratio(scale: Scale, target: Scale) -> jax.Array | None:
    if scale is target:
        return None
    return to_float(scale) / safe_scale(to_float(target))


def _check_broadcast(op: str, x: jax.Array, y: jax.Array) -> tuple[int, ...]:
    try:
        return jnp.broadcast_shapes(x.shape, y.shape)
    except ValueError:
        raise shape_error(
            op, "x and y must broadcast", "Insert dimensions of size 1.", x=x.shape, y=y.shape
        ) from None


def _leads(shape: tuple[int, ...], x: jax.Array) -> bool:
    """Whether an operand is broadcast over the leading dimension, that of the batch."""
    return x.ndim < len(shape) or x.shape[:1] != shape[:1]


def add(
    x: ArrayLike | float, y: ArrayLike | float, *, constraint: Constraint = "to_output_scale"
) -> ScaledArray:
    """Adds two independent activations.

    Scaling:
        data = 2^-1/2 * (x + y) at the common scale sqrt(sx^2 + sy^2), a power of two; backward
        2^-1/2 each way, for a broadcast operand too, before its copies' gradients are summed. With
        ``constraint=None``, for operands that are cut edges, each gradient has repeats^-1/2. A
        number, Python's or NumPy's, is added as it is, and changes neither scale nor gradient. See
        `rules.add`.

    Args:
        x: floating array or ScaledArray, or a number if ``y`` is not.
        y: the same, broadcasting with ``x``.
        constraint: how output and gradients come to share a factor; None where each operand is a
            cut edge, or the factors are to differ.

    Returns:
        ScaledArray of the broadcast shape.

    Raises:
        TypeError: if an operand is not floating.
        ValueError: if the shapes do not broadcast or the constraint is unknown.

    Example:
        >>> print(add(jnp.ones(2), jnp.ones(2)).data)
        [1.4142135 1.4142135]

    References:
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, scaled ops (add).
    """
    if isinstance(x, _NUMBER) and not isinstance(y, _NUMBER):
        x, y = y, x
    a, a_scale = unpack("add", "x", x)
    if isinstance(y, _NUMBER):
        return combine(
            (a, a_scale),
            (jnp.float32(y), None),
            weights=(1.0, 1.0),
            bwd=(1.0, 0.0),
            at=a_scale,
            out=result_dtype(a),
        )
    b, b_scale = unpack("add", "y", y)
    shape = _check_broadcast("add", a, b)
    size = math.prod(shape)
    factors = rules.add(
        left_repeats=(size // max(a.size, 1) or 1) * sharers(a, b, _leads(shape, a)),
        right_repeats=(size // max(b.size, 1) or 1) * sharers(b, a, _leads(shape, b)),
        constraint=constraint,
    )
    return combine((a, a_scale), (b, b_scale), weights=(factors.fwd, factors.fwd), bwd=factors.bwd)


def weighted_add(
    x: ArrayLike, y: ArrayLike, *, weights: Sequence[float] = (1.0, 1.0)
) -> ScaledArray:
    """Adds two independent activations with static weights.

    Scaling:
        data = (w0 * x + w1 * y) / sqrt(w0^2 + w1^2) at the common scale; backward the true
        derivative. See `rules.weighted_add`.

    Args:
        x: floating array or ScaledArray.
        y: the same, broadcasting with ``x``.
        weights: two static numbers.

    Returns:
        ScaledArray of the broadcast shape.

    Raises:
        ValueError: if there are not two weights, or the shapes do not broadcast.

    Example:
        >>> print(weighted_add(jnp.ones(1), jnp.zeros(1), weights=(3, 4)).data)
        [0.6]

    References:
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, scaled ops (weighted_add).
    """
    if len(weights) != 2:
        raise ValueError(
            f"unitscale.ops.weighted_add: weights must be two numbers; got {len(weights)}"
        )
    normalized = rules.normalized_weights(tuple(weights))
    left, right = unpack("weighted_add", "x", x), unpack("weighted_add", "y", y)
    _check_broadcast("weighted_add", left[0], right[0])
    return combine(left, right, weights=normalized, bwd=normalized)
