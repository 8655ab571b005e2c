"""Recurrent cells: one step of a recurrence."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx

from .. import ops, rules
from ..core import ScaledArray, narrow, scale_bwd
from ._amax_state import read_state
from ._linear import Dense
from ._param import NO_METADATA, Initializer, Metadata, read, unit_normal, zeros
from ._policy import PolicyLike, as_policy

Carry: TypeAlias = Any
Weights: TypeAlias = list[tuple[Any, Any]]


class RNNCell(nnx.Module):
    """What recurrent cells share; a cell of your own sets ``gates`` and implements `step`.

    A cell is two functions: `project`, which reads the input and may be applied to a whole
    sequence at once, and `step`, which reads the state. ``gates`` is the number of gates and
    candidates, each of which is a projection to the state's size; ``depth`` is the number of
    kernels that read the state, of which those after the first have biases.

    Args:
        in_features: size of the input's last axis.
        hidden_features: size of the state.
        kernel_init: initializer of the kernel that reads the input; factors assume unit variance.
        recurrent_kernel_init: that of the kernels that read the state.
        bias_init: initializer of the biases.
        dtype: compute dtype in place of the policy's; None keeps that.
        param_dtype: dtype of parameters in place of the policy's; None keeps that.
        policy: formats; a `Policy` or the name of a preset.
        rngs: streams of random keys; parameters draw from "params".
        kernel_metadata: metadata of the kernel that reads the input.
        recurrent_kernel_metadata: metadata of the kernels that read the state.
        bias_metadata: metadata of the biases.

    Raises:
        ValueError: if the depth is not positive or the policy is unknown.
        TypeError: if the cell is this base itself, which has no gates.

    Example:
        >>> isinstance(GRUCell(4, 8, rngs=nnx.Rngs(0)), RNNCell)
        True
    """

    num_feature_axes = 1

    gates: int
    depth = 1

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        kernel_init: Initializer = unit_normal,
        recurrent_kernel_init: Initializer = unit_normal,
        bias_init: Initializer = zeros,
        dtype: Any = None,
        param_dtype: Any = None,
        policy: PolicyLike = "float32",
        rngs: nnx.Rngs,
        kernel_metadata: Metadata = NO_METADATA,
        recurrent_kernel_metadata: Metadata = NO_METADATA,
        bias_metadata: Metadata = NO_METADATA,
    ) -> None:
        if not hasattr(self, "gates"):
            raise TypeError(
                f"{self._where}: expected a cell that sets gates and implements step, such as "
                "SimpleCell, GRUCell or OptimizedLSTMCell; got their base"
            )
        if self.depth < 1:
            raise ValueError(f"{self._where}: depth must be at least 1; got {self.depth}")
        self.in_features, self.hidden_features = in_features, hidden_features
        self.policy = as_policy(policy, dtype=dtype, param_dtype=param_dtype)

        def dense(inputs: int, init: Initializer, metadata: Metadata, use_bias: bool) -> Dense:
            return Dense(
                inputs,
                self.gates * hidden_features,
                use_bias=use_bias,
                policy=self.policy,
                kernel_init=init,
                bias_init=bias_init,
                rngs=rngs,
                kernel_metadata=metadata,
                bias_metadata=bias_metadata,
            )

        self.dense_i = dense(in_features, kernel_init, kernel_metadata, True)
        self.dense_h = nnx.List(
            [
                dense(hidden_features, recurrent_kernel_init, recurrent_kernel_metadata, layer > 0)
                for layer in range(self.depth)
            ]
        )

    @property
    def _where(self) -> str:
        return f"unitscale.nn.{type(self).__name__}"

    def project(self, inputs: ops.ArrayLike) -> ScaledArray:
        """Maps inputs (..., in_features) to what `step` takes of them."""
        return self.dense_i(inputs)

    def weights(self, steps: int = 1) -> Weights:
        """The kernel and bias of each projection of the state, to be used at ``steps`` steps.

        Scaling:
            Backward steps^-1/2; see `rules.recurrent_kernel`.
        """
        factor = rules.recurrent_kernel(steps).bwd[0]

        def shared(parameter: nnx.Param | None) -> Any:
            value = read(parameter)
            return None if value is None else scale_bwd(value, factor)

        return [(shared(layer.kernel), shared(layer.bias)) for layer in self.dense_h]

    def step(
        self, weights: Weights, carry: Carry, projected: ScaledArray
    ) -> tuple[Carry, ScaledArray]:
        """Maps the carry and the projection of one input to the next carry and the output."""
        raise NotImplementedError(f"{self._where} must implement step")

    def initialize_carry(self, input_shape: tuple[int, ...], rngs: Any = None) -> Carry:
        """Returns a carry of zeros for inputs of a shape (..., in_features), without time.

        Args:
            input_shape: shape of the input of one step.
            rngs: accepted as in flax; nothing is drawn.
        """
        zeros = jnp.zeros((*input_shape[:-1], self.hidden_features), self.policy.compute_dtype)
        return ScaledArray(zeros)

    def __call__(self, carry: Carry, inputs: ops.ArrayLike) -> tuple[Carry, ScaledArray]:
        """Maps a carry and inputs (..., in_features) to the next carry and the output."""
        return self.step(self.weights(), self.as_carry(carry), self.project(inputs))

    def as_carry(self, carry: Carry) -> Carry:
        """Returns arrays and ScaledArrays of a carry in the compute dtype, without a scale.

        A scan needs a carry whose type never changes, and `step` returns one without.
        """

        def state(x: ops.ArrayLike) -> ScaledArray:
            if isinstance(x, ScaledArray) and x.scale is None:
                return ScaledArray(x.data.astype(self.policy.compute_dtype))
            value = x.value if isinstance(x, ScaledArray) else jnp.asarray(x)
            return ScaledArray(narrow(value, self.policy.compute_dtype))

        return jax.tree.map(state, carry, is_leaf=lambda x: isinstance(x, ScaledArray))

    def _of_state(self, index: int, weights: Weights, state: ScaledArray) -> ScaledArray:
        layer, (kernel, bias) = self.dense_h[index], weights[index]
        return ops.dense(
            state,
            layer.policy.weight(kernel, layer.role),
            bias,
            config=layer.policy.matmul_for(layer.role),
            state=read_state(layer.amax),
        )


class GRUCell(RNNCell):
    """A gated recurrent unit, as `flax.nnx.GRUCell`.

    Scaling:
        `ops.gru` of two unit projections. The state is a GRU's in other units: a fixed multiple of
        it, of RMS near 1 after the first few steps.

    Args:
        in_features: size of the input's last axis.
        hidden_features: size of the state.
        kernel_init: initializer of the kernel that reads the input; factors assume unit variance.
        recurrent_kernel_init: that of the kernels that read the state.
        bias_init: initializer of the biases.
        dtype: compute dtype in place of the policy's; None keeps that.
        param_dtype: dtype of parameters in place of the policy's; None keeps that.
        policy: formats; a `Policy` or the name of a preset.
        rngs: streams of random keys; parameters draw from "params".
        kernel_metadata: metadata of the kernel that reads the input.
        recurrent_kernel_metadata: metadata of the kernels that read the state.
        bias_metadata: metadata of the biases.

    Raises:
        ValueError: if the policy is unknown; when called, if the shapes do not fit.

    Example:
        >>> cell = GRUCell(4, 8, policy="float16", rngs=nnx.Rngs(0))
        >>> carry = cell.initialize_carry((2, 4))
        >>> carry, y = cell(carry, jnp.ones((2, 4)))
        >>> y
        ScaledArray(float16[2,8], scale=None)

    References:
        Cho et al., 2014, arXiv 1406.1078; Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv
        2303.11257.
    """

    gates = 3

    def step(self, weights: Weights, carry: Carry, projected: ScaledArray):
        """Maps a state and a projected input to the next state, twice."""
        state = ops.gru(carry, projected, self._of_state(0, weights, carry))
        return state, state


class OptimizedLSTMCell(RNNCell):
    """A long short-term memory, as `flax.nnx.OptimizedLSTMCell`.

    Scaling:
        `ops.lstm` of two unit projections. The carry is ``(cell, hidden)``.

    Args:
        in_features: size of the input's last axis.
        hidden_features: size of each of the two states.
        kernel_init: initializer of the kernel that reads the input; factors assume unit variance.
        recurrent_kernel_init: that of the kernels that read the state.
        bias_init: initializer of the biases.
        dtype: compute dtype in place of the policy's; None keeps that.
        param_dtype: dtype of parameters in place of the policy's; None keeps that.
        policy: formats; a `Policy` or the name of a preset.
        rngs: streams of random keys; parameters draw from "params".
        kernel_metadata: metadata of the kernel that reads the input.
        recurrent_kernel_metadata: metadata of the kernels that read the state.
        bias_metadata: metadata of the biases.

    Raises:
        ValueError: if the policy is unknown; when called, if the shapes do not fit.

    Example:
        >>> cell = OptimizedLSTMCell(4, 8, rngs=nnx.Rngs(0))
        >>> (c, h), y = cell(cell.initialize_carry((2, 4)), jnp.ones((2, 4)))
        >>> c.shape, y.shape
        ((2, 8), (2, 8))

    References:
        Hochreiter, Schmidhuber, "Long Short-Term Memory", 1997; Blake, Orr, Luschi, "Unit
        Scaling", 2023, arXiv 2303.11257.
    """

    gates = 4

    def initialize_carry(self, input_shape: tuple[int, ...], rngs: Any = None) -> Carry:
        """Returns ``(cell, hidden)`` of zeros."""
        zeros = super().initialize_carry(input_shape, rngs)
        return zeros, zeros

    def step(self, weights: Weights, carry: Carry, projected: ScaledArray):
        """Maps ``(cell, hidden)`` and a projected input to the next pair, and the hidden state."""
        cell, hidden = carry
        cell, hidden = ops.lstm(cell, projected, self._of_state(0, weights, hidden))
        return (cell, hidden), hidden


class SimpleCell(RNNCell):
    """A simple recurrent cell, as `flax.nnx.SimpleCell`.

    Scaling:
        `ops.simple_rnn` of two unit projections: the state of flax's cell in other units, of unit
        variance from the second step on.

    Args:
        in_features: size of the input's last axis.
        hidden_features: size of the state.
        residual: whether the state itself is added to the activation's argument.
        activation_fn: element-wise function; an odd one keeps the state's mean at 0.
        **options: those of `RNNCell`: formats, initializers, metadata and ``rngs``.

    Raises:
        ValueError: if the policy is unknown; when called, if the shapes do not fit.

    Example:
        >>> cell = SimpleCell(4, 8, rngs=nnx.Rngs(0))
        >>> carry, y = cell(cell.initialize_carry((2, 4)), jnp.ones((2, 4)))
        >>> y.shape
        (2, 8)

    References:
        Elman, "Finding Structure in Time", 1990; Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv
        2303.11257.
    """

    gates = 1

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        residual: bool = False,
        activation_fn: Callable[[jax.Array], jax.Array] = jnp.tanh,
        **options: Any,
    ) -> None:
        super().__init__(in_features, hidden_features, **options)
        self.residual, self.activation_fn = residual, activation_fn

    def step(self, weights: Weights, carry: Carry, projected: ScaledArray):
        """Maps a state and a projected input to the next state, twice."""
        state = ops.simple_rnn(
            carry,
            projected,
            self._of_state(0, weights, carry),
            activation=self.activation_fn,
            residual=self.residual,
        )
        return state, state


class RHNCell(RNNCell):
    """A recurrent highway cell: several gated layers within one step.

    Scaling:
        `ops.highway` at each layer; the input enters the first. Layers after the first read the
        state alone, and grow the mean square of a gradient by about a fifth each: with a depth of 4
        or more, gradients of long sequences are no longer unit.

    Args:
        in_features: size of the input's last axis.
        hidden_features: size of the state.
        depth: number of layers.
        **options: those of `RNNCell`: formats, initializers, metadata and ``rngs``.

    Raises:
        ValueError: if the depth is not positive or the policy is unknown; when called, if the
            shapes do not fit.

    Example:
        >>> cell = RHNCell(4, 8, depth=3, rngs=nnx.Rngs(0))
        >>> carry, y = cell(cell.initialize_carry((2, 4)), jnp.ones((2, 4)))
        >>> y.shape
        (2, 8)

    References:
        Zilly et al., "Recurrent Highway Networks", 2017, arXiv 1607.03474; Blake, Orr, Luschi,
        "Unit Scaling", 2023, arXiv 2303.11257.
    """

    gates = 2

    def __init__(
        self, in_features: int, hidden_features: int, depth: int = 2, **options: Any
    ) -> None:
        self.depth = depth
        super().__init__(in_features, hidden_features, **options)

    def step(self, weights: Weights, carry: Carry, projected: ScaledArray):
        """Maps a state and a projected input to the next state, twice."""
        state = carry
        for layer in range(self.depth):
            h = self._of_state(layer, weights, state)
            x = projected if layer == 0 else None
            state = ops.highway(state, h, x, depth=self.depth)
        return state, state
