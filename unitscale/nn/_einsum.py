"""Dense layers along any axes."""

import math
from collections.abc import Sequence
from typing import Any

from flax import nnx

from .. import ops
from ..core import ScaledArray
from ..quant import einsum_contraction, einsum_problem
from ..rules import Constraint
from ._amax_state import amax_state, read_state
from ._param import NO_METADATA, Initializer, Metadata, read, unit_normal, vector, weight, zeros
from ._placement import OutSharding, placed
from ._policy import PolicyLike, as_policy


class Einsum(nnx.Module):
    """A dense layer along any axes, as `flax.nnx.Einsum`.

    Scaling:
        `ops.einsum`; kernel from N(0, 1), bias zero.

    Args:
        einsum_str: an einsum of the input and the kernel, such as ``"...a,ab->...b"``.
        kernel_shape: shape of the kernel.
        bias_shape: the result's axes that the kernel has; None for no bias.
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
        ValueError: if the string is no such product or the policy is unknown; when called, if the
            shapes do not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> layer = Einsum("btd,dhk->bthk", (16, 4, 5), (4, 5), rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 3, 16))).shape
        (2, 3, 4, 5)

    References:
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, scaled ops (matmul).
    """

    def __init__(
        self,
        einsum_str: str,
        kernel_shape: Sequence[int],
        bias_shape: Sequence[int] | None = None,
        *,
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
        self.einsum_str, self.kernel_shape = einsum_str.replace(" ", ""), tuple(kernel_shape)
        spec = None if einsum_problem(einsum_str) else einsum_contraction(einsum_str, 0)
        if spec is None or len(spec.rhs) != len(self.kernel_shape):
            problem = einsum_problem(einsum_str) or f"the kernel is {self.kernel_shape}"
            raise ValueError(
                "unitscale.nn.Einsum: einsum_str must be a product of an input and a kernel, such "
                f"as '...a,ab->...b'; got {einsum_str!r}: {problem}"
            )
        self.policy = as_policy(policy, dtype=dtype, param_dtype=param_dtype)
        self.constraint: Constraint = constraint
        size = dict(zip(spec.rhs, self.kernel_shape, strict=True))
        self.kernel = weight(
            rngs,
            self.kernel_shape,
            self.policy,
            fan_in=math.prod(size[c] for c in spec.summed),
            fan_out=math.prod(size[c] for c in spec.rhs if c not in spec.lhs),
            init=kernel_init,
            metadata=kernel_metadata,
        )
        bias = None
        if bias_shape is not None:
            shape = tuple(bias_shape)
            bias = vector(bias_init, rngs, shape, self.policy, role="bias", metadata=bias_metadata)
        self.bias = nnx.data(bias)
        self.amax = nnx.data(amax_state(self.policy.matmul_for("weight")))

    def __call__(self, inputs: ops.ArrayLike, *, out_sharding: OutSharding = None) -> ScaledArray:
        """Maps inputs to their product with the kernel, divided over explicit axes as asked."""
        y = ops.einsum(
            self.einsum_str,
            self.policy.activation(inputs),
            self.policy.weight(read(self.kernel), "weight"),
            read(self.bias),
            constraint=self.constraint,
            config=self.policy.matmul_for("weight"),
            state=read_state(self.amax),
        )
        return placed(y, out_sharding)
