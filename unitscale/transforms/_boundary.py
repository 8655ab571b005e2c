"""How arguments become values of an interpreted program, and values its results."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..core import ScaledArray, is_zero, wide_dtype
from ..core._lazy_scale import LazyScale
from ._settle import leaving
from ._values import ONE, Value, is_complex, times


def from_input(leaf: Any) -> Value:
    """Turns an argument into a value.

    Raises:
        ValueError: if the scale does not broadcast against the data.
    """
    if not isinstance(leaf, ScaledArray):
        return Value(leaf)
    data, scale = leaf.pair
    _check_scale(jnp.shape(data), () if scale is None else jnp.shape(scale))
    if scale is None:
        return Value(data)
    if is_zero(scale):
        return Value(jnp.zeros_like(data), ONE, const=0.0)
    if isinstance(scale, int):
        return Value(data, ONE)
    scale = lax.stop_gradient(lax.convert_element_type(scale, np.float32))
    if jnp.ndim(scale) and jnp.size(scale) == 1:
        scale = jnp.reshape(scale, ())
    elif jnp.ndim(scale):
        scale = jnp.reshape(scale, (1,) * (data.ndim - scale.ndim) + scale.shape)
    return Value(data, LazyScale.of(scale))


def _check_scale(shape: tuple[int, ...], scale: tuple[int, ...]) -> None:
    # Trees are rebuilt without checks, so what a transformation did to a scale is seen here first.
    try:
        fits = np.broadcast_shapes(shape, scale) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"unitscale.scalify: the scale of a ScaledArray must broadcast against its data; got "
            f"data {shape}, scale {scale}; give it size-1 dimensions"
        )


def traced_aval(leaf: Any) -> Any:
    """Returns what a program is traced on: values, so float32 where a scale multiplies 16 bits.

    They lie on the devices as data does.
    """
    if not isinstance(leaf, ScaledArray):
        return leaf
    dtype = leaf.dtype if leaf.scale is None else wide_dtype(leaf.dtype)
    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=jax.typeof(leaf.data).sharding)


def to_output(value: Value) -> Any:
    """Turns a value into a result: a ScaledArray, or a plain array if it met no scale.

    Complex results are plain too: a ScaledArray is real.
    """
    if value.scale is None:
        return jnp.asarray(value.data)
    if is_complex(value.data):
        return times(value.data, value.scale)
    value = leaving(value)
    assert value.scale is not None, "what leaves keeps its scale"
    if value.const == 0.0:
        return ScaledArray(value.data, 0)
    if value.scale.is_static and value.scale.log2 == 0:
        return ScaledArray(value.data, 1)
    scale = value.scale.array()
    return ScaledArray(value.data, lax.stop_gradient(jnp.asarray(scale)))
