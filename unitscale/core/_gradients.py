"""Gradients by the values of ScaledArrays, as plain arrays."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import jax

from ._cast import widen
from ._convert import is_scaled
from ._scale import to_float
from ._scaled_array import ScaledArray


def wide_data(x: Any) -> Any:
    """What to differentiate by in place of a ScaledArray: its data, in float32 or wider.

    A cotangent is rounded into the format of the data that it belongs to, and it is the value's
    times the scale: where a few large entries have given a float16 parameter the scale 2^10,
    gradients above 64 would be infinite.

    Example:
        >>> wide_data(ScaledArray(jax.numpy.ones(2, "float16"), 4.0)).dtype.name
        'float32'
    """
    return widen(x.data) if is_scaled(x) else x


def with_data(x: Any, data: Any) -> Any:
    """Returns a ScaledArray with other data at its own scale; anything else is its own data.

    Example:
        >>> print(with_data(ScaledArray(1.0, 4.0), 3.0).value)
        12.0
    """
    return ScaledArray(data, x.scale, block_shape=x.block_shape) if is_scaled(x) else data


def value_gradient(x: Any, cotangent: Any) -> Any:
    """Returns the gradient by the value of ``x`` from the cotangent of its data: over its scale.

    Example:
        >>> print(value_gradient(ScaledArray(1.0, 4.0), 12.0))
        3.0
    """
    return cotangent / to_float(x.full_scale) if is_scaled(x) else cotangent


def map_scaled(f: Callable[..., Any], *trees: Any) -> Any:
    """Maps over trees whose ScaledArrays, in the first, are leaves."""
    return jax.tree.map(f, *trees, is_leaf=is_scaled)


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    allow_int: bool = False,
) -> Callable[..., Any]:
    """As `jax.value_and_grad`, with gradients by the values of ScaledArrays, as plain arrays.

    Scaling:
        value = data * scale with the scale held constant, so the gradient by the value is that by
        the data over the scale, which is exact for a power of two. It is what the function has for
        a plain array of the same values, however a value is split into data and scale. It is
        computed and returned in float32, whatever the format of the data. Norms, clipping and
        averages of such gradients mean what they say; those of `jax.grad`, which are in data space
        beside a scale of zero, do not.

    Args:
        fun: function of any pytrees that returns a scalar.
        argnums: which positional arguments to differentiate by.
        has_aux: whether ``fun`` returns ``(value, aux)``.
        allow_int: whether arguments may hold integers, as in `jax.value_and_grad`.

    Returns:
        A function of the arguments of ``fun`` that returns ``(value, gradients)``: the tree of the
        argument, with a plain float32 array in place of each ScaledArray.

    Raises:
        TypeError: as `jax.value_and_grad` does. A ScaledArray as the value is taken by its value.

    Example:
        >>> import jax.numpy as jnp
        >>> w = ScaledArray(jnp.ones(2, jnp.float16), 4.0)
        >>> value, gradient = value_and_grad(lambda w: jnp.sum(3 * w.value))(w)
        >>> print(value, gradient)
        24.0 [3. 3.]

    References:
        Balanca et al., "Scalify: scale propagation for efficient low-precision LLM training",
        2024, arXiv 2407.17353, section 3.
    """
    chosen = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    @wraps(fun)
    def run(*args: Any, **kwargs: Any) -> Any:
        # An argument that is not there is JAX's own error to tell of.
        places = [n for n in chosen if -len(args) <= n < len(args)]
        wide = list(args)
        for n in places:
            wide[n] = map_scaled(wide_data, args[n])

        def by_data(*wide: Any, **kwargs: Any) -> Any:
            given = list(wide)
            for n in places:
                given[n] = map_scaled(with_data, args[n], wide[n])
            return loss_value(fun(*given, **kwargs), has_aux)

        differentiate = jax.value_and_grad(by_data, argnums, has_aux, allow_int=allow_int)
        value, cotangents = differentiate(*wide, **kwargs)
        if isinstance(argnums, int):
            return value, map_scaled(value_gradient, args[argnums], cotangents)
        pairs = zip(chosen, cotangents, strict=True)
        return value, tuple(map_scaled(value_gradient, args[n], c) for n, c in pairs)

    return run


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    allow_int: bool = False,
) -> Callable[..., Any]:
    """As `jax.grad`, with gradients by the values of ScaledArrays.

    Scaling, arguments and errors are those of `value_and_grad`.

    Returns:
        A function of the arguments of ``fun`` that returns the gradients; with ``has_aux``,
        ``(gradients, aux)``.

    Example:
        >>> print(grad(lambda w: w.value**2)(ScaledArray(1.0, 4.0)))
        8.0
    """
    return drop_value(value_and_grad(fun, argnums, has_aux, allow_int=allow_int), has_aux)


def drop_value(differentiate: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
    """Makes of a ``value_and_grad`` of a function its ``grad``.

    Example:
        >>> double = jax.value_and_grad(lambda x: x**2)
        >>> print(drop_value(double, has_aux=False)(1.0))
        2.0
    """

    @wraps(differentiate)
    def run(*args: Any, **kwargs: Any) -> Any:
        value, gradients = differentiate(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return run


def loss_value(out: Any, has_aux: bool) -> Any:
    """What a function returns for JAX to differentiate: a loss that is a ScaledArray by its value.

    Example:
        >>> print(loss_value((ScaledArray(1.0, 4.0), "aux"), has_aux=True))
        (Array(4., dtype=float32), 'aux')
    """
    if not has_aux:
        return _value(out)
    value, *aux = out  # of any other length is JAX's own error to tell of
    return _value(value), *aux


def map_values(f: Callable[..., Any], *trees: Any) -> Any:
    """Maps a function over the leaves of trees, with the value of each ScaledArray for a leaf.

    Data and scale of a ScaledArray are two leaves of a tree, so what `jax.tree.map` or optax does
    leaf by leaf (averages, norms, sums of trees) is wrong on them. This is the same by value.

    Args:
        f: function of one leaf of each tree, with ScaledArrays as float32 values.
        *trees: of one structure, in which a ScaledArray may stand where another tree has an array.

    Returns:
        A tree of what ``f`` returns; `as_scaled` stores values again.

    Raises:
        ValueError: if the structures differ.

    Example:
        >>> import jax.numpy as jnp
        >>> a, b = ScaledArray(jnp.ones(2), 1.0), ScaledArray(jnp.ones(2), 8.0)
        >>> print(map_values(lambda x, y: (x + y) / 2, {"w": a}, {"w": b})["w"])
        [4.5 4.5]
    """
    return jax.tree.map(f, *(map_scaled(_value, tree) for tree in trees))


def _value(x: Any) -> Any:
    return widen(x.value) if is_scaled(x) else x
