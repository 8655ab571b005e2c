"""Layers with a kernel: dense, readout, einsum, convolutions and low-rank updates."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, Required, TypeAlias, TypedDict, Unpack

import jax
from flax import nnx

from .. import ops
from ..core import ScaledArray
from ..quant import einsum_contraction, einsum_problem
from ..rules import Constraint
from ._amax import amax_state
from ._params import (
    NO_METADATA,
    Initializer,
    Metadata,
    OutSharding,
    padding_of,
    read,
    reshard_output,
    unit_normal,
    unpadded,
    vector,
    weight,
    zeros,
)
from ._policy import PolicyLike, as_policy

Sizes: TypeAlias = int | Sequence[int] | None
Padding: TypeAlias = str | int | Sequence[int | tuple[int, int]]


class KernelOptions(TypedDict, total=False):
    """Keyword arguments of every layer with a kernel: see `unitscale.nn`."""

    dtype: Any
    param_dtype: Any
    kernel_init: Initializer
    bias_init: Initializer
    policy: PolicyLike
    rngs: Required[nnx.Rngs]
    kernel_metadata: Metadata
    bias_metadata: Metadata


class _KernelLayer(nnx.Module):
    """Base of layers with a kernel, an optional bias, and the amax state of their matmul."""

    role = "weight"

    def __init__(
        self,
        kernel_shape: tuple[int, ...],
        bias_shape: tuple[int, ...] | None,
        *,
        fan_in: int,
        fan_out: int,
        constraint: Constraint = "to_output_scale",
        padding: tuple[int, ...] = (),
        dtype: Any = None,
        param_dtype: Any = None,
        kernel_init: Initializer = unit_normal,
        bias_init: Initializer = zeros,
        policy: PolicyLike = "float32",
        rngs: nnx.Rngs,
        kernel_metadata: Metadata = NO_METADATA,
        bias_metadata: Metadata = NO_METADATA,
    ) -> None:
        self.constraint: Constraint = constraint
        self.policy = policy = as_policy(policy, dtype=dtype, param_dtype=param_dtype)
        self.kernel = weight(
            rngs,
            kernel_shape,
            policy,
            role=self.role,
            fan_in=fan_in,
            fan_out=fan_out,
            padding=padding,
            init=kernel_init,
            metadata=kernel_metadata,
        )
        self.bias = nnx.data(None)
        if bias_shape is not None:
            self.bias = vector(
                bias_init, rngs, bias_shape, policy, role="bias", metadata=bias_metadata
            )
        self.amax = nnx.data(amax_state(policy.matmul_for(self.role)))

    def _apply(
        self,
        op: Callable[..., ScaledArray],
        x: ops.ArrayLike,
        out_sharding: OutSharding = None,
        **options: Any,
    ) -> ScaledArray:
        """Call an op with the layer's parameters, formats and constraint."""
        kernel = unpadded(self.kernel) if self.role == "readout" else self.kernel.get_value()
        x, kernel, config = self.policy.operands(x, kernel, self.role)
        y = op(
            x,
            kernel,
            read(self.bias),
            constraint=self.constraint,
            config=config,
            state=read(self.amax),
            **options,
        )
        return reshard_output(y, out_sharding)


