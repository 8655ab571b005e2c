"""Normalization: layer norm, RMS norm, group norm and batch norm."""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .. import rules
from ..core import (
    ScaledArray,
    custom_vjp,
    global_batch_size,
    narrow,
    round_to_pow2,
    to_float,
    widen,
)
from ._operands import ArrayLike, output_dtype, scale_argument, shape_error, times, unpack, wide_op


class _How(NamedTuple):
    """Static options of a norm. The mean is subtracted only if ``centered``."""

    eps: float
    centered: bool = True
    axes: tuple[int, ...] = (-1,)
    groups: int | None = None  # number of groups that the last axis is split into

    def split(self, x: jax.Array) -> jax.Array:
        """Split the last axis into (groups, features / groups), if there are groups."""
        if self.groups is None:
            return x
        return x.reshape(*x.shape[:-1], self.groups, x.shape[-1] // self.groups)

    def mean(self, x: jax.Array) -> jax.Array:
        return jnp.mean(x, axis=self.axes, keepdims=True)


@partial(custom_vjp, nondiff_argnums=(0, 1, 2))
def _normalized(how, factors, out_dtype, x, affine, constants):
    """Normalize in float32; ``constants`` are the scales of x, gain and bias."""
    return _normalized_fwd(how, factors, out_dtype, x, affine, constants)[0]


def _normalized_fwd(how, factors, out_dtype, x, affine, constants):
    x_scale, *scales = constants
    # Layer norm reads the first entry of each row, so the first barrier makes XLA store x before.
    # The second makes XLA compute the statistics once (for RMS norm in the kernel that writes x).
    x = lax.optimization_barrier(x) if how.centered else x
    x, statistics = lax.optimization_barrier((x, _statistics(how, how.split(x), x_scale)))
    y = _apply(how, x, statistics)
    gain, bias = (_broadcast(p, s, y.ndim) for p, s in zip(affine, scales, strict=True))
    y = y if gain is None else y * gain
    y = y if bias is None else y + bias
    return narrow(times(y, factors.fwd), out_dtype), (x, affine, constants, statistics)


def _normalized_bwd(how, factors, out_dtype, residuals, cotangent):
    x, (gain, bias), constants, statistics = residuals
    _, gain_scale, bias_scale = constants
    dy, y, rows = widen(cotangent), _apply(how, x, statistics), tuple(range(x.ndim - 1))
    dgain = None if gain is None else times(jnp.sum(dy * y, axis=rows), gain_scale)
    dbias = None if bias is None else times(jnp.sum(dy, axis=rows), bias_scale)
    scaled_gain = _broadcast(gain, gain_scale, x.ndim)
    dy, y = how.split(dy if scaled_gain is None else dy * scaled_gain), how.split(y)
    along = y * how.mean(dy * y)
    along = along + how.mean(dy) if how.centered else along
    dx = ((dy - along) * statistics[1]).reshape(x.shape)
    dx, dgain, dbias = (
        None if own is None else narrow(times(gradient, factor), own.dtype)
        for own, factor, gradient in zip(
            (x, gain, bias), factors.bwd, (dx, dgain, dbias), strict=True
        )
    )
    return dx, (dgain, dbias), None


_normalized.defvjp(_normalized_fwd, _normalized_bwd)


def _broadcast(p: jax.Array | None, scale: jax.Array | None, ndim: int) -> jax.Array | None:
    if p is None:
        return None
    return jnp.expand_dims(times(widen(p), scale), tuple(range(ndim - 1)))


def _apply(how: _How, x: jax.Array, statistics: tuple[Any, jax.Array]) -> jax.Array:
    mean, inverse = statistics
    wide = widen(how.split(x))
    return ((wide if mean is None else wide - mean) * inverse).reshape(x.shape)


def _statistics(how: _How, x: jax.Array, scale: jax.Array | None) -> tuple[Any, jax.Array]:
    """Return mean and inverse standard deviation."""
    mean, wide = None, widen(x)
    if how.groups is not None and scale is not None and scale.ndim:
        scale = scale[..., None]
    if not how.centered:
        square = how.mean(jnp.square(wide))
    elif how.axes == (-1,):
        # One pass over the row, with distances d from its first entry. That entry is at most n^1/2
        # standard deviations from the mean, so the error of E[d^2] - E[d]^2 is at most n roundings.
        first = widen(x[..., :1])
        distance = wide - first
        offset, square = how.mean(distance), how.mean(jnp.square(distance))
        mean, square = first + offset, jnp.maximum(square - jnp.square(offset), 0)
    else:
        mean = how.mean(wide)
        square = how.mean(jnp.square(wide - mean))
    return mean, _inverse_root(square, how.eps, scale)


def _inverse_root(square: jax.Array, eps: float, scale: jax.Array | None) -> jax.Array:
    """Return (square + eps / scale^2)^-1/2; square * scale^2 could leave the range of float32."""
    root = math.sqrt(eps)
    if scale is None and root > 2.0**-40:
        return lax.rsqrt(square + square.dtype.type(root) ** 2)
    # A constant where the square is 0: an infinite derivative times 0 would be NaN.
    is_zero = square == 0
    share = jnp.where(is_zero, 1, square)
    scale = jnp.ones((), square.dtype) if scale is None else scale.astype(square.dtype)
    # For scales below 2^-64 eps^1/2 the square of eps^1/2 / scale would overflow.
    unit = jnp.clip(round_to_pow2(root / scale), 1, 2.0**126).astype(square.dtype)
    inverse = lax.rsqrt(share / unit / unit + jnp.square(root / scale / unit)) / unit
    return jnp.where(is_zero, scale / root, inverse)


def _norm(op, x, gain, bias, how, uniform=(-1,), given=()) -> ScaledArray:
    """Normalize with the statistics of ``x``, or with the mean and variance in ``given``."""
    data, scale = unpack(op, "x", x, uniform)
    if not how.eps >= 0:
        raise ValueError(f"unitscale.ops.{op}: eps must not be negative; got {how.eps!r}")
    features = data.shape[-1]
    affine, scales = [], []
    for name, parameter in (("gain", gain), ("bias", bias)):
        p, p_scale = (None, None) if parameter is None else unpack(op, name, parameter)
        if p is not None:
            _check_features(op, data.shape, name, p)
        affine.append(p)
        scales.append(scale_argument(p_scale))
    batch = global_batch_size(data.size // max(features, 1), data)
    factors, dtype = rules.norm(features, features * batch), output_dtype(x)
    constants = (scale_argument(scale), *scales)
    if not given:
        return ScaledArray(_normalized(how, factors, dtype, data, tuple(affine), constants))
    gain, bias = affine
    gain = jnp.ones(features) if gain is None else gain
    bias = jnp.zeros(features) if bias is None else bias
    y = wide_op(
        _standardized,
        *(data, gain, bias),
        factors=factors,
        static=(how.eps,),
        constants=(*constants, *given),
        out_dtype=dtype,
    )
    return ScaledArray(y)


def _standardized(eps, x, gain, bias, x_scale, gain_scale, bias_scale, mean, var):
    y = (times(x, x_scale) - mean) * lax.rsqrt(var + eps)
    return y * times(gain, gain_scale) + times(bias, bias_scale)


def _check_features(op: str, shape: tuple[int, ...], name: str, array: jax.Array) -> None:
    if array.shape != shape[-1:]:
        raise shape_error(op, f"{name} must be (features,)", **{"x": shape, name: array.shape})


def _shape(op: str, x: ArrayLike, least: int, expected: str) -> tuple[int, ...]:
    shape = unpack(op, "x", x)[0].shape
    if len(shape) < least:
        raise shape_error(op, f"x must be {expected}", x=shape)
    return shape


def layer_norm(
    x: ArrayLike, gain: ArrayLike | None = None, bias: ArrayLike | None = None, *, eps: float = 1e-6
) -> ScaledArray:
    """Normalize the last axis to mean 0 and variance 1.

    Scaling: `rules.norm`. The result has no scale, because a norm removes the scale of x.

    Args:
        x: (..., features), floating.
        gain: (features,), or None.
        bias: (features,), or None.
        eps: added to the variance of the value (data times scale); not negative.

    Example:
        >>> print(layer_norm(jnp.array([1.0, 3.0])).data.round(3))
        [-1.  1.]

    References:
        Ba, Kiros, Hinton, "Layer Normalization", 2016, arXiv 1607.06450.
    """
    _shape("layer_norm", x, 1, "(..., features)")
    return _norm("layer_norm", x, gain, bias, _How(float(eps)))


def rms_norm(x: ArrayLike, gain: ArrayLike | None = None, *, eps: float = 1e-6) -> ScaledArray:
    """Normalize the last axis to RMS 1.

    Scaling: as in `layer_norm`.

    Takes the arguments of `layer_norm`, without a bias.

    References:
        Zhang, Sennrich, "Root Mean Square Layer Normalization", 2019, arXiv 1910.07467.
    """
    _shape("rms_norm", x, 1, "(..., features)")
    return _norm("rms_norm", x, gain, None, _How(float(eps), centered=False))


def group_norm(
    x: ArrayLike,
    gain: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    num_groups: int,
    eps: float = 1e-6,
) -> ScaledArray:
    """Normalize each group of channels, over all positions, to mean 0 and variance 1.

    Scaling: as in `layer_norm`.

    Takes the arguments of `layer_norm`, with x (batch, ..., features). ``num_groups`` is the number
    of groups of neighboring features; it must divide the number of features.

    References:
        Wu, He, "Group Normalization", 2018, arXiv 1803.08494.
    """
    shape = _shape("group_norm", x, 2, "(batch, *spatial, features)")
    if num_groups < 1 or shape[-1] % num_groups:
        raise ValueError(
            "unitscale.ops.group_norm: num_groups must divide the features; got "
            f"{num_groups} groups, x {shape}"
        )
    axes = (*range(1, len(shape) - 1), -1)
    how = _How(float(eps), axes=axes, groups=num_groups)
    return _norm("group_norm", x, gain, bias, how, axes)


def batch_norm(
    x: ArrayLike,
    gain: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    statistics: tuple[jax.Array, jax.Array] | None = None,
    eps: float = 1e-5,
) -> ScaledArray:
    """Normalize each feature, over all other axes, to mean 0 and variance 1.

    Scaling: as in `layer_norm`.

    Takes the arguments of `layer_norm`. ``statistics``, a mean and a variance (features,), replace
    those of the batch: pass running averages of `batch_statistics` to evaluate.

    References:
        Ioffe, Szegedy, "Batch Normalization", 2015, arXiv 1502.03167.
    """
    shape = _shape("batch_norm", x, 2, "(..., features)")
    rows = tuple(range(len(shape) - 1))
    if statistics is not None:
        for name, array in zip(("mean", "variance"), statistics, strict=True):
            _check_features("batch_norm", shape, name, array)
        return _norm("batch_norm", x, gain, bias, _How(float(eps)), rows, statistics)
    how = _How(float(eps), axes=(*rows, -1), groups=shape[-1])
    return _norm("batch_norm", x, gain, bias, how, rows)


def batch_statistics(x: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Return mean and variance of each feature over all other axes, in float32 (features,)."""
    rows = tuple(range(len(_shape("batch_statistics", x, 2, "(..., features)")) - 1))
    data, scale = unpack("batch_statistics", "x", x, rows)
    wide = lax.stop_gradient(widen(data))
    mean, var = jnp.mean(wide, rows), jnp.var(wide, rows)
    if scale is None:
        return mean, var
    scale = lax.stop_gradient(to_float(scale))
    scale = jnp.reshape(scale, scale.shape[-1:])
    return mean * scale, var * jnp.square(scale)
