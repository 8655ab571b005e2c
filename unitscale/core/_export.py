"""ScaledArrays in the signature of a program that `jax.export` writes to bytes."""

import json
from typing import Any

from jax import export

from ._scaled_array import ScaledArray


def to_json(aux: Any) -> bytes:
    """Static fields of a dataclass as bytes."""
    return json.dumps(aux).encode()


def from_json(written: bytes) -> Any:
    """The fields again, numbers and strings."""
    return tuple(json.loads(written))


def _from_bytes(written: bytes) -> Any:
    has_scale, block_shape = from_json(written)
    return has_scale, None if block_shape is None else tuple(block_shape)


export.register_pytree_node_serialization(
    ScaledArray,
    serialized_name="unitscale.ScaledArray",
    serialize_auxdata=to_json,
    deserialize_auxdata=_from_bytes,
)
