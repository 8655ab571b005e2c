"""Layers and models under the settings of JAX that a user may have on, and copied."""

import copy
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.nn.models import Decoder
from tests.nn.table import LAYERS, make
from tests.optimizers import scaled
from unitscale import nn

IDS = np.arange(12).reshape(2, 6) % 11


def loss(model: Any, x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sin(model(x).value.astype(jnp.float32)))


def step(model: Decoder, optimizer: nn.Optimizer) -> jax.Array:
    value, grads = nn.value_and_grad(lambda m: m.loss(jnp.asarray(IDS), jnp.asarray(IDS)))(model)
    optimizer.update(model, grads)
    return value


def trained(policy: str = "float16", **options: Any) -> tuple[Decoder, nn.Optimizer]:
    model = Decoder(8, policy=policy, layers=1, **options)
    tx = scaled(optax.sgd(0.1, momentum=0.9))
    return model, nn.Optimizer(model, tx, wrt=nnx.Param)


@pytest.mark.parametrize("policy", ["float16", "fp8_delayed"])
@pytest.mark.parametrize("name", LAYERS)
def test_strict_promotion(name, policy) -> None:
    model, layer = make(name, policy)
    with jax.numpy_dtype_promotion("strict"):
        grads = nnx.eval_shape(nn.grad(loss), model, layer.input())
    assert {g.dtype.name for g in jax.tree.leaves(grads)} == {"float32"}


@pytest.mark.parametrize("tied", [False, True])
def test_strict_promotion_of_a_step(tied) -> None:
    with jax.numpy_dtype_promotion("strict"):
        assert nnx.eval_shape(step, *trained("bfloat16", tied=tied)).dtype == jnp.float32


@pytest.mark.parametrize("name", LAYERS)
def test_ranks_that_are_not_promoted(name) -> None:
    model, layer = make(name, "float16")
    with jax.numpy_rank_promotion("raise"):
        nnx.eval_shape(nn.grad(loss), model, layer.input())


@pytest.mark.parametrize("tied", [False, True])
def test_ranks_that_are_not_promoted_in_a_step(tied) -> None:
    with jax.numpy_rank_promotion("raise"):
        assert nnx.eval_shape(step, *trained("bfloat16", tied=tied)).dtype == jnp.float32


@pytest.mark.parametrize("name", LAYERS)
def test_x64_changes_no_format(name) -> None:
    with jax.enable_x64(True):
        model, layer = make(name, "float16")
        x = layer.input(dtype=jnp.float16)
        y = nnx.eval_shape(lambda m, x: m(x), model, x)
        value, grads = nnx.eval_shape(nn.value_and_grad(loss), model, x)
    assert (y.dtype, value.dtype) == (jnp.float16, jnp.float32)
    assert {g.dtype.name for g in jax.tree.leaves(grads)} == {"float32"}


def test_a_step_under_debug_nans_makes_none() -> None:
    model, optimizer = trained("fp8_delayed", learned=True)
    with jax.debug_nans(True):
        assert np.isfinite(nnx.jit(step)(model, optimizer))


def test_gradients_without_jit_are_those_with() -> None:
    model, layer = make("gated", "float16")
    x = layer.input()
    expected = nnx.jit(nn.value_and_grad(loss))(model, x)
    with jax.disable_jit():
        found = nn.value_and_grad(loss)(model, x)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2**-8, atol=2**-8)


def test_a_copied_model_and_optimizer_go_on_alike() -> None:
    model, optimizer = trained("fp8_delayed")
    run = nnx.jit(step)
    run(model, optimizer)
    other = copy.deepcopy((model, optimizer))
    assert run(*other) == run(model, optimizer)
    same = jax.tree.map(np.array_equal, nnx.state(other), nnx.state((model, optimizer)))
    assert all(jax.tree.leaves(same))
    assert "scaled.<locals>.init" in repr(other[1])


def test_a_pickled_model_and_state_are_what_they_were() -> None:
    """Of an optimizer the state: the functions of an optax transformation cannot be pickled."""
    model, optimizer = trained("fp8_delayed")
    saved = pickle.dumps((model, nnx.state(model), nnx.state(optimizer)))
    again, state, of_optimizer = pickle.loads(saved)
    for found, expected in (
        (nnx.state(again), nnx.state(model)),
        (state, nnx.state(model)),
        (of_optimizer, nnx.state(optimizer)),
    ):
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        assert all(jax.tree.leaves(jax.tree.map(np.array_equal, found, expected)))
    assert nnx.graphdef(again) == nnx.graphdef(model)


def test_views_are_as_those_of_flax() -> None:
    model = nnx.Sequential(nn.Dropout(0.5, rngs=nnx.Rngs(0)), nn.BatchNorm(4, rngs=nnx.Rngs(0)))
    quiet = nnx.view(model, deterministic=True, use_running_average=True)
    assert (quiet.layers[0].deterministic, quiet.layers[1].use_running_average) == (True, True)
    assert (model.layers[0].deterministic, model.layers[1].use_running_average) == (False, False)
    with pytest.raises(ValueError, match="Unused keys"):
        nnx.view(model, determinstic=True)
    shown = nnx.view_info(model)
    assert "nothing is dropped" in shown
    assert "running averages" in shown
