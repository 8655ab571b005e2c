"""Serialization by Flax and jax.export, and models of other libraries under scalify."""

import functools
from typing import Any

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx, serialization
from flax.training.train_state import TrainState
from jax import export

import unitscale
from tests.exported import assert_is_read_again
from tests.optimizers import scaled
from unitscale import ScaledArray, as_scaled, nn, scalify, to_array

X = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)


assert_same = functools.partial(chex.assert_trees_all_equal, strict=True)


@pytest.mark.parametrize(
    "options",
    [{}, {"weights": "bfloat16", "block": 4}, {"weights": "e5m2", "moments": ("e4m3fn",) * 2}],
    ids=["5 bytes", "blocks", "3 bytes"],
)
def test_what_is_restored_is_what_was_saved(options: dict[str, Any]) -> None:
    def stepped(seed: int) -> Any:
        tx = scaled(optax.adamw(1e-2), **options)
        w = np.random.default_rng(seed).normal(size=(4, 8))
        params = tx.scale_params({"w": jnp.asarray(w, jnp.float32), "b": jnp.zeros(8)})
        is_leaf = lambda x: isinstance(x, ScaledArray)  # noqa: E731
        grads = jax.tree.map(lambda x: x.value, params, is_leaf=is_leaf)
        return tx.step(params, tx.init(params), grads)

    saved, other = stepped(0), stepped(1)
    assert_same(serialization.from_bytes(other, serialization.to_bytes(saved)), saved)


def test_a_model_with_its_optimizer() -> None:
    """With delayed scales, moments that are trees of `nnx.State`, and lists."""

    @nnx.jit
    def step(model, optimizer):
        _, grads = nn.value_and_grad(lambda m: jnp.sum(m(jnp.ones((2, 16))) ** 2))(model)
        optimizer.update(model, grads)

    def trained(steps: int) -> Any:
        model = nnx.Sequential(*(nnx.Linear(16, 16, rngs=nnx.Rngs(i)) for i in range(2)))
        nn.convert(model, "fp8_delayed")
        optimizer = nn.Optimizer(model, scaled(optax.adamw(1e-2)), wrt=nnx.Param)
        for _ in range(steps):
            step(model, optimizer)
        return nnx.state((model, optimizer))

    states = trained(2), trained(0)
    for saved, other in (states, map(nnx.to_pure_dict, states)):
        assert_same(serialization.from_bytes(other, serialization.to_bytes(saved)), saved)


def test_a_program_is_read_with_its_cache() -> None:
    assert_is_read_again(nn.KVCache.create(1, 4, 2, 8, jnp.float16))


def test_layers_of_any_batch() -> None:
    """Only gradients depend on the number of items."""
    rngs = nnx.Rngs(0)
    layers = nn.Dense(8, 8, rngs=rngs), nn.LayerNorm(8, rngs=rngs), nn.Readout(8, 4, rngs=rngs)
    model = nnx.Sequential(*layers)
    signature = jax.ShapeDtypeStruct(export.symbolic_shape("batch, 8"), jnp.float32)
    program = jax.jit(lambda x: model(x).value)
    with pytest.raises(
        TypeError, match=r"rules\.dense: batch .* inside unitscale\.batch_size\(n\)"
    ):
        export.export(program)(signature)
    with unitscale.batch_size(1):
        exported = export.export(program)(signature)
    x = jnp.linspace(-1.0, 1.0, 24).reshape(3, 8)
    np.testing.assert_allclose(exported.call(x), program(x), rtol=1e-6)


@pytest.mark.slow
def test_models_as_arguments_closed_over_and_in_a_train_state() -> None:
    x = as_scaled(jnp.asarray(X), dtype=jnp.float16)
    dense = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    for result in (scalify(lambda m, x: m(x))(dense, x), scalify(lambda x: dense(x))(x)):
        np.testing.assert_allclose(result.value, dense(X), atol=4e-3)
    mlp = eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(0))
    params, static = eqx.partition(mlp, eqx.is_array)
    program = lambda params, x: jax.vmap(eqx.combine(params, static))(x)  # noqa: E731
    found = scalify(program)(as_scaled(params, dtype=jnp.float16), x)
    np.testing.assert_allclose(found.value, program(params, X), atol=4e-3)
    model = linen.Dense(2)
    state = TrainState.create(
        apply_fn=model.apply, params=model.init(jax.random.key(0), X), tx=optax.sgd(0.1)
    )

    def step(state: TrainState, x: Any) -> TrainState:
        grads = jax.grad(lambda p: jnp.mean(state.apply_fn(p, x) ** 2))(state.params)
        return state.apply_gradients(grads=grads)

    scaled = as_scaled(state, dtype=jnp.float16)
    for _ in range(2):
        scaled, state = jax.jit(scalify(step))(scaled, x), step(state, X)
    chex.assert_trees_all_close(to_array(scaled), state, atol=4e-3)


def test_without_a_scale_and_what_is_refused() -> None:
    x = ScaledArray(jnp.arange(3.0))
    state = serialization.to_state_dict(x)
    assert state["scale"] is None
    restored = serialization.from_state_dict(ScaledArray(jnp.zeros(3)), state)
    np.testing.assert_array_equal(restored.value, x.value)
    with pytest.raises(ValueError, match="data, scale; got ndarray"):
        serialization.from_bytes(x, serialization.to_bytes(jnp.ones(3)))
    of_model = nnx.state(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="keys bias, kernel; got"):
        serialization.from_state_dict(of_model, {"kernel": jnp.ones((2, 2))})
