"""A cache of attention in the signature of a program that `jax.export` writes to bytes."""

from jax import export

from ..core import from_json, to_json
from ._attention import KVCache

export.register_pytree_node_serialization(
    KVCache,
    serialized_name="unitscale.nn.KVCache",
    serialize_auxdata=to_json,
    deserialize_auxdata=from_json,
)
