"""One vector of many tokens, unit scaled."""

import math

import jax
import jax.numpy as jnp

from unitscale import ops, to_array


def mean_of_tokens(x: ops.ArrayLike, mask: jax.Array | None = None) -> jax.Array:
    """The mean over the tokens that count of (batch, time, width), unit scaled: (batch, width).

    Scaling:
        y = n^1/2 * mean(x) = n^-1/2 * sum(x) over the n tokens that count, and every one of them
        is given time^1/2 of its gradient, that of y where all count: unit where tokens are
        independent. All that comes before has its gradient through here, so that constant is free.

    Args:
      x: (batch, time, width).
      mask: bool (batch, time), False where a token does not count; None for all of them. Where
        none counts, y is 0.
    """
    time = x.shape[1]
    tokens = to_array(ops.scale_bwd(x, math.sqrt(time)))
    if mask is None:
        return tokens.sum(1) / math.sqrt(time)
    count = jnp.maximum(mask.sum(1), 1)
    root = jnp.sqrt(count).astype(tokens.dtype)
    return jnp.where(mask[..., None], tokens, 0).sum(1) / root[:, None]
