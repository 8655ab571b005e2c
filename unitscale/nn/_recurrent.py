"""Recurrent cells, and the layer that runs one over a sequence."""

from collections.abc import Callable
from typing import Any, TypeAlias, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from .. import ops, rules
from ..core import ScaledArray, match_varying, narrow, scale_bwd
from ._linear import Dense, KernelOptions
from ._params import NO_METADATA, Initializer, Metadata, read, unit_normal

Carry: TypeAlias = Any
Weights: TypeAlias = list[tuple[Any, Any]]


class RNNCell(nnx.Module):
    """Base of recurrent cells. A cell of your own sets ``gates`` and implements `step`.

    A cell has two functions. `project` maps inputs, and may be applied to a whole sequence at once.
    `step` updates the state. ``gates`` is the number of gates and candidates, each a projection to
    the size of the state. ``depth`` is the number of kernels that are applied to the state
    (``recurrent_kernel_init``); all but the first have biases.
    """

    num_feature_axes = 1

    gates: int
    depth = 1

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        recurrent_kernel_init: Initializer = unit_normal,
        recurrent_kernel_metadata: Metadata = NO_METADATA,
        **options: Unpack[KernelOptions],
    ) -> None:
        if not hasattr(self, "gates"):
            raise TypeError(
                f"{self._where}: expected a cell that sets gates and implements step, such as "
                "SimpleCell, GRUCell or OptimizedLSTMCell; got the base class"
            )
        if self.depth < 1:
            raise ValueError(f"{self._where}: depth must be at least 1; got {self.depth}")
        self.in_features, self.hidden_features = in_features, hidden_features
        outputs = self.gates * hidden_features
        self.dense_i = Dense(in_features, outputs, **options)
        self.policy = self.dense_i.policy
        options["kernel_init"] = recurrent_kernel_init
        options["kernel_metadata"] = recurrent_kernel_metadata
        self.dense_h = nnx.List(
            [
                Dense(hidden_features, outputs, use_bias=layer > 0, **options)
                for layer in range(self.depth)
            ]
        )

    @property
    def _where(self) -> str:
        return f"unitscale.nn.{type(self).__name__}"

    def project(self, inputs: ops.ArrayLike) -> ScaledArray:
        """Map inputs (..., in_features) to the argument ``projected`` of `step`."""
        return self.dense_i(inputs)

    def weights(self, steps: int = 1) -> Weights:
        """Return the kernel and bias of each projection of the state, to apply in ``steps`` steps.

        Their gradients are sums over steps, and get the factor of `rules.recurrent_kernel`.
        """
        factor = rules.recurrent_kernel(steps).bwd[0]

        def shared(parameter: nnx.Param | None) -> Any:
            value = read(parameter)
            return None if value is None else scale_bwd(value, factor)

        return [(shared(layer.kernel), shared(layer.bias)) for layer in self.dense_h]

    def step(
        self, weights: Weights, carry: Carry, projected: ScaledArray
    ) -> tuple[Carry, ScaledArray]:
        """Map the carry and one projected input to the next carry and the output."""
        raise NotImplementedError(f"{self._where} must implement step")

    def initialize_carry(self, input_shape: tuple[int, ...], rngs: Any = None) -> Carry:
        """Return a carry of zeros for inputs (..., in_features) of one step; rngs are ignored."""
        zeros = jnp.zeros((*input_shape[:-1], self.hidden_features), self.policy.compute_dtype)
        return ScaledArray(zeros)

    def __call__(self, carry: Carry, inputs: ops.ArrayLike) -> tuple[Carry, ScaledArray]:
        """Map a carry and inputs (..., in_features) to the next carry and the output."""
        return self.step(self.weights(), self.as_carry(carry), self.project(inputs))

    def as_carry(self, carry: Carry) -> Carry:
        """Return a carry in the compute dtype and without scales, as `step` returns it.

        A scan needs a carry whose type never changes.
        """

        def state(x: ops.ArrayLike) -> ScaledArray:
            value = x.value if isinstance(x, ScaledArray) else jnp.asarray(x)
            return ScaledArray(narrow(value, self.policy.compute_dtype))

        return jax.tree.map(state, carry, is_leaf=lambda x: isinstance(x, ScaledArray))

    def _of_state(self, index: int, weights: Weights, state: ScaledArray) -> ScaledArray:
        layer, (kernel, bias) = self.dense_h[index], weights[index]
        x, kernel, config = layer.policy.operands(state, kernel, layer.role)
        return ops.dense(x, kernel, bias, config=config, state=read(layer.amax))


