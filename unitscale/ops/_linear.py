"""Matmuls of activations and weights: matmul, dense, readout, einsum, lora."""

import math
from collections.abc import Callable
from string import ascii_lowercase

import jax
import jax.numpy as jnp

from .. import rules
from ..core import ScaledArray, global_batch_size, to_float
from ..quant import (
    Contraction,
    MatmulConfig,
    QuantState,
    contract,
    einsum_contraction,
    einsum_problem,
)
from ..rules import Constraint, Factors
from ._operands import (
    ArrayLike,
    Operand,
    broadcast_shapes,
    combine,
    multiply_scales,
    num_sharing,
    output_dtype,
    shape_error,
    unpack,
)


def matmul(
    left: ArrayLike,
    right: ArrayLike,
    *,
    constraint: Constraint = "to_output_scale",
    config: MatmulConfig | None = None,
    state: QuantState | None = None,
) -> ScaledArray:
    """Multiply two activations: ``left @ right``.

    Scaling: `rules.matmul`. The scale of the result is the product of the operands' scales.

    Args:
        left: (..., m, k), floating.
        right: (..., k, n), floating; leading dimensions broadcast.
        constraint: see `unitscale.ops`.
        config: see `unitscale.ops`.
        state: see `unitscale.ops`.
    """
    x, x_scale = unpack("matmul", "left", left, (-1,))
    y, y_scale = unpack("matmul", "right", right, (-2,))
    if x.ndim < 2 or y.ndim < 2 or x.shape[-1] != y.shape[-2]:
        raise shape_error(
            "matmul",
            "left must be (..., m, k) and right (..., k, n) with equal k",
            "Transpose one operand?",
            left=x.shape,
            right=y.shape,
        )
    leading = {"left": x.shape[:-2], "right": y.shape[:-2]}
    batch = broadcast_shapes("matmul", "leading dimensions must broadcast", **leading)
    (m, k), n, size = x.shape[-2:], y.shape[-1], math.prod(batch)
    repeats = (size // max(math.prod(a.shape[:-2]), 1) or 1 for a in (x, y))
    factors = rules.matmul(
        m,
        k,
        n,
        left_repeats=next(repeats) * num_sharing(x, y, x.ndim < y.ndim),
        right_repeats=next(repeats) * num_sharing(y, x, y.ndim == 2),
        constraint=constraint,
    )
    out = ascii_lowercase[: len(batch)]
    # Broadcast dimensions have no label, so that gradients sum over them inside the matmul.
    x_labels, x_core = _own_labels(x, out)
    y_labels, y_core = _own_labels(y, out)
    both = "".join(c for c in out if c in x_labels or c in y_labels)
    data = contract(
        x_core,
        y_core,
        Contraction(x_labels + "xz", y_labels + "zy", both + "xy"),
        factors=(factors.fwd, *factors.bwd),
        config=config,
        out_dtype=output_dtype(left, right),
        state=state,
    )
    return ScaledArray(*multiply_scales(data.reshape(*batch, m, n), x_scale, y_scale))


def _own_labels(x: jax.Array, batch: str) -> tuple[str, jax.Array]:
    """Drop leading dimensions of size 1; return the labels of the others, and the array."""
    own = batch[len(batch) - (x.ndim - 2) :] if x.ndim > 2 else ""
    ones = tuple(i for i in range(x.ndim - 2) if x.shape[i] == 1)
    return "".join(c for i, c in enumerate(own) if i not in ones), jnp.squeeze(x, ones)


def dense(
    x: ArrayLike,
    kernel: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    constraint: Constraint = "to_output_scale",
    config: MatmulConfig | None = None,
    state: QuantState | None = None,
) -> ScaledArray:
    """Apply a dense layer: ``x @ kernel + bias``.

    Scaling: `rules.dense`, with the global batch size (`unitscale.batch_over`). The scale of the
    result is the product of the scales of x and kernel. With ``config``, a scalar scale of the
    kernel multiplies the result's data and both gradients (not in float16, which lacks the range).

    Args:
        x: (..., in), floating.
        kernel: (in, out), floating. With ``config`` it is quantized directly from its own dtype,
            and its gradient has that dtype too.
        bias: (out,), or None.
        constraint: see `unitscale.ops`.
        config: see `unitscale.ops`.
        state: see `unitscale.ops`.

    Returns:
        ScaledArray (..., out) in the promoted dtype; with ``config``, in the dtype of ``x``.

    Example:
        >>> print(dense(jnp.ones((2, 16)), jnp.ones((16, 3)), jnp.ones(3)).data[0])
        [5. 5. 5.]
    """
    return affine("dense", rules.dense, x, kernel, bias, constraint, config, state)


def readout(
    x: ArrayLike,
    kernel: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    constraint: Constraint = None,
    config: MatmulConfig | None = None,
    state: QuantState | None = None,
) -> ScaledArray:
    """Apply the layer that computes the logits: ``x @ kernel + bias``.

    Scaling: `rules.readout`; scales as in `dense`. The default constraint None is correct if the
    input is a cut edge, that is, if all gradients of the rest of the model pass through it.

    Takes the arguments of `dense`, and returns a result of the same shape and dtype.
    """
    return affine("readout", rules.readout, x, kernel, bias, constraint, config, state)


def affine(
    op: str,
    rule: Callable[..., Factors],
    inputs: ArrayLike,
    kernel: ArrayLike,
    bias: ArrayLike | None,
    constraint: Constraint,
    config: MatmulConfig | None = None,
    state: QuantState | None = None,
) -> ScaledArray:
    """Implement `dense`, `readout` and the logits of `route`."""
    x, x_scale = unpack(op, "x", inputs, (-1,))
    w, w_scale = unpack(op, "kernel", kernel, (0,))
    if w.ndim != 2 or x.ndim < 1 or x.shape[-1] != w.shape[0]:
        raise shape_error(
            op,
            "kernel must be (in, out) with in == x.shape[-1]",
            "Transpose the kernel?" if w.ndim == 2 and x.shape[-1:] == w.shape[-1:] else "",
            x=x.shape,
            kernel=w.shape,
        )
    batch = global_batch_size(math.prod(x.shape[:-1]), x)
    factors, rows = rule(*w.shape, batch, constraint=constraint), ascii_lowercase[: x.ndim - 1]
    dtype = output_dtype(inputs, kernel) if config is None else output_dtype(inputs)
    multiplier, is_scalar = None, w_scale is not None and not jnp.ndim(w_scale)
    if config is not None and is_scalar and dtype != jnp.float16:
        # A quantized matmul multiplies by scales anyway, so the kernel's scale adds no cost.
        w_scale, multiplier = None, to_float(w_scale)
    data = contract(
        x,
        w,
        Contraction(rows + "y", "yz", rows + "z"),
        factors=(factors.fwd, *factors.bwd[:2]),
        config=config,
        out_dtype=dtype,
        state=state,
        multiplier=multiplier,
    )
    if w_scale is not None and jnp.ndim(w_scale):
        w_scale = jnp.reshape(w_scale, w.shape[1:])  # per output channel
    return add_bias(op, multiply_scales(data, x_scale, w_scale), bias, factors.bwd[-1])


def add_bias(
    op: str, y: Operand, bias: ArrayLike | None, factor: float, axes: tuple[int, ...] | None = None
) -> ScaledArray:
    """Add a bias along ``axes`` (the last by default), at the scale of the matmul's result."""
    if bias is None:
        return ScaledArray(*y)
    b, b_scale = unpack(op, "bias", bias, ...)
    shape, axes = y[0].shape, (y[0].ndim - 1,) if axes is None else axes
    own = tuple(shape[axis] for axis in axes)
    if b.shape != own:
        raise shape_error(op, f"bias must be {own}", bias=b.shape, output=shape)
    b = b.reshape([n if axis in axes else 1 for axis, n in enumerate(shape)])
    return combine(y, (b, b_scale), bwd=(1.0, factor))


def einsum(
    subscripts: str,
    x: ArrayLike,
    kernel: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    constraint: Constraint = "to_output_scale",
    config: MatmulConfig | None = None,
    state: QuantState | None = None,
) -> ScaledArray:
    """Apply a dense layer along any axes: ``jnp.einsum(subscripts, x, kernel) + bias``.

    Scaling: `rules.dense`, where the contracted dimensions are the input features, dimensions of
    the kernel alone the output features, and dimensions of ``x`` alone the batch. Scalar scales are
    multiplied to give the scale of the result; other scales are multiplied into the data.

    Args:
        subscripts: an einsum such as ``"...a,ab->...b"``. Every label must appear in at least two
            of the three terms; an ellipsis only in the terms of ``x`` and of the result.
        x: operand.
        kernel: operand.
        bias: has the axes that kernel and result share, in the result's order; or None.
        constraint: see `unitscale.ops`.
        config: see `unitscale.ops`.
        state: see `unitscale.ops`.

    Returns:
        ScaledArray in the promoted dtype; with ``config``, in the dtype of ``x``.

    Example:
        >>> y = einsum("btd,dhk->bthk", jnp.ones((2, 3, 16)), jnp.ones((16, 4, 5)))
        >>> print(y.shape, y.data[0, 0, 0, 0])
        (2, 3, 4, 5) 4.0
    """
    if problem := einsum_problem(subscripts):
        raise ValueError(
            "unitscale.ops.einsum: subscripts must be a contraction of x with a kernel, such as "
            f"'...a,ab->...b'; got {subscripts!r}: {problem}"
        )
    data, x_scale = unpack("einsum", "x", x, ...)
    w, w_scale = unpack("einsum", "kernel", kernel, ...)
    spec = einsum_contraction(subscripts, data.ndim)
    size = dict(zip(spec.lhs + spec.rhs, data.shape + w.shape, strict=False))
    fits = len(spec.lhs) == data.ndim and len(spec.rhs) == w.ndim
    if not fits or any(size[c] != n for c, n in zip(spec.lhs, data.shape, strict=True)):
        expected = f"x and kernel must have the axes of {subscripts!r}, equal for equal labels"
        raise shape_error("einsum", expected, x=data.shape, kernel=w.shape)
    inputs = math.prod(size[c] for c in spec.summed)
    outputs = math.prod(size[c] for c in spec.rhs if c not in spec.lhs)
    batch = global_batch_size(math.prod(size[c] for c in spec.lhs if c not in spec.rhs), data)
    factors = rules.dense(max(inputs, 1), max(outputs, 1), batch, constraint=constraint)
    dtype = output_dtype(x, kernel) if config is None else output_dtype(x)
    own = (factors.fwd, *factors.bwd[:2])
    y = contract(data, w, spec, factors=own, config=config, out_dtype=dtype, state=state)
    axes = tuple(axis for axis, c in enumerate(spec.out) if c in spec.rhs)
    return add_bias("einsum", multiply_scales(y, x_scale, w_scale), bias, factors.bwd[2], axes)


def lora(
    x: ArrayLike,
    a: ArrayLike,
    b: ArrayLike,
    base: ArrayLike | None = None,
    *,
    constraint: Constraint = "to_output_scale",
) -> ScaledArray:
    """Apply a low-rank update to the output of a dense layer: ``base + x @ a @ b``.

    Scaling: `rules.lora`. ``base`` is added with factor 1.

    Args:
        x: (..., in), floating.
        a: (in, rank), floating.
        b: (rank, out), floating.
        base: (..., out), the output of the dense layer; None to return the update alone.
        constraint: the constraint of the dense layer.

    Returns:
        ScaledArray (..., out), with the scale and dtype of ``base`` if it is given.
    """
    data, x_scale = unpack("lora", "x", x, (-1,))
    down, a_scale = unpack("lora", "a", a, (0, 1))
    up, b_scale = unpack("lora", "b", b, (0, 1))
    shapes = {"x": data.shape, "a": down.shape, "b": up.shape}
    two = down.ndim == up.ndim == 2
    if not two or data.shape[-1:] != down.shape[:1] or down.shape[1:] != up.shape[:1]:
        expected = "x must be (..., in), a (in, rank) and b (rank, out)"
        raise shape_error("lora", expected, **shapes)
    rows = ascii_lowercase[: data.ndim - 1]
    batch = global_batch_size(math.prod(data.shape[:-1]), data)
    spec, dtype = Contraction(rows + "y", "yz", rows + "z"), output_dtype(x, a, b)
    (inputs, rank), outputs = down.shape, up.shape[1]
    both = rules.lora(inputs, rank, outputs, batch, constraint=constraint)
    for w, factors in zip((down, up), both, strict=True):
        data = contract(data, w, spec, factors=(factors.fwd, *factors.bwd), out_dtype=dtype)
    update = multiply_scales(*multiply_scales(data, x_scale, a_scale), b_scale)
    if base is None:
        return ScaledArray(*update)
    total = unpack("lora", "base", base)
    if total[0].shape != data.shape:
        shapes["base"] = total[0].shape
        raise shape_error("lora", "base must be (..., out)", **shapes)
    return combine(total, update, out=output_dtype(base))
