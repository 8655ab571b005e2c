"""Serving a converted model: weights stored in FP8, scales that no longer move."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx

from ..core import format_of
from ..quant import Block, Dynamic, Static, Unit, quantize_at, tensor_scale
from ._conversion_rules import assign
from ._hooks import (
    Hook,
    StaticWeight,
    hook_of,
    joined,
    kernel_rank,
    layers_of,
    normalized,
)


@dataclasses.dataclass(frozen=True)
class _KeepWeight:
    """A layer's `promote_dtype` that leaves the kernel as it is stored."""

    original: Any
    kernel_dtype: Any

    def __call__(self, arrays, *, dtype=None, **kwargs):
        inputs, kernel, bias = arrays
        # The kernel that was there takes part in choosing the dtype.
        like = jnp.zeros((), self.kernel_dtype)
        inputs, _, bias = self.original((inputs, like, bias), dtype=dtype, **kwargs)
        return inputs, kernel, bias


def to_static(model: nnx.Module, scales: Mapping[str, float] | None = None) -> tuple[str, ...]:
    """Stores the weights of converted layers in FP8, in place, to serve the model.

    A weight takes a quarter of the bytes of float32, and is multiplied as it is stored. The model
    is for inference: its weights are `StaticWeight` variables, which no optimizer sees, and
    `restore` cannot bring back what was rounded. Save and load it as any other, by its `nnx.state`;
    ``nnx.eval_shape`` of what makes it gives the shapes.

    Scaling:
        Weights by the least power of two that brings their amax into the format, per layer. Inputs
        by the scale of ``scales``, or by the one that the layer has: `Delayed` and `Static` keep
        theirs, `Unit` has 1, and `Dynamic` takes it from each input, as in training.

    Args:
        model: a model that `convert` has changed, and that is trained or calibrated.
        scales: maps patterns of dotted paths to scales of the layers' inputs, as the rules of
            `convert`; the value of an input is its FP8 data times the scale.

    Returns:
        Paths of the layers whose weights are stored in FP8.

    Raises:
        ValueError: if no layer is converted, a layer has block scales or its kernel from
            `nnx.WeightNorm`, a scale is not positive and finite, or a pattern matches no converted
            layer. The model is then unchanged.

    Example:
        >>> from unitscale.nn import convert
        >>> model = nnx.Linear(16, 32, rngs=nnx.Rngs(0))
        >>> _ = convert(model, "fp8_dynamic")
        >>> to_static(model), model.kernel.get_value().dtype.name
        (('',), 'float8_e4m3fn')

    References:
        Micikevicius et al., "FP8 Formats for Deep Learning", 2022, arXiv 2209.05433, section 4.2
        (inference with one scale per tensor).
    """
    found = {path: (layer, hook) for path, layer in layers_of(model) if (hook := hook_of(layer))}
    found = {path: pair for path, pair in found.items() if pair[1].weight_scale is None}
    if not found:
        raise ValueError(
            "unitscale.nn.to_static: the model has no converted layers; call convert first. "
            "Layers of unitscale.nn keep their weights wide, whatever their policy"
        )
    for path, kind in normalized(model).items():
        if inside := [own for own in found if own.startswith(joined(path, ""))]:
            raise ValueError(
                f"unitscale.nn.to_static: the kernel of {inside[0]} is set by nnx.{kind} in each "
                "call. Convert the model with a rule that leaves it out: None"
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
                "whose scales lie inside the product; convert it to another strategy first"
            )
    for path, (layer, hook) in found.items():
        _store(layer, hook, given[path][1] if path in given else None)
    return tuple(found)


def _input_scale(hook: Hook, stack: tuple[int, ...]) -> Any:
    """The scale of a layer's input, one for each layer of a stack; None if data gives it."""
    strategy = hook.config.strategy
    if isinstance(strategy, Dynamic):
        return None
    if isinstance(strategy, Unit):
        return jnp.ones(stack, jnp.float32)
    if isinstance(strategy, Static) and strategy.scales is not None:
        return jnp.full(stack, strategy.scales[0], jnp.float32)
    assert hook.state is not None, "all other strategies keep their scales"
    return hook.state.get_value().scale[..., 0]


def _store(layer: Any, hook: Hook, scale: float | None) -> None:
    kernel, fmt = layer.kernel.get_value(), format_of(hook.config.rhs)
    kept = _KeepWeight(layer.promote_dtype, kernel.dtype)
    # As the product of training rounds it, which takes the weight in the layer's own dtype.
    kernel = kernel.astype(layer.dtype or kernel.dtype)
    stack = kernel.shape[: kernel.ndim - kernel_rank(layer)]
    own = tuple(range(len(stack), kernel.ndim))
    weight_scale = tensor_scale(kernel, fmt, axis=own)
    layer.kernel = StaticWeight(quantize_at(kernel, hook.config.rhs, weight_scale).data)
    hook.weight_scale = nnx.data(StaticWeight(jnp.squeeze(weight_scale, own)))
    inputs = _input_scale(hook, stack) if scale is None else jnp.full(stack, scale, jnp.float32)
    hook.input_scale = nnx.data(None if inputs is None else StaticWeight(inputs))
    hook.state = nnx.data(None)
    layer.promote_dtype = kept
