"""Gates and cells of recurrent networks, applied after the projections of input and state.

A state never has a scale, even if the operands do, because the carry of a `jax.lax.scan` must keep
its structure.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from .. import rules
from ..core import ScaledArray
from ._elementwise import elementwise, sigmoid_glu, tanh
from ._operands import ArrayLike, output_dtype, scale_argument, shape_error, times, unpack, wide_op
from ._residual import add, weighted_add


def _gates(weight, *operands):
    count = len(operands) // 2
    state, candidate, *gates = map(times, operands[:count], operands[count:])
    # sigmoid(-gate) is more accurate than 1 - sigmoid(gate).
    forget, take = (gates[0], -gates[0]) if len(gates) == 1 else gates
    return lax.logistic(forget) * state + lax.logistic(take) * (weight * candidate)


def _gated(op: str, weight: float, **operands: ArrayLike) -> ScaledArray:
    pairs = {name: unpack(op, name, x) for name, x in operands.items()}
    shapes = {name: data.shape for name, (data, _) in pairs.items()}
    if len(set(shapes.values())) > 1:
        raise shape_error(op, f"{', '.join(operands)} must have the same shape", **shapes)
    constants = tuple(scale_argument(scale) for _, scale in pairs.values())
    arrays = (data for data, _ in pairs.values())
    return ScaledArray(wide_op(_gates, *arrays, static=(weight,), constants=constants))


def gated_update(
    state: ArrayLike,
    candidate: ArrayLike,
    gate: ArrayLike,
    *,
    share: float = 0.5,
    reset: bool = False,
    period: int = 1,
) -> ScaledArray:
    """Mix a state with a candidate state, as in a GRU or a highway layer.

    Scaling: s * state + (1 - s) * weight * candidate, where s = sigmoid(gate) and the weight is
    `rules.gated_update`. Operands are multiplied by their scales; all gradients are exact.

    Args:
        state: operand; the result has its dtype.
        candidate: output of `tanh`, of the same shape.
        gate: logits of the gate, of the same shape; large logits keep the state.
        share: fraction of the variance of the tanh's argument that comes from the state.
        reset: whether a gate multiplies the state's part of the tanh's argument.
        period: number of updates after which the same kernel is used again.
    """
    weight = rules.gated_update(share, reset=reset, period=period)
    return _gated("gated_update", weight, state=state, candidate=candidate, gate=gate)


def gated_sum(
    state: ArrayLike,
    candidate: ArrayLike,
    forget: ArrayLike,
    input_gate: ArrayLike,
    *,
    share: float = 0.5,
) -> ScaledArray:
    """Add a state and a candidate, each multiplied by its own gate, as in an LSTM.

    Scaling: sigmoid(forget) * state + sigmoid(input_gate) * weight * candidate, where the weight is
    `rules.gated_sum`. Operands are multiplied by their scales; all gradients are exact.

    Takes the arguments of `gated_update`, with separate gates for state and candidate.
    """
    operands = {"state": state, "candidate": candidate, "forget": forget, "input_gate": input_gate}
    return _gated("gated_sum", rules.gated_sum(share), **operands)


def gru(state: ArrayLike, x: ArrayLike, h: ArrayLike) -> ScaledArray:
    """Apply the gates of a GRU, and return the new state (..., features).

    ``x`` and ``h`` are the projections of input and state, (..., 3 features), in the order r, z, n.

    Scaling: r = add(x_r, h_r), z = add(x_z, h_z), n = tanh(add(x_n, sigmoid_glu(h_n, r))), all
    unit. The new state is gated_update(state, n, z).
    """
    x_r, x_z, x_n = _split("gru", state, "x", x, 3)
    h_r, h_z, h_n = _split("gru", state, "h", h, 3)
    candidate = tanh(add(x_n, sigmoid_glu(h_n, add(x_r, h_r))))
    return gated_update(state, candidate, add(x_z, h_z), reset=True)


def lstm(cell: ArrayLike, x: ArrayLike, h: ArrayLike) -> tuple[ScaledArray, ScaledArray]:
    """Apply the gates of an LSTM, and return ``(cell, hidden)``, each (..., features).

    ``x`` and ``h`` are the projections of input and hidden state, (..., 4 features): i, f, g, o.

    Scaling: i, f, g, o are sums of the two projections, all unit. The new cell state is
    gated_sum(cell, tanh(g), f, i), and the hidden state is sigmoid_glu(tanh(cell), o).
    """
    parts = zip(_split("lstm", cell, "x", x, 4), _split("lstm", cell, "h", h, 4), strict=True)
    input_gate, forget, candidate, output = (add(a, b) for a, b in parts)
    cell = gated_sum(cell, tanh(candidate), forget, input_gate)
    return cell, sigmoid_glu(tanh(cell), output)


def highway(
    state: ArrayLike, h: ArrayLike, x: ArrayLike | None = None, *, depth: int = 1
) -> ScaledArray:
    """Apply the gates of one layer of a recurrent highway cell, and return the new state.

    Scaling: gated_update(state, tanh(n), z), where z and n are the sums of the projections of state
    and input, or without ``x`` the projections of the state.

    Args:
        state: (..., features).
        h: projection of the state, (..., 2 features), in the order z, n.
        x: projection of the input, of the same shape; only in the first layer of the cell.
        depth: number of layers of the cell.
    """
    gate, candidate = _split("highway", state, "h", h, 2)
    share = 1.0
    if x is not None:
        x_gate, x_candidate = _split("highway", state, "x", x, 2)
        gate, candidate, share = add(gate, x_gate), add(candidate, x_candidate), 0.5
    return gated_update(state, tanh(candidate), gate, share=share, period=depth)


def simple_rnn(
    state: ArrayLike,
    x: ArrayLike,
    h: ArrayLike,
    *,
    activation: Callable[[jax.Array], jax.Array] = jnp.tanh,
    residual: bool = False,
) -> ScaledArray:
    """Apply the activation of a simple recurrent network, and return the new state.

    Scaling: elementwise(activation, (x + h) / 2^1/2), with (x + h + state) / 3^1/2 if residual. The
    state has RMS 1 for an odd activation such as tanh. All gradients are exact.

    Args:
        state: (..., features); the result has its dtype.
        x: projection of the input, of the same shape.
        h: projection of the state, of the same shape.
        activation: as for `elementwise`.
        residual: whether the state itself is added to the argument.

    References:
        Elman, "Finding Structure in Time", 1990.
    """
    (x,) = _split("simple_rnn", state, "x", x, 1)
    (h,) = _split("simple_rnn", state, "h", h, 1)
    argument = add(x, h)
    if residual:
        argument = weighted_add(argument, state, weights=(math.sqrt(2), 1.0))
    return elementwise(activation, argument).astype(output_dtype(state))


def _split(op: str, state: ArrayLike, name: str, x: ArrayLike, count: int) -> list[ScaledArray]:
    """Split the last axis into equal parts, one for each gate."""
    data, scale = unpack(op, name, x)
    size, prefix = state.shape[-1], f"{count} * " if count > 1 else ""
    if data.shape != (*state.shape[:-1], count * size):
        expected = f"{name} must be (..., {prefix}features) for a state of (..., features)"
        raise shape_error(op, expected, state=state.shape, **{name: data.shape})
    whole = ScaledArray(data, scale)
    parts = (slice(i * size, (i + 1) * size) for i in range(count))
    return [whole] if count == 1 else [whole[..., part] for part in parts]
