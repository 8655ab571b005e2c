"""Convolution, channels last, of any rank."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .. import rules
from ..core import ScaledArray, global_batch_size, scale, scale_bwd
from ..quant import MatmulConfig, QuantState, fake_quantize_operands
from ..rules import Constraint, Factors
from ._linear import add_bias
from ._operands import ArrayLike, output_dtype, shape_error, times_scales, unpack, unpack_uniform
from ._wide import wide_op

Padding = str | int | Sequence[int | tuple[int, int]]
# What is beyond the sides of the input, as `jnp.pad` names it, where that is not zero.
_BEYOND = {"CIRCULAR": "wrap", "REFLECT": "reflect"}


def _channels_last(ndim: int) -> lax.ConvDimensionNumbers:
    axes = tuple(range(1, ndim - 1))
    image = (0, ndim - 1, *axes)
    return lax.ConvDimensionNumbers(
        image, (ndim - 1, ndim - 2, *(axis - 1 for axis in axes)), image
    )


@dataclasses.dataclass(frozen=True)
class _Conv:
    strides: tuple[int, ...]
    padding: str | tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    input_dilation: tuple[int, ...]
    groups: int

    def __call__(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(
            x,
            kernel,
            self.strides,
            self.padding,
            lhs_dilation=self.input_dilation,
            rhs_dilation=self.dilation,
            dimension_numbers=_channels_last(x.ndim),
            feature_group_count=self.groups,
        )


@dataclasses.dataclass(frozen=True)
class _ConvTranspose:
    strides: tuple[int, ...]
    padding: str | tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]

    def __call__(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        numbers = _channels_last(x.ndim)
        return lax.conv_transpose(
            x, kernel, self.strides, self.padding, self.dilation, dimension_numbers=numbers
        )


def conv(
    x: ArrayLike,
    kernel: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    strides: int | Sequence[int] = 1,
    padding: Padding = "SAME",
    dilation: int | Sequence[int] = 1,
    input_dilation: int | Sequence[int] = 1,
    feature_group_count: int = 1,
    constraint: Constraint = "to_output_scale",
    config: MatmulConfig | None = None,
    state: QuantState | None = None,
) -> ScaledArray:
    """Convolves over the spatial dimensions.

    Scaling:
        data = fan_in^-1/2 * conv(x.data, kernel.data) + bias, scale = x.scale * kernel.scale, with
        fan_in = prod(spatial) * in / groups / prod(input_dilation); dx sums out / groups *
        prod(spatial) / prod(strides) terms, dbias batch * output positions, dkernel
        prod(input_dilation) times fewer. All three accumulate in float32. Where both operands are
        bfloat16 they stay so, and results are rounded before their factor, as those of `dense`;
        else operands are widened to float32, and results are rounded once, after their factor. See
        `rules.conv`.

    Args:
        x: (batch, *spatial, in), floating.
        kernel: (*spatial, in / groups, out), floating.
        bias: (out,), or None.
        strides: one stride, or one per spatial dimension.
        padding: "SAME", "VALID", "CAUSAL" (one spatial dimension), an integer for both sides of
            every dimension, or one integer or (low, high) pair for each. "CIRCULAR" and "REFLECT"
            go on with the input itself where the others have zeros. Not "SAME" of dilated inputs.
        dilation: one kernel dilation, or one per spatial dimension.
        input_dilation: one distance of the inputs, or one per spatial dimension; zeros lie between.
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
    (data, x_scale), (w, w_scale) = _operands("conv", x, kernel, feature_group_count)
    if w.shape[-1] % feature_group_count:
        raise ValueError(
            "unitscale.ops.conv: feature_group_count must divide the output channels; got "
            f"{feature_group_count} groups, kernel {w.shape}"
        )
    rank = data.ndim - 2
    strides = per_axis("conv", "strides", strides, rank)
    dilation = per_axis("conv", "dilation", dilation, rank)
    gaps = per_axis("conv", "input_dilation", input_dilation, rank)
    if isinstance(padding, str) and padding.upper() in _BEYOND:
        data, padding = _padded(data, _BEYOND[padding.upper()], w.shape, dilation), "VALID"
    around = sides("conv", padding, w.shape, dilation)
    if max(gaps) > 1 and around == "SAME":
        raise ValueError(
            "unitscale.ops.conv: padding 'SAME' is of inputs without zeros between; got "
            f"input_dilation {input_dilation}; give (low, high) pairs, or use conv_transpose"
        )
    around = ((0, 0),) * rank if around == "VALID" else around
    op = _Conv(strides, around, dilation, gaps, feature_group_count)
    rule = partial(
        rules.conv,
        strides=strides,
        input_dilation=gaps,
        feature_group_count=feature_group_count,
        constraint=constraint,
    )
    operands = (data, x_scale), (w, w_scale)
    return _scaled("conv", op, operands, bias, rule, output_dtype(x), config, state)


