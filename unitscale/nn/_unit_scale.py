"""Replace the layers of a plain `flax.nnx` model by unit-scaled ones.

Code between the layers cannot be changed from outside: residual sums, activations and losses stay
the same, and the report says so.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.attention import dot_product_attention
from flax.nnx.nn.dtypes import promote_dtype
from jax import lax

from .. import rules
from ..quant import einsum_contraction, einsum_problem
from ._attention import MultiHeadAttention
from ._convert import NORMALIZERS, kernel_rank
from ._embed import Embed
from ._linear import Conv, ConvTranspose, Dense, Einsum, Readout
from ._norm import BatchNorm, Dropout, GroupNorm, LayerNorm, RMSNorm
from ._policy import PolicyLike, as_policy, children_of, join, nodes_of, table

Model = TypeVar("Model")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rescaled:
    """The result of `unit_scale` for one layer; ``became`` is "" if it was not replaced."""

    path: str
    kind: str
    became: str
    reason: str


@dataclasses.dataclass(frozen=True)
class UnitScaleReport:
    """Report of `unit_scale`: a table when printed, with one row for each layer."""

    layers: tuple[Rescaled, ...]

    @property
    def changed(self) -> tuple[str, ...]:
        """Paths of the layers that are unit-scaled now."""
        return tuple(layer.path for layer in self.layers if layer.became)

    @property
    def skipped(self) -> dict[str, str]:
        """Paths of the other layers, and the reason for each."""
        return {layer.path: layer.reason for layer in self.layers if not layer.became}

    def __str__(self) -> str:
        """Return a summary, one row for each layer, and what the rows do not cover."""
        rows = [("layer", "class", "now", "note")]
        rows += [(x.path, x.kind, x.became or "unchanged", x.reason) for x in self.layers]
        count = f"{len(self.changed)} of {len(self.layers)} layers unit-scaled"
        others = "not changed: activations, sums (also residual ones) and losses between layers"
        return "\n".join([count, *table(rows), others])


def unit_scale(
    model: Model,
    *,
    policy: PolicyLike = "float32",
    keep_function: bool = False,
    readout: Sequence[str] = (),
    max_length: int | None = None,
    rngs: nnx.Rngs | None = None,
) -> tuple[Model, UnitScaleReport]:
    """Return a plain `flax.nnx` model with its layers replaced by unit-scaled ones.

    Scaling:
        Each layer becomes its counterpart in `unitscale.nn`, and returns a plain array. Its
        parameters are newly initialized. With ``keep_function`` they are the old ones divided by
        the layer's forward factor: ``kernel * in^1/2`` for a Linear, which has unit variance if the
        model is freshly initialized. Embedding tables are then copied, whatever their variance.

        Backward factors assume a loss that applies each layer once and is differentiated with
        respect to parameters. If the loss applies layers to inputs of several sizes, trace it
        within `unitscale.batch_size`. If the loss contains a gradient with respect to an input,
        such as forces or a gradient penalty, use plain layers: the gradient through unit-scaled
        ones is a multiple of the true one.

        Call the new layers like Flax's, with the input as first argument. They do not support
        ``mask=`` of norms; ``sow_weights=``, ``is_causal=`` and ``decode=True`` of attention; an
        equation in each call of an Einsum; and ``out_sharding=`` of `Embed.attend`.

    Args:
        model: a module, which is not changed.
        policy: policy of the new layers. The dtypes of a layer override those of the policy.
        keep_function: whether the new model computes the same function as the old one.
        readout: patterns (`fnmatch`) of paths of `nnx.Linear` layers that become `Readout`.
        max_length: number of keys that the factor of attention is computed for; by default the
            number in each call. Attention needs it with ``keep_function``.
        rngs: streams of random keys for new parameters; needed unless ``keep_function``.

    Returns:
        The new model, and a report of what was done to each layer and why.

    Raises:
        ValueError: if there are no rngs to draw from, or a pattern matches no `nnx.Linear`.

    Example:
        >>> model = nnx.Sequential(nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.relu)
        >>> new, report = unit_scale(model, keep_function=True)
        >>> report.changed
        ('layers.0',)

    References:
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, section 4 (how to apply it).
    """
    if rngs is None and not keep_function:
        raise ValueError(
            "unitscale.nn.unit_scale: give rngs=, from which new parameters are drawn, or "
            "keep_function=True"
        )
    policy, rngs = as_policy(policy), nnx.Rngs(0) if rngs is None else rngs
    entries: list[Rescaled] = []
    known: dict[int, tuple[Any, Any]] = {}  # holds the old node too, so that its id is not reused
    copy = nnx.clone(model)
    places: dict[int, list[str]] = {}
    for place, variable in variables_of(copy):
        places.setdefault(id(variable), []).append(place)

    def replacement(node: Any, path: str) -> Any:
        """Return the node's replacement, or the node with everything below it replaced."""
        if id(node) in known:
            return known[id(node)][1]
        known[id(node)] = node, node
        kind, new, reason = type(node).__name__, None, ""
        if isinstance(node, (*_LAYERS, *OTHERS)):
            shared = [found for _, v in variables_of(node) if len(found := places[id(v)]) > 1]
            if type(node) not in _LAYERS:
                reason = f"{kind} is not converted"
            elif shared:
                reason = f"{shared[0][0]} is shared with {shared[0][1]}"
            elif not (reason := _obstacle(node)):
                dtypes = {k: getattr(node, k, None) for k in ("dtype", "param_dtype")}
                options = {"policy": as_policy(policy, **dtypes), "rngs": rngs}
                is_readout = any(fnmatchcase(path, pattern) for pattern in readout)
                new, reason = _counterpart(node, options, keep_function, max_length, is_readout)
            became = "" if new is None else type(new).__name__.lstrip("_")
            entries.append(Rescaled(path=path, kind=kind, became=became, reason=reason))
            new = node if new is None else new
        else:
            children = children_of(node)
            if own := [str(name) for name, child in children if isinstance(child, nnx.Param)]:
                reason = f"it holds {', '.join(own)}: rewrite its computation with unitscale.ops"
                entries.append(Rescaled(path=path, kind=kind, became="", reason=reason))
            replaced = {
                name: other
                for name, child in children
                if (other := replacement(child, join(path, name))) is not child
            }
            new = _with_children(node, replaced)
        known[id(node)] = node, new
        return new

    copy = replacement(copy, "")
    linear = [entry.path for entry in entries if entry.kind == "Linear"]
    for pattern in readout:
        if not any(fnmatchcase(path, pattern) for path in linear):
            raise ValueError(
                f"unitscale.nn.unit_scale: readout must match paths of nnx.Linear; {pattern!r} "
                f"matches none of {', '.join(linear)}"
            )
    return copy, UnitScaleReport(tuple(entries))


