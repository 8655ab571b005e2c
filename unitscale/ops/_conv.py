"""Convolution, channels last, of any rank."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .. import rules
from ..core import ScaledArray, scale, scale_bwd, shards
from ..quant import MatmulConfig, QuantState, fake_quantize_operands
from ..rules import Constraint
from ._linear import add_bias
from ._operands import ArrayLike, output_dtype, shape_error, times_scales, unpack, unpack_uniform
from ._wide import wide_op

Padding = str | int | Sequence[int | tuple[int, int]]
# What is beyond the sides of the input, as `jnp.pad` names it, where that is not zero.
_BEYOND = {"CIRCULAR": "wrap", "REFLECT": "reflect"}


@dataclasses.dataclass(frozen=True)
class _Conv:
    strides: tuple[int, ...]
    padding: str | tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int

    def __call__(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        axes = tuple(range(1, x.ndim - 1))
        return lax.conv_general_dilated(
            x,
            kernel,
            self.strides,
            self.padding,
            rhs_dilation=self.dilation,
            dimension_numbers=lax.ConvDimensionNumbers(
                (0, x.ndim - 1, *axes),
                (x.ndim - 1, x.ndim - 2, *(a - 1 for a in axes)),
                (0, x.ndim - 1, *axes),
            ),
            feature_group_count=self.groups,
        )


def conv(
    x: ArrayLike,
    kernel: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    strides: int | Sequence[int] = 1,
    padding: Padding = "SAME",
    dilation: int | Sequence[int] = 1,
    feature_group_count: int = 1,
    constraint: Constraint = "to_output_scale",
    config: MatmulConfig | None = None,
    state: QuantState | None = None,
) -> ScaledArray:
    """Convolves over the spatial dimensions.

    Scaling:
        data = fan_in^-1/2 * conv(x.data, kernel.data) + bias, scale = x.scale * kernel.scale, with
        fan_in = prod(spatial) * in / groups; dx sums out / groups * prod(spatial) /
        prod(strides) terms, dkernel and dbias batch * output positions. All three accumulate in
        float32. Where both operands are bfloat16 they stay so, and results are rounded before
        their factor, as those of `dense`; else operands are widened to float32, and results are
        rounded once, after their factor. See `rules.conv`.

    Args:
        x: (batch, *spatial, in), floating.
        kernel: (*spatial, in / groups, out), floating.
        bias: (out,), or None.
        strides: one stride, or one per spatial dimension.
        padding: "SAME", "VALID", "CAUSAL" (one spatial dimension), an integer for both sides of
            every dimension, or one integer or (low, high) pair for each. "CIRCULAR" and "REFLECT"
            go on with the input itself where the others have zeros.
        dilation: one kernel dilation, or one per spatial dimension.
        feature_group_count: number of groups, dividing in and out.
        constraint: how the output and the input gradient come to share a factor.
        config: formats that operands are quantized to before the product, which itself runs in
            bfloat16 or float32: XLA has no FP8 convolution kernel. Cotangents are not quantized.
        state: the scales of a strategy that keeps them, as of `quant.Delayed`.

    Returns:
        ScaledArray (batch, *output spatial, out) in the dtype of ``x`` (bfloat16 for 8-bit data).

    Raises:
        TypeError: if an operand is not floating.
        ValueError: if the shapes, strides, padding or groups do not fit, or a strategy lacks its
            state.

    Example:
        >>> y = conv(jnp.ones((1, 5, 4)), jnp.ones((3, 4, 2)), padding="VALID")
        >>> print(y.shape, round(float(y.data[0, 0, 0]), 3))
        (1, 3, 2) 3.464

    References:
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, scaled ops (conv1d).
    """
    x_rank, w_rank = unpack("conv", "x", x)[0].ndim, unpack("conv", "kernel", kernel)[0].ndim
    data, x_scale = unpack_uniform("conv", "x", x, tuple(range(1, x_rank)))
    w, w_scale = unpack_uniform("conv", "kernel", kernel, tuple(range(w_rank)))
    rank = data.ndim - 2
    if rank < 1 or w.ndim != data.ndim or w.shape[-2] * feature_group_count != data.shape[-1]:
        raise shape_error(
            "conv",
            "x must be (batch, *spatial, in) and kernel (*spatial, in / groups, out)",
            f"feature_group_count is {feature_group_count}.",
            x=data.shape,
            kernel=w.shape,
        )
    if w.shape[-1] % feature_group_count:
        raise ValueError(
            "unitscale.ops.conv: feature_group_count must divide the output channels; got "
            f"{feature_group_count} groups, kernel {w.shape}"
        )
    strides = per_axis("conv", "strides", strides, rank)
    dilation = per_axis("conv", "dilation", dilation, rank)
    if isinstance(padding, str) and padding.upper() in _BEYOND:
        data, padding = _padded(data, _BEYOND[padding.upper()], w.shape, dilation), "VALID"
    op = _Conv(strides, sides("conv", padding, w.shape, dilation), dilation, feature_group_count)
    out = jax.eval_shape(op, *(jax.ShapeDtypeStruct(a.shape, jnp.float32) for a in (data, w)))
    factors = rules.conv(
        w.shape,
        max(out.shape[0], 1) * shards(data),
        out.shape[1:-1],
        strides=strides,
        feature_group_count=feature_group_count,
        constraint=constraint,
    )
    if config is not None:
        axes = tuple(range(1, rank + 2)), tuple(range(rank + 1))
        data, w = fake_quantize_operands(data, w, config, axes=axes, state=state)
    y = _convolve(op, data, w, factors.fwd, factors.bwd[:2], output_dtype(x))
    y, y_scale = times_scales(y, x_scale, w_scale)
    if bias is None:
        return ScaledArray(y, y_scale)
    return add_bias("conv", y, y_scale, bias, factors.bwd[2])


def _padded(x: jax.Array, mode: Any, window: Sequence[int], dilation: Sequence[int]) -> jax.Array:
    """Goes on beyond the sides of ``x``, so that strides of 1 give as many outputs as inputs."""
    beyond = [(size - 1) * step for size, step in zip(window, dilation, strict=False)]
    return jnp.pad(x, ((0, 0), *((n // 2, n - n // 2) for n in beyond), (0, 0)), mode=mode)


def _convolve(op: _Conv, x, w, fwd: float, bwd: tuple[float, ...], out_dtype: Any) -> jax.Array:
    if x.dtype == w.dtype == jnp.bfloat16:
        # The range is that of float32, so that factors can follow the rounding, as in `contract`.
        return scale(op(scale_bwd(x, bwd[0]), scale_bwd(w, bwd[1])), fwd)
    return wide_op(op, x, w, fwd=fwd, bwd=bwd, out_dtype=out_dtype)


def per_axis(op: str, name: str, value: int | Sequence[int], rank: int) -> tuple[int, ...]:
    """Returns one positive integer for each spatial dimension; ``op`` names it in errors."""
    sizes = (value,) * rank if isinstance(value, int) else tuple(value)
    if len(sizes) != rank or any(size < 1 for size in sizes):
        raise ValueError(
            f"unitscale.ops.{op}: {name} must be a positive integer or {rank} of them; got {value}"
        )
    return sizes


def sides(
    op: str, padding: Padding, window: Sequence[int], dilation: Sequence[int]
) -> str | tuple[tuple[int, int], ...]:
    """Returns padding as "SAME", "VALID" or one (low, high) pair for each spatial dimension."""
    rank = len(dilation)
    if isinstance(padding, str):
        name = padding.upper()
        if name == "CAUSAL" and rank == 1:
            return (((window[0] - 1) * dilation[0], 0),)
        if name in ("SAME", "VALID"):
            return name
    else:
        each = (padding,) * rank if isinstance(padding, int) else padding
        pairs = [(side, side) if isinstance(side, int) else tuple(side) for side in each]
        if len(pairs) == rank and all(len(pair) == 2 for pair in pairs):
            return tuple((int(low), int(high)) for low, high in pairs)
    beyond = "'CIRCULAR', 'REFLECT', " if op == "conv" else ""
    raise ValueError(
        f"unitscale.ops.{op}: padding must be 'SAME', 'VALID', 'CAUSAL' (one spatial dimension), "
        f"{beyond}an integer, or one integer or (low, high) pair for each of {rank} dimensions; "
        f"got {padding!r}"
    )
