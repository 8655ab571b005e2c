"""Convert an existing `flax.nnx` model to quantized matmuls, and back.

Only the hooks of its layers (`dot_general`, `einsum_op`) change; parameters, their names and the
model's code stay the same.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from ..core import ScaledArray, check_choice, reshard
from ..quant import (
    PRESETS,
    MatmulConfig,
    contract_for_hook,
    contraction_of,
    einsum_contraction,
    einsum_problem,
    is_stateful,
    quantize,
    quantize_at,
    scaled_matmul,
)
from ._amax import amax_state
from ._params import read
from ._policy import assign, nodes_of, table

ConfigLike: TypeAlias = MatmulConfig | str
"""A config, or the name of a preset: see `convert`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversion:
    """The result of `convert` for one layer; ``config`` is None if it was left out."""

    path: str
    kind: str
    features: tuple[int, ...]
    rule: str
    config: MatmulConfig | None
    reason: str


@dataclasses.dataclass(frozen=True)
class ConversionReport:
    """Report of `convert`: a table when printed, with a row per matmul or convolution."""

    layers: tuple[Conversion, ...]

    @property
    def converted(self) -> tuple[str, ...]:
        """Paths of the layers with quantized matmuls."""
        return tuple(layer.path for layer in self.layers if layer.config is not None)

    @property
    def skipped(self) -> dict[str, str]:
        """Paths of the other layers, and the reason for each."""
        return {layer.path: layer.reason for layer in self.layers if layer.config is None}

    def __str__(self) -> str:
        """Return a summary and one row for each layer."""
        rows = [("layer", "class", "features", "formats, or why not", "rule")]
        for layer in self.layers:
            what, config = layer.reason, layer.config
            if config is not None:
                formats = (config.lhs, config.rhs, config.cotangent)
                lhs, rhs, cotangent = (name.removeprefix("float8_") for name in formats)
                what = f"{lhs} x {rhs}, cotangent {cotangent}, {config.strategy}"
            features = "x".join(map(str, layer.features))
            rows.append((layer.path, layer.kind, features, what, layer.rule))
        count = f"{len(self.converted)} of {len(self.layers)} layers converted"
        return "\n".join([count, *table(rows)])


def convert(
    model: nnx.Module,
    rules: Mapping[str, ConfigLike | None] | ConfigLike,
    *,
    min_size: int = 0,
    multiple_of: int = 16,
) -> ConversionReport:
    """Quantize the matmuls of a plain `flax.nnx` model, in place.

    It acts on `nnx.Linear`, `nnx.LinearGeneral` and `nnx.Einsum`, also inside other modules such as
    `nnx.MultiHeadAttention`, but not on code that multiplies by a layer's `.kernel` itself.
    Parameters stay the same; `restore` undoes it. With "fp8_delayed", differentiate with
    `unitscale.nn.value_and_grad`, which updates the scales; with "fp8_static", call `calibrate`
    once. For layers of `flax.linen` see `unitscale.quant.dot_general`.

    The presets are described in `as_policy`. "fp8" uses no scales, so it suits only models whose
    values have an RMS near 1. For most plain models use "fp8_dynamic", which measures scales.

    Args:
        model: the model, which is changed. Create the optimizer after this.
        rules: maps patterns of dotted paths (`fnmatch`: "layers.*.mlp.*") to a `MatmulConfig`, the
            name of a preset (`as_policy` lists them), or None, which leaves layers unchanged. The
            first pattern that matches a layer applies. A config alone applies to every layer.
        min_size: layers with fewer input or output features are left unchanged.
        multiple_of: layers whose input or output features are not multiples of this number are left
            unchanged: FP8 kernels need multiples of 16.

    Returns:
        A report of what was done to each layer, and why.

    Raises:
        ValueError: if a rule matches no layer, or only layers that an earlier rule matches, or a
            preset is unknown. The model is then unchanged.

    Example:
        >>> model = nnx.Sequential(
        ...     nnx.Linear(16, 32, rngs=nnx.Rngs(0)), nnx.Linear(32, 10, rngs=nnx.Rngs(1))
        ... )
        >>> report = convert(model, {"layers.*": "fp8_dynamic"})
        >>> report.converted, report.skipped
        (('layers.0',), {'layers.1': '32 to 10 features are not multiples of 16'})
    """
    configs = _configs(rules)
    layers = dict(layers_of(model))
    none = (
        "the model has no layers of plain Flax with matmuls. Layers of unitscale.nn take policy=, "
        "or use nn.set_policies"
    )
    assigned = assign(configs, layers, "convert", none)
    entries = []
    for path, layer in layers.items():
        rule, config = assigned.get(path, ("", None))
        unmatched = "its rule is None" if rule else "no rule matches it"
        reason = unmatched if config is None else _obstacle(layer, config, min_size, multiple_of)
        entry = Conversion(
            path=path,
            kind=type(layer).__name__,
            features=features_of(layer),
            rule=rule,
            config=None if reason else config,
            reason=reason,
        )
        entries.append(entry)
        if entry.config is not None:
            hook, (attribute, _) = hook_of(layer), _attribute_of(layer)
            original = getattr(layer, attribute) if hook is None else hook.original
            stack = layer.kernel.shape[: layer.kernel.ndim - kernel_rank(layer)]
            setattr(layer, attribute, nnx.data(Hook(entry.config, original, stack)))
    return ConversionReport(tuple(entries))