def _with_children(node: Any, replaced: dict[Any, Any]) -> Any:
    """Replace children of a module or container, in place unless it is a tuple."""
    if isinstance(node, tuple):
        children = [replaced.get(i, child) for i, child in enumerate(node)]
        return getattr(node, "_make", tuple)(children) if replaced else node
    for name, new in replaced.items():
        if isinstance(node, nnx.Pytree):
            setattr(node, str(name), new)
        else:
            node[name] = new
    return node


class _Arrays(nnx.Module):
    """A layer that returns arrays, as the code of a plain model expects."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs).value  # pyright: ignore[reportAttributeAccessIssue]


def _unwrapped(layer: type[nnx.Module]) -> Any:
    new = type(f"_{layer.__name__}", (_Arrays, layer), {"__module__": __name__})
    return globals().setdefault(new.__name__, new)  # where pickle looks for it


_Readout = _unwrapped(Readout)


class _Embed(_Arrays, Embed):
    def attend(self, x: Any) -> Any:
        """Return logits as an array."""
        return super().attend(x).value


class _MultiHeadAttention(_Arrays, MultiHeadAttention):
    def __call__(self, *args: Any, decode: bool | None = None, **kwargs: Any) -> Any:
        if decode:
            raise ValueError(
                "unitscale.nn.unit_scale: a unit-scaled nnx.MultiHeadAttention takes no "
                "decode=True; call its method decode, with a cache of init_cache"
            )
        return super().__call__(*args, **kwargs)


# The counterpart of each of Flax's layers, and the attributes that its constructor takes.
_LAYERS: dict[type, tuple[Any, str]] = {
    nnx.Linear: (_unwrapped(Dense), "in_features out_features"),
    nnx.Conv: (
        _unwrapped(Conv),
        "in_features out_features kernel_size strides padding input_dilation kernel_dilation "
        "feature_group_count",
    ),
    nnx.ConvTranspose: (
        _unwrapped(ConvTranspose),
        "in_features out_features kernel_size strides padding kernel_dilation",
    ),
    nnx.Einsum: (_unwrapped(Einsum), "einsum_str kernel_shape"),
    nnx.Embed: (_Embed, "num_embeddings features"),
    nnx.LayerNorm: (_unwrapped(LayerNorm), "num_features epsilon"),
    nnx.RMSNorm: (_unwrapped(RMSNorm), "num_features epsilon"),
    nnx.GroupNorm: (_unwrapped(GroupNorm), "num_groups epsilon"),
    nnx.BatchNorm: (
        _unwrapped(BatchNorm),
        "num_features epsilon momentum use_running_average",
    ),
    nnx.Dropout: (
        _unwrapped(Dropout),
        "rate broadcast_dims deterministic rng_collection rngs",
    ),
    nnx.MultiHeadAttention: (_MultiHeadAttention, ""),
}
OTHERS = (nnx.LinearGeneral, nnx.InstanceNorm, nnx.LoRA, nnx.RNNCellBase, *NORMALIZERS)
# The names of parameters and statistics in Flax's layers, and their names here.
_VARIABLES = {n: n for n in ("kernel", "bias", "embedding", "mean", "var")} | {"scale": "gain"}


def _counterpart(
    layer: Any,
    options: dict[str, Any],
    keep_function: bool,
    max_length: int | None,
    is_readout: bool,
) -> tuple[Any, str]:
    """Return a replacement and a note on what else changed, or None and the reason."""
    if isinstance(layer, nnx.MultiHeadAttention):
        return _attention(layer, options, keep_function, max_length)
    if reason := _difference(layer, keep_function):
        return None, reason
    kind, names = _LAYERS[type(layer)]
    given = {name: getattr(layer, name) for name in names.split()}
    for name in given.keys() & {"deterministic", "use_running_average"}:
        given[name] = bool(given[name])  # Flax's may be None
    if isinstance(layer, nnx.GroupNorm):
        given["num_features"] = layer.num_groups * layer.group_size
    if isinstance(layer, nnx.Einsum):
        given["bias_shape"] = _einsum_bias(layer)
    for name, flag in (("bias", "use_bias"), ("scale", "use_scale")):
        if hasattr(layer, name) and not isinstance(layer, nnx.Einsum):
            given[flag] = getattr(layer, name) is not None
    for name in ("kernel", "bias", "scale", "embedding"):
        if sharding := _sharding(getattr(layer, name, None)):
            given[f"{name}_metadata"] = sharding
    if not isinstance(layer, nnx.Dropout):
        given |= options
    is_readout = is_readout and isinstance(layer, nnx.Linear)
    new = (_Readout if is_readout else kind)(**given)
    if not keep_function:
        return new, ""
    forward = 1.0
    if isinstance(layer, nnx.Conv | nnx.ConvTranspose):
        gaps = layer.input_dilation if isinstance(layer, nnx.Conv) else layer.strides
        forward = rules.conv(new.kernel.shape, 1, 1, input_dilation=gaps or 1).fwd
    elif isinstance(layer, nnx.Linear | nnx.Einsum):
        rule = rules.readout if is_readout else rules.dense
        forward = rule(new.kernel.fan_in, new.kernel.fan_out, 1).fwd
    _copy(layer, new, forward)
    if isinstance(layer, nnx.Embed):
        return new, f"attend is divided by {layer.features} features"
    return new, ""


def _difference(layer: Any, keep_function: bool) -> str:
    """Return an option of a layer that its counterpart lacks; "" if there is none."""
    if isinstance(layer, nnx.Conv | nnx.ConvTranspose):
        if layer.mask is not None:
            return "it has a mask"
        transposed = isinstance(layer, nnx.ConvTranspose)
        if transposed and (layer.transpose_kernel or layer.padding == "CIRCULAR"):
            return "it has a transposed kernel or circular padding"
    if isinstance(layer, nnx.Einsum):
        if problem := einsum_problem(layer.einsum_str):
            return problem
        bias = _einsum_bias(layer)
        if bias is not None and math.prod(bias) != math.prod(layer.bias_shape or ()):
            return f"its bias, {layer.bias_shape}, is not one of the kernel's outputs, {bias}"
    if isinstance(layer, nnx.LayerNorm | nnx.RMSNorm | nnx.GroupNorm | nnx.BatchNorm):
        last = all(getattr(layer, name, -1) == -1 for name in ("axis", "feature_axes"))
        usual = None if isinstance(layer, nnx.GroupNorm) else -1
        if not last or getattr(layer, "reduction_axes", usual) != usual:
            return "its axes are not the default ones"
        if layer.axis_name is not None:
            return "it has an axis_name"
    if isinstance(layer, nnx.Dropout) and keep_function and layer.rate:
        return "in evaluation it would multiply by (1 - rate)^1/2"
    return ""


def _einsum_bias(layer: nnx.Einsum) -> tuple[int, ...] | None:
    """Return the shape of a bias over the kernel's output axes, in their order."""
    if layer.bias_shape is None:
        return None
    spec = einsum_contraction(layer.einsum_str, 0)
    size = dict(zip(spec.rhs, layer.kernel_shape, strict=True))
    return tuple(size[c] for c in spec.out if c in size)


