"""A feed-forward block of many experts, few of which see a token."""

from typing import Any, TypeAlias, get_args

from flax import nnx

from .. import ops
from ..core import ScaledArray
from ._amax_state import amax_state, read_state
from ._dropout import Dropout
from ._given import given
from ._mlp import GATED, Activation
from ._param import NO_METADATA, Initializer, Metadata, read, unit_normal, vector, weight, zeros
from ._policy import PolicyLike, as_policy

Values: TypeAlias = tuple[Any, Any, Any]


class ExpertDense(nnx.Module):
    """A dense layer of which each expert has its own kernel and bias; what `MoE` is made of.

    Scaling:
        `ops.grouped_dense`; kernels from N(0, 1), biases zero.

    Args:
        experts: number of experts.
        in_features: size of the rows.
        out_features: size of the output's rows.
        use_bias: whether to add biases.
        kernel_init: initializer of the kernels; factors assume unit variance.
        policy: formats; a `Policy` or the name of a preset.
        rngs: streams of random keys; parameters draw from "params".
        kernel_metadata: metadata of the kernels, such as ``{"out_sharding": ("expert",)}``.

    Raises:
        ValueError: if the policy is unknown; when called, if the shapes do not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> layer = ExpertDense(2, 16, 32, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((3, 16)), ops.Groups(jnp.array([1, 2]), rows=3, groups=2)).shape
        (3, 32)

    References:
        Jiang et al., "Mixtral of Experts", 2024, arXiv 2401.04088, section 2.1.
    """

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        kernel_init: Initializer = unit_normal,
        policy: PolicyLike = "float32",
        rngs: nnx.Rngs,
        kernel_metadata: Metadata = NO_METADATA,
    ) -> None:
        self.policy = as_policy(policy)
        self.kernel = weight(
            rngs,
            (experts, in_features, out_features),
            self.policy,
            fan_in=in_features,
            fan_out=out_features,
            init=kernel_init,
            metadata=kernel_metadata,
        )
        bias = None
        if use_bias:
            bias = vector(zeros, rngs, (experts, out_features), self.policy, role="bias")
        self.bias = nnx.data(bias)
        self.amax = nnx.data(amax_state(self.policy.matmul_for("weight")))

    def values(self) -> Values:
        """Returns kernels, biases and the state of the product's scales."""
        kernel = self.policy.weight(read(self.kernel), "weight")
        return kernel, read(self.bias), read_state(self.amax)

    def __call__(
        self, x: ops.ArrayLike, groups: ops.Groups, values: Values | None = None
    ) -> ScaledArray:
        """Maps rows (rows, in_features), sorted by expert, to (rows, out_features).

        ``values`` take the place of the layer's own, as those of a part of its experts do.
        """
        kernel, bias, state = self.values() if values is None else values
        return ops.grouped_dense(
            self.policy.activation(x),
            kernel,
            groups,
            bias,
            config=self.policy.matmul_for("weight"),
            state=state,
        )


class MoE(nnx.Module):
    """A mixture of experts: each token is seen by the few of many MLPs that a router chooses.

    Scaling:
        `ops.route`, `ops.mixture` and `ops.grouped_dense`: unit logits, unit experts, and a sum of
        them that is unit for the gates at initialisation. The router's logits, gates and losses are
        float32 under every policy. Its kernel has the role "weight": under u-muP's learning rates
        its logits move as much as other activations do, whatever the width.

        No token is dropped. On a mesh with the axis ``expert_axis`` (`jax.set_mesh`, or a
        `jax.shard_map` around) each of its devices computes its own experts;
        `parallel.param_shardings` divides their parameters so.

    Args:
        in_features: size of the input's last axis.
        hidden_features: size of the hidden layer of each expert.
        out_features: size of the output's last axis; in_features by default.
        experts: number of experts.
        top_k: number of experts of each token.
        activation: that of the experts, as of `MLP`.
        mult: multiplier of the activation's argument.
        router_mult: multiplier of the router's logits (inverse temperature).
        renormalize: whether the gates of a token sum to 1; by default if there are several, as a
            single gate of 1 would teach the router nothing.
        load_balancing: weight of `ops.Routing.load_balancing_loss`, whose gradient is added to that
            of the model's loss; its value is not. 0 for none.
        z_loss: the same of `ops.Routing.z_loss`.
        use_bias: whether the experts' layers add biases; the router has none.
        dropout_rate: rate of dropout on the output.
        expert_axis: name of the mesh axis that divides the experts.
        policy: formats; a `Policy` or the name of a preset.
        rngs: streams of random keys ("params", and "dropout" if there is any).

    Raises:
        ValueError: if the activation or policy is unknown, there are fewer experts than top_k, or
            one expert is to have a gate that is always 1.

    Example:
        >>> import jax.numpy as jnp
        >>> layer = MoE(8, 32, experts=4, activation="silu_glu", rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 5, 8))).shape
        (2, 5, 8)
        >>> layer.route(jnp.ones((2, 5, 8))).experts.shape
        (10, 2)

    References:
        Jiang et al., "Mixtral of Experts", 2024, arXiv 2401.04088, equations 1 and 2;
        Fedus, Zoph, Shazeer, "Switch Transformers", 2021, arXiv 2101.03961, equation 4;
        Zoph et al., "ST-MoE", 2022, arXiv 2202.08906, equation 5.
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
        if activation not in get_args(Activation):
            raise ValueError(
                "unitscale.nn.MoE: activation must be one of "
                f"{', '.join(get_args(Activation))}; got {activation!r}"
            )
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
        """Returns which experts the tokens of (..., in_features) see, and the router's losses."""
        return ops.route(
            self.policy.activation(x),
            read(self.router),
            self.top_k,
            mult=self.router_mult,
            renormalize=self.renormalize,
            out_features=self.out_features,
        )

    def __call__(self, x: ops.ArrayLike, *, deterministic: bool | None = None) -> ScaledArray:
        """Maps (..., in_features) to (..., out_features)."""
        x = self.policy.activation(x)
        routing = self.route(x)
        values = {name: layer.values() for name, layer in self.experts.items()}
        y = ops.mixture(self._apply, x, routing, values, expert_axis=self.expert_axis)
        for loss, coefficient in (
            (routing.load_balancing_loss, self.load_balancing),
            (routing.z_loss, self.z_loss),
        ):
            if coefficient:
                y = ops.attach_loss(y, loss(), coefficient / routing.shards)
        return self.dropout(y, **given(deterministic=deterministic))

    def _apply(self, x: ScaledArray, values: dict[str, Any], groups: ops.Groups) -> ScaledArray:
        def dense(name: str, h: ops.ArrayLike) -> ScaledArray:
            return self.experts[name](h, groups, values[name])

        f = getattr(ops, self.activation)
        if "gate" in values:
            hidden = f(dense("up", x), dense("gate", x), mult=self.mult)
        else:
            hidden = f(dense("up", x), mult=self.mult)
        return dense("down", hidden)
