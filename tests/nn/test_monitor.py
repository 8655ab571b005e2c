"""Saturated elements are counted, and a drifted scale moves by a power of two."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from unitscale import nn, quant
from unitscale.nn import DotGeneral, OverflowMonitor
from unitscale.quant import MatmulConfig, Static

X = jnp.ones((4, 8)).at[0, 0].set(3000.0).at[1, 1].set(-500.0)


def make(strategy=None) -> nnx.Module:
    """Its weights are 1, so that only the first operand saturates."""
    config = MatmulConfig(strategy=Static() if strategy is None else strategy)
    layer = nnx.Linear(8, 2, dot_general=DotGeneral(config), rngs=nnx.Rngs(0))
    layer.kernel.set_value(jnp.ones((8, 2)))
    return layer


@nnx.jit
def step(model, x):
    return nn.value_and_grad(lambda m: jnp.sum(m(x)))(model)[0]


def test_counts() -> None:
    model, monitor = make(), OverflowMonitor()
    for entry in monitor.read(model):
        assert (entry.saturated, entry.elements, entry.share) == (0, 0, 0.0)
    step(model, X)
    lhs, rhs, cotangent = monitor.read(model)
    assert (lhs.layer, lhs.tensor, lhs.scale) == ("dot_general.state", "lhs", 1.0)
    assert (lhs.saturated, lhs.elements, lhs.share) == (2, 32, 2 / 32)
    assert (lhs.steps_saturated, lhs.steps_not_finite) == (1, 0)
    for entry, tensor, size in ((rhs, "rhs", 16), (cotangent, "cotangent", 8)):
        assert (entry.tensor, entry.saturated, entry.elements) == (tensor, 0, size)
    step(model, X.at[2, 2].set(jnp.nan))
    step(model, jnp.ones((4, 8)))
    lhs = monitor.read(model)[0]
    assert (lhs.saturated, lhs.steps_saturated, lhs.steps_not_finite) == (0, 2, 1)


def test_rebalance_moves_what_saturates_until_it_fits() -> None:
    model, monitor = make(), OverflowMonitor(limit=0.01)
    exact = float(np.sum(np.float64(X)) * 2)
    values = []
    for _ in range(3):
        values.append(float(step(model, X)))
        moved = monitor.rebalance(model, 4.0)
        assert all(entry.tensor == "lhs" for entry in moved)
    # 3000 needs a scale of 8: two moves by 4, and none after.
    assert [entry.scale for entry in monitor.read(model)] == [16.0, 1.0, 1.0]
    assert values[0] < values[1] < values[2]
    assert values[2] == pytest.approx(exact, rel=2**-4)


def test_a_scale_that_is_moved_changes_no_value_that_fits() -> None:
    """Ones and powers of two are exact at either scale."""
    model = make()
    before = step(model, jnp.ones((4, 8)) * 4)
    step(model, X)
    OverflowMonitor().rebalance(model)
    assert OverflowMonitor().read(model)[0].scale == 2
    assert step(model, jnp.ones((4, 8)) * 4) == before


def test_below_the_limit_nothing_moves() -> None:
    model = make()
    step(model, X)
    assert OverflowMonitor(limit=0.5).rebalance(model) == []
    assert OverflowMonitor().read(model)[0].scale == 1


def test_layers_of_a_scan_are_counted_together() -> None:
    model = make()
    state = model.dot_general.state
    states = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), state.get_value())
    counts = jnp.broadcast_to(jnp.asarray([1.0, 4.0, 0.0, 1.0]), (3, 3, 4))
    state.set_value(
        quant.QuantState(states.scale, states.history, states.tally, counts, states.strategy)
    )
    entry = OverflowMonitor().read(model)[0]
    assert (entry.saturated, entry.elements, entry.steps_saturated) == (3, 12, 3)


@pytest.mark.parametrize("limit", [-0.1, 1.0, 2])
def test_limit_is_a_share(limit: float) -> None:
    with pytest.raises(ValueError, match="OverflowMonitor: limit must be a share"):
        OverflowMonitor(limit=limit)


@pytest.mark.parametrize("factor", [3.0, 0.0, -2.0])
def test_factor_is_a_power_of_two(factor: float) -> None:
    with pytest.raises(ValueError, match="rebalance: factor must be a power of two"):
        OverflowMonitor().rebalance(make(), factor)
