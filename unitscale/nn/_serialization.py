"""ScaledArrays and stored moments in `flax.serialization`: as state dictionaries, and bytes.

They are registered when this is imported.
"""

from typing import Any

from flax import serialization

from ..core import ScaledArray, SquareRoot

_PARTS = {ScaledArray: ("data", "scale"), SquareRoot: ("root",)}


def _to_state(x: Any) -> dict[str, Any]:
    return {part: serialization.to_state_dict(getattr(x, part)) for part in _PARTS[type(x)]}


def _from_state(x: Any, state: dict[str, Any]) -> Any:
    parts = _PARTS[type(x)]
    if not isinstance(state, dict) or set(state) != set(parts):
        found = sorted(state) if isinstance(state, dict) else type(state).__name__
        raise ValueError(
            f"unitscale.nn: a {type(x).__name__} is restored from a state with the keys "
            f"{', '.join(parts)}; got {found}. Was it saved from plain arrays? Then restore into "
            "plain arrays, and call as_scaled or scale_params of what comes."
        )
    restored: list[Any] = [
        serialization.from_state_dict(getattr(x, part), state[part], name=part) for part in parts
    ]
    if isinstance(x, SquareRoot):
        return SquareRoot(*restored)
    return ScaledArray(*restored, block_shape=x.block_shape)


for _kind in _PARTS:
    serialization.register_serialization_state(_kind, _to_state, _from_state, override=True)
