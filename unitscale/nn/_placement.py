"""Where activations lie on a mesh."""

from typing import Any, TypeAlias

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ..core import BATCH_AXES, CONTEXT_AXES, ScaledArray, divided

OutSharding: TypeAlias = NamedSharding | PartitionSpec | None


def placed(y: ScaledArray, out_sharding: OutSharding) -> ScaledArray:
    """Returns a layer's output divided over explicit axes as a call asks; None for as it comes.

    Products need not be told: on explicit axes their outputs lie as their inputs do, and parts of a
    sum are added. So this is a move, and its gradient the move back.

    Example:
        >>> import jax.numpy as jnp
        >>> placed(ScaledArray(jnp.ones(2)), None).shape
        (2,)
    """
    if out_sharding is None:
        return y
    return y.map_data(lambda data: jax.sharding.reshard(data, out_sharding))


def stream(x: Any) -> Any:
    """Returns a residual stream (batch, time, ...) that lies where its batch does.

    On a mesh of `jax.set_mesh` that is left to the compiler, that is over its axes fsdp, data and
    context. Weights then come to the activations, each in the format that it is multiplied in.

    Example:
        >>> import jax.numpy as jnp
        >>> stream(ScaledArray(jnp.ones((4, 8, 2)))).shape
        (4, 8, 2)
    """
    if isinstance(x, ScaledArray):
        return x.map_data(stream)
    return divided(x, BATCH_AXES, CONTEXT_AXES)
