"""Transformer layers and stacks."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from .. import ops, rules
from ..core import ScaledArray, shard_activations
from ._attention import KVCache, MultiHeadAttention
from ._given import given
from ._layer_scan import scan_layers, stack_layers, unstack_layers
from ._mlp import GATED, MLP, Activation
from ._norm import LayerNorm, RMSNorm
from ._param import set_depth
from ._policy import PolicyLike, as_policy

NormKind = Literal["layer", "rms"]
NormPlacement = rules.NormPlacement
Remat = Literal["none", "dots", "layer"]


def _choice(name: str, value: str, choices: Any) -> None:
    if value not in get_args(choices):
        raise ValueError(
            f"unitscale.nn: {name} must be one of {', '.join(get_args(choices))}; got {value!r}"
        )


class LayerFactors(NamedTuple):
    """What the layers of a stack differ in, as arrays that a scan runs along."""

    branch: jax.Array
    skip: jax.Array
    attention: jax.Array


class TransformerLayer(nnx.Module):
    """Attention and MLP, each a residual branch.

    Scaling:
        Each branch is `ops.residual` with its own tau; everything inside is unit scaled. The
        attention's factor counts what tokens share after the branches below
        (`rules.AttentionContext`), which are taken to be like this layer's own.

    On a mesh of `jax.set_mesh` that is left to the compiler, the residual stream lies over its axes
    fsdp and data (the batch) and context (tokens), whatever the weights lie over.

    Args:
        features: width of the residual stream.
        num_heads: number of attention heads.
        hidden_features: hidden size of the MLP; four times features by default.
        num_kv_heads: number of key and value heads; num_heads by default.
        taus: residual weights of the attention and of the MLP branch.
        taus_below: residual weights of the branches of all layers below, the lowest first.
        depth: number of residual branches of the whole stack, recorded on every parameter of the
            layer (norms too) for u-muP learning rates.
        norm: "rms" or "layer".
        norm_placement: "pre" (inside the branch), "post" (after the sum) or "none".
        activation: of the MLP; see `MLP`.
        is_causal: whether a token sees no later one.
        max_length: sequence length that the attention's factor is computed for.
        rotary_base: base of rotary positions; None for none.
        attention_mult: multiplier of the attention logits.
        attention_implementation: "auto", "plain", "chunked" or "cudnn": see
            `ops.dot_product_attention`.
        mlp_mult: multiplier of the activation's argument.
        mlp: makes the second branch, called as `MLP` is: ``functools.partial(MoE, experts=8)`` for
            a mixture of experts.
        use_bias: whether dense layers add biases.
        dropout_rate: rate of dropout on attention weights and on both branches' outputs.
        policy: formats; a `Policy` or the name of a preset.
        rngs: streams of random keys.

    Raises:
        ValueError: if a choice is unknown, or heads do not divide features.

    Example:
        >>> import jax.numpy as jnp
        >>> layer = TransformerLayer(32, 4, is_causal=True, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 10, 32))).shape
        (2, 10, 32)

    References:
        Vaswani et al., 2017, arXiv 1706.03762; Blake et al., "u-muP", 2024, arXiv 2407.17465.
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
        norm_placement: NormPlacement = "pre",
        activation: Activation = "gelu",
        is_causal: bool = False,
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
        _choice("activation", activation, Activation)
        _choice("norm", norm, NormKind)
        _choice("norm_placement", norm_placement, NormPlacement)
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
            max_length=max_length,
            rotary_base=rotary_base,
            mult=attention_mult,
            use_bias=use_bias,
            dropout_rate=dropout_rate,
            context=rules.AttentionContext(
                taus_below=taus_below,
                activation=getattr(jax.nn, activation.removesuffix(GATED)),
                gated=activation.endswith(GATED),
                mlp_mult=mlp_mult,
                norm_placement=norm_placement,
            ),
            implementation=attention_implementation,
            policy=policy,
            rngs=rngs,
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
        positions=None,
        deterministic: bool | None = None,
        factors: LayerFactors | None = None,
    ) -> ScaledArray:
        """Maps (batch, time, features) to the same shape; arguments as for the attention.

        ``factors`` take the place of the layer's own where a `TransformerStack` scans over layers.
        """
        dropout = given(deterministic=deterministic)
        factor = None if factors is None else factors.attention
        options = dropout | given(mask=mask, positions=positions, factor=factor)
        x = shard_activations(self.policy.activation(x))
        x = self._branch(x, 0, lambda h: self.attention(h, **options), factors)
        return self._branch(x, 1, lambda h: self.mlp(h, **dropout), factors)

    def decode(self, x: ops.ArrayLike, cache: KVCache) -> tuple[ScaledArray, KVCache]:
        """Maps the next tokens, given a cache of those before; returns the longer cache too."""
        caches = []

        def attend(h):
            y, longer = self.attention.decode(h, cache)
            caches.append(longer)
            return y

        x = self._branch(self.policy.activation(x), 0, attend)
        return self._branch(x, 1, lambda h: self.mlp(h, deterministic=True)), caches[0]

    def _branch(self, x, index: int, fn, factors: LayerFactors | None = None) -> ScaledArray:
        norm, tau = (self.attention_norm, self.mlp_norm)[index], self.taus[index]
        if factors is not None:
            tau = rules.ResidualFactors(factors.branch[index], factors.skip[index])
        if norm is None:
            return shard_activations(ops.residual(fn, x, tau))
        if self.norm_placement == "pre":
            return shard_activations(ops.residual(lambda h: fn(norm(h)), x, tau))
        return shard_activations(norm(ops.residual(fn, x, tau)))


