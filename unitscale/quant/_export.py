"""Scales that are kept in the signature of a program that `jax.export` writes to bytes."""

import dataclasses
from typing import Any

from jax import export

from ..core import from_json, to_json
from ._state import QuantState
from ._strategies import Delayed, Static

_STRATEGIES = {kind.__name__: kind for kind in (Delayed, Static)}


def _to_bytes(aux: Any) -> bytes:
    strategy, calibrating = aux
    return to_json([type(strategy).__name__, dataclasses.asdict(strategy), calibrating])


def _from_bytes(written: bytes) -> Any:
    name, fields, calibrating = from_json(written)
    return _STRATEGIES[name](**fields), calibrating


export.register_pytree_node_serialization(
    QuantState,
    serialized_name="unitscale.quant.QuantState",
    serialize_auxdata=_to_bytes,
    deserialize_auxdata=_from_bytes,
)
