"""Normalization layers and dropout."""

from collections.abc import Sequence
from typing import Any, TypeAlias, TypedDict, Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from .. import ops
from ..core import ScaledArray
from ._params import NO_METADATA, Initializer, Metadata, ones, read, vector, zeros
from ._policy import PolicyLike, as_policy

RngsLike: TypeAlias = nnx.Rngs | nnx.RngStream | jax.Array | None


class ScaleOptions(TypedDict, total=False):
    """Keyword arguments of every normalization layer: see `LayerNorm`."""

    dtype: Any
    param_dtype: Any
    use_scale: bool
    scale_init: Initializer
    policy: PolicyLike
    rngs: nnx.Rngs | None
    scale_metadata: Metadata


class NormOptions(ScaleOptions, total=False):
    """Keyword arguments of normalization layers with a bias: see `LayerNorm`."""

    use_bias: bool
    bias_init: Initializer
    bias_metadata: Metadata


class _Norm(nnx.Module):
    """Base of normalization layers: their gain and bias."""

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
        self.num_features, self.epsilon = num_features, epsilon
        self.policy = as_policy(policy, dtype=dtype, param_dtype=param_dtype)

        def parameter(init: Initializer, metadata: Metadata) -> nnx.Param:
            return vector(init, rngs, (num_features,), self.policy, role="norm", metadata=metadata)

        self.gain = nnx.data(parameter(scale_init, scale_metadata) if use_scale else None)
        self.bias = nnx.data(parameter(bias_init, bias_metadata) if use_bias else None)


class LayerNorm(_Norm):
    """Layer normalization over the last axis (`ops.layer_norm`), as `flax.nnx.LayerNorm`.

    The parameter that Flax calls ``scale`` is called ``gain`` here; ``use_scale`` still turns it
    on. ``rngs`` are needed only by initializers other than zeros and ones.

    Example:
        >>> LayerNorm(4)(jnp.ones((2, 4), jnp.float16)).dtype.name
        'float32'
    """

    def __call__(self, x: ops.ArrayLike) -> ScaledArray:
        """Normalize (..., num_features)."""
        x = self.policy.activation(x)
        return ops.layer_norm(x, read(self.gain), read(self.bias), eps=self.epsilon)


class RMSNorm(_Norm):
    """RMS normalization over the last axis (`ops.rms_norm`), as `flax.nnx.RMSNorm`."""

    def __init__(
        self, num_features: int, *, epsilon: float = 1e-6, **options: Unpack[ScaleOptions]
    ) -> None:
        super().__init__(num_features, epsilon=epsilon, use_bias=False, **options)

    def __call__(self, x: ops.ArrayLike) -> ScaledArray:
        """Normalize (..., num_features)."""
        return ops.rms_norm(self.policy.activation(x), read(self.gain), eps=self.epsilon)


class GroupNorm(_Norm):
    """Normalization of groups of channels (`ops.group_norm`), as `flax.nnx.GroupNorm`.

    Give either ``num_groups`` or ``group_size``, and None for the other.
    """

    def __init__(
        self,
        num_features: int,
        num_groups: int | None = 32,
        group_size: int | None = None,
        *,
        epsilon: float = 1e-6,
        **options: Unpack[NormOptions],
    ) -> None:
        divisor = group_size if num_groups is None else num_groups
        both = num_groups is not None and group_size is not None
        if both or divisor is None or divisor < 1 or num_features % divisor:
            raise ValueError(
                "unitscale.nn.GroupNorm: of num_groups and group_size one must be None, and the "
                f"other divide num_features; got {num_groups}, {group_size}, {num_features}"
            )
        self.num_groups = num_features // divisor if num_groups is None else num_groups
        super().__init__(num_features, epsilon=epsilon, **options)

    def __call__(self, x: ops.ArrayLike) -> ScaledArray:
        """Normalize (batch, *spatial, num_features)."""
        return ops.group_norm(
            self.policy.activation(x),
            read(self.gain),
            read(self.bias),
            num_groups=self.num_groups,
            eps=self.epsilon,
        )


