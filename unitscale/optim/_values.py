"""Functions on trees that act on values: optax's own see data and scale as two arrays."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..core import is_scaled, to_array, widen
from ._storage import add_update, is_floating, split_key


def values(tree: Any) -> Any:
    """Return a tree as plain arrays in float32, or float64 where an array has that dtype."""

    def wide(x: Any) -> Any:
        x = to_array(x, jnp.float32) if is_scaled(x) else x
        return widen(jnp.asarray(x)) if is_floating(x) else x

    return jax.tree.map(wide, tree, is_leaf=is_scaled)


def is_leaf(x: Any) -> bool:
    """Whether ``x`` is one entry of a tree of parameters, gradients or updates."""
    return x is None or is_scaled(x)


def apply_updates(params: Any, updates: Any, *, key: jax.Array | None = None) -> Any:
    """Add updates to parameters: `optax.apply_updates` for ScaledArrays.

    Scaling:
        The value plus the update in float32, rounded once into the format of the parameter. Where
        the RMS of a ScaledArray's old data has left [1/2, 2] (of large arrays that of evenly spaced
        rows or columns), the new data takes the scale that brings it near 1.

        Rounding to nearest loses an update below half the distance between neighbours: in float16,
        2^-12 to 2^-11 of the entry. Stochastic rounding keeps the expected value exact.

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
        >>> from unitscale import ScaledArray
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
    total = [
        w if w is None or u is None else add_update(w, u, k)
        for w, u, k in zip(leaves, changes, split_key(key, len(leaves)), strict=True)
    ]
    return jax.tree.unflatten(structure, total)


def global_norm(tree: Any) -> jax.Array:
    """Return `optax.global_norm` by value: the root of the sum of all squares."""
    return optax.tree.norm(values(tree))


def incremental_update(new: Any, old: Any, step_size: Any) -> Any:
    """Return ``step_size * new + (1 - step_size) * old`` by value, as plain float32 arrays.

    It is `optax.incremental_update`. Keep the average ``old`` in float32: 16 bits lose steps of
    less than half the distance between neighbours.

    Example:
        >>> from unitscale import ScaledArray
        >>> print(incremental_update(ScaledArray(jnp.ones(2), 4.0), jnp.zeros(2), 0.25))
        [1. 1.]
    """
    return optax.incremental_update(values(new), values(old), step_size)


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Return `optax.clip_by_global_norm` by value; its updates are plain arrays."""
    return _by_value(optax.clip_by_global_norm(max_norm))


def ema(
    decay: float, debias: bool = True, accumulator_dtype: Any = jnp.float32
) -> optax.GradientTransformation:
    """Return `optax.ema` by value, for averages of updates or of parameters, as plain arrays."""
    return _by_value(optax.ema(decay, debias, accumulator_dtype))


def _by_value(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return inner.update(values(updates), state, params)

    return optax.GradientTransformation(lambda params: inner.init(values(params)), update)
