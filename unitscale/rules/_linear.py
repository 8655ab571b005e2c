"""Factors and their constraints; the rules of linear ops; checks of arguments.

A sum of `k` products of independent unit values has RMS `k^1/2`. Each of the three matmuls of a
linear op (output, input gradient, weight gradient) is therefore multiplied by `k^-1/2`, where `k`
is the number of terms in its sums.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from ..core import check_choice

Constraint: TypeAlias = Literal[
    "to_output_scale",
    "to_grad_input_scale",
    "to_left_grad_scale",
    "to_right_grad_scale",
    "gmean",
    "hmean",
    "amean",
    None,
]
"""How `constrain` makes factors equal; None keeps the ideal factors."""

_ONE_GRADIENT = {
    "to_grad_input_scale": (1, 1),
    "to_left_grad_scale": (2, 1),
    "to_right_grad_scale": (2, 2),
}
"""Number of operands that the constraint is for, and index of the factor that all share."""


@dataclass(frozen=True)
class Factors:
    """The static factors of an op in the forward and backward pass; hashable.

    Scaling:
        The op computes `fwd * f(x, ...)`. The gradient of operand `i` is the gradient of the
        unscaled `f` times `bwd[i]`. A backward factor equal to `fwd` gives the exact gradient; any
        other is only correct on a cut edge (see `constrain`).

    References:
        Unit Scaling, arXiv 2303.11257, scaled ops.
    """

    fwd: float
    bwd: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "fwd", float(self.fwd))
        object.__setattr__(self, "bwd", tuple(float(factor) for factor in self.bwd))
        for factor in (self.fwd, *self.bwd):
            if not (math.isfinite(factor) and factor > 0):
                raise ValueError(
                    "unitscale.rules.Factors: factors must be positive and finite; got "
                    f"fwd={self.fwd}, bwd={self.bwd}."
                )


def constrain(constraint: Constraint, output: float, *grad_inputs: float) -> tuple[float, ...]:
    """Make the forward factor and the backward factors of non-cut edges equal.

    An edge is cut if removing it disconnects the graph, like the edge of a weight. On a cut edge
    unequal factors multiply the gradient by a constant. On others they change its direction.

    Scaling:
        The arguments are the ideal factors. `to_output_scale` uses the output's factor for all,
        `to_grad_input_scale` the factor of the only operand, `to_left_grad_scale` and
        `to_right_grad_scale` the factor of the left or right operand; `gmean`, `hmean` and `amean`
        use the geometric, harmonic or arithmetic mean of all factors. None changes nothing.

    Example:
        >>> constrain("gmean", 4.0, 1.0)
        (2.0, 2.0)

    References:
        Unit Scaling, arXiv 2303.11257, constrained ops and cut edges.
    """
    factors = (output, *grad_inputs)
    if constraint is None:
        return factors
    check_choice("unitscale.rules.constrain", "constraint", constraint, Constraint)
    count = len(grad_inputs)
    needed, index = _ONE_GRADIENT.get(constraint, (count, 0))
    if needed != count:
        fitting = [repr(name) for name, (operands, _) in _ONE_GRADIENT.items() if operands == count]
        raise ValueError(
            f"unitscale.rules.constrain: {constraint!r} is for ops with {needed} constrained "
            f"operand(s); this op has {count}: use "
            f"{' or '.join(fitting) or repr('to_output_scale')} instead."
        )
    if constraint == "gmean":
        shared = math.exp(math.fsum(math.log(factor) for factor in factors) / len(factors))
    elif constraint == "hmean":
        shared = len(factors) / math.fsum(1 / factor for factor in factors)
    elif constraint == "amean":
        shared = math.fsum(factors) / len(factors)
    else:
        shared = factors[index]
    return (shared,) * len(factors)


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
        The forward factor is `k^-1/2`. Before the constraint, the gradients' factors are `(n *
        left_repeats)^-1/2` and `(m * right_repeats)^-1/2`, if broadcasting repeats the operands
        that often. Assumes independent operands with zero mean and unit variance.

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
        The forward factor `in^-1/2` and the input gradient's `out^-1/2` are constrained together.
        Kernel and bias are cut edges; their gradients sum over the batch and have `batch^-1/2`. The
        bias is added after the factor. Assumes independent unit inputs, weights and cotangents.

    Example:
        >>> dense(16, 64, 4)
        Factors(fwd=0.25, bwd=(0.25, 0.5, 0.5))

    References:
        Unit Scaling, arXiv 2303.11257, scaling factors of matmul; u-muP, arXiv 2407.17465, table 2.
    """
    check_sizes("dense", in_features=in_features, out_features=out_features, batch=batch)
    output, x = constrain(constraint, _rsqrt(in_features), _rsqrt(out_features))
    return Factors(output, (x, _rsqrt(batch), _rsqrt(batch)))


