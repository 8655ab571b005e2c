"""Feed-forward blocks: MLP and mixture of experts."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeAlias, Unpack

import jax
from flax import nnx
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from .. import ops
from ..core import ScaledArray, check_choice, custom_vjp, fsdp_devices
from ..quant import Unit
from ._linear import Dense, KernelOptions, _KernelLayer
from ._norm import Dropout
from ._params import given, read, weight
from ._policy import PolicyLike, as_policy

Activation = Literal["gelu", "silu", "relu", "tanh", "silu_glu", "gelu_glu"]
GATED = "_glu"
_DENSE_CALL = Dense.__call__  # nnx.tabulate replaces it while it runs


class MLP(nnx.Module):
    """A feed-forward block: ``down(f(up(x)))``, or gated: ``down(up(x) * f(gate(x)))``.

    Hidden units have unit variance. With gelu, silu and relu their mean is not zero, which raises
    the output's RMS to 1.11, 1.07 and 1.21. If hidden units are quantized without measured scales
    (`quant.Unit`), the backward pass recomputes them instead of storing them.

    Args:
        in_features: size of the input's last axis.
        hidden_features: size of the hidden layer.
        out_features: size of the output's last axis; in_features by default.
        activation: "gelu", "silu", "relu", "tanh", or gated "silu_glu", "gelu_glu".
        mult: multiplier of the activation's argument.
        use_bias: whether the dense layers add biases.
        dropout_rate: rate of dropout on the output; its keys come from the stream "dropout".

    Example:
        >>> import jax.numpy as jnp
        >>> MLP(8, 32, activation="silu_glu", rngs=nnx.Rngs(0))(jnp.ones((2, 8))).shape
        (2, 8)
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        *,
        activation: Activation = "gelu",
        mult: float = 1.0,
        use_bias: bool = True,
        dropout_rate: float = 0.0,
        policy: PolicyLike = "float32",
        rngs: nnx.Rngs,
    ) -> None:
        check_choice("unitscale.nn.MLP", "activation", activation, Activation)
        self.activation, self.mult = activation, mult
        out_features = in_features if out_features is None else out_features

        def dense(inputs: int, outputs: int) -> Dense:
            return Dense(inputs, outputs, use_bias=use_bias, policy=policy, rngs=rngs)

        self.up = dense(in_features, hidden_features)
        gated = activation.endswith(GATED)
        self.gate = nnx.data(dense(in_features, hidden_features) if gated else None)
        self.down = dense(hidden_features, out_features)
        self.dropout = Dropout(dropout_rate, rngs=rngs)

    def __call__(self, x: ops.ArrayLike, *, deterministic: bool | None = None) -> ScaledArray:
        """Map (..., in_features) to (..., out_features)."""
        inner = (self.up(x),) if self.gate is None else (self.up(x), self.gate(x))
        project = rematerialize(self._project) if self._rematerializes() else self._project
        return self.dropout(project(*inner), **given(deterministic=deterministic))

    def _project(self, *inner: ScaledArray) -> ScaledArray:
        return self.down(getattr(ops, self.activation)(*inner, mult=self.mult))

    def _rematerializes(self) -> bool:
        """Return whether the backward pass recomputes hidden units.

        Strategies that measure scales would have to read the recomputed units once more. Modules
        in place of ``down``, and replacements of `Dense.__call__`, may keep tracers, which must not
        leave the recomputed function.
        """
        if type(self.down).__call__ is not _DENSE_CALL:
            return False
        config = self.down.policy.matmul_for(self.down.role)
        return config is not None and isinstance(config.strategy, Unit)


def _rematerialized(jaxpr: Jaxpr, consts: list[Any], args: list[Any]) -> list[Any]:
    return jaxpr_as_fun(ClosedJaxpr(jaxpr, consts))(*args)


_custom = custom_vjp(_rematerialized, nondiff_argnums=(0,))


def _fwd(jaxpr: Jaxpr, consts: list[Any], args: list[Any]) -> tuple[list[Any], Any]:
    return _rematerialized(jaxpr, consts, args), (consts, args)


def _bwd(jaxpr: Jaxpr, residuals: Any, cotangents: list[Any]) -> Any:
    consts, args = residuals
    # Without a barrier, XLA may store and reuse the result of the forward pass.
    args = jax.lax.optimization_barrier(args)
    _, pull = jax.vjp(partial(_rematerialized, jaxpr), consts, args)
    return pull(cotangents)


_custom.defvjp(_fwd, _bwd)


