"""What is rounded to 8 bits for a product has one derivative: that of the product's own rule."""

from typing import Any

import jax
import jax.numpy as jnp

from ._contraction import data_of


@jax.custom_jvp
def _differentiated_once(x: Any) -> Any:
    return x


@_differentiated_once.defjvp
def _refuse(primals: Any, tangents: Any) -> Any:
    del primals, tangents
    raise TypeError(
        "unitscale.quant: a product in 8 bits has no second derivative, as cotangents of its 8-bit "
        "operands would be 8-bit numbers without a scale. Differentiate twice (gradient penalties, "
        "forces, Hessians) through layers in 16 or 32 bits: policy='bfloat16', or leave them out "
        "of nn.convert."
    )


def differentiated_once(x: Any) -> Any:
    """Returns a quantized tensor; a TypeError tells of a second derivative, which would be wrong.

    JAX gives an 8-bit array a cotangent of its own type. The rule of a product never asks for it,
    but where that rule is differentiated again it would be rounded at no scale, to 0 or NaN.

    Example:
        >>> x = jnp.ones(2, jnp.float8_e4m3fn)
        >>> differentiated_once(x).dtype
        dtype(float8_e4m3fn)
    """
    data = data_of(x)
    narrow = jnp.issubdtype(data.dtype, jnp.floating) and data.dtype.itemsize < 2
    return _differentiated_once(x) if narrow else x
