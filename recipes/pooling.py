"""Unit-scaled mean pooling over tokens, shared by several recipes."""

import math

import jax
import jax.numpy as jnp

from unitscale import ops, to_array


def mean_of_tokens(x: ops.ArrayLike, mask: jax.Array | None = None) -> jax.Array:
    """Average x (batch, time, width) over the tokens of a bool mask (batch, time), unit scaled.

    Scaling: y = n^1/2 * mean(x) over the n tokens of the mask, or 0 if n is 0. The gradient of each
    token is time^1/2 times the true one, a constant that does not depend on the text.
    """
    time = x.shape[1]
    tokens = to_array(ops.scale_bwd(x, math.sqrt(time)))
    if mask is None:
        return tokens.sum(1) / math.sqrt(time)
    root = jnp.sqrt(jnp.maximum(mask.sum(1), 1)).astype(tokens.dtype)
    return jnp.where(mask[..., None], tokens, 0).sum(1) / root[:, None]
