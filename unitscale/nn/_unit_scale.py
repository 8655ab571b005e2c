"""Unit-scaled layers in place of those of a plain `flax.nnx` model.

What a module computes between its layers is Python code that cannot be changed from outside:
residual sums, activations and losses stay as they are, and the report says so.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
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
from ._conv import Conv, ConvTranspose
from ._convert import NORMALIZERS, kernel_rank
from ._embed import Embed
from ._linear import Dense, Einsum, Readout
from ._norm import BatchNorm, Dropout, GroupNorm, LayerNorm, RMSNorm
from ._paths import children_of, join, nodes_of, table
from ._policy import PolicyLike, as_policy

Model = TypeVar("Model")
UNSEEN = "not changed: activations, sums (residual ones too) and losses between layers"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rescaled:
    """The result of `unit_scale` for one layer.

    Attributes:
        path: dotted path of the layer; "" for the model itself.
        kind: its class before.
        became: its class now, of `unitscale.nn`; "" if it was not replaced.
        reason: why it was not replaced, or what changed; "" if there is nothing to say.

    Example:
        >>> Rescaled(path="head", kind="Linear", became="Dense", reason="").became
        'Dense'
    """

    path: str
    kind: str
    became: str
    reason: str


@dataclasses.dataclass(frozen=True)
class UnitScaleReport:
    """What `unit_scale` did to each layer. Printed, it is a table.

    Attributes:
        layers: one entry for each layer with parameters or dropout, and each module with
            parameters of its own, sorted by path.

    Example:
        >>> UnitScaleReport(()).changed
        ()
    """

    layers: tuple[Rescaled, ...]

    @property
    def changed(self) -> tuple[str, ...]:
        """Paths of the layers that are unit-scaled now."""
        return tuple(layer.path for layer in self.layers if layer.became)

    @property
    def skipped(self) -> dict[str, str]:
        """Paths of the other layers, and why."""
        return {layer.path: layer.reason for layer in self.layers if not layer.became}

    def __str__(self) -> str:
        """Return a summary, one row for each layer, and what the rows do not cover."""
        rows = [("layer", "class", "now", "why not, or what else")]
        rows += [(x.path, x.kind, x.became or "as before", x.reason) for x in self.layers]
        count = f"{len(self.changed)} of {len(self.layers)} layers unit-scaled"
        return "\n".join([count, *table(rows), UNSEEN])


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
        Each layer becomes its counterpart of `unitscale.nn`, and returns a plain array. Its
        parameters are drawn anew, or with ``keep_function`` are those of the model divided by the
        layer's forward factor: ``kernel * in^1/2`` for a Linear, of unit variance if the model is
        freshly initialised. Embedding tables then stay the same, whatever their variance.

        Backward factors suit a loss that applies each layer once and is differentiated by
        parameters. Trace a loss that applies layers to inputs of several sizes within
        `unitscale.batch_size`. A loss that contains a gradient by an input, such as forces and
        gradient penalties, needs plain layers: unit-scaled ones give a multiple of the derivative.

        The new layers are called as Flax's are, with the input as first argument, but norms take no
        ``mask=``, attention no ``sow_weights=``, ``is_causal=`` and ``decode=True``, an Einsum no
        equation per call, and `attend` of an Embed no ``out_sharding=``.

    Args:
        model: a module, which is not changed.
        policy: policy of the new layers. The dtypes of a layer replace those of the policy.
        keep_function: whether the new model computes the same function as the old one.
        readout: patterns (`fnmatch`) of paths of `nnx.Linear` layers that become `Readout`.
        max_length: number of keys that the factor of attention is computed for; by default that of
            each call. With ``keep_function`` attention needs it.
        rngs: streams of random keys for new parameters; needed unless ``keep_function``.

    Returns:
        The new model, and what was done to each layer, and why.

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
    policy = as_policy(policy)
    rngs = nnx.Rngs(0) if rngs is None else rngs
    entries: list[Rescaled] = []
    known: dict[int, tuple[Any, Any]] = {}  # holds the old node too, so that its id is not reused
    used: set[str] = set()

    def shared(layer: Any) -> str:
        """Return which parameter another layer has too, which replacements would not share."""
        found = (places[id(variable)] for _, variable in variables_of(layer))
        return next((f"{both[0]} is {both[1]} too" for both in found if len(both) > 1), "")

    def replacement(node: Any, path: str) -> Any:
        """Return the node's replacement, or the node with everything below it replaced."""
        if id(node) in known:
            return known[id(node)][1]
        known[id(node)] = node, node
        make = KINDS.get(type(node))
        if make is None and not isinstance(node, (*KINDS, *OTHERS)):
            children = children_of(node)
            own = [str(name) for name, child in children if isinstance(child, nnx.Param)]
            if own:
                note = f"its own {', '.join(own)}: write what it computes with unitscale.ops"
                kind = type(node).__name__
                entries.append(Rescaled(path=path, kind=kind, became="", reason=note))
            replaced = {
                name: new
                for name, child in children
                if (new := replacement(child, join(path, name))) is not child
            }
            known[id(node)] = node, _with_children(node, replaced)
            return known[id(node)][1]
        found = f"{type(node).__name__} is not converted" if make is None else ""
        matched = {p for p in readout if fnmatchcase(path, p)} if make is _linear else set()
        used.update(matched)
        found = found or shared(node) or obstacle(node)
        if make is not None and not found:
            options = Options(policy, keep_function, max_length, bool(matched), rngs)
            found = make(node, options)
        new, reason = found if isinstance(found, tuple) else (found, "")
        if isinstance(new, str):
            new, reason = node, new
        known[id(node)] = node, new
        became = "" if new is node else type(new).__name__.lstrip("_")
        entries.append(Rescaled(path=path, kind=type(node).__name__, became=became, reason=reason))
        return new

    copy = nnx.clone(model)
    places: dict[int, list[str]] = {}
    for place, variable in variables_of(copy):
        places.setdefault(id(variable), []).append(place)
    copy = replacement(copy, "")
    if unmatched := [p for p in readout if p not in used]:
        raise ValueError(
            f"unitscale.nn.unit_scale: readout must match paths of nnx.Linear; {unmatched[0]!r} "
            f"matches none of {', '.join(e.path for e in entries if e.kind == 'Linear')}"
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


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of `unit_scale`, for one layer."""

    policy: PolicyLike
    keep_function: bool
    max_length: int | None
    readout: bool
    rngs: nnx.Rngs

    def of(self, layer: Any) -> dict[str, Any]:
        """Return the policy with the layer's dtypes, and rngs."""
        policy = as_policy(self.policy, dtype=layer.dtype, param_dtype=layer.param_dtype)
        return {"policy": policy, "rngs": self.rngs}


class _Arrays(nnx.Module):
    """A layer that returns arrays, as the code of a plain model expects."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs).value  # pyright: ignore[reportAttributeAccessIssue]


def _returning_arrays(layer: type[nnx.Module]) -> Any:
    return type(f"_{layer.__name__}", (_Arrays, layer), {"__module__": __name__})


_Dense, _Readout, _Einsum = map(_returning_arrays, (Dense, Readout, Einsum))
_Conv, _ConvTranspose, _Dropout = map(_returning_arrays, (Conv, ConvTranspose, Dropout))
_LayerNorm, _RMSNorm = map(_returning_arrays, (LayerNorm, RMSNorm))
_GroupNorm, _BatchNorm = map(_returning_arrays, (GroupNorm, BatchNorm))


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


def _copy(new: Any, old: Any, forward: float = 1.0) -> None:
    """Copy kernel and bias from a layer, divided so that both compute the same function."""
    kernel = old.kernel[...].reshape(new.kernel.shape) / forward
    new.kernel.set_value(kernel.astype(new.kernel.dtype))
    if old.bias is not None:
        new.bias.set_value(old.bias[...].reshape(new.bias.shape).astype(new.bias.dtype))


def _copy_affine(new: Any, old: Any) -> None:
    for own, name in ((new.gain, "scale"), (new.bias, "bias")):
        if own is not None:
            own.set_value(getattr(old, name)[...].astype(own.dtype))


def _metadata(**parameters: nnx.Param | None) -> dict[str, Any]:
    """Return the shardings of parameters as arguments of a constructor."""
    found = {k: {} if p is None else p.get_metadata() for k, p in parameters.items()}
    kept = ("out_sharding", "mesh", "sharding_rules")
    return {f"{k}_metadata": {n: m[n] for n in kept if n in m} for k, m in found.items()}


# Functions that a layer may have been given, and their defaults.
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "dot_general": (lax.dot_general,),
    "dot_general_cls": (),
    "einsum_op": (jnp.einsum,),
    "conv_general_dilated": (lax.conv_general_dilated,),
    "preferred_element_type": (),
    **dict.fromkeys(
        ("promote_dtype", "qkv_promote_dtype", "out_promote_dtype", "ln_promote_dtype"),
        (promote_dtype,),
    ),
}


def variables_of(model: Any) -> Iterator[tuple[str, nnx.Variable]]:
    """Yield variables other than random keys by dotted path, shared ones under each path."""
    for path, node in nodes_of(model):
        for name, child in children_of(node):
            if isinstance(child, nnx.Variable) and not isinstance(child, nnx.RngState):
                yield join(path, name), child


def obstacle(layer: Any) -> str:
    """Return what a layer has and its replacement would not; "" if there is nothing."""
    for name, usual in _FUNCTIONS.items():
        if getattr(layer, name, None) not in (None, *usual):
            return f"it has its own {name}"
    for name, variable in variables_of(layer):
        if type(variable) not in (nnx.Param, nnx.BatchStat, nnx.Cache):
            return f"its {name} is a {type(variable).__name__}"
    return "nnx.vmap has stacked it" if _is_stacked(layer) else ""


def _is_stacked(layer: Any) -> bool:
    """Return whether variables have leading axes that nnx.vmap has added."""
    if isinstance(layer, nnx.MultiHeadAttention):
        layer = layer.query
    if isinstance(layer, nnx.Dropout):
        return layer.rngs is not None and layer.rngs.key.ndim > 0
    if hasattr(layer, "kernel"):
        return layer.kernel.ndim > kernel_rank(layer)
    rank = 2 if isinstance(layer, nnx.Embed) else 1
    return any(variable.ndim > rank for _, variable in variables_of(layer))


def _linear(layer: nnx.Linear, options: Options) -> Any:
    new = (_Readout if options.readout else _Dense)(
        layer.in_features,
        layer.out_features,
        use_bias=layer.bias is not None,
        **options.of(layer),
        **_metadata(kernel=layer.kernel, bias=layer.bias),
    )
    if options.keep_function:
        rule = rules.readout if options.readout else rules.dense
        _copy(new, layer, rule(layer.in_features, layer.out_features, 1).fwd)
    return new


def _conv(layer: nnx.Conv | nnx.ConvTranspose, options: Options) -> Any:
    if layer.mask is not None:
        return "it has a mask"
    given: dict[str, Any] = {
        "padding": layer.padding,
        "kernel_dilation": layer.kernel_dilation,
        "use_bias": layer.bias is not None,
    }
    if isinstance(layer, nnx.ConvTranspose):
        if layer.transpose_kernel or layer.padding == "CIRCULAR":
            return "it has a transposed kernel or circular padding"
        kind, gaps = _ConvTranspose, layer.strides
    else:
        kind, gaps = _Conv, layer.input_dilation
        given |= {"input_dilation": gaps, "feature_group_count": layer.feature_group_count}
    new = kind(
        layer.in_features,
        layer.out_features,
        layer.kernel_size,
        layer.strides,
        **given,
        **options.of(layer),
        **_metadata(kernel=layer.kernel, bias=layer.bias),
    )
    if options.keep_function:
        _copy(new, layer, rules.conv(new.kernel.shape, 1, 1, input_dilation=gaps or 1).fwd)
    return new


def _einsum(layer: nnx.Einsum, options: Options) -> Any:
    if problem := einsum_problem(layer.einsum_str):
        return problem
    bias = _einsum_bias(layer)
    if bias is not None and math.prod(bias) != math.prod(layer.bias_shape or ()):
        return f"its bias, {layer.bias_shape}, is not one of the kernel's outputs, {bias}"
    new = _Einsum(
        layer.einsum_str,
        layer.kernel_shape,
        bias,
        **options.of(layer),
        **_metadata(kernel=layer.kernel, bias=layer.bias),
    )
    if options.keep_function:
        _copy(new, layer, rules.dense(new.kernel.fan_in, new.kernel.fan_out, 1).fwd)
    return new


def _einsum_bias(layer: nnx.Einsum) -> tuple[int, ...] | None:
    """Return the shape of a bias over the kernel's output axes, in their order."""
    if layer.bias_shape is None:
        return None
    spec = einsum_contraction(layer.einsum_str, 0)
    size = dict(zip(spec.rhs, layer.kernel_shape, strict=True))
    return tuple(size[c] for c in spec.out if c in size)


def _embed(layer: nnx.Embed, options: Options) -> Any:
    new = _Embed(
        layer.num_embeddings,
        layer.features,
        **options.of(layer),
        **_metadata(embedding=layer.embedding),
    )
    if options.keep_function:
        new.embedding.set_value(layer.embedding[...])
        return new, f"attend is divided by {layer.features} features"
    return new


def _norm(layer: Any, options: Options) -> Any:
    last = all(getattr(layer, name, -1) == -1 for name in ("axis", "feature_axes"))
    usual = None if isinstance(layer, nnx.GroupNorm) else -1
    if not last or getattr(layer, "reduction_axes", usual) != usual:
        return "its axes are not the usual ones"
    if layer.axis_name is not None:
        return "it has an axis_name"
    given: dict[str, Any] = {"epsilon": layer.epsilon, "use_scale": layer.scale is not None}
    given |= options.of(layer)
    given |= _metadata(scale=layer.scale)
    if not isinstance(layer, nnx.RMSNorm):
        given |= {"use_bias": layer.bias is not None, **_metadata(bias=layer.bias)}
    if isinstance(layer, nnx.GroupNorm):
        new = _GroupNorm(layer.num_groups * layer.group_size, layer.num_groups, **given)
    elif isinstance(layer, nnx.BatchNorm):
        given |= {"momentum": layer.momentum}
        running = bool(layer.use_running_average)
        new = _BatchNorm(layer.num_features, use_running_average=running, **given)
        if options.keep_function:
            new.mean.set_value(layer.mean[...])
            new.var.set_value(layer.var[...])
    else:
        kind = _RMSNorm if isinstance(layer, nnx.RMSNorm) else _LayerNorm
        new = kind(layer.num_features, **given)
    if options.keep_function:
        _copy_affine(new, layer)
    return new


def _dropout(layer: nnx.Dropout, options: Options) -> Any:
    if options.keep_function and layer.rate:
        return "in evaluation it would multiply by (1 - rate)^1/2"
    return _Dropout(
        layer.rate,
        broadcast_dims=layer.broadcast_dims,
        deterministic=bool(layer.deterministic),
        rng_collection=layer.rng_collection,
        rngs=layer.rngs,
    )


def _attention(layer: nnx.MultiHeadAttention, options: Options) -> Any:
    if layer.normalize_qk or layer.decode or layer.attention_fn is not dot_product_attention:
        return "it normalizes queries, decodes, or has its own attention_fn"
    if any(v is not None for k, v in vars(layer).items() if "_dot_general" in k):
        return "it has its own dot_general"
    if options.keep_function and options.max_length is None:
        return "give max_length=, which the factor of attention depends on"
    # Flax divides logits by the root of the head size, `ops.dot_product_attention` by the size.
    mult = layer.head_dim**0.5 if options.keep_function else 1.0
    new = _MultiHeadAttention(
        layer.num_heads,
        layer.in_features,
        layer.qkv_features,
        layer.out_features,
        layer.num_kv_heads,
        layer.in_kv_features,
        use_bias=layer.use_bias,
        max_length=options.max_length,
        mult=mult,
        dropout_rate=layer.dropout_rate,
        deterministic=bool(layer.deterministic),
        **options.of(layer),
    )
    if options.keep_function:
        length = options.max_length
        assert length is not None, "checked above"
        factor = rules.dot_product_attention(
            layer.head_dim, length, is_causal=False, mult=mult, dropout_rate=layer.dropout_rate
        ).fwd
        for name, before in (("query", 1.0), ("key", 1.0), ("value", 1.0), ("out", factor)):
            own: Any = getattr(new, name)
            forward = rules.dense(own.in_features, own.out_features, 1).fwd
            _copy(own, getattr(layer, name), forward * before)
    sharded = any(_metadata(kernel=layer.query.kernel)["kernel_metadata"])
    return (new, "the sharding of its kernels is not kept") if sharded else new


# Each returns a replacement, a replacement and what changed, or why there is none.
KINDS: dict[type, Callable[[Any, Options], Any]] = {
    nnx.Linear: _linear,
    nnx.Conv: _conv,
    nnx.ConvTranspose: _conv,
    nnx.Einsum: _einsum,
    nnx.Embed: _embed,
    nnx.LayerNorm: _norm,
    nnx.RMSNorm: _norm,
    nnx.GroupNorm: _norm,
    nnx.BatchNorm: _norm,
    nnx.Dropout: _dropout,
    nnx.MultiHeadAttention: _attention,
}
OTHERS = (nnx.LinearGeneral, nnx.InstanceNorm, nnx.LoRA, nnx.RNNCellBase, *NORMALIZERS)
