"""Products with weights and of activations: matmul, dense, readout."""

import math
from string import ascii_lowercase
from typing import Any

import jax
import jax.numpy as jnp

from .. import rules
from ..core import Scale, ScaledArray, global_batch_size, to_float
from ..quant import Contraction, MatmulConfig, QuantState, contract
from ..rules import Constraint
from ._add import combine
from ._operands import (
    ArrayLike,
    output_dtype,
    shape_error,
    sharers,
    times_scales,
    unpack,
    unpack_uniform,
)


def _labels(count: int) -> str:
    return ascii_lowercase[:count]


def matmul(
    left: ArrayLike,
    right: ArrayLike,
    *,
    constraint: Constraint = "to_output_scale",
    config: MatmulConfig | None = None,
    state: QuantState | None = None,
) -> ScaledArray:
    """Multiplies two activations: ``left @ right``.

    Scaling:
        data = fwd * left.data @ right.data, scale = left.scale * right.scale. With left
        (..., m, k) and right (..., k, n), fwd = k^-1/2 and before the constraint dleft has factor
        n^-1/2, dright m^-1/2; a dimension that an operand is broadcast over counts in its own
        gradient's sum. See `rules.matmul`.

    Args:
        left: (..., m, k), floating.
        right: (..., k, n), floating; leading dimensions broadcast.
        constraint: how output and gradients come to share a factor.
        config: formats of a quantized product; None multiplies the operands as they are.
        state: the scales of a strategy that keeps them, as of `quant.Delayed`.

    Returns:
        ScaledArray (..., m, n) in the promoted dtype.

    Raises:
        TypeError: if an operand is not floating.
        ValueError: if the shapes do not fit, the constraint is unknown, or a strategy lacks its
            state.

    Example:
        >>> import jax.numpy as jnp
        >>> print(matmul(jnp.ones((2, 16)), jnp.ones((16, 3))).data[0])
        [4. 4. 4.]

    References:
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, scaled ops (matmul).
    """
    (x, x_scale), (y, y_scale) = (
        unpack_uniform("matmul", "left", left, (-1,)),
        unpack_uniform("matmul", "right", right, (-2,)),
    )
    if x.ndim < 2 or y.ndim < 2 or x.shape[-1] != y.shape[-2]:
        raise shape_error(
            "matmul",
            "left must be (..., m, k) and right (..., k, n) with equal k",
            "Transpose one operand?",
            left=x.shape,
            right=y.shape,
        )
    try:
        batch = jnp.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    except ValueError:
        raise shape_error(
            "matmul",
            "leading dimensions must broadcast",
            "Insert dimensions of size 1.",
            left=x.shape,
            right=y.shape,
        ) from None
    m, k, n = x.shape[-2], x.shape[-1], y.shape[-1]
    size = math.prod(batch)
    factors = rules.matmul(
        m,
        k,
        n,
        left_repeats=(size // max(math.prod(x.shape[:-2]), 1) or 1)
        * sharers(x, y, x.ndim < y.ndim),
        right_repeats=(size // max(math.prod(y.shape[:-2]), 1) or 1) * sharers(y, x, y.ndim == 2),
        constraint=constraint,
    )
    out = _labels(len(batch))
    # A dimension that an operand is broadcast over has no label there, so that its gradient sums
    # over it inside the product, in the wide accumulator.
    x_labels, x_core = _own_labels(x, out)
    y_labels, y_core = _own_labels(y, out)
    both = "".join(c for c in out if c in x_labels or c in y_labels)
    spec = Contraction(x_labels + "xz", y_labels + "zy", both + "xy")
    dtype = output_dtype(left, right)
    data = contract(
        x_core,
        y_core,
        spec,
        factors=(factors.fwd, *factors.bwd),
        config=config,
        out_dtype=dtype,
        state=state,
    )
    return ScaledArray(*times_scales(data.reshape(*batch, m, n), x_scale, y_scale))


def _own_labels(x: jax.Array, batch: str) -> tuple[str, jax.Array]:
    """Labels of the leading dimensions that are not of size 1, and the array without the others."""
    own = batch[len(batch) - (x.ndim - 2) :] if x.ndim > 2 else ""
    kept = [i for i in range(x.ndim - 2) if x.shape[i] != 1]
    dropped = tuple(i for i in range(x.ndim - 2) if i not in kept)
    return "".join(own[i] for i in kept), jnp.squeeze(x, dropped)


def dense(
    x: ArrayLike,
    kernel: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    constraint: Constraint = "to_output_scale",
    config: MatmulConfig | None = None,
    state: QuantState | None = None,
) -> ScaledArray:
    """Applies a dense layer: ``x @ kernel + bias``.

    Scaling:
        data = in^-1/2 * x.data @ kernel.data + bias, scale = x.scale * kernel.scale. Where
        ``config`` quantizes, the one scale of a kernel is a factor of the data and of both
        gradients instead, except for float16, which lacks the range. Before the constraint dx has
        factor out^-1/2; dkernel and dbias have batch^-1/2, batch being the product of the leading
        dimensions, on all devices together (`unitscale.batch_over`). The bias is added after the
        factor. See `rules.dense`.

    Args:
        x: (..., in), floating.
        kernel: (in, out), floating. Under ``config`` it is quantized from its own dtype, and its
            gradient has that dtype.
        bias: (out,), or None.
        constraint: how the output and the input gradient come to share a factor.
        config: formats of a quantized product; None multiplies the operands as they are.
        state: the scales of a strategy that keeps them, as of `quant.Delayed`.

    Returns:
        ScaledArray (..., out): in the promoted dtype, or in that of ``x`` under ``config``.

    Raises:
        TypeError: if an operand is not floating.
        ValueError: if the shapes do not fit, the constraint is unknown, or a strategy lacks its
            state.

    Example:
        >>> import jax.numpy as jnp
        >>> print(dense(jnp.ones((2, 16)), jnp.ones((16, 3)), jnp.ones(3)).data[0])
        [5. 5. 5.]

    References:
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, scaled ops.
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
    """Applies the layer that produces the logits: ``x @ kernel + bias``.

    Scaling:
        As `dense` with fwd = in^-1, so that logits do not grow with width, and dx = out^-1/2. With
        the default constraint None the input gradient is scaled freely, which is valid where the
        readout's input is a cut edge: the one path from the loss to the model. See
        `rules.readout`.

    Args:
        x: (..., in), floating.
        kernel: (in, out), floating.
        bias: (out,), or None.
        constraint: None, or how the output and the input gradient come to share a factor.
        config: formats of a quantized product; None multiplies the operands as they are.
        state: the scales of a strategy that keeps them, as of `quant.Delayed`.

    Returns:
        ScaledArray (..., out).

    Raises:
        TypeError: if an operand is not floating.
        ValueError: if the shapes do not fit, the constraint is unknown, or a strategy lacks its
            state.

    Example:
        >>> import jax.numpy as jnp
        >>> print(readout(jnp.ones((2, 16)), jnp.ones((16, 3))).data[0])
        [1. 1. 1.]

    References:
        Blake et al., "u-muP", 2024, arXiv 2407.17465, table 2 (output weights).
    """
    return affine("readout", rules.readout, x, kernel, bias, constraint, config, state)


def affine(op, rule, inputs, kernel, bias, constraint, config, state) -> ScaledArray:
    """What `dense`, `readout` and `route` share: the product with a matrix, by their own rule."""
    (x, x_scale), (w, w_scale) = (
        unpack_uniform(op, "x", inputs, (-1,)),
        unpack_uniform(op, "kernel", kernel, (0,)),
    )
    if w.ndim != 2 or x.ndim < 1 or x.shape[-1] != w.shape[0]:
        raise shape_error(
            op,
            "kernel must be (in, out) with in == x.shape[-1]",
            "Transpose the kernel?" if x.shape[-1:] == w.shape[-1:] else "Check the feature sizes.",
            x=x.shape,
            kernel=w.shape,
        )
    batch = math.prod(x.shape[:-1])
    factors = rule(*w.shape, global_batch_size(batch, x), constraint=constraint)
    rows = _labels(x.ndim - 1)
    spec = Contraction(rows + "y", "yz", rows + "z")
    dtype = output_dtype(inputs, kernel) if config is None else output_dtype(inputs)
    w_scale, multiplier = _in_product(w_scale, config, dtype)
    data = contract(
        x,
        w,
        spec,
        factors=(factors.fwd, *factors.bwd[:2]),
        config=config,
        out_dtype=dtype,
        state=state,
        multiplier=multiplier,
    )
    if w_scale is not None and jnp.ndim(w_scale):
        w_scale = jnp.reshape(w_scale, w.shape[1:])  # per output channel
    data, scale = times_scales(data, x_scale, w_scale)
    if bias is None:
        return ScaledArray(data, scale)
    return add_bias(op, data, scale, bias, factors.bwd[2])


def _in_product(
    scale: Scale, config: MatmulConfig | None, dtype: Any
) -> tuple[Scale, jax.Array | None]:
    """What of a kernel's scale goes on to the result, and what its product is multiplied by.

    A product of 8 bits is multiplied by a number in its kernel anyway, the scales of its operands:
    there the kernel's own costs nothing, and what reads the result need not multiply by it. The
    result must have the range.
    """
    if scale is None or jnp.ndim(scale) or config is None or dtype == jnp.float16:
        return scale, None
    return None, to_float(scale)


def add_bias(op: str, data: jax.Array, scale: Scale, bias: Any, factor: float) -> ScaledArray:
    """Adds a bias to the last axis, at the scale of the product."""
    b, b_scale = unpack(op, "bias", bias)
    if b.shape != data.shape[-1:]:
        raise shape_error(
            op,
            "bias must be (out,)",
            "Give one bias per output feature.",
            bias=b.shape,
            output=data.shape,
        )
    leading = tuple(range(data.ndim - 1))
    if b_scale is not None and jnp.ndim(b_scale) == 1:
        b_scale = jnp.expand_dims(b_scale, leading)
    return combine(
        (data, scale),
        (jnp.expand_dims(b, leading), b_scale),
        weights=(1.0, 1.0),
        bwd=(1.0, factor),
        at=scale,
        out=data.dtype,
    )
