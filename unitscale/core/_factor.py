"""Static factors on the forward and on the backward pass: the primitive of unit scaling.

A factor is a Python number known while tracing. It never touches ``ScaledArray.scale``.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._cast import narrow, widen
from ._vjp import custom_vjp


def multiply(x: jax.Array, factor: float) -> jax.Array:
    """Returns ``x * factor`` computed in the wide dtype and rounded once to the dtype of ``x``.

    The factor itself is never rounded to a narrow type, and a factor of 1 is no operation. Finite
    values saturate in 8 bits.

    Example:
        >>> multiply(jnp.ones((), jnp.float16), 1e-4).dtype.name
        'float16'
    """
    if factor == 1:
        return x
    return narrow(widen(x) * factor, x.dtype)


@partial(custom_vjp, nondiff_argnums=(1, 2))
def _scale(x, fwd, bwd):
    return multiply(x, fwd)


def _scale_fwd(x, fwd, bwd):
    return multiply(x, fwd), None


def _scale_bwd(fwd, bwd, residuals, cotangent):
    return (multiply(cotangent, bwd),)


_scale.defvjp(_scale_fwd, _scale_bwd)


def scale(x: Any, fwd: float = 1.0, bwd: float = 1.0) -> Any:
    """Multiplies by ``fwd`` on the way forward and the cotangent by ``bwd`` on the way back.

    Scaling:
        y = fwd * x; dx = bwd * dy. Both products are computed in float32 (float64 for float64) and
        rounded once. The result has the true derivative only where fwd == bwd: anything else
        belongs on a cut edge, or on edges that share one constraint.

    Args:
        x: a floating array, or a ScaledArray (its data is multiplied, its scale kept).
        fwd: static forward factor.
        bwd: static backward factor.

    Returns:
        The same type, shape and dtype as ``x``.

    Raises:
        TypeError: if ``x`` is not floating, or a factor is not a Python or NumPy number.

    Example:
        >>> import jax
        >>> print(jax.grad(lambda x: scale(x, 2.0, 3.0))(1.0))
        3.0

    References:
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, scaled ops.
    """
    for name, factor in (("fwd", fwd), ("bwd", bwd)):
        if not isinstance(factor, (int, float, np.integer, np.floating)):
            raise TypeError(
                f"unitscale.ops.scale: {name} must be a static Python number; got "
                f"{type(factor).__name__}. A traced multiplier belongs into ScaledArray.scale."
            )
    # Leaves that are scales pass through ScaledArray.map_data, plain arrays go in directly.
    if hasattr(x, "map_data"):
        return x.map_data(lambda data: _scale(data, float(fwd), float(bwd)))
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"unitscale.ops.scale: x must be a floating array; got dtype {x.dtype}")
    return _scale(x, float(fwd), float(bwd))


def scale_fwd(x: Any, factor: float) -> Any:
    """Multiplies the forward value by a static factor and leaves the cotangent alone.

    Example:
        >>> print(scale_fwd(jnp.float32(3), 2.0))
        6.0
    """
    return scale(x, factor, 1.0)


def scale_bwd(x: Any, factor: float) -> Any:
    """Leaves the forward value alone and multiplies the cotangent by a static factor.

    Example:
        >>> import jax
        >>> print(jax.grad(lambda x: scale_bwd(x, 5.0))(1.0))
        5.0
    """
    return scale(x, 1.0, factor)
