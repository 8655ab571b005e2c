"""The scales that NNX models hold, and the products that hold their own."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
from flax import nnx

from ..quant import MatmulConfig, QuantState, dot_general, einsum, is_stateful


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


class _Product(nnx.Module):
    """What `DotGeneral` and `EinsumOp` share: formats, strategy, and the scales of one product."""

    def __init__(self, config: MatmulConfig) -> None:
        self.config = config
        self.state = nnx.data(amax_state(config))


class DotGeneral(_Product):
    """A `lax.dot_general` with quantized operands that holds its own scales.

    As `dot_general`, for strategies with a state too: a layer that it is given to as
    ``dot_general=`` holds it as a part of its own, so that `value_and_grad` finds the state. Each
    layer needs one of its own.

    Args:
        config: formats and strategy.

    Example:
        >>> import jax.numpy as jnp
        >>> from unitscale.quant import Delayed
        >>> dot = DotGeneral(MatmulConfig(strategy=Delayed()))
        >>> layer = nnx.Linear(8, 4, dot_general=dot, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 8))).shape
        (2, 4)
    """

    def __call__(self, *operands: Any, **options: Any) -> jax.Array:
        """Multiplies as `lax.dot_general`; ``precision`` is ignored."""
        return dot_general(self.config, read_state(self.state))(*operands, **options)


class EinsumOp(_Product):
    """A `jnp.einsum` with quantized operands that holds its own scales.

    As `DotGeneral`, for ``flax.nnx.Einsum(einsum_op=)``. The scales are those of one product: give
    it two operands.

    Args:
        config: formats and strategy.

    Example:
        >>> import jax.numpy as jnp
        >>> from unitscale.quant import Delayed
        >>> op = EinsumOp(MatmulConfig(strategy=Delayed()))
        >>> layer = nnx.Einsum("bk,kn->bn", (8, 4), einsum_op=op, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 8))).shape
        (2, 4)
    """

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
    map_states(model, QuantState.advance)


def map_states(model: Any, f: Callable[[QuantState], QuantState]) -> None:
    """Maps all states in one program: outside of jit they would be many small ones."""
    variables = [variable for _, variable in amax_states(model)]
    states = _jit_map(f, [variable.get_value() for variable in variables])
    for variable, state in zip(variables, states, strict=True):
        variable.set_value(state)


@partial(jax.jit, static_argnums=0)
def _jit_map(f: Callable[[QuantState], QuantState], states: list[QuantState]) -> list[QuantState]:
    return list(map(f, states))