class GRUCell(RNNCell):
    """A gated recurrent unit (`ops.gru`), as `flax.nnx.GRUCell`.

    The state is a constant multiple of a plain GRU's. Its RMS is near 1 after the first few steps.

    Example:
        >>> cell = GRUCell(4, 8, policy="float16", rngs=nnx.Rngs(0))
        >>> carry, y = cell(cell.initialize_carry((2, 4)), jnp.ones((2, 4)))
        >>> y
        ScaledArray(float16[2,8], scale=None)
    """

    gates = 3

    def step(self, weights: Weights, carry: Carry, projected: ScaledArray):
        """Return the next state twice: as carry and as output."""
        state = ops.gru(carry, projected, self._of_state(0, weights, carry))
        return state, state


class OptimizedLSTMCell(RNNCell):
    """A long short-term memory (`ops.lstm`), as `flax.nnx.OptimizedLSTMCell`.

    The carry is ``(cell, hidden)``.
    """

    gates = 4

    def initialize_carry(self, input_shape: tuple[int, ...], rngs: Any = None) -> Carry:
        """Return ``(cell, hidden)`` of zeros."""
        zeros = super().initialize_carry(input_shape, rngs)
        return zeros, zeros

    def step(self, weights: Weights, carry: Carry, projected: ScaledArray):
        """Return the next ``(cell, hidden)``, and the hidden state as output."""
        cell, hidden = carry
        cell, hidden = ops.lstm(cell, projected, self._of_state(0, weights, hidden))
        return (cell, hidden), hidden


