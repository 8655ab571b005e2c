"""Normalization: of layers, by RMS, of groups and of batches."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .. import rules
from ..core import ScaledArray, global_batch_size, to_float, widen
from ._normalized import Affine, Normalize, Standardize, normalized
from ._operands import ArrayLike, output_dtype, scale_argument, shape_error, unpack, unpack_uniform


def _normalize(
    op: str,
    x: ArrayLike,
    gain: ArrayLike | None,
    bias: ArrayLike | None,
    how: Normalize | Standardize,
    axes: tuple[int, ...] = (-1,),
    given: tuple[jax.Array, ...] = (),
) -> ScaledArray:
    """Normalizes along ``axes``, with statistics that are given or its own; then gain and bias."""
    data, scale = unpack_uniform(op, "x", x, axes)
    if not how.eps >= 0:
        raise ValueError(f"unitscale.ops.{op}: eps must not be negative; got {how.eps!r}")
    features = data.shape[-1]
    affine: list[Any] = [None, None]
    scales: list[Any] = [None, None]
    for i, (name, parameter) in enumerate((("gain", gain), ("bias", bias))):
        if parameter is None:
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
        affine[i], scales[i] = p, scale_argument(p_scale)
    factors = rules.norm(
        features, features * global_batch_size(data.size // max(features, 1), data)
    )
    constants = scale_argument(scale), Affine(*scales), given
    dtype = jnp.dtype(output_dtype(x))
    return ScaledArray(normalized(how, factors, dtype, data, Affine(*affine), constants))


def _rank(op: str, x: ArrayLike, least: int, expected: str) -> int:
    shape = unpack(op, "x", x)[0].shape
    if len(shape) < least:
        raise shape_error(op, f"x must be {expected}", "Axes are missing.", x=shape)
    return len(shape)


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
    _rank("layer_norm", x, 1, "(..., features)")
    return _normalize("layer_norm", x, gain, bias, Normalize(float(eps), True))


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
    _rank("rms_norm", x, 1, "(..., features)")
    return _normalize("rms_norm", x, gain, None, Normalize(float(eps), False))


def group_norm(
    x: ArrayLike,
    gain: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    num_groups: int,
    eps: float = 1e-6,
) -> ScaledArray:
    """Normalizes each group of channels, over all positions, to mean 0 and variance 1.

    Scaling:
        As `layer_norm`: no scale, dx the true derivative, dgain and dbias with factor
        (features / size)^1/2. See `rules.norm`.

    Args:
        x: (batch, *spatial, features), floating array or ScaledArray.
        gain: (features,), or None.
        bias: (features,), or None.
        num_groups: number of groups of neighbouring features, dividing their number.
        eps: added to the variance of the value.

    Returns:
        ScaledArray of the shape and dtype of ``x`` (bfloat16 for 8-bit data).

    Raises:
        TypeError: if an operand is not floating.
        ValueError: if the shapes do not fit, the groups do not divide the features, or eps is
            negative.

    Example:
        >>> print(group_norm(jnp.array([[1.0, 3.0, 5.0, 9.0]]), num_groups=2).data.round(3))
        [[-1.  1. -1.  1.]]

    References:
        Wu, He, "Group Normalization", 2018, arXiv 1803.08494;
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, scaled ops (layer_norm).
    """
    rank = _rank("group_norm", x, 2, "(batch, *spatial, features)")
    if num_groups < 1 or x.shape[-1] % num_groups:
        raise ValueError(
            "unitscale.ops.group_norm: num_groups must divide the features; got "
            f"{num_groups} groups, x {tuple(x.shape)}"
        )
    positions = tuple(range(1, rank - 1))
    axes = (*positions, -1)
    how = Normalize(float(eps), True, axes, num_groups)
    return _normalize("group_norm", x, gain, bias, how, axes)


def batch_norm(
    x: ArrayLike,
    gain: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    statistics: tuple[jax.Array, jax.Array] | None = None,
    eps: float = 1e-5,
) -> ScaledArray:
    """Normalizes each feature, over all other axes, to mean 0 and variance 1.

    Scaling:
        As `layer_norm`: no scale, dx the true derivative, dgain and dbias with factor
        (features / size)^1/2. See `rules.norm`. With given ``statistics``, (x - mean) / (var +
        eps)^1/2 * gain + bias of the value.

    Args:
        x: (..., features), floating array or ScaledArray.
        gain: (features,), or None.
        bias: (features,), or None.
        statistics: mean and variance (features,) in place of those of ``x``, as of
            `batch_statistics`; they have no gradient.
        eps: added to the variance of the value.

    Returns:
        ScaledArray of the shape and dtype of ``x`` (bfloat16 for 8-bit data).

    Raises:
        TypeError: if an operand is not floating.
        ValueError: if the shapes do not fit or eps is negative.

    Example:
        >>> print(batch_norm(jnp.array([[1.0, 5.0], [3.0, 9.0]])).data.round(3))
        [[-1. -1.]
         [ 1.  1.]]

    References:
        Ioffe, Szegedy, "Batch Normalization", 2015, arXiv 1502.03167;
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, scaled ops (layer_norm).
    """
    rank = _rank("batch_norm", x, 2, "(..., features)")
    rows = tuple(range(rank - 1))
    if statistics is not None:
        for name, array in zip(("mean", "variance"), statistics, strict=True):
            if array.shape != x.shape[-1:]:
                raise shape_error(
                    "batch_norm",
                    f"the {name} must be (features,)",
                    "Give one entry per feature of the last axis.",
                    x=x.shape,
                    **{name: array.shape},
                )
        how = Standardize(float(eps))
        return _normalize("batch_norm", x, gain, bias, how, rows, statistics)
    how = Normalize(float(eps), True, (*rows, -1), x.shape[-1])
    return _normalize("batch_norm", x, gain, bias, how, rows)


def batch_statistics(x: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Returns mean and variance of each feature, over all other axes, for a running average.

    Args:
        x: (..., features), floating array or ScaledArray.

    Returns:
        ``(mean, variance)`` of the value, float32 (features,), without a gradient.

    Raises:
        TypeError: if ``x`` is not floating.
        ValueError: if ``x`` has fewer than two axes.

    Example:
        >>> mean, variance = batch_statistics(jnp.array([[1.0, 5.0], [3.0, 9.0]]))
        >>> print(mean, variance)
        [2. 7.] [1. 4.]
    """
    rows = tuple(range(_rank("batch_statistics", x, 2, "(..., features)") - 1))
    data, scale = unpack_uniform("batch_statistics", "x", x, rows)
    wide = lax.stop_gradient(widen(data))
    mean, var = jnp.mean(wide, rows), jnp.var(wide, rows)
    if scale is None:
        return mean, var
    scale = lax.stop_gradient(to_float(scale))
    scale = jnp.reshape(scale, scale.shape[-1:])
    return mean * scale, var * jnp.square(scale)
