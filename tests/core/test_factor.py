"""Static factors: forward and backward are multiplied once each, and never the scale."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale.core import ScaledArray, multiply, scale, scale_bwd, scale_fwd

DTYPES = [jnp.float32, jnp.float16, jnp.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: t.__name__)
@pytest.mark.parametrize(("fwd", "bwd"), [(2.0, 0.25), (1.0, 3.0), (0.3, 1.0), (1e-6, 1e6)])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.vmap, jax.checkpoint])
def test_forward_and_backward(dtype: type, fwd: float, bwd: float, wrap: object) -> None:
    x = jnp.asarray([[0.7, -1.3], [5.0, 0.0]], dtype)
    dy = jnp.asarray([[0.011, 0.02], [-0.03, 0.05]], dtype)
    y, vjp = jax.vjp(wrap(lambda x: scale(x, fwd, bwd)), x)
    assert y.dtype == dtype
    for got, source, factor in ((y, x, fwd), (vjp(dy)[0], dy, bwd)):
        expected = (np.asarray(source, np.float32) * np.float32(factor)).astype(dtype)
        np.testing.assert_array_equal(got, expected)


def test_each_direction_alone() -> None:
    def both(fn):
        return jax.value_and_grad(lambda x: fn(x, 4.0))(2.0)

    assert tuple(map(float, both(scale_fwd))) == (8, 1)
    assert tuple(map(float, both(scale_bwd))) == (2, 4)


def test_scaled_array_keeps_its_scale() -> None:
    x = ScaledArray(jnp.ones(3, jnp.float16), 8.0)
    y, vjp = jax.vjp(lambda x: scale(x, 2.0, 5.0), x)
    assert y.dtype == jnp.float16
    np.testing.assert_array_equal(y.data, [2, 2, 2])
    assert float(y.scale) == 8
    dx = vjp(jax.tree.map(jnp.ones_like, y))[0]
    np.testing.assert_array_equal(dx.data, [5, 5, 5])


@pytest.mark.parametrize("number", [2, np.float32(2), np.float64(2), np.int32(2)])
def test_numbers_are_factors(number: object) -> None:
    assert float(scale(jnp.float32(3), number, number)) == 6


@pytest.mark.parametrize("factor", [jnp.float32(2), "2", None, 2j, np.ones(1)])
def test_other_factors_are_refused(factor: object) -> None:
    with pytest.raises(TypeError, match=r"unitscale\.ops\.scale: bwd must be a static Python"):
        scale(1.0, 1.0, factor)


@pytest.mark.parametrize("x", [1, jnp.arange(3), True])
def test_data_must_be_floating(x: object) -> None:
    with pytest.raises(TypeError, match="x must be a floating array; got dtype"):
        scale(x, 2.0)


def test_multiply_rounds_once_and_a_factor_of_1_is_nothing() -> None:
    x = jnp.asarray([1e-4, 6e4], jnp.float16)
    expected = (np.asarray(x, np.float32) * np.float32(1e-3)).astype(np.float16)
    np.testing.assert_array_equal(multiply(x, 1e-3), expected)
    assert not jax.make_jaxpr(lambda x: multiply(x, 1.0))(x).eqns


def test_8_bits_saturate() -> None:
    x = jnp.full(1, 300, jnp.float8_e4m3fn)
    y, vjp = jax.vjp(lambda x: scale(x, 2.0, -3.0), x)
    assert (y.item(), vjp(x)[0].item()) == (448, -448)


def test_forward_mode_is_explained() -> None:
    with pytest.raises(TypeError, match="unitscale: scale defines its backward pass only"):
        jax.jacfwd(lambda x: scale(x, 2.0, 3.0))(jnp.ones(2))
