"""Low-rank updates of dense layers."""

import math
from string import ascii_lowercase

from .. import rules
from ..core import ScaledArray, global_batch_size
from ..quant import Contraction, contract
from ..rules import Constraint
from ._add import combine
from ._operands import ArrayLike, output_dtype, shape_error, times_scales, unpack, unpack_uniform


def lora(
    x: ArrayLike,
    a: ArrayLike,
    b: ArrayLike,
    base: ArrayLike | None = None,
    *,
    constraint: Constraint = "to_output_scale",
) -> ScaledArray:
    """Applies a low-rank update of a dense layer: ``base + x @ a @ b``.

    Scaling:
        data = (in * rank)^-1/2 * x.data @ a.data @ b.data, the scales multiplied, with the input
        gradient of `dense` times rank^-1/2; gradients of ``a`` and ``b`` are unit for unit ``b``.
        See `rules.lora`. ``base`` is added as it is, with factor 1 both ways: an update begins at
        zero, and the sum is then the base's.

    Args:
        x: (..., in), floating.
        a: (in, rank), floating.
        b: (rank, out), floating.
        base: (..., out), the output of the layer that is updated, or None.
        constraint: that of the layer.

    Returns:
        ScaledArray (..., out) in the promoted dtype, or at the scale and in the dtype of ``base``.

    Raises:
        TypeError: if an operand is not floating.
        ValueError: if the shapes do not fit or the constraint is unknown.

    Example:
        >>> import jax.numpy as jnp
        >>> print(lora(jnp.ones((1, 16)), jnp.ones((16, 4)), jnp.ones((4, 2))).data)
        [[8. 8.]]

    References:
        Hu et al., "LoRA", 2021, arXiv 2106.09685; Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv
        2303.11257.
    """
    data, x_scale = unpack_uniform("lora", "x", x, (-1,))
    (down, a_scale), (up, b_scale) = (
        unpack_uniform("lora", name, w, (0, 1)) for name, w in (("a", a), ("b", b))
    )
    shapes = {"x": data.shape, "a": down.shape, "b": up.shape}
    chain = (data.shape[-1:], *(s for w in (down, up) for s in (w.shape[:1], w.shape[1:])))
    if down.ndim != 2 or up.ndim != 2 or chain[0] != chain[1] or chain[2] != chain[3]:
        raise shape_error(
            "lora",
            "x must be (..., in), a (in, rank) and b (rank, out)",
            "Check the feature sizes.",
            **shapes,
        )
    rows = ascii_lowercase[: data.ndim - 1]
    batch = global_batch_size(math.prod(data.shape[:-1]), data)
    spec = Contraction(rows + "y", "yz", rows + "z")
    dtype = output_dtype(x, a, b)
    (n, rank), out = down.shape, up.shape[1]
    first, second = rules.lora(n, rank, out, batch, constraint=constraint)
    for w, factors in ((down, first), (up, second)):
        data = contract(data, w, spec, factors=(factors.fwd, *factors.bwd), out_dtype=dtype)
    data, scale = times_scales(data, x_scale, a_scale)
    data, scale = times_scales(data, scale, b_scale)
    if base is None:
        return ScaledArray(data, scale)
    total, base_scale = unpack("lora", "base", base)
    if total.shape != data.shape:
        raise shape_error(
            "lora",
            "base must be (..., out)",
            "Check the feature sizes.",
            base=total.shape,
            **shapes,
        )
    return combine(
        (total, base_scale),
        (data, scale),
        weights=(1.0, 1.0),
        bwd=(1.0, 1.0),
        at=base_scale,
        out=total.dtype,
    )
