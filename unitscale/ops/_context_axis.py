"""Attention where tokens are divided over the mesh axis context: each device has some heads."""

import jax

from ..core import BATCH_AXES, CONTEXT_AXES, TENSOR_AXES, axes_size, constrain_sharding

_HEADS = (*TENSOR_AXES, *CONTEXT_AXES)


def whole_heads(*heads: int) -> bool | None:
    """Whether each device can have whole heads of these numbers; None if tokens are not divided."""
    if axes_size(CONTEXT_AXES) == 1:
        return None
    return all(n % axes_size(_HEADS) == 0 for n in heads)


def by_heads(x: jax.Array) -> jax.Array:
    """Moves (batch, time, heads, d), divided over tokens, to devices that have all of some heads.

    Every device sends a part of its own to each other one, forward and backward. The attention in
    between is that of one device. For a program that is traced under a mesh with an axis context.

    Example:
        >>> by_heads(jax.numpy.ones((2, 8, 4, 16))).shape
        (2, 8, 4, 16)

    References:
        Jacobs et al., "DeepSpeed Ulysses", 2023, arXiv 2309.14509, section 3.
    """
    # Said of both sides: XLA may else have products before and after it move as well.
    return _heads(_tokens(x))


def by_tokens(x: jax.Array) -> jax.Array:
    """Moves what `by_heads` has moved back.

    Example:
        >>> by_tokens(jax.numpy.ones((2, 8, 4, 16))).shape
        (2, 8, 4, 16)
    """
    return _tokens(_heads(x))


def _heads(x: jax.Array) -> jax.Array:
    return constrain_sharding(x, BATCH_AXES, (), _HEADS)


def _tokens(x: jax.Array) -> jax.Array:
    return constrain_sharding(x, BATCH_AXES, CONTEXT_AXES, TENSOR_AXES)
