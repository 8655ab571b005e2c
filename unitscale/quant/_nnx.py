"""The scales that NNX models hold: where they lie, and how a training step moves them."""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..core import is_scaled, widen_data
from ._config import MatmulConfig
from ._dot_general import dot_general, einsum
from ._state import TENSORS, QuantState
from ._strategies import is_stateful


class AmaxState(nnx.Variable):
    """The variable of an NNX model that holds the `QuantState` of one product.

    It is no `nnx.Param`: optimizers, clipping and weight decay never see it.

    Example:
        >>> from unitscale.quant import Delayed
        >>> AmaxState(QuantState.create(Delayed(history=4))).get_value().history.shape
        (3, 4)
    """


def amax_state(config: MatmulConfig | None) -> AmaxState | None:
    """Returns a new `AmaxState` where the strategy keeps its scales, else None.

    Example:
        >>> amax_state(MatmulConfig()) is None
        True
    """
    if config is None or not is_stateful(config.strategy):
        return None
    return AmaxState(QuantState.create(config.strategy))


def read_state(variable: AmaxState | None) -> QuantState | None:
    """Returns the state that a variable holds; None stays None.

    Example:
        >>> read_state(None) is None
        True
    """
    return None if variable is None else variable.get_value()


class DotGeneral(nnx.Module):
    """A `lax.dot_general` with quantized operands that holds its own scales.

    As `dot_general`, for strategies with a state too: a layer that it is given to as
    ``dot_general=`` holds it as a part of its own, so that `value_and_grad` finds the state. Each
    layer needs one of its own.

    Args:
        config: formats and strategy.

    Example:
        >>> from unitscale.quant import Delayed
        >>> dot = DotGeneral(MatmulConfig(strategy=Delayed()))
        >>> layer = nnx.Linear(8, 4, dot_general=dot, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 8))).shape
        (2, 4)
    """

    def __init__(self, config: MatmulConfig) -> None:
        self.config = config
        self.state = nnx.data(amax_state(config))

    def __call__(self, *operands: Any, **options: Any) -> jax.Array:
        """Multiplies as `lax.dot_general`; ``precision`` is ignored."""
        return dot_general(self.config, read_state(self.state))(*operands, **options)


class Einsum(nnx.Module):
    """A `jnp.einsum` with quantized operands that holds its own scales.

    As `DotGeneral`, for ``flax.nnx.Einsum(einsum_op=)``. The scales are those of one product: give
    it two operands.

    Args:
        config: formats and strategy.

    Example:
        >>> from unitscale.quant import Delayed
        >>> op = Einsum(MatmulConfig(strategy=Delayed()))
        >>> layer = nnx.Einsum("bk,kn->bn", (8, 4), einsum_op=op, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 8))).shape
        (2, 4)
    """

    def __init__(self, config: MatmulConfig) -> None:
        self.config = config
        self.state = nnx.data(amax_state(config))

    def __call__(self, *operands: Any, **options: Any) -> jax.Array:
        """Multiplies as `jnp.einsum`; ``precision`` is ignored."""
        return einsum(self.config, read_state(self.state))(*operands, **options)


def amax_states(model: Any) -> Iterator[tuple[str, AmaxState]]:
    """Yields the path and the variable of every `AmaxState` of a model.

    Example:
        >>> from unitscale.quant import Delayed
        >>> layer = nnx.Dict(a=DotGeneral(MatmulConfig(strategy=Delayed())))
        >>> [path for path, _ in amax_states(layer)]
        ['a.state']
    """
    for path, node in nnx.iter_graph(model):
        if isinstance(node, AmaxState):
            yield ".".join(map(str, path)), node


def advance(model: Any) -> None:
    """Ends an optimizer step of a model, in place: see `QuantState.advance`.

    For gradient accumulation: call `value_and_grad` with ``advance=False`` on each microbatch, and
    this once before or after the optimizer's update.

    Args:
        model: NNX module.

    Example:
        >>> advance(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))  # nothing to advance
    """
    _map_states(model, QuantState.advance)


