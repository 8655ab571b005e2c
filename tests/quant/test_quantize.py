"""Quantization of one tensor."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from unitscale.core import ScaledArray
from unitscale.quant import (
    Block,
    Delayed,
    Dynamic,
    Static,
    dequantize,
    fake_quantize,
    quantize,
)

FORMATS = {
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
}
X = np.float32([0.0, -0.0, 0.3, -1.7, 3e-3, 2e-3, 1e-9, 17.0, 300.0])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", FORMATS)
def test_rounds_to_nearest(name: str, dtype: str) -> None:
    x = X[np.abs(X) < float(ml_dtypes.finfo(FORMATS[name]).max)]
    x = x.astype(jnp.dtype(dtype))
    y = quantize(jnp.asarray(x), name)
    assert y.dtype == FORMATS[name]
    assert y.scale is None
    expected = x.astype(np.float32).astype(FORMATS[name])
    np.testing.assert_array_equal(np.asarray(y.data, np.float32), expected.astype(np.float32))


@pytest.mark.parametrize("name", FORMATS)
def test_saturates(name: str) -> None:
    top = float(ml_dtypes.finfo(FORMATS[name]).max)
    x = jnp.asarray([500.0, 1e9, -1e9, jnp.inf, -jnp.inf, jnp.nan])
    inf = np.inf if name == "float8_e5m2" else np.nan
    expected = [min(500.0, top) if name != "float8_e5m2" else 512.0, top, -top, inf, -inf, np.nan]
    np.testing.assert_array_equal(np.asarray(quantize(x, name).data, np.float32), expected)
    np.testing.assert_array_equal(fake_quantize(x, name), expected)


def test_scales_are_kept() -> None:
    x = ScaledArray(jnp.ones((2, 3)), jnp.asarray([1.0, 2.0, 4.0]))
    y = quantize(x, "e4m3fn")
    np.testing.assert_array_equal(y.scale, x.scale)
    np.testing.assert_array_equal(y.value, x.value)


def test_gradient_is_straight_through() -> None:
    x = jnp.asarray([0.3, 500.0, -1e9])
    dy = jnp.asarray([0.123, -4.567, 8.9])
    y, vjp = jax.vjp(lambda x: fake_quantize(x, "e4m3fn"), x)
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(vjp(dy)[0], dy)

    def value(x):
        return jnp.sum(quantize(ScaledArray(x, 4.0), "e4m3fn").data.astype(jnp.float32) * dy)

    # Through a real cast the cotangent has passed through 8 bits.
    rounded = np.asarray(dy).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(jax.grad(value)(x), rounded)


def test_fake_quantize_under_transformations() -> None:
    x = jnp.asarray(X)[None].repeat(2, 0)
    expected = fake_quantize(x, "e4m3fn")
    for f in (jax.jit, jax.vmap, jax.checkpoint):
        np.testing.assert_array_equal(f(lambda x: fake_quantize(x, "e4m3fn"))(x), expected)


def scale(x, strategy, axis=-1):
    chosen = jax.jit(lambda x: quantize(x, "e4m3fn", strategy, axis=axis).scale)(x)
    return np.asarray(chosen, np.float32)


def test_granularity_of_scales() -> None:
    x = np.float32([[448, 896, 0], [1, 0, 0], [0, 0, 0], [2, 7168, 0]])
    assert scale(x, Dynamic()) == 16
    np.testing.assert_array_equal(scale(x, Dynamic("channel")), [[2], [2.0**-8], [1], [16]])
    np.testing.assert_array_equal(scale(x, Dynamic("channel"), 0), [[1, 16, 1]])
    np.testing.assert_array_equal(scale(x, Dynamic("channel"), (0, 1)), [[16]])
    assert scale(x, Static(0.5)) == 0.5
    blocks = [[2, 1], [2.0**-8, 1], [1, 1], [16, 1]]
    np.testing.assert_array_equal(scale(x, Block(2)), blocks)
    np.testing.assert_array_equal(scale(x, Block(2, 2)), [[2, 1], [16, 1]])
    np.testing.assert_array_equal(
        scale(x, Block(3, 1, "float32"), 0), [[1, 2, 1], [2.0**-7, 16, 1]]
    )


@pytest.mark.parametrize("scale_format", ["float8_e8m0fnu", "float32"])
@pytest.mark.parametrize("shape", [(4, 64), (3, 70), (2, 5), (64,)])
def test_blocks_of_32(shape, scale_format) -> None:
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32) * 1e4
    q = quantize(jnp.asarray(x), "e4m3fn", Block(scale_format=scale_format))
    assert (q.dtype, q.scale.dtype.name) == (jnp.float8_e4m3fn, scale_format)
    assert q.scale.shape == (*shape[:-1], -(-shape[-1] // 32))
    value, full = np.float32(q.value), np.float32(q.full_scale)
    # Half of a step of E4M3: relative where the quotient is normal, else of subnormal numbers.
    assert np.all(np.abs(value - x) <= np.maximum(np.abs(x) * 2.0**-4, full * 2.0**-10))
    np.testing.assert_array_equal(dequantize(q).astype(jnp.float32), value)
    assert dequantize(q).dtype == jnp.bfloat16
    assert dequantize(quantize(jnp.asarray(x), "float16", Dynamic())).dtype == jnp.float32


def test_blocks_of_zeros_beside_others() -> None:
    x = jnp.zeros((2, 64)).at[0, 3].set(1e-30)
    q = quantize(x, "e4m3fn", Block())
    np.testing.assert_allclose(q.value, x, rtol=2**-4)
    np.testing.assert_array_equal(np.float32(q.scale)[1], [1, 1])


def test_scales_multiply_those_that_data_has() -> None:
    x = ScaledArray(jnp.full((2, 3), 896.0), jnp.asarray([[1.0], [4.0]]))
    q = quantize(x, "e4m3fn", Dynamic())
    np.testing.assert_array_equal(q.scale, [[2], [8]])
    np.testing.assert_array_equal(q.value, x.value)
    with pytest.raises(ValueError, match=r"Block\(\) takes an array, or a ScaledArray without a"):
        quantize(x, "e4m3fn", Block())


@pytest.mark.parametrize(
    "strategy", [Dynamic(), Dynamic("channel"), Static(2.0), Block(2)], ids=str
)
def test_scales_are_constants_of_the_gradient(strategy) -> None:
    """Data space: a whole number passes both casts, and the scale has no derivative."""
    x = jnp.asarray([[448.0, 896.0, 3.0], [2.0, 1.0, 0.0]])
    grad = jax.grad(lambda x: jnp.sum(quantize(x, "e4m3fn", strategy).value))(x)
    np.testing.assert_array_equal(grad, jnp.ones_like(x))


def test_errors() -> None:
    with pytest.raises(ValueError, match="e4m4fn"):
        quantize(jnp.ones(2), "e4m4fn")
    with pytest.raises(TypeError, match=r"quantize: strategy must be Unit.*Block.*; got 'dynamic'"):
        quantize(jnp.ones(2), "e4m3fn", "dynamic")
    with pytest.raises(TypeError, match="floating array; got dtype int32"):
        quantize(jnp.arange(2), "e4m3fn")
    for strategy in (Delayed(), Static(), Static((1.0, 2.0, 4.0))):
        with pytest.raises(ValueError, match=r"one tensor needs one scale; got (Delayed|Static)"):
            quantize(jnp.ones(2), "e4m3fn", strategy)
    with pytest.raises(ValueError, match="axis must be among the 2 dimensions; got 2"):
        quantize(jnp.ones((2, 2)), "e4m3fn", Dynamic("channel"), axis=2)
    with pytest.raises(ValueError, match="float9"):
        fake_quantize(jnp.ones(2), "float9")


def test_the_scale_of_what_has_one_stays_in_range() -> None:
    """Beyond it a zero would be infinity times 0; what is beyond it itself saturates."""
    x = ScaledArray(jnp.array([0.0, 2.0**40, -(2.0**40)]), jnp.float32(2.0**100))
    y = quantize(x, "e4m3fn", Dynamic())
    assert float(y.scale) == 2.0**127
    np.testing.assert_array_equal(y.data.astype(jnp.float32), [0, 448, -448])
    assert float(y.value[0]) == 0
    tiny = quantize(ScaledArray(x.data * 2.0**-100, jnp.float32(2.0**-100)), "e4m3fn", Dynamic())
    assert float(tiny.scale) == 2.0**-126
    np.testing.assert_array_equal(tiny.value, 0)  # 2^-160
    y = quantize(ScaledArray(x.data * 2.0**-60, jnp.float32(2.0**100)), "e4m3fn", Dynamic())
    np.testing.assert_array_equal(y.value, [0, 2.0**80, -(2.0**80)])


def test_a_fake_that_rounds_up_stays_finite() -> None:
    x = jnp.float16([65504, np.inf, np.nan])
    np.testing.assert_array_equal(fake_quantize(x, "bfloat16"), np.float16([65504, np.inf, np.nan]))
