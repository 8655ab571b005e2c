"""Layer normalization and RMS normalization, over the last axis."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .. import rules
from ..core import ScaledArray, shards
from ._operands import ArrayLike, output_dtype, scale_argument, shape_error, unpack, unpack_uniform
from ._wide import wide_op


@dataclasses.dataclass(frozen=True)
class _Normalize:
    """``(x - mean) / sqrt(var + eps / scale^2) * gain + bias``, the mean only if centered.

    Data is normalized, not the value: dividing eps by scale^2 gives the same result, without a
    product that could leave the range.
    """

    eps: float
    centered: bool
    has_gain: bool

    def __call__(self, x: jax.Array, *args: Any) -> jax.Array:
        *affine, x_scale, gain_scale, bias_scale = args
        gain = affine.pop(0) if self.has_gain else None
        bias = affine.pop(0) if affine else None
        if self.centered:
            x = x - jnp.mean(x, axis=-1, keepdims=True)
        leading = tuple(range(x.ndim - 1))
        eps = self.eps if x_scale is None else self.eps / jnp.square(x_scale)
        y = x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)
        if gain is not None:
            y = y * jnp.expand_dims(gain if gain_scale is None else gain * gain_scale, leading)
        if bias is not None:
            y = y + jnp.expand_dims(bias if bias_scale is None else bias * bias_scale, leading)
        return y


def _normalize(op, x, gain, bias, eps, centered) -> ScaledArray:
    data, scale = unpack_uniform(op, "x", x, (-1,))
    if data.ndim < 1:
        raise shape_error(op, "x must be (..., features)", "A scalar has no axis.", x=data.shape)
    if not eps >= 0:
        raise ValueError(f"unitscale.ops.{op}: eps must not be negative; got {eps!r}")
    features = data.shape[-1]
    affine, scales = [], []
    for name, parameter in (("gain", gain), ("bias", bias)):
        if parameter is None:
            scales.append(None)
            continue
        p, p_scale = unpack(op, name, parameter)
        if p.shape != (features,):
            raise shape_error(
                op,
                f"{name} must be (features,)",
                "Give one entry per feature of the last axis.",
                x=data.shape,
                **{name: p.shape},
            )
        affine.append(p)
        scales.append(scale_argument(p_scale))
    factors = rules.norm(features, max(data.size, features) * shards(data))
    bwd = (factors.bwd[0], *factors.bwd[1 : 1 + len(affine)])
    y = wide_op(
        _Normalize(float(eps), centered, gain is not None),
        data,
        *affine,
        fwd=factors.fwd,
        bwd=bwd,
        constants=(scale_argument(scale), *scales),
        out_dtype=output_dtype(x),
    )
    return ScaledArray(y)


def layer_norm(
    x: ArrayLike,
    gain: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    eps: float = 1e-6,
) -> ScaledArray:
    """Normalizes the last axis to mean 0 and variance 1.

    Scaling:
        data = (x - mean) / (var + eps / scale^2)^1/2 * gain + bias on x.data, no scale: that
        of x is dropped. dx is the true derivative; dgain and dbias, cut edges, have factor
        (features / size)^1/2. Computed in float32 and rounded once. See `rules.norm`.

    Args:
        x: (..., features), floating array or ScaledArray.
        gain: (features,), or None.
        bias: (features,), or None.
        eps: added to the variance of the value.

    Returns:
        ScaledArray of the shape and dtype of ``x`` (bfloat16 for 8-bit data).

    Raises:
        TypeError: if an operand is not floating.
        ValueError: if the shapes do not fit or eps is negative.

    Example:
        >>> print(layer_norm(jnp.array([1.0, 3.0])).data.round(3))
        [-1.  1.]

    References:
        Ba, Kiros, Hinton, "Layer Normalization", 2016, arXiv 1607.06450;
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, scaled ops (layer_norm).
    """
    return _normalize("layer_norm", x, gain, bias, eps, True)


def rms_norm(x: ArrayLike, gain: ArrayLike | None = None, *, eps: float = 1e-6) -> ScaledArray:
    """Normalizes the last axis to RMS 1.

    Scaling:
        data = x / (mean(x^2) + eps / scale^2)^1/2 * gain on x.data, no scale: that of x is
        dropped. dx is the true derivative; dgain, a cut edge, has factor (features / size)^1/2.
        Computed in float32 and rounded once. See `rules.norm`.

    Args:
        x: (..., features), floating array or ScaledArray.
        gain: (features,), or None.
        eps: added to the mean square of the value.

    Returns:
        ScaledArray of the shape and dtype of ``x`` (bfloat16 for 8-bit data).

    Raises:
        TypeError: if an operand is not floating.
        ValueError: if the shapes do not fit or eps is negative.

    Example:
        >>> print(rms_norm(jnp.array([3.0, 3.0])).data.round(3))
        [1. 1.]

    References:
        Zhang, Sennrich, "Root Mean Square Layer Normalization", 2019, arXiv 1910.07467;
        Blake et al., "u-muP", 2024, arXiv 2407.17465, appendix B (RMSNorm).
    """
    return _normalize("rms_norm", x, gain, None, eps, False)
