"""Gates and cells of recurrent networks: what follows the projections of input and state.

A state leaves every cell at scale 1, whatever the scales of the operands: it is the carry of a
scan, whose structure may not change, and gates and activations fold scales in anyway.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from .. import rules
from ..core import ScaledArray, result_dtype
from ..rules import Constraint
from ._add import add, weighted_add
from ._elementwise import elementwise, gated_linear_unit, tanh
from ._operands import ArrayLike, scale_argument, shape_error, unpack
from ._wide import wide_op


def _times(x: jax.Array, scale: jax.Array | None) -> jax.Array:
    return x if scale is None else x * scale


@dataclasses.dataclass(frozen=True)
class _Update:
    """``s * state + (1 - s) * weight * candidate`` of values, with s the logistic of the gate."""

    weight: float

    def __call__(self, state, candidate, gate, *scales):
        state, candidate, gate = map(_times, (state, candidate, gate), scales)
        # Two logistic functions, because 1 - s cancels where the gate is nearly open.
        return jax.nn.sigmoid(gate) * state + jax.nn.sigmoid(-gate) * (self.weight * candidate)


@dataclasses.dataclass(frozen=True)
class _Sum:
    """``s(forget) * state + s(input) * weight * candidate`` of values."""

    weight: float

    def __call__(self, state, candidate, forget, input_gate, *scales):
        operands = (state, candidate, forget, input_gate)
        state, candidate, forget, input_gate = map(_times, operands, scales)
        kept = jax.nn.sigmoid(forget) * state
        return kept + jax.nn.sigmoid(input_gate) * (self.weight * candidate)


def _gated(op: str, f, **operands: ArrayLike) -> ScaledArray:
    pairs = {name: unpack(op, name, x) for name, x in operands.items()}
    shapes = {name: data.shape for name, (data, _) in pairs.items()}
    if len(set(shapes.values())) > 1:
        raise shape_error(
            op,
            f"{', '.join(operands)} must have the same shape",
            "Project all of them to the size of the state.",
            **shapes,
        )
    arrays = [data for data, _ in pairs.values()]
    y = wide_op(
        f,
        *arrays,
        fwd=1.0,
        bwd=(1.0,) * len(arrays),
        constants=tuple(scale_argument(scale) for _, scale in pairs.values()),
        out_dtype=result_dtype(arrays[0]),
    )
    return ScaledArray(y)


def gated_update(
    state: ArrayLike,
    candidate: ArrayLike,
    gate: ArrayLike,
    *,
    share: float = 0.5,
    reset: bool = False,
    period: int = 1,
) -> ScaledArray:
    """Moves a state towards a candidate: the convex combination of a GRU or a highway layer.

    Scaling:
        value = s * state + (1 - s) * weight * candidate with s = sigmoid(gate), no scale; the
        weight makes the stationary state unit. Every gradient is the true one. See
        `rules.gated_update`.

    Args:
        state: floating array or ScaledArray; the result has its dtype.
        candidate: unit tanh of the same shape.
        gate: logits of keeping the state, of the same shape.
        share: share of the candidate's argument that the state contributes, in variance.
        reset: whether a gate multiplies what the candidate reads of the state.
        period: number of updates after which the same kernel is used again.

    Returns:
        ScaledArray of that shape, with the static scale 1.

    Raises:
        TypeError: if an operand is not floating.
        ValueError: if the shapes differ, or the rule does not take its arguments.

    Example:
        >>> import jax.numpy as jnp
        >>> y = gated_update(jnp.ones(2), jnp.zeros(2), jnp.zeros(2))
        >>> print(y.data)
        [0.5 0.5]

    References:
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, scaled ops (weighted_add);
        Cho et al., 2014, arXiv 1406.1078.
    """
    weight = rules.gated_update(share, reset=reset, period=period)
    return _gated("gated_update", _Update(weight), state=state, candidate=candidate, gate=gate)


def gated_sum(
    state: ArrayLike,
    candidate: ArrayLike,
    forget: ArrayLike,
    input_gate: ArrayLike,
    *,
    share: float = 0.5,
) -> ScaledArray:
    """Adds a candidate to a state, each through a gate of its own: the cell state of an LSTM.

    Scaling:
        value = sigmoid(forget) * state + sigmoid(input_gate) * weight * candidate, no scale; the
        weight makes the stationary state unit. Every gradient is the true one. See
        `rules.gated_sum`.

    Args:
        state: floating array or ScaledArray; the result has its dtype.
        candidate: unit tanh of the same shape.
        forget: logits of keeping the state, of the same shape.
        input_gate: logits of taking the candidate, of the same shape.
        share: share of the candidate's argument that the hidden state contributes, in variance.

    Returns:
        ScaledArray of that shape, with the static scale 1.

    Raises:
        TypeError: if an operand is not floating.
        ValueError: if the shapes differ, or the share is not in (0, 1].

    Example:
        >>> import jax.numpy as jnp
        >>> print(gated_sum(jnp.ones(2), jnp.zeros(2), jnp.zeros(2), jnp.zeros(2)).data)
        [0.5 0.5]

    References:
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, scaled ops (weighted_add);
        Hochreiter, Schmidhuber, "Long Short-Term Memory", 1997.
    """
    return _gated(
        "gated_sum",
        _Sum(rules.gated_sum(share)),
        state=state,
        candidate=candidate,
        forget=forget,
        input_gate=input_gate,
    )


def sigmoid_glu(
    x: ArrayLike,
    gate: ArrayLike,
    *,
    mult: float = 1.0,
    constraint: Constraint = "to_output_scale",
) -> ScaledArray:
    """Applies a gated linear unit: ``x * sigmoid(mult * gate)``, scaled to unit variance.

    Scaling:
        data = fwd * x.data * sigmoid(mult * gate.value), scale = x.scale, with fwd = 1 / RMS of
        sigmoid(mult * z), 1.846 for mult = 1. See `rules.glu`.

    Args:
        x: linear half, floating array or ScaledArray.
        gate: gating half, of the same shape.
        mult: static multiplier of the gate (inverse temperature).
        constraint: how output and gradients come to share a factor (left is x, right is gate).

    Returns:
        ScaledArray of that shape in the promoted dtype (bfloat16 for 8-bit data).

    Raises:
        TypeError: if an operand is not floating.
        ValueError: if the shapes differ or the constraint is unknown.

    Example:
        >>> import jax.numpy as jnp
        >>> sigmoid_glu(jnp.ones(3), jnp.ones(3))
        ScaledArray(float32[3], scale=None)

    References:
        Dauphin et al., "Language Modeling with Gated Convolutional Networks", 2016, arXiv
        1612.08083; Blake et al., "u-muP", 2024, arXiv 2407.17465, appendix B (gated silu).
    """
    return gated_linear_unit("sigmoid_glu", jax.nn.sigmoid, x, gate, mult, constraint)


def gru(state: ArrayLike, x: ArrayLike, h: ArrayLike) -> ScaledArray:
    """Applies the gates of a GRU.

    Scaling:
        r = add(x_r, h_r), z = add(x_z, h_z), n = tanh(add(x_n, sigmoid_glu(h_n, r))), all unit;
        the new state is `gated_update` of n by z.

    Args:
        state: (..., features).
        x: projection of the input (..., 3 features): r, z, n.
        h: projection of the state, of the same shape.

    Returns:
        ScaledArray (..., features), the new state, which is the output too.

    Raises:
        TypeError: if an operand is not floating.
        ValueError: if the shapes do not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> gru(jnp.zeros((1, 2)), jnp.ones((1, 6)), jnp.ones((1, 6))).shape
        (1, 2)

    References:
        Cho et al., 2014, arXiv 1406.1078; Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv
        2303.11257.
    """
    x_r, x_z, x_n = _parts("gru", state, "x", x, 3)
    h_r, h_z, h_n = _parts("gru", state, "h", h, 3)
    candidate = tanh(add(x_n, sigmoid_glu(h_n, add(x_r, h_r))))
    return gated_update(state, candidate, add(x_z, h_z), reset=True)


def lstm(cell: ArrayLike, x: ArrayLike, h: ArrayLike) -> tuple[ScaledArray, ScaledArray]:
    """Applies the gates of an LSTM.

    Scaling:
        i, f, g, o are sums of the two projections, all unit. The new cell state is `gated_sum` of
        tanh(g) by f and i, and the hidden state sigmoid_glu(tanh(cell), o); tanh reads the unit
        cell state.

    Args:
        cell: (..., features).
        x: projection of the input (..., 4 features): i, f, g, o.
        h: projection of the hidden state, of the same shape.

    Returns:
        ``(cell, hidden)``, each a ScaledArray (..., features).

    Raises:
        TypeError: if an operand is not floating.
        ValueError: if the shapes do not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> cell, hidden = lstm(jnp.zeros((1, 2)), jnp.ones((1, 8)), jnp.ones((1, 8)))
        >>> cell.shape, hidden.shape
        ((1, 2), (1, 2))

    References:
        Hochreiter, Schmidhuber, "Long Short-Term Memory", 1997; Blake, Orr, Luschi, "Unit
        Scaling", 2023, arXiv 2303.11257.
    """
    parts = zip(_parts("lstm", cell, "x", x, 4), _parts("lstm", cell, "h", h, 4), strict=True)
    input_gate, forget, candidate, output = (add(a, b) for a, b in parts)
    cell = gated_sum(cell, tanh(candidate), forget, input_gate)
    return cell, sigmoid_glu(tanh(cell), output)


def highway(
    state: ArrayLike, h: ArrayLike, x: ArrayLike | None = None, *, depth: int = 1
) -> ScaledArray:
    """Applies the gates of one layer of a recurrent highway cell.

    Scaling:
        The new state is `gated_update` of tanh(n), where z and n are the sums of the two
        projections, or the state's alone; the transform gate is 1 - sigmoid(z).

    Args:
        state: (..., features).
        h: projection of the state (..., 2 features): z, n.
        x: projection of the input, of the same shape, in the first layer of the cell.
        depth: number of layers of the cell.

    Returns:
        ScaledArray (..., features), the new state.

    Raises:
        TypeError: if an operand is not floating.
        ValueError: if the shapes do not fit or the depth is not positive.

    Example:
        >>> import jax.numpy as jnp
        >>> highway(jnp.zeros((1, 2)), jnp.ones((1, 4)), depth=2).shape
        (1, 2)

    References:
        Zilly et al., "Recurrent Highway Networks", 2017, arXiv 1607.03474; Blake, Orr, Luschi,
        "Unit Scaling", 2023, arXiv 2303.11257.
    """
    gate, candidate = _parts("highway", state, "h", h, 2)
    share = 1.0
    if x is not None:
        x_gate, x_candidate = _parts("highway", state, "x", x, 2)
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
    """Applies the activation of a simple recurrent network.

    Scaling:
        value = elementwise(activation, (x + h) / 2^1/2), or of (x + h + state) / 3^1/2 if residual:
        the new state is unit without a weight, for an odd activation such as tanh. Every gradient
        is the true one. See `rules.elementwise`.

    Args:
        state: (..., features); the result has its dtype.
        x: projection of the input, of the same shape.
        h: projection of the state, of the same shape.
        activation: element-wise function of one array, hashable.
        residual: whether the state itself is added to the argument.

    Returns:
        ScaledArray (..., features), the new state, which is the output too.

    Raises:
        TypeError: if an operand is not floating.
        ValueError: if the shapes do not fit, or the activation is constant or not finite.

    Example:
        >>> print(simple_rnn(jnp.zeros(2), jnp.zeros(2), jnp.zeros(2)).data)
        [0. 0.]

    References:
        Elman, "Finding Structure in Time", 1990; Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv
        2303.11257, factors of activations.
    """
    (x,) = _parts("simple_rnn", state, "x", x, 1)
    (h,) = _parts("simple_rnn", state, "h", h, 1)
    argument = add(x, h)
    if residual:
        argument = weighted_add(argument, state, weights=(math.sqrt(2), 1.0))
    return elementwise(activation, argument).astype(unpack("simple_rnn", "state", state)[0].dtype)


def _parts(op: str, state: ArrayLike, name: str, x: ArrayLike, count: int) -> list[ScaledArray]:
    """The equal parts of the last axis, one for each gate."""
    data, scale = unpack(op, name, x)
    size, times = state.shape[-1], f"{count} * " if count > 1 else ""
    if data.shape != (*state.shape[:-1], count * size):
        raise shape_error(
            op,
            f"{name} must be (..., {times}features) for a state of (..., features)",
            "Project to the size of the state, for all gates at once.",
            state=state.shape,
            **{name: data.shape},
        )
    whole = ScaledArray(data, scale)
    if count == 1:
        return [whole]
    return [whole[..., i * size : (i + 1) * size] for i in range(count)]
