"""Convolution layers."""

import math
from collections.abc import Sequence
from typing import Any

from flax import nnx

from .. import ops
from ..core import ScaledArray
from ..rules import Constraint
from ._amax_state import amax_state, read_state
from ._param import (
    NO_METADATA,
    Initializer,
    Metadata,
    read,
    unit_normal,
    vector,
    weight,
    zeros,
)
from ._placement import OutSharding, placed
from ._policy import PolicyLike, as_policy


class Conv(nnx.Module):
    """A convolution of any rank, channels last, as `flax.nnx.Conv`.

    Scaling:
        `ops.conv`: y = fan_in^-1/2 * conv(x, kernel) + bias; kernel from N(0, 1), bias zero.

    Args:
        in_features: input channels.
        out_features: output channels.
        kernel_size: one size per spatial dimension, or an integer for one dimension.
        strides: one stride, or one per spatial dimension; None is 1.
        padding: "SAME", "VALID", "CAUSAL", "CIRCULAR", "REFLECT", an integer, or an integer or
            (low, high) pair for each dimension.
        kernel_dilation: one dilation, or one per spatial dimension; None is 1.
        feature_group_count: number of groups, dividing in_features and out_features.
        use_bias: whether to add a bias.
        constraint: how the output and the input gradient come to share a factor.
        dtype: compute dtype in place of the policy's; None keeps that.
        param_dtype: dtype of parameters in place of the policy's; None keeps that.
        kernel_init: initializer of the kernel; factors assume unit variance.
        bias_init: initializer of the bias.
        policy: formats; a `Policy` or the name of a preset.
        rngs: streams of random keys; parameters draw from "params".
        kernel_metadata: metadata of the kernel, such as ``{"out_sharding": (None, "model")}``.
        bias_metadata: metadata of the bias.

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
        strides: int | Sequence[int] | None = 1,
        *,
        padding: str | int | Sequence[int | tuple[int, int]] = "SAME",
        kernel_dilation: int | Sequence[int] | None = 1,
        feature_group_count: int = 1,
        use_bias: bool = True,
        constraint: Constraint = "to_output_scale",
        dtype: Any = None,
        param_dtype: Any = None,
        kernel_init: Initializer = unit_normal,
        bias_init: Initializer = zeros,
        policy: PolicyLike = "float32",
        rngs: nnx.Rngs,
        kernel_metadata: Metadata = NO_METADATA,
        bias_metadata: Metadata = NO_METADATA,
    ) -> None:
        if in_features % feature_group_count or out_features % feature_group_count:
            raise ValueError(
                "unitscale.nn.Conv: feature_group_count must divide in_features and out_features; "
                f"got {feature_group_count}, {in_features}, {out_features}"
            )
        self.policy = as_policy(policy, dtype=dtype, param_dtype=param_dtype)
        self.constraint: Constraint = constraint
        self.kernel_size = (kernel_size,) if isinstance(kernel_size, int) else tuple(kernel_size)
        self.strides = _sizes(strides)
        self.padding = padding if isinstance(padding, (str, int)) else tuple(padding)
        self.kernel_dilation = _sizes(kernel_dilation)
        self.feature_group_count = feature_group_count
        positions = math.prod(self.kernel_size)
        self.kernel = weight(
            rngs,
            (*self.kernel_size, in_features // feature_group_count, out_features),
            self.policy,
            fan_in=positions * in_features // feature_group_count,
            fan_out=positions * out_features // feature_group_count,
            init=kernel_init,
            metadata=kernel_metadata,
        )
        bias = None
        if use_bias:
            shape = (out_features,)
            bias = vector(bias_init, rngs, shape, self.policy, role="bias", metadata=bias_metadata)
        self.bias = nnx.data(bias)
        self.amax = nnx.data(amax_state(self.policy.matmul_for("weight")))

    def __call__(self, x: ops.ArrayLike, out_sharding: OutSharding = None) -> ScaledArray:
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
        y = y if leading == 1 else y.reshape(*batch, *y.shape[1:])
        return placed(y, out_sharding)


def _sizes(value: int | Sequence[int] | None) -> int | tuple[int, ...]:
    return 1 if value is None else value if isinstance(value, int) else tuple(value)