def restore(model: nnx.Module) -> tuple[str, ...]:
    """Undo `convert` in place, and return the layers' paths. Parameters keep their current values.

    Raises:
        ValueError: if `to_static` has stored a weight in FP8. The model is then unchanged.

    Example:
        >>> model = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
        >>> before = nnx.graphdef(model)
        >>> _ = convert(model, "fp8_dynamic")
        >>> restore(model), nnx.graphdef(model) == before
        (('',), True)
    """
    found = {path: (layer, hook) for path, layer in layers_of(model) if (hook := hook_of(layer))}
    for path, (_, hook) in found.items():
        if hook.weight_scale is not None:
            raise ValueError(
                f"unitscale.nn.restore: the weight of {path or 'the layer'} is stored in FP8, and "
                "its earlier value is lost. Call restore before to_static"
            )
    for layer, hook in found.values():
        setattr(layer, _attribute_of(layer)[0], nnx.static(hook.original))
    return tuple(found)


def _configs(rules: Any) -> dict[str, MatmulConfig | None]:
    """Return rules as a dictionary of configs."""
    if isinstance(rules, MatmulConfig | str):
        rules = {"*": rules}
    if not isinstance(rules, Mapping) or not all(isinstance(key, str) for key in rules):
        raise TypeError(
            "unitscale.nn.convert: rules must map patterns of dotted paths, such as "
            f"'layers.*.mlp.*', to configs; got {rules!r}"
        )
    configs = {}
    for pattern, config in rules.items():
        if isinstance(config, str):
            check_choice("unitscale.nn.convert", "a preset", config, PRESETS)
            config = PRESETS[config]
        elif config is not None and not isinstance(config, MatmulConfig):
            raise TypeError(
                "unitscale.nn.convert: a rule must give a MatmulConfig, the name of a preset or "
                f"None; got {config!r}"
            )
        configs[pattern] = config
    return configs


def _obstacle(layer: Any, config: MatmulConfig, min_size: int, multiple_of: int) -> str:
    """Return the reason to leave a layer unconverted; "" if there is none."""
    if isinstance(layer, CONVOLUTIONS):
        return "XLA has no FP8 kernel for convolutions"
    if isinstance(layer, nnx.Einsum) and (problem := einsum_problem(layer.einsum_str)):
        return problem
    attribute, defaults = _attribute_of(layer)
    hook, features = hook_of(layer), features_of(layer)
    if hook is not None and hook.weight_scale is not None:
        return "its weight is stored in FP8"
    if hook is None and getattr(layer, attribute) not in defaults:
        return f"it has its own {attribute}"
    if getattr(layer, "dot_general_cls", None) is not None:
        return "it has its own dot_general_cls"
    if min(features) < min_size:
        return f"{features[0]} to {features[1]} features is below min_size={min_size}"
    if any(n % multiple_of for n in features):
        return f"{features[0]} to {features[1]} features are not multiples of {multiple_of}"
    if is_stateful(config.strategy) and not isinstance(layer, nnx.LinearGeneral):
        own = layer.kernel_shape if isinstance(layer, nnx.Einsum) else features
        if layer.kernel.shape[-kernel_rank(layer) :] != tuple(own):
            return "nnx.vmap has stacked it along an axis that is not the first"
    return ""


class StaticWeight(nnx.Variable):
    """An FP8 weight or a scale in a model that `to_static` changed; not an `nnx.Param`."""


