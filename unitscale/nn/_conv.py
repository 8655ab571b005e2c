"""Convolution layers."""

import math
from collections.abc import Callable, Sequence
from functools import partial
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


class _Convolution(nnx.Module):
    """What convolution layers share: parameters, and examples along any number of axes."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | Sequence[int],
        strides: int | Sequence[int] | None,
        *,
        padding: str | int | Sequence[int | tuple[int, int]],
        kernel_dilation: int | Sequence[int] | None,
        input_dilation: int | Sequence[int] | None,
        feature_group_count: int = 1,
        use_bias: bool,
        constraint: Constraint,
        dtype: Any,
        param_dtype: Any,
        kernel_init: Initializer,
        bias_init: Initializer,
        policy: PolicyLike,
        rngs: nnx.Rngs,
        kernel_metadata: Metadata,
        bias_metadata: Metadata,
    ) -> None:
        self.policy = as_policy(policy, dtype=dtype, param_dtype=param_dtype)
        self.constraint: Constraint = constraint
        self.kernel_size = (kernel_size,) if isinstance(kernel_size, int) else tuple(kernel_size)
        self.strides, self.kernel_dilation = _sizes(strides), _sizes(kernel_dilation)
        self.padding = padding if isinstance(padding, (str, int)) else tuple(padding)
        taps, gaps = math.prod(self.kernel_size), _sizes(input_dilation)
        gaps = gaps ** len(self.kernel_size) if isinstance(gaps, int) else math.prod(gaps)
        terms = in_features // feature_group_count
        self.kernel = weight(
            rngs,
            (*self.kernel_size, terms, out_features),
            self.policy,
            fan_in=max(taps * terms // gaps, 1),
            fan_out=taps * out_features // feature_group_count,
            init=kernel_init,
            metadata=kernel_metadata,
        )
        bias = None
        if use_bias:
            shape = (out_features,)
            bias = vector(bias_init, rngs, shape, self.policy, role="bias", metadata=bias_metadata)
        self.bias = nnx.data(bias)
        self.amax = nnx.data(amax_state(self.policy.matmul_for("weight")))

    def _convolve(
        self, op: Callable[..., ScaledArray], x: ops.ArrayLike, out_sharding: OutSharding
    ) -> ScaledArray:
        x, kernel = self.policy.activation(x), read(self.kernel)
        leading = max(x.ndim - kernel.ndim + 1, 0)
        batch = x.shape[:leading]
        if leading != 1:
            x = x.reshape(math.prod(batch), *x.shape[leading:])
        y = op(
            x,
            self.policy.weight(kernel, "weight"),
            read(self.bias),
            constraint=self.constraint,
            config=self.policy.matmul_for("weight"),
            state=read_state(self.amax),
        )
        y = y if leading == 1 else y.reshape(*batch, *y.shape[1:])
        return placed(y, out_sharding)


class Conv(_Convolution):
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
        input_dilation: one distance of the inputs, or one per spatial dimension, zeros between;
            None is 1.
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
        input_dilation: int | Sequence[int] | None = 1,
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
        self.input_dilation = _sizes(input_dilation)
        self.feature_group_count = feature_group_count
        super().__init__(
            in_features,
            out_features,
            kernel_size,
            strides,
            padding=padding,
            kernel_dilation=kernel_dilation,
            input_dilation=input_dilation,
            feature_group_count=feature_group_count,
            use_bias=use_bias,
            constraint=constraint,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            bias_init=bias_init,
            policy=policy,
            rngs=rngs,
            kernel_metadata=kernel_metadata,
            bias_metadata=bias_metadata,
        )

    def __call__(self, x: ops.ArrayLike, out_sharding: OutSharding = None) -> ScaledArray:
        """Maps (*batch, *spatial, in_features) to (*batch, *spatial, out_features)."""
        op = partial(
            ops.conv,
            strides=self.strides,
            padding=self.padding,
            dilation=self.kernel_dilation,
            input_dilation=self.input_dilation,
            feature_group_count=self.feature_group_count,
        )
        return self._convolve(op, x, out_sharding)


class ConvTranspose(_Convolution):
    """A transposed convolution of any rank, channels last, as `flax.nnx.ConvTranspose`.

    Scaling:
        `ops.conv_transpose`: y = fan_in^-1/2 * conv_transpose(x, kernel) + bias, with fan_in =
        prod(kernel_size) * in_features / prod(strides); kernel from N(0, 1), bias zero.

    Args:
        in_features: input channels.
        out_features: output channels.
        kernel_size: one size per spatial dimension, or an integer for one dimension.
        strides: how many outputs an input has, one number, or one per spatial dimension; None is 1.
        padding: "SAME", "VALID", an integer, or an integer or (low, high) pair for each dimension.
        kernel_dilation: one dilation, or one per spatial dimension; None is 1.
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
        ValueError: if the policy is unknown; when called, if shapes or padding do not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> layer = ConvTranspose(3, 8, (4, 4), 2, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((1, 5, 5, 3))).shape
        (1, 10, 10, 8)

    References:
        Dumoulin, Visin, "A guide to convolution arithmetic", 2016, arXiv 1603.07285, chapter 4.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | Sequence[int],
        strides: int | Sequence[int] | None = None,
        *,
        padding: str | int | Sequence[int | tuple[int, int]] = "SAME",
        kernel_dilation: int | Sequence[int] | None = None,
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
        super().__init__(
            in_features,
            out_features,
            kernel_size,
            strides,
            padding=padding,
            kernel_dilation=kernel_dilation,
            input_dilation=strides,  # as a convolution sees it
            use_bias=use_bias,
            constraint=constraint,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            bias_init=bias_init,
            policy=policy,
            rngs=rngs,
            kernel_metadata=kernel_metadata,
            bias_metadata=bias_metadata,
        )

    def __call__(self, x: ops.ArrayLike, out_sharding: OutSharding = None) -> ScaledArray:
        """Maps (*batch, *spatial, in_features) to (*batch, *spatial, out_features)."""
        op = partial(
            ops.conv_transpose,
            strides=self.strides,
            padding=self.padding,
            dilation=self.kernel_dilation,
        )
        return self._convolve(op, x, out_sharding)


def _sizes(value: int | Sequence[int] | None) -> int | tuple[int, ...]:
    return 1 if value is None else value if isinstance(value, int) else tuple(value)