def readout(
    in_features: int, out_features: int, batch: int, *, constraint: Constraint = None
) -> Factors:
    """Return the factors of the layer that computes the logits, with `bwd = (x, kernel, bias)`.

    Scaling:
        The forward factor is `in^-1`, so that logits do not grow with width in training. The input
        gradient has the factor `out^-1/2`, kernel and bias gradients `batch^-1/2`. Constraint None
        is correct if the input is a cut edge: the only path from the loss to the rest of the model.

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
        The forward factors are that of `dense` for `h = x @ a`, and `rank^-1/2` for `h @ b`. The
        two results have `bwd = (x, a)` and `bwd = (h, b)`. The gradient of `h` has the factor
        `out^-1/2`, those of `a` and `b` have `batch^-1/2`. x is not a cut edge, because the dense
        layer uses it too. Its gradient therefore has the factor of `dense` times `rank^-1/2`, over
        both matmuls.

    References:
        Hu et al., "LoRA", 2021, arXiv 2106.09685; Unit Scaling, arXiv 2303.11257, matmul factors.
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
    output_spatial_size: int,
    *,
    strides: int | Sequence[int] = 1,
    input_dilation: int | Sequence[int] = 1,
    feature_group_count: int = 1,
    constraint: Constraint = "to_output_scale",
) -> Factors:
    """Return the factors of a convolution, plain or transposed, with `bwd = (x, kernel, bias)`.

    Scaling:
        The forward factor is `fan_in^-1/2` with `fan_in = prod(spatial) * in / groups /
        prod(input_dilation)`, the average number of nonzero terms, as dilation inserts zeros. The
        input gradient sums `out / groups * prod(spatial) / prod(strides)` terms on average. Kernel
        and bias are cut edges: the bias gradient sums over `batch * output positions`, the kernel
        gradient over that divided by `prod(input_dilation)`. Assumes interior pixels.

    Args:
        kernel_shape: `(*spatial, in / groups, out)`.
        batch: Number of examples.
        output_spatial_size: Number of output positions per example.
        strides: One stride for all spatial dimensions, or one for each.
        input_dilation: One dilation, or one for each: the strides of a transposed convolution.
        feature_group_count: Number of channel groups.
        constraint: See `constrain`.

    References:
        Unit Scaling, arXiv 2303.11257, scaling factors of matmul.
    """
    rank = len(kernel_shape) - 2
    per_dimension("conv", "kernel_shape", kernel_shape, max(rank, 0) + 2)
    *spatial, in_features, out_features = kernel_shape
    strides = per_dimension("conv", "strides", strides, rank)
    gaps = per_dimension("conv", "input_dilation", input_dilation, rank)
    check_sizes(
        "conv",
        batch=batch,
        output_spatial_size=output_spatial_size,
        feature_group_count=feature_group_count,
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
    total = batch * output_spatial_size
    return Factors(output, (x, _rsqrt(total / math.prod(gaps)), _rsqrt(total)))


def embed(vocab: int, tokens: int) -> Factors:
    """Return the factors of looking up `tokens` rows of a table, with `bwd = (table,)`.

    Scaling:
        The forward factor is 1. The gradient of a row sums the cotangents of its occurrences,
        `tokens / vocab` on average, so its factor is `(vocab / tokens)^1/2`. The RMS of the
        gradient over the whole table is then 1 for any distribution of the tokens.

    References:
        Unit Scaling, arXiv 2303.11257, the rule for cut edges.
    """
    check_sizes("embed", vocab=vocab, tokens=tokens)
    return Factors(1.0, (math.sqrt(vocab / tokens),))


def recurrent_kernel(steps: int) -> Factors:
    """Return the factors of a weight used at every step of a recurrence, `bwd = (weight,)`.

    Scaling:
        The forward factor is 1. The backward factor is `steps^-1/2`, because the gradient sums one
        independent contribution per step, each already scaled for the batch by `dense`.

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
        As in `dense`, but the gradients of a kernel and its bias sum over the rows of their group,
        `rows / groups` on average, so their factor is `(groups / rows)^1/2`. The gradients' RMS
        over all kernels is then 1 for any group sizes.

    References:
        Unit Scaling, arXiv 2303.11257, the rule for cut edges.
    """
    check_sizes("grouped_dense", rows=rows, groups=groups)
    one = dense(in_features, out_features, 1, constraint=constraint)
    weight = math.sqrt(groups / rows)
    return Factors(one.fwd, (one.bwd[0], weight, weight))


def norm(features: int, size: int) -> Factors:
    """Return the factors of a layer, RMS, group or batch norm, with `bwd = (x, gain, bias)`.

    Scaling:
        Output and input gradient have the factor 1. Gain and bias are cut edges. Their gradients
        are sums over the `size / features` rows of an input of `size` elements: their factor is
        `(features / size)^1/2`. Assumes unit inputs, a unit gain, and cotangents independent of the
        input.

    References:
        Unit Scaling, arXiv 2303.11257, the rule for cut edges.
    """
    check_sizes("norm", features=features, size=size)
    if size % features:
        raise ValueError(
            f"unitscale.rules.norm: size must be a multiple of features; got {size}, {features}."
        )
    weight = math.sqrt(features / size)
    return Factors(1.0, (1.0, weight, weight))


def check_sizes(rule: str, **sizes: Any) -> None:
    """Check that every named size is a positive static integer."""
    for name, size in sizes.items():
        try:
            value = operator.index(size)
        except TypeError as error:
            raise TypeError(
                f"unitscale.rules.{rule}: {name} must be a static integer; got {size!r} of type "
                f"{type(size).__name__}. Take sizes from .shape, not from array values. If the "
                "batch size is symbolic, as in jax.export, trace inside unitscale.batch_size(n): "
                "n only affects gradients."
            ) from error
        if value < 1:
            raise ValueError(f"unitscale.rules.{rule}: {name} must be at least 1; got {value}.")


def per_dimension(rule: str, name: str, sizes: int | Sequence[int], rank: int) -> tuple[int, ...]:
    """Return one positive static integer per dimension, given one for each or one for all."""
    values = tuple(sizes) if isinstance(sizes, Sequence) else (sizes,) * rank
    check_sizes(rule, **{f"{name}[{i}]": size for i, size in enumerate(values)})
    if len(values) != rank:
        raise ValueError(
            f"unitscale.rules.{rule}: {name} must have one entry for each of the {rank} "
            f"spatial dimensions; got {values}."
        )
    return values


def real_number(rule: str, name: str, value: Any) -> float:
    """Return a static real number as a Python float."""
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"unitscale.rules.{rule}: {name} must be a static real number; got "
            f"{type(value).__name__}. Factors are fixed at trace time."
        ) from error


def positive_number(rule: str, name: str, value: Any) -> float:
    """Return a static, positive and finite number as a Python float."""
    number = real_number(rule, name, value)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(
            f"unitscale.rules.{rule}: {name} must be positive and finite; got {value!r}."
        )
    return number


def _rsqrt(terms: float) -> float:
    return 1 / math.sqrt(terms)
