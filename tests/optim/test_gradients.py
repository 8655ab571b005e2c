import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.optimizers import scaled
from unitscale import ScaledArray

WEIGHT = ScaledArray(jnp.ones((4, 6)), 4.0)
PARAMS = {"w": WEIGHT, "b": jnp.ones(3)}
TX = scaled(optax.sgd(1.0))


def update(grads):
    return TX.update(grads, TX.init(PARAMS), PARAMS)[0]


def test_gradients_reach_the_inner_optimizer_in_float32() -> None:
    updates = update({"w": jnp.full((4, 6), 0.5, jnp.bfloat16), "b": jnp.ones(3)})
    np.testing.assert_array_equal(updates["w"], np.full((4, 6), -0.5))
    assert updates["w"].dtype == jnp.float32


def test_gradients_in_data_space_are_refused() -> None:
    by_data = jax.grad(lambda p: jnp.sum(p["w"].value))(PARAMS)
    with pytest.raises(TypeError, match=r"a ScaledArray at grads\['w'\].*unitscale\.grad"):
        update(by_data)


def test_trees_and_shapes_must_fit() -> None:
    with pytest.raises(ValueError, match="gradients must have the structure of params; got"):
        update({"w": jnp.ones((4, 6))})
    with pytest.raises(ValueError, match=r"got \(6, 4\) for \(4, 6\) at grads\['w'\]"):
        update({"w": jnp.ones((6, 4)), "b": jnp.ones(3)})
