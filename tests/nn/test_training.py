"""Gradients by value, the scales that models keep, and the optimizer."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.modules import build
from tests.nn.table import parameters, sine_loss
from tests.optimizers import scaled
from tests.refusals import refuses
from unitscale import ScaledArray, nn, quant, to_array
from unitscale.nn import AmaxState, DotGeneral, OverflowMonitor
from unitscale.optim import skip_nonfinite, umup
from unitscale.quant import Delayed, Dynamic, MatmulConfig, Static

CONFIG = MatmulConfig(cotangent="e5m2", strategy=Delayed(history=4))
X = jnp.asarray(1000 * np.random.default_rng(0).normal(size=(16, 8)), jnp.float32)


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


def states(model) -> dict[str, quant.QuantState]:
    return {path: v.get_value() for path, v in nn.amax_states(model)}


def scales(model) -> dict[str, list[float]]:
    return {path: np.ravel(s.scale).tolist() for path, s in states(model).items()}


def scale_of(x, dtype: str = "e4m3fn") -> float:
    return float(quant.quantize(x, dtype, Dynamic()).scale)


@pytest.mark.filterwarnings("ignore::unitscale.quant.StaleScalesWarning")
def test_is_a_drop_in_for_nnx_value_and_grad() -> None:
    """Values, gradients, dropout masks and the state of random keys are the same."""
    ours, theirs = Net(), Net()
    plain = nnx.jit(nnx.value_and_grad(loss))
    for x in (X, X * 64):
        before = scales(ours)
        value, grads = STEP(ours, x)
        expected, wanted = plain(theirs, x)
        assert value == expected
        chex.assert_trees_all_equal(grads, wanted)
        chex.assert_trees_all_equal(nnx.state(ours, nnx.RngState), nnx.state(theirs, nnx.RngState))
        # Theirs does not move the scales.
        assert scales(theirs) == before != scales(ours)
        nnx.update(theirs, nnx.state(ours, AmaxState))


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


def test_decorators_and_modes_are_those_of_flax() -> None:
    """Also for code that uses NNX models as plain trees."""
    model, x = nn.Dense(3, 2, rngs=nnx.Rngs(0)), jnp.arange(3.0)

    @nn.value_and_grad(argnums=(0, 1))
    def both(model, x):
        return model(x).value.sum()

    value, (_, by_input) = both(model, x)
    np.testing.assert_array_equal(value, model(x).value.sum())
    second = nn.grad(argnums=1)(lambda model, x: model(x).value.sum())
    np.testing.assert_array_equal(second(model, x), by_input)
    last = nn.grad(lambda model, x, power=1: model(x**power).value.sum(), argnums=-1)
    np.testing.assert_array_equal(last(model, x), by_input)
    delayed = nn.MLP(3, 4, policy="fp8_delayed", rngs=nnx.Rngs(0))
    with nnx.set_graph_mode(False):
        nnx.jit(both)(delayed, x)
    assert all((v.get_value().counts[0, 1] > 0) for _, v in nn.amax_states(delayed))


@pytest.mark.slow
def test_accumulation_is_one_step_of_the_history() -> None:
    microbatches = [X, X * 64, X / 64]
    model, whole = Net(), Net()
    for x in microbatches:
        ACCUMULATE(model, x)
    assert scales(model) == {path: [1, 1, 1] for path in scales(model)}
    nn.advance(model)
    state = states(model)["first.dot_general.state"]
    assert state.scale[:2].tolist() == [scale_of(X * 64), scale_of(model.first.kernel[...])]
    assert np.sum(np.asarray(state.history) > -127, axis=-1).tolist() == [1, 1, 1]
    assert not np.any(state.tally)
    nnx.jit(nn.value_and_grad(lambda m: sum(loss(m, x) for x in microbatches)))(whole)
    expected = states(whole)["first.dot_general.state"]
    np.testing.assert_array_equal(expected.scale[:2], state.scale[:2])
    assert expected.counts[0, 1] == 3 * X.size


@pytest.mark.slow
def test_scales_of_experts_in_a_scan_over_layers() -> None:
    """Each layer of the scan keeps its own scales, as without a scan."""
    options = {"mlp": functools.partial(nn.MoE, experts=2), "policy": "fp8_delayed"}
    stack = build(lambda: nn.TransformerStack(2, 8, 2, 12, **options, rngs=nnx.Rngs(0)))
    kernel = stack.layers[1].mlp.experts.up.kernel
    kernel.set_value(kernel[...] * 64)
    scanned = stack.with_scan(True)
    gradient = nnx.jit(nn.grad(sine_loss))
    for model in (stack, scanned):
        gradient(model, X[None, :3] / 1000)
    one_by_one, found = states(stack), states(scanned)
    for path, state in found.items():
        each = [one_by_one[path.replace("layers.", f"layers.{i}.", 1)] for i in range(2)]
        assert np.all(state.counts[..., 1] > 0), path
        # A value that rounds the other way may move an amax beyond a power of two.
        ratio = np.stack([own.scale for own in each]) / np.asarray(state.scale)
        assert set(np.unique(ratio)) <= {0.5, 1.0, 2.0}, path
    up = found["layers.mlp.experts.up.amax"].scale[:, 1]
    assert up[1] == 64 * up[0]


def test_a_tied_readout_holds_a_state_where_it_is_quantized() -> None:
    policy = dataclasses.replace(nn.as_policy("fp8_delayed"), exempt=frozenset())
    table = nn.Embed(6, 8, policy=policy, rngs=nnx.Rngs(0))
    nnx.jit(nn.value_and_grad(lambda table: jnp.sum(table.attend(X).data)))(table)
    assert states(table).keys() == {"amax"}
    assert scales(table)["amax"][0] == scale_of(X.astype(jnp.bfloat16))
    assert not states(nn.Embed(6, 8, policy="fp8_delayed", rngs=nnx.Rngs(0)))


def test_hooks_of_einsum_take_the_scales_of_each_step() -> None:
    """jnp.einsum caches traces: the second step must not use the state of the first one."""
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


# Calibration.


def test_calibration_sets_static_scales() -> None:
    model = Net(dataclasses.replace(CONFIG, strategy=Static(margin=1)))
    before = jax.tree.map(lambda x: x.copy(), nnx.state(model, nnx.Not(AmaxState)))
    nn.calibrate(model, [X, X * 32, X / 32], loss)
    chex.assert_trees_all_equal(before, nnx.state(model, nnx.Not(AmaxState)))
    found = scales(model)["first.dot_general.state"]
    assert found[:2] == [2 * scale_of(X * 32), 2 * scale_of(model.first.kernel[...])]
    assert found[2] != 1
    # Another step does not move them.
    STEP(model, X * 1000)
    assert scales(model)["first.dot_general.state"] == found
    assert not any(state.calibrating for state in states(model).values())


@pytest.mark.slow
def test_calibration_reaches_tiny_cotangents_at_once() -> None:
    """At scale 1 all cotangents would be zero, with nothing to measure."""

    def tiny(model, x):
        return loss(model, x) * 1e-12

    x = X / 1000  # where tanh has a slope
    model, cold, step = Net(), Net(), nnx.jit(nn.value_and_grad(tiny))
    nn.calibrate(model, [x], tiny)
    step(cold, x)
    assert 0 < scales(model)["first.dot_general.state"][2] < 2.0**-40
    assert scales(cold)["first.dot_general.state"][2] == 1
    _, grads = step(model, x)
    assert np.any(grads["first"]["kernel"][...])


class WithNumber(Net):
    """A layer that also returns a Python number, as models do for a loss that is absent."""

    def __call__(self, x):
        return super().__call__(x), 0.0


@pytest.mark.slow
def test_calibration_without_a_loss_is_forward_only() -> None:
    model, alone = WithNumber(), Net()
    nn.calibrate(model, iter([X]))
    nn.calibrate(alone, [X])
    assert scales(model) == scales(alone)
    for path, found in scales(model).items():
        assert (found[0] != 1, found[2]) == (True, 1), path
    with pytest.raises(TypeError) as told:
        nn.calibrate(Net(), [(X, X[:, 0])])
    assert "got a tuple of 2. For batches with labels" in told.value.__notes__[-1]


# Overflow.

LARGE = jnp.ones((4, 8)).at[0, 0].set(3000.0).at[1, 1].set(-500.0)


def saturating() -> nnx.Module:
    """Make a layer with weights of 1, so that only the first operand saturates."""
    layer = nnx.Linear(
        8, 2, dot_general=DotGeneral(MatmulConfig(strategy=Static())), rngs=nnx.Rngs(0)
    )
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
    # Layers of a scan are counted together.
    state = model.dot_general.state
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), state.get_value())
    counts = jnp.broadcast_to(jnp.asarray([1.0, 4.0, 0.0, 1.0]), (3, 3, 4))
    state.set_value(dataclasses.replace(stacked, counts=counts))
    entry = OverflowMonitor().read(model)[0]
    assert (entry.saturated, entry.elements, entry.steps_saturated) == (3, 12, 3)


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


# Parameters that are ScaledArrays.


class Counting(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first = nn.Dense(8, 8, rngs=rngs)
        self.norm = nn.LayerNorm(8, rngs=rngs)
        self.calls = nnx.Variable(jnp.int32(0))

    def __call__(self, x):
        self.calls.set_value(self.calls.get_value() + 1)
        return self.norm(self.first(x))


def total(model, x, *, factor=1.0):
    return factor * jnp.sum(jnp.sin(to_array(model(x))))


def stored(scale: float = 1.0) -> Counting:
    """Store weights in float16, with every scale multiplied by a factor."""
    model = Counting()
    params = scaled(optax.sgd(1.0)).scale_params(nnx.state(model, nnx.Param))
    moved = lambda w: ScaledArray(w.data / scale, w.scale * scale)  # noqa: E731
    is_leaf = lambda x: isinstance(x, ScaledArray)  # noqa: E731
    nnx.update(model, jax.tree.map(moved, params, is_leaf=is_leaf))
    return model


def test_gradients_are_those_of_plain_parameters() -> None:
    x, model, plain = X / 1000, stored(2.0**7), Counting()
    nnx.update(plain, to_array(nnx.state(model, nnx.Param), jnp.float32))
    value, grads = nnx.jit(nn.value_and_grad(total))(model, x=x, factor=3.0)
    tripled = nnx.value_and_grad(lambda model, x: total(model, x, factor=3.0))
    wanted, expected = nnx.jit(tripled)(plain, x)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    chex.assert_trees_all_close(grads, expected, rtol=1e-4, atol=3e-4, strict=True)
    # The counter of the model goes on, and its weights are stored as they were.
    assert int(model.calls.get_value()) == 1
    assert model.first.kernel.get_value().dtype == jnp.float16
    assert float(model.first.kernel.get_value().scale) == 2.0**7


@pytest.mark.parametrize("has_aux", [False, True])
def test_a_loss_that_is_a_scaled_array_is_taken_by_its_value(has_aux: bool) -> None:
    def by_operators(model, x):
        value = (model(x) ** 2).mean()
        assert isinstance(value, ScaledArray)
        return (value, x) if has_aux else value

    model, x = stored(4.0), X / 1000
    value, grads = nnx.jit(nn.value_and_grad(by_operators, has_aux=has_aux))(model, x)
    value = value[0] if has_aux else value
    by_value = nn.value_and_grad(lambda model, x: jnp.mean(to_array(model(x)) ** 2))
    expected, wanted = nnx.jit(by_value)(model, x)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert isinstance(value, jax.Array)
    with pytest.raises(ValueError, match=r"models with unitscale\.nn\.value_and_grad"):
        nnx.value_and_grad(by_operators, has_aux=has_aux)(model, x)
    chex.assert_trees_all_close(grads, wanted, rtol=1e-4, atol=1e-5)


def test_the_model_of_the_caller_is_not_touched_while_the_loss_runs() -> None:
    model, seen = stored(), []
    before = model.first.kernel.get_value()

    def watching(inner, x):
        assert inner is not model
        seen.append(model.first.kernel.get_value().dtype)
        return total(inner, x)

    nn.grad(watching)(model, X)
    assert seen == [jnp.float16]
    with pytest.raises(ZeroDivisionError):
        nn.grad(lambda model: 1 / 0)(model)
    np.testing.assert_array_equal(model.first.kernel.get_value().data, before.data)


INPUTS = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8)), jnp.float32)


def mean_square(model) -> jax.Array:
    return jnp.mean((model(INPUTS).value - 1) ** 2)


def train(tx) -> tuple[nn.MLP, nn.Optimizer, list[float]]:
    model = build(lambda: nn.MLP(8, 16, rngs=nnx.Rngs(0)))
    optimizer = nn.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        value, grads = nn.value_and_grad(mean_square)(model)
        optimizer.update(model, grads)
        return value

    return model, optimizer, [float(step(model, optimizer)) for _ in range(2)]


def values(model) -> dict[str, np.ndarray]:
    return {path: np.asarray(to_array(p.get_value())) for path, p in parameters(model).items()}


def test_near_the_optimizer_of_flax_in_float32() -> None:
    tx, rate, steps = optax.adam(0.01), 0.01, 2
    model, optimizer, found = train(skip_nonfinite(scaled(tx)))
    plain, reference, expected = train(tx)
    assert int(optimizer.step[...]) == int(reference.step[...]) == steps
    # float16 weights; Adam's updates are rate-sized, and off by the rounding of e4m3 moments.
    np.testing.assert_allclose(found, expected, rtol=steps * 2**-10)
    for path, value in values(plain).items():
        near = steps * (2**-11 * np.maximum(np.abs(value), 1e-2) + 2 * rate * 2**-3)
        assert (np.abs(values(model)[path] - value) <= near).all(), path
    assert all(isinstance(p.get_value(), ScaledArray) for p in parameters(model).values())
    assert model.up.kernel.role == "weight"


def test_umup_and_accumulation_inside_and_a_merged_optimizer_goes_on() -> None:
    model = nn.Dense(8, 16, rngs=nnx.Rngs(0))
    before = values(model)
    inner = optax.chain(optax.clip_by_global_norm(1e9), optax.adam(0.25))
    inner = umup(inner, nnx.state(model, nnx.Param))
    tx = scaled(optax.MultiSteps(inner, 2).gradient_transformation(), weights="float32")
    optimizer = nn.Optimizer(model, tx, wrt=nnx.Param)
    update = nnx.jit(lambda model, optimizer, grads: optimizer.update(model, grads))
    grads = nn.grad(mean_square)(model)
    update(model, optimizer, grads)
    np.testing.assert_array_equal(values(model)["kernel"], before["kernel"])
    again_model, again = nnx.merge(*nnx.split((model, optimizer)))
    for m, o in ((model, optimizer), (again_model, again)):
        update(m, o, grads)
    moved = np.abs(values(model)["kernel"] - before["kernel"]).max()
    assert moved == pytest.approx(0.25 * 8**-0.5, rel=1e-3)
    for path, value in values(model).items():
        np.testing.assert_array_equal(value, values(again_model)[path])


def test_layers_that_vmap_has_stacked() -> None:
    model = nnx.vmap(lambda key: nn.Dense(8, 8, rngs=nnx.Rngs(key)))(
        jax.random.split(jax.random.key(0), 3)
    )
    nn.Optimizer(model, scaled(optax.sgd(1.0)), wrt=nnx.Param, stack_axes=1)
    assert model.bias.get_value().scale.shape == (3, 1)


def optimizer_of(model: nnx.Module, tx, **options) -> nn.Optimizer:
    return nn.Optimizer(model, tx, **options)


around = optax.chain(optax.clip_by_global_norm(1.0), scaled(optax.adam(0.1)))
ours = {"wrt": nnx.Param}
test_errors = refuses(
    [
        *((ValueError, lambda n=n: OverflowMonitor(limit=n), "limit must be") for n in (-0.1, 1.0)),
        *(
            (ValueError, lambda f=f: OverflowMonitor().rebalance(saturating(), f), "factor must be")
            for f in (3.0, 0.0, -2.0)
        ),
        (ValueError, lambda: nn.calibrate(Net(), []), "calibrate: batches is empty"),
        (ValueError, lambda: nn.calibrate(Net(None), [X]), "the model holds no scales"),
        (TypeError, lambda: nn.grad(lambda m: loss(m[0], X))([Net()]), "0 holds models in a list"),
        (TypeError, lambda: nn.grad(lambda w: w.sum())(ScaledArray(X)), r"scale\.value_and_grad"),
        (TypeError, lambda: optimizer_of(stored(), optax.sgd(0.1), **ours), r"as first\.bias"),
        (TypeError, lambda: optimizer_of(stored(), around, **ours), "A chain goes inside"),
        (ValueError, lambda: optimizer_of(Counting(), around, **ours), "clip inside scaled"),
        (TypeError, lambda: optimizer_of(Counting(), scaled(optax.adam(0.01))), "wrt"),
    ]
)


def test_a_stack_is_rebalanced_layer_by_layer() -> None:
    monitor = OverflowMonitor(limit=0.3)
    dots = (DotGeneral(MatmulConfig(strategy=Static())) for _ in range(2))
    one, other = (nnx.Linear(2, 2, dot_general=dot, rngs=nnx.Rngs(0)) for dot in dots)
    for layer, size in ((one, 1000.0), (other, 1.0)):
        nn.value_and_grad(lambda layer, size=size: layer(jnp.full((1, 2), size)).sum())(layer)
    stack = nn.stack_layers([one, other])
    moved = {entry.tensor: entry.scale for entry in monitor.rebalance(stack)}
    assert moved == {"lhs": 2.0}
