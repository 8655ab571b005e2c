"""Static forward and backward factors, and gradients with respect to values of ScaledArrays."""

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._arithmetic import to_float
from ._compat import custom_vjp
from ._formats import is_floating, narrow, widen
from ._scaled_array import ScaledArray, is_scaled, loss_value


def multiply(x: jax.Array, factor: float) -> jax.Array:
    """Multiply by a factor in the wide dtype, and round once to the dtype of ``x``.

    The factor itself is never rounded to a narrow type. A factor of 1 returns ``x`` unchanged.
    """
    if factor == 1:
        return x
    return narrow(widen(x) * factor, x.dtype)


@partial(custom_vjp, nondiff_argnums=(1, 2))
def _scale(x, fwd, bwd):
    return multiply(x, fwd)


_scale.defvjp(
    lambda x, fwd, bwd: (multiply(x, fwd), None),
    lambda fwd, bwd, _, cotangent: (multiply(cotangent, bwd),),
)


def scale(x: Any, fwd: float = 1.0, bwd: float = 1.0) -> Any:
    """Multiply by ``fwd`` in the forward pass, and multiply the cotangent by ``bwd``.

    Scaling:
        y = fwd * x; dx = bwd * dy, each computed in float32 (float64 for float64) and rounded
        once. The gradient is exact only if fwd == bwd. Use different factors only on cut edges, or
        together with other ops whose factors make up for the difference.

    Args:
        x: a floating array, or a ScaledArray (its data is multiplied, and its scale kept).
        fwd: static forward factor.
        bwd: static backward factor.

    Raises:
        TypeError: if ``x`` is not floating, or a factor is not a Python or NumPy number.

    Example:
        >>> print(jax.grad(lambda x: scale(x, 2.0, 3.0))(1.0))
        3.0

    References:
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, scaled ops.
    """
    for name, factor in (("fwd", fwd), ("bwd", bwd)):
        if not isinstance(factor, (int, float, np.integer, np.floating)):
            raise TypeError(
                f"unitscale.ops.scale: {name} must be a static Python number; got "
                f"{type(factor).__name__}. Put a traced multiplier into ScaledArray.scale."
            )
    if is_scaled(x):
        return x.map_data(lambda data: _scale(data, float(fwd), float(bwd)))
    x = jnp.asarray(x)
    if not is_floating(x):
        raise TypeError(f"unitscale.ops.scale: x must be a floating array; got dtype {x.dtype}")
    return _scale(x, float(fwd), float(bwd))


def scale_fwd(x: Any, factor: float) -> Any:
    """Multiply by a static factor in the forward pass; leave the cotangent unchanged."""
    return scale(x, factor, 1.0)


def scale_bwd(x: Any, factor: float) -> Any:
    """Multiply the cotangent by a static factor; leave the forward value unchanged."""
    return scale(x, 1.0, factor)


def wide_data(x: Any) -> Any:
    """Return the data of a ScaledArray in float32 or wider, to differentiate with respect to it.

    The data's gradient is the value's gradient times the scale: with a scale of 2^10, it would
    overflow float16 for value gradients above 64.
    """
    return widen(x.data) if is_scaled(x) else x


def with_data(x: Any, data: Any) -> Any:
    """Return ``x`` with other data and the same scale; if it is not a ScaledArray, the data."""
    return ScaledArray(data, x.scale, block_shape=x.block_shape) if is_scaled(x) else data


def value_gradient(x: Any, cotangent: Any) -> Any:
    """Convert the gradient of ``x.data`` to that of ``x.value``: divide by the scale."""
    return cotangent / to_float(x.full_scale) if is_scaled(x) else cotangent


_map_scaled = partial(jax.tree.map, is_leaf=is_scaled)


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    allow_int: bool = False,
) -> Callable[..., Any]:
    """Differentiate like `jax.value_and_grad`, with respect to the values of ScaledArrays.

    Scaling:
        value = data * scale, with the scale held constant. The gradient with respect to the value
        is therefore the gradient with respect to the data, in float32, divided by the scale. It
        does not depend on how a value is split into data and scale, so norms, clipping and averages
        of gradients are correct. (`jax.grad` differentiates with respect to the data.)

    Args:
        fun: function of any pytrees that returns a scalar; the loss may be a ScaledArray.
        argnums: positions of the arguments to differentiate with respect to.
        has_aux: whether ``fun`` returns ``(value, aux)``.
        allow_int: whether arguments may hold integers, as in `jax.value_and_grad`.

    Returns:
        A function with the arguments of ``fun`` that returns ``(value, gradients)``. Gradients have
        the structure of the arguments, with a plain float32 array for each ScaledArray.

    Example:
        >>> w = ScaledArray(jnp.ones(2, jnp.float16), 4.0)
        >>> value, gradient = value_and_grad(lambda w: jnp.sum(3 * w.value))(w)
        >>> print(value, gradient)
        24.0 [3. 3.]
    """
    chosen = (argnums,) if isinstance(argnums, int) else argnums

    @wraps(fun)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not all(-len(args) <= n < len(args) for n in chosen):
            raise TypeError(
                f"unitscale.value_and_grad: argnums must be positions of arguments; got {argnums} "
                f"for {len(args)} positional arguments"
            )
        own = tuple(args[n] for n in chosen)

        def by_data(data: tuple[Any, ...]) -> Any:
            given = list(args)
            for n, x, wide in zip(chosen, own, data, strict=True):
                given[n] = _map_scaled(with_data, x, wide)
            return loss_value(fun(*given, **kwargs), has_aux)

        differentiate = jax.value_and_grad(by_data, has_aux=has_aux, allow_int=allow_int)
        value, cotangents = differentiate(_map_scaled(wide_data, own))
        gradients = _map_scaled(value_gradient, own, cotangents)
        return value, gradients[0] if isinstance(argnums, int) else gradients

    return run


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    allow_int: bool = False,
) -> Callable[..., Any]:
    """Differentiate like `jax.grad`, with respect to the values of ScaledArrays.

    Scaling, arguments and errors are those of `value_and_grad`.

    Returns:
        A function with the arguments of ``fun`` that returns the gradients; with ``has_aux``,
        ``(gradients, aux)``.
    """
    return drop_value(value_and_grad(fun, argnums, has_aux, allow_int=allow_int), has_aux)


def drop_value(differentiate: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
    """Turn the ``value_and_grad`` of a function into its ``grad``."""

    @wraps(differentiate)
    def run(*args: Any, **kwargs: Any) -> Any:
        value, gradients = differentiate(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return run
