"""Rotary position embedding, with the scalings that folders of the Llama family ask for."""

import jax
import jax.numpy as jnp
import numpy as np

from ..config import RopeConfig


def frequencies(size: int, rope: RopeConfig) -> np.ndarray:
    """Radians per position of each pair of features of a head, float32 (size / 2,).

    base^(-2 i / size), over `factor` if linear. Those of llama3 depend on how often they turn in
    the context of the first training, turns = context * frequency / (2 pi): kept above high_factor,
    over `factor` below low_factor, and between the two in proportion.

    References:
      Su et al., 2021, RoFormer. Grattafiori et al., 2024, The Llama 3 Herd of Models.
    """
    pairs = np.arange(size // 2, dtype=np.float64)
    kept = rope.base ** (-2 * pairs / size)
    share = np.ones_like(kept)  # of the frequency as it was
    if rope.scaling == "linear":
        share = np.zeros_like(kept)
    if rope.scaling == "llama3":
        turns = rope.context * kept / (2 * np.pi)
        share = np.clip((turns - rope.low_factor) / (rope.high_factor - rope.low_factor), 0, 1)
    return (kept * (share + (1 - share) / rope.factor)).astype(np.float32)


def rotate(x: jax.Array, positions: jax.Array, frequency: np.ndarray) -> jax.Array:
    """Turns x (batch, time, heads, head_dim) at positions (time,) by their angles.

    Feature i and feature i + head_dim / 2 are a pair.
    """
    angle = positions[:, None, None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return turned.astype(x.dtype)
