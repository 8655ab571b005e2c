"""Factors of linear ops: matmul, dense, readout, LoRA, convolution, embedding, experts.

All follow one rule: a sum of `k` products of independent unit values has RMS `k^1/2`, so each of
the three matmuls of a linear op (output, input gradient, weight gradient) is multiplied by the
inverse root of the number of terms in its sums.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

from ._factors import (
    Constraint,
    Factors,
    check_per_dimension,
    check_sizes,
    constrain,
    positive_number,
)
from ._normalization import gate_moments


def matmul(
    m: int,
    k: int,
    n: int,
    *,
    left_repeats: int = 1,
    right_repeats: int = 1,
    constraint: Constraint = "to_output_scale",
) -> Factors:
    """Return the factors of `(m, k) @ (k, n)`, with `bwd = (left, right)`.

    Scaling:
        Forward `k^-1/2`. Before the constraint, the left gradient has `(n * left_repeats)^-1/2` and
        the right gradient `(m * right_repeats)^-1/2`: each counts the terms of its own sum, with
        the number of times that batch broadcasting repeats the operand. Assumes independent
        operands of zero mean and unit variance.

    Example:
        >>> matmul(4, 16, 64, constraint=None)
        Factors(fwd=0.25, bwd=(0.125, 0.5))

    References:
        Unit Scaling, arXiv 2303.11257, scaling factors of matmul.
    """
    check_sizes("matmul", m=m, k=k, n=n, left_repeats=left_repeats, right_repeats=right_repeats)
    output, left, right = constrain(
        constraint, _rsqrt(k), _rsqrt(n * left_repeats), _rsqrt(m * right_repeats)
    )
    return Factors(output, (left, right))


def dense(
    in_features: int, out_features: int, batch: int, *, constraint: Constraint = "to_output_scale"
) -> Factors:
    """Return the factors of a dense layer, with `bwd = (x, kernel, bias)`.

    Scaling:
        Forward `in^-1/2` and input gradient `out^-1/2`, constrained together. Kernel and bias are
        cut edges, so their gradients, sums over the batch, have `batch^-1/2`. The bias is added
        after the forward factor. Assumes independent unit inputs, weights and cotangents.

    Example:
        >>> dense(16, 64, 4)
        Factors(fwd=0.25, bwd=(0.25, 0.5, 0.5))

    References:
        Unit Scaling, arXiv 2303.11257, scaling factors of matmul.
        u-muP, arXiv 2407.17465, table 2 (hidden weights).
    """
    check_sizes("dense", in_features=in_features, out_features=out_features, batch=batch)
    output, x = constrain(constraint, _rsqrt(in_features), _rsqrt(out_features))
    return Factors(output, (x, _rsqrt(batch), _rsqrt(batch)))


def readout(
    in_features: int, out_features: int, batch: int, *, constraint: Constraint = None
) -> Factors:
    """Return the factors of the layer that computes the logits, with `bwd = (x, kernel, bias)`.

    Scaling:
        Forward `in^-1`, so that logits do not grow with width: their RMS is `in^-1/2` at
        initialization. Input gradient `out^-1/2`; kernel and bias gradients `batch^-1/2`.
        Constraint None is correct if the readout's input is a cut edge: the only path from the loss
        to the rest of the model.

    Example:
        >>> readout(16, 64, 4)
        Factors(fwd=0.0625, bwd=(0.125, 0.5, 0.5))

    References:
        u-muP, arXiv 2407.17465, table 2 (output weights).
    """
    check_sizes("readout", in_features=in_features, out_features=out_features, batch=batch)
    output, x = constrain(constraint, 1 / in_features, _rsqrt(out_features))
    return Factors(output, (x, _rsqrt(batch), _rsqrt(batch)))


def lora(
    in_features: int,
    rank: int,
    out_features: int,
    batch: int,
    *,
    constraint: Constraint = "to_output_scale",
) -> tuple[Factors, Factors]:
    """Return the factors of both matmuls of `x @ a @ b`, the low-rank update of a dense layer.

    Scaling:
        Forward that of `dense` for `x @ a`, then `rank^-1/2` for `h @ b`. The gradient of `h` has
        `out^-1/2`, which makes it and the gradient of `a` unit. The input is not a cut edge,
        because the dense layer reads it too, so over both matmuls its gradient has the factor of
        `dense` times `rank^-1/2`. Gradients of `a` and `b` have `batch^-1/2`. The results have `bwd
        = (x, a)` and `bwd = (h, b)`. Assumes independent unit inputs, weights and cotangents.

    Example:
        >>> lora(16, 4, 64, 4)
        (Factors(fwd=0.25, bwd=(1.0, 0.5)), Factors(fwd=0.5, bwd=(0.125, 0.5)))

    References:
        Hu et al., "LoRA", 2021, arXiv 2106.09685; Unit Scaling, arXiv 2303.11257, scaling factors
        of matmul.
    """
    check_sizes("lora", rank=rank)
    beside = dense(in_features, out_features, batch, constraint=constraint)
    x, weight, _ = beside.bwd
    between, forward = _rsqrt(out_features), _rsqrt(rank)
    first = Factors(beside.fwd, (x * forward / between, weight))
    return first, Factors(forward, (between, weight))


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
    """Return the factors of a convolution, plain or transposed, with `bwd = (x, kernel, bias)`.

    Scaling:
        Forward `fan_in^-1/2` with `fan_in = prod(spatial) * in / groups / prod(input_dilation)`,
        the average number of terms that are not the zeros between dilated inputs. The input
        gradient sums `out / groups * prod(spatial) / prod(strides)` terms on average. Kernel and
        bias are cut edges: the bias gradient sums over `batch * output positions`, the kernel
        gradient over `prod(input_dilation)` times fewer. Assumes interior pixels, without padding.

    Args:
        kernel_shape: `(*spatial, in / groups, out)`.
        batch: Number of examples.
        output_spatial_size: Number of output positions per example, or the output's spatial shape.
        strides: One stride for all spatial dimensions, or one for each.
        input_dilation: Likewise; n for a transposed convolution of stride n, whose strides are 1.
        feature_group_count: Number of channel groups.
        constraint: See `constrain`.

    Example:
        >>> conv((2, 2, 4, 16), batch=1, output_spatial_size=(8, 8))
        Factors(fwd=0.25, bwd=(0.25, 0.125, 0.125))

    References:
        Unit Scaling, arXiv 2303.11257, scaling factors of matmul.
    """
    kernel_shape = tuple(kernel_shape)
    if len(kernel_shape) < 2:
        raise ValueError(
            "unitscale.rules.conv: kernel_shape must be (*spatial, in / groups, out); got "
            f"{kernel_shape}."
        )
    *spatial, in_features, out_features = kernel_shape
    rank = len(spatial)
    strides, gaps = _per_dimension(strides, rank), _per_dimension(input_dilation, rank)
    positions = _per_dimension(output_spatial_size, 1)
    check_sizes("conv", batch=batch, feature_group_count=feature_group_count)
    check_per_dimension("conv", rank + 2, kernel_shape=kernel_shape)
    check_per_dimension("conv", len(positions), output_spatial_size=positions)
    check_per_dimension("conv", rank, strides=strides, input_dilation=gaps)
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


def embed(vocab: int, tokens: int) -> Factors:
    """Return the factors of looking up `tokens` rows of a table, with `bwd = (table,)`.

    Scaling:
        Forward 1. With `vocab` rows, a row's gradient sums the cotangents of its occurrences,
        `tokens / vocab` on average, so the table's gradient has `(vocab / tokens)^1/2`. Its RMS
        over the whole table is then 1 for any distribution of the tokens.

    Example:
        >>> embed(64, 16)
        Factors(fwd=1.0, bwd=(2.0,))

    References:
        Unit Scaling, arXiv 2303.11257, the rule for cut edges.
    """
    check_sizes("embed", vocab=vocab, tokens=tokens)
    return Factors(1.0, (math.sqrt(vocab / tokens),))


def recurrent_kernel(steps: int) -> Factors:
    """Return the factors of a weight used at every step of a recurrence, `bwd = (weight,)`.

    Scaling:
        Forward 1; backward `steps^-1/2`, because the gradient sums that many contributions, each
        already scaled by `dense` for the batch. The weight is a cut edge. Assumes that
        contributions of different steps are independent.

    References:
        Unit Scaling, arXiv 2303.11257, scaling factors of matmul.
    """
    check_sizes("recurrent_kernel", steps=steps)
    return Factors(1.0, (_rsqrt(steps),))


def grouped_dense(
    in_features: int,
    out_features: int,
    rows: int,
    groups: int,
    *,
    constraint: Constraint = "to_output_scale",
) -> Factors:
    """Return the factors of a dense layer with a kernel for each group of rows.

    Scaling:
        As `dense`, but a kernel's gradient sums over the rows of its group, `rows / groups` on
        average: kernels and biases, which are cut edges, have `(groups / rows)^1/2`. The RMS over
        all kernels is then 1 for any group sizes.

    References:
        Unit Scaling, arXiv 2303.11257, the rule for cut edges.
    """
    check_sizes("grouped_dense", rows=rows, groups=groups)
    one = dense(in_features, out_features, 1, constraint=constraint)
    weight = math.sqrt(groups / rows)
    return Factors(one.fwd, (one.bwd[0], weight, weight))


def mixture(experts: int, top_k: int, *, mult: float = 1.0, renormalize: bool = True) -> Factors:
    """Return the factors of the sum of the chosen experts' outputs, weighted by their gates.

    Scaling:
        Forward `c = E[sum g^2]^-1/2` over the gates g of a token: 1 for a single gate of 1, `k^1/2`
        for k equal ones. The expectation over independent unit normal logits is exact. Gates have
        the true derivative, factor `c`. The cotangent of an expert's output, `c g dy`, has RMS
        `k^-1/2` and is multiplied by a further `k^1/2`, so that gradients inside the experts are
        unit; the gradient of the expert's input is multiplied by `k^-1/2` to undo it, on top of the
        derivative of copying the token: `bwd = (expert's output, gate, expert's input)`. If
        `renormalize`, gates are the softmax over the chosen experts only, and so sum to 1;
        otherwise they are entries of the softmax over all. Assumes independent unit experts.

    Example:
        >>> mixture(8, 1)
        Factors(fwd=1.0, bwd=(1.0, 1.0, 1.0))
        >>> round(mixture(8, 2).fwd, 2)
        1.34

    References:
        Mixtral: Jiang et al., 2024, arXiv 2401.04088, equations 1 and 2.
        u-muP, arXiv 2407.17465, appendix G (the factor applied at the split).
    """
    mult = _check_experts("mixture", experts, top_k, mult)
    output = 1 / math.sqrt(gate_moments(experts, top_k, mult, renormalize).square)
    return Factors(output, (output * math.sqrt(top_k), output, 1 / math.sqrt(top_k)))


def router(
    in_features: int,
    experts: int,
    tokens: int,
    *,
    top_k: int,
    out_features: int | None = None,
    mult: float = 1.0,
    renormalize: bool = True,
    constraint: Constraint = "to_output_scale",
) -> Factors:
    """Return the factors of the matmul that computes router logits, with `bwd = (x, kernel)`.

    Scaling:
        Forward `in^-1/2`, which makes the logits unit for any width, constrained together with the
        input gradient (ideally `experts^-1/2`), as the token goes to the experts too. A gate's
        gradient is `c <f, dy>`, of RMS `c out^1/2` for unit outputs f and cotangents dy, with c the
        forward factor of `mixture`. The mean square of a logit's gradient is then `(c mult)^2 out /
        experts * E[sum g^2 - 2 g^3 + (sum g^2)^2]` (for renormalized gates); the kernel, a cut
        edge, has its inverse root times `tokens^-1/2`. If the gates are constant (one renormalized
        gate), the kernel has `tokens^-1/2`. Experts have `out_features` outputs, by default as many
        as inputs; the other arguments are those of `mixture`.

    Example:
        >>> router(16, 8, 4, top_k=1).fwd
        0.25

    References:
        Mixtral: Jiang et al., 2024, arXiv 2401.04088, equations 1 and 2.
        u-muP, arXiv 2407.17465, table 2 (hidden weights).
    """
    mult = _check_experts("router", experts, top_k, mult)
    width = in_features if out_features is None else out_features
    check_sizes("router", in_features=in_features, tokens=tokens, out_features=width)
    output, x = constrain(constraint, _rsqrt(in_features), _rsqrt(experts))
    moments = gate_moments(experts, top_k, mult, renormalize)
    slope = mult * math.sqrt(width * moments.gradient / moments.square / experts)
    return Factors(output, (x, _rsqrt(tokens) / (slope or 1.0)))


def _check_experts(rule: str, experts: int, top_k: int, mult: float) -> float:
    check_sizes(rule, experts=experts, top_k=top_k)
    if top_k > experts:
        raise ValueError(
            f"unitscale.rules.{rule}: top_k must be at most the number of experts; got {top_k} of "
            f"{experts}."
        )
    return positive_number(rule, "mult", mult)


def _rsqrt(terms: float) -> float:
    return 1 / math.sqrt(terms)


def _per_dimension(sizes: int | Sequence[int], rank: int) -> tuple[int, ...]:
    return tuple(sizes) if isinstance(sizes, Sequence) else (operator.index(sizes),) * rank
