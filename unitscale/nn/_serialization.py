"""ScaledArrays and what holds them in `flax.serialization`: as state dictionaries, and bytes.

They are registered when this is imported: with the stored moments of `optim.scaled`, the scales
that layers keep, and `nnx.State`, which the moments of `Optimizer` are trees of.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from flax import nnx, serialization

from ..core import ScaledArray
from ..optim import SquareRoot
from ..quant import QuantState

_PARTS = {
    ScaledArray: ("data", "scale"),
    SquareRoot: ("root",),
    QuantState: ("scale", "history", "tally", "counts"),
}


def _to_state(x: Any) -> dict[str, Any]:
    return {part: serialization.to_state_dict(getattr(x, part)) for part in _PARTS[type(x)]}


def _check_keys(state: Any, keys: Collection[str], expected: str, todo: str) -> None:
    if not isinstance(state, dict) or set(state) != set(keys):
        found = sorted(state) if isinstance(state, dict) else type(state).__name__
        raise ValueError(f"unitscale.nn: {expected}; got {found}. {todo}")


def _from_state(x: Any, state: dict[str, Any]) -> Any:
    parts = _PARTS[type(x)]
    _check_keys(
        state,
        parts,
        f"a {type(x).__name__} is restored from a state with the keys {', '.join(parts)}",
        "Was it saved from plain arrays? Then restore into plain arrays, and call as_scaled or "
        "scale_params of what comes.",
    )
    restored: list[Any] = [
        serialization.from_state_dict(getattr(x, part), state[part], name=part) for part in parts
    ]
    if isinstance(x, SquareRoot):
        return SquareRoot(*restored)
    if isinstance(x, QuantState):
        return dataclasses.replace(x, **dict(zip(parts, restored, strict=True)))
    return ScaledArray(*restored, block_shape=x.block_shape)


def _values(x: Any) -> Any:
    """A tree of `nnx.State` as dictionaries of what its variables hold."""
    if isinstance(x, nnx.State):
        x = x.raw_mapping
    if isinstance(x, Mapping):
        return {str(key): _values(child) for key, child in x.items()}
    return x.get_value() if isinstance(x, nnx.Variable) else x


def _tree_to_state(x: nnx.State) -> dict[str, Any]:
    return serialization.to_state_dict(_values(x))


def _tree_from_state(x: Any, state: Any) -> Any:
    if isinstance(x, nnx.State):
        return type(x)(_tree_from_state(x.raw_mapping, state))
    if isinstance(x, Mapping):
        names = {str(key) for key in x}
        listed = ", ".join(sorted(names))
        _check_keys(
            state,
            names,
            f"a State with the keys {listed} is restored from a state with the same",
            "Give a target of the same model",
        )
        return {key: _tree_from_state(child, state[str(key)]) for key, child in x.items()}
    if isinstance(x, nnx.Variable):
        return x.replace(serialization.from_state_dict(x.get_value(), state))
    return serialization.from_state_dict(x, state)


for _kind in _PARTS:
    serialization.register_serialization_state(_kind, _to_state, _from_state, override=True)
serialization.register_serialization_state(
    nnx.State, _tree_to_state, _tree_from_state, override=True
)
