"""Scales of a model from data."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..quant import TENSORS, QuantState
from ._amax_state import AmaxState, amax_states, map_states
from ._gradients import value_and_grad


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
        >>> from unitscale.nn import DotGeneral
        >>> from unitscale.quant import MatmulConfig, Static
        >>> dot = DotGeneral(MatmulConfig(strategy=Static()))
        >>> model = nnx.Linear(8, 4, dot_general=dot, rngs=nnx.Rngs(0))
        >>> calibrate(model, [jnp.full((2, 8), 1000.0), jnp.full((2, 8), 4000.0)])
        >>> print(dot.state.get_value().scale[::2])
        [16.  1.]
    """
    if not any(True for _ in amax_states(model)):
        raise ValueError(
            "unitscale.nn.calibrate: the model holds no scales; give its layers a strategy that "
            "keeps them, Static() or Delayed()"
        )
    # A copy, because a forward pass may move streams of random keys and statistics on.
    probe = nnx.clone(model)
    map_states(probe, _start)
    step = nnx.jit(value_and_grad(_total if loss is None else loss, advance=False))
    count = 0
    for count, batch in enumerate(batches, 1):  # noqa: B007
        try:
            step(probe, batch)
        except Exception as error:
            if loss is None and isinstance(batch, (tuple, list)):
                error.add_note(
                    "unitscale.nn.calibrate: a batch is the one argument that the model is called "
                    f"with; got a {type(batch).__name__} of {len(batch)}. Give loss=, a function "
                    "of the model and the batch, where it has labels or other arguments."
                )
            raise
    if not count:
        raise ValueError("unitscale.nn.calibrate: batches is empty; give at least one batch")
    map_states(probe, _finish if loss is not None else _finish_forward)
    nnx.update(model, nnx.state(probe, AmaxState))


def _start(state: QuantState) -> QuantState:
    return dataclasses.replace(state, calibrating=True)


def _finish(state: QuantState) -> QuantState:
    return dataclasses.replace(state.advance(), calibrating=False)


def _finish_forward(state: QuantState) -> QuantState:
    cotangent = TENSORS.index("cotangent")
    return _finish(dataclasses.replace(state, tally=state.tally.at[..., cotangent, :].set(0)))


def _total(model: Any, batch: Any) -> jax.Array:
    leaves = map(jnp.asarray, jax.tree.leaves(model(batch)))
    floating = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
    return sum((jnp.sum(x.astype(jnp.float32)) for x in floating), start=jnp.float32(0))
