"""Residual connections, transformer layers and stacks, and scans over layers."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from .. import ops, rules
from ..core import (
    ScaledArray,
    as_scaled,
    check_choice,
    is_scaled,
    shard_activations,
    to_float,
)
from ..quant import named_operands
from ._attention import KVCache, MultiHeadAttention
from ._mlp import GATED, MLP, Activation
from ._norm import LayerNorm, RMSNorm
from ._params import given, set_depth
from ._policy import PolicyLike, as_policy

NormKind = Literal["layer", "rms"]
Remat = Literal["none", "dots", "quantized", "layer"]
Scan = Literal[False, True, "auto"]
Layer = TypeVar("Layer", bound=nnx.Module)

# Fewest layers that scan="auto" stacks.
_STACKED = 8


class Residual(nnx.Module):
    """A residual branch (`ops.residual`): ``(tau * branch(x) + x) / (1 + tau^2)^1/2``.

    The sum keeps the dtype of the input. ``depth``, the number of residual branches in the stack,
    is recorded on the parameters of ``branch`` for u-muP; see `unitscale.rules.residual_taus`.
    """

    def __init__(self, branch: Callable[..., Any], *, tau: float, depth: int = 1) -> None:
        rules.residual(tau)  # checks tau
        self.branch, self.tau = branch, float(tau)
        if isinstance(branch, nnx.Module):
            set_depth(branch, depth)

    def __call__(self, x: ops.ArrayLike, *args: Any, **kwargs: Any) -> ScaledArray:
        """Apply the branch, with any further arguments, and add the skip connection."""
        return ops.residual(lambda h: self.branch(h, *args, **kwargs), x, self.tau)


class LayerFactors(NamedTuple):
    """Factors of each layer of a stack, as arrays that a scan maps over."""

    branch: jax.Array
    skip: jax.Array
    attention: jax.Array


class TransformerLayer(nnx.Module):
    """Attention and MLP, each a residual branch (`ops.residual`) with its own tau.

    The attention's factor accounts for the correlation between tokens that the layers below cause
    (`rules.AttentionContext`), and assumes that those layers are like this one. On a mesh with
    automatic axes (`jax.set_mesh`) the residual stream is sharded over the axes fsdp and data (the
    batch) and context (tokens).

    Args:
        features: width of the residual stream.
        num_heads: as in `MultiHeadAttention`, like all arguments that are not described here.
        hidden_features: hidden size of the MLP; four times features by default.
        taus: residual weights of the attention and of the MLP branch.
        taus_below: residual weights of the branches of all layers below, the lowest first.
        depth: number of residual branches of the whole stack, recorded on all parameters for u-muP.
        norm: "rms" or "layer".
        norm_placement: "pre" (inside the branch), "post" (after the sum) or "none".
        activation: as in `MLP`; ``mlp_mult`` multiplies its argument.
        mlp: constructor of the second branch, such as ``functools.partial(MoE, experts=8)``.
        dropout_rate: rate of dropout on attention weights and on both branches' outputs.
    """

    def __init__(
        self,
        features: int,
        num_heads: int,
        hidden_features: int | None = None,
        *,
        num_kv_heads: int | None = None,
        taus: tuple[float, float] = (0.5, 0.5),
        taus_below: tuple[float, ...] = (),
        depth: int = 2,
        norm: NormKind = "rms",
        norm_placement: rules.NormPlacement = "pre",
        activation: Activation = "gelu",
        is_causal: bool = False,
        local_window_size: int | None = None,
        max_length: int | None = None,
        rotary_base: float | None = None,
        attention_mult: float = 1.0,
        attention_implementation: ops.Implementation = "auto",
        mlp_mult: float = 1.0,
        mlp: Callable[..., Any] = MLP,
        use_bias: bool = True,
        dropout_rate: float = 0.0,
        policy: PolicyLike = "float32",
        rngs: nnx.Rngs,
    ) -> None:
        check_choice("unitscale.nn.TransformerLayer", "activation", activation, Activation)
        check_choice("unitscale.nn.TransformerLayer", "norm", norm, NormKind)
        check_choice(
            "unitscale.nn.TransformerLayer", "norm_placement", norm_placement, rules.NormPlacement
        )
        self.norm_placement, self.taus = norm_placement, tuple(map(float, taus))
        self.policy = as_policy(policy)

        def normalization():
            if norm_placement == "none":
                return nnx.data(None)
            kind = RMSNorm if norm == "rms" else LayerNorm
            return nnx.data(kind(features, policy=policy, rngs=rngs))

        self.attention_norm = normalization()
        self.attention = MultiHeadAttention(
            num_heads,
            features,
            num_kv_heads=num_kv_heads,
            is_causal=is_causal,
            local_window_size=local_window_size,
            max_length=max_length,
            rotary_base=rotary_base,
            mult=attention_mult,
            use_bias=use_bias,
            dropout_rate=dropout_rate,
            implementation=attention_implementation,
            policy=policy,
            rngs=rngs,
        )
        self.attention.context = rules.AttentionContext(
            taus_below=taus_below,
            activation=getattr(jax.nn, activation.removesuffix(GATED)),
            gated=activation.endswith(GATED),
            mlp_mult=mlp_mult,
            norm_placement=norm_placement,
        )
        self.mlp_norm = normalization()
        self.mlp = mlp(
            features,
            4 * features if hidden_features is None else hidden_features,
            activation=activation,
            mult=mlp_mult,
            use_bias=use_bias,
            dropout_rate=dropout_rate,
            policy=policy,
            rngs=rngs,
        )
        set_depth(self, depth)

    def __call__(
        self,
        x: ops.ArrayLike,
        *,
        mask=None,
        segment_ids=None,
        positions=None,
        deterministic: bool | None = None,
        factors: LayerFactors | None = None,
    ) -> ScaledArray:
        """Map (..., time, features) to the same shape; takes the arguments of the attention.

        A `TransformerStack` that scans over layers passes ``factors`` to replace the layer's own.
        """
        dropout = given(deterministic=deterministic)
        factor = None if factors is None else factors.attention
        options = dropout | given(
            mask=mask, segment_ids=segment_ids, positions=positions, factor=factor
        )
        x = shard_activations(self.policy.activation(x))
        x = self._branch(x, 0, lambda h: self.attention(h, **options), factors)
        return self._branch(x, 1, lambda h: self.mlp(h, **dropout), factors)

    def decode(self, x: ops.ArrayLike, cache: KVCache) -> tuple[ScaledArray, KVCache]:
        """Return the output for the next tokens, given the layer's cache, and the new cache."""

        def attend(h):
            nonlocal cache
            y, cache = self.attention.decode(h, cache)
            return y

        x = self._branch(self.policy.activation(x), 0, attend)
        return self._branch(x, 1, lambda h: self.mlp(h, deterministic=True)), cache

    def _branch(self, x, index: int, fn, factors: LayerFactors | None = None) -> ScaledArray:
        norm, tau = (self.attention_norm, self.mlp_norm)[index], self.taus[index]
        if factors is not None:
            tau = rules.ResidualFactors(factors.branch[index], factors.skip[index])
        if norm is None:
            return shard_activations(ops.residual(fn, x, tau))
        before = self.norm_placement == "pre"
        y = ops.residual((lambda h: fn(norm(h))) if before else fn, x, tau)
        return shard_activations(y if before else norm(y))


