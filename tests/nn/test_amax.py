"""Scales that models keep: recorded by gradients, calibrated, monitored, invisible to the rest."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.refusals import refuses
from unitscale import nn, quant
from unitscale.nn import AmaxState, DotGeneral, OverflowMonitor
from unitscale.quant import Delayed, Dynamic, MatmulConfig, Static

CONFIG = MatmulConfig(cotangent="e5m2", strategy=Delayed(history=4))


X = jax.random.normal(jax.random.key(0), (16, 8)) * 1000


class Net(nnx.Module):
    """A plain Flax model."""

    def __init__(self, config: MatmulConfig | None = CONFIG, seed: int = 0) -> None:
        rngs = nnx.Rngs(seed)
        dot = jax.lax.dot_general
        a, b = (dot if config is None else DotGeneral(config) for _ in range(2))
        self.first = nnx.Linear(8, 8, dot_general=a, rngs=rngs)
        self.second = nnx.Linear(8, 4, dot_general=b, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.second(self.dropout(jnp.tanh(self.first(x))))


def loss(model, x):
    return jnp.mean(jnp.square(model(x)))


# Compiled once for all tests of the same structure of model.
STEP = nnx.jit(nn.value_and_grad(loss))


ACCUMULATE = nnx.jit(nn.value_and_grad(loss, advance=False))


# It does not move the scales, and says so: `tests/quant/test_watch.py`.
PLAIN = nnx.jit(nnx.value_and_grad(loss))


def states(model) -> dict[str, quant.QuantState]:
    return {path: v.get_value() for path, v in nn.amax_states(model)}


def scales(model) -> dict[str, list[float]]:
    return {path: np.ravel(s.scale).tolist() for path, s in states(model).items()}


def same(a, b) -> bool:
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(
        np.array_equal(
            jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x,
            jax.random.key_data(y) if jnp.issubdtype(y.dtype, jax.dtypes.prng_key) else y,
        )
        for x, y in leaves
    )


def scale_of(x, dtype: str = "e4m3fn") -> float:
    return float(quant.quantize(x, dtype, Dynamic()).scale)


@pytest.mark.filterwarnings("ignore::unitscale.quant.StaleScalesWarning")
def test_is_a_drop_in_for_nnx_value_and_grad() -> None:
    """The same value and gradients, dropout and the state of random keys included."""
    ours, theirs = Net(), Net()
    for x in (X, X * 64):
        before = scales(ours)
        value, grads = STEP(ours, x)
        expected, wanted = PLAIN(theirs, x)
        assert value == expected
        assert jax.tree.structure(grads) == jax.tree.structure(wanted)
        assert same(grads, wanted)
        assert same(nnx.state(ours, nnx.RngState), nnx.state(theirs, nnx.RngState))
        # Theirs does not move the scales.
        assert scales(theirs) == before != scales(ours)
        nnx.update(theirs, nnx.state(ours, AmaxState))


def test_scales_follow_amax() -> None:
    model = Net()
    nnx.jit(nn.value_and_grad(lambda model: loss(model, X) + loss(model, X / 64)))(model)
    found = states(model)
    # The layer is used twice; its larger input is the first.
    assert float(found["first.dot_general.state"].scale[0]) == scale_of(X)
    assert float(found["first.dot_general.state"].scale[1]) == scale_of(model.first.kernel[...])
    for state in found.values():
        assert np.all(np.asarray(state.scale) != 1)
        assert np.all(np.asarray(state.counts)[:, 1] > 0)
    second_use = found["first.dot_general.state"].counts[0, 1]
    assert second_use == 2 * X.size


def test_has_aux_argnums_and_several_models() -> None:
    def both(x, left, right, offset):
        return loss(left, x) + 3 * loss(right, x) + offset, x.shape

    left, right = Net(seed=1), Net(seed=2)
    gradient = nn.value_and_grad(both, argnums=(1, nnx.DiffState(2, nnx.Param)), has_aux=True)
    (value, aux), (one, two) = nnx.jit(gradient)(X, left, right, offset=5.0)
    assert (float(value) > 5, aux) == (True, X.shape)
    for grads, model in ((one, left), (two, right)):
        assert jax.tree.structure(grads) == jax.tree.structure(nnx.state(model, nnx.Param))
        assert all(s != [1, 1, 1] for s in scales(model).values())
    only = nnx.eval_shape(nn.value_and_grad(both, argnums=2, has_aux=True), X, left, right, 5.0)
    assert jax.tree.structure(only[1]) == jax.tree.structure(two)
    plain = nn.value_and_grad(lambda x: jnp.sum(x**2))(X)
    np.testing.assert_array_equal(plain[1], 2 * X)
    kernels = nnx.DiffState(1, nnx.All(nnx.Param, nnx.PathContains("kernel")))
    some = nnx.eval_shape(nn.grad(both, argnums=kernels, has_aux=True), X, left, right, 5.0)[0]
    paths = [tuple(map(str, path)) for path in nnx.to_flat_state(some).paths]
    assert paths == [("first", "kernel"), ("second", "kernel")]
    with pytest.raises(TypeError, match="argument 0 holds models in a list"):
        nnx.eval_shape(nn.value_and_grad(lambda models: loss(models[0], X)), [Net()])


def test_accumulation_is_one_step_of_the_history() -> None:
    microbatches = [X, X * 64, X / 64]
    model, whole = Net(), Net()
    for x in microbatches:
        ACCUMULATE(model, x)
    assert scales(model) == {path: [1, 1, 1] for path in scales(model)}
    nn.advance(model)
    state = states(model)["first.dot_general.state"]
    assert float(state.scale[0]) == scale_of(X * 64)
    assert np.sum(np.asarray(state.history) > -127, axis=-1).tolist() == [1, 1, 1]
    assert not np.any(state.tally)
    nnx.jit(nn.value_and_grad(lambda m: sum(loss(m, x) for x in microbatches)))(whole)
    assert (
        scales(whole)["first.dot_general.state"][:2] == scales(model)["first.dot_general.state"][:2]
    )


def test_a_tied_readout_holds_a_state_where_it_is_quantized() -> None:
    policy = dataclasses.replace(nn.as_policy("fp8_delayed"), exempt=frozenset())
    table = nn.Embed(6, 8, policy=policy, rngs=nnx.Rngs(0))
    nnx.jit(nn.value_and_grad(lambda table: jnp.sum(table.attend(X).data)))(table)
    assert states(table).keys() == {"amax"}
    assert scales(table)["amax"][0] == scale_of(X.astype(jnp.bfloat16))
    assert not states(nn.Embed(6, 8, policy="fp8_delayed", rngs=nnx.Rngs(0)))


def test_calibration_sets_static_scales() -> None:
    model = Net(dataclasses.replace(CONFIG, strategy=Static(margin=1)))
    before = nnx.state(model, nnx.Not(AmaxState))
    before = jax.tree.map(lambda x: x.copy(), before)
    nn.calibrate(model, [X, X * 32, X / 32], loss)
    assert same(before, nnx.state(model, nnx.Not(AmaxState)))
    found = scales(model)["first.dot_general.state"]
    assert found[0] == 2 * scale_of(X * 32)
    assert found[1] == 2 * scale_of(model.first.kernel[...])
    assert found[2] != 1
    # Another step does not move them.
    STEP(model, X * 1000)
    assert scales(model)["first.dot_general.state"] == found
    assert not any(state.calibrating for state in states(model).values())


def test_calibration_reaches_tiny_cotangents_at_once() -> None:
    """At scale 1 they would all be zero, layer after layer: nothing to measure."""

    def tiny(model, x):
        return loss(model, x) * 1e-12

    model, cold, step = Net(), Net(), nnx.jit(nn.value_and_grad(tiny))
    nn.calibrate(model, [X], tiny)
    step(cold, X)
    assert 0 < scales(model)["first.dot_general.state"][2] < 2.0**-40
    assert scales(cold)["first.dot_general.state"][2] == 1
    _, grads = step(model, X)
    assert np.any(grads["first"]["kernel"][...])


def test_calibration_errors() -> None:
    with pytest.raises(ValueError, match="calibrate: batches is empty"):
        nn.calibrate(Net(), [])
    with pytest.raises(ValueError, match="calibrate: the model holds no scales; give its layers"):
        nn.calibrate(Net(None), [X])
    with pytest.raises(TypeError) as told:
        nn.calibrate(Net(), [(X, X[:, 0])])
    assert "got a tuple of 2. Give loss=" in told.value.__notes__[-1]


LARGE = jnp.ones((4, 8)).at[0, 0].set(3000.0).at[1, 1].set(-500.0)


def saturating(strategy=None) -> nnx.Module:
    """Its weights are 1, so that only the first operand saturates."""
    config = MatmulConfig(strategy=Static() if strategy is None else strategy)
    layer = nnx.Linear(8, 2, dot_general=DotGeneral(config), rngs=nnx.Rngs(0))
    layer.kernel.set_value(jnp.ones((8, 2)))
    return layer


@nnx.jit
def watched(model, x):
    return nn.value_and_grad(lambda m: jnp.sum(m(x)))(model)[0]


def test_counts() -> None:
    model, monitor = saturating(), OverflowMonitor()
    for entry in monitor.read(model):
        assert (entry.saturated, entry.elements, entry.share) == (0, 0, 0.0)
    watched(model, LARGE)
    lhs, rhs, cotangent = monitor.read(model)
    assert (lhs.layer, lhs.tensor, lhs.scale) == ("dot_general.state", "lhs", 1.0)
    assert (lhs.saturated, lhs.elements, lhs.share) == (2, 32, 2 / 32)
    assert (lhs.steps_saturated, lhs.steps_not_finite) == (1, 0)
    for entry, tensor, size in ((rhs, "rhs", 16), (cotangent, "cotangent", 8)):
        assert (entry.tensor, entry.saturated, entry.elements) == (tensor, 0, size)
    watched(model, LARGE.at[2, 2].set(jnp.nan))
    watched(model, jnp.ones((4, 8)))
    lhs = monitor.read(model)[0]
    assert (lhs.saturated, lhs.steps_saturated, lhs.steps_not_finite) == (0, 2, 1)


def test_rebalance_moves_what_saturates_until_it_fits() -> None:
    model, monitor = saturating(), OverflowMonitor(limit=0.01)
    exact_at_any_scale = watched(model, jnp.ones((4, 8)) * 4)
    exact = float(np.sum(np.float64(LARGE)) * 2)
    values = []
    for _ in range(3):
        values.append(float(watched(model, LARGE)))
        moved = monitor.rebalance(model, 4.0)
        assert all(entry.tensor == "lhs" for entry in moved)
    # 3000 needs a scale of 8: two moves by 4, and none after.
    assert [entry.scale for entry in monitor.read(model)] == [16.0, 1.0, 1.0]
    assert values[0] < values[1] < values[2]
    assert values[2] == pytest.approx(exact, rel=2**-4)
    assert OverflowMonitor(limit=0.5).rebalance(model) == []
    assert watched(model, jnp.ones((4, 8)) * 4) == exact_at_any_scale


def test_layers_of_a_scan_are_counted_together() -> None:
    model = saturating()
    state = model.dot_general.state
    states = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), state.get_value())
    counts = jnp.broadcast_to(jnp.asarray([1.0, 4.0, 0.0, 1.0]), (3, 3, 4))
    state.set_value(
        quant.QuantState(states.scale, states.history, states.tally, counts, states.strategy)
    )
    entry = OverflowMonitor().read(model)[0]
    assert (entry.saturated, entry.elements, entry.steps_saturated) == (3, 12, 3)


class WithNumber(Net):
    """Returns a number of Python beside its output, as models do for a loss that is absent."""

    def __call__(self, x):
        return super().__call__(x), 0.0


def test_calibration_without_a_loss_is_forward_only() -> None:
    model, alone = WithNumber(), Net()
    nn.calibrate(model, iter([X]))
    nn.calibrate(alone, [X])
    assert scales(model) == scales(alone)
    for path, found in scales(model).items():
        assert found[0] != 1, path
        assert found[2] == 1, path


def test_hooks_of_einsum_take_the_scales_of_each_step() -> None:
    """jnp.einsum caches what it traced: the second step must not see the first one's state."""
    layer = nnx.Einsum("btk,kn->nbt", (8, 4), einsum_op=nn.EinsumOp(CONFIG), rngs=nnx.Rngs(0))
    x = X.reshape(2, 8, 8)
    first = layer(x)
    STEP(layer, x)
    found = scales(layer)["einsum_op.state"]
    assert sorted(found[:2]) == [scale_of(layer.kernel[...]), scale_of(X)]
    wanted = np.einsum("btk,kn->nbt", x, layer.kernel[...])
    # At scale 1 what is above 448 saturates; then both operands round by 2**-4 at most.
    assert np.max(np.abs(first - wanted)) > 100
    bound = 2 * 2**-4 * np.einsum("btk,kn->nbt", abs(x), abs(layer.kernel[...]))
    assert np.all(np.abs(layer(x) - wanted) <= bound)


test_errors = refuses(
    [
        *((ValueError, lambda n=n: OverflowMonitor(limit=n), "limit must be") for n in (-0.1, 1.0)),
        *(
            (ValueError, lambda f=f: OverflowMonitor().rebalance(saturating(), f), "factor must be")
            for f in (3.0, 0.0, -2.0)
        ),
    ]
)
