import jax
import jax.numpy as jnp
import numpy as np
import pytest

import unitscale
from unitscale.core import ScaledArray, as_scaled, rebalance, to_array

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


@pytest.mark.parametrize("dtype", ["float32", "float16", "float8_e4m3fn"])
@pytest.mark.parametrize("kind", SCALES)
def test_gradients_are_those_of_the_value(kind: str, dtype: str) -> None:
    params = {"w": split(SCALES[kind], dtype), "b": jnp.ones(3)}
    value, grads = jax.jit(unitscale.value_and_grad(loss))(params)
    wanted, plain = jax.jit(jax.value_and_grad(loss))(to_array(params, jnp.float32))
    assert jax.tree.structure(grads) == jax.tree.structure(plain)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    for name in grads:
        assert grads[name].dtype == jnp.float32
        np.testing.assert_allclose(grads[name], plain[name], rtol=1e-6, atol=1e-6)


def test_blocks() -> None:
    scale = jnp.asarray([[2.0, 4.0, 8.0], [0.5, 1.0, 16.0]])
    full = np.kron(scale, np.ones((2, 2)))
    params = {"w": ScaledArray(VALUE / full, scale, block_shape=(2, 2)), "b": jnp.ones(3)}
    np.testing.assert_allclose(unitscale.grad(loss)(params)["w"], np.cos(VALUE), rtol=1e-6)


@pytest.mark.parametrize("power", [-12, 5])
def test_rescaling_a_parameter_changes_no_gradient(power: int) -> None:
    params = {"w": split(SCALES["tensor"]), "b": jnp.ones(3)}
    moved = {"w": rebalance(params["w"], 2.0**power), "b": jnp.ones(3)}
    np.testing.assert_array_equal(
        unitscale.grad(loss)(params)["w"], unitscale.grad(loss)(moved)["w"]
    )


def test_gradients_of_a_float16_weight_with_a_large_scale_are_finite() -> None:
    w = ScaledArray(jnp.ones(2, jnp.float16), 2.0**10)
    f = lambda w: 100 * jnp.sum(w.value)  # noqa: E731
    assert np.isinf(jax.grad(f)(w).data).all()
    np.testing.assert_array_equal(unitscale.grad(f)(w), [100, 100])


def test_argnums_aux_and_keywords_as_in_jax() -> None:
    w, x = ScaledArray(jnp.ones(3), 2.0), jnp.arange(3.0)

    def f(w, x, *, power=1):
        y = jnp.sum(to_array(w) ** power * x)
        return y, {"y": y, "power": power}

    (value, aux), (dx, dw) = unitscale.value_and_grad(f, (1, 0), has_aux=True)(w, x, power=2)
    assert (float(value), float(aux["y"]), aux["power"]) == (12, 12, 2)
    np.testing.assert_array_equal(dx, [4, 4, 4])
    np.testing.assert_array_equal(dw, [0, 4, 8])
    last, _ = unitscale.grad(f, -1, has_aux=True)(w, x)
    np.testing.assert_array_equal(last, [2, 2, 2])
    with pytest.raises(TypeError, match="argnums=2 requires at least 3"):
        unitscale.grad(f, 2)(w, x)
    with pytest.raises(TypeError, match="int32"):
        unitscale.grad(lambda n: n.sum() * 1.0)(jnp.arange(3))


def test_a_scaled_loss_is_taken_by_its_value() -> None:
    x = jnp.array([1.0, 3.0])
    value, gradient = unitscale.value_and_grad(lambda x: (as_scaled(x, 4.0) ** 2).sum())(x)
    np.testing.assert_allclose((value, *gradient), (10, 2, 6))


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, lambda f: f], ids=["jit", "remat", ""])
def test_inside_and_outside_of_other_transformations(wrap) -> None:
    w = ScaledArray(jnp.ones((2, 3)), 4.0)
    f = wrap(lambda w: jnp.sum(to_array(w) ** 3))
    np.testing.assert_allclose(jax.jit(unitscale.grad(f))(w), np.full((2, 3), 48))
    # Twice: the Hessian's diagonal of a sum of cubes is 6 w.
    twice = unitscale.grad(lambda w: jnp.sum(unitscale.grad(f)(w)))(w)
    np.testing.assert_allclose(twice, np.full((2, 3), 24))


def test_values_are_mapped_first() -> None:
    a, b = ScaledArray(jnp.ones(2), 1.0), ScaledArray(jnp.full(2, 0.5, jnp.float16), 8.0)
    mean = unitscale.map_values(lambda x, y: (x + y) / 2, {"w": a, "n": 1}, {"w": b, "n": 3})
    np.testing.assert_array_equal(mean["w"], [2.5, 2.5])
    assert (mean["w"].dtype, mean["n"]) == (jnp.float32, 2)
    # A ScaledArray here, an array there.
    np.testing.assert_array_equal(unitscale.map_values(jnp.subtract, [b], [jnp.ones(2)])[0], [3, 3])
    with pytest.raises(ValueError, match="pytree structure"):
        unitscale.map_values(jnp.add, {"w": a}, {"v": b})
