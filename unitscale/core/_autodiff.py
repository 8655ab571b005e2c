"""Static factors of the forward and backward pass, and gradients by the values of ScaledArrays."""

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._cast import narrow, widen
from ._compat import custom_vjp
from ._convert import is_scaled
from ._scale import to_float
from ._scaled_array import ScaledArray


def multiply(x: jax.Array, factor: float) -> jax.Array:
    """Multiplies by a factor in the wide dtype, and rounds once to the dtype of ``x``.

    The factor itself is never rounded to a narrow type, and a factor of 1 is no operation.
    """
    if factor == 1:
        return x
    return narrow(widen(x) * factor, x.dtype)


@partial(custom_vjp, nondiff_argnums=(1, 2))
def _scale(x, fwd, bwd):
    return multiply(x, fwd)


def _scale_fwd(x, fwd, bwd):
    return multiply(x, fwd), None


def _scale_bwd(fwd, bwd, residuals, cotangent):
    return (multiply(cotangent, bwd),)


_scale.defvjp(_scale_fwd, _scale_bwd)


def scale(x: Any, fwd: float = 1.0, bwd: float = 1.0) -> Any:
    """Multiplies by ``fwd`` on the way forward and the cotangent by ``bwd`` on the way back.

    Scaling:
        y = fwd * x; dx = bwd * dy. Both products are computed in float32 (float64 for float64) and
        rounded once. The result has the true derivative only where fwd == bwd: anything else
        belongs on a cut edge, or on edges that share one constraint.

    Args:
        x: a floating array, or a ScaledArray (its data is multiplied, its scale kept).
        fwd: static forward factor.
        bwd: static backward factor.

    Returns:
        The same type, shape and dtype as ``x``.

    Raises:
        TypeError: if ``x`` is not floating, or a factor is not a Python or NumPy number.

    Example:
        >>> import jax
        >>> print(jax.grad(lambda x: scale(x, 2.0, 3.0))(1.0))
        3.0

    References:
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, scaled ops.
    """
    for name, factor in (("fwd", fwd), ("bwd", bwd)):
        if not isinstance(factor, (int, float, np.integer, np.floating)):
            raise TypeError(
                f"unitscale.ops.scale: {name} must be a static Python number; got "
                f"{type(factor).__name__}. A traced multiplier belongs into ScaledArray.scale."
            )
    # Leaves that are scales pass through ScaledArray.map_data, plain arrays go in directly.
    if hasattr(x, "map_data"):
        return x.map_data(lambda data: _scale(data, float(fwd), float(bwd)))
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"unitscale.ops.scale: x must be a floating array; got dtype {x.dtype}")
    return _scale(x, float(fwd), float(bwd))


def scale_fwd(x: Any, factor: float) -> Any:
    """Multiplies the forward value by a static factor and leaves the cotangent alone."""
    return scale(x, factor, 1.0)


def scale_bwd(x: Any, factor: float) -> Any:
    """Leaves the forward value alone and multiplies the cotangent by a static factor."""
    return scale(x, 1.0, factor)


def wide_data(x: Any) -> Any:
    """Returns the data of a ScaledArray in float32 or wider, to differentiate with respect to it.

    JAX rounds a cotangent to the format of its data, and this one is the value's times the scale:
    under a scale of 2^10, gradients above 64 would overflow float16.
    """
    return widen(x.data) if is_scaled(x) else x


def with_data(x: Any, data: Any) -> Any:
    """Returns a ScaledArray with other data at its own scale; anything else is its own data."""
    return ScaledArray(data, x.scale, block_shape=x.block_shape) if is_scaled(x) else data


def value_gradient(x: Any, cotangent: Any) -> Any:
    """Divides the cotangent of the data of ``x`` by its scale: the gradient by its value."""
    return cotangent / to_float(x.full_scale) if is_scaled(x) else cotangent


def map_scaled(f: Callable[..., Any], *trees: Any) -> Any:
    """Maps over trees; ScaledArrays in the first one are leaves."""
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
        value = data * scale with the scale held constant, so the gradient by the value is the
        gradient by the data divided by the scale, which is exact for a power of two. It does not
        depend on how the value is split into data and scale, and is computed in float32. Norms,
        clipping and averages of these gradients mean what they say; those of `jax.grad`, which are
        in data space beside a zero for the scale, do not.

    Args:
        fun: function of any pytrees that returns a scalar; the loss may be a ScaledArray.
        argnums: which positional arguments to differentiate with respect to.
        has_aux: whether ``fun`` returns ``(value, aux)``.
        allow_int: whether arguments may hold integers, as in `jax.value_and_grad`.

    Returns:
        A function of the arguments of ``fun`` that returns ``(value, gradients)``: the tree of the
        argument, with a plain float32 array in place of each ScaledArray.

    Raises:
        TypeError: as `jax.value_and_grad` does.

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
    """Turns a ``value_and_grad`` of a function into its ``grad``."""

    @wraps(differentiate)
    def run(*args: Any, **kwargs: Any) -> Any:
        value, gradients = differentiate(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return run


def loss_value(out: Any, has_aux: bool) -> Any:
    """Replaces a loss that is a ScaledArray by its value, for JAX to differentiate."""
    if not has_aux:
        return _value(out)
    value, *aux = out  # of any other length is JAX's own error to tell of
    return _value(value), *aux


def map_values(f: Callable[..., Any], *trees: Any) -> Any:
    """Maps a function over the leaves of trees, with the value of each ScaledArray as a leaf.

    Data and scale of a ScaledArray are two leaves of a tree, so functions that work leaf by leaf
    (averages, norms and sums in `jax.tree` and optax) are wrong on them. This is the same by value.

    Args:
        f: function of one leaf of each tree, with ScaledArrays as float32 values.
        *trees: of one structure; a ScaledArray may correspond to an array in another tree.

    Returns:
        A tree of the results of ``f``; `as_scaled` turns values into ScaledArrays again.

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
