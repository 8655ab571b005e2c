"""What a batch is, and the loss of one."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from unitscale.nn import AmaxState


def loss_inputs(batch: Any) -> tuple[Any, ...]:
    """What a model's `loss` takes of a batch.

    Args:
      batch: The tuple of those arrays; or one array of windows (batch, time + 1), which is the ids
        and, one further, the targets.
    """
    return batch if isinstance(batch, tuple) else (batch[:, :-1], batch[:, 1:])


def over_amax(loss: Callable[..., Any], rest: Any) -> tuple[Any, Callable[..., Any]]:
    """The scales of `rest` that follow amax, and a loss `(params, rest, ...)` by them in its place.

    Whoever differentiates by the parameters does so by them too, since delayed scales would stand
    still otherwise, and warn of it.
    """
    amax, others = nnx.split_state(rest, AmaxState, ...)
    return amax, lambda params, amax, *args: loss(params, nnx.merge_state(amax, others), *args)


def make_loss(
    graphdef: nnx.GraphDef, *, deterministic: bool = True
) -> Callable[[Any, Any, Any], jax.Array]:
    """The loss of a model as a function `(params, rest, batch) -> float32 scalar`."""

    def loss(params: Any, rest: Any, batch: Any) -> jax.Array:
        model: Any = nnx.merge(graphdef, params, rest, copy=True)
        return model.loss(*loss_inputs(batch), deterministic=deterministic)

    return loss
