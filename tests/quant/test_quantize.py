"""Quantization of one tensor."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from unitscale.core import ScaledArray
from unitscale.quant import fake_quantize, quantize

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
    assert y.scale == 1
    expected = x.astype(np.float32).astype(FORMATS[name])
    np.testing.assert_array_equal(np.asarray(y.data, np.float32), expected.astype(np.float32))


@pytest.mark.parametrize("name", FORMATS)
def test_saturates(name: str) -> None:
    top = float(ml_dtypes.finfo(FORMATS[name]).max)
    x = jnp.asarray([500.0, 1e9, -1e9, jnp.inf, -jnp.inf, jnp.nan])
    expected = [min(500.0, top) if name != "float8_e5m2" else 512.0, top, -top, top, -top, np.nan]
    np.testing.assert_array_equal(np.asarray(quantize(x, name).data, np.float32), expected)
    np.testing.assert_array_equal(fake_quantize(x, name), expected)


def test_scales_are_kept() -> None:
    x = ScaledArray(jnp.ones((2, 3)), jnp.asarray([1.0, 2.0, 4.0]))
    y = quantize(x, "e4m3fn")
    np.testing.assert_array_equal(y.scale, x.scale)
    np.testing.assert_array_equal(y.value, x.value)
    assert quantize(ScaledArray(jnp.ones(2), 0), "e4m3fn").scale == 0


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


def test_errors() -> None:
    with pytest.raises(ValueError, match="e4m4fn"):
        quantize(jnp.ones(2), "e4m4fn")
    with pytest.raises(TypeError, match=r"quantize: strategy must be Unit\(\); got 'dynamic'"):
        quantize(jnp.ones(2), "e4m3fn", "dynamic")
    with pytest.raises(TypeError, match="floating array; got dtype int32"):
        quantize(jnp.arange(2), "e4m3fn")
    with pytest.raises(ValueError, match="float9"):
        fake_quantize(jnp.ones(2), "float9")
