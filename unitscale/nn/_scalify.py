"""`scalify` for functions that update NNX models and optimizers in place."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from ..core import is_scaled
from ..transforms import scalify as scalify_pure


def scalify(
    fn: Callable[..., Any], *, static_scaling: Any = "unit", decouple: bool = False
) -> Callable[..., Any]:
    """Apply `unitscale.scalify` to a function that updates its NNX arguments in place.

    The state of all modules, optimizers and other NNX objects among the arguments becomes an
    argument and a result of the scaled function, as under `nnx.jit`. Variables that hold
    ScaledArrays are scaled, and still are after the call; variables that hold plain arrays stay
    plain until they are combined with a scaled value.

    Args:
        fn: function of NNX objects and other arguments, for example a training step. It may change
            the values of variables, but must not add or remove variables or change other
            attributes, as `model.train()` does.
        static_scaling: see `unitscale.scalify`.
        decouple: see `unitscale.scalify`.

    Returns:
        The scaled function. Every call traces it, so call it under `nnx.jit`.

    Raises:
        TypeError: if ``fn`` is not callable; in a call, if it returns an NNX object.
        ValueError: in a call, if ``fn`` changes the structure of an NNX object.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from unitscale import as_scaled
        >>> model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
        >>> optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        >>> for x in (model, optimizer):
        ...     nnx.update(x, as_scaled(nnx.state(x), dtype=jnp.float16))
        >>> def step(model, optimizer, x):
        ...     loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
        ...     optimizer.update(model, grads)
        ...     return loss
        >>> x = as_scaled(jnp.ones((3, 4)), dtype=jnp.float16)
        >>> loss = nnx.jit(scalify(step))(model, optimizer, x)
        >>> model.kernel.get_value().dtype.name
        'float16'
    """
    if not callable(fn):
        raise TypeError(f"unitscale.nn.scalify: expected a function; got {type(fn).__name__}")

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        is_leaf = lambda x: _is_object(x) or is_scaled(x)  # noqa: E731
        leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=is_leaf)
        objects = [x for x in leaves if _is_object(x)]
        graphdef, state = nnx.split(objects)

        def pure(state: Any, rest: list[Any]) -> Any:
            inner = nnx.merge(graphdef, state)
            old, new = iter(rest), iter(inner)
            leaves_inside = [next(new if _is_object(x) else old) for x in leaves]
            own_args, own_kwargs = jax.tree.unflatten(tree, leaves_inside)
            result = fn(*own_args, **own_kwargs)
            returned = jax.tree.leaves(result, is_leaf=lambda x: isinstance(x, nnx.Pytree))
            if any(isinstance(x, nnx.Pytree) for x in returned):
                raise TypeError(
                    "unitscale.nn.scalify: the function must return arrays; got an NNX object. "
                    "The caller's objects are updated in place: return nothing, or their nnx.state"
                )
            changed, state = nnx.split(inner)
            if changed != graphdef:
                raise ValueError(
                    "unitscale.nn.scalify: the function may only change the values of variables; "
                    "it added or removed variables or changed another attribute of an NNX object. "
                    "Call methods such as model.train() and create variables outside of it"
                )
            return result, nnx.as_pure(state)

        scaled = scalify_pure(pure, static_scaling=static_scaling, decouple=decouple)
        result, state = scaled(nnx.as_pure(state), [x for x in leaves if not _is_object(x)])
        nnx.update(objects, state)
        return result

    return run


def _is_object(x: Any) -> bool:
    return isinstance(x, (nnx.Pytree, nnx.Variable))
