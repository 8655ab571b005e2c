from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale.core import ScaledArray, rebalance, to_array
from unitscale.optim import value_gradients

RNG = np.random.default_rng(0)
VALUE = jnp.asarray(RNG.uniform(0.5, 2, (4, 6)), jnp.float32)
SCALES = {
    "none": None,
    "one": 1,
    "tensor": jnp.float32(2.0**-7),
    "channel": jnp.asarray(2.0 ** np.arange(-3, 3), jnp.float32),
    "e8m0": jnp.float32(2.0**5).astype(jnp.float8_e8m0fnu),
}


def loss(params):
    return jnp.sum(jnp.sin(to_array(params)["w"])) + jnp.sum(to_array(params)["b"] ** 2)


def split(scale, dtype="float32"):
    data = VALUE if scale is None else VALUE / np.asarray(scale).astype(np.float32)
    return ScaledArray(data.astype(dtype), scale)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("kind", SCALES)
def test_cotangents_of_data_become_gradients_of_the_value(kind: str, dtype: str) -> None:
    params = {"w": split(SCALES[kind], dtype), "b": jnp.ones(3)}

    @jax.jit
    def gradients(params):
        return value_gradients(jax.grad(loss)(params), params), params["w"].value

    out, value = gradients(params)
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(out["w"], np.cos(value), rtol=eps, atol=eps)
    np.testing.assert_array_equal(out["b"], 2 * np.ones(3))
    assert out["w"].dtype == jnp.float32


def test_blocks() -> None:
    scale = jnp.asarray([[2.0, 4.0, 8.0], [0.5, 1.0, 16.0]])
    full = np.kron(scale, np.ones((2, 2)))
    params = {"w": ScaledArray(VALUE / full, scale, block_shape=(2, 2)), "b": jnp.ones(3)}
    out = value_gradients(jax.grad(loss)(params), params)
    np.testing.assert_allclose(out["w"], np.cos(VALUE), rtol=1e-6)


@pytest.mark.parametrize("power", [-12, 5])
def test_rescaling_a_parameter_changes_no_gradient(power: int) -> None:
    params = {"w": split(SCALES["tensor"]), "b": jnp.ones(3)}
    moved = {"w": rebalance(params["w"], 2.0**power), "b": jnp.ones(3)}
    np.testing.assert_array_equal(
        value_gradients(jax.grad(loss)(params), params)["w"],
        value_gradients(jax.grad(loss)(moved), moved)["w"],
    )


def test_everything_else_is_its_own_value() -> None:
    w = split(SCALES["tensor"])
    plain = value_gradients(jnp.full((4, 6), 0.5, jnp.bfloat16), w)
    np.testing.assert_array_equal(plain, np.full((4, 6), 0.5))
    assert plain.dtype == jnp.float32
    received = ScaledArray(jnp.ones((4, 6), jnp.float8_e4m3fn), 2.0**-5)
    np.testing.assert_array_equal(value_gradients(received, w), np.full((4, 6), 2.0**-5))
    static = ScaledArray(jnp.ones((4, 6)), 1)
    np.testing.assert_array_equal(value_gradients(static, w), np.ones((4, 6)))
    np.testing.assert_array_equal(value_gradients(received, VALUE), np.full((4, 6), 2.0**-5))
    assert value_gradients({"a": None}, {"a": None}) == {"a": None}


def test_errors() -> None:
    params = {"w": split(None), "b": jnp.ones(3)}
    with pytest.raises(ValueError, match="gradients must have the structure of params; got"):
        value_gradients({"w": VALUE}, params)
    with pytest.raises(ValueError, match=r"the shapes of params; got \(6, 4\) for \(4, 6\)"):
        value_gradients({"w": VALUE.T, "b": jnp.ones(3)}, params)
