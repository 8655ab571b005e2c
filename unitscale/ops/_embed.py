"""Embedding lookup and rotary position embedding."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from .. import rules
from ..core import (
    ScaledArray,
    broadcasts,
    custom_vjp,
    fsdp_devices,
    global_batch_size,
    narrow,
    result_dtype,
    widen,
)
from ._operands import ArrayLike, output_dtype, shape_error, times, unpack


class _Specs(NamedTuple):
    """Shardings of a lookup over explicit mesh axes, which JAX cannot infer."""

    table: PartitionSpec | None = None
    rows: PartitionSpec | None = None


def _specs(table: jax.Array, ids: jax.Array) -> _Specs:
    """Shard the looked-up rows like the ids, and their features like the table's if possible."""
    own, places = jax.typeof(table).sharding.spec, jax.typeof(ids).sharding.spec
    if not any((*own, *places)):
        return _Specs()
    used = set(jax.tree.leaves(tuple(places)))
    features = (None if used & set(jax.tree.leaves(axes)) else axes for axes in own[1:])
    return _Specs(own, PartitionSpec(*places, *features))


def _rows(table: jax.Array, ids: jax.Array, specs: _Specs) -> jax.Array:
    return table.at[ids].get(mode="fill", out_sharding=specs.rows)


@partial(custom_vjp, nondiff_argnums=(2, 3, 4))
def _take(table, ids, factor, specs, dtype):
    # Cast first if devices exchange rows, else last, since a GPU might cast the whole table.
    own = narrow(table, dtype) if fsdp_devices() > 1 else table
    return narrow(_rows(own, ids, specs), dtype), table


def _take_fwd(table, ids, factor, specs, dtype):
    return _take(table, ids, factor, specs, dtype), ids


def _take_bwd(factor, specs, dtype, ids, cotangents):
    # Sum the rows in float32, multiply by the factor, and round once.
    rows, table = cotangents
    total = widen(table).at[ids].add(times(widen(rows), factor), out_sharding=specs.table)
    return narrow(total, table.dtype), None


_take.defvjp(_take_fwd, _take_bwd)


def embed(
    ids: jax.Array, table: ArrayLike, *, vocab: int | None = None, dtype: Any = None
) -> ScaledArray:
    """Look up rows of a table.

    Scaling: `rules.embed`. The result keeps the scale of the table.

    Args:
        ids: integer array of any shape, in [0, vocab). An id out of range gives a row of NaN
            (in formats that have it).
        table: (vocab, features), floating.
        vocab: number of rows in use, if the last rows are padding; None for all.
        dtype: dtype of the result; None for the table's (bfloat16 for 8 bits).
    """
    return _look_up("embed", ids, table, vocab, dtype)[0]


def tied_embed(
    ids: jax.Array, table: ArrayLike, *, vocab: int | None = None, dtype: Any = None
) -> tuple[ScaledArray, ArrayLike]:
    """Look up rows of a table that is also the kernel of a readout.

    Scaling: as in `embed`. The gradient of the lookup is added in place to the readout's.

    Takes the arguments of `embed`. Returns the rows, and the table to pass to the readout.

    References:
        Press, Wolf, "Using the Output Embedding to Improve Language Models", 2017, arXiv
        1608.05859.
    """
    rows, data = _look_up("tied_embed", ids, table, vocab, dtype)
    return rows, (table.map_data(lambda _: data) if isinstance(table, ScaledArray) else data)


def _look_up(
    op: str, ids: jax.Array, table: ArrayLike, vocab: int | None, dtype: Any
) -> tuple[ScaledArray, jax.Array]:
    """Return the rows, and the table's data to pass to a tied readout."""
    data, scale = unpack(op, "table", table)
    ids = jnp.asarray(ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"unitscale.ops.{op}: ids must be integers; got dtype {ids.dtype}")
    if data.ndim != 2:
        raise shape_error(op, "table must be (vocab, features)", table=data.shape)
    rows = data.shape[0]
    vocab = rows if vocab is None else vocab
    if vocab > rows:
        raise ValueError(
            f"unitscale.ops.{op}: vocab must be at most the {rows} rows of the table; got {vocab}"
        )
    # Negative indices would count from the end. An index past the end gives NaN.
    ids = ids.astype(jnp.promote_types(ids.dtype, jnp.int32))
    ids = jnp.where((ids < 0) | (ids >= vocab), rows, ids)
    (factor,) = rules.embed(vocab, global_batch_size(ids.size, ids)).bwd
    if scale is not None and jnp.ndim(scale) == 2 and scale.shape[0] != 1:
        scale = _rows(scale, ids, _specs(scale, ids))  # one scale per row
    elif scale is not None:  # one per feature, or one for the table
        scale = jnp.reshape(scale, scale.shape[-1:] if jnp.size(scale) > 1 else ())
    dtype = result_dtype(data) if dtype is None else jnp.dtype(dtype)
    y, data = _take(data, ids, factor, _specs(data, ids), dtype)
    return ScaledArray(y, scale), data


@partial(custom_vjp, nondiff_argnums=(2, 3))
def _rotate(x, positions, base, out_dtype):
    half = x.shape[-1] // 2
    frequencies = np.float32(np.float64(base) ** (-np.arange(half) / half))
    frequencies = frequencies.reshape((1,) * (positions.ndim + 1) + (half,))
    angles = positions.astype(jnp.float32)[..., None, None] * frequencies
    angles = angles.reshape((1,) * (x.ndim - angles.ndim) + angles.shape)
    cos, sin, wide = jnp.cos(angles), jnp.sin(angles), widen(x)
    first, second = wide[..., :half], wide[..., half:]
    y = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return narrow(y, out_dtype)


def _rotate_fwd(x, positions, base, out_dtype):
    return _rotate(x, positions, base, out_dtype), (positions, jnp.zeros((0,), x.dtype))


def _rotate_bwd(base, out_dtype, residuals, cotangent):
    positions, like = residuals
    return _rotate(cotangent, -positions.astype(jnp.float32), base, like.dtype), None


_rotate.defvjp(_rotate_fwd, _rotate_bwd)


def rotary(x: ArrayLike, positions: jax.Array, *, base: float = 10000.0) -> ScaledArray:
    """Rotate pairs of features by an angle proportional to the position.

    Scaling: a rotation keeps variances, so every factor is 1. The result keeps the scale of x.

    Args:
        x: (..., time, heads, d) with even d; feature i is paired with feature i + d / 2.
        positions: (..., time) integers, broadcasting with the leading dimensions.
        base: wavelengths grow from 2 pi to nearly 2 pi * base positions.

    References:
        Su et al., "RoFormer", 2021, arXiv 2104.09864, equation 34.
    """
    data, scale = unpack("rotary", "x", x, (-1,))
    positions = jnp.asarray(positions)
    if data.ndim < 3 or data.shape[-1] % 2:
        raise shape_error("rotary", "x must be (..., time, heads, d) with even d", x=data.shape)
    if not broadcasts(positions.shape, data.shape[:-2]):
        shapes = {"x": data.shape, "positions": positions.shape}
        raise shape_error("rotary", "positions must broadcast to (..., time)", **shapes)
    return ScaledArray(_rotate(data, positions, float(base), output_dtype(x)), scale)
