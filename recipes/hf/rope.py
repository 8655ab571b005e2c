"""Rotary position embedding, with the scalings that folders of the Llama family ask for."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from ..config import RopeConfig


def frequencies(size: int, rope: RopeConfig) -> np.ndarray:
    """Radians per position of each pair of features of a head, float32 (size / 2,).

    base^(-2 i / size), over `factor` if linear. Those of llama3 depend on how often they turn in
    the context of the first training, turns = context * frequency / (2 pi): kept above high_factor,
    over `factor` below low_factor, and between the two in proportion. Those of yarn are kept above
    `fast` turns, over `factor` below `slow`, and between the two in proportion to i.

    References:
      Su et al., 2021, RoFormer. Grattafiori et al., 2024, The Llama 3 Herd of Models. Peng et al.,
      2023, YaRN, section 3.2; the ends of its band are those of `transformers`.
    """
    pairs = np.arange(size // 2, dtype=np.float64)
    kept = rope.base ** (-2 * pairs / size)
    share = np.ones_like(kept)  # of the frequency as it was
    if rope.scaling == "linear":
        share = np.zeros_like(kept)
    if rope.scaling == "llama3":
        turns = rope.context * kept / (2 * np.pi)
        share = np.clip((turns - rope.low_factor) / (rope.high_factor - rope.low_factor), 0, 1)
    if rope.scaling == "yarn":
        low, high = _band(size, rope)
        share = 1 - np.clip((pairs - low) / (high - low), 0, 1)
    return (kept * (share + (1 - share) / rope.factor)).astype(np.float32)


def _band(size: int, rope: RopeConfig) -> tuple[float, float]:
    """The pairs that turn `fast` and `slow` times in the context: those between are in part scaled.

    Pair i turns context / (2 pi base^(2 i / size)) times.
    """
    low, high = (
        size * math.log(rope.context / (turns * 2 * math.pi)) / (2 * math.log(rope.base))
        for turns in (rope.fast, rope.slow)
    )
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    return low, high + 0.001 if low == high else high


def attention_factor(factor: float, weight: float = 1.0) -> float:
    """What YaRN multiplies rotated queries and keys by: 0.1 weight ln(factor) + 1.

    References:
      Peng et al., 2023, YaRN, section 3.4, where weight is 1; `mscale` of `transformers`.
    """
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


def check_length(rope: RopeConfig, length: int) -> None:
    """Raises where dynamic scaling, which is none in its context, is asked for more positions."""
    if rope.scaling == "dynamic" and length > rope.context:
        raise ValueError(
            f"recipes.hf.rope: expected at most {rope.context} positions, as rope scaling "
            f"dynamic is not supported past them; got {length}; use shorter sequences"
        )


def rotate(
    x: jax.Array, positions: jax.Array, frequency: np.ndarray, factor: float = 1.0
) -> jax.Array:
    """Turns x (batch, time, heads, head_dim) at positions (time,) by their angles, times `factor`.

    Feature i and feature i + head_dim / 2 are a pair.
    """
    angle = positions[:, None, None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if factor != 1:
        cos, sin = cos * factor, sin * factor
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return turned.astype(x.dtype)
