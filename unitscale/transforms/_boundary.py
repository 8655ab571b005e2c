"""How arguments become values of an interpreted program, and values its results."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..core import ScaledArray, broadcasts, wide_dtype
from ._lazy_scale import LazyScale
from ._values import Value, is_complex


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
    scale = lax.stop_gradient(lax.convert_element_type(scale, np.float32))
    if jnp.ndim(scale) and jnp.size(scale) == 1:
        scale = jnp.reshape(scale, ())
    elif jnp.ndim(scale):
        scale = jnp.reshape(scale, (1,) * (data.ndim - scale.ndim) + scale.shape)
    return Value(data, LazyScale.of(scale, "given"))


def _check_scale(shape: tuple[int, ...], scale: tuple[int, ...]) -> None:
    # Trees are rebuilt without checks, so what a transformation did to a scale is seen here first.
    if not broadcasts(scale, shape):
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
        return value.wide()
    assert value.scale is not None, "what leaves keeps its scale"
    return ScaledArray(value.data, jnp.asarray(value.scale.array()))
