"""Low-rank updates of layers."""

from collections.abc import Callable
from typing import Any

from flax import nnx

from .. import ops
from ..core import ScaledArray
from ..rules import Constraint
from ._linear import Dense
from ._param import NO_METADATA, Initializer, Metadata, read, unit_normal, weight, zeros
from ._placement import OutSharding, placed
from ._policy import PolicyLike, as_policy


class LoRA(nnx.Module):
    """A low-rank update, of a layer if there is one, as `flax.nnx.LoRA`.

    Scaling:
        `ops.lora`: base(x) + (in * rank)^-1/2 * x @ a @ b, the sum with factor 1, because ``b`` is
        zero at initialisation. ``a`` is from N(0, 1). Its products are in the compute dtype, also
        where the policy quantizes those of weights.

    Args:
        in_features: size of the input's last axis.
        lora_rank: size between the two products.
        out_features: size of the output's last axis.
        base_module: the layer that is updated, called with the same arguments; None for none.
        constraint: that of the layer.
        dtype: compute dtype in place of the policy's; None keeps that.
        param_dtype: dtype of parameters in place of the policy's; None keeps that.
        a_initializer: initializer of ``a``; factors assume unit variance.
        b_initializer: initializer of ``b``.
        lora_param_type: type of the two parameters, by which filters find them.
        policy: formats; a `Policy` or the name of a preset.
        rngs: streams of random keys; parameters draw from "params".
        a_metadata: metadata of ``a``, such as ``{"out_sharding": (None, "model")}``.
        b_metadata: metadata of ``b``.

    Raises:
        ValueError: if the policy is unknown; when called, if the shapes do not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> layer = LoRA(16, 4, 32, base_module=Dense(16, 32, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
        >>> layer(jnp.ones((2, 16))).shape, layer.lora_a.shape
        ((2, 32), (16, 4))

    References:
        Hu et al., "LoRA", 2021, arXiv 2106.09685.
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

        def parameter(
            inputs: int, outputs: int, init: Initializer, metadata: Metadata
        ) -> nnx.Param:
            return weight(
                rngs,
                (inputs, outputs),
                self.policy,
                fan_in=inputs,
                fan_out=outputs,
                init=init,
                metadata=metadata,
                kind=lora_param_type,
            )

        self.lora_a = parameter(in_features, lora_rank, a_initializer, a_metadata)
        self.lora_b = parameter(lora_rank, out_features, b_initializer, b_metadata)

    def __call__(self, x: ops.ArrayLike, **kwargs: Any) -> ScaledArray:
        """Maps (..., in_features) to (..., out_features); further arguments are the base's."""
        base = None if self.base_module is None else self.base_module(x, **kwargs)
        return self.update(x=x, base=base)  # by keyword, as `given` explains

    def update(self, x: ops.ArrayLike, base: ops.ArrayLike | None) -> ScaledArray:
        """Returns what ``base``, the output of a layer for ``x``, becomes."""
        a, b = (self.policy.activation(read(p)) for p in (self.lora_a, self.lora_b))
        return ops.lora(self.policy.activation(x), a, b, base, constraint=self.constraint)


class LoRALinear(Dense):
    """A dense layer with a low-rank update, as `flax.nnx.LoRALinear`.

    Scaling:
        `Dense`, then `LoRA`. The parameters of the dense layer have the names and the values that
        they have without the update.

    Args:
        in_features: size of the input's last axis.
        out_features: size of the output's last axis.
        lora_rank: size between the two products of the update.
        lora_dtype: compute dtype of the update; None is that of the layer.
        lora_param_dtype: dtype of its parameters; None is that of the layer.
        a_initializer: initializer of the update's first kernel; factors assume unit variance.
        b_initializer: initializer of its second kernel.
        lora_param_type: type of the two, by which filters find them.
        rngs: streams of random keys; parameters draw from "params".
        a_metadata: metadata of the first.
        b_metadata: metadata of the second.
        **options: those of `Dense`.

    Raises:
        ValueError: if the policy is unknown; when called, if the shapes do not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> layer = LoRALinear(16, 32, lora_rank=4, policy="bfloat16", rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 16)))
        ScaledArray(bfloat16[2,32], scale=None)

    References:
        Hu et al., "LoRA", 2021, arXiv 2106.09685.
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
        """Maps (..., in_features) to (..., out_features), divided over explicit axes as asked."""
        return placed(self.lora.update(x=x, base=super().__call__(x)), out_sharding)