class SimpleCell(RNNCell):
    """A simple recurrent cell (`ops.simple_rnn`), as `flax.nnx.SimpleCell`.

    The state is a constant multiple of Flax's. It has unit variance from the second step on, and
    mean 0 if ``activation_fn`` is odd.
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
        """Return the next state twice: as carry and as output."""
        state = ops.simple_rnn(
            carry,
            projected,
            self._of_state(0, weights, carry),
            activation=self.activation_fn,
            residual=self.residual,
        )
        return state, state


class RHNCell(RNNCell):
    """A recurrent highway cell (`ops.highway`): ``depth`` gated layers within one step.

    The first layer reads the input. Later layers read only the state, and each increases the mean
    square of a gradient by about a fifth: with a depth of 4 or more, gradients of long sequences no
    longer have unit size.
    """

    gates = 2

    def __init__(
        self, in_features: int, hidden_features: int, depth: int = 2, **options: Any
    ) -> None:
        self.depth = depth
        super().__init__(in_features, hidden_features, **options)

    def step(self, weights: Weights, carry: Carry, projected: ScaledArray):
        """Return the next state twice: as carry and as output."""
        state = carry
        for layer in range(self.depth):
            h = self._of_state(layer, weights, state)
            x = projected if layer == 0 else None
            state = ops.highway(state, h, x, depth=self.depth)
        return state, state


class RNN(nnx.Module):
    """A layer that runs a cell over a sequence, as `flax.nnx.RNN`.

    Inputs are projected for all steps at once. Kernels of the state get a factor for the number of
    steps that their gradients are summed over (`rules.recurrent_kernel`). The carry has no scale.

    Example:
        >>> layer = RNN(GRUCell(4, 8, rngs=nnx.Rngs(0)))
        >>> layer(jnp.ones((2, 5, 4))).shape
        (2, 5, 8)
    """

    def __init__(
        self,
        cell: RNNCell,
        *,
        time_major: bool = False,
        return_carry: bool = False,
        reverse: bool = False,
        keep_order: bool = False,
        unroll: int = 1,
    ) -> None:
        if not isinstance(cell, RNNCell):
            raise TypeError(
                "unitscale.nn.RNN: cell must be a unitscale.nn.RNNCell, such as GRUCell; got "
                f"{type(cell).__name__}"
            )
        self.cell, self.unroll = cell, unroll
        self.time_major, self.return_carry = time_major, return_carry
        self.reverse, self.keep_order = reverse, keep_order

    def __call__(
        self,
        inputs: ops.ArrayLike,
        *,
        initial_carry: Carry | None = None,
        seq_lengths: jax.Array | None = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
        rngs: Any = None,
    ) -> Any:
        """Map (..., time, in_features) to (..., time, hidden_features), or ``(carry, outputs)``.

        Takes the arguments of `flax.nnx.RNN`; None uses the layer's own setting. ``seq_lengths``
        (...,) is the number of valid steps of each sequence: after them the carry no longer
        changes, and only the valid steps are reversed.
        """
        return_carry = self.return_carry if return_carry is None else return_carry
        time_major = self.time_major if time_major is None else time_major
        reverse = self.reverse if reverse is None else reverse
        keep_order = self.keep_order if keep_order is None else keep_order
        if inputs.ndim < 2:
            raise ValueError(
                "unitscale.nn.RNN: inputs must be (..., time, features); got "
                f"{tuple(inputs.shape)}. Call the cell itself for one step."
            )
        axis = 0 if time_major else inputs.ndim - 2
        steps, carry = inputs.shape[axis], initial_carry
        if carry is None:
            shape = inputs.shape[:axis] + inputs.shape[axis + 1 :]
            carry = self.cell.initialize_carry(shape, rngs)
        projected = self.cell.project(inputs)
        if projected.scale is not None and jnp.size(projected.scale) > 1:
            projected = ScaledArray(narrow(projected.value, projected.dtype))
        scale = None if projected.scale is None else jnp.reshape(projected.scale, ())
        data = jnp.moveaxis(projected.data, axis, 0)
        if reverse:
            data = _flip(data, seq_lengths)
        weights = self.cell.weights(max(steps, 1))

        def step(carry: Carry, item: tuple[jax.Array, jax.Array]):
            x, time = item
            new, y = self.cell.step(weights, carry, ScaledArray(x, scale))
            if seq_lengths is not None:
                valid = (time < seq_lengths)[..., None]
                new = jax.tree.map(lambda a, b: jnp.where(valid, a, b), new, carry)
            return new, y.data

        # Inside shard_map, the carry must vary over the same mesh axes as the data.
        _, carry = match_varying((data, _reshard_carry(self.cell.as_carry(carry), data)))
        carry, outputs = jax.lax.scan(step, carry, (data, jnp.arange(steps)), unroll=self.unroll)
        if reverse and keep_order:
            outputs = _flip(outputs, seq_lengths)
        y = ScaledArray(jnp.moveaxis(outputs, 0, axis))
        return (carry, y) if return_carry else y


def _reshard_carry(carry: Carry, data: jax.Array) -> Carry:
    """Shard a state (..., features) like the data (time, ..., features) over explicit axes."""
    spec = jax.typeof(data).sharding.spec
    if not any(spec):
        return carry
    spec = PartitionSpec(*spec[1:-1], None)
    return jax.tree.map(lambda x: jax.sharding.reshard(x, spec), carry)


def _flip(x: jax.Array, lengths: jax.Array | None) -> jax.Array:
    """Reverse the valid steps of (time, ..., features)."""
    if lengths is None:
        return jnp.flip(x, 0)
    time = jnp.arange(x.shape[0]).reshape(-1, *(1,) * jnp.ndim(lengths))
    source = jnp.where(time < lengths, lengths - 1 - time, time)
    return jnp.take_along_axis(x, source[..., None], axis=0)
