"""Convolution and pooling, channels last, of any rank."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .. import rules
from ..core import ScaledArray, global_batch_size, scale, scale_bwd
from ..quant import MatmulConfig, QuantState, fake_quantize_operands
from ..rules import Constraint, Factors
from ._linear import add_bias
from ._operands import ArrayLike, multiply_scales, output_dtype, shape_error, unpack, wide_op

Padding = str | int | Sequence[int | tuple[int, int]]
_Pairs = str | tuple[tuple[int, int], ...]
_Operand = tuple[jax.Array, Any]
_PAD_MODES: dict[str, Any] = {"CIRCULAR": "wrap", "REFLECT": "reflect"}


def _conv(strides, padding, dilation, input_dilation, groups, x, kernel):
    return lax.conv_general_dilated(
        x,
        kernel,
        strides,
        padding,
        lhs_dilation=input_dilation,
        rhs_dilation=dilation,
        dimension_numbers=_channels_last(x.ndim),
        feature_group_count=groups,
    )


def _conv_transpose(strides, padding, dilation, x, kernel):
    numbers = _channels_last(x.ndim)
    return lax.conv_transpose(x, kernel, strides, padding, dilation, dimension_numbers=numbers)


def _channels_last(ndim: int) -> lax.ConvDimensionNumbers:
    axes = tuple(range(1, ndim - 1))
    image = (0, ndim - 1, *axes)
    return lax.ConvDimensionNumbers(
        image, (ndim - 1, ndim - 2, *(axis - 1 for axis in axes)), image
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

    Scaling: `rules.conv`; the scales are multiplied, and the bias is added at the result's.

    Args:
        x: (batch, *spatial, in), floating.
        kernel: (*spatial, in / groups, out), floating.
        bias: (out,), or None.
        strides: one stride, or one per spatial dimension.
        padding: "SAME", "VALID", "CAUSAL" (one spatial dimension), "CIRCULAR", "REFLECT", an
            integer for both sides of every dimension, or one integer or (low, high) pair for each.
            Dilated inputs do not support "SAME".
        dilation: one kernel dilation, or one per spatial dimension.
        input_dilation: one dilation of the input, or one per spatial dimension.
        feature_group_count: number of groups, dividing in and out.
        constraint: see `matmul`.
        config: formats that operands are rounded to before a convolution in bfloat16 or float32
            (XLA has no FP8 kernel). Cotangents are not quantized.
        state: see `matmul`.

    Returns:
        ScaledArray (batch, *output spatial, out) in the dtype of ``x``.

    Example:
        >>> y = conv(jnp.ones((1, 5, 4)), jnp.ones((3, 4, 2)), padding="VALID")
        >>> print(y.shape, round(float(y.data[0, 0, 0]), 3))
        (1, 3, 2) 3.464
    """
    (data, x_scale), (w, w_scale) = _operands("conv", x, kernel, feature_group_count)
    if w.shape[-1] % feature_group_count:
        raise ValueError(
            "unitscale.ops.conv: feature_group_count must divide the output channels; got "
            f"{feature_group_count} groups, kernel {w.shape}"
        )
    rank = data.ndim - 2
    strides = _per_axis("conv", "strides", strides, rank)
    dilation = _per_axis("conv", "dilation", dilation, rank)
    gaps = _per_axis("conv", "input_dilation", input_dilation, rank)
    if isinstance(padding, str) and padding.upper() in _PAD_MODES:
        beyond = [(n - 1) * step for n, step in zip(w.shape, dilation, strict=False)]
        sides = ((0, 0), *((n // 2, n - n // 2) for n in beyond), (0, 0))
        data, padding = jnp.pad(data, sides, mode=_PAD_MODES[padding.upper()]), "VALID"
    around = _sides("conv", padding, w.shape, dilation)
    if max(gaps) > 1 and around == "SAME":
        raise ValueError(
            "unitscale.ops.conv: padding 'SAME' needs inputs that are not dilated; got "
            f"input_dilation {input_dilation}; give (low, high) pairs, or use conv_transpose"
        )
    around = ((0, 0),) * rank if around == "VALID" else around
    f = partial(_conv, strides, around, dilation, gaps, feature_group_count)
    rule = partial(
        rules.conv,
        strides=strides,
        input_dilation=gaps,
        feature_group_count=feature_group_count,
        constraint=constraint,
    )
    operands = (data, x_scale), (w, w_scale)
    return _scaled("conv", f, operands, bias, rule, output_dtype(x), config, state)


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
    """Applies a transposed convolution, as `jax.lax.conv_transpose`.

    Scaling: `rules.conv` with strides of 1 and an input dilation of ``strides``; scales as in
    `conv`.

    Arguments are those of `conv`, with ``padding`` "SAME" (``strides`` outputs per input), "VALID",
    an integer, or (low, high) pairs.

    References:
        Dumoulin, Visin, "A guide to convolution arithmetic", 2016, arXiv 1603.07285, chapter 4.
    """
    operands = _operands("conv_transpose", x, kernel, 1)
    (data, _), (w, _) = operands
    strides = _per_axis("conv_transpose", "strides", strides, data.ndim - 2)
    dilation = _per_axis("conv_transpose", "dilation", dilation, data.ndim - 2)
    around = _sides("conv_transpose", padding, w.shape, dilation)
    f = partial(_conv_transpose, strides, around, dilation)
    rule = partial(rules.conv, input_dilation=strides, constraint=constraint)
    return _scaled("conv_transpose", f, operands, bias, rule, output_dtype(x), config, state)


def _operands(name: str, x: ArrayLike, kernel: ArrayLike, groups: int) -> tuple[_Operand, _Operand]:
    rank = jnp.ndim(unpack(name, "x", x)[0])
    data, x_scale = unpack(name, "x", x, tuple(range(1, rank)))
    w, w_scale = unpack(name, "kernel", kernel, ...)
    if data.ndim < 3 or w.ndim != data.ndim or w.shape[-2] * groups != data.shape[-1]:
        raise shape_error(
            name,
            "x must be (batch, *spatial, in) and kernel (*spatial, in / groups, out)",
            f"feature_group_count is {groups}.",
            x=data.shape,
            kernel=w.shape,
        )
    return (data, x_scale), (w, w_scale)


def _scaled(op, f, operands, bias, rule, out_dtype, config, state) -> ScaledArray:
    """Convolves by ``f``, with the factors of a rule for the operands' shapes."""
    (data, x_scale), (w, w_scale) = operands
    out = jax.eval_shape(f, *(jax.ShapeDtypeStruct(a.shape, jnp.float32) for a in (data, w)))
    factors = rule(w.shape, global_batch_size(math.prod(out.shape[:-1]), data), 1)
    if config is not None:
        axes = tuple(range(1, data.ndim)), tuple(range(data.ndim - 1))
        data, w = fake_quantize_operands(data, w, config, axes=axes, state=state)
    bwd = factors.bwd[:2]
    if data.dtype == w.dtype == jnp.bfloat16:
        # With the range of float32, factors can follow the rounding, as in `quant.contract`.
        y = scale(f(scale_bwd(data, bwd[0]), scale_bwd(w, bwd[1])), factors.fwd)
    else:
        own = Factors(factors.fwd, bwd)
        y = wide_op(f.func, data, w, factors=own, static=f.args, out_dtype=out_dtype)
    return add_bias(op, multiply_scales(y, x_scale, w_scale), bias, factors.bwd[2])


def _per_axis(op: str, name: str, value: int | Sequence[int], rank: int) -> tuple[int, ...]:
    sizes = (value,) * rank if isinstance(value, int) else tuple(value)
    if len(sizes) != rank or any(size < 1 for size in sizes):
        raise ValueError(
            f"unitscale.ops.{op}: {name} must be a positive integer or {rank} of them; got {value}"
        )
    return sizes


def _sides(op: str, padding: Padding, window: Sequence[int], dilation: Sequence[int]) -> _Pairs:
    """Returns padding as "SAME", "VALID" or one (low, high) pair for each spatial dimension."""
    rank, causal = len(dilation), op != "conv_transpose"
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


class _Windows(NamedTuple):
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    padding: _Pairs

    def reduce(self, x: jax.Array, init: float, f: Callable[..., jax.Array]) -> jax.Array:
        ones = (1,) * (x.ndim - len(self.shape) - 1)
        pads = self.padding
        if not isinstance(pads, str):
            pads = (*((0, 0) for _ in ones), *pads, (0, 0))
        return lax.reduce_window(
            x, init, f, (*ones, *self.shape, 1), (*ones, *self.strides, 1), pads
        )


def _mean(windows, count_padding, x):
    total = windows.reduce(x, 0.0, lax.add)
    if count_padding:
        return total / math.prod(windows.shape)
    ones = jnp.ones((*x.shape[-1 - len(windows.shape) : -1], 1), x.dtype)
    return total / jnp.maximum(windows.reduce(ones, 0.0, lax.add), 1)


def _maximum(windows, x):
    return windows.reduce(x, -jnp.inf, lax.max)


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

    Scaling: `rules.avg_pool`, for independent entries; the scale is carried.

    Args:
        x: (..., *spatial, features), floating.
        window_shape: size of the window in each spatial dimension.
        strides: strides in each spatial dimension; by default 1.
        padding: as for `conv`, but not "CIRCULAR" and "REFLECT".
        count_include_pad: whether the zeros of the padding count as entries of the mean.
        constraint: see `unitscale.ops`.

    Returns:
        ScaledArray (..., *output spatial, features).

    Example:
        >>> print(avg_pool(jnp.ones((1, 4, 4, 3)), (2, 2), (2, 2)).data[0, 0, 0])
        [2. 2. 2.]
    """
    windows = _windows("avg_pool", x, window_shape, strides, padding)
    factors = rules.avg_pool(windows.shape, windows.strides, constraint=constraint)
    return _pool("avg_pool", _mean, x, windows, factors, count_include_pad)


def max_pool(
    x: ArrayLike,
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: Padding = "VALID",
    *,
    constraint: Constraint = "to_output_scale",
) -> ScaledArray:
    """Takes the maximum over windows, as `flax.linen.max_pool`, scaled to unit variance.

    Scaling: `rules.max_pool`; the scale is carried, and the mean is not removed.

    Arguments are those of `avg_pool`; the padding is -inf.
    """
    windows = _windows("max_pool", x, window_shape, strides, padding)
    factors = rules.max_pool(windows.shape, windows.strides, constraint=constraint)
    return _pool("max_pool", _maximum, x, windows, factors)


def _windows(op, x, window_shape, strides, padding) -> _Windows:
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
    window = _per_axis(op, "window_shape", window, len(window))
    strides = _per_axis(op, "strides", 1 if strides is None else strides, len(window))
    return _Windows(window, strides, _sides(op, padding, window, (1,) * len(window)))


def _pool(op, f, x, windows, factors, *options) -> ScaledArray:
    data, scale = unpack(op, "x", x, tuple(range(-1 - len(windows.shape), -1)))
    y = wide_op(f, data, factors=factors, static=(windows, *options), out_dtype=output_dtype(x))
    return ScaledArray(y, scale)
