"""Scales in NNX models: recorded by gradients, invisible to everything else."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from unitscale import nn
from unitscale.nn import AmaxState, DotGeneral
from unitscale.quant import Block, Delayed, Dynamic, MatmulConfig, Unit

from .delayed import ACCUMULATE, CONFIG, PLAIN, STEP, Net, X, loss, same, scale_of, scales, states

pytestmark = pytest.mark.filterwarnings("ignore::unitscale.quant.StaleScalesWarning")


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


def test_some_parameters_only() -> None:
    model = Net()
    kernels = nnx.All(nnx.Param, nnx.PathContains("kernel"))
    gradient = nn.value_and_grad(loss, argnums=nnx.DiffState(0, kernels))
    _, grads = nnx.jit(gradient)(model, X)
    assert sorted(map(str, nnx.to_flat_state(grads).paths)) == [
        "('first', 'kernel')",
        "('second', 'kernel')",
    ]
    assert all(s != [1, 1, 1] for s in scales(model).values())


def test_models_in_a_container_are_refused() -> None:
    with pytest.raises(TypeError, match="argument 0 holds models in a list"):
        nnx.eval_shape(nn.value_and_grad(lambda models: loss(models[0], X)), [Net()])


def test_a_model_without_states() -> None:
    model = Net(None)
    value, grads = STEP(model, X)
    expected, wanted = PLAIN(Net(None), X)
    assert value == expected
    assert same(grads, wanted)
    nn.advance(model)


def test_clipping_and_decay_never_see_the_state() -> None:
    """Half an update of clipping and decay too large to overlook."""
    model = Net()
    chain = optax.chain(
        optax.clip_by_global_norm(1e-3), optax.add_decayed_weights(0.5), optax.sgd(1.0)
    )
    optimizer = nnx.Optimizer(model, chain, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        _, grads = nn.value_and_grad(loss)(model, X)
        before = nnx.state(model, AmaxState)
        before = jax.tree.map(lambda x: x + 0, before)
        optimizer.update(model, grads)
        return before, optax.tree.norm(grads)

    kernel = model.first.kernel[...]
    before, norm = step(model, optimizer)
    assert same(before, nnx.state(model, AmaxState))
    wanted = optax.tree.norm(PLAIN(Net(), X)[1])
    np.testing.assert_allclose(norm, wanted, rtol=1e-5)
    # Decay took half of the weight; the clipped gradient moved it by a thousandth at most.
    assert float(jnp.max(jnp.abs(model.first.kernel[...] - kernel / 2))) <= 1.1e-3
    assert not any("amax" in str(p).lower() for p in nnx.to_flat_state(nnx.state(optimizer)).paths)


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


def test_resume_goes_on_bit_for_bit() -> None:
    """A model's state in the middle of an accumulation has scales, history and tally."""
    model = Net()
    STEP(model, X)
    ACCUMULATE(model, X * 8)
    kept = jax.device_get(nnx.to_pure_dict(nnx.state(model)))
    fresh = Net(seed=9)
    state = nnx.state(fresh)
    nnx.replace_by_pure_dict(state, kept)
    nnx.update(fresh, state)
    assert same(nnx.state(fresh), nnx.state(model))
    for m in (fresh, model):
        nn.advance(m)
    assert same(STEP(fresh, X), STEP(model, X))
    assert scales(fresh) == scales(model)
    assert scales(fresh)["first.dot_general.state"][0] == scale_of(X * 8)