def _sharding(parameter: nnx.Param | None) -> dict[str, Any]:
    found = {} if parameter is None else parameter.get_metadata()
    return {n: found[n] for n in ("out_sharding", "mesh", "sharding_rules") if n in found}


def _copy(old: Any, new: Any, forward: float = 1.0) -> None:
    """Copy variables of a layer, so that both compute the same function."""
    for theirs, ours in _VARIABLES.items():
        value, own = getattr(old, theirs, None), getattr(new, ours, None)
        if value is not None and own is not None:
            array = value[...].reshape(own.shape)
            array = array / forward if ours == "kernel" else array
            own.set_value(array.astype(own.dtype))


def _attention(
    layer: nnx.MultiHeadAttention,
    options: dict[str, Any],
    keep_function: bool,
    length: int | None,
) -> tuple[Any, str]:
    if layer.normalize_qk or layer.decode or layer.attention_fn is not dot_product_attention:
        return None, "it normalizes queries, decodes, or has its own attention_fn"
    if any(v is not None for k, v in vars(layer).items() if "_dot_general" in k):
        return None, "it has its own dot_general"
    if keep_function and length is None:
        return None, "give max_length=, which the factor of attention depends on"
    # Flax divides logits by the root of the head size, `ops.dot_product_attention` by the size.
    mult = layer.head_dim**0.5 if keep_function else 1.0
    new = _MultiHeadAttention(
        layer.num_heads,
        layer.in_features,
        layer.qkv_features,
        layer.out_features,
        layer.num_kv_heads,
        layer.in_kv_features,
        use_bias=layer.use_bias,
        max_length=length,
        mult=mult,
        dropout_rate=layer.dropout_rate,
        deterministic=bool(layer.deterministic),
        **options,
    )
    if keep_function and length is not None:
        factor = rules.dot_product_attention(
            layer.head_dim, length, is_causal=False, mult=mult, dropout_rate=layer.dropout_rate
        ).fwd
        for name, before in (("query", 1.0), ("key", 1.0), ("value", 1.0), ("out", factor)):
            own: Any = getattr(new, name)
            forward = rules.dense(own.in_features, own.out_features, 1).fwd
            _copy(getattr(layer, name), own, forward * before)
    sharded = any(_sharding(layer.query.kernel).values())
    return new, "the sharding of its kernels is not kept" if sharded else ""


