"""Trees of arrays into trees of ScaledArrays, and back."""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ._cast import cast, narrow, widen
from ._formats import wide_dtype
from ._pow2 import round_to_pow2
from ._scale import Scale, as_scale, is_static, safe_scale, to_float
from ._scaled_array import ScaledArray
from ._statistics import rms

if TYPE_CHECKING:
    from typing_extensions import TypeIs


def is_scaled(x: Any) -> "TypeIs[ScaledArray]":
    """Whether ``x`` is a ScaledArray: the `is_leaf` of trees that hold them.

    Example:
        >>> is_scaled(ScaledArray(jnp.ones(2), 1))
        True
    """
    return isinstance(x, ScaledArray)


def _is_concrete_zero(x: Any) -> bool:
    if isinstance(x, Tracer):
        return False
    if not x.is_fully_addressable:  # spread over processes: only JAX can look at all of it
        return not bool(jnp.any(widen(x)))
    # NumPy, because XLA may take subnormal numbers for zeros.
    return not np.any(np.asarray(x).astype(wide_dtype(x.dtype)))


def _is_floating(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def _fitting(scale: Scale, shape: tuple[int, ...]) -> Scale:
    if not is_static(scale) and np.broadcast_shapes(scale.shape, shape) != shape:
        raise ValueError(
            f"unitscale.as_scaled: scale must broadcast against leaves; got leaf {shape}, scale "
            f"{scale.shape}"
        )
    return scale


def as_scaled(tree: Any, scale: Any = None, dtype: Any = None) -> Any:
    """Replaces every floating leaf of a tree by a ScaledArray of the same value.

    Scaling:
        data = x / scale, computed in float32 and cast to ``dtype`` (saturating; to the type of the
        leaf itself only if that is an 8-bit one, so that infinity stays infinity). By default the
        scale is the power of two nearest the RMS of each leaf, and an all-zero leaf gets the
        special zero, which takes the scale of whatever it meets (while tracing, where values are
        unknown, a scale of 1).

    Args:
        tree: pytree; integer, boolean and key leaves are kept. Leaves that are ScaledArrays
            already are kept if no scale is given, else moved to it.
        scale: one scale for all leaves, or None.
        dtype: data format; None keeps that of each leaf.

    Returns:
        The same tree with ScaledArray leaves.

    Raises:
        ValueError: if the scale is negative, zero, or does not broadcast.

    Example:
        >>> tree = as_scaled({"w": jnp.full(3, 1e-6), "steps": 7}, dtype=jnp.float16)
        >>> tree["w"]
        ScaledArray(float16[3], scale=9.53674e-07)
        >>> tree["steps"]
        7

    References:
        Balanca et al., "Scalify: scale propagation for efficient low-precision LLM training",
        2024, arXiv 2407.17353, section 3.
    """
    if isinstance(scale, (int, float, np.number)) and not 0 < scale < float("inf"):
        raise ValueError(f"unitscale.as_scaled: scale must be positive and finite; got {scale!r}")

    def convert(x):
        if is_scaled(x) and scale is None:
            return x if dtype is None else cast(x, dtype)
        if not (is_scaled(x) or isinstance(x, float) or _is_floating(x)):
            return x
        x = x if is_scaled(x) else jnp.asarray(x)
        target = x.dtype if dtype is None else dtype
        x = x.value if is_scaled(x) else x
        if scale is not None:
            s = _fitting(as_scale(scale), x.shape)
        elif _is_concrete_zero(x):
            return ScaledArray(cast(x, target), 0)
        else:
            s = jax.lax.stop_gradient(safe_scale(round_to_pow2(rms(x))))
        data = x if is_static(s) else widen(x) / to_float(s)
        return ScaledArray(narrow(data, target) if dtype is None else cast(data, dtype), s)

    return jax.tree.map(convert, tree, is_leaf=is_scaled)


def to_array(tree: Any, dtype: Any = None) -> Any:
    """Replaces every ScaledArray of a tree by its value.

    Args:
        tree: pytree of arrays and ScaledArrays.
        dtype: type of the values; None gives `ScaledArray.value`'s own.

    Returns:
        The same tree with plain arrays.

    Example:
        >>> print(to_array([ScaledArray(jnp.ones(2), 0.5)])[0])
        [0.5 0.5]
    """

    def convert(x):
        if not is_scaled(x):
            return x
        return x.value if dtype is None else x.value.astype(dtype)

    return jax.tree.map(convert, tree, is_leaf=is_scaled)


def widen_data(tree: Any) -> Any:
    """Gives the ScaledArrays of a tree float32 data; the values are the same.

    What to differentiate by in place of parameters in 16 or 8 bits. A cotangent is rounded into the
    format of the data that it belongs to, and it is the value's times the scale: where a few large
    entries have given a float16 parameter the scale 2^10, gradients above 64 would be infinite.

    Args:
        tree: pytree of arrays and ScaledArrays.

    Returns:
        The same tree; float64 data stays float64, and plain arrays are left as they are.

    Example:
        >>> w = ScaledArray(jnp.ones(2, jnp.float16), 2.0**10)
        >>> loss = lambda w: jnp.sum(100 * w.value)
        >>> print(jax.grad(loss)(w).data, jax.grad(loss)(widen_data(w)).data)
        [inf inf] [102400. 102400.]
    """
    return jax.tree.map(lambda x: x.map_data(widen) if is_scaled(x) else x, tree, is_leaf=is_scaled)