class Dense(_KernelLayer):
    """A dense layer (`ops.dense`), as `flax.nnx.Linear`.

    Example:
        >>> import jax.numpy as jnp
        >>> layer = Dense(16, 32, policy="float16", rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 16)))
        ScaledArray(float16[2,32], scale=None)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        constraint: Constraint = "to_output_scale",
        **options: Unpack[KernelOptions],
    ) -> None:
        self.in_features, self.out_features = in_features, out_features
        super().__init__(
            (in_features, out_features),
            (out_features,) if use_bias else None,
            fan_in=in_features,
            fan_out=out_features,
            constraint=constraint,
            **options,
        )

    def __call__(self, x: ops.ArrayLike, out_sharding: OutSharding = None) -> ScaledArray:
        """Map (..., in_features) to (..., out_features)."""
        return self._apply(ops.dense, x, out_sharding)


Linear = Dense
"""The name of `Dense` in `flax.nnx`."""


class LossOptions(TypedDict, total=False):
    """Options of `ops.readout_cross_entropy` that `cross_entropy` methods take."""

    mult: float
    where: jax.Array | None
    reduction: Literal["mean", "sum", "none"]
    chunk_size: int | None


class Readout(_KernelLayer):
    """The layer that produces the logits (`ops.readout`).

    The gradient of the input has its own factor, so the input must be a cut edge
    (`analysis.cut_edges`). FP8 policies leave its matmuls in the compute dtype, unless they were
    made by `Policy.with_quantized_readout`.

    Args:
        pad_to_multiple_of: pads the kernel with columns of zeros up to a multiple that matmul
            kernels prefer, such as 128. These columns are never trained, and produce no logits.

    Example:
        >>> import jax.numpy as jnp
        >>> Readout(16, 256, rngs=nnx.Rngs(0))(jnp.ones((2, 16))).shape
        (2, 256)
    """

    role = "readout"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = False,
        constraint: Constraint = None,
        pad_to_multiple_of: int = 1,
        **options: Unpack[KernelOptions],
    ) -> None:
        self.in_features, self.out_features = in_features, out_features
        super().__init__(
            (in_features, out_features),
            (out_features,) if use_bias else None,
            fan_in=in_features,
            fan_out=out_features,
            constraint=constraint,
            padding=(0, padding_of("Readout", out_features, pad_to_multiple_of)),
            **options,
        )

    def __call__(self, x: ops.ArrayLike, out_sharding: OutSharding = None) -> ScaledArray:
        """Map (..., in_features) to logits (..., out_features)."""
        return self._apply(ops.readout, x, out_sharding)

    def cross_entropy(
        self, x: ops.ArrayLike, labels: jax.Array, **options: Unpack[LossOptions]
    ) -> jax.Array:
        """Return the cross-entropy of labels (...) for inputs (..., in_features).

        Options are those of `ops.readout_cross_entropy`, which computes logits in chunks. With a
        bias, all logits are in memory at once.
        """
        if self.bias is not None:
            others: dict[str, Any] = {k: v for k, v in options.items() if k != "chunk_size"}
            return ops.softmax_cross_entropy(self(x), labels, **others)
        kernel, formats = self.policy.in_loss(read(self.kernel))
        return ops.readout_cross_entropy(
            self.policy.activation(x),
            kernel,
            labels,
            constraint=self.constraint,
            vocab=self.out_features,
            state=read(self.amax),
            **formats,
            **options,
        )


class Einsum(_KernelLayer):
    """A dense layer over any axes (`ops.einsum`), as `flax.nnx.Einsum`.

    Raises:
        ValueError: if ``einsum_str`` is not a matmul of an input and a kernel of this shape.

    Example:
        >>> import jax.numpy as jnp
        >>> layer = Einsum("btd,dhk->bthk", (16, 4, 5), (4, 5), rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 3, 16))).shape
        (2, 3, 4, 5)
    """

    def __init__(
        self,
        einsum_str: str,
        kernel_shape: Sequence[int],
        bias_shape: Sequence[int] | None = None,
        *,
        constraint: Constraint = "to_output_scale",
        **options: Unpack[KernelOptions],
    ) -> None:
        self.einsum_str, self.kernel_shape = einsum_str.replace(" ", ""), tuple(kernel_shape)
        spec = None if einsum_problem(einsum_str) else einsum_contraction(einsum_str, 0)
        if spec is None or len(spec.rhs) != len(self.kernel_shape):
            problem = einsum_problem(einsum_str) or f"the kernel is {self.kernel_shape}"
            raise ValueError(
                "unitscale.nn.Einsum: einsum_str must be a matmul of an input and a kernel, such "
                f"as '...a,ab->...b'; got {einsum_str!r}: {problem}"
            )
        size = dict(zip(spec.rhs, self.kernel_shape, strict=True))
        super().__init__(
            self.kernel_shape,
            None if bias_shape is None else tuple(bias_shape),
            fan_in=math.prod(size[c] for c in spec.summed),
            fan_out=math.prod(size[c] for c in spec.rhs if c not in spec.lhs),
            constraint=constraint,
            **options,
        )

    def __call__(self, inputs: ops.ArrayLike, *, out_sharding: OutSharding = None) -> ScaledArray:
        """Contract inputs with the kernel."""
        return self._apply(partial(ops.einsum, self.einsum_str), inputs, out_sharding)


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
        groups = feature_group_count
        if groups < 1 or in_features % groups or out_features % groups:
            raise ValueError(
                "unitscale.nn.Conv: feature_group_count must divide in_features and out_features; "
                f"got {groups}, {in_features}, {out_features}"
            )
        self.input_dilation = _sizes(input_dilation)
        self.feature_group_count = groups
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
    """A transposed convolution (`ops.conv_transpose`), as `flax.nnx.ConvTranspose`."""

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
            input_dilation=strides,  # of the equivalent convolution
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


class LoRA(nnx.Module):
    """A low-rank update (`ops.lora`), added to ``base_module`` if given, as `flax.nnx.LoRA`.

    Its matmuls run in the compute dtype, even under FP8 policies. Factors assume that at
    initialization ``a`` has unit variance and ``b`` is zero.

    Example:
        >>> import jax.numpy as jnp
        >>> layer = LoRA(16, 4, 32, base_module=Dense(16, 32, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
        >>> layer(jnp.ones((2, 16))).shape, layer.lora_a.shape
        ((2, 32), (16, 4))
    """

    def __init__(
        self,
        in_features: int,
        lora_rank: int,
        out_features: int,
        *,
        base_module: Callable[..., Any] | None = None,
        constraint: Constraint = "to_output_scale",
        dtype: Any = None,
        param_dtype: Any = None,
        a_initializer: Initializer = unit_normal,
        b_initializer: Initializer = zeros,
        lora_param_type: type[nnx.Param] = nnx.LoRAParam,
        policy: PolicyLike = "float32",
        rngs: nnx.Rngs,
        a_metadata: Metadata = NO_METADATA,
        b_metadata: Metadata = NO_METADATA,
    ) -> None:
        self.policy = as_policy(policy, dtype=dtype, param_dtype=param_dtype)
        self.base_module = nnx.data(base_module)
        self.constraint: Constraint = constraint

        def parameter(inputs: int, outputs: int, **options: Any) -> nnx.Param:
            shape, kind = (inputs, outputs), lora_param_type
            return weight(
                rngs, shape, self.policy, fan_in=inputs, fan_out=outputs, kind=kind, **options
            )

        self.lora_a = parameter(in_features, lora_rank, init=a_initializer, metadata=a_metadata)
        self.lora_b = parameter(lora_rank, out_features, init=b_initializer, metadata=b_metadata)

    def __call__(self, x: ops.ArrayLike, **kwargs: Any) -> ScaledArray:
        """Map (..., in_features) to (..., out_features); ``kwargs`` go to the base module."""
        base = None if self.base_module is None else self.base_module(x, **kwargs)
        return self.update(x=x, base=base)  # by keyword: see `given`

    def update(self, x: ops.ArrayLike, base: ops.ArrayLike | None) -> ScaledArray:
        """Add the low-rank update for ``x`` to ``base``, the output of a layer for ``x``."""
        a, b = (self.policy.activation(read(p)) for p in (self.lora_a, self.lora_b))
        return ops.lora(self.policy.activation(x), a, b, base, constraint=self.constraint)


class LoRALinear(Dense):
    """A `Dense` with a `LoRA` update, as `flax.nnx.LoRALinear`.

    It takes the arguments of `Dense`, and its dense parameters have the same names and initial
    values. If a dtype of the update is None, it is the dtype of the layer.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        lora_rank: int,
        lora_dtype: Any = None,
        lora_param_dtype: Any = None,
        a_initializer: Initializer = unit_normal,
        b_initializer: Initializer = zeros,
        lora_param_type: type[nnx.Param] = nnx.LoRAParam,
        rngs: nnx.Rngs,
        a_metadata: Metadata = NO_METADATA,
        b_metadata: Metadata = NO_METADATA,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, rngs=rngs, **options)
        self.lora = LoRA(
            in_features,
            lora_rank,
            out_features,
            constraint=self.constraint,
            dtype=lora_dtype,
            param_dtype=lora_param_dtype,
            a_initializer=a_initializer,
            b_initializer=b_initializer,
            lora_param_type=lora_param_type,
            policy=self.policy,
            rngs=rngs,
            a_metadata=a_metadata,
            b_metadata=b_metadata,
        )

    def __call__(self, x: ops.ArrayLike, out_sharding: OutSharding = None) -> ScaledArray:
        """Map (..., in_features) to (..., out_features)."""
        return reshard_output(self.lora.update(x=x, base=super().__call__(x)), out_sharding)
