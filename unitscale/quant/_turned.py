"""Products of FP8 operands that are summed over rows, as NVIDIA's kernels want them.

The gradient of a weight sums over the tokens of a batch, the first dimensions of both operands. FP8
kernels of cuBLAS sum over last dimensions only, so XLA transposes both operands, byte by byte,
which can take several times as long as the product. Four bytes that move together take about as
long as it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..core import ScaledArray, is_float8
from ._contraction import Contraction, Factor, data_of, product

WORD = 4  # bytes that move together


def turned_product(
    lhs: Any, rhs: Any, spec: Contraction, factor: Factor, out_dtype: Any
) -> jax.Array:
    """As `product`, with the same result; for NVIDIA GPUs FP8 operands are turned by words."""
    count = len(spec.summed)
    if not all(_can_turn(x, labels, spec) for x, labels in ((lhs, spec.lhs), (rhs, spec.rhs))):
        return product(lhs, rhs, spec, factor, out_dtype)
    left, right = (labels[count:] + labels[:count] for labels in (spec.lhs, spec.rhs))
    turned = Contraction(left, right, spec.out)

    def by_words(lhs: Any, rhs: Any) -> jax.Array:
        return product(_turned(lhs, count), _turned(rhs, count), turned, factor, out_dtype)

    def as_they_are(lhs: Any, rhs: Any) -> jax.Array:
        return product(lhs, rhs, spec, factor, out_dtype)

    return lax.platform_dependent(lhs, rhs, cuda=by_words, default=as_they_are)


def turn(x: jax.Array, count: int) -> jax.Array:
    """Moves the first ``count`` dimensions of an FP8 array behind the others.

    Four entries of the last of these, which their number must divide into, move as one word.

    Example:
        >>> turn(jnp.ones((2, 8, 3), jnp.float8_e4m3fn), 2).shape
        (3, 2, 8)
    """
    (*outer, last), rest = x.shape[:count], x.shape[count:]
    rows = lax.bitcast_convert_type(x, jnp.uint8).reshape(*outer, last // WORD, WORD, *rest)
    word = jnp.uint32(0)
    for i in range(WORD):
        row = lax.index_in_dim(rows, i, count, keepdims=False).astype(jnp.uint32)
        word |= row << jnp.uint32(8 * i)
    word = lax.transpose(word, (*range(count, word.ndim), *range(count)))
    bits = lax.bitcast_convert_type(word, jnp.uint8)
    return lax.bitcast_convert_type(bits.reshape(*rest, *outer, last), x.dtype)


def _turned(x: Any, count: int) -> Any:
    data = turn(data_of(x), count)
    return ScaledArray(data, x.scale) if isinstance(x, ScaledArray) else data


def _can_turn(x: Any, labels: str, spec: Contraction) -> bool:
    """Whether an operand's words of rows can be turned: its scale is one, its rows come first."""
    data, count = data_of(x), len(spec.summed)
    if isinstance(x, ScaledArray) and (x.block_shape or (x.scale is not None and x.scale.ndim)):
        return False
    if not is_float8(data.dtype) or not count or any(jax.typeof(data).sharding.spec):
        return False
    return labels[:count] == spec.summed and data.shape[count - 1] % WORD == 0
