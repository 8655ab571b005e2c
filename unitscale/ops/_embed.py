"""Embedding look-up."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .. import rules
from ..core import ScaledArray, custom_vjp, global_batch_size, narrow, result_dtype, widen
from ._operands import ArrayLike, shape_error, unpack


class _Specs(NamedTuple):
    """Of the table and of the rows, where explicit axes leave JAX in doubt of them."""

    table: PartitionSpec | None = None
    rows: PartitionSpec | None = None

    @classmethod
    def of(cls, table: jax.Array, ids: jax.Array) -> "_Specs":
        """Rows lie as their ids do, and features as in the table on axes that these leave."""
        own, places = jax.typeof(table).sharding.spec, jax.typeof(ids).sharding.spec
        if not any((*own, *places)):
            return cls()
        used = set(jax.tree.leaves(tuple(places)))
        features = (None if used & set(jax.tree.leaves(axes)) else axes for axes in own[1:])
        return cls(own, PartitionSpec(*places, *features))


def _rows(table: jax.Array, ids: jax.Array, specs: _Specs) -> jax.Array:
    return table.at[ids].get(mode="fill", out_sharding=specs.rows)


@partial(custom_vjp, nondiff_argnums=(2, 3))
def _take(table, ids, factor, specs):
    return _rows(table, ids, specs).astype(result_dtype(table))


def _take_fwd(table, ids, factor, specs):
    return _take(table, ids, factor, specs), (ids, jnp.zeros((table.shape[0], 0), table.dtype))


def _take_bwd(factor, specs, residuals, cotangent):
    ids, like = residuals
    shape = (like.shape[0], *cotangent.shape[ids.ndim :])
    # Rows add up in float32 and are rounded once, after the factor.
    zeros = jnp.zeros(shape, widen(cotangent).dtype, out_sharding=specs.table)
    total = zeros.at[ids].add(widen(cotangent), out_sharding=specs.table)
    return narrow(total if factor == 1 else total * factor, like.dtype), None


_take.defvjp(_take_fwd, _take_bwd)


@partial(custom_vjp, nondiff_argnums=(2, 3))
def _take_and_keep(table, ids, factor, specs):
    return _take(table, ids, factor, specs), table


def _take_and_keep_fwd(table, ids, factor, specs):
    return _take_and_keep(table, ids, factor, specs), ids


def _take_and_keep_bwd(factor, specs, ids, cotangents):
    rows, table = cotangents
    rows = widen(rows) if factor == 1 else widen(rows) * factor
    total = widen(table).at[ids].add(rows, out_sharding=specs.table)
    return narrow(total, table.dtype), None


_take_and_keep.defvjp(_take_and_keep_fwd, _take_and_keep_bwd)


class _Look(NamedTuple):
    """What a look-up needs: data of the table, ids of its rows, the factor, the rows' scale."""

    data: jax.Array
    ids: jax.Array
    factor: float
    specs: _Specs
    scale: Any


def embed(ids: jax.Array, table: ArrayLike, *, vocab: int | None = None) -> ScaledArray:
    """Looks up rows of a table.

    Scaling:
        data = table.data[ids], scale = table.scale. dtable, a cut edge, is the sum of the
        cotangents of each row times (vocab / tokens)^1/2, in float32, rounded once. See
        `rules.embed`.

    Args:
        ids: integer array of any shape, in [0, vocab); an id outside gives a row of NaN.
        table: (vocab, features), floating.
        vocab: number of rows where the table has more: the others are padding. None for all.

    Returns:
        ScaledArray (*ids.shape, features) in the dtype of ``table`` (bfloat16 for 8-bit data).

    Raises:
        TypeError: if the ids are not integers or the table is not floating.
        ValueError: if the table is not a matrix, or has fewer rows than vocab.

    Example:
        >>> print(embed(jnp.array([1, 1]), jnp.array([[1.0], [2.0]])).data.ravel())
        [2. 2.]

    References:
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, scaled ops (embedding).
    """
    look = _look("embed", ids, table, vocab)
    return ScaledArray(_take(look.data, look.ids, look.factor, look.specs), look.scale)


def tied_embed(
    ids: jax.Array, table: ArrayLike, *, vocab: int | None = None
) -> tuple[ScaledArray, ArrayLike]:
    """Looks up rows of a table that is used once more, as the kernel of a readout.

    Scaling:
        That of `embed`. The gradient of the rows is added to that by the table which is returned,
        row by row and in its place: there is no array of zeros as large as the table, and no sum of
        two such arrays. Each row of the sum is rounded as that gradient is.

    Args:
        ids: as for `embed`.
        table: as for `embed`.
        vocab: as for `embed`.

    Returns:
        What `embed` returns, and the table, for what comes after.

    Raises:
        TypeError: as `embed`.
        ValueError: as `embed`.

    Example:
        >>> rows, table = tied_embed(jnp.array([1, 1]), jnp.array([[1.0], [2.0]]))
        >>> print(rows.data.ravel(), table.ravel())
        [2. 2.] [1. 2.]

    References:
        Press, Wolf, "Using the Output Embedding to Improve Language Models", 2017, arXiv
        1608.05859.
    """
    look = _look("tied_embed", ids, table, vocab)
    rows, data = _take_and_keep(look.data, look.ids, look.factor, look.specs)
    kept = table.map_data(lambda _: data) if isinstance(table, ScaledArray) else data
    return ScaledArray(rows, look.scale), kept


def _look(op: str, ids: jax.Array, table: ArrayLike, vocab: int | None) -> _Look:
    data, scale = unpack(op, "table", table)
    ids = jnp.asarray(ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"unitscale.ops.{op}: ids must be integers; got dtype {ids.dtype}")
    if data.ndim != 2:
        raise shape_error(
            op, "table must be (vocab, features)", "Reshape the table.", table=data.shape
        )
    rows = data.shape[0]
    vocab = rows if vocab is None else vocab
    if vocab > rows:
        raise ValueError(
            f"unitscale.ops.{op}: vocab must be at most the {rows} rows of the table; got {vocab}"
        )
    # A negative index would count from the end; one past the end gives NaN.
    ids = ids.astype(jnp.promote_types(ids.dtype, jnp.int32))
    ids = jnp.where((ids < 0) | (ids >= vocab), rows, ids)
    (factor,) = rules.embed(vocab, global_batch_size(ids.size, ids)).bwd
    if scale is not None and jnp.ndim(scale) == 2 and scale.shape[0] != 1:
        scale = _rows(scale, ids, _Specs.of(scale, ids))  # one scale per row
    elif scale is not None and jnp.size(scale) > 1:
        scale = jnp.reshape(scale, scale.shape[-1:])  # one scale per feature
    elif scale is not None:
        scale = jnp.reshape(scale, ())
    return _Look(data, ids, factor, _Specs.of(data, ids), scale)