class Hook(nnx.Module):
    """A quantized matmul in place of a layer's ``original``.

    ``stack`` holds the leading dimensions of a stacked layer's kernel, which its state shares. If
    ``weight_scale`` is set, the kernel is stored in FP8, and ``input_scale`` is the scale of the
    input, or None if each call measures it.
    """

    def __init__(self, config: MatmulConfig, original: Any, stack: tuple[int, ...] = ()) -> None:
        self.config, self.original = config, nnx.static(original)
        self.state = nnx.data(amax_state(config))
        if self.state is not None:
            one = self.state.get_value()
            self.state.set_value(
                jax.tree.map(lambda x: jnp.broadcast_to(x, (*stack, *x.shape)), one)
            )
        self.weight_scale: Any = nnx.data(None)
        self.input_scale: Any = nnx.data(None)

    def __call__(self, *args, precision=None, preferred_element_type=None, out_sharding=None):
        """Multiply like `lax.dot_general`, or like `jnp.einsum` if an equation comes first."""
        del precision
        if isinstance(args[0], str):
            equation, lhs, rhs = args
            if problem := einsum_problem(equation):  # a call may have its own equation
                raise ValueError(
                    f"unitscale.nn.convert: {equation!r} is not a matmul of two operands: "
                    f"{problem}. To skip the layer, add a rule that maps it to None"
                )
            spec = einsum_contraction(equation, lhs.ndim)
        else:
            lhs, rhs, dimension_numbers = args
            spec = contraction_of(dimension_numbers, lhs.ndim, rhs.ndim)
        dtype = preferred_element_type
        if self.weight_scale is None:
            state = read(self.state)
            return contract_for_hook(
                lhs, rhs, spec, self.config, state, out_dtype=dtype, out_sharding=out_sharding
            )
        if self.input_scale is None:
            axes = tuple(axis for axis, label in enumerate(spec.lhs) if label in spec.summed)
            x = quantize(lhs, self.config.lhs, self.config.strategy, axis=axes)
        else:
            x = quantize_at(lhs, self.config.lhs, self.input_scale.get_value())
        kernel = ScaledArray(rhs, self.weight_scale.get_value())
        y = scaled_matmul(x, kernel, spec, 1.0, lhs.dtype if dtype is None else dtype)
        return reshard(y, out_sharding)


# For each type of layer, the attribute that holds its matmul, and the attribute's default values.
_HOOKS: dict[type[nnx.Module], tuple[str, tuple[Any, ...]]] = {
    nnx.Linear: ("dot_general", (lax.dot_general,)),
    nnx.LinearGeneral: ("dot_general", (None, lax.dot_general)),
    nnx.Einsum: ("einsum_op", (jnp.einsum,)),
}
CONVOLUTIONS = (nnx.Conv, nnx.ConvTranspose)
NORMALIZERS = (nnx.WeightNorm, nnx.SpectralNorm)
"""Modules that recompute the kernels of the layer inside them in each call."""


def _attribute_of(layer: Any) -> tuple[str, tuple[Any, ...]]:
    return next(found for type_, found in _HOOKS.items() if isinstance(layer, type_))


def hook_of(layer: Any) -> Hook | None:
    """Return the hook of a converted layer."""
    if isinstance(layer, CONVOLUTIONS):
        return None
    found = getattr(layer, _attribute_of(layer)[0])
    return found if isinstance(found, Hook) else None


def layers_of(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield each `flax.nnx` layer with a matmul or convolution, after its dotted path."""
    for path, node in nodes_of(model):
        if isinstance(node, (*_HOOKS, *CONVOLUTIONS)):
            yield path, node


def features_of(layer: Any) -> tuple[int, ...]:
    """Return the contracted and output sizes of a layer's matmul; () for a convolution."""
    if isinstance(layer, nnx.LinearGeneral):
        return math.prod(layer.in_features), math.prod(layer.out_features)
    if isinstance(layer, nnx.Linear):
        return layer.in_features, layer.out_features
    if not isinstance(layer, nnx.Einsum) or einsum_problem(layer.einsum_str):
        return ()
    spec = einsum_contraction(layer.einsum_str, 0)
    size = dict(zip(spec.rhs, layer.kernel_shape, strict=True))
    outputs = [size[c] for c in spec.rhs if c not in spec.lhs]
    return math.prod(size[c] for c in spec.summed), math.prod(outputs)


def kernel_rank(layer: Any) -> int:
    """Return the rank of a layer's kernel, not counting the axes of a stack."""
    if isinstance(layer, nnx.LinearGeneral):
        return len(layer.batch_axis) + len(layer.in_features) + len(layer.out_features)
    has_shape = isinstance(layer, nnx.Einsum | nnx.Conv | nnx.ConvTranspose)
    return len(layer.kernel_shape) if has_shape else 2