class BatchNorm(_Norm):
    """Normalization of features over the batch (`ops.batch_norm`), as `flax.nnx.BatchNorm`.

    In training it uses the statistics of the batch and updates the running averages ``mean`` and
    ``var``, each a `nnx.BatchStat`; after `model.eval()` it uses the averages.

    Example:
        >>> layer = BatchNorm(2, momentum=0.5)
        >>> y = layer(jnp.array([[1.0, 5.0], [3.0, 9.0]]))
        >>> print(layer.mean[...], layer.var[...])
        [1.  3.5] [1.  2.5]
    """

    def __init__(
        self,
        num_features: int,
        *,
        use_running_average: bool = False,
        momentum: float = 0.99,
        epsilon: float = 1e-5,
        **options: Unpack[NormOptions],
    ) -> None:
        super().__init__(num_features, epsilon=epsilon, **options)
        self.use_running_average, self.momentum = use_running_average, momentum
        self.mean = nnx.BatchStat(jnp.zeros(num_features, jnp.float32))
        self.var = nnx.BatchStat(jnp.ones(num_features, jnp.float32))

    def set_view(self, use_running_average: bool | None = None) -> None:
        """Apply settings of `nnx.view`; `nnx.view_info` needs the two-space indentation.

        Args:
          use_running_average: whether to use the running averages.
        """
        if use_running_average is not None:
            self.use_running_average = use_running_average

    def __call__(self, x: ops.ArrayLike, use_running_average: bool | None = None) -> ScaledArray:
        """Normalize (..., num_features)."""
        x = self.policy.activation(x)
        running = self.use_running_average if use_running_average is None else use_running_average
        statistics = (self.mean.get_value(), self.var.get_value()) if running else None
        y = ops.batch_norm(
            x, read(self.gain), read(self.bias), statistics=statistics, eps=self.epsilon
        )
        if not running:
            for average, new in zip((self.mean, self.var), ops.batch_statistics(x), strict=True):
                kept = self.momentum * average.get_value()
                average.set_value(kept + (1 - self.momentum) * new)
        return y


class Dropout(nnx.Module):
    """Dropout that keeps unit variance (`ops.dropout`), as `flax.nnx.Dropout`.

    A deterministic call returns the expected value of a random one. ``rngs`` are needed unless
    every call passes them or is deterministic.

    Example:
        >>> print(Dropout(0.75, deterministic=True)(jnp.ones(2)).data)
        [0.5 0.5]
    """

    def __init__(
        self,
        rate: float,
        *,
        broadcast_dims: Sequence[int] = (),
        deterministic: bool = False,
        rng_collection: str = "dropout",
        rngs: nnx.Rngs | nnx.RngStream | None = None,
    ) -> None:
        if not 0 <= rate < 1:
            raise ValueError(f"unitscale.nn.Dropout: rate must be in [0, 1); got {rate!r}")
        self.rate, self.deterministic = rate, deterministic
        self.broadcast_dims, self.rng_collection = tuple(broadcast_dims), rng_collection
        stream = self._stream(None if rate == 0 else rngs)
        self.rngs = nnx.data(None if stream is None else stream.fork())

    def __call__(
        self, x: ops.ArrayLike, *, deterministic: bool | None = None, rngs: RngsLike = None
    ) -> ScaledArray:
        """Drop elements of ``x``. An argument that is None takes the layer's own setting."""
        key = self.key(deterministic, rngs)
        return ops.dropout(
            x,
            self.rate,
            key=key,
            deterministic=key is None,
            broadcast_dims=self.broadcast_dims,
        )

    def set_view(self, deterministic: bool | None = None) -> None:
        """Apply settings of `nnx.view`; `nnx.view_info` needs the two-space indentation.

        Args:
          deterministic: whether dropout is off.
        """
        if deterministic is not None:
            self.deterministic = deterministic

    def _stream(self, rngs: nnx.Rngs | nnx.RngStream | None) -> nnx.RngStream | None:
        return rngs[self.rng_collection] if isinstance(rngs, nnx.Rngs) else rngs

    def key(self, deterministic: bool | None = None, rngs: RngsLike = None) -> jax.Array | None:
        """Return the next key, or None if nothing is to be dropped."""
        quiet = self.deterministic if deterministic is None else deterministic
        if quiet or self.rate == 0:
            return None
        if isinstance(rngs, jax.Array):
            return rngs
        stream = self.rngs if rngs is None else self._stream(rngs)
        if stream is None:
            raise ValueError(
                "unitscale.nn.Dropout: give rngs= to the constructor or the call, or set "
                "deterministic=True"
            )
        return stream()
