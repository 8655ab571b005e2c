"""Quantized products in an existing `flax.nnx` model, and back.

Nothing but the hooks of its layers changes (`dot_general`, `einsum_op`): parameters, their names
and the model's code stay as they are.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import jax
from flax import nnx
from jax import lax

from ..quant import MatmulConfig, einsum_problem, is_stateful
from ._conversion import Conversion, ConversionReport
from ._conversion_rules import ConfigLike, as_config, assign, check_rules
from ._hooks import (
    Hook,
    features_of,
    hook_of,
    is_stacked_elsewhere,
    kernel_rank,
    kind_of,
    layers_of,
)

End = Literal["first", "last"]


def _called(model: Any, example: tuple[Any, ...]) -> list[str]:
    """Paths of the layers in the order in which the model calls them."""
    order: list[str] = []

    def recorder(path: str, original: Any):
        def call(*args, **kwargs):
            order.append(path)
            return (original or lax.dot_general)(*args, **kwargs)

        return call

    copy = nnx.clone(model)
    for path, layer in layers_of(copy):
        kind = kind_of(layer)
        if kind is not None:
            original = getattr(layer, kind.attribute)
            original = original.original if isinstance(original, Hook) else original
            setattr(layer, kind.attribute, nnx.static(recorder(path, original)))
    graphdef, state = nnx.split(copy)
    leaves, structure = jax.tree.flatten(example)
    # Python's booleans and numbers choose what a model does, and stay what they are.
    arrays = {i: leaf for i, leaf in enumerate(leaves) if hasattr(leaf, "shape")}

    def call(state: Any, arrays: dict[int, Any]) -> Any:
        args = [arrays.get(i, leaf) for i, leaf in enumerate(leaves)]
        return nnx.merge(graphdef, state)(*jax.tree.unflatten(structure, args))

    jax.eval_shape(call, state, arrays)
    return order


def _obstacle(layer: Any, min_size: int, multiple_of: int) -> str:
    """Why a layer cannot be converted, or is not worth it; "" if it can and is."""
    kind = kind_of(layer)
    if kind is None:
        return "XLA has no FP8 kernel for convolutions"
    if isinstance(layer, nnx.Einsum) and (problem := einsum_problem(layer.einsum_str)):
        return problem
    if (hook := hook_of(layer)) is not None and hook.weight_scale is not None:
        return "its weight is stored in FP8"
    if hook is None and getattr(layer, kind.attribute) not in kind.defaults:
        return f"it has its own {kind.attribute}"
    if getattr(layer, "dot_general_cls", None) is not None:
        return "it has its own dot_general_cls"
    features = features_of(layer)
    if min(features) < min_size:
        return f"{features[0]} to {features[1]} features is below min_size={min_size}"
    if any(n % multiple_of for n in features):
        return f"{features[0]} to {features[1]} features are not multiples of {multiple_of}"
    return ""


def convert(
    model: nnx.Module,
    rules: Mapping[str, ConfigLike | None] | Sequence[tuple[str, ConfigLike | None]] | ConfigLike,
    *,
    exempt: Collection[End] = (),
    example: tuple[Any, ...] = (),
    min_size: int = 0,
    multiple_of: int = 16,
) -> ConversionReport:
    """Gives the layers of a plain `flax.nnx` model quantized products, in place.

    Layers are `nnx.Linear`, `nnx.LinearGeneral` and `nnx.Einsum`, also inside other modules such
    as `nnx.MultiHeadAttention`. Parameters stay as they are; `restore` undoes it. Scales that are
    kept ("fp8_delayed", "fp8_static") lie in the layers as `AmaxState`: differentiate with
    `value_and_grad` of this package, or `calibrate`. Layers of `flax.linen` take ``dot_general=``
    themselves.

    Args:
        model: the model, which is changed. Make the optimizer after this.
        rules: maps patterns of dotted paths (`fnmatch`: "layers.*.mlp.*"), or pairs them with, a
            `MatmulConfig`, the name of a preset ("fp8_unit", "fp8_dynamic", "fp8_delayed",
            "fp8_static", "mxfp8"), or None, which leaves layers alone. The first pattern that
            matches a layer counts. A config alone is for every layer.
        exempt: "first" and "last" leave out the layers that ``model(*example)`` calls first and
            last.
        example: arguments of such a call, for ``exempt``; the model is traced, not run. Arrays may
            be `jax.ShapeDtypeStruct`; Python's booleans and numbers stay what they are.
        min_size: layers with fewer features in or out are left out.
        multiple_of: layers whose features in or out are not multiples are left out: FP8 kernels
            take multiples of 16.

    Returns:
        What became of each layer, and why.

    Raises:
        ValueError: if a rule matches no layer, or none that an earlier rule leaves; if a preset is
            unknown; or if ``exempt`` names anything else or lacks its example. The model is then
            unchanged.
        TypeError: if the rules are of another type, or the example is no tuple.

    Example:
        >>> model = nnx.Sequential(
        ...     nnx.Linear(16, 32, rngs=nnx.Rngs(0)), nnx.Linear(32, 10, rngs=nnx.Rngs(1))
        ... )
        >>> report = convert(model, {"layers.*": "fp8_dynamic"})
        >>> report.converted, report.skipped
        (('layers.0',), {'layers.1': '32 to 10 features are not multiples of 16'})
    """
    rules = check_rules(rules, "convert")
    configs = {k: None if v is None else as_config(v) for k, v in rules.items()}
    if unknown := set(exempt) - {"first", "last"}:
        raise ValueError(
            'unitscale.nn.convert: exempt must be of "first" and "last"; got '
            f"{', '.join(map(repr, sorted(unknown)))}"
        )
    if not isinstance(example, tuple):
        raise TypeError(
            "unitscale.nn.convert: example must be the tuple of a call's arguments, (x,) for one; "
            f"got {type(example).__name__}"
        )
    if exempt and not example:
        raise ValueError(
            "unitscale.nn.convert: exempt needs example=(...), arguments that the model is "
            "called with, to see which layers come first and last"
        )
    layers = dict(layers_of(model))
    assigned = assign(configs, layers, "convert")
    called = _called(model, example) if exempt else []
    ends = {"first": called[:1], "last": called[-1:]}
    exempted = {path: end for end in exempt for path in ends[end]}
    entries = []
    for path, layer in layers.items():
        rule, config = assigned.get(path, ("", None))
        if not rule:
            reason = "no rule matches it"
        elif config is None:
            reason = "its rule is None"
        elif path in exempted:
            reason = f"the {exempted[path]} layer is exempt"
        else:
            reason = _obstacle(layer, min_size, multiple_of)
            if not reason and is_stateful(config.strategy) and is_stacked_elsewhere(layer):
                reason = "nnx.vmap has stacked it along an axis that is not the first"
        entries.append(
            Conversion(
                path=path,
                kind=type(layer).__name__,
                features=features_of(layer),
                rule=rule,
                config=None if reason else config,
                reason=reason,
            )
        )
    for entry in entries:
        if entry.config is not None:
            _attach(layers[entry.path], entry.config)
    return ConversionReport(tuple(entries))


def _attach(layer: Any, config: MatmulConfig) -> None:
    kind, hook = kind_of(layer), hook_of(layer)
    assert kind is not None, "only layers with a product are converted"
    original = getattr(layer, kind.attribute) if hook is None else hook.original
    shape = layer.kernel.shape
    stack = shape[: len(shape) - kernel_rank(layer)]
    setattr(layer, kind.attribute, nnx.data(kind.hook(config, original, stack)))


def restore(model: nnx.Module) -> tuple[str, ...]:
    """Undoes `convert`, in place: the model is what it was, with the parameters that it has now.

    Args:
        model: the model, which is changed; layers that are not converted stay as they are.

    Returns:
        Paths of the layers that were restored.

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
                f"unitscale.nn.restore: the weight of {path or 'the layer'} is stored in FP8; "
                "what it was before is lost. Restore a model before to_static"
            )
    for layer, hook in found.values():
        kind = kind_of(layer)
        assert kind is not None, "only layers with a product have a hook"
        setattr(layer, kind.attribute, nnx.static(hook.original))
    return tuple(found)
