"""Dense layers and the readout."""

from typing import Any, Literal, TypedDict, Unpack

import jax
from flax import nnx

from .. import ops
from ..core import ScaledArray
from ..rules import Constraint
from ._amax_state import amax_state, read_state
from ._param import (
    NO_METADATA,
    Initializer,
    Metadata,
    padding_of,
    read,
    unit_normal,
    unpadded,
    vector,
    weight,
    zeros,
)
from ._placement import OutSharding, placed
from ._policy import Policy, PolicyLike, as_policy


class LossOptions(TypedDict, total=False):
    """What `Readout.cross_entropy` and `Embed.cross_entropy` pass on."""

    mult: float
    where: jax.Array | None
    reduction: Literal["mean", "sum", "none"]
    chunk_size: int | None


class _Affine(nnx.Module):
    """What Dense and Readout share: parameters and formats."""

    role: str
    constraint: Constraint

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool,
        constraint: Constraint,
        policy: Policy,
        kernel_init: Initializer,
        bias_init: Initializer,
        rngs: nnx.Rngs,
        kernel_metadata: Metadata,
        bias_metadata: Metadata,
        padding: int = 0,
    ) -> None:
        self.in_features, self.out_features = in_features, out_features
        self.constraint, self.policy = constraint, policy
        self.kernel = weight(
            rngs,
            (in_features, out_features),
            self.policy,
            role=self.role,
            fan_in=in_features,
            fan_out=out_features,
            padding=(0, padding),
            init=kernel_init,
            metadata=kernel_metadata,
        )
        bias = None
        if use_bias:
            shape = (out_features,)
            bias = vector(bias_init, rngs, shape, policy, role="bias", metadata=bias_metadata)
        self.bias = nnx.data(bias)
        self.amax = nnx.data(amax_state(self.policy.matmul_for(self.role)))

    def _apply(self, op, x: ops.ArrayLike) -> ScaledArray:
        return op(
            self.policy.activation(x),
            self.policy.weight(unpadded(self.kernel), self.role),
            read(self.bias),
            constraint=self.constraint,
            config=self.policy.matmul_for(self.role),
            state=read_state(self.amax),
        )


class Dense(_Affine):
    """A dense layer, as `flax.nnx.Linear`.

    Scaling:
        `ops.dense`: y = in^-1/2 * x @ kernel + bias; kernel from N(0, 1), bias zero.

    Args:
        in_features: size of the input's last axis.
        out_features: size of the output's last axis.
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
        ValueError: if the policy is unknown; when called, if the shapes do not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> layer = Dense(16, 32, policy="float16", rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 16)))
        ScaledArray(float16[2,32], scale=None)

    References:
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, scaled ops.
    """

    role = "weight"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
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
            use_bias=use_bias,
            constraint=constraint,
            policy=as_policy(policy, dtype=dtype, param_dtype=param_dtype),
            kernel_init=kernel_init,
            bias_init=bias_init,
            rngs=rngs,
            kernel_metadata=kernel_metadata,
            bias_metadata=bias_metadata,
        )

    def __call__(self, x: ops.ArrayLike, out_sharding: OutSharding = None) -> ScaledArray:
        """Maps (..., in_features) to (..., out_features), divided over explicit axes as asked."""
        return placed(self._apply(ops.dense, x), out_sharding)


Linear = Dense
"""The name of `Dense` in `flax.nnx`."""


class Readout(_Affine):
    """The layer that produces the logits.

    Scaling:
        `ops.readout`: y = in^-1 * x @ kernel + bias; kernel from N(0, 1), bias zero. The input
        gradient is scaled freely (constraint None): its input must be a cut edge.

    Args:
        in_features: size of the input's last axis.
        out_features: number of logits.
        use_bias: whether to add a bias.
        constraint: None, or how the output and the input gradient come to share a factor.
        pad_to_multiple_of: the kernel gets columns of zeros, up to a multiple of this that matrix
            kernels like, such as 128. They never learn and are no logits; factors are those of
            out_features.
        dtype: compute dtype in place of the policy's; None keeps that.
        param_dtype: dtype of parameters in place of the policy's; None keeps that.
        kernel_init: initializer of the kernel; factors assume unit variance.
        bias_init: initializer of the bias.
        policy: formats; the role "readout" is exempt from quantization by default.
        rngs: streams of random keys; parameters draw from "params".
        kernel_metadata: metadata of the kernel, such as ``{"out_sharding": (None, "model")}``.
        bias_metadata: metadata of the bias.

    Raises:
        ValueError: if the policy is unknown or the multiple not positive; when called, if the
            shapes do not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> Readout(16, 256, rngs=nnx.Rngs(0))(jnp.ones((2, 16))).shape
        (2, 256)

    References:
        Blake et al., "u-muP", 2024, arXiv 2407.17465, table 2 (output weights).
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
            use_bias=use_bias,
            constraint=constraint,
            policy=as_policy(policy, dtype=dtype, param_dtype=param_dtype),
            kernel_init=kernel_init,
            bias_init=bias_init,
            rngs=rngs,
            kernel_metadata=kernel_metadata,
            bias_metadata=bias_metadata,
            padding=padding_of("Readout", out_features, pad_to_multiple_of),
        )

    def __call__(self, x: ops.ArrayLike, out_sharding: OutSharding = None) -> ScaledArray:
        """Maps (..., in_features) to logits (..., out_features), divided as asked."""
        return placed(self._apply(ops.readout, x), out_sharding)

    def cross_entropy(
        self, x: ops.ArrayLike, labels: jax.Array, **options: Unpack[LossOptions]
    ) -> jax.Array:
        """The loss of labels (...) under the logits of (..., in_features), which are never whole.

        As `ops.readout_cross_entropy`, with its options ``mult``, ``where``, ``reduction`` and
        ``chunk_size``. A readout with a bias makes whole logits.

        Example:
            >>> import jax.numpy as jnp
            >>> readout = Readout(16, 256, rngs=nnx.Rngs(0))
            >>> readout.cross_entropy(jnp.ones((2, 16)), jnp.zeros(2, int)).shape
            ()
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
            state=read_state(self.amax),
            **formats,
            **options,
        )
