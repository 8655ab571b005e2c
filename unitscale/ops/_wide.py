"""Narrow in, wide inside, narrow out: the differentiation rule of every op that is no product.

The function is computed in float32 on widened operands and rounded once. The backward pass saves
the narrow operands only, computes the function again, and applies the backward factors to the
float32 gradients before they are rounded.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core import custom_vjp, narrow, result_dtype, widen


def _scaled(x: jax.Array, factor: float) -> jax.Array:
    return x if factor == 1 else x * factor


@partial(custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _wide_op(f, fwd, bwd, out_dtype, args, constants):
    y = f(*map(widen, args), *constants)
    return narrow(_scaled(y, fwd), out_dtype)


def _wide_op_fwd(f, fwd, bwd, out_dtype, args, constants):
    return _wide_op(f, fwd, bwd, out_dtype, args, constants), (args, constants)


def _wide_op_bwd(f, fwd, bwd, out_dtype, residuals, cotangent):
    args, constants = residuals
    _, vjp = jax.vjp(lambda *wide: f(*wide, *constants), *map(widen, args))
    grads = vjp(widen(cotangent))
    rounded = tuple(
        narrow(_scaled(grad, factor), x.dtype)
        for x, factor, grad in zip(args, bwd, grads, strict=True)
    )
    return rounded, jax.tree.map(_zero_cotangent, constants)


def _zero_cotangent(x: jax.Array) -> Any:
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.zeros_like(x)
    return np.zeros(x.shape, jax.dtypes.float0)


_wide_op.defvjp(_wide_op_fwd, _wide_op_bwd)


def wide_op(
    f: Callable[..., jax.Array],
    *args: jax.Array,
    fwd: float,
    bwd: tuple[float, ...],
    constants: tuple[Any, ...] = (),
    out_dtype: Any = None,
) -> jax.Array:
    """Returns ``fwd * f(*args, *constants)`` with gradients ``bwd[i] * df/dargs[i]``.

    Args:
        f: hashable function of float32 arrays; equal ops must pass the equal object.
        *args: floating arrays that are differentiated.
        fwd: static forward factor.
        bwd: static backward factor of each of ``args``.
        constants: arrays, keys or None that ``f`` gets after ``args``; their cotangent is zero.
        out_dtype: dtype of the result; by default that of the first argument (bfloat16 for 8-bit
            data).

    Returns:
        Array in ``out_dtype``.
    """
    out_dtype = jnp.dtype(result_dtype(args[0]) if out_dtype is None else out_dtype)
    return _wide_op(f, fwd, tuple(bwd), out_dtype, args, constants)
