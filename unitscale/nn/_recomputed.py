"""Functions that are computed again for their backward."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from ..core import custom_vjp


def _evaluate(jaxpr: Jaxpr, consts: list[Any], args: list[Any]) -> list[Any]:
    return jaxpr_as_fun(ClosedJaxpr(jaxpr, consts))(*args)


@partial(custom_vjp, nondiff_argnums=(0,))
def _recomputed(jaxpr: Jaxpr, consts: list[Any], args: list[Any]) -> list[Any]:
    return _evaluate(jaxpr, consts, args)


def _fwd(jaxpr: Jaxpr, consts: list[Any], args: list[Any]) -> tuple[list[Any], Any]:
    return _evaluate(jaxpr, consts, args), (consts, args)


def _bwd(jaxpr: Jaxpr, residuals: Any, cotangents: list[Any]) -> Any:
    consts, args = residuals
    # XLA may else take it for what the forward computes, and keep that.
    args = jax.lax.optimization_barrier(args)
    _, pull = jax.vjp(partial(_evaluate, jaxpr), consts, args)
    return pull(cotangents)


_recomputed.defvjp(_fwd, _bwd)


def recomputed(f: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that saves its arguments alone, and computes the rest again.

    `jax.checkpoint`, but for two things. What is not computed from the arguments is not computed
    again, such as weights that are cast. And the cotangent is not kept apart from what is computed
    with it, so that XLA may make one kernel of both: what is recomputed beside its derivative costs
    little more than that.

    Args:
        f: function of arrays and trees of them.

    Returns:
        The same function, of the same result and gradients.

    Example:
        >>> import jax.numpy as jnp
        >>> print(jax.grad(recomputed(lambda x: 2.0 * jnp.square(x)))(3.0))
        12.0

    References:
        Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, arXiv 1604.06174.
    """

    def call(*args: Any) -> Any:
        # Traced here alone: what is known while tracing, as the parts of a batch are, stays known.
        closed, shape = jax.make_jaxpr(f, return_shape=True)(*args)
        out = _recomputed(closed.jaxpr, closed.consts, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), out)

    return call
