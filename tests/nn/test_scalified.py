"""Models of other libraries under `scalify`, weights in float16: state, argument, closed over."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState

from unitscale import as_scaled, scalify, to_array

X = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)


def of_nnx() -> tuple[Any, Callable[..., Any]]:
    graph, state = nnx.split(nnx.Linear(4, 2, rngs=nnx.Rngs(0)))
    return state, lambda state, x: nnx.merge(graph, state)(x)


def of_linen() -> tuple[Any, Callable[..., Any]]:
    model = linen.Dense(2)
    return model.init(jax.random.key(0), X), model.apply


def of_haiku() -> tuple[Any, Callable[..., Any]]:
    model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([8, 2])(x)))
    return model.init(jax.random.key(0), X), model.apply


def of_equinox() -> tuple[Any, Callable[..., Any]]:
    model = eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_array)
    return params, lambda params, x: jax.vmap(eqx.combine(params, static))(x)


@pytest.mark.parametrize("library", [of_nnx, of_linen, of_haiku, of_equinox])
def test_loss_and_gradients_are_those_of_the_plain_model(library: Callable[[], Any]) -> None:
    params, apply = library()
    program = jax.value_and_grad(lambda params, x: jnp.mean(jnp.tanh(apply(params, x)) ** 2))
    found = jax.jit(scalify(program))(*as_scaled((params, jnp.asarray(X)), dtype=jnp.float16))
    for actual, expected in zip(
        jax.tree.leaves(to_array(found)), jax.tree.leaves(program(params, X)), strict=True
    ):
        size = float(np.max(np.abs(expected)))
        np.testing.assert_allclose(actual, expected, rtol=0, atol=4e-3 * size)


def test_models_as_arguments_closed_over_and_in_a_train_state() -> None:
    x = as_scaled(jnp.asarray(X), dtype=jnp.float16)
    dense = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    for result in (scalify(lambda m, x: m(x))(dense, x), scalify(lambda x: dense(x))(x)):
        np.testing.assert_allclose(result.value, dense(X), atol=4e-3)
    model = linen.Dense(2)
    state = TrainState.create(
        apply_fn=model.apply, params=model.init(jax.random.key(0), X), tx=optax.sgd(0.1)
    )

    def step(state: TrainState, x: Any) -> TrainState:
        grads = jax.grad(lambda p: jnp.mean(state.apply_fn(p, x) ** 2))(state.params)
        return state.apply_gradients(grads=grads)

    scaled = as_scaled(state, dtype=jnp.float16)
    for _ in range(2):
        scaled, state = scalify(step)(scaled, x), step(state, X)
    for a, e in zip(jax.tree.leaves(to_array(scaled)), jax.tree.leaves(state), strict=True):
        np.testing.assert_allclose(a, e, atol=4e-3)
