"""Quantization of one tensor: a strategy chooses the scale, the cast saturates."""

from functools import partial
from typing import Any

import jax

from ..core import ScaledArray, cast, custom_vjp
from ._strategies import Unit


def quantize(x: Any, dtype: Any, strategy: Unit | None = None) -> ScaledArray:
    """Returns ``x`` stored in a narrow format.

    Scaling:
        Under `Unit` no statistics are taken: the data is cast (saturating) at the scale that it
        has; a plain array gets the static scale 1.

    Args:
        x: floating array or ScaledArray of any shape.
        dtype: target format, as for `unitscale.cast`.
        strategy: how the scale is chosen; `Unit()` by default.

    Returns:
        ScaledArray with data in ``dtype``.

    Raises:
        ValueError: if the format is unknown.
        TypeError: if the strategy is not one of this package.

    Example:
        >>> import jax.numpy as jnp
        >>> quantize(jnp.array([0.3, 500.0]), "e4m3fn")
        ScaledArray(float8_e4m3fn[2], scale=1)
    """
    strategy = Unit() if strategy is None else strategy
    if not isinstance(strategy, Unit):
        raise TypeError(f"unitscale.quant.quantize: strategy must be Unit(); got {strategy!r}")
    x = x if isinstance(x, ScaledArray) else ScaledArray(x, 1)
    return cast(x, dtype)


@partial(custom_vjp, nondiff_argnums=(1,))
def _fake_quantize(x, dtype):
    return cast(x, dtype).astype(x.dtype)


_fake_quantize.defvjp(lambda x, dtype: (_fake_quantize(x, dtype), None), lambda dtype, _, dy: (dy,))


def fake_quantize(x: jax.Array, dtype: Any) -> jax.Array:
    """Rounds values to a narrow format and keeps them in their own dtype.

    Backward is the identity, so that cotangents are not rounded.

    Args:
        x: floating array.
        dtype: format name, as for `unitscale.cast`.

    Returns:
        Array of the shape and dtype of ``x``.

    Example:
        >>> import jax.numpy as jnp
        >>> print(fake_quantize(jnp.array([0.3, 9.3]), "e4m3fn"))
        [0.3125 9.    ]
    """
    return _fake_quantize(x, dtype)
