"""Casts, complex numbers and Fourier transforms."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from unitscale import ScaledArray, as_scaled, to_array
from unitscale.transforms import scalify

from .law import law
from .table import CASTS, FFT

test_value_and_gradient = law([*CASTS, *FFT])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_casts_are_measured_in_narrow_types_and_keep_the_scale_in_others(dtype: str) -> None:
    x = ScaledArray(jnp.asarray([1e30, -1e30]), jnp.float32(2.0))
    result = scalify(lambda a: a.astype(dtype))(x)
    assert result.dtype == dtype
    assert float(result.scale) == (2.0 if dtype == "bfloat16" else 2.0**101)
    np.testing.assert_allclose(to_array(result, jnp.float32), x.value, rtol=2.0**-3)


def test_integers_and_bools_have_no_scale() -> None:
    x = ScaledArray(jnp.asarray([1.0, 0.0]), jnp.float32(4.0))
    np.testing.assert_array_equal(scalify(lambda a: a.astype(jnp.int32))(x), [4, 0])
    np.testing.assert_array_equal(scalify(lambda a: a.astype(bool))(x), [True, False])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("factor", [2.0**-100, 2.0**-3, 1.0, 3.0, 2.0**13, 2.0**100])
def test_precision_is_reduced_of_values(factor: float, dtype: Any) -> None:
    def function(x: jax.Array) -> jax.Array:
        return lax.reduce_precision(x, 5, 2)

    data = jnp.asarray([1.0, -1.3, 6.1, 0.7], dtype)
    x = ScaledArray(data, jnp.float32(factor))
    np.testing.assert_array_equal(to_array(scalify(function)(x)), function(x.value))


def test_a_reduction_to_the_own_precision_keeps_the_scale() -> None:
    x = ScaledArray(jnp.asarray([1.0, -1.3]), jnp.float32(3.0))
    result = scalify(lambda a: lax.reduce_precision(a, 8, 23))(x)
    np.testing.assert_array_equal(result.data, x.data)
    assert float(result.scale) == 3.0


def test_float64_computes_in_float64() -> None:
    with jax.enable_x64(True):
        x = as_scaled(jnp.asarray([1e8] + [1.0] * 7, jnp.float32))
        for run in (
            lambda x: jnp.cumsum(x.astype(jnp.float64))[-1] - 1e8,
            lambda x: jnp.sum(x, dtype=jnp.float64) - 1e8,
        ):
            assert to_array(scalify(run)(x)).item() == 7
