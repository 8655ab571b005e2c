"""Normalization layers."""

from typing import Any

import jax.numpy as jnp
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


class GroupNorm(_Norm):
    """Normalization of groups of channels over all positions, as `flax.nnx.GroupNorm`.

    Scaling:
        `ops.group_norm`; gain one and bias zero at initialisation.

    Args:
        num_features: size of the last axis.
        num_groups: number of groups, dividing num_features; None where ``group_size`` says it.
        group_size: features of a group, in place of ``num_groups``, which is then None.
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
        ValueError: if the policy is unknown, or not one of the number and the size of groups is
            given and divides the features; when called, if the shapes do not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> GroupNorm(8, 2)(jnp.ones((2, 5, 5, 8))).shape
        (2, 5, 5, 8)

    References:
        Wu, He, "Group Normalization", 2018, arXiv 1803.08494.
    """

    def __init__(
        self,
        num_features: int,
        num_groups: int | None = 32,
        group_size: int | None = None,
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
        divisor = group_size if num_groups is None else num_groups
        both = num_groups is not None and group_size is not None
        if both or divisor is None or divisor < 1 or num_features % divisor:
            raise ValueError(
                "unitscale.nn.GroupNorm: give one of num_groups and group_size, the other None, "
                f"that divides num_features; got {num_groups}, {group_size}, {num_features}"
            )
        self.num_groups = num_features // divisor if num_groups is None else num_groups
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
        """Normalizes (batch, *spatial, num_features)."""
        return ops.group_norm(
            self.policy.activation(x),
            read(self.gain),
            read(self.bias),
            num_groups=self.num_groups,
            eps=self.epsilon,
        )


class BatchNorm(_Norm):
    """Normalization of features over the batch, as `flax.nnx.BatchNorm`.

    Scaling:
        `ops.batch_norm`; gain one and bias zero at initialisation. In training by the statistics of
        the batch, which also move the running averages ``mean`` and ``var``, each a
        `nnx.BatchStat`; after `model.eval()` by these.

    Args:
        num_features: size of the last axis.
        use_running_average: whether to normalize by the running averages; `model.eval()` and
            `model.train()` set it.
        momentum: share of the running averages that stays at each call.
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
        >>> layer = BatchNorm(2, momentum=0.5)
        >>> y = layer(jnp.array([[1.0, 5.0], [3.0, 9.0]]))
        >>> print(layer.mean[...], layer.var[...])
        [1.  3.5] [1.  2.5]

    References:
        Ioffe, Szegedy, "Batch Normalization", 2015, arXiv 1502.03167.
    """

    def __init__(
        self,
        num_features: int,
        *,
        use_running_average: bool = False,
        momentum: float = 0.99,
        epsilon: float = 1e-5,
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
        self.use_running_average, self.momentum = use_running_average, momentum
        self.mean = nnx.BatchStat(jnp.zeros(num_features, jnp.float32))
        self.var = nnx.BatchStat(jnp.ones(num_features, jnp.float32))

    def set_view(self, use_running_average: bool | None = None) -> None:
        """Takes what `nnx.view` asks of a layer; `nnx.view_info` reads arguments two spaces in.

        Args:
          use_running_average: whether the averages stand for the statistics of the batch.
        """
        if use_running_average is not None:
            self.use_running_average = use_running_average

    def __call__(self, x: ops.ArrayLike, use_running_average: bool | None = None) -> ScaledArray:
        """Normalizes (..., num_features); the argument left out is the layer's own."""
        x = self.policy.activation(x)
        running = self.use_running_average if use_running_average is None else use_running_average
        statistics = None
        if running:
            statistics = self.mean.get_value(), self.var.get_value()
        y = ops.batch_norm(
            x, read(self.gain), read(self.bias), statistics=statistics, eps=self.epsilon
        )
        if not running:
            seen = zip((self.mean, self.var), ops.batch_statistics(x), strict=True)
            for average, new in seen:
                kept = self.momentum * average.get_value()
                average.set_value(kept + (1 - self.momentum) * new)
        return y