class TransformerStack(nnx.Module):
    """A stack of `TransformerLayer` modules, with residual weights from `rules.residual_taus`.

    Args:
        num_layers: number of layers.
        features: as in `TransformerLayer`, like all arguments that are not described here.
        num_heads: number of attention heads.
        residual_scheme: "fixed", "running_mean" or "depth" (u-muP appendix G).
        residual_tau: tau of the scheme "fixed".
        residual_mult: multiplier of all branches in the scheme "depth".
        residual_attention_ratio: ratio of attention to MLP branches in the scheme "depth".
        remat: what the backward pass recomputes: "none", nothing; "dots", everything except matmuls
            with weights (few FLOPs); "quantized", everything except the quantized inputs of matmuls
            (1 byte each in FP8), so that no activation is quantized twice; "layer", everything,
            from the layer's input.
        scan: whether the layers are one module with stacked parameters that `jax.lax.scan` runs.
            Then only one layer is compiled. Results are equal up to rounding. `with_scan` switches
            between the two. Stacked parameters have one more axis, which can change the updates of
            Adafactor and Muon, because both depend on the number of axes. "auto" stacks 8 layers or
            more, and scans over them on a CPU or if ``remat`` is "layer". Otherwise it runs them
            one by one, because a scan copies all residuals of the backward pass.

    Example:
        >>> stack = TransformerStack(2, 32, 4, is_causal=True, rngs=nnx.Rngs(0))
        >>> stack(jnp.ones((2, 10, 32))).shape
        (2, 10, 32)
    """

    def __init__(
        self,
        num_layers: int,
        features: int,
        num_heads: int,
        hidden_features: int | None = None,
        *,
        residual_scheme: rules.ResidualScheme = "depth",
        residual_tau: float = 0.5,
        residual_mult: float = 1.0,
        residual_attention_ratio: float = 1.0,
        remat: Remat = "none",
        scan: Scan = False,
        policy: PolicyLike = "float32",
        rngs: nnx.Rngs,
        **layer_options: Any,
    ) -> None:
        check_choice("unitscale.nn.TransformerStack", "remat", remat, Remat)
        check_choice("unitscale.nn.TransformerStack", "scan", scan, Scan)
        depth = 2 * num_layers
        taus = rules.residual_taus(
            residual_scheme,
            depth,
            tau=residual_tau,
            mult=residual_mult,
            attn_ratio=residual_attention_ratio,
        )
        self.remat = remat
        layers = [
            TransformerLayer(
                features,
                num_heads,
                hidden_features,
                taus=(taus[2 * i], taus[2 * i + 1]),
                taus_below=taus[: 2 * i],
                depth=depth,
                policy=policy,
                rngs=rngs,
                **layer_options,
            )
            for i in range(num_layers)
        ]
        self._hold(layers, scan)

    layers: Any

    def _hold(self, layers: Sequence[TransformerLayer], scan: Scan) -> None:
        self.scan: Scan = False if scan == "auto" and len(layers) < _STACKED else scan
        self.own = tuple((layer.taus, layer.attention.context) for layer in layers)
        if not self.scan:
            self.layers = nnx.List(layers)
            return
        for layer in layers:  # make them equal to stack them; `own` keeps the differences
            layer.taus, layer.attention.context = layers[0].taus, None
        self.layers = nnx.data(stack_layers(layers))

    def layer_list(self) -> list[TransformerLayer]:
        """Return the layers, first to last; copies if the stack scans."""
        if not self.scan:
            return list(self.layers)
        layers = unstack_layers(self.layers)
        for layer, (taus, context) in zip(layers, self.own, strict=True):
            layer.taus, layer.attention.context = taus, context
        return layers

    def with_scan(self, scan: Scan) -> "TransformerStack":
        """Return a stack with the same parameters and another value of ``scan``."""
        new = nnx.clone(self)
        new._hold(new.layer_list(), scan)
        return new

    def _factors(self, length: int) -> LayerFactors:
        """Return the factors of all layers, stacked on the first axis."""
        residuals = [[rules.residual(tau) for tau in taus] for taus, _ in self.own]
        attention = self.layers.attention
        return LayerFactors(
            branch=jnp.asarray([[r.branch for r in pair] for pair in residuals]),
            skip=jnp.asarray([[r.skip for r in pair] for pair in residuals]),
            attention=jnp.asarray([attention.factor_over(c, length) for _, c in self.own]),
        )

    def _checkpoint(self, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """Return `jax.checkpoint` or `nnx.remat` with the settings of ``remat``."""
        if self.remat == "none":
            return lambda apply: apply
        if self.remat == "layer":
            return checkpoint
        policies = jax.checkpoint_policies
        if self.remat == "dots":
            return functools.partial(checkpoint, policy=policies.dots_with_no_batch_dims_saveable)

        def with_names(apply: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(apply)
            def named(*args: Any) -> Any:
                with named_operands():
                    return apply(*args)

            return checkpoint(named, policy=policies.save_only_these_names("quantized"))

        return with_names

    def __call__(
        self,
        x: ops.ArrayLike,
        *,
        mask=None,
        segment_ids=None,
        positions=None,
        deterministic: bool | None = None,
    ) -> ops.ArrayLike:
        """Map (..., time, features) to the same shape; takes the arguments of the attention."""
        options = given(
            mask=mask,
            segment_ids=segment_ids,
            positions=positions,
            deterministic=deterministic,
        )
        if self.scan:
            one_by_one = self.scan == "auto" and self.remat != "layer"
            return scan_layers(
                lambda layer, h, factors: layer(h, **options, factors=factors),
                self.layers,
                self.layers.policy.activation(x),
                self._factors(x.shape[-2]),
                checkpoint=self._checkpoint(jax.checkpoint),
                one_by_one=one_by_one and jax.default_backend() != "cpu",
            )

        def apply(layer, h):
            return layer(h, **options)

        apply = self._checkpoint(nnx.remat)(apply)
        for layer in self.layers:
            x = apply(layer, x)
        return x

    def init_cache(self, batch: int, max_length: int) -> tuple[KVCache, ...]:
        """Return one empty cache per layer (`MultiHeadAttention.init_cache`)."""
        return tuple(layer.attention.init_cache(batch, max_length) for layer in self.layer_list())

    def decode(
        self, x: ops.ArrayLike, cache: tuple[KVCache, ...]
    ) -> tuple[ops.ArrayLike, tuple[KVCache, ...]]:
        """Return the output for the next tokens, given the layers' caches, and the new caches."""
        longer = []
        for layer, layer_cache in zip(self.layer_list(), cache, strict=True):
            x, layer_cache = layer.decode(x, layer_cache)
            longer.append(layer_cache)
        return x, tuple(longer)


def stack_layers(layers: Sequence[Layer]) -> Layer:
    """Return one module with the state of all layers, stacked on a leading axis.

    Use it with `jax.lax.scan` or `nnx.scan`. A ScaledArray has one scale per layer.

    Raises:
        ValueError: if there is no layer, or layers differ in more than their state.

    Example:
        >>> from unitscale import nn
        >>> layers = [nn.Dense(4, 4, rngs=nnx.Rngs(i)) for i in range(3)]
        >>> stack_layers(layers).kernel.shape
        (3, 4, 4)
    """
    split = [nnx.split(layer) for layer in layers]
    if not split:
        raise ValueError("unitscale.nn.stack_layers: expected at least one layer; got none")
    if any(graphdef != split[0][0] for graphdef, _ in split):
        raise ValueError(
            f"unitscale.nn.stack_layers: layers must have the same structure; got {len(split)} "
            "that differ in type, options or parameters"
        )
    states = [state for _, state in split]
    return nnx.merge(split[0][0], jax.tree.map(lambda *leaves: jnp.stack(leaves), *states))


def unstack_layers(stack: Layer) -> list[Layer]:
    """Return the layers that `stack_layers` stacked, one for each entry of the leading axis."""
    graphdef, params, rest = nnx.split(stack, nnx.Param, ...)
    leaves = jax.tree.leaves((params, rest))
    if not leaves:
        raise ValueError("unitscale.nn.unstack_layers: expected a module with stacked state")
    return [nnx.merge(graphdef, *item) for item in _unstacked((_with_stacked_scales(params), rest))]


def _unstacked(tree: Any) -> list[Any]:
    """Return the entries of the leading axis of all leaves, as a list of trees."""

    def entries(leaf: Any) -> list[Any]:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return [leaf[i] for i in range(leaf.shape[0])]
        # The derivative of a split is one concatenation, and that of indexing many sums.
        return [lax.squeeze(x, (0,)) for x in lax.split(leaf, (1,) * leaf.shape[0])]

    leaves, structure = jax.tree.flatten(tree)
    return [jax.tree.unflatten(structure, own) for own in zip(*map(entries, leaves), strict=True)]


def scan_layers(
    call: Callable[[Any, ScaledArray, Any], Any],
    stack: Any,
    x: Any,
    xs: Any,
    *,
    checkpoint: Callable[[Any], Any],
    one_by_one: bool = False,
) -> ScaledArray:
    """Apply the layers of a stack one after another, by `jax.lax.scan`.

    ``call`` maps a layer, its input and its entry of ``xs`` to the next input; ``checkpoint`` wraps
    the step. If layers change their state, the stack's state is updated. With ``one_by_one`` every
    layer is traced and compiled.
    """
    graphdef, params, rest = nnx.split(stack, nnx.Param, ...)
    old, structure = jax.tree.flatten(rest)
    changed: list[int] = []

    def body(h: Any, item: Any) -> Any:
        own, leaves, entry = item
        layer = nnx.merge(graphdef, own, jax.tree.unflatten(structure, leaves))
        y = call(layer, h, entry)
        new = jax.tree.leaves(nnx.split(layer, nnx.Param, ...)[2])
        changed[:] = [i for i, (a, b) in enumerate(zip(leaves, new, strict=True)) if a is not b]
        return y, [new[i] for i in changed]

    items = (_with_stacked_scales(params), old, xs)
    x = x if is_scaled(x) else ScaledArray(x)
    like = jax.eval_shape(
        lambda h, items: body(h, jax.tree.map(lambda a: a[0], items))[0], x, items
    )

    def step(h: ScaledArray, item: Any) -> Any:
        y, updates = body(h, item)
        return _with_scale_of(y, h), updates

    step, h = checkpoint(step), _with_scale_of(x, like)
    if one_by_one:
        results = []
        for item in _unstacked(items):
            h, updates = step(h, item)
            results.append(updates)
        y, updates = h, jax.tree.map(lambda *leaves: jnp.stack(leaves), *results)
    else:
        y, updates = lax.scan(step, h, items)
    if changed:
        for i, update in zip(changed, updates, strict=True):
            old[i] = update
        nnx.update(stack, jax.tree.unflatten(structure, old))
    return y


def _with_stacked_scales(params: Any) -> Any:
    """Give each layer its own scale where an optimizer chose one scale for all layers."""
    return jax.tree.map(
        lambda p: as_scaled(p, stack_axes=1) if is_scaled(p) else p, params, is_leaf=is_scaled
    )


def _with_scale_of(x: ScaledArray, like: ScaledArray) -> ScaledArray:
    """Return the same value with its scale broadcast to that of ``like``, for a scan's carry."""
    scales = [s for s in (x.full_scale, like.scale) if s is not None]
    if not scales:
        return x
    shape = jnp.broadcast_shapes(*(s.shape for s in scales))
    return ScaledArray(x.data, jnp.broadcast_to(to_float(x.full_scale), shape))
