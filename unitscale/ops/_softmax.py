"""Softmax over an axis."""

import dataclasses

import jax

from .. import rules
from ..core import ScaledArray, result_dtype
from ..rules import Constraint
from ._operands import ArrayLike, scale_argument, unpack_uniform
from ._wide import wide_op


@dataclasses.dataclass(frozen=True)
class _Softmax:
    axis: int
    mult: float

    def __call__(self, x: jax.Array, scale: jax.Array | None) -> jax.Array:
        x = x if scale is None else x * scale
        return jax.nn.softmax(x * self.mult, axis=self.axis)


def softmax(
    x: ArrayLike,
    axis: int = -1,
    *,
    mult: float = 1.0,
    constraint: Constraint = "to_output_scale",
) -> ScaledArray:
    """Applies softmax over an axis, scaled to unit variance.

    Scaling:
        data = fwd * softmax(mult * x.value), without a scale: that of x is folded in. For many
        standard normal logits fwd = n / (exp(mult^2) - 1)^1/2, that is n / 1.31, and before the
        constraint bwd = n / (mult * exp(mult^2 / 2)), that is n / 1.65. See `rules.softmax`.

    Args:
        x: logits, floating array or ScaledArray.
        axis: the axis that sums to 1 before the factor.
        mult: static multiplier of the logits (inverse temperature).
        constraint: how the output and the input gradient come to share a factor.

    Returns:
        ScaledArray of the shape and dtype of ``x`` (bfloat16 for 8-bit data).

    Raises:
        TypeError: if ``x`` is not floating.
        ValueError: if the axis is out of range or the constraint is unknown.

    Example:
        >>> y = softmax(jax.random.normal(jax.random.key(0), (64, 512)))
        >>> print(bool(abs(y.data.std() - 1) < 0.1))
        True

    References:
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, scaled ops (softmax).
    """
    data, scale = unpack_uniform("softmax", "x", x, ())
    if not -data.ndim <= axis < data.ndim:
        raise ValueError(
            f"unitscale.ops.softmax: axis must be in [{-data.ndim}, {data.ndim}) for x of shape "
            f"{data.shape}; got {axis}"
        )
    factors = rules.softmax(data.shape[axis], mult=mult, constraint=constraint)
    y = wide_op(
        _Softmax(axis, float(mult)),
        data,
        fwd=factors.fwd,
        bwd=factors.bwd,
        constants=(scale_argument(scale),),
        out_dtype=result_dtype(data),
    )
    return ScaledArray(y)
