"""Convolution layers."""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, Unpack

from .. import ops
from ..core import ScaledArray
from ..rules import Constraint
from ._params import KernelOptions, OutSharding, _KernelLayer, reshard_output

Sizes: TypeAlias = int | Sequence[int] | None
Padding: TypeAlias = str | int | Sequence[int | tuple[int, int]]


class _Convolution(_KernelLayer):
    """Base of convolutions: their kernel, and inputs with any number of batch axes."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | Sequence[int],
        strides: Sizes,
        padding: Padding,
        kernel_dilation: Sizes,
        *,
        input_dilation: Sizes,
        groups: int,
        use_bias: bool,
        **options: Any,
    ) -> None:
        self.kernel_size = (kernel_size,) if isinstance(kernel_size, int) else tuple(kernel_size)
        self.strides, self.kernel_dilation = _sizes(strides), _sizes(kernel_dilation)
        self.padding = padding if isinstance(padding, (str, int)) else tuple(padding)
        taps, gaps = math.prod(self.kernel_size), _sizes(input_dilation)
        gaps = gaps ** len(self.kernel_size) if isinstance(gaps, int) else math.prod(gaps)
        terms = in_features // groups
        super().__init__(
            (*self.kernel_size, terms, out_features),
            (out_features,) if use_bias else None,
            fan_in=max(taps * terms // gaps, 1),
            fan_out=taps * out_features // groups,
            **options,
        )

    def _convolve(
        self,
        op: Callable[..., ScaledArray],
        x: ops.ArrayLike,
        out_sharding: OutSharding,
        **more: Any,
    ) -> ScaledArray:
        leading = max(x.ndim - len(self.kernel_size) - 1, 0)
        batch = x.shape[:leading]
        if leading != 1:
            x = x.reshape(math.prod(batch), *x.shape[leading:])
        more |= {"strides": self.strides, "padding": self.padding, "dilation": self.kernel_dilation}
        y = self._apply(op, x, **more)
        y = y if leading == 1 else y.reshape(*batch, *y.shape[1:])
        return reshard_output(y, out_sharding)


class Conv(_Convolution):
    """A convolution of any rank, channels last (`ops.conv`), as `flax.nnx.Conv`.

    Raises:
        ValueError: if the groups do not divide the features.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> layer = Conv(3, 8, (3, 3), rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((1, 5, 5, 3))).shape
        (1, 5, 5, 8)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | Sequence[int],
        strides: Sizes = 1,
        *,
        padding: Padding = "SAME",
        input_dilation: Sizes = 1,
        kernel_dilation: Sizes = 1,
        feature_group_count: int = 1,
        use_bias: bool = True,
        constraint: Constraint = "to_output_scale",
        **options: Unpack[KernelOptions],
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
            padding,
            kernel_dilation,
            input_dilation=input_dilation,
            groups=feature_group_count,
            use_bias=use_bias,
            constraint=constraint,
            **options,
        )

    def __call__(self, x: ops.ArrayLike, out_sharding: OutSharding = None) -> ScaledArray:
        """Map (*batch, *spatial, in_features) to (*batch, *spatial, out_features)."""
        return self._convolve(
            ops.conv,
            x,
            out_sharding,
            input_dilation=self.input_dilation,
            feature_group_count=self.feature_group_count,
        )


class ConvTranspose(_Convolution):
    """A transposed convolution (`ops.conv_transpose`), as `flax.nnx.ConvTranspose`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> layer = ConvTranspose(3, 8, (4, 4), 2, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((1, 5, 5, 3))).shape
        (1, 10, 10, 8)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | Sequence[int],
        strides: Sizes = None,
        *,
        padding: Padding = "SAME",
        kernel_dilation: Sizes = None,
        use_bias: bool = True,
        constraint: Constraint = "to_output_scale",
        **options: Unpack[KernelOptions],
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            kernel_size,
            strides,
            padding,
            kernel_dilation,
            input_dilation=strides,  # seen as a convolution
            groups=1,
            use_bias=use_bias,
            constraint=constraint,
            **options,
        )

    def __call__(self, x: ops.ArrayLike, out_sharding: OutSharding = None) -> ScaledArray:
        """Map (*batch, *spatial, in_features) to (*batch, *spatial, out_features)."""
        return self._convolve(ops.conv_transpose, x, out_sharding)


def _sizes(value: Sizes) -> int | tuple[int, ...]:
    return 1 if value is None else value if isinstance(value, int) else tuple(value)
