import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

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
