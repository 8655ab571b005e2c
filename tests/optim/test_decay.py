import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.optimizers import scaled
from unitscale.optim import independent_weight_decay


@pytest.mark.parametrize("rate", [1.0, 1e-3])
def test_the_share_depends_on_neither_rate_nor_schedule(rate: float) -> None:
    schedule = optax.linear_schedule(0.0, rate, 3)
    tx = optax.chain(optax.sgd(schedule), independent_weight_decay(0.125))
    params, zero = {"w": jnp.array([2.0, -4.0])}, {"w": jnp.zeros(2)}
    state = tx.init(params)
    for _ in range(4):
        updates, state = tx.update(zero, state, params)
        np.testing.assert_array_equal(updates["w"], -0.125 * params["w"])


def test_mask_and_scaled_weights() -> None:
    inner = independent_weight_decay(0.25, {"w": True, "b": False})
    tx = scaled(inner)
    params = tx.scale_params({"w": jnp.full(3, 3.0), "b": jnp.ones(2)})
    grads = {"w": jnp.zeros(3), "b": jnp.zeros(2)}
    params, _ = tx.step(params, tx.init(params), grads)
    np.testing.assert_array_equal(params["w"].value, np.full(3, 2.25))
    np.testing.assert_array_equal(params["b"].value, np.ones(2))


@pytest.mark.parametrize("decay", [-0.1, 1.0, float("nan")])
def test_errors(decay: float) -> None:
    with pytest.raises(ValueError, match=r"decay must be the share of a weight .*; got"):
        independent_weight_decay(decay)
