"""The unit-scaled twin of each layer of a plain `flax.nnx` model."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.attention import dot_product_attention
from flax.nnx.nn.dtypes import promote_dtype
from jax import lax

from .. import rules
from ..quant import einsum_contraction, einsum_problem
from ._attention import MultiHeadAttention
from ._conv import Conv, ConvTranspose
from ._dropout import Dropout
from ._einsum import Einsum
from ._embed import Embed
from ._hooks import NORMALIZERS, children_of, joined, kernel_rank, nodes_of
from ._linear import Dense, Readout
from ._norm import BatchNorm, GroupNorm, LayerNorm, RMSNorm
from ._policy import PolicyLike, as_policy


@dataclasses.dataclass(frozen=True)
class Options:
    """What `unit_scale` was asked for, for one layer."""

    policy: PolicyLike
    keep_function: bool
    max_length: int | None
    readout: bool
    rngs: nnx.Rngs

    def of(self, layer: Any) -> dict[str, Any]:
        policy = as_policy(self.policy, dtype=layer.dtype, param_dtype=layer.param_dtype)
        return {"policy": policy, "rngs": self.rngs}


class _Arrays(nnx.Module):
    """A layer that returns arrays, as the code of a plain model takes them."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs).value  # pyright: ignore[reportAttributeAccessIssue]


class _Dense(_Arrays, Dense):
    pass


class _Readout(_Arrays, Readout):
    pass


class _Einsum(_Arrays, Einsum):
    pass


class _Conv(_Arrays, Conv):
    pass


class _ConvTranspose(_Arrays, ConvTranspose):
    pass


class _Embed(_Arrays, Embed):
    def attend(self, x: Any) -> Any:
        """As the layer's own, but an array."""
        return super().attend(x).value


class _LayerNorm(_Arrays, LayerNorm):
    pass


class _RMSNorm(_Arrays, RMSNorm):
    pass


class _GroupNorm(_Arrays, GroupNorm):
    pass


class _BatchNorm(_Arrays, BatchNorm):
    pass


class _Dropout(_Arrays, Dropout):
    pass


class _MultiHeadAttention(_Arrays, MultiHeadAttention):
    def __call__(self, *args: Any, decode: bool | None = None, **kwargs: Any) -> Any:
        if decode:
            raise ValueError(
                "unitscale.nn.unit_scale: the twin of nnx.MultiHeadAttention takes no decode=True; "
                "call its method decode, with a cache of init_cache"
            )
        return super().__call__(*args, **kwargs)


def _copy(new: Any, old: Any, forward: float = 1.0) -> None:
    """Sets the kernel and bias to those of a layer with the same function."""
    kernel = old.kernel[...].reshape(new.kernel.shape) / forward
    new.kernel.set_value(kernel.astype(new.kernel.dtype))
    if old.bias is not None:
        new.bias.set_value(old.bias[...].reshape(new.bias.shape).astype(new.bias.dtype))


def _copy_affine(new: Any, old: Any) -> None:
    for own, name in ((new.gain, "scale"), (new.bias, "bias")):
        if own is not None:
            own.set_value(getattr(old, name)[...].astype(own.dtype))


def _metadata(**parameters: nnx.Param | None) -> dict[str, Any]:
    """The shardings of parameters, as arguments of a constructor."""
    found = {k: {} if p is None else p.get_metadata() for k, p in parameters.items()}
    kept = ("out_sharding", "mesh", "sharding_rules")
    return {f"{k}_metadata": {n: m[n] for n in kept if n in m} for k, m in found.items()}


# What a layer may be given in place of the usual functions and formats.
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
    """Parameters and the like by dotted paths, at every place where they stand; no random keys."""
    for path, node in nodes_of(model):
        for name, child in children_of(node):
            if isinstance(child, nnx.Variable) and not isinstance(child, nnx.RngState):
                yield joined(path, name), child


def obstacle(layer: Any) -> str:
    """What a layer has and its twin would not; "" if there is nothing."""
    for name, usual in _FUNCTIONS.items():
        if getattr(layer, name, None) not in (None, *usual):
            return f"it has its own {name}"
    for name, variable in variables_of(layer):
        if type(variable) not in (nnx.Param, nnx.BatchStat, nnx.Cache):
            return f"its {name} is a {type(variable).__name__}"
    return "nnx.vmap has stacked it" if _is_stacked(layer) else ""


def _is_stacked(layer: Any) -> bool:
    """Whether variables lead with axes that the layer's own sizes do not know."""
    if isinstance(layer, nnx.MultiHeadAttention):
        layer = layer.query
    if isinstance(layer, nnx.Dropout):
        return layer.rngs is not None and layer.rngs.key.ndim > 0
    if hasattr(layer, "kernel"):
        return layer.kernel.ndim > kernel_rank(layer)
    rank = 2 if isinstance(layer, nnx.Embed) else 1
    return any(variable.ndim > rank for _, variable in variables_of(layer))


def linear(layer: nnx.Linear, options: Options) -> Any:
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
    """The shape of a bias for each output of the kernel, in the order of the result."""
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
    # Logits here are those of flax over the root of the head size, unless this takes it back.
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
        assert length is not None, "asked for above"
        factor = rules.dot_product_attention(
            layer.head_dim, length, is_causal=False, mult=mult, dropout_rate=layer.dropout_rate
        ).fwd
        for name, before in (("query", 1.0), ("key", 1.0), ("value", 1.0), ("out", factor)):
            own: Any = getattr(new, name)
            forward = rules.dense(own.in_features, own.out_features, 1).fwd
            _copy(own, getattr(layer, name), forward * before)
    sharded = any(_metadata(kernel=layer.query.kernel)["kernel_metadata"])
    return (new, "the sharding of its kernels is not kept") if sharded else new


# What makes the twin of a layer: it, or it and what changed, or why there is none.
KINDS: dict[type, Callable[[Any, Options], Any]] = {
    nnx.Linear: linear,
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
