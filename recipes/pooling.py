"""One vector of many tokens, unit scaled, for the models of several recipes."""

import math

import jax
import jax.numpy as jnp

from unitscale import ops, to_array


def mean_of_tokens(x: ops.ArrayLike, mask: jax.Array | None = None) -> jax.Array:
    """Mean of (batch, time, width) over the tokens of a bool mask (batch, time), unit scaled.

    Scaling: y = n^1/2 * mean(x) over the n tokens of the mask, 0 if there are none. Each of these
    tokens gets time^1/2 of its true gradient, one constant for all texts.
    """
    time = x.shape[1]
    tokens = to_array(ops.scale_bwd(x, math.sqrt(time)))
    if mask is None:
        return tokens.sum(1) / math.sqrt(time)
    root = jnp.sqrt(jnp.maximum(mask.sum(1), 1)).astype(tokens.dtype)
    return jnp.where(mask[..., None], tokens, 0).sum(1) / root[:, None]
