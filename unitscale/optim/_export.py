"""Scaled optimizer state in the signature of a program that `jax.export` writes to bytes."""

from jax import export

from ._nonfinite import SkipState
from ._scaled import ScaledState
from ._square_root import SquareRoot

export.register_pytree_node_serialization(
    SquareRoot,
    serialized_name="unitscale.optim.SquareRoot",
    serialize_auxdata=lambda _: b"",
    deserialize_auxdata=lambda _: None,
)
for _state in (ScaledState, SkipState):
    export.register_namedtuple_serialization(
        _state, serialized_name=f"unitscale.optim.{_state.__name__}"
    )
