"""Grouped matmuls: each group of rows has its own matrix, as in a mixture of experts.

On GPUs and CPUs XLA multiplies all rows of `jax.lax.ragged_dot` by all matrices (jax 0.10.2). Here
a loop multiplies one block of rows at a time, each by the matrix of its group.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..core import ScaledArray, match_varying, narrow, result_dtype, wide_dtype
from ._config import MatmulConfig
from ._lowering import has_scales
from ._matmul import Contraction, Core, matmul, scaled_matmul
from ._quantize import dequantize
from ._state import QuantState, check_state, warn_if_not_updated

_SMALLEST, _LARGEST = 16, 512  # rows of a block


class _Blocks(NamedTuple):
    """Blocks of consecutive rows, each of one group, in the order of the rows."""

    group: jax.Array  # group of each block
    start: jax.Array  # first row of each block
    rows: jax.Array  # number of rows of each block that belong to its group
    count: jax.Array  # number of blocks in use


def group_of(sizes: jax.Array, index: jax.Array) -> jax.Array:
    """Return the group of each row index; the number of groups for rows beyond all groups."""
    # Not `jnp.searchsorted`, which fails inside shard_map in jax 0.10.2.
    return jnp.sum(jnp.cumsum(sizes)[None] <= index[:, None], axis=1, dtype=index.dtype)


def _blocks(sizes: jax.Array, rows: int) -> tuple[_Blocks, int]:
    """Return the blocks and their size: mean rows per group, from `_SMALLEST` to `_LARGEST`."""
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


def _scaled(x: Any) -> ScaledArray:
    return x if isinstance(x, ScaledArray) else ScaledArray(x)


def _padded(x: Any, size: int) -> ScaledArray:
    """Append ``size`` rows, so that a block can start at any row."""
    return _scaled(x).map_data(lambda data: jnp.pad(data, ((0, size), (0, 0))))


class GroupedCore(Core):
    """`Core` with one right matrix per group. Channel and block scales multiply the data first."""

    def quantize(self, *args: Any) -> Any:
        """Quantize as `Core.quantize` does; with channel or block scales, also dequantize."""
        x, seen = super().quantize(*args)
        return (dequantize(x) if has_scales(x) else x), seen

    def both_layouts(self, x: Any, which: int) -> tuple[Any, Any]:
        """Return the operand twice: the loops slice blocks of rows, whatever their layout."""
        return x, x

    def multiply(
        self, lhs: Any, rhs: Any, groups: Any, spec: Contraction, factor: Any, dtype: Any
    ) -> jax.Array:
        """Multiply each row of ``lhs`` by its group's matrix; rows of no group are undefined."""
        total = lhs.shape[0]
        blocks, size = _blocks(groups, total)
        exact = self.exact(forward=spec.out == self.spec.out)
        rows, matrices = _padded(lhs, size), _scaled(rhs)
        columns = rhs.shape[1 + spec.rhs.index(spec.out[1])]

        def step(i, out):
            start, group = blocks.start[i], blocks.group[i]
            block = rows.map_data(lambda x: lax.dynamic_slice_in_dim(x, start, size))
            matrix = matrices.map_data(lambda x: lax.dynamic_index_in_dim(x, group, keepdims=False))
            y = scaled_matmul(block, matrix, spec, factor, dtype, exact=exact)
            # Rows written here beyond the end of the group are overwritten by the next block.
            return lax.dynamic_update_slice_in_dim(out, y, start, axis=0)

        empty = match_varying((jnp.zeros((total + size, columns), dtype), rows.data, blocks))[0]
        return lax.fori_loop(0, blocks.count, step, empty)[:total]

    def weight_gradient(
        self, lhs: Any, cotangent: Any, groups: Any, factor: Any, dtype: Any
    ) -> jax.Array:
        """Return ``lhs.T @ cotangent`` for the rows of each group."""
        blocks, size = _blocks(groups, lhs.shape[0])
        left, right = _padded(lhs, size), _padded(cotangent, size)

        def step(i, out):
            start, group = blocks.start[i], blocks.group[i]
            inside = jnp.arange(size)[:, None] < blocks.rows[i]

            def own(x: jax.Array) -> jax.Array:  # zero other rows in both: 0 * infinity is NaN
                rows = lax.dynamic_slice_in_dim(x, start, size)
                return jnp.where(inside, rows, jnp.zeros_like(rows))

            operands = left.map_data(own), right.map_data(own)
            exact = self.exact(forward=False)
            more = scaled_matmul(*operands, self.spec.grad_rhs, factor, out.dtype, exact=exact)
            more += lax.dynamic_index_in_dim(out, group, keepdims=False)
            return lax.dynamic_update_index_in_dim(out, more, group, axis=0)

        shape = groups.shape[0], lhs.shape[1], cotangent.shape[1]
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
        As in `contract`: out = fwd * q(lhs) @ q(rhs)[group of the row]. A group without rows has a
        gradient of exactly zero. All groups share one scale per tensor; channel and block scales
        multiply the data before the matmul.

    Args:
        lhs: (rows, k), floating, sorted by group.
        rhs: (groups, k, n), floating.
        sizes: (groups,) integers, the number of rows of each group. Rows beyond their sum give
            zeros.
        factors: as for `contract`.
        config: as for `contract`.
        out_dtype: as for `contract`.
        state: as for `contract`.

    Raises:
        ValueError: if the shapes do not fit.
        TypeError: if the sizes are not integers.

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
    fits = (lhs.ndim, rhs.ndim) == (2, 3) and lhs.shape[1] == rhs.shape[1]
    if not fits or sizes.shape != rhs.shape[:1] or not sizes.size:
        raise ValueError(
            "unitscale.quant.grouped: lhs must be (rows, k), rhs (groups, k, n) and sizes "
            f"(groups,), with a group; got lhs {lhs.shape}, rhs {rhs.shape}, sizes {sizes.shape}"
        )
    sizes = sizes.astype(jnp.int32)
    # Exclude rows of no group, and their cotangents, from amax statistics.
    own = jnp.arange(lhs.shape[0])[:, None] < jnp.sum(sizes)
    lhs = jnp.where(own, lhs, jnp.zeros_like(lhs))
    check_state("grouped", config, state)
    lhs, rhs = warn_if_not_updated((lhs, rhs), state)
    if config is not None:  # 16 tokens of a Hadamard matrix may belong to several groups
        config = dataclasses.replace(config, hadamard=False)
    if out_dtype is None:
        out_dtype = result_dtype(lhs, rhs) if config is None else result_dtype(lhs)
    spec, factors = Contraction("rk", "kn", "rn"), tuple(map(float, factors))
    core = GroupedCore(spec, factors, config, jnp.dtype(out_dtype), (lhs.dtype, rhs.dtype))
    out = matmul(lhs, rhs, sizes, None, state, core)
    return jnp.where(own, out, jnp.zeros_like(out))
