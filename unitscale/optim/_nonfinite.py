"""Steps whose gradients are not finite, skipped and counted."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ._scaled import ScaledTransformation
from ._weights import apply_updates


class SkipState(NamedTuple):
    """State of `skip_nonfinite`: that of the wrapped transformation, and steps skipped.

    Example:
        >>> state = skip_nonfinite(optax.sgd(0.5)).init([1.0])
        >>> print(state.skipped, state.consecutive)
        0 0
    """

    inner: Any
    skipped: jax.Array
    consecutive: jax.Array


def _all_finite(grads: Any) -> jax.Array:
    leaves = [x for x in jax.tree.leaves(grads) if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for x in leaves]))


def _select(keep: jax.Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda n, o: jnp.where(keep, n, o), new, old)


def skip_nonfinite(inner: optax.GradientTransformation) -> ScaledTransformation:
    """Leaves weights and state untouched in a step whose gradients are not finite.

    As `optax.apply_if_finite`, but it takes ScaledArrays as parameters, selects rather than
    branches, so that a compiled update still runs in place, and never gives up: compare
    ``state.consecutive`` with a limit of your own.

    Args:
        inner: an optax transformation, or what `scaled` returns.

    Returns:
        ScaledTransformation whose state is ``SkipState(inner, skipped, consecutive)``: steps
        skipped in all, and since the last one that counted. ``scale_params`` is that of
        ``inner``, or the identity.

    Raises:
        TypeError: if inner is no transformation.

    Example:
        >>> tx = skip_nonfinite(optax.sgd(0.5))
        >>> updates, state = tx.update([jnp.inf], tx.init([1.0]), [1.0])
        >>> print(updates[0], state.skipped)
        0.0 1
    """
    if not (callable(getattr(inner, "init", None)) and callable(getattr(inner, "update", None))):
        raise TypeError(
            "unitscale.optim.skip_nonfinite: inner must be an optax transformation, with init and "
            f"update; got {type(inner).__name__}"
        )
    supported = optax.with_extra_args_support(inner)

    def init(params: Any) -> SkipState:
        return SkipState(inner.init(params), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))

    def counted(finite: jax.Array, new: Any, state: SkipState) -> SkipState:
        skipped = state.skipped + jnp.where(finite, 0, 1)
        consecutive = jnp.where(finite, 0, state.consecutive + 1)
        return SkipState(_select(finite, new, state.inner), skipped, consecutive)

    def update(grads: Any, state: SkipState, params: Any = None, **extra_args: Any) -> Any:
        finite = _all_finite(grads)
        updates, new = supported.update(grads, state.inner, params, **extra_args)
        updates = jax.tree.map(lambda u: jnp.where(finite, u, jnp.zeros_like(u)), updates)
        return updates, counted(finite, new, state)

    def step(params: Any, state: SkipState, grads: Any, **extra_args: Any) -> Any:
        if not isinstance(inner, ScaledTransformation):
            updates, state = update(grads, state, params, **extra_args)
            return apply_updates(params, updates), state
        finite = _all_finite(grads)
        moved, new = inner.step(params, state.inner, grads, **extra_args)
        return _select(finite, moved, params), counted(finite, new, state)

    def identity(params: Any, *, stack_axes: Any = None) -> Any:
        del stack_axes
        return params

    scale_params = getattr(inner, "scale_params", identity)
    return ScaledTransformation(init, update, scale_params, step)
