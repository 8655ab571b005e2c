"""Saving and serving: FP8 weights, and serialization by `flax.serialization` and `jax.export`.

Importing this module registers ScaledArrays, the moments of `optim.scaled`, `QuantState` and
`nnx.State` with `flax.serialization`, and `KVCache` with `jax.export`.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx, serialization
from jax import export

from ..core import ScaledArray, format_of, from_json, to_json
from ..optim import SquareRoot
from ..quant import Block, Dynamic, QuantState, Static, Unit, quantize_at, tensor_scale
from ._attention import KVCache
from ._convert import NORMALIZERS, Hook, StaticWeight, hook_of, kernel_rank, layers_of
from ._policy import assign, join, nodes_of


@dataclasses.dataclass(frozen=True)
class _KeepWeight:
    """A replacement for a layer's `promote_dtype` that does not cast the kernel."""

    original: Any
    kernel_dtype: Any

    def __call__(self, arrays, *, dtype=None, **kwargs):
        inputs, kernel, bias = arrays
        # Promote with the dtype that the kernel had before it was stored in FP8.
        like = jnp.zeros((), self.kernel_dtype)
        inputs, _, bias = self.original((inputs, like, bias), dtype=dtype, **kwargs)
        return inputs, kernel, bias


def to_static(model: nnx.Module, scales: Mapping[str, float] | None = None) -> tuple[str, ...]:
    """Store the weights of converted layers in FP8, in place, to serve the model.

    The model is then for inference only: its weights are `StaticWeight` variables, which optimizers
    ignore, and `restore` cannot undo the rounding. Save and load its `nnx.state` as usual. Code
    that reads a layer's `.kernel` gets FP8 data without its scale: do not `convert` such layers.

    Each weight gets one scale per layer, the smallest power of two that brings its amax into the
    range of the format. The scale of an input is taken from ``scales``, or else from the layer's
    state (`Delayed`, `Static`); it is 1 for `Unit`, and measured in each call for `Dynamic`.

    Args:
        model: a model that was changed by `convert`, and trained or calibrated.
        scales: maps patterns of dotted paths to scales of the layers' inputs; the value of an input
            is its FP8 data times the scale.

    Returns:
        Paths of the layers whose weights are stored in FP8.

    Raises:
        ValueError: if no layer is converted, a layer has block scales or is inside an
            `nnx.WeightNorm`, a scale is not positive and finite, or a pattern matches no converted
            layer. The model is then unchanged.

    Example:
        >>> from unitscale.nn import convert
        >>> model = nnx.Linear(16, 32, rngs=nnx.Rngs(0))
        >>> _ = convert(model, "fp8_dynamic")
        >>> to_static(model), model.kernel.get_value().dtype.name
        (('',), 'float8_e4m3fn')
    """
    found = {path: (layer, hook) for path, layer in layers_of(model) if (hook := hook_of(layer))}
    found = {path: pair for path, pair in found.items() if pair[1].weight_scale is None}
    if not found:
        raise ValueError(
            "unitscale.nn.to_static: the model has no converted layers; call convert first. "
            "Layers of unitscale.nn cannot be stored in FP8, whatever their policy"
        )
    for path, node in nodes_of(model):
        inside = [own for own in found if own.startswith(join(path, ""))]
        if isinstance(node, NORMALIZERS) and inside:
            raise ValueError(
                f"unitscale.nn.to_static: the kernel of {inside[0]} is set by "
                f"nnx.{type(node).__name__} in each call. Leave the layer out of convert by a "
                "rule with None"
            )
    given = assign(scales or {}, found, "to_static")
    for pattern, scale in (scales or {}).items():
        if not (scale > 0 and math.isfinite(scale)):
            raise ValueError(
                "unitscale.nn.to_static: a scale must be positive and finite; got "
                f"{scale!r} for {pattern!r}"
            )
    for path, (_, hook) in found.items():
        if isinstance(hook.config.strategy, Block):
            raise ValueError(
                f"unitscale.nn.to_static: {path or 'the layer'} has {hook.config.strategy}, "
                "whose scales vary within a matmul; convert it to another strategy first"
            )
    for path, (layer, hook) in found.items():
        kernel, fmt = layer.kernel.get_value(), format_of(hook.config.rhs)
        keep_weight = _KeepWeight(layer.promote_dtype, kernel.dtype)
        kernel = kernel.astype(layer.dtype or kernel.dtype)  # cast as in training
        stack = kernel.shape[: kernel.ndim - kernel_rank(layer)]
        own = tuple(range(len(stack), kernel.ndim))
        weight_scale = tensor_scale(kernel, fmt, axis=own)
        layer.kernel = StaticWeight(quantize_at(kernel, hook.config.rhs, weight_scale).data)
        layer.promote_dtype = keep_weight
        scale = given[path][1] if path in given else None
        inputs = _input_scale(hook, stack, scale)
        hook.weight_scale = nnx.data(StaticWeight(jnp.squeeze(weight_scale, own)))
        hook.input_scale = nnx.data(None if inputs is None else StaticWeight(inputs))
        hook.state = nnx.data(None)
    return tuple(found)


