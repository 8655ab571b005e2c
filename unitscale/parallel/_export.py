"""The state of `train_step` in the signature of a program that `jax.export` writes to bytes."""

from jax import export

from ..core import from_json, to_json
from ._auto_scale import AutoScale
from ._train_step import ParallelState

export.register_pytree_node_serialization(
    AutoScale,
    serialized_name="unitscale.parallel.AutoScale",
    serialize_auxdata=to_json,
    deserialize_auxdata=from_json,
)
export.register_namedtuple_serialization(
    ParallelState, serialized_name="unitscale.parallel.ParallelState"
)
