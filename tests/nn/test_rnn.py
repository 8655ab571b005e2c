"""The layer that runs a cell over a sequence: carries, order, lengths, scales."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.gradients import jit
from tests.modules import build
from tests.nn.test_recurrent import CELLS, make, normal
from unitscale import nn
from unitscale.core import ScaledArray


@pytest.mark.parametrize("name", CELLS)
def test_the_layer_is_its_cell_step_by_step(name) -> None:
    layer, x = build(lambda: make(name)), normal(0, 2, 5, 4, dtype=jnp.float32)

    @jit
    def run(x):
        carry, outputs = layer.cell.initialize_carry((2, 4)), []
        for time in range(5):
            carry, y = layer.cell(carry, x[:, time])
            outputs.append(y.data)
        whole = layer(x, return_carry=True)
        # In two pieces, with the carry handed on.
        half, first = layer(x[:, :2], return_carry=True)
        second = layer(x[:, 2:], initial_carry=half)
        return whole, carry, jnp.stack(outputs, 1), jnp.concatenate([first.data, second.data], 1)

    (found, y), carry, stepped, joined = run(x)
    for a, b in ((y.data, stepped), (joined, y.data)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, carry)


def test_time_major_reverse_and_lengths_do_as_flax() -> None:
    layer, x = build(lambda: make("gru")), normal(0, 3, 5, 4, dtype=jnp.float32)
    lengths = [2, 5, 1]

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
        pairs = (jnp.swapaxes(swapped, 0, 1), y), (turned, again), (carry.data, last)
        return *pairs, (long.data[:1], short.data)

    for found, wanted in run(x, jnp.asarray(lengths)):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_scaled_inputs_and_carries_leave_without_a_scale() -> None:
    layer, x = build(lambda: make("lstm")), normal(0, 2, 5, 4, dtype=jnp.float32)

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


def test_arguments_are_those_of_flax() -> None:
    flax = dict(inspect.signature(nnx.RNN.__call__).parameters)
    ours = dict(inspect.signature(nn.RNN.__call__).parameters)
    assert list(ours) == list(flax)
    assert {k: p.kind for k, p in ours.items()} == {k: flax[k].kind for k in ours}


def test_both_directions_by_the_module_of_flax() -> None:
    there, back = (nn.RNN(nn.GRUCell(3, 4, rngs=nnx.Rngs(i))) for i in range(2))
    x = jax.random.normal(jax.random.key(2), (2, 5, 3))
    both = nnx.Bidirectional(there, back)(x)
    np.testing.assert_array_equal(both[..., :4], there(x).value)
    np.testing.assert_array_equal(both[..., 4:], back(x, reverse=True, keep_order=True).value)


def test_errors() -> None:
    with pytest.raises(TypeError, match=r"nn\.RNN: cell must be .*GRUCell; got Dense"):
        nn.RNN(nn.Dense(2, 2, rngs=nnx.Rngs(0)))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"inputs must be \(\.\.\., time, features\); got \(4,\)"):
        make("gru")(jnp.ones(4))
    with pytest.raises(ValueError, match=r"ops\.gru: x must be"):
        make("gru")(jnp.ones((2, 5, 4)), initial_carry=jnp.zeros((3, 6)))
