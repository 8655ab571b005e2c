"""Weights as a power-of-two scale and data, without the loss of a bit.

XLA flushes subnormal numbers to zero, so the split and its reverse are computed by NumPy.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unitscale import ScaledArray, cast
from unitscale.core import is_scaled


def split(tree: Any, dtype: Any = None) -> Any:
    """Replaces each floating array of a tree by a ScaledArray of exactly the same value.

    The scale is the power of two nearest the RMS, or, where some number would lose bits as a
    subnormal one, the largest power of two at which none does.

    Args:
      tree: Arrays, such as the `nnx.State` of a model; other leaves are kept.
      dtype: Rounds the data to this format, saturating. None keeps the type of each array, so
        that `join` gives back every bit.
    """

    def convert(leaf: Any) -> Any:
        if is_scaled(leaf) or not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            return leaf
        array = np.asarray(leaf)
        exponent = _exponent(array, exact=dtype is None)
        data = np.ldexp(array.astype(np.float64), -exponent)
        scale = jnp.asarray(np.ldexp(np.float32(1), exponent))
        if dtype is None:
            return ScaledArray(jnp.asarray(data.astype(array.dtype)), scale)
        return ScaledArray(cast(jnp.asarray(data.astype(np.float32)), dtype), scale)

    return jax.tree.map(convert, tree, is_leaf=is_scaled)


def _exponent(array: np.ndarray, *, exact: bool) -> int:
    wide = array[np.isfinite(array) & (array != 0)].astype(np.float64)
    if not wide.size:
        return 0
    exponent = round(float(np.log2(np.sqrt(np.mean(np.square(wide))))))
    if exact:
        mantissa, above = np.frexp(np.abs(wide))
        digits = np.ldexp(mantissa, 53).astype(np.int64)
        last = above - 53 + np.log2(digits & -digits).astype(np.int64)  # exponent of the last 1
        least = np.frexp(np.float64(jnp.finfo(array.dtype).smallest_subnormal))[1] - 1
        # Data do not overflow: the largest is at most sqrt(2 * size) times the RMS.
        exponent = min(exponent, int(last.min() - least))
    return min(max(exponent, -126), 127)  # a scale is a normal float32 number


def join(leaf: Any, dtype: Any = None) -> np.ndarray:
    """The value of an array or a ScaledArray, every bit of it.

    Args:
      leaf: The array; a ScaledArray's scale is a power of two.
      dtype: Type of the result; None for that of the data.
    """
    if not is_scaled(leaf):
        value = np.asarray(leaf)
        return value if dtype is None else value.astype(dtype)
    data, scale = np.asarray(leaf.data), np.asarray(1 if leaf.scale is None else leaf.scale)
    return (data.astype(np.float64) * scale.astype(np.float64)).astype(dtype or data.dtype)