def _input_scale(hook: Hook, stack: tuple[int, ...], scale: float | None) -> Any:
    """Return one input scale for each layer of a stack; None if calls measure it."""
    strategy = hook.config.strategy
    if scale is None and isinstance(strategy, Dynamic):
        return None
    if scale is None and isinstance(strategy, Unit):
        scale = 1.0
    if scale is None and isinstance(strategy, Static) and strategy.scales is not None:
        scale = strategy.scales[0]
    if scale is not None:
        return jnp.full(stack, scale, jnp.float32)
    assert hook.state is not None, "all other strategies keep their scales"
    return hook.state.get_value().scale[..., 0]


_PARTS = {
    ScaledArray: ("data", "scale"),
    SquareRoot: ("root",),
    QuantState: ("scale", "history", "tally", "counts"),
}


def _to_state(x: Any) -> dict[str, Any]:
    return {part: serialization.to_state_dict(getattr(x, part)) for part in _PARTS[type(x)]}


def _from_state(x: Any, state: dict[str, Any]) -> Any:
    parts = _PARTS[type(x)]
    if not isinstance(state, dict) or set(state) != set(parts):
        found = sorted(state) if isinstance(state, dict) else type(state).__name__
        raise ValueError(
            f"unitscale.nn: a {type(x).__name__} is restored from a state with the keys "
            f"{', '.join(parts)}; got {found}. If it was saved from plain arrays, restore into "
            "plain arrays and call as_scaled or scale_params on the result."
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
    """Return an `nnx.State` as dictionaries of the values of its variables."""
    if isinstance(x, nnx.State | Mapping):
        return {str(key): _values(child) for key, child in x.items()}
    return x.get_value() if isinstance(x, nnx.Variable) else x


def _restored(x: Any, state: Any) -> Any:
    """Return an `nnx.State` with the values of a state dictionary."""
    if isinstance(x, nnx.State):
        return type(x)(_restored(x.raw_mapping, state))
    if isinstance(x, Mapping):
        if set(map(str, x)) != set(state):
            raise ValueError(
                f"unitscale.nn: state must be of the same model, with the keys "
                f"{', '.join(sorted(map(str, x)))}; got {sorted(state)}"
            )
        return {key: _restored(child, state[str(key)]) for key, child in x.items()}
    value = serialization.from_state_dict(_values(x), state)
    return x.replace(value) if isinstance(x, nnx.Variable) else value


for _kind in _PARTS:
    serialization.register_serialization_state(_kind, _to_state, _from_state, override=True)
serialization.register_serialization_state(
    nnx.State,
    lambda x: serialization.to_state_dict(_values(x)),
    _restored,
    override=True,
)
export.register_pytree_node_serialization(
    KVCache,
    serialized_name="unitscale.nn.KVCache",
    serialize_auxdata=to_json,
    deserialize_auxdata=from_json,
)
