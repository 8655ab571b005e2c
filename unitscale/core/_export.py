"""ScaledArrays in the signature of a program that `jax.export` writes to bytes."""

import json
from typing import Any

from jax import export

from ._scaled_array import ScaledArray


def _to_bytes(aux: Any) -> bytes:
    return json.dumps(aux).encode()


def _from_bytes(written: bytes) -> Any:
    has_scale, block_shape = json.loads(written)
    return has_scale, None if block_shape is None else tuple(block_shape)


export.register_pytree_node_serialization(
    ScaledArray,
    serialized_name="unitscale.ScaledArray",
    serialize_auxdata=_to_bytes,
    deserialize_auxdata=_from_bytes,
)
