"""Normalization layers."""

from flax import nnx

from .. import ops
from ..core import ScaledArray
from ._param import constant, read
from ._policy import PolicyLike, as_policy


class LayerNorm(nnx.Module):
    """Layer normalization over the last axis, as `flax.nnx.LayerNorm`.

    Scaling:
        `ops.layer_norm`; gain one and bias zero at initialisation.

    Args:
        num_features: size of the last axis.
        epsilon: added to the variance.
        use_bias: whether to add a bias.
        use_scale: whether to multiply by a gain (flax's name for it).
        policy: formats; a `Policy` or the name of a preset.
        rngs: accepted as in flax; nothing is drawn.

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
        epsilon: float = 1e-5,
        use_bias: bool = True,
        use_scale: bool = True,
        policy: PolicyLike = "float32",
        rngs: nnx.Rngs | None = None,
    ) -> None:
        self.num_features, self.epsilon, self.policy = num_features, epsilon, as_policy(policy)
        shape = (num_features,)
        self.gain = nnx.data(constant(1.0, shape, self.policy, role="norm") if use_scale else None)
        self.bias = nnx.data(constant(0.0, shape, self.policy, role="norm") if use_bias else None)

    def __call__(self, x: ops.ArrayLike) -> ScaledArray:
        """Normalizes (..., num_features)."""
        x = self.policy.activation(x)
        return ops.layer_norm(x, read(self.gain), read(self.bias), eps=self.epsilon)


class RMSNorm(nnx.Module):
    """RMS normalization over the last axis, as `flax.nnx.RMSNorm`.

    Scaling:
        `ops.rms_norm`; gain one at initialisation.

    Args:
        num_features: size of the last axis.
        epsilon: added to the mean square.
        use_scale: whether to multiply by a gain (flax's name for it).
        policy: formats; a `Policy` or the name of a preset.
        rngs: accepted as in flax; nothing is drawn.

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
        use_scale: bool = True,
        policy: PolicyLike = "float32",
        rngs: nnx.Rngs | None = None,
    ) -> None:
        self.num_features, self.epsilon, self.policy = num_features, epsilon, as_policy(policy)
        self.gain = nnx.data(
            constant(1.0, (num_features,), self.policy, role="norm") if use_scale else None
        )

    def __call__(self, x: ops.ArrayLike) -> ScaledArray:
        """Normalizes (..., num_features)."""
        return ops.rms_norm(self.policy.activation(x), read(self.gain), eps=self.epsilon)
