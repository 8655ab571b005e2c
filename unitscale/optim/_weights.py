"""Parameters as ScaledArrays: how they are made, and how an update is added to them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ..core import (
    CastRounding,
    ScaledArray,
    cast,
    is_scaled,
    rms,
    scale_near,
    to_float,
    widen,
)
from ._gradients import is_leaf
from ._rounding import round_finite
from ._sample import parts
from ._values import is_floating

# The scale of a parameter that is zero and so does not tell how large it will be: float16 then
# takes a first update between 2^-22 and 2^7 with all its bits, float8_e4m3fn one from 2^-17 to 1.
_SCALE_OF_ZEROS = 2.0**-8


def scale_weight(x: Any, dtype: Any, stack_axes: int | None = None) -> Any:
    """A parameter as a ScaledArray of RMS near 1; what is not floating is returned as it is.

    Each item of its leading ``stack_axes`` has its own scale: by default of all but the last two.
    """
    if not is_scaled(x):
        if not is_floating(x):
            return x
        x = ScaledArray(x, None)
    value = widen(x.value)
    stack = max(value.ndim - 2, 0) if stack_axes is None else min(stack_axes, value.ndim)
    size = rms(value, tuple(range(stack, value.ndim)) if stack else None)
    scale = jnp.where(size > 0, scale_near(size), _SCALE_OF_ZEROS)
    return ScaledArray(cast(value / scale, dtype), scale)


def _fresh_scale(weight: ScaledArray) -> Any:
    """The scale that new data takes: another one where the RMS of data has left [1/2, 2]."""
    scale = to_float(weight.scale)
    if weight.block_shape is not None or weight.size == 0:
        return scale
    shape = scale.shape or (1,) * weight.ndim
    axes = tuple(a for a, n in enumerate(shape) if n == 1)
    sizes = (rms(part, axes).reshape(scale.shape) for part in parts(weight.data, axes))
    size = functools.reduce(jnp.maximum, sizes)
    return jnp.where((size < 0.5) | (size > 2), scale * scale_near(size), scale)


def apply_update(
    weight: Any, update: Any, rounding: CastRounding = "nearest", key: jax.Array | None = None
) -> Any:
    """One weight plus its update, rounded once into the format of the weight."""
    if update is None or weight is None:
        return weight
    update = update.value if is_scaled(update) else update
    if not is_scaled(weight):
        weight = jnp.asarray(weight)
        if not is_floating(weight):
            return (weight + update).astype(weight.dtype)
        return round_finite(widen(weight) + update, weight.dtype, rounding, key)
    return _added(weight, update, key, rounding=rounding)


# Traced once for all parameters of a shape: a model has many.
@functools.partial(jax.jit, static_argnames="rounding", inline=True)
def _added(
    weight: ScaledArray, update: jax.Array, key: jax.Array | None, *, rounding: CastRounding
) -> ScaledArray:
    total = widen(weight.value) + update
    if weight.scale is None:
        return weight.map_data(lambda data: round_finite(total, data.dtype, rounding, key))
    scale = _fresh_scale(weight)
    full = ScaledArray(weight.data, scale, block_shape=weight.block_shape).full_scale
    data = round_finite(total / to_float(full), weight.dtype, rounding, key)
    return ScaledArray(data, scale, block_shape=weight.block_shape)


def apply_updates(params: Any, updates: Any, *, key: jax.Array | None = None) -> Any:
    """Adds updates to parameters: the twin of `optax.apply_updates` for ScaledArrays.

    Scaling:
        The value plus the update in float32, rounded once into the format of the parameter. Where
        the RMS of a ScaledArray's data has left [1/2, 2], the new data takes the scale that brings
        it near 1. That is seen in the data that comes in (of a large array in evenly spaced rows
        and columns, of which the larger RMS counts), so the scale follows one step behind, which a
        format with binades to spare does not feel.

        Rounded to nearest, an update below half the distance of neighbours is lost: in float16,
        one of less than 2^-12 to 2^-11 of the entry. With a ``key`` the rounding is stochastic, and
        the expected value of the new parameter is exact.

    Args:
        params: tree of ScaledArrays and arrays.
        updates: tree of plain arrays as ``params``, differences of values, as optimizers return
            them; None leaves a parameter alone.
        key: `jax.random` key for stochastic rounding; None rounds to nearest.

    Returns:
        The same tree as ``params``, in the same formats. An infinite sum becomes NaN.

    Raises:
        ValueError: if the trees differ.

    Example:
        >>> w = ScaledArray(jnp.ones(2, jnp.float16), 4.0)
        >>> apply_updates(w, jnp.array([0.5, -0.25])).value
        Array([4.5 , 3.75], dtype=float32)

    References:
        Balanca et al., "Scalify", 2024, arXiv 2407.17353, section 4 (float16 master weights);
        Croci et al., "Stochastic rounding", 2022, arXiv 2103.13445.
    """
    leaves, structure = jax.tree.flatten(params, is_leaf=is_leaf)
    changes, other = jax.tree.flatten(updates, is_leaf=is_leaf)
    if structure != other:
        raise ValueError(
            "unitscale.optim.apply_updates: updates must have the structure of params; got "
            f"{other}, expected {structure}"
        )
    rounding = "nearest" if key is None else "stochastic"
    keys = [None] * len(leaves)
    if key is not None and leaves:
        keys = list(jax.random.split(key, len(leaves)))
    total = [apply_update(w, u, rounding, k) for w, u, k in zip(leaves, changes, keys, strict=True)]
    return jax.tree.unflatten(structure, total)
