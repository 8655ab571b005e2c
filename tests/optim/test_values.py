import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.optimizers import scaled
from unitscale import ScaledArray, optim, to_array

TREES = [
    {"w": ScaledArray(jnp.ones((2, 3), dtype), scale), "b": jnp.arange(3.0) * scale}
    for dtype, scale in [("float16", 4.0), ("float32", 2.0**-9), ("float8_e4m3fn", 2.0**20)]
]


def same(got, wanted) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)


@pytest.mark.parametrize("tree", TREES)
def test_norms(tree) -> None:
    np.testing.assert_allclose(
        jax.jit(optim.global_norm)(tree), optax.tree.norm(to_array(tree, jnp.float32)), rtol=1e-6
    )


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (optim.clip_by_global_norm(0.5), optax.clip_by_global_norm(0.5)),
        (optim.clip_by_global_norm(1e12), optax.clip_by_global_norm(1e12)),
        (optim.ema(0.9), optax.ema(0.9)),
        (optim.ema(0.5, debias=False), optax.ema(0.5, debias=False)),
    ],
    ids=["clips", "too small to clip", "ema", "ema without debias"],
)
def test_transformations_are_those_of_optax_on_values(ours, theirs) -> None:
    state, wanted_state = ours.init(TREES[0]), theirs.init(to_array(TREES[0], jnp.float32))
    for tree in TREES:
        updates, state = ours.update(tree, state)
        wanted, wanted_state = theirs.update(to_array(tree, jnp.float32), wanted_state)
        same(updates, wanted)
    same(state, wanted_state)


def test_an_average_of_parameters() -> None:
    wanted = optax.incremental_update(*(to_array(t, jnp.float32) for t in TREES[:2]), 0.25)
    same(optim.incremental_update(*TREES[:2], 0.25), wanted)


def test_narrow_arrays_are_widened_too() -> None:
    tree = {"w": jnp.ones(100_000, jnp.float16), "b": jnp.ones(2, jnp.bfloat16)}
    np.testing.assert_allclose(optim.global_norm(tree), 100_002**0.5, rtol=1e-6)
    clipped, _ = (tx := optim.clip_by_global_norm(1.0)).update(tree, tx.init(tree))
    np.testing.assert_allclose(clipped["w"][0], 100_002**-0.5, rtol=1e-3)
    moved = optim.incremental_update(tree, tree, 0.5)
    assert {x.dtype.name for x in jax.tree.leaves(moved)} == {"float32"}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("inner", [optax.adagrad(0.1), optax.lamb(0.1), optax.adam(0.1)])
def test_state_of_narrow_parameters_keeps_its_types(inner, dtype: str) -> None:
    tx, params = scaled(inner, weights=None, moments=(None, None)), {"w": jnp.ones(9, dtype)}

    def step(carry, _):
        return tx.step(*carry, params), None

    (new, _), _ = jax.lax.scan(step, (params, tx.init(params)), None, 2)
    assert new["w"].dtype == dtype
    assert jnp.all(new["w"] < 1)


def test_numbers_are_parameters_as_in_optax() -> None:
    assert optim.apply_updates([1.0], [0.5]) == [1.5]
    for tx in (optim.skip_nonfinite(optax.sgd(0.5)), scaled(optax.sgd(0.5), weights=None)):
        assert tx.step([1.0], tx.init([1.0]), [1.0])[0] == [0.5]


def test_a_key_outlives_a_step_that_takes_the_memory_of_its_state() -> None:
    key = jax.random.key(0)
    for seed in (key, np.int64(0)):
        tx = scaled(optax.adam(0.1), rounding="stochastic", key=seed)
        params = tx.scale_params({"w": jnp.ones(4)})
        step = jax.jit(tx.step, donate_argnums=(0, 1))
        state = tx.init(params)
        np.testing.assert_array_equal(jax.random.key_data(state.key), jax.random.key_data(key))
        step(params, state, {"w": jnp.ones(4)})
    assert not key.is_deleted()
