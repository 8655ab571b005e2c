"""Moving a scale without changing the value."""

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from ._cast import cast, widen
from ._formats import format_of
from ._scale import bounded_product, broadcasts, divisor, safe_scale, scale_near, to_float
from ._scaled_array import ScaledArray
from ._statistics import Axis, amax, optimal_scale, rms

RescaleStrategy = Literal["rms", "amax", "mse"]
"""The statistic that a new scale is chosen from: see `rescale`."""


def _scaled(x: Any) -> ScaledArray:
    return x if isinstance(x, ScaledArray) else ScaledArray(x)


def rebalance(x: Any, s: Any) -> ScaledArray:
    """Moves a factor from data to scale: ``data / s`` and ``scale * s``, the same value.

    Scaling:
        Exact for a power of two, unless data leaves the range of its format: quotients below the
        smallest subnormal are lost, those above the maximum overflow as the format does.

    Args:
        x: array or ScaledArray.
        s: positive number or array that broadcasts against the scale of ``x``; zeros, infinities
            and NaN among its entries count as 1 and leave those entries alone.

    Returns:
        ScaledArray of the same shape and data dtype.

    Raises:
        ValueError: if ``s`` is a number that is not positive and finite, or an array that does not
            broadcast against the scale.

    Example:
        >>> x = rebalance(jnp.array([256.0, 512.0], jnp.float16), 256.0)
        >>> print(x.data, x.scale)
        [1. 2.] 256.0

    References:
        Balanca et al., "Scalify: scale propagation for efficient low-precision LLM training",
        2024, arXiv 2407.17353, section 3.
    """
    if isinstance(s, (int, float, np.number)) and not 0 < s < float("inf"):
        raise ValueError(f"unitscale.rebalance: s must be positive and finite; got {s!r}")
    x = _scaled(x)
    s = jax.lax.stop_gradient(safe_scale(divisor(jnp.asarray(s, jnp.float32))))
    if x.block_shape is not None:
        s = _check_broadcast(s, jnp.shape(x.scale))
        s = jnp.broadcast_to(s, jnp.shape(x.scale))
    else:
        s = _check_broadcast(s, x.shape)
    scale, rest = bounded_product(x.scale, s)

    def full(part: Any) -> Any:
        return to_float(ScaledArray(x.data, part, block_shape=x.block_shape).full_scale)

    data = widen(x.data) / full(s)
    if not isinstance(rest, int):
        data = data * full(rest)
    return ScaledArray(data.astype(x.dtype), scale, block_shape=x.block_shape)


def _check_broadcast(s: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    if not broadcasts(s.shape, shape):
        raise ValueError(
            f"unitscale.rebalance: s must broadcast against {shape}; got shape {s.shape}"
        )
    return s


def rescale(
    x: Any, strategy: RescaleStrategy = "rms", *, dtype: Any = None, axis: Axis = None
) -> ScaledArray:
    """Chooses a power-of-two scale from the statistics of the data, and rebalances to it.

    Scaling:
        "rms" brings the RMS of data nearest to 1; "amax" brings the largest magnitude as near
        below the maximum of ``dtype`` as a power of two can; "mse" takes the scale of least mean
        squared error when data is then cast to ``dtype`` (`optimal_scale`). All-zero data keeps
        its scale.

    Args:
        x: array or ScaledArray.
        strategy: "rms", "amax" or "mse".
        dtype: the format aimed at by "amax" and "mse"; the dtype of data by default.
        axis: axes that share one scale; None for one per tensor.

    Returns:
        ScaledArray with the same value (up to rounding where blocks of different scales come
        together, as their scales become one) and data dtype.

    Raises:
        ValueError: if the strategy is unknown.

    Example:
        >>> x = rescale(jnp.array([3e-6, -4e-6]))
        >>> print(float(x.scale) == 2.0**-18)
        True

    References:
        Balanca et al., "Scalify: scale propagation for efficient low-precision LLM training",
        2024, arXiv 2407.17353, section 3.
    """
    if strategy not in get_args(RescaleStrategy):
        raise ValueError(
            f"unitscale.rescale: strategy must be one of {', '.join(get_args(RescaleStrategy))}; "
            f"got {strategy!r}"
        )
    x = _scaled(x)
    if x.size == 0:
        return x
    target = format_of(x.dtype if dtype is None else dtype)
    # Blocks give way to the new scale, so their statistics are those of the value.
    data = x.data if x.block_shape is None else widen(x.value)
    if strategy == "rms":
        s = scale_near(rms(data, axis))
    elif strategy == "amax":
        s = scale_near(amax(data, axis) / target.max, "up")
    else:
        s = optimal_scale(data, target, axis)
    if x.block_shape is None:
        return rebalance(x, s)
    return cast(rebalance(data, s), x.dtype)
