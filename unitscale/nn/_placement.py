"""Where outputs lie on a mesh."""

from typing import TypeAlias

from jax.sharding import NamedSharding, PartitionSpec

from .. import core
from ..core import ScaledArray

OutSharding: TypeAlias = NamedSharding | PartitionSpec | None


def placed(y: ScaledArray, out_sharding: OutSharding) -> ScaledArray:
    """Returns a layer's output divided over axes as a call asks; None for as it comes.

    Example:
        >>> import jax.numpy as jnp
        >>> placed(ScaledArray(jnp.ones(2)), None).shape
        (2,)
    """
    if out_sharding is None:
        return y
    return y.map_data(lambda data: core.reshard(data, out_sharding))
