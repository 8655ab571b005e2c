"""Where outputs lie on a mesh whose axes are part of the type."""

from typing import TypeAlias

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ..core import ScaledArray

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