class TransformerStack(nnx.Module):
    """A stack of transformer layers whose residual weights follow one scheme.

    Scaling:
        `rules.residual_taus` gives the tau of each of the 2 * num_layers branches.

    Args:
        num_layers: number of layers.
        features: width of the residual stream.
        num_heads: number of attention heads.
        hidden_features: hidden size of the MLPs; four times features by default.
        residual_scheme: "fixed", "running_mean" or "depth" (u-muP appendix G).
        residual_tau: tau of the scheme "fixed".
        residual_mult: multiplier of all branches in the scheme "depth".
        residual_attention_ratio: ratio of attention to MLP branches in the scheme "depth".
        remat: what of a layer the backward pass computes again, to save memory: "none"; "dots",
            all but the products of a weight (it costs few FLOPs); "layer", all of it, from the
            layer's input.
        scan: whether the layers are one module with stacked parameters, which `jax.lax.scan` runs:
            the program holds one layer, and compiles in the time of one. The numbers are those of
            the layers one by one, up to rounding (in 16 bits attention rounds once more).
            `with_scan` converts. Optimizers that take the number of axes for a parameter's kind
            (Adafactor, Muon) see one more.
        policy: formats; a `Policy` or the name of a preset.
        rngs: streams of random keys.
        **layer_options: further options of `TransformerLayer`.

    Raises:
        ValueError: if the scheme or another choice is unknown, or heads do not divide features.

    Example:
        >>> import jax.numpy as jnp
        >>> stack = TransformerStack(2, 32, 4, is_causal=True, rngs=nnx.Rngs(0))
        >>> stack(jnp.ones((2, 10, 32))).shape
        (2, 10, 32)

    References:
        Blake et al., "u-muP", 2024, arXiv 2407.17465, appendix G.
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
        scan: bool = False,
        policy: PolicyLike = "float32",
        rngs: nnx.Rngs,
        **layer_options: Any,
    ) -> None:
        _choice("remat", remat, Remat)
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

    def _hold(self, layers: Sequence[TransformerLayer], scan: bool) -> None:
        self.scan = scan
        self.own = tuple((layer.taus, layer.attention.context) for layer in layers)
        if not scan:
            self.layers = nnx.List(layers)
            return
        for layer in layers:  # what they differ in is kept in `own`
            layer.taus, layer.attention.context = layers[0].taus, None
        self.layers = nnx.data(stack_layers(layers))

    def layer_list(self) -> list[TransformerLayer]:
        """Returns the layers, first to last; those of a scan as copies."""
        if not self.scan:
            return list(self.layers)
        layers = unstack_layers(self.layers)
        for layer, (taus, context) in zip(layers, self.own, strict=True):
            layer.taus, layer.attention.context = taus, context
        return layers

    def with_scan(self, scan: bool) -> "TransformerStack":
        """Returns a stack with the same parameters that scans over its layers, or does not.

        Example:
            >>> stack = TransformerStack(2, 8, 2, rngs=nnx.Rngs(0)).with_scan(True)
            >>> stack.layers.mlp.up.kernel.shape
            (2, 8, 32)
        """
        new = nnx.clone(self)
        new._hold(new.layer_list(), scan)
        return new

    def _factors(self, length: int) -> LayerFactors:
        """The factors of all layers; their own axis is the first."""
        residuals = [[rules.residual(tau) for tau in taus] for taus, _ in self.own]
        attention = self.layers.attention
        return LayerFactors(
            branch=jnp.asarray([[r.branch for r in pair] for pair in residuals]),
            skip=jnp.asarray([[r.skip for r in pair] for pair in residuals]),
            attention=jnp.asarray([attention.factor_over(c, length) for _, c in self.own]),
        )

    def _checkpoint(self, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """`jax.checkpoint`, or the like, of a function of a layer, as ``remat`` says."""
        if self.remat == "none":
            return lambda apply: apply
        if self.remat == "layer":
            return checkpoint
        saved = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        return lambda apply: checkpoint(apply, policy=saved)

    def __call__(
        self,
        x: ops.ArrayLike,
        *,
        mask=None,
        positions=None,
        deterministic: bool | None = None,
    ) -> ops.ArrayLike:
        """Maps (batch, time, features) to the same shape; arguments as for the attention."""
        options = given(mask=mask, positions=positions, deterministic=deterministic)
        if self.scan:
            return scan_layers(
                lambda layer, h, factors: layer(h, **options, factors=factors),
                self.layers,
                self.layers.policy.activation(x),
                self._factors(x.shape[1]),
                checkpoint=self._checkpoint(jax.checkpoint),
            )

        def apply(layer, h):
            return layer(h, **options)

        apply = self._checkpoint(nnx.remat)(apply)
        for layer in self.layers:
            x = apply(layer, x)
        return x

    def init_cache(self, batch: int, max_length: int) -> tuple[KVCache, ...]:
        """Returns one empty cache per layer, as `MultiHeadAttention.init_cache`."""
        return tuple(layer.attention.init_cache(batch, max_length) for layer in self.layer_list())

    def decode(
        self, x: ops.ArrayLike, cache: tuple[KVCache, ...]
    ) -> tuple[ops.ArrayLike, tuple[KVCache, ...]]:
        """Maps the next tokens, given the caches of those before; returns the longer caches too."""
        longer = []
        for layer, layer_cache in zip(self.layer_list(), cache, strict=True):
            x, layer_cache = layer.decode(x, layer_cache)
            longer.append(layer_cache)
        return x, tuple(longer)
