"""Grouped matmuls: each group of rows has its own matrix, as in a mixture of experts.

XLA's GPU and CPU backends multiply all rows of `jax.lax.ragged_dot` by all matrices (jax 0.10.2).
Here groups are split into blocks of rows, and a loop multiplies one block at a time.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..core import ScaledArray, match_varying, narrow, wide_dtype
from ._config import MatmulConfig
from ._lowering import data_of
from ._matmul import Contraction, Core, product, run_core
from ._quantize import dequantize
from ._state import QuantState

_SMALLEST, _LARGEST = 16, 512  # rows of a block


class _Blocks(NamedTuple):
    """Blocks of consecutive rows of one group, in the order of the rows."""

    group: jax.Array  # of each block
    start: jax.Array  # its first row
    rows: jax.Array  # how many of its rows belong to the group
    count: jax.Array  # number of blocks in use


def group_of(sizes: jax.Array, index: jax.Array) -> jax.Array:
    """Return the group of each row index; the number of groups for rows beyond all groups."""
    # Not `jnp.searchsorted`, which jax 0.10.2 refuses inside of shard_map.
    return jnp.sum(jnp.cumsum(sizes)[None] <= index[:, None], axis=1, dtype=index.dtype)


def _blocks(sizes: jax.Array, rows: int) -> tuple[_Blocks, int]:
    """The blocks, and their size: the rows of a mean group, within the sizes that GEMMs like."""
    groups = sizes.shape[0]
    mean = -(-rows // max(groups, 1) // _SMALLEST) * _SMALLEST
    size = min(max(mean, _SMALLEST), _LARGEST)
    counts = -(-sizes // size)
    ends = jnp.cumsum(counts)
    index = jnp.arange(rows // size + groups, dtype=sizes.dtype)
    group = jnp.minimum(group_of(counts, index), groups - 1)
    before = (index - (ends - counts)[group]) * size
    first = jnp.cumsum(sizes) - sizes
    return _Blocks(group, first[group] + before, sizes[group] - before, ends[-1]), size


def _scaled(data: jax.Array, x: Any) -> ScaledArray:
    return ScaledArray(data, x.scale if isinstance(x, ScaledArray) else None)


def _padded(x: Any, size: int) -> ScaledArray:  # so that the last block can be read whole
    return _scaled(jnp.pad(data_of(x), ((0, size), (0, 0))), x)


class GroupedCore(Core):
    """`Core` with one right matrix per group; scales of slices are multiplied into the values."""

    def quantize(self, *args: Any) -> Any:
        """As `Core.quantize`."""
        x, seen = super().quantize(*args)
        return (dequantize(x) if self.per_slice else x), seen

    def multiply(
        self, lhs: Any, rhs: Any, sizes: Any, spec: Contraction, factor: Any, dtype: Any
    ) -> jax.Array:
        """Each row of ``lhs`` times the matrix of its group; rows of no group are arbitrary."""
        total = lhs.shape[0]
        blocks, size = _blocks(sizes, total)
        rows = _padded(lhs, size)
        columns = rhs.shape[1 + spec.rhs.index(spec.out[1])]

        def step(i, out):
            start = blocks.start[i]
            block = lax.dynamic_slice_in_dim(rows.data, start, size)
            matrix = lax.dynamic_index_in_dim(data_of(rhs), blocks.group[i], keepdims=False)
            y = product(_scaled(block, rows), _scaled(matrix, rhs), spec, factor, dtype)
            # The next blocks overwrite what this one writes beyond the rows of its group.
            return lax.dynamic_update_slice_in_dim(out, y, start, axis=0)

        empty = match_varying((jnp.zeros((total + size, columns), dtype), rows.data, blocks))[0]
        return lax.fori_loop(0, blocks.count, step, empty)[:total]

    def right_gradient(
        self, lhs: Any, cotangent: Any, sizes: Any, factor: Any, dtype: Any
    ) -> jax.Array:
        """For each group its rows of ``lhs``, transposed, times those of the cotangent."""
        blocks, size = _blocks(sizes, lhs.shape[0])
        left, right = _padded(lhs, size), _padded(cotangent, size)

        def step(i, out):
            start, group = blocks.start[i], blocks.group[i]

            def own(x: ScaledArray) -> ScaledArray:  # other rows are 0: 0 * infinity would be NaN
                data = lax.dynamic_slice_in_dim(x.data, start, size)
                inside = jnp.arange(size)[:, None] < blocks.rows[i]
                return _scaled(jnp.where(inside, data, jnp.zeros_like(data)), x)

            more = product(own(left), own(right), self.spec.grad_rhs, factor, out.dtype)
            more += lax.dynamic_index_in_dim(out, group, keepdims=False)
            return lax.dynamic_update_index_in_dim(out, more, group, axis=0)

        shape = sizes.shape[0], lhs.shape[1], cotangent.shape[1]
        empty = jnp.zeros(shape, wide_dtype(dtype))
        empty = match_varying((empty, left.data, right.data, blocks))[0]
        return narrow(lax.fori_loop(0, blocks.count, step, empty), dtype)


def grouped(
    lhs: jax.Array,
    rhs: jax.Array,
    sizes: jax.Array,
    *,
    factors: tuple[float, ...] = (1.0, 1.0, 1.0),
    config: MatmulConfig | None = None,
    out_dtype: Any = None,
    state: QuantState | None = None,
) -> jax.Array:
    """Multiply consecutive groups of rows, each by its own matrix.

    Scaling:
        As `contract`: out = fwd * q(lhs) @ q(rhs)[group of the row]; a group without rows has a
        gradient of exactly zero. Tensor scales are shared by all groups; channel and block scales
        multiply the values before the matmul.

    Args:
        lhs: (rows, k), floating, sorted by group.
        rhs: (groups, k, n), floating.
        sizes: (groups,) integers, the number of rows of each group. The results of rows beyond
            their sum are zero.
        factors: as for `contract`.
        config: as for `contract`.
        out_dtype: as for `contract`.
        state: as for `contract`.

    Returns:
        Array (rows, n).

    Raises:
        ValueError: if there are not as many sizes as matrices.
        TypeError: if sizes are not integers.

    Example:
        >>> x, w = jnp.ones((3, 2)), jnp.stack([jnp.ones((2, 1)), jnp.zeros((2, 1))])
        >>> print(grouped(x, w, jnp.array([2, 1])).ravel())
        [2. 2. 0.]

    References:
        Gale et al., "MegaBlocks: Efficient Sparse Training with Mixture-of-Experts", 2022, arXiv
        2211.15841 (blocks of rows in place of a capacity).
    """
    sizes = jnp.asarray(sizes)
    if not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise TypeError(f"unitscale.quant.grouped: sizes must be integers; got {sizes.dtype}")
    if sizes.shape != rhs.shape[:1]:
        raise ValueError(
            "unitscale.quant.grouped: sizes must have one number for each of the "
            f"{rhs.shape[0]} matrices of rhs; got shape {sizes.shape}"
        )
    sizes = sizes.astype(jnp.int32)
    # Rows of no group must not enter statistics, and neither must their cotangents.
    own = jnp.arange(lhs.shape[0])[:, None] < jnp.sum(sizes)
    lhs = jnp.where(own, lhs, jnp.zeros_like(lhs))
    spec = Contraction("rk", "kn", "rn")
    out = run_core("grouped", GroupedCore, lhs, rhs, sizes, spec, factors, config, out_dtype, state)
    return jnp.where(own, out, jnp.zeros_like(out))