def value_and_grad(
    f: Callable[..., Any],
    *,
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    has_aux: bool = False,
    advance: bool = True,
) -> Callable[..., Any]:
    """As `nnx.value_and_grad`, and records the amax of quantized tensors in the models.

    The gradients that are returned are those of the parameters only, of ScaledArrays with float32
    data whatever they are stored in (see `core.widen_data`). The states of the models at
    ``argnums`` are updated in place.

    Args:
        f: function of models and other arguments that returns a scalar loss.
        argnums: which arguments to differentiate by; of a model its `nnx.Param` variables, or those
            of a `nnx.DiffState`.
        has_aux: whether ``f`` returns ``(loss, aux)``.
        advance: whether this ends an optimizer step. False only adds to what was seen.

    Returns:
        A function of the arguments of ``f`` that returns ``(value, gradients)`` as
        `nnx.value_and_grad` does.

    Raises:
        TypeError: when called, if an argument holds models in a container.

    Example:
        >>> from unitscale.quant import Delayed
        >>> dot = DotGeneral(MatmulConfig(strategy=Delayed()))
        >>> model = nnx.Linear(8, 4, dot_general=dot, rngs=nnx.Rngs(0))
        >>> x = jnp.full((2, 8), 1000.0)
        >>> loss, grads = value_and_grad(lambda model: model(x).sum())(model)
        >>> sorted(grads), dot.state.get_value().scale[0]
        (['bias', 'kernel'], Array(4., dtype=float32))
    """
    single = isinstance(argnums, int | nnx.DiffState)
    wanted = [
        n if isinstance(n, nnx.DiffState) else nnx.DiffState(n, nnx.Param)
        for n in ([argnums] if single else argnums)
    ]
    with_states = tuple(nnx.DiffState(d.argnum, (AmaxState, d.filter)) for d in wanted)
    inner = nnx.value_and_grad(f, argnums=with_states, has_aux=has_aux)
    signature = inspect.signature(f)

    def run(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        with _wide(bound.args[diff.argnum] for diff in wanted):
            value, gradients = inner(*bound.args, **bound.kwargs)
        kept = []
        for diff, gradient in zip(wanted, gradients, strict=True):
            if any(isinstance(v, AmaxState) for v in _variables(gradient)):
                if not isinstance(gradient, nnx.State):
                    raise TypeError(
                        "unitscale.quant.value_and_grad: a model must be an argument of its own; "
                        f"argument {diff.argnum} holds models in a {type(gradient).__name__}"
                    )
                seen, gradient = nnx.split_state(gradient, AmaxState, ...)
                _record(bound.args[diff.argnum], seen, advance)
            kept.append(gradient)
        return value, kept[0] if single else tuple(kept)

    return run


@contextmanager
def _wide(models: Iterable[Any]) -> Iterator[None]:
    """Lends models float32 data for ScaledArrays in fewer bits (see `core.widen_data`)."""
    nodes = (node for model in models for _, node in nnx.iter_graph(model))
    lent = [(v, v.get_value()) for v in nodes if isinstance(v, nnx.Param)]
    lent = [(variable, narrow) for variable, narrow in lent if is_scaled(narrow)]
    for variable, narrow in lent:
        variable.set_value(widen_data(narrow))
    try:
        yield
    finally:
        for variable, narrow in lent:
            variable.set_value(narrow)


def _variables(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nnx.Variable))


def _record(model: Any, seen: nnx.State, ends_step: bool) -> None:
    gradients = {".".join(map(str, path)): g.get_value() for path, g in nnx.to_flat_state(seen)}
    for path, variable in amax_states(model):
        if path in gradients:
            variable.set_value(variable.get_value().add(gradients[path]))
    if ends_step:
        _map_states(model, QuantState.advance)


def calibrate(
    model: Any,
    batches: Iterable[Any],
    loss: Callable[[Any, Any], jax.Array] | None = None,
) -> None:
    """Sets the scales of a model from data, in place: of `Static`, and the first of `Delayed`.

    Each batch runs forward and backward with dynamic scales; then the largest amax of all batches
    gives the scale of each tensor. Nothing else of the model changes.

    Args:
        model: NNX module whose strategy keeps scales.
        batches: what the model is called with, one by one; at least one.
        loss: ``loss(model, batch)``, a scalar, for the scales of cotangents. None calls
            ``model(batch)``, and leaves the scales of cotangents as they are.

    Raises:
        ValueError: if there is no batch, or the model holds no `AmaxState`.

    Example:
        >>> from unitscale.quant import Static
        >>> dot = DotGeneral(MatmulConfig(strategy=Static()))
        >>> model = nnx.Linear(8, 4, dot_general=dot, rngs=nnx.Rngs(0))
        >>> calibrate(model, [jnp.full((2, 8), 1000.0), jnp.full((2, 8), 4000.0)])
        >>> print(dot.state.get_value().scale[::2])
        [16.  1.]
    """
    if not any(True for _ in amax_states(model)):
        raise ValueError(
            "unitscale.quant.calibrate: the model holds no scales; give its layers a strategy that "
            "keeps them, Static() or Delayed()"
        )
    # A copy, because a forward pass may move streams of random keys and statistics on.
    probe = nnx.clone(model)
    _map_states(probe, _start)
    step = nnx.jit(value_and_grad(_total if loss is None else loss, advance=False))
    count = 0
    for count, batch in enumerate(batches, 1):  # noqa: B007
        step(probe, batch)
    if not count:
        raise ValueError("unitscale.quant.calibrate: batches is empty; give at least one batch")
    _map_states(probe, _finish if loss is not None else _finish_forward)
    nnx.update(model, nnx.state(probe, AmaxState))


def _start(state: QuantState) -> QuantState:
    return dataclasses.replace(state, calibrating=True)


def _finish(state: QuantState) -> QuantState:
    return dataclasses.replace(state.advance(), calibrating=False)


def _finish_forward(state: QuantState) -> QuantState:
    cotangent = TENSORS.index("cotangent")
    return _finish(dataclasses.replace(state, tally=state.tally.at[..., cotangent, :].set(0)))


def _total(model: Any, batch: Any) -> jax.Array:
    leaves = [x for x in jax.tree.leaves(model(batch)) if jnp.issubdtype(x.dtype, jnp.floating)]
    return sum((jnp.sum(x.astype(jnp.float32)) for x in leaves), start=jnp.float32(0))


def _map_states(model: Any, f: Callable[[QuantState], QuantState]) -> None:
    """Maps all states in one program: outside of jit they would be many small ones."""
    variables = [variable for _, variable in amax_states(model)]
    states = _jit_map(f, [variable.get_value() for variable in variables])
    for variable, state in zip(variables, states, strict=True):
        variable.set_value(state)


@partial(jax.jit, static_argnums=0)
def _jit_map(f: Callable[[QuantState], QuantState], states: list[QuantState]) -> list[QuantState]:
    return list(map(f, states))
