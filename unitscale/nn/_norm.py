"""Normalization layers."""

from typing import Any

from flax import nnx

from .. import ops
from ..core import ScaledArray
from ._param import NO_METADATA, Initializer, Metadata, ones, read, vector, zeros
from ._policy import Policy, PolicyLike, as_policy


class _Norm(nnx.Module):
    """What normalization layers share: gain and bias."""

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float,
        use_bias: bool,
        use_scale: bool,
        policy: Policy,
        bias_init: Initializer = zeros,
        scale_init: Initializer,
        rngs: nnx.Rngs | None,
        bias_metadata: Metadata = NO_METADATA,
        scale_metadata: Metadata,
    ) -> None:
        self.num_features, self.epsilon, self.policy = num_features, epsilon, policy

        def parameter(init: Initializer, metadata: Metadata) -> nnx.Param:
            return vector(init, rngs, (num_features,), policy, role="norm", metadata=metadata)

        self.gain = nnx.data(parameter(scale_init, scale_metadata) if use_scale else None)
        self.bias = nnx.data(parameter(bias_init, bias_metadata) if use_bias else None)


class LayerNorm(_Norm):
    """Layer normalization over the last axis, as `flax.nnx.LayerNorm`.

    Scaling:
        `ops.layer_norm`; gain one and bias zero at initialisation.

    Args:
        num_features: size of the last axis.
        epsilon: added to the variance.
        dtype: compute dtype in place of the policy's; None keeps that.
        param_dtype: dtype of parameters in place of the policy's; None keeps that.
        use_bias: whether to add a bias.
        use_scale: whether to multiply by a gain (flax's name for it).
        bias_init: initializer of the bias.
        scale_init: initializer of the gain.
        policy: formats; a `Policy` or the name of a preset.
        rngs: streams of random keys; needed by initializers that draw.
        bias_metadata: metadata of the bias, such as ``{"out_sharding": ("model",)}``.
        scale_metadata: metadata of the gain.

    Raises:
        ValueError: if the policy is unknown; when called, if the shapes do not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> LayerNorm(4)(jnp.ones((2, 4), jnp.float16)).dtype.name
        'float32'

    References:
        Ba, Kiros, Hinton, "Layer Normalization", 2016, arXiv 1607.06450.
    """

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: Any = None,
        param_dtype: Any = None,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = zeros,
        scale_init: Initializer = ones,
        policy: PolicyLike = "float32",
        rngs: nnx.Rngs | None = None,
        bias_metadata: Metadata = NO_METADATA,
        scale_metadata: Metadata = NO_METADATA,
    ) -> None:
        super().__init__(
            num_features,
            epsilon=epsilon,
            use_bias=use_bias,
            use_scale=use_scale,
            policy=as_policy(policy, dtype=dtype, param_dtype=param_dtype),
            bias_init=bias_init,
            scale_init=scale_init,
            rngs=rngs,
            bias_metadata=bias_metadata,
            scale_metadata=scale_metadata,
        )

    def __call__(self, x: ops.ArrayLike) -> ScaledArray:
        """Normalizes (..., num_features)."""
        x = self.policy.activation(x)
        return ops.layer_norm(x, read(self.gain), read(self.bias), eps=self.epsilon)


class RMSNorm(_Norm):
    """RMS normalization over the last axis, as `flax.nnx.RMSNorm`.

    Scaling:
        `ops.rms_norm`; gain one at initialisation.

    Args:
        num_features: size of the last axis.
        epsilon: added to the mean square.
        dtype: compute dtype in place of the policy's; None keeps that.
        param_dtype: dtype of parameters in place of the policy's; None keeps that.
        use_scale: whether to multiply by a gain (flax's name for it).
        scale_init: initializer of the gain.
        policy: formats; a `Policy` or the name of a preset.
        rngs: streams of random keys; needed by initializers that draw.
        scale_metadata: metadata of the gain, such as ``{"out_sharding": ("model",)}``.

    Raises:
        ValueError: if the policy is unknown; when called, if the shapes do not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> RMSNorm(4, policy="float16")(jnp.ones((2, 4))).dtype.name
        'float16'

    References:
        Zhang, Sennrich, "Root Mean Square Layer Normalization", 2019, arXiv 1910.07467.
    """

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: Any = None,
        param_dtype: Any = None,
        use_scale: bool = True,
        scale_init: Initializer = ones,
        policy: PolicyLike = "float32",
        rngs: nnx.Rngs | None = None,
        scale_metadata: Metadata = NO_METADATA,
    ) -> None:
        super().__init__(
            num_features,
            epsilon=epsilon,
            use_bias=False,
            use_scale=use_scale,
            policy=as_policy(policy, dtype=dtype, param_dtype=param_dtype),
            scale_init=scale_init,
            rngs=rngs,
            scale_metadata=scale_metadata,
        )

    def __call__(self, x: ops.ArrayLike) -> ScaledArray:
        """Normalizes (..., num_features)."""
        return ops.rms_norm(self.policy.activation(x), read(self.gain), eps=self.epsilon)
