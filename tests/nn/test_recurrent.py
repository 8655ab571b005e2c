"""Recurrent cells and the layer that runs them over a sequence."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.gradients import jit
from tests.modules import build
from tests.nn.table import CELLS, normal
from tests.refusals import refuses
from unitscale import nn, rules
from unitscale.core import ScaledArray


def make(name: str, features: int = 4, hidden: int = 6, **options) -> nn.RNN:
    return nn.RNN(CELLS[name](features, hidden, **({"rngs": nnx.Rngs(0)} | options)))


@pytest.mark.parametrize("residual", [False, True])
def test_the_simple_cell_of_flax_in_other_units(residual) -> None:
    ours, flax = (kind.SimpleCell(4, 6, residual=residual, rngs=nnx.Rngs(0)) for kind in (nn, nnx))
    unit, terms = rules.elementwise(jnp.tanh).fwd, (3 if residual else 2) ** 0.5
    flax.dense_i.kernel.set_value(ours.dense_i.kernel[...] / 4**0.5 / terms)
    ours.dense_i.bias.set_value(jnp.arange(6.0))
    flax.dense_i.bias.set_value(ours.dense_i.bias[...] / terms)
    recurrent = ours.dense_h[0].kernel[...] / 6**0.5 * unit / terms
    # Flax adds the state itself with weight 1.
    identity = jnp.eye(6) * (unit / terms - 1) if residual else 0
    flax.dense_h.kernel.set_value(recurrent + identity)
    x = normal(0, 2, 5, 4)
    expected = nnx.RNN(flax)(x)
    np.testing.assert_allclose(nn.RNN(ours)(x).value, unit * expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CELLS)
def test_the_layer_is_its_cell_step_by_step(name) -> None:
    layer, x = build(lambda: make(name)), normal(0, 2, 5, 4)

    @jit
    def run(x):
        carry, outputs = layer.cell.initialize_carry((2, 4)), []
        for time in range(5):
            carry, y = layer.cell(carry, x[:, time])
            outputs.append(y.data)
        whole, y = layer(x, return_carry=True)
        # In two pieces, with the carry handed on.
        half, first = layer(x[:, :2], return_carry=True)
        second = layer(x[:, 2:], initial_carry=half)
        joined = jnp.concatenate([first.data, second.data], 1)
        return (whole, y.data, y.data), (carry, jnp.stack(outputs, 1), joined)

    chex.assert_trees_all_close(*run(x), rtol=1e-5, atol=1e-6)


def test_time_major_reverse_lengths_and_directions_do_as_flax() -> None:
    layer, x = build(lambda: make("gru")), normal(0, 3, 5, 4)
    back, lengths = build(lambda: make("gru"), seed=1), [2, 5, 1]

    @jit
    def run(x, lengths):
        y = layer(x).data
        swapped = layer(jnp.swapaxes(x, 0, 1), time_major=True).data
        turned = layer(x, reverse=True, keep_order=True).data
        again = jnp.flip(layer(jnp.flip(x, 1)).data, 1)
        carry, masked = layer(x, seq_lengths=lengths, return_carry=True)
        short, _ = layer(x[:1, :2], reverse=True, return_carry=True)
        long, _ = layer(x, seq_lengths=lengths, reverse=True, return_carry=True)
        assert masked.shape == y.shape
        last = jnp.stack([y[i, n - 1] for i, n in enumerate(lengths)])
        both = nnx.Bidirectional(layer, back)(x)
        apart = jnp.concatenate([y, back(x, reverse=True, keep_order=True).data], -1)
        pairs = (jnp.swapaxes(swapped, 0, 1), y), (turned, again), (carry.data, last)
        forward = layer(x, keep_order=True).data
        return *pairs, (long.data[:1], short.data), (both, apart), (forward, y)

    for found, wanted in run(x, jnp.asarray(lengths)):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_scaled_inputs_and_carries_leave_without_a_scale() -> None:
    layer, x = build(lambda: make("lstm")), normal(0, 2, 5, 4)

    @jit
    def run(x):
        scales = (jnp.float32(8.0), jnp.full((1, 1, 4), 8.0), jnp.full((2, 1, 1), 8.0))
        found = [layer(ScaledArray(x / 8, scale)) for scale in scales]
        assert all(y.scale is None for y in found)
        carry, y = layer(x, return_carry=True)
        scaled = jax.tree.map(
            lambda c: ScaledArray(c.data / 4, jnp.float32(4)),
            carry,
            is_leaf=lambda c: isinstance(c, ScaledArray),
        )
        after = [layer(x, initial_carry=c).data for c in (carry, scaled)]
        return after, *((y.data, other.data) for other in found)

    for found, wanted in run(x):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


class Unfinished(nn.RNNCell):
    gates = 1


RNGS, X = nnx.Rngs(0), jnp.ones((2, 5, 4))
test_errors = refuses(
    [
        (ValueError, lambda: nn.RHNCell(2, 2, 0, rngs=RNGS), "RHNCell: depth must be at least 1"),
        (NotImplementedError, lambda: nn.RNN(Unfinished(4, 2, rngs=RNGS))(X), "implement step"),
        (TypeError, lambda: nn.RNNCell(4, 8, rngs=RNGS), "RNNCell: expected a cell"),
        (TypeError, lambda: nn.RNN(nn.Dense(2, 2, rngs=RNGS)), "cell must be"),
        (ValueError, lambda: make("gru")(jnp.ones(4)), "inputs must be"),
    ]
)
