"""The layer that runs a recurrent cell over a sequence."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from .. import ops
from ..core import ScaledArray, match_varying, narrow
from ._recurrent import Carry, RNNCell


class RNN(nnx.Module):
    """Runs a cell over a sequence, as `flax.nnx.RNN`.

    Scaling:
        Inputs are projected for all steps at once; the weights that read the state get a factor for
        the steps that their gradients sum (`rules.recurrent_kernel`). The carry of the scan is data
        at the static scale 1, because gates and activations fold scales in.

    Args:
        cell: a recurrent cell.
        time_major: whether inputs and outputs are (time, ..., features), not (..., time, features).
        return_carry: whether calls return ``(carry, outputs)``.
        reverse: whether to run from the end of the sequence.
        keep_order: whether the outputs of a reversed run are turned round again.
        unroll: number of steps in one iteration of the compiled loop.

    Raises:
        TypeError: if the cell is not one of `unitscale.nn`.

    Example:
        >>> from unitscale.nn import GRUCell
        >>> layer = RNN(GRUCell(4, 8, rngs=nnx.Rngs(0)))
        >>> layer(jnp.ones((2, 5, 4))).shape
        (2, 5, 8)

    References:
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257.
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
        """Maps (..., time, in_features) to (..., time, hidden_features).

        Args:
            inputs: (..., time, in_features), or (time, ..., in_features) if time is major.
            initial_carry: from `RNNCell.initialize_carry`, by default, or an earlier call.
            seq_lengths: (...,) integers, the number of valid steps of each sequence. The carry
                stops changing there, and reversing turns the valid steps round.
            return_carry: whether to return the carry too; the layer's own setting by default.
            time_major: where the time axis is; the layer's own setting by default.
            reverse: whether to run from the end; the layer's own setting by default.
            keep_order: whether to turn reversed outputs round; the layer's own by default.
            rngs: for the cell's `initialize_carry`, as in flax.

        Returns:
            The outputs, a ScaledArray, or ``(carry, outputs)``.

        Raises:
            ValueError: if there is no time axis.
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
        shape = inputs.shape[:axis] + inputs.shape[axis + 1 :]
        steps = inputs.shape[axis]
        carry = initial_carry
        if carry is None:
            carry = self.cell.initialize_carry(shape, rngs)
        data, scale = _uniform(self.cell.project(inputs))
        data = jnp.moveaxis(data, axis, 0)
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

        # Inside shard_map the first state is that of this part of the batch, as all others are.
        _, carry = match_varying((data, _placed(self.cell.as_carry(carry), data)))
        carry, outputs = jax.lax.scan(step, carry, (data, jnp.arange(steps)), unroll=self.unroll)
        if reverse and keep_order:
            outputs = _flip(outputs, seq_lengths)
        y = ScaledArray(jnp.moveaxis(outputs, 0, axis))
        return (carry, y) if return_carry else y


def _placed(carry: Carry, data: jax.Array) -> Carry:
    """A state (..., features), on explicit axes divided as data (time, ..., features) are."""
    spec = jax.typeof(data).sharding.spec
    if not any(spec):
        return carry
    place = PartitionSpec(*spec[1:-1], None)
    return jax.tree.map(lambda x: jax.sharding.reshard(x, place), carry)


def _uniform(x: ScaledArray) -> tuple[jax.Array, Any]:
    """Data and one scale for all of it; where there are several, they are multiplied in."""
    if x.scale is None or jnp.size(x.scale) == 1:
        return x.data, None if x.scale is None else jnp.reshape(x.scale, ())
    return narrow(x.value, x.dtype), None


def _flip(x: jax.Array, lengths: jax.Array | None) -> jax.Array:
    """Turns the valid steps of (time, ..., features) round."""
    if lengths is None:
        return jnp.flip(x, 0)
    time = jnp.arange(x.shape[0]).reshape(-1, *(1,) * jnp.ndim(lengths))
    source = jnp.where(time < lengths, lengths - 1 - time, time)
    return jnp.take_along_axis(x, source[..., None], axis=0)
