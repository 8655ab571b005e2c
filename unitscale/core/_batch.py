"""The batch size that factors hold: that of the whole batch, whatever it is divided over."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from jax import lax

from ._vjp import varying

# A part of the keys of JAX's caches, so that what was traced inside is not used outside.
_AXES: Any = jax.make_user_context(None)
_ITEMS: Any = jax.make_user_context(None)


@contextmanager
def batch_over(axis_name: str | Sequence[str]) -> Iterator[None]:
    """Says which mapped axes divide the batch, while a function is traced.

    Scaling:
        Factors of unit scaling that hold a batch size (the gradients of kernels, biases, gains and
        tables, and losses that keep a mean's 1/N out of the backward) mean the whole batch: that of
        all devices together. So the mean over devices of their gradients is the gradient on one
        device. Where the compiler divides the batch (`jax.jit` and shardings) ops see all of it.
        Inside `jax.shard_map` they see a part, and the number of parts is known in two ways:

        - Without this context, from JAX's own types: the batch is divided over the axes that the
          activations vary over. JAX keeps no such account under ``check_vma=False``, where the
          batch counts as undivided.
        - With it, over the axes named, and where JAX keeps account, those of them alone that
          activations vary over. To be used under ``check_vma=False``, and where activations vary
          over an axis that does not divide the batch, as over experts or parts of a tensor.

        An unnamed `jax.vmap` over N examples hides its axis, and each counts as a batch of its own:
        the mean of their gradients by weights of `ops` is N^1/2 times that of the batch, or N^-1/2
        times under a loss of `ops`. With ``axis_name=`` and this context it is that of the batch.

        A loss with its 1/N kept out has n times the gradient of its part, as the mean over the n
        parts divides by n. In narrow formats let that mean come first: differentiate
        `jax.lax.pmean` of the loss, or the loss over n, so that cotangents stay unit.

    Args:
        axis_name: names of axes of `jax.shard_map` or `jax.vmap`; () for none. A name that nothing
            around an op maps divides nothing.

    Example:
        >>> import jax.numpy as jnp
        >>> from unitscale import ops
        >>> x = jnp.ones((4, 2))
        >>> def loss(w, x):
        ...     return ops.dense(x, w).value.sum()
        >>> each = jax.vmap(jax.grad(loss), (None, 0), axis_name="examples")
        >>> with batch_over("examples"):
        ...     total = each(jnp.ones((2, 3)), x[:, None]).sum(0)
        >>> print(total[0], jax.grad(loss)(jnp.ones((2, 3)), x)[0])
        [2. 2. 2.] [2. 2. 2.]

    References:
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, scaled ops (the batch size in
        gradients of weights); the guide of `jax.shard_map` on ``check_vma``.
    """
    with _AXES((axis_name,) if isinstance(axis_name, str) else tuple(axis_name)):
        yield


@contextmanager
def batch_size(items: int) -> Iterator[None]:
    """Says what every op takes for its batch size, while a function is traced.

    Scaling:
        A weight's gradient sums over the items that it meets, and has (number of items)^-1/2; a
        mean loss keeps its 1/N out of the backward. Both are constants where a weight, or a loss,
        stands once in a program. Where a loss uses weights on inputs of several sizes (one encoder
        of queries and documents, one table of source and target, one head on levels of several
        resolutions), or adds losses over several batches, each would count with a constant of its
        own, and the gradient would have another direction. Within this context all have the same:
        ``items``, best near the largest of them, for gradients near unit size.

    Args:
        items: tokens, rows or positions, from 1 on, of all devices together.

    Raises:
        ValueError: if it is no such number.

    Example:
        >>> import jax.numpy as jnp
        >>> from unitscale import ops
        >>> def loss(w):
        ...     with batch_size(4):
        ...         query = ops.dense(jnp.ones((1, 2)), w)
        ...         documents = ops.dense(jnp.ones((4, 2)), w)
        ...     return query.value.sum() + 2 * documents.value.sum()
        >>> print(jax.grad(loss)(jnp.ones((2, 3)))[0])  # (1 + 2 * 4) / 4^1/2
        [4.5 4.5 4.5]

    References:
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, section 4.2 (constraints where
        an edge is not cut), appendix on scaled ops (the batch size in gradients of weights).
    """
    if isinstance(items, bool) or not isinstance(items, int) or items < 1:
        raise ValueError(
            f"unitscale.batch_size: items must be a number of items from 1 on; got {items!r}"
        )
    with _ITEMS(items):
        yield


def global_batch_size(items: int, *activations: jax.Array) -> int:
    """The batch size of an op: its items, on all devices together, or what `batch_size` says.

    Example:
        >>> import jax.numpy as jnp
        >>> with batch_size(64):
        ...     print(global_batch_size(8, jnp.ones((8, 2))))
        64
    """
    return max(items, 1) * num_batch_shards(*activations) if _ITEMS.value is None else _ITEMS.value


def batch_size_override() -> int | None:
    """What `batch_size` says; None outside of it.

    Example:
        >>> print(batch_size_override())
        None
    """
    return _ITEMS.value


def num_batch_shards(*activations: jax.Array) -> int:
    """Number of parts of the batch that activations are one part of, where this is traced.

    Example:
        >>> import jax.numpy as jnp
        >>> num_batch_shards(jnp.ones(4))
        1
    """
    varied = frozenset().union(*map(varying, activations))
    named = _AXES.value
    axes = varied if named is None else [a for a in named if a in varied or _is_untracked(a)]
    return math.prod(lax.axis_size(axis) for axis in axes)


def _is_untracked(axis: str) -> bool:
    """Whether an axis is mapped, and JAX keeps no account of what varies over it."""
    try:
        index = lax.axis_index(axis)
    except NameError:
        return False
    return axis not in varying(index)
