"""One input of several products."""

from functools import partial, reduce
from typing import Any

import jax

from ..core import ScaledArray, custom_vjp, narrow, widen
from ._operands import ArrayLike, unpack


def fan_out(x: ArrayLike, count: int) -> tuple[ScaledArray, ...]:
    """Gives one activation to several products, such as those of query, key and value.

    Scaling:
        Identities. Backward the gradient is ``d_n + (... + (d_2 + d_1))``. JAX adds the same from
        the other side, each to the sum so far; from this one, XLA has each product but the first
        add the sum so far in its own accumulator, and writes no more gradients than one.

    Args:
        x: floating array or ScaledArray.
        count: of products, at least 1.

    Returns:
        ``count`` times ``x``.

    Raises:
        ValueError: if count is less than 1.
        TypeError: if x is not floating.

    Example:
        >>> import jax.numpy as jnp
        >>> q, k, v = fan_out(jnp.ones(2), 3)
        >>> print((q + k + v).data)
        [3. 3.]

    References:
        NVIDIA, cuBLAS library, cublasLtMatmul: D = alpha * A B + beta * C.
    """
    if count < 1:
        raise ValueError(f"unitscale.ops.fan_out: count must be at least 1; got {count}")
    data, scale = unpack("fan_out", "x", x)
    return tuple(ScaledArray(each, scale) for each in _fan_out(data, count))


@partial(custom_vjp, nondiff_argnums=(1,))
def _fan_out(x: jax.Array, count: int) -> tuple[jax.Array, ...]:
    return (x,) * count


def _fan_out_fwd(x: jax.Array, count: int) -> tuple[tuple[jax.Array, ...], None]:
    return (x,) * count, None


def _fan_out_bwd(count: int, _: None, gradients: Any) -> tuple[jax.Array]:
    dtype = gradients[0].dtype
    if dtype.itemsize == 1:  # in which sums would round at each step, and not saturate
        gradients = map(widen, gradients)
    return (narrow(reduce(lambda total, gradient: gradient + total, gradients), dtype),)


_fan_out.defvjp(_fan_out_fwd, _fan_out_bwd)
