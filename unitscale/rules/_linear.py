"""Factors of the products: matmul, dense, readout and convolution.

All four are one contraction rule. A sum of `k` products of independent unit values has RMS `k^1/2`,
so every one of the three products of a linear op (output, input gradient, weight gradient) is
divided by the root of the number of terms that it sums.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

from ._checks import positive_sizes
from ._constraints import Constraint, constrain
from ._factors import Factors


def matmul(
    m: int,
    k: int,
    n: int,
    *,
    left_repeats: int = 1,
    right_repeats: int = 1,
    constraint: Constraint = "to_output_scale",
) -> Factors:
    """Return the factors of `(m, k) @ (k, n)`.

    Scaling:
        Forward `k^-1/2`. Before the constraint, the left gradient has `(n * left_repeats)^-1/2` and
        the right gradient `(m * right_repeats)^-1/2`: the number of terms in each one's own sum.
        Assumes independent operands of zero mean and unit variance.

    Args:
        m: Rows of the left operand.
        k: Contracted dimension.
        n: Columns of the right operand.
        left_repeats: How many times batch broadcasting repeats the left operand.
        right_repeats: How many times batch broadcasting repeats the right operand.
        constraint: How output, left and right come to share a factor.

    Returns:
        Factors with `bwd = (left, right)`.

    Raises:
        TypeError: If a size is not a static integer.
        ValueError: If a size is not positive, or the constraint does not fit two operands.

    Example:
        >>> matmul(4, 16, 64, constraint=None)
        Factors(fwd=0.25, bwd=(0.125, 0.5))

    References:
        Unit Scaling: Blake, Orr, Luschi, ICML 2023, arXiv 2303.11257, scaling factors of matmul.
    """
    positive_sizes(
        "matmul",
        {"m": m, "k": k, "n": n, "left_repeats": left_repeats, "right_repeats": right_repeats},
    )
    output, left, right = constrain(
        constraint, _rsqrt(k), _rsqrt(n * left_repeats), _rsqrt(m * right_repeats)
    )
    return Factors(output, (left, right))


def dense(
    in_features: int,
    out_features: int,
    batch: int,
    *,
    constraint: Constraint = "to_output_scale",
) -> Factors:
    """Return the factors of a dense layer.

    Scaling:
        Forward `in^-1/2` and input gradient `out^-1/2`, constrained together. Kernel and bias are
        cut edges, so their gradients, sums over the batch, have `batch^-1/2` whatever the
        constraint. The bias is added after the forward factor. Assumes independent unit inputs,
        weights and cotangents.

    Args:
        in_features: Size of the contracted dimension.
        out_features: Size of the output's last dimension.
        batch: Number of rows: the product of all leading dimensions.
        constraint: How the output and the input gradient come to share a factor.

    Returns:
        Factors with `bwd = (x, kernel, bias)`.

    Raises:
        TypeError: If a size is not a static integer.
        ValueError: If a size is not positive, or the constraint does not fit one operand.

    Example:
        >>> dense(16, 64, 4)
        Factors(fwd=0.25, bwd=(0.25, 0.5, 0.5))

    References:
        Unit Scaling: Blake, Orr, Luschi, ICML 2023, arXiv 2303.11257, scaling factors of matmul.
        u-muP: Blake et al., 2024, arXiv 2407.17465, table 2 (hidden weights).
    """
    positive_sizes(
        "dense", {"in_features": in_features, "out_features": out_features, "batch": batch}
    )
    output, x = constrain(constraint, _rsqrt(in_features), _rsqrt(out_features))
    return Factors(output, (x, _rsqrt(batch), _rsqrt(batch)))


def readout(
    in_features: int,
    out_features: int,
    batch: int,
    *,
    constraint: Constraint = None,
) -> Factors:
    """Return the factors of the layer that produces the logits.

    Scaling:
        Forward `in^-1`, so that logits do not grow with width; input gradient `out^-1/2`; kernel
        and bias gradients `batch^-1/2`. The logits are thus *not* of unit variance: their RMS is
        `in^-1/2` at initialisation. The input gradient may be scaled freely (constraint None) where
        the readout's input is the one path from the loss to the rest of the model, a cut edge.

    Args:
        in_features: Size of the contracted dimension.
        out_features: Number of logits.
        batch: Number of rows: the product of all leading dimensions.
        constraint: How the output and the input gradient come to share a factor.

    Returns:
        Factors with `bwd = (x, kernel, bias)`.

    Raises:
        TypeError: If a size is not a static integer.
        ValueError: If a size is not positive, or the constraint does not fit one operand.

    Example:
        >>> readout(16, 64, 4)
        Factors(fwd=0.0625, bwd=(0.125, 0.5, 0.5))

    References:
        u-muP: Blake et al., 2024, arXiv 2407.17465, table 2 (output weights).
    """
    positive_sizes(
        "readout", {"in_features": in_features, "out_features": out_features, "batch": batch}
    )
    output, x = constrain(constraint, 1 / in_features, _rsqrt(out_features))
    return Factors(output, (x, _rsqrt(batch), _rsqrt(batch)))


def conv(
    kernel_shape: Sequence[int],
    batch: int,
    output_spatial_size: int | Sequence[int],
    *,
    strides: int | Sequence[int] = 1,
    input_dilation: int | Sequence[int] = 1,
    feature_group_count: int = 1,
    constraint: Constraint = "to_output_scale",
) -> Factors:
    """Return the factors of a convolution, channels last; of a transposed one too.

    Scaling:
        Forward `fan_in^-1/2` with `fan_in = prod(spatial) * in / groups / prod(input_dilation)`,
        the terms that are not between inputs, on average over positions. The input gradient sums
        `out / groups * prod(spatial) / prod(strides)` taps on average. Kernel and bias are cut
        edges: the bias sums over `batch * output positions`, the kernel over `prod(input_dilation)`
        times fewer. Assumes interior pixels: zero padding, which leaves fewer terms in the sums
        near the border, is not counted. Dilation of the kernel changes no count.

    Args:
        kernel_shape: `(*spatial, in / groups, out)`.
        batch: Number of examples.
        output_spatial_size: Number of output positions per example, or the output's spatial shape.
        strides: One stride for all spatial dimensions, or one for each.
        input_dilation: Distance of inputs that zeros are put between, likewise. A transposed
            convolution of stride n is a convolution of stride 1 and this input dilation.
        feature_group_count: Number of channel groups.
        constraint: How the output and the input gradient come to share a factor.

    Returns:
        Factors with `bwd = (x, kernel, bias)`.

    Raises:
        TypeError: If a size is not a static integer.
        ValueError: If a size is not positive, strides or input dilation do not match the kernel's
            rank, or the groups do not divide the output channels.

    Example:
        >>> conv((2, 2, 4, 16), batch=1, output_spatial_size=(8, 8))
        Factors(fwd=0.25, bwd=(0.25, 0.125, 0.125))

    References:
        Unit Scaling: Blake, Orr, Luschi, ICML 2023, arXiv 2303.11257, scaling factors of matmul.
    """
    kernel_shape = tuple(kernel_shape)
    if len(kernel_shape) < 2:
        raise ValueError(
            "unitscale.rules.conv: kernel_shape must be (*spatial, in / groups, out); got "
            f"{kernel_shape}."
        )
    *spatial, in_features, out_features = kernel_shape
    strides, gaps = (_sizes(sizes, len(spatial)) for sizes in (strides, input_dilation))
    positions = _sizes(output_spatial_size, 1)
    positive_sizes("conv", {f"kernel_shape[{i}]": size for i, size in enumerate(kernel_shape)})
    positive_sizes("conv", {"batch": batch, "feature_group_count": feature_group_count})
    positive_sizes("conv", {f"output_spatial_size[{i}]": size for i, size in enumerate(positions)})
    for name, sizes in (("strides", strides), ("input_dilation", gaps)):
        positive_sizes("conv", {f"{name}[{i}]": size for i, size in enumerate(sizes)})
        if len(sizes) != len(spatial):
            raise ValueError(
                f"unitscale.rules.conv: {name} must have one entry per spatial dimension "
                f"({len(spatial)}); got {sizes}."
            )
    if out_features % feature_group_count:
        raise ValueError(
            "unitscale.rules.conv: feature_group_count must divide the output channels; got "
            f"{feature_group_count} groups, {out_features} channels."
        )
    window = math.prod(spatial)
    taps = out_features // feature_group_count * window / math.prod(strides)
    terms = window * in_features / math.prod(gaps)
    output, x = constrain(constraint, _rsqrt(terms), _rsqrt(taps))
    total = batch * math.prod(positions)
    return Factors(output, (x, _rsqrt(total / math.prod(gaps)), _rsqrt(total)))


def _rsqrt(terms: float) -> float:
    return 1 / math.sqrt(terms)


def _sizes(sizes: int | Sequence[int], rank: int) -> tuple[int, ...]:
    if isinstance(sizes, Sequence):
        return tuple(sizes)
    return (operator.index(sizes),) * rank