def test_scan_over_layers_and_remat() -> None:
    sizes = jnp.asarray([1.0, 64.0, 2.0**-10])

    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs):
        return nnx.Linear(8, 8, dot_general=DotGeneral(CONFIG), rngs=rngs)

    layers = make(nnx.Rngs(0))

    def run(layers, x):
        @nnx.scan(in_axes=(nnx.Carry, 0, 0), out_axes=nnx.Carry)
        def body(x, layer, size):
            y = nnx.remat(lambda layer, x: layer(x))(layer, x * size)
            return x + 0 * y

        return jnp.sum(body(x, layers, sizes) ** 2) + 0 * jnp.sum(x)

    nnx.jit(nn.value_and_grad(run))(layers, X)
    (state,) = states(layers).values()
    assert state.scale.shape == (3, 3)
    np.testing.assert_array_equal(state.scale[:, 0], [scale_of(X * size) for size in sizes])


@pytest.mark.parametrize("policy", ["fp8_dynamic", "fp8_delayed", "fp8_static", "mxfp8"])
def test_layers_of_this_library(policy: str) -> None:
    layer = nn.MLP(8, 16, policy=policy, rngs=nnx.Rngs(0))
    conv = nn.Conv(8, 8, 3, policy=policy, rngs=nnx.Rngs(0))
    model = nnx.Dict(mlp=layer, conv=conv)
    held = states(model)
    assert all(path.endswith(".amax") for path in held)
    stateful = policy in ("fp8_delayed", "fp8_static")
    assert len(held) == (3 if stateful else 0)

    def total(model, x):
        return jnp.sum(model["conv"](model["mlp"](x))) ** 2

    x = jnp.ones((2, 4, 8)).at[0, 0, 0].set(1000.0)
    value, grads = nnx.jit(nn.value_and_grad(total))(model, x)
    assert np.all([np.all(np.isfinite(g)) for g in [value, *jax.tree.leaves(grads)]])
    moved = [s != [1, 1, 1] for s in scales(model).values()]
    assert all(moved) == (policy == "fp8_delayed") or not moved
    if stateful:
        assert all(float(s.counts[0, 1]) > 0 for s in states(model).values())
    # An exempt readout holds no state.
    readout = nn.Readout(8, 4, policy=policy, rngs=nnx.Rngs(0))
    assert not states(readout)


def test_einsum_takes_the_scales_of_each_step() -> None:
    """jnp.einsum caches what it traced: the second step must not see the first one's state."""
    op = nn.EinsumOp(CONFIG)
    layer = nnx.Einsum("btk,kn->nbt", (8, 4), einsum_op=op, rngs=nnx.Rngs(0))
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


def test_a_tied_readout_holds_a_state_where_it_is_quantized() -> None:
    policy = dataclasses.replace(nn.as_policy("fp8_delayed"), exempt=frozenset())
    table = nn.Embed(6, 8, policy=policy, rngs=nnx.Rngs(0))
    nnx.jit(nn.value_and_grad(lambda table: jnp.sum(table.attend(X).data)))(table)
    assert states(table).keys() == {"amax"}
    assert scales(table)["amax"][0] == scale_of(X.astype(jnp.bfloat16))
    assert not states(nn.Embed(6, 8, policy="fp8_delayed", rngs=nnx.Rngs(0)))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [Unit(), Dynamic(), Delayed(), Block()], ids=str)
def test_strategies_of_amax_train_on_gradients_that_unit_loses(strategy) -> None:
    """A plain network, whose cotangents a loss in small units makes smaller than E5M2 holds."""
    model = Net(MatmulConfig(cotangent="e5m2", strategy=strategy))
    model.eval()
    optimizer = nnx.Optimizer(model, optax.adam(1e-2, eps=1e-30), wrt=nnx.Param)
    x = X / 1000
    y = jnp.tanh(x @ jax.random.normal(jax.random.key(1), (8, 4)))

    @nnx.jit
    def step(model, optimizer):
        error = lambda model: 1e-9 * jnp.mean(jnp.square(model(x) - y))  # noqa: E731
        value, grads = nn.value_and_grad(error)(model)
        optimizer.update(model, grads)
        return value

    losses = [float(step(model, optimizer)) for _ in range(100)]
    assert (losses[-1] < 0.2 * losses[0]) == (strategy != Unit())
