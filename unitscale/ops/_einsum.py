"""Products with a weight along any axes."""

import math

import jax.numpy as jnp

from .. import rules
from ..core import ScaledArray, global_batch_size
from ..quant import MatmulConfig, QuantState, contract, einsum_contraction, einsum_problem
from ..rules import Constraint
from ._add import combine
from ._operands import ArrayLike, output_dtype, shape_error, times_scales, unpack, unpack_uniform


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
    """Applies a dense layer along any axes: ``jnp.einsum(subscripts, x, kernel) + bias``.

    Scaling:
        That of `dense`: the sizes that the product sums over are its input features, those that
        the kernel alone brings its output features, those that it has not its batch. See
        `rules.dense`.

    Args:
        subscripts: an einsum such as ``"...a,ab->...b"`` in which every label stands in two of the
            three terms at least, and an ellipsis in that of ``x`` and of the result alone.
        x: floating array or ScaledArray; a scale that is not one for all goes into the data.
        kernel: floating array or ScaledArray, as ``x``.
        bias: the result's axes that the kernel has, or None.
        constraint: how the output and the input gradient come to share a factor.
        config: formats of a quantized product; None multiplies the operands as they are.
        state: the scales of a strategy that keeps them, as of `quant.Delayed`.

    Returns:
        ScaledArray in the promoted dtype, or in that of ``x`` under ``config``.

    Raises:
        TypeError: if an operand is not floating.
        ValueError: if the subscripts are no such product, the shapes do not fit, the constraint is
            unknown, or a strategy lacks its state.

    Example:
        >>> y = einsum("btd,dhk->bthk", jnp.ones((2, 3, 16)), jnp.ones((16, 4, 5)))
        >>> print(y.shape, y.data[0, 0, 0, 0])
        (2, 3, 4, 5) 4.0

    References:
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, scaled ops (matmul).
    """
    if problem := einsum_problem(subscripts):
        raise ValueError(
            "unitscale.ops.einsum: subscripts must be a product of x and a kernel, such as "
            f"'...a,ab->...b'; got {subscripts!r}: {problem}"
        )
    (data, x_scale), (w, w_scale) = (
        unpack_uniform("einsum", name, a, tuple(range(unpack("einsum", name, a)[0].ndim)))
        for name, a in (("x", x), ("kernel", kernel))
    )
    spec = einsum_contraction(subscripts, data.ndim)
    size = dict(zip(spec.lhs, data.shape, strict=False)) | dict(
        zip(spec.rhs, w.shape, strict=False)
    )
    fits = len(spec.lhs) == data.ndim and len(spec.rhs) == w.ndim
    if not fits or any(size[c] != n for c, n in zip(spec.lhs, data.shape, strict=True)):
        raise shape_error(
            "einsum",
            f"x and kernel must have the axes of {subscripts!r}",
            "The same label has the same size.",
            x=data.shape,
            kernel=w.shape,
        )
    given = [size[c] for c in spec.rhs if c not in spec.lhs]
    batch = [size[c] for c in spec.lhs if c not in spec.rhs]
    summed = [size[c] for c in spec.summed]
    factors = rules.dense(
        max(math.prod(summed), 1),
        max(math.prod(given), 1),
        global_batch_size(math.prod(batch), data),
        constraint=constraint,
    )
    y = contract(
        data,
        w,
        spec,
        factors=(factors.fwd, *factors.bwd[:2]),
        config=config,
        out_dtype=output_dtype(x, kernel) if config is None else output_dtype(x),
        state=state,
    )
    y, scale = times_scales(y, x_scale, w_scale)
    if bias is None:
        return ScaledArray(y, scale)
    b, b_scale = unpack_uniform("einsum", "bias", bias, tuple(range(jnp.ndim(bias))))
    own = tuple(size[c] for c in spec.out if c in spec.rhs)
    if b.shape != own:
        raise shape_error(
            "einsum",
            f"bias must be {own}, the result's axes that the kernel has",
            "Reshape the bias.",
            bias=b.shape,
        )
    spread = b.reshape([size[c] if c in spec.rhs else 1 for c in spec.out])
    return combine(
        (y, scale),
        (spread, b_scale),
        weights=(1.0, 1.0),
        bwd=(1.0, factors.bwd[2]),
        at=scale,
        out=y.dtype,
    )
