"""Gradients of models by value, and the amax that a step saw."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
from flax import nnx

from ..core import drop_value, is_scaled, loss_value, value_gradient, wide_data, with_data
from ..quant import QuantState
from ._amax_state import AmaxState, amax_states, map_states

Path = tuple[Any, ...]


def value_and_grad(
    f: Callable[..., Any] | None = None,
    *,
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    has_aux: bool = False,
    advance: bool = True,
) -> Callable[..., Any]:
    """As `nnx.value_and_grad`, with gradients by value, and it records amax in the models.

    Scaling:
        The gradient of a parameter that is a ScaledArray is a plain float32 array, the gradient by
        its value: see `unitscale.value_and_grad`. The scales of the models at ``argnums`` that
        follow amax (`AmaxState`) are updated in place.

    Args:
        f: function of models and other arguments that returns a scalar loss, by its value if that
            is a ScaledArray; without it the result is a decorator.
        argnums: which arguments to differentiate by; of a model its `nnx.Param` variables, or those
            of a `nnx.DiffState`.
        has_aux: whether ``f`` returns ``(loss, aux)``.
        advance: whether this ends an optimizer step. False only adds to what was seen.

    Returns:
        A function of the arguments of ``f`` that returns ``(value, gradients)`` as
        `nnx.value_and_grad` does.

    Raises:
        TypeError: when called, if an argument holds models in a container, or is a tree with
            ScaledArrays that is no model.

    Example:
        >>> import jax.numpy as jnp
        >>> from unitscale.nn import DotGeneral
        >>> from unitscale.quant import Delayed, MatmulConfig
        >>> dot = DotGeneral(MatmulConfig(strategy=Delayed()))
        >>> model = nnx.Linear(8, 4, dot_general=dot, rngs=nnx.Rngs(0))
        >>> x = jnp.full((2, 8), 1000.0)
        >>> loss, grads = value_and_grad(lambda model: model(x).sum())(model)
        >>> sorted(grads), dot.state.get_value().scale[0]
        (['bias', 'kernel'], Array(4., dtype=float32))

    References:
        Balanca et al., "Scalify: scale propagation for efficient low-precision LLM training",
        2024, arXiv 2407.17353, section 3.
    """
    if f is None:
        return partial(value_and_grad, argnums=argnums, has_aux=has_aux, advance=advance)
    single = isinstance(argnums, int | nnx.DiffState)
    asked = [
        n if isinstance(n, nnx.DiffState) else nnx.DiffState(n, nnx.Param)
        for n in ([argnums] if single else argnums)
    ]
    signature = inspect.signature(f)

    def by_data(
        wanted: list[nnx.DiffState],
        kwargs: dict[str, Any],
        data: list[dict[Path, jax.Array]],
        args: Any,
    ) -> Any:
        """``f`` with the data of ScaledArrays as an argument of its own, in float32."""
        models = [args[diff.argnum] for diff in wanted]
        lent = [
            (variable, variable.get_value(), own[path])
            for diff, model, own in zip(wanted, models, data, strict=True)
            for path, variable in _scaled_params(model, diff)
        ]
        for variable, stored, wide in lent:
            variable.set_value(with_data(stored, wide))
        try:
            return loss_value(f(*args, **kwargs), has_aux)
        finally:
            for variable, stored, _ in lent:
                variable.set_value(stored)

    def run(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        # Negative ones count from the end of what is given, not from that of the defaults.
        wanted = [nnx.DiffState(d.argnum + len(args) * (d.argnum < 0), d.filter) for d in asked]
        # The data comes first, so every model is one place further back.
        moved = [
            nnx.DiffState(d.argnum + 1, (AmaxState, nnx.All(d.filter, nnx.Not(_holds_scaled))))
            for d in wanted
        ]
        models = [bound.args[diff.argnum] for diff in wanted]
        scaled = [dict(_scaled_params(m, d)) for m, d in zip(models, wanted, strict=True)]
        data = [{k: wide_data(v.get_value()) for k, v in own.items()} for own in scaled]
        differentiate = nnx.value_and_grad(
            lambda data, *args: by_data(wanted, bound.kwargs, data, args),
            argnums=(0, *moved),
            has_aux=has_aux,
            graph=True,  # whatever `nnx.set_graph_mode` says: filters are of graphs
        )
        value, (of_data, *gradients) = differentiate(data, *bound.args)
        kept = []
        for diff, model, own, cotangents, gradient in zip(
            wanted, models, scaled, of_data, gradients, strict=True
        ):
            if isinstance(gradient, nnx.State):
                seen, gradient = nnx.split_state(gradient, AmaxState, ...)
                _record(model, seen, advance)
                found = {k: value_gradient(own[k].get_value(), ct) for k, ct in cotangents.items()}
                gradient = _with(gradient, {k: own[k].replace(g) for k, g in found.items()})
            elif any(map(is_scaled, jax.tree.leaves(gradient, is_leaf=is_scaled))):
                raise TypeError(
                    f"unitscale.nn.value_and_grad: argument {diff.argnum} is a tree of "
                    "ScaledArrays, and no model; differentiate by unitscale.value_and_grad"
                )
            elif own or any(isinstance(v, AmaxState) for v in _variables(gradient)):
                raise TypeError(
                    "unitscale.nn.value_and_grad: a model must be an argument of its own; argument "
                    f"{diff.argnum} holds models in a {type(gradient).__name__}"
                )
            kept.append(gradient)
        return value, kept[0] if single else tuple(kept)

    return run


def grad(
    f: Callable[..., Any] | None = None,
    *,
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    has_aux: bool = False,
    advance: bool = True,
) -> Callable[..., Any]:
    """As `nnx.grad`, with gradients by value, and it records amax.

    Scaling, arguments and errors are those of `value_and_grad`.

    Returns:
        A function of the arguments of ``f`` that returns the gradients; with ``has_aux``,
        ``(gradients, aux)``.

    Example:
        >>> import jax.numpy as jnp
        >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        >>> print(grad(lambda model: model(jnp.ones((3, 2))).sum())(model)["bias"].get_value())
        [3.]
    """
    if f is None:
        return partial(grad, argnums=argnums, has_aux=has_aux, advance=advance)
    differentiate = value_and_grad(f, argnums=argnums, has_aux=has_aux, advance=advance)
    return drop_value(differentiate, has_aux)


def _holds_scaled(path: Path, variable: Any) -> bool:
    del path
    return isinstance(variable, nnx.Variable) and is_scaled(variable.get_value())


def _scaled_params(model: Any, diff: nnx.DiffState) -> Iterator[tuple[Path, nnx.Variable]]:
    is_wanted = nnx.filterlib.to_predicate(diff.filter)
    for path, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Variable) and _holds_scaled(path, node) and is_wanted(path, node):
            yield path, node


def _with(state: nnx.State, more: dict[Path, nnx.Variable]) -> nnx.State:
    return nnx.from_flat_state({**dict(nnx.to_flat_state(state)), **more}) if more else state


def _variables(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nnx.Variable))


def _record(model: Any, seen: nnx.State, ends_step: bool) -> None:
    gradients = {".".join(map(str, path)): g.get_value() for path, g in nnx.to_flat_state(seen)}
    for path, variable in amax_states(model):
        if path in gradients:
            variable.set_value(variable.get_value().add(gradients[path]))
    if ends_step:
        map_states(model, QuantState.advance)