def rematerialize(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``f`` with a backward pass that recomputes all but the arguments of ``f``.

    Unlike `jax.checkpoint`, it does not recompute captured values, such as cast weights, and its
    barrier does not cover the cotangent, so that XLA can fuse recomputation and derivative into one
    kernel. If the mesh axis fsdp shards weights, it is `jax.checkpoint`, saving gathered weights.

    References:
        Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, arXiv 1604.06174.
    """
    if fsdp_devices() > 1:
        return jax.checkpoint(f, policy=jax.checkpoint_policies.save_only_these_names("gathered"))

    def call(*args: Any) -> Any:
        # Traced only here, so that contexts such as `batch_over` apply to the backward pass too.
        closed, shape = jax.make_jaxpr(f, return_shape=True)(*args)
        out = _custom(closed.jaxpr, closed.consts, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), out)

    return call


Values: TypeAlias = tuple[Any, Any, Any]


class ExpertDense(_KernelLayer):
    """A dense layer with one kernel and bias per expert (`ops.grouped_dense`), as in `MoE`."""

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        **options: Unpack[KernelOptions],
    ) -> None:
        super().__init__(
            (experts, in_features, out_features),
            (experts, out_features) if use_bias else None,
            fan_in=in_features,
            fan_out=out_features,
            **options,
        )

    def values(self) -> Values:
        """Return kernels, biases and the state of the matmul's scales."""
        kernel = read(self.kernel)
        if self.policy.matmul_for("weight") is None:
            kernel = self.policy.activation(kernel)
        return kernel, read(self.bias), read(self.amax)

    def __call__(
        self, x: ops.ArrayLike, groups: ops.Groups, values: Values | None = None
    ) -> ScaledArray:
        """Map rows (rows, in_features), sorted by expert, to (rows, out_features).

        ``values`` replace the layer's own on a device that holds only some of the experts.
        """
        kernel, bias, state = self.values() if values is None else values
        x, config = self.policy.activation(x), self.policy.matmul_for("weight")
        return ops.grouped_dense(x, kernel, groups, bias, config=config, state=state)


class MoE(nnx.Module):
    """A mixture of experts (`ops.mixture`): a router sends each token to a few of many MLPs.

    The router's logits, gates and losses are float32 under every policy; its kernel has the role
    "weight", so that u-muP's learning rates move its logits as much as other activations.

    No token is dropped. On a mesh with the axis ``expert_axis`` (`jax.set_mesh`, or inside
    `jax.shard_map`) each device computes its own experts; `parallel.param_shardings` shards their
    parameters accordingly.

    Args:
        in_features: as in `MLP`, like all arguments that are not described here.
        hidden_features: size of the hidden layer of each expert.
        experts: number of experts.
        top_k: number of experts of each token.
        router_mult: multiplier of the router's logits (inverse temperature).
        renormalize: whether the gates of a token sum to 1; by default if ``top_k`` is above 1.
        load_balancing: weight of `ops.Routing.load_balancing_loss`. Its gradient is added to the
            gradient of the model's loss; its value is not added to the loss. 0 turns it off.
        z_loss: weight of `ops.Routing.z_loss`, which is added in the same way.
        expert_axis: name of the mesh axis that shards the experts.

    Example:
        >>> import jax.numpy as jnp
        >>> layer = MoE(8, 32, experts=4, activation="silu_glu", rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 5, 8))).shape
        (2, 5, 8)
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        *,
        experts: int = 8,
        top_k: int = 2,
        activation: Activation = "gelu",
        mult: float = 1.0,
        router_mult: float = 1.0,
        renormalize: bool | None = None,
        load_balancing: float = 0.0,
        z_loss: float = 0.0,
        use_bias: bool = True,
        dropout_rate: float = 0.0,
        expert_axis: str = "expert",
        policy: PolicyLike = "float32",
        rngs: nnx.Rngs,
    ) -> None:
        check_choice("unitscale.nn.MoE", "activation", activation, Activation)
        if not 1 <= top_k <= experts:
            raise ValueError(
                f"unitscale.nn.MoE: top_k must be from 1 to the {experts} experts; got {top_k}"
            )
        renormalize = top_k > 1 if renormalize is None else renormalize
        if renormalize and top_k == 1 < experts:
            raise ValueError(
                "unitscale.nn.MoE: one renormalized gate is always 1 and gives the router no "
                "gradient; got top_k=1, renormalize=True. Leave renormalize out."
            )
        self.activation, self.mult = activation, mult
        self.top_k, self.router_mult, self.renormalize = top_k, router_mult, renormalize
        self.load_balancing, self.z_loss = load_balancing, z_loss
        self.expert_axis, self.policy = expert_axis, as_policy(policy)
        self.out_features = in_features if out_features is None else out_features
        self.router = weight(
            rngs, (in_features, experts), self.policy, fan_in=in_features, fan_out=experts
        )

        def dense(inputs: int, outputs: int) -> ExpertDense:
            return ExpertDense(
                experts, inputs, outputs, use_bias=use_bias, policy=policy, rngs=rngs
            )

        layers = {"up": dense(in_features, hidden_features)}
        if activation.endswith(GATED):
            layers["gate"] = dense(in_features, hidden_features)
        layers["down"] = dense(hidden_features, self.out_features)
        self.experts = nnx.Dict(layers)
        self.dropout = Dropout(dropout_rate, rngs=rngs)

    def route(self, x: ops.ArrayLike) -> ops.Routing:
        """Choose experts for tokens (..., in_features); the result also has the router's losses."""
        return ops.route(
            self.policy.activation(x),
            read(self.router),
            self.top_k,
            mult=self.router_mult,
            renormalize=self.renormalize,
            out_features=self.out_features,
        )

    def __call__(self, x: ops.ArrayLike, *, deterministic: bool | None = None) -> ScaledArray:
        """Map (..., in_features) to (..., out_features)."""
        x = self.policy.activation(x)
        routing = self.route(x)
        values = {name: layer.values() for name, layer in self.experts.items()}
        y = ops.mixture(self._apply, x, routing, values, expert_axis=self.expert_axis)
        if self.load_balancing:
            loss = routing.load_balancing_loss()
            y = ops.attach_loss(y, loss, self.load_balancing / routing.shards)
        if self.z_loss:
            y = ops.attach_loss(y, routing.z_loss(), self.z_loss / routing.shards)
        return self.dropout(y, **given(deterministic=deterministic))

    def _apply(self, x: ScaledArray, values: dict[str, Any], groups: ops.Groups) -> ScaledArray:
        def dense(name: str, h: ops.ArrayLike) -> ScaledArray:
            return self.experts[name](h, groups, values[name])

        inner = [dense(name, x) for name in ("up", "gate") if name in values]
        return dense("down", getattr(ops, self.activation)(*inner, mult=self.mult))