# Attributes that may hold custom functions, and their default values.
_FUNCTIONS = (
    *("dot_general", "dot_general_cls", "einsum_op", "conv_general_dilated"),
    *("promote_dtype", "qkv_promote_dtype", "out_promote_dtype", "ln_promote_dtype"),
    "preferred_element_type",
)
_USUAL = (None, lax.dot_general, jnp.einsum, lax.conv_general_dilated, promote_dtype)


def variables_of(model: Any) -> Iterator[tuple[str, nnx.Variable]]:
    """Yield the dotted path and variable of all but random keys; shared ones once per path."""
    for path, node in nodes_of(model):
        for name, child in children_of(node):
            if isinstance(child, nnx.Variable) and not isinstance(child, nnx.RngState):
                yield join(path, name), child


def _obstacle(layer: Any) -> str:
    """Return a customization that the replacement of a layer would lose; "" if there is none."""
    for name in _FUNCTIONS:
        if getattr(layer, name, None) not in _USUAL:
            return f"it has its own {name}"
    for name, variable in variables_of(layer):
        if type(variable) not in (nnx.Param, nnx.BatchStat, nnx.Cache):
            return f"its {name} is a {type(variable).__name__}"
    layer = layer.query if isinstance(layer, nnx.MultiHeadAttention) else layer
    if isinstance(layer, nnx.Dropout):
        stacked = layer.rngs is not None and layer.rngs.key.ndim > 0
    elif hasattr(layer, "kernel"):
        stacked = layer.kernel.ndim > kernel_rank(layer)
    else:
        rank = 2 if isinstance(layer, nnx.Embed) else 1
        stacked = any(variable.ndim > rank for _, variable in variables_of(layer))
    return "nnx.vmap has stacked it" if stacked else ""
