"""`jax.custom_vjp` whose forward-mode error says what to do instead."""

from collections.abc import Callable
from functools import update_wrapper
from typing import Any

import jax

_ADVICE = (
    "unitscale: {name} defines its backward pass only, because its backward factors exist in "
    "reverse mode; use jax.vjp, jax.grad or jax.jacrev. A Jacobian-vector product is the "
    "transpose of the transpose: jax.vjp(lambda u: jax.vjp(f, x)[1](u), u0)[1](v)."
)


def varying(x: Any) -> frozenset[str]:
    """The axes of shard_map that an array may differ along, where JAX keeps account of it."""
    manual = getattr(jax.typeof(x), "manual_axis_type", None)
    return getattr(manual, "varying", frozenset())


def match_varying(args: Any) -> Any:
    """Inside shard_map, lets all arrays vary over the mesh axes that any of them varies over.

    A gradient varies as the arguments together do, and must have the type of its own; the
    transpose of varying is a sum over the devices, as for JAX's own operations.

    Example:
        >>> match_varying((1.0, 2.0))  # nothing varies outside of shard_map
        (1.0, 2.0)
    """
    axes = frozenset().union(*map(varying, jax.tree.leaves(args)))
    if not axes:
        return args

    def vary(x: Any) -> Any:
        missing = tuple(axes - varying(x))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, args)


class custom_vjp:
    """A function with its own reverse-mode rule, as `jax.custom_vjp`.

    Under forward-mode differentiation it raises a TypeError that names the function and the
    reverse-mode way to the same number, where JAX's own message does not. (A function that was
    traced into a jaxpr first, as under jit, is out of reach: there JAX's message appears.)

    Example:
        >>> double = custom_vjp(lambda x: 2 * x)
        >>> double.defvjp(lambda x: (2 * x, None), lambda residuals, dy: (3 * dy,))
        >>> print(jax.grad(double)(1.0))
        3.0
    """

    __name__: str

    def __init__(self, fun: Callable[..., Any], nondiff_argnums: tuple[int, ...] = ()):
        """Wraps ``fun``; the arguments at ``nondiff_argnums`` are static."""
        self._fun = jax.custom_vjp(fun, nondiff_argnums=nondiff_argnums)
        self._static = frozenset(nondiff_argnums)
        update_wrapper(self, fun)

    def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any]) -> None:
        """Sets the forward and backward rules, with the signatures of `jax.custom_vjp.defvjp`."""
        self._fun.defvjp(fwd, bwd)

    def __call__(self, *args: Any) -> Any:
        """Calls the function on positional arguments."""
        arrays = iter(match_varying([a for i, a in enumerate(args) if i not in self._static]))
        args = tuple(a if i in self._static else next(arrays) for i, a in enumerate(args))
        try:
            return self._fun(*args)
        except TypeError as error:
            if "forward-mode" not in str(error):
                raise
            name = self.__name__.strip("_")
            raise TypeError(_ADVICE.format(name=name)) from error
