"""Dense layers of which each group of rows has its own kernel."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

from .. import rules
from ..core import ScaledArray, widen
from ..quant import MatmulConfig, QuantState, group_of, grouped
from ..rules import Constraint
from ._add import combine
from ._operands import ArrayLike, output_dtype, shape_error, times_scales, unpack_uniform


@partial(jax.tree_util.register_dataclass, data_fields=["sizes"], meta_fields=["rows", "groups"])
@dataclasses.dataclass(frozen=True)
class Groups:
    """Which rows of a matrix belong together, such as the tokens of an expert.

    Attributes:
        sizes: (groups,) integers: the number of rows of each group, one after another. Rows beyond
            their sum belong to none.
        rows: number of rows of all groups, on all devices together.
        groups: number of groups, on all devices together.

    Example:
        >>> Groups(jnp.array([3, 1]), rows=4, groups=2).of_rows(5)
        Array([0, 0, 0, 1, 2], dtype=int32)
    """

    sizes: jax.Array
    rows: int
    groups: int

    def of_rows(self, count: int) -> jax.Array:
        """Returns the group of each of ``count`` rows; one past the last for rows of none."""
        return group_of(self.sizes, jnp.arange(count))


def grouped_dense(
    x: ArrayLike,
    kernel: ArrayLike,
    groups: Groups,
    bias: ArrayLike | None = None,
    *,
    constraint: Constraint = "to_output_scale",
    config: MatmulConfig | None = None,
    state: QuantState | None = None,
) -> ScaledArray:
    """Applies a dense layer with a kernel for each group of rows.

    Scaling:
        That of `dense`, but dkernel and dbias have (groups / rows)^1/2: a kernel's gradient sums
        over the rows of its group, rows / groups on average; that of a group without rows is
        exactly zero. See `rules.grouped_dense`.

    Args:
        x: (rows, in), floating, sorted by group.
        kernel: (groups, in, out), floating.
        groups: the groups of the rows.
        bias: (groups, out), or None.
        constraint: how the output and the input gradient come to share a factor.
        config: formats of a quantized product; None multiplies the operands as they are.
        state: the scales of a strategy that keeps them, as of `quant.Delayed`.

    Returns:
        ScaledArray (rows, out), zero for rows of no group: in the promoted dtype, or in that of
        ``x`` under ``config``.

    Raises:
        TypeError: if an operand is not floating.
        ValueError: if the shapes do not fit, the constraint is unknown, or a strategy lacks its
            state.

    Example:
        >>> kernel = jnp.stack([jnp.ones((4, 2)), jnp.zeros((4, 2))])
        >>> groups = Groups(jnp.array([1, 1]), rows=2, groups=2)
        >>> print(grouped_dense(jnp.ones((2, 4)), kernel, groups).data)
        [[2. 2.]
         [0. 0.]]

    References:
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, scaled ops;
        Gale et al., "MegaBlocks", 2022, arXiv 2211.15841.
    """
    (data, x_scale), (w, w_scale) = (
        unpack_uniform("grouped_dense", "x", x, (0, 1)),
        unpack_uniform("grouped_dense", "kernel", kernel, (0, 1, 2)),
    )
    own = groups.sizes.shape[0]
    if w.ndim != 3 or data.ndim != 2 or w.shape[:2] != (own, data.shape[1]):
        raise shape_error(
            "grouped_dense",
            f"x must be (rows, in) and kernel ({own}, in, out), one for each group",
            "Reshape x, and stack the kernels.",
            x=data.shape,
            kernel=w.shape,
        )
    rows, (_, inputs, outputs) = max(groups.rows, 1), w.shape
    factors = rules.grouped_dense(inputs, outputs, rows, groups.groups, constraint=constraint)
    y = grouped(
        data,
        w,
        groups.sizes,
        factors=(factors.fwd, *factors.bwd[:2]),
        config=config,
        out_dtype=output_dtype(x, kernel) if config is None else output_dtype(x),
        state=state,
    )
    y, scale = times_scales(y, x_scale, w_scale)
    if bias is None:
        return ScaledArray(y, scale)
    b, b_scale = unpack_uniform("grouped_dense", "bias", bias, (0, 1))
    if b.shape != (own, outputs):
        raise shape_error(
            "grouped_dense",
            f"bias must be ({own}, {outputs})",
            "Give one bias per group and output feature.",
            bias=b.shape,
        )
    spread = jnp.take(widen(b), groups.of_rows(y.shape[0]), axis=0, mode="fill", fill_value=0)
    return combine(
        (y, scale),
        (spread, b_scale),
        weights=(1.0, 1.0),
        bwd=(1.0, factors.bwd[2]),
        at=scale,
        out=y.dtype,
    )
