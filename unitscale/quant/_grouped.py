"""Products of groups of rows, each with a matrix of its own, such as tokens with their expert's.

XLA's GPU and CPU backends compute `jax.lax.ragged_dot` as one dense product that is as many times
too large as there are groups. Here groups are cut into blocks of rows, which a loop multiplies one
by one: as many products as there are blocks with rows in them, each a plain one of XLA's.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..core import ScaledArray, custom_vjp, match_varying, narrow, result_dtype, wide_dtype
from ._config import MatmulConfig
from ._contraction import Contraction, product
from ._product import COTANGENT, LHS, RHS, is_per_slice, quantize_tensor
from ._quantize import dequantize
from ._state import QuantState, Seen, check_state, state_gradient
from ._watch import watched

_SMALLEST, _LARGEST = 16, 512
_FORWARD = Contraction("rk", "kn", "rn")


class _Blocks(NamedTuple):
    """Blocks of consecutive rows of one group, in the order of the rows.

    Attributes:
        group: of each block.
        start: its first row.
        rows: how many of its rows are of the group; the block goes on beyond them.
        count: number of blocks that there are.
    """

    group: jax.Array
    start: jax.Array
    rows: jax.Array
    count: jax.Array


def _block_size(rows: int, groups: int) -> int:
    """The rows of a block: those of a mean group, as far as matrix kernels like such sizes."""
    mean = -(-rows // max(groups, 1) // _SMALLEST) * _SMALLEST
    return min(max(mean, _SMALLEST), _LARGEST)


def group_of(sizes: jax.Array, index: jax.Array) -> jax.Array:
    """The group of each index, of consecutive groups; one past the last beyond them all.

    Example:
        >>> print(group_of(jnp.array([2, 0, 1]), jnp.arange(4)))
        [0 0 2 3]
    """
    # Not `jnp.searchsorted`, which jax 0.10.2 refuses inside of shard_map.
    return jnp.sum(jnp.cumsum(sizes)[None] <= index[:, None], axis=1, dtype=index.dtype)


def _blocks(sizes: jax.Array, rows: int, size: int) -> _Blocks:
    groups = sizes.shape[0]
    counts = -(-sizes // size)
    ends = jnp.cumsum(counts)
    index = jnp.arange(rows // size + groups, dtype=sizes.dtype)
    group = jnp.minimum(group_of(counts, index), groups - 1)
    before = (index - (ends - counts)[group]) * size
    first = jnp.cumsum(sizes) - sizes
    return _Blocks(group, first[group] + before, sizes[group] - before, ends[-1])


class _Rows:
    """An operand with one row for each row of the groups, padded by a block."""

    def __init__(self, x: Any, size: int) -> None:
        data, self.scale = (x.data, x.scale) if isinstance(x, ScaledArray) else (x, None)
        self.data, self.size = jnp.pad(data, ((0, size), (0, 0))), size

    def block(self, start: jax.Array, rows: jax.Array | None = None) -> ScaledArray:
        """The rows from ``start`` on; zeros beyond the first ``rows`` of them."""
        data = lax.dynamic_slice_in_dim(self.data, start, self.size)
        if rows is not None:
            own = jnp.arange(self.size)[:, None] < rows
            data = jnp.where(own, data, jnp.zeros_like(data))
        return ScaledArray(data, self.scale)


def _one(x: Any, group: jax.Array) -> ScaledArray:
    """The matrix of one group."""
    data, scale = (x.data, x.scale) if isinstance(x, ScaledArray) else (x, None)
    return ScaledArray(lax.dynamic_index_in_dim(data, group, keepdims=False), scale)


def _multiply_rows(
    lhs: Any, rhs: Any, sizes: jax.Array, spec: Contraction, factor: float, dtype: Any
) -> jax.Array:
    """Each row of ``lhs`` times the matrix of its group; anything for rows of no group."""
    total, groups = lhs.shape[0], rhs.shape[0]
    size = _block_size(total, groups)
    blocks, rows = _blocks(sizes, total, size), _Rows(lhs, size)
    columns = rhs.shape[1 + spec.rhs.index(spec.out[1])]

    def step(i, out):
        y = product(rows.block(blocks.start[i]), _one(rhs, blocks.group[i]), spec, factor, dtype)
        # What a block writes beyond its group's rows, the next blocks write over.
        return lax.dynamic_update_slice_in_dim(out, y, blocks.start[i], axis=0)

    empty = match_varying((jnp.zeros((total + size, columns), dtype), rows.data, blocks))[0]
    return lax.fori_loop(0, blocks.count, step, empty)[:total]


def _multiply_groups(
    lhs: Any, cotangent: Any, sizes: jax.Array, factor: float, dtype: Any
) -> jax.Array:
    """For each group its rows of ``lhs``, transposed, times those of the cotangent."""
    total, groups = lhs.shape[0], sizes.shape[0]
    size = _block_size(total, groups)
    blocks = _blocks(sizes, total, size)
    left, right = _Rows(lhs, size), _Rows(cotangent, size)

    def step(i, out):
        start, group = blocks.start[i], blocks.group[i]
        # Neither has foreign rows: zero times infinity would be NaN.
        x, y = left.block(start, blocks.rows[i]), right.block(start, blocks.rows[i])
        more = product(x, y, _FORWARD.grad_rhs, factor, out.dtype)
        more += lax.dynamic_index_in_dim(out, group, keepdims=False)
        return lax.dynamic_update_index_in_dim(out, more, group, axis=0)

    wide = wide_dtype(dtype)
    empty = jnp.zeros((groups, lhs.shape[1], cotangent.shape[1]), wide)
    empty = match_varying((empty, left.data, right.data, blocks))[0]
    return narrow(lax.fori_loop(0, blocks.count, step, empty), dtype)


def _quantized(
    x: jax.Array, which: int, axis: int, config: MatmulConfig | None, state: QuantState | None
) -> tuple[Any, Seen | None]:
    """A tensor as it is multiplied; scales along dimensions go into the values again."""
    q, seen = quantize_tensor(x, which, (axis,), config, state)
    return (dequantize(q) if is_per_slice(config) else q), seen


@partial(custom_vjp, nondiff_argnums=(4, 5, 6))
def _grouped(lhs, rhs, sizes, state, factors, config, out_dtype):
    return _grouped_fwd(lhs, rhs, sizes, state, factors, config, out_dtype)[0]


def _grouped_fwd(lhs, rhs, sizes, state, factors, config, out_dtype):
    like = tuple(jnp.zeros((0,), x.dtype) for x in (lhs, rhs))
    lhs, saw_lhs = _quantized(lhs, LHS, 1, config, state)
    rhs, saw_rhs = _quantized(rhs, RHS, 1, config, state)
    y = _multiply_rows(lhs, rhs, sizes, _FORWARD, factors[0], out_dtype)
    return y, (lhs, rhs, sizes, like, state, (saw_lhs, saw_rhs))


def _grouped_bwd(factors, config, out_dtype, residuals, cotangent):
    lhs, rhs, sizes, like, state, seen = residuals
    for_lhs, saw = _quantized(cotangent, COTANGENT, 1, config, state)
    for_rhs = for_lhs
    if is_per_slice(config):  # the matrices' gradients sum over rows
        for_rhs, _ = _quantized(cotangent, COTANGENT, 0, config, state)
    dtypes = tuple(x.dtype for x in like)
    grad_lhs = _multiply_rows(for_lhs, rhs, sizes, _FORWARD.grad_lhs, factors[1], dtypes[0])
    grad_rhs = _multiply_groups(lhs, for_rhs, sizes, factors[2], dtypes[1])
    if state is None:
        return grad_lhs, grad_rhs, None, None
    tensors = lhs.size, rhs.size, cotangent.size
    return grad_lhs, grad_rhs, None, state_gradient(state, (*seen, saw), tensors)


_grouped.defvjp(_grouped_fwd, _grouped_bwd)


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
    """Multiplies consecutive groups of rows, each by a matrix of its own.

    Scaling:
        That of `contract`: out = fwd * q(lhs) @ q(rhs)[group of the row], dlhs and drhs
        accordingly; a group without rows has a gradient of exactly zero. A tensor has one scale for
        all groups; where a strategy has scales of channels or blocks, the products are of the
        values that those hold, in the wider type.

    Args:
        lhs: (rows, k), floating, sorted by group.
        rhs: (groups, k, n), floating.
        sizes: (groups,) integers, the number of rows of each group. Rows beyond their sum belong to
            none: their results are zero.
        factors: static (fwd, bwd_lhs, bwd_rhs).
        config: operand formats; None multiplies the operands in their promoted dtype.
        out_dtype: dtype of the result, by default as that of `contract`.
        state: the scales of a strategy that keeps them.

    Returns:
        Array (rows, n).

    Raises:
        ValueError: if there are not as many sizes as matrices, or the strategy needs a state and
            has none, or the state of another strategy.
        TypeError: if sizes are no integers.

    Example:
        >>> x, w = jnp.ones((3, 2)), jnp.stack([jnp.ones((2, 1)), jnp.zeros((2, 1))])
        >>> print(grouped(x, w, jnp.array([2, 1])).ravel())
        [2. 2. 0.]

    References:
        Gale et al., "MegaBlocks: Efficient Sparse Training with Mixture-of-Experts", 2022, arXiv
        2211.15841 (blocks of rows in place of a capacity).
    """
    check_state("grouped", config, state)
    dtype = result_dtype(lhs, rhs) if config is None else result_dtype(lhs)
    out_dtype = jnp.dtype(dtype if out_dtype is None else out_dtype)
    sizes = jnp.asarray(sizes)
    if not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise TypeError(f"unitscale.quant.grouped: sizes must be integers; got {sizes.dtype}")
    if sizes.shape != rhs.shape[:1]:
        raise ValueError(
            "unitscale.quant.grouped: sizes must have one number for each of the "
            f"{rhs.shape[0]} matrices of rhs; got shape {sizes.shape}"
        )
    sizes = sizes.astype(jnp.int32)
    # What stands in rows of no group goes into no statistic, and neither does its cotangent.
    own = jnp.arange(lhs.shape[0])[:, None] < jnp.sum(sizes)
    lhs, rhs = watched((jnp.where(own, lhs, jnp.zeros_like(lhs)), rhs), state)
    out = _grouped(lhs, rhs, sizes, state, tuple(map(float, factors)), config, out_dtype)
    return jnp.where(own, out, jnp.zeros_like(out))
