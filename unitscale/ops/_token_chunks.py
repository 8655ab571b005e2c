"""A function of tokens over chunks of them, one after another, on one device or on many."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..core import BATCH_AXES, CONTEXT_AXES, axes_size, constrain_sharding

Body = Callable[[Any], tuple[Any, Any]]


def token_axes(lead: tuple[int, ...]) -> tuple[str, ...]:
    """Names of the axes of a mesh of `jax.set_mesh` that divide what `joined` returns.

    Example:
        >>> token_axes((8, 1024))
        ('fsdp', 'data')
    """
    return BATCH_AXES if _parts(lead) == 1 else (*CONTEXT_AXES, *BATCH_AXES)


def joined(x: jax.Array, lead: tuple[int, ...]) -> jax.Array:
    """Returns tokens (*lead, ...) as (tokens, ...), those of each device together.

    Where a mesh divides sequences, their parts are what comes first: XLA can not divide a dimension
    that has been joined with one before it.

    Example:
        >>> joined(jnp.ones((2, 4, 3)), (2, 4)).shape
        (8, 3)
    """
    parts, rest = _parts(lead), x.shape[len(lead) :]
    if parts > 1:
        x = jnp.swapaxes(x.reshape(lead[0], parts, lead[1] // parts, *rest), 0, 1)
    return constrain_sharding(x.reshape(math.prod(lead), *rest), token_axes(lead))


def parted(x: jax.Array, lead: tuple[int, ...]) -> jax.Array:
    """Returns what `joined` has joined as it was.

    Example:
        >>> parted(jnp.ones((8, 3)), (2, 4)).shape
        (2, 4, 3)
    """
    parts, rest = _parts(lead), x.shape[1:]
    if parts > 1:
        x = jnp.swapaxes(x.reshape(parts, lead[0], lead[1] // parts, *rest), 0, 1)
    return x.reshape(*lead, *rest)


def _parts(lead: tuple[int, ...]) -> int:
    """Into how many a mesh divides the sequences of (batch, time)."""
    parts = axes_size(CONTEXT_AXES)
    return parts if len(lead) == 2 and lead[1] % parts == 0 else 1


def over_chunks(body: Body, rows: Any, chunks: int, axes: tuple[str, ...] = BATCH_AXES) -> Any:
    """Adds up what ``body`` returns first, and joins what it returns second for each token.

    The sum begins with the first chunk: zeros as large as the kernel would be written, and read.
    Where the compiler divides tokens over devices of a mesh of `jax.set_mesh`, each of them has a
    sum of its own, which are added in the end. A sum over all devices for every chunk would send
    as much as all gradients do.

    Args:
        body: of rows; its sums and what it returns for each of them.
        rows: tree of arrays (tokens, ...).
        chunks: how many, at least 1.
        axes: names of the mesh's axes that divide the tokens, as `token_axes` gives them.

    Example:
        >>> rows = jnp.arange(5.0)
        >>> total, squares = over_chunks(lambda x: (x.sum(), x**2), rows, 2)
        >>> print(total, squares)
        10.0 [ 0.  1.  4.  9. 16.]
    """
    tokens, devices = jax.tree.leaves(rows)[0].shape[0], axes_size(axes)
    if chunks == 1:
        return body(rows)
    if devices == 1 or tokens % devices:
        return _one_after_another(body, rows, chunks)

    def by_device(tree: Any) -> Any:
        return jax.tree.map(lambda x: constrain_sharding(x, axes), tree)

    def each(rows: Any) -> Any:
        total, out = jax.vmap(body)(by_device(rows))
        return by_device(total), out

    own = jax.tree.map(lambda x: x.reshape(devices, -1, *x.shape[1:]), rows)
    total, out = _one_after_another(each, by_device(own), chunks, axis=1)
    total = jax.tree.map(lambda x: jnp.sum(x, 0), total)
    return total, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), out)


def _one_after_another(body: Body, rows: Any, chunks: int, axis: int = 0) -> Any:
    """The same of tokens along an axis, as one program whose parts the compiler may divide."""
    tokens = jax.tree.leaves(rows)[0].shape[axis]
    split = _split(rows, tokens, chunks, axis)

    def add(total: Any, rows: Any) -> tuple[Any, Any]:
        parts, out = body(rows)
        return jax.tree.map(jnp.add, total, parts), out

    total, first = body(jax.tree.map(lambda x: x[0], split))
    total, others = lax.scan(add, total, jax.tree.map(lambda x: x[1:], split))
    out = jax.tree.map(lambda x, xs: jnp.concatenate([x[None], xs]), first, others)
    return total, _join(out, tokens, axis)


def _split(rows: Any, tokens: int, chunks: int, axis: int) -> Any:
    """Chunks along a new first axis; tokens that follow one another are in different ones.

    So a chunk has tokens of every device where the compiler divides tokens over devices. What they
    do not fill is zero.
    """
    more = -tokens % chunks

    def split(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, more if a == axis else 0) for a in range(x.ndim)])
        x = x.reshape(*x.shape[:axis], -1, chunks, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis + 1, 0)

    return jax.tree.map(split, rows)


def _join(rows: Any, tokens: int, axis: int) -> Any:
    def join(x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x, 0, axis + 1)
        x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
        return lax.slice_in_dim(x, 0, tokens, axis=axis)

    return jax.tree.map(join, rows)
