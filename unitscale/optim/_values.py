"""Functions of optax on trees, by value: data and scale of a ScaledArray are two leaves to them."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..core import to_array, widen


def is_floating(x: Any) -> bool:
    """Whether an array or a number of Python is floating.

    Example:
        >>> is_floating(1.0), is_floating(jnp.int32(1))
        (True, False)
    """
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def values(tree: Any) -> Any:
    """Returns a tree as plain arrays in float32, or float64 where an array is of that.

    Example:
        >>> values({"w": jnp.ones(2, jnp.float16), "count": jnp.int32(1)})["w"].dtype.name
        'float32'
    """

    def wide(x: Any) -> Any:
        return widen(jnp.asarray(x)) if is_floating(x) else x

    return jax.tree.map(wide, to_array(tree, jnp.float32))


def global_norm(tree: Any) -> jax.Array:
    """Returns the root of the sum of all squared values: `optax.global_norm` by value.

    Example:
        >>> from unitscale import ScaledArray
        >>> print(global_norm({"w": ScaledArray(jnp.ones(4), 4.0), "b": jnp.zeros(2)}))
        8.0
    """
    return optax.tree.norm(values(tree))


def incremental_update(new: Any, old: Any, step_size: Any) -> Any:
    """Moves an average of parameters by a step: `optax.incremental_update` by value.

    Args:
        new: parameters.
        old: the average so far. Keep it in float32: in 16 bits it stands still where a step is less
            than half the distance of neighbours.
        step_size: share of ``new``.

    Returns:
        ``step_size * new + (1 - step_size) * old``, as plain float32 arrays.

    Example:
        >>> from unitscale import ScaledArray
        >>> print(incremental_update(ScaledArray(jnp.ones(2), 4.0), jnp.zeros(2), 0.25))
        [1. 1.]
    """
    return optax.incremental_update(values(new), values(old), step_size)


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Returns `optax.clip_by_global_norm` by value.

    Args:
        max_norm: largest norm of all updates together.

    Returns:
        A transformation of trees of arrays and ScaledArrays; its updates are plain arrays.

    Example:
        >>> from unitscale import ScaledArray
        >>> tx = clip_by_global_norm(4.0)
        >>> updates, _ = tx.update(ScaledArray(jnp.ones(4), 4.0), tx.init(None))
        >>> print(updates)
        [2. 2. 2. 2.]
    """
    return _by_value(optax.clip_by_global_norm(max_norm))


def ema(
    decay: float, debias: bool = True, accumulator_dtype: Any = jnp.float32
) -> optax.GradientTransformation:
    """Returns `optax.ema` by value, for averages of updates or of parameters.

    Args:
        decay: share of the average that stays.
        debias: whether to divide by ``1 - decay**count``.
        accumulator_dtype: format of the average.

    Returns:
        A transformation of trees of arrays and ScaledArrays; its updates are plain arrays.

    Example:
        >>> from unitscale import ScaledArray
        >>> tx, w = ema(0.5, debias=False), ScaledArray(jnp.ones(2), 4.0)
        >>> print(tx.update(w, tx.init(w))[0])
        [2. 2.]
    """
    return _by_value(optax.ema(decay, debias, accumulator_dtype))


def _by_value(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return inner.update(values(updates), state, params)

    return optax.GradientTransformation(lambda params: inner.init(values(params)), update)
