"""Convolution layers."""

import math
from collections.abc import Sequence

from flax import nnx

from .. import ops
from ..core import ScaledArray
from ..rules import Constraint
from ._amax_state import amax_state, read_state
from ._param import constant, read, weight
from ._policy import PolicyLike, as_policy


class Conv(nnx.Module):
    """A convolution of any rank, channels last, as `flax.nnx.Conv`.

    Scaling:
        `ops.conv`: y = fan_in^-1/2 * conv(x, kernel) + bias; kernel from N(0, 1), bias zero.

    Args:
        in_features: input channels.
        out_features: output channels.
        kernel_size: one size per spatial dimension, or an integer for one dimension.
        strides: one stride, or one per spatial dimension.
        padding: "SAME", "VALID", "CAUSAL", an integer, or an integer or (low, high) pair for each
            dimension.
        kernel_dilation: one dilation, or one per spatial dimension.
        feature_group_count: number of groups, dividing in_features and out_features.
        use_bias: whether to add a bias.
        constraint: how the output and the input gradient come to share a factor.
        policy: formats; a `Policy` or the name of a preset.
        rngs: streams of random keys; parameters draw from "params".

    Raises:
        ValueError: if the groups do not divide the features or the policy is unknown; when
            called, if the shapes do not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> layer = Conv(3, 8, (3, 3), rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((1, 5, 5, 3))).shape
        (1, 5, 5, 8)

    References:
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, scaled ops (conv1d).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | Sequence[int],
        strides: int | Sequence[int] = 1,
        *,
        padding: str | int | Sequence[int | tuple[int, int]] = "SAME",
        kernel_dilation: int | Sequence[int] = 1,
        feature_group_count: int = 1,
        use_bias: bool = True,
        constraint: Constraint = "to_output_scale",
        policy: PolicyLike = "float32",
        rngs: nnx.Rngs,
    ) -> None:
        if in_features % feature_group_count or out_features % feature_group_count:
            raise ValueError(
                "unitscale.nn.Conv: feature_group_count must divide in_features and out_features; "
                f"got {feature_group_count}, {in_features}, {out_features}"
            )
        self.policy = as_policy(policy)
        self.constraint: Constraint = constraint
        self.kernel_size = (kernel_size,) if isinstance(kernel_size, int) else tuple(kernel_size)
        self.strides = strides if isinstance(strides, int) else tuple(strides)
        self.padding = padding if isinstance(padding, (str, int)) else tuple(padding)
        self.kernel_dilation = (
            kernel_dilation if isinstance(kernel_dilation, int) else tuple(kernel_dilation)
        )
        self.feature_group_count = feature_group_count
        positions = math.prod(self.kernel_size)
        self.kernel = weight(
            rngs,
            (*self.kernel_size, in_features // feature_group_count, out_features),
            self.policy,
            fan_in=positions * in_features // feature_group_count,
            fan_out=positions * out_features // feature_group_count,
        )
        self.bias = nnx.data(
            constant(0.0, (out_features,), self.policy, role="bias") if use_bias else None
        )
        self.amax = nnx.data(amax_state(self.policy.matmul_for("weight")))

    def __call__(self, x: ops.ArrayLike) -> ScaledArray:
        """Maps (*batch, *spatial, in_features) to (*batch, *spatial, out_features)."""
        x = self.policy.activation(x)
        leading = max(x.ndim - len(self.kernel_size) - 1, 0)
        batch = x.shape[:leading]
        if leading != 1:
            x = x.reshape(math.prod(batch), *x.shape[leading:])
        y = ops.conv(
            x,
            self.policy.weight(read(self.kernel), "weight"),
            read(self.bias),
            strides=self.strides,
            padding=self.padding,
            dilation=self.kernel_dilation,
            feature_group_count=self.feature_group_count,
            constraint=self.constraint,
            config=self.policy.matmul_for("weight"),
            state=read_state(self.amax),
        )
        return y if leading == 1 else y.reshape(*batch, *y.shape[1:])
