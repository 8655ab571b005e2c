"""Convolution and pooling, channels last, in any number of spatial dimensions."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import rules
from ..core import ScaledArray, global_batch_size, scale, scale_bwd
from ..quant import MatmulConfig, QuantState, fake_quantize_operands
from ..rules import Constraint, Factors
from ._linear import add_bias
from ._operands import ArrayLike, multiply_scales, output_dtype, shape_error, unpack, wide_op

Padding = str | int | Sequence[int | tuple[int, int]]
_PAD_MODES: dict[str, Any] = {"CIRCULAR": "wrap", "REFLECT": "reflect"}


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
    """Convolve over the spatial dimensions.

    Scaling: `rules.conv`. The scale of the result is the product of the scales of x and kernel.

    Args:
        x: (batch, *spatial, in), floating.
        kernel: (*spatial, in / groups, out), floating.
        bias: (out,), or None.
        strides: one stride, or one per spatial dimension.
        padding: "SAME", "VALID", "CAUSAL" (one spatial dimension), "CIRCULAR", "REFLECT", an
            integer for both sides of every dimension, or one integer or (low, high) pair for each.
            "SAME" does not support dilated inputs.
        dilation: one kernel dilation, or one per spatial dimension.
        input_dilation: one dilation of the input, or one per spatial dimension.
        feature_group_count: number of groups; must divide in and out.
        constraint: see `unitscale.ops`.
        config: formats that the operands are rounded to. The convolution itself runs in the wider
            dtype, because XLA has no FP8 convolution, and cotangents are not quantized.
        state: see `unitscale.ops`.

    Returns:
        ScaledArray (batch, *output spatial, out) in the dtype of ``x``.

    Example:
        >>> y = conv(jnp.ones((1, 5, 4)), jnp.ones((3, 4, 2)), padding="VALID")
        >>> print(y.shape, round(float(y.data[0, 0, 0]), 3))
        (1, 3, 2) 3.464
    """
    how = ("strides", strides), ("dilation", dilation), ("input_dilation", input_dilation)
    operands, last = (x, kernel, bias), (constraint, config, state)
    return _convolve("conv", *operands, how, padding, feature_group_count, *last)


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
    """Apply a transposed convolution, like `jax.lax.conv_transpose`.

    Scaling: `rules.conv` with strides of 1 and an input dilation of ``strides``; scales as in
    `conv`.

    Takes the arguments of `conv`, with ``padding`` "SAME" (``strides`` outputs per input), "VALID",
    an integer, or (low, high) pairs.

    References:
        Dumoulin, Visin, "A guide to convolution arithmetic", 2016, arXiv 1603.07285, chapter 4.
    """
    # A transposed convolution is a convolution whose input is dilated by the strides.
    how = ("strides", 1), ("dilation", dilation), ("strides", strides)
    operands, last = (x, kernel, bias), (constraint, config, state)
    return _convolve("conv_transpose", *operands, how, padding, 1, *last)


def _convolve(op, x, kernel, bias, how, padding, groups, constraint, config, state) -> ScaledArray:
    """Implement both convolutions; ``how`` has (name, value) pairs of strides and dilations."""
    rank = np.ndim(x) - 2
    data, x_scale = unpack(op, "x", x, tuple(range(1, rank + 2)))
    w, w_scale = unpack(op, "kernel", kernel, ...)
    if rank < 1 or w.ndim != data.ndim or w.shape[-2] * groups != data.shape[-1]:
        raise shape_error(
            op,
            "x must be (batch, *spatial, in) and kernel (*spatial, in / groups, out)",
            f"feature_group_count is {groups}.",
            x=data.shape,
            kernel=w.shape,
        )
    if w.shape[-1] % groups:
        raise ValueError(
            f"unitscale.ops.{op}: feature_group_count must divide the output channels; got "
            f"{groups} groups, kernel {w.shape}"
        )
    strides, dilation, gaps = (_per_axis(op, name, n, rank) for name, n in how)
    window = tuple((n - 1) * step + 1 for n, step in zip(w.shape, dilation, strict=False))
    if isinstance(padding, str) and padding.upper() in _PAD_MODES and op == "conv":
        sides = ((0, 0), *(((n - 1) // 2, n // 2) for n in window), (0, 0))
        data, padding = jnp.pad(data, sides, mode=_PAD_MODES[padding.upper()]), "VALID"
    sides = _sides(op, padding, window, gaps)
    f = partial(_conv, strides, sides, dilation, gaps, groups)
    out = jax.eval_shape(f, *(jax.ShapeDtypeStruct(a.shape, jnp.float32) for a in (data, w)))
    factors = rules.conv(
        w.shape,
        global_batch_size(math.prod(out.shape[:-1]), data),
        1,
        strides=strides,
        input_dilation=gaps,
        feature_group_count=groups,
        constraint=constraint,
    )
    if config is not None:
        axes = tuple(range(1, data.ndim)), tuple(range(data.ndim - 1))
        data, w = fake_quantize_operands(data, w, config, axes=axes, state=state)
    bwd = factors.bwd[:2]
    if data.dtype == w.dtype == jnp.bfloat16:
        # bfloat16 has float32's range: multiply by the factors after rounding, as in `contract`.
        y = scale(f(scale_bwd(data, bwd[0]), scale_bwd(w, bwd[1])), factors.fwd)
    else:
        own, out_dtype = Factors(factors.fwd, bwd), output_dtype(x)
        y = wide_op(_conv, data, w, factors=own, static=f.args, out_dtype=out_dtype)
    return add_bias(op, multiply_scales(y, x_scale, w_scale), bias, factors.bwd[2])


def _conv(strides, padding, dilation, input_dilation, groups, x, kernel):
    axes = tuple(range(1, x.ndim - 1))
    image, window = (0, x.ndim - 1, *axes), (x.ndim - 1, x.ndim - 2, *(axis - 1 for axis in axes))
    return lax.conv_general_dilated(
        x,
        kernel,
        strides,
        padding,
        lhs_dilation=input_dilation,
        rhs_dilation=dilation,
        dimension_numbers=lax.ConvDimensionNumbers(image, window, image),
        feature_group_count=groups,
    )


def _per_axis(op: str, name: str, value: int | Sequence[int], rank: int) -> tuple[int, ...]:
    sizes = (value,) * rank if isinstance(value, int | np.integer) else tuple(value)
    if len(sizes) != rank or any(size < 1 for size in sizes):
        raise ValueError(
            f"unitscale.ops.{op}: {name} must be a positive integer or {rank} of them; got {value}"
        )
    return sizes


def _sides(op: str, padding: Padding, window: Sequence[int], gaps: Sequence[int] = (1,)) -> Any:
    """Return padding as "SAME" or one (low, high) pair for each spatial dimension."""
    rank, name = len(window), padding.upper() if isinstance(padding, str) else None
    transposed = op == "conv_transpose"
    if name == "CAUSAL" and rank == 1 and not transposed:
        return ((window[0] - 1, 0),)
    if name in ("SAME", "VALID") and transposed:
        longest = gaps if name == "SAME" else map(max, window, gaps)
        sums = [(n, n + more - 2) for n, more in zip(window, longest, strict=True)]
        return tuple((low := min(n - 1, -(-both // 2)), both - low) for n, both in sums)
    if name == "VALID":
        return ((0, 0),) * rank
    if name == "SAME":
        if max(gaps) > 1:
            raise ValueError(
                f"unitscale.ops.{op}: padding 'SAME' does not support dilated inputs; got "
                f"input_dilation {gaps}; give (low, high) pairs, or use conv_transpose"
            )
        return name
    if name is None and padding is not None:
        each = (padding,) * rank if isinstance(padding, int) else padding
        pairs = [(side, side) if isinstance(side, int) else tuple(side) for side in each]
        if len(pairs) == rank and all(len(pair) == 2 for pair in pairs):
            return tuple((int(low), int(high)) for low, high in pairs)
    more = "" if transposed else "'CAUSAL' (one spatial dimension), "
    more += "'CIRCULAR', 'REFLECT', " if op == "conv" else ""
    raise ValueError(
        f"unitscale.ops.{op}: padding must be 'SAME', 'VALID', {more}an integer, or one integer or "
        f"(low, high) pair for each of {rank} dimensions; got {padding!r}"
    )


class _Windows(NamedTuple):
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    padding: Any

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
    """Average over windows, like `flax.linen.avg_pool`, scaled to unit variance.

    Scaling: `rules.avg_pool`, which assumes independent entries. The result keeps the scale of x.

    Args:
        x: (..., *spatial, features), floating.
        window_shape: size of the window in each spatial dimension.
        strides: strides in each spatial dimension; by default 1.
        padding: as for `conv`, without "CIRCULAR" and "REFLECT".
        count_include_pad: whether the mean includes the zeros of the padding.
        constraint: see `unitscale.ops`.

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
    """Take the maximum over windows, like `flax.linen.max_pool`, scaled to unit variance.

    Scaling: `rules.max_pool`. The result keeps the scale of x. The mean of the result is not zero.

    Takes the arguments of `avg_pool`. The input is padded with -inf.
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
            x=data.shape,
            window_shape=window,
        )
    window = _per_axis(op, "window_shape", window, len(window))
    strides = _per_axis(op, "strides", 1 if strides is None else strides, len(window))
    return _Windows(window, strides, _sides(op, padding, window))


def _pool(op, f, x, windows, factors, *options) -> ScaledArray:
    data, scale = unpack(op, "x", x, tuple(range(-1 - len(windows.shape), -1)))
    y = wide_op(f, data, factors=factors, static=(windows, *options), out_dtype=output_dtype(x))
    return ScaledArray(y, scale)
