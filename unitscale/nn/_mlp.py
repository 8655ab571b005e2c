"""Feed-forward blocks."""

from typing import Literal, get_args

from flax import nnx

from .. import ops
from ..core import ScaledArray
from ..quant import Unit
from ._dropout import Dropout
from ._given import given
from ._linear import Dense
from ._policy import PolicyLike
from ._recomputed import recomputed

Activation = Literal["gelu", "silu", "relu", "tanh", "silu_glu", "gelu_glu"]
GATED = "_glu"
_CALL = Dense.__call__


class MLP(nnx.Module):
    """A feed-forward block: plain ``down(f(up(x)))``, or gated ``down(up(x) * f(gate(x)))``.

    Scaling:
        Every product and activation is unit scaled. Hidden units have unit variance; those of gelu,
        silu and relu have a mean too, which brings the output's RMS to 1.11, 1.07 and 1.21.
        Where they are quantized without statistics (`quant.Unit`), the backward computes them
        again, beside their gradients, in place of keeping them.

    Args:
        in_features: size of the input's last axis.
        hidden_features: size of the hidden layer.
        out_features: size of the output's last axis; in_features by default.
        activation: "gelu", "silu", "relu", "tanh" (plain), "silu_glu", "gelu_glu" (gated).
        mult: multiplier of the activation's argument.
        use_bias: whether the dense layers add biases.
        dropout_rate: rate of dropout on the output.
        policy: formats; a `Policy` or the name of a preset.
        rngs: streams of random keys ("params", and "dropout" if there is any).

    Raises:
        ValueError: if the activation or policy is unknown.

    Example:
        >>> import jax.numpy as jnp
        >>> MLP(8, 32, activation="silu_glu", rngs=nnx.Rngs(0))(jnp.ones((2, 8))).shape
        (2, 8)

    References:
        Shazeer, "GLU Variants Improve Transformer", 2020, arXiv 2002.05202 (gated).
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        *,
        activation: Activation = "gelu",
        mult: float = 1.0,
        use_bias: bool = True,
        dropout_rate: float = 0.0,
        policy: PolicyLike = "float32",
        rngs: nnx.Rngs,
    ) -> None:
        if activation not in get_args(Activation):
            raise ValueError(
                "unitscale.nn.MLP: activation must be one of "
                f"{', '.join(get_args(Activation))}; got {activation!r}"
            )
        self.activation, self.mult = activation, mult
        out_features = in_features if out_features is None else out_features

        def dense(inputs: int, outputs: int) -> Dense:
            return Dense(inputs, outputs, use_bias=use_bias, policy=policy, rngs=rngs)

        self.up = dense(in_features, hidden_features)
        gated = activation.endswith(GATED)
        self.gate = nnx.data(dense(in_features, hidden_features) if gated else None)
        self.down = dense(hidden_features, out_features)
        self.dropout = Dropout(dropout_rate, rngs=rngs)

    def __call__(self, x: ops.ArrayLike, *, deterministic: bool | None = None) -> ScaledArray:
        """Maps (..., in_features) to (..., out_features)."""
        inner = (self.up(x),) if self.gate is None else (self.up(x), self.gate(x))
        project = recomputed(self._project) if self._recomputes() else self._project
        return self.dropout(project(*inner), **given(deterministic=deterministic))

    def _project(self, *inner: ScaledArray) -> ScaledArray:
        return self.down(getattr(ops, self.activation)(*inner, mult=self.mult))

    def _recomputes(self) -> bool:
        """Whether the backward computes hidden units again.

        Scales of other strategies come from the hidden units, which would be read once more. A
        layer of another kind in the place of ``down`` may keep what it sees, and so may who watches
        `Dense`, as `nnx.tabulate` does: nothing may leave the trace of what is computed again.
        """
        if type(self.down).__call__ is not _CALL:
            return False
        config = self.down.policy.matmul_for(self.down.role)
        return config is not None and isinstance(config.strategy, Unit)