def conv_transpose(
    x: ArrayLike,
    kernel: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    strides: int | Sequence[int] = 1,
    padding: Padding = "SAME",
    dilation: int | Sequence[int] = 1,
    constraint: Constraint = "to_output_scale",
    config: MatmulConfig | None = None,
    state: QuantState | None = None,
) -> ScaledArray:
    """Convolves with inputs that lie ``strides`` apart, as `jax.lax.conv_transpose`.

    Scaling:
        That of `conv` with strides of 1 and an input dilation of ``strides``: fan_in =
        prod(spatial) * in / prod(strides), which positions have on average. See `rules.conv`.

    Args:
        x: (batch, *spatial, in), floating.
        kernel: (*spatial, in, out), floating.
        bias: (out,), or None.
        strides: one stride, or one per spatial dimension: how many outputs an input has.
        padding: "SAME", for ``strides`` times as many outputs as inputs, "VALID", for all that an
            input reaches, or an integer or (low, high) pairs, of the dilated input.
        dilation: one kernel dilation, or one per spatial dimension.
        constraint: how the output and the input gradient come to share a factor.
        config: formats that operands are quantized to, as of `conv`.
        state: the scales of a strategy that keeps them.

    Returns:
        ScaledArray (batch, *output spatial, out) in the dtype of ``x`` (bfloat16 for 8-bit data).

    Raises:
        TypeError: if an operand is not floating.
        ValueError: if the shapes, strides or padding do not fit, or a strategy lacks its state.

    Example:
        >>> y = conv_transpose(jnp.ones((1, 5, 4)), jnp.ones((2, 4, 3)), strides=2)
        >>> print(y.shape, float(y.data[0, 0, 0]))
        (1, 10, 3) 2.0

    References:
        Dumoulin, Visin, "A guide to convolution arithmetic", 2016, arXiv 1603.07285, chapter 4.
    """
    operands = _operands("conv_transpose", x, kernel, 1)
    (data, _), (w, _) = operands
    rank = data.ndim - 2
    strides = per_axis("conv_transpose", "strides", strides, rank)
    dilation = per_axis("conv_transpose", "dilation", dilation, rank)
    around = sides("conv_transpose", padding, w.shape, dilation, causal=False)
    op = _ConvTranspose(strides, around, dilation)
    rule = partial(rules.conv, input_dilation=strides, constraint=constraint)
    return _scaled("conv_transpose", op, operands, bias, rule, output_dtype(x), config, state)


_Operand = tuple[jax.Array, Any]


def _operands(name: str, x: ArrayLike, kernel: ArrayLike, groups: int) -> tuple[_Operand, _Operand]:
    """Returns data and scale of both."""
    x_rank, w_rank = unpack(name, "x", x)[0].ndim, unpack(name, "kernel", kernel)[0].ndim
    data, x_scale = unpack_uniform(name, "x", x, tuple(range(1, x_rank)))
    w, w_scale = unpack_uniform(name, "kernel", kernel, tuple(range(w_rank)))
    if data.ndim < 3 or w.ndim != data.ndim or w.shape[-2] * groups != data.shape[-1]:
        raise shape_error(
            name,
            "x must be (batch, *spatial, in) and kernel (*spatial, in / groups, out)",
            f"feature_group_count is {groups}.",
            x=data.shape,
            kernel=w.shape,
        )
    return (data, x_scale), (w, w_scale)


def _scaled(
    name: str,
    op: _Conv | _ConvTranspose,
    operands: tuple[_Operand, _Operand],
    bias: ArrayLike | None,
    rule: Callable[..., Factors],
    out_dtype: Any,
    config: MatmulConfig | None,
    state: QuantState | None,
) -> ScaledArray:
    """Convolves data, and multiplies by the factors that a rule has for its shapes."""
    (data, x_scale), (w, w_scale) = operands
    out = jax.eval_shape(op, *(jax.ShapeDtypeStruct(a.shape, jnp.float32) for a in (data, w)))
    factors = rule(w.shape, global_batch_size(math.prod(out.shape[:-1]), data), 1)
    if config is not None:
        axes = tuple(range(1, data.ndim)), tuple(range(data.ndim - 1))
        data, w = fake_quantize_operands(data, w, config, axes=axes, state=state)
    y = _convolve(op, data, w, factors.fwd, factors.bwd[:2], out_dtype)
    y, y_scale = times_scales(y, x_scale, w_scale)
    if bias is None:
        return ScaledArray(y, y_scale)
    return add_bias(name, y, y_scale, bias, factors.bwd[2])


def _padded(x: jax.Array, mode: Any, window: Sequence[int], dilation: Sequence[int]) -> jax.Array:
    """Goes on beyond the sides of ``x``, so that strides of 1 give as many outputs as inputs."""
    beyond = [(size - 1) * step for size, step in zip(window, dilation, strict=False)]
    return jnp.pad(x, ((0, 0), *((n // 2, n - n // 2) for n in beyond), (0, 0)), mode=mode)


def _convolve(
    op: _Conv | _ConvTranspose, x, w, fwd: float, bwd: tuple[float, ...], out_dtype: Any
) -> jax.Array:
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
    op: str,
    padding: Padding,
    window: Sequence[int],
    dilation: Sequence[int],
    *,
    causal: bool = True,
) -> str | tuple[tuple[int, int], ...]:
    """Returns padding as "SAME", "VALID" or one (low, high) pair for each spatial dimension."""
    rank = len(dilation)
    if isinstance(padding, str):
        name = padding.upper()
        if name == "CAUSAL" and causal and rank == 1:
            return (((window[0] - 1) * dilation[0], 0),)
        if name in ("SAME", "VALID"):
            return name
    else:
        each = (padding,) * rank if isinstance(padding, int) else padding
        pairs = [(side, side) if isinstance(side, int) else tuple(side) for side in each]
        if len(pairs) == rank and all(len(pair) == 2 for pair in pairs):
            return tuple((int(low), int(high)) for low, high in pairs)
    more = "'CAUSAL' (one spatial dimension), " if causal else ""
    more += "'CIRCULAR', 'REFLECT', " if op == "conv" else ""
    raise ValueError(
        f"unitscale.ops.{op}: padding must be 'SAME', 'VALID', {more}an integer, or one integer or "
        f"(low, high) pair for each of {rank} dimensions; got {padding!r}"
    )
