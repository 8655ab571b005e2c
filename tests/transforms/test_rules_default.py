"""The default rule: dequantize, apply, rescale."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale import ScaledArray, as_scaled, to_array
from unitscale.transforms import scalify

from .law import law
from .table import LINEAR_ALGEBRA

test_value_and_gradient = law(LINEAR_ALGEBRA)


@pytest.mark.parametrize("dtype", [jnp.float16])
@pytest.mark.parametrize("scale", [2.0**-30, 2.0**30])
def test_results_are_rescaled_to_unit_size(scale: float, dtype: Any) -> None:
    matrix = ScaledArray(jnp.asarray([[4.0, 1.0], [1.0, 3.0]], dtype), jnp.float32(scale))
    result = scalify(jnp.linalg.cholesky)(matrix)
    assert result.dtype == dtype
    assert 0.5 <= np.sqrt(np.mean(np.square(np.asarray(result.data, np.float32)))) <= 2
    exact = np.linalg.cholesky(np.asarray(matrix.value, np.float64))
    step = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(result.value, exact, rtol=2 * step, atol=0)


@pytest.mark.parametrize("size", [1e-9, 1.0, 1e9])
def test_the_parts_of_a_factorization_may_differ_in_size(size: float) -> None:
    """Those of `lu` are in one array: L near 1, U near the matrix."""
    matrix = as_scaled(jnp.asarray([[4.0, 1.0], [1.0, 3.0]]) * jnp.float32(size), dtype=jnp.float16)
    right = jnp.asarray([1.0, -2.0])
    for f in (jnp.linalg.solve, lambda a, b: jnp.linalg.inv(a) @ b * 1.0):
        found = to_array(jax.jit(scalify(f))(matrix, right))
        expected = f(matrix.value, right)
        step = float(jnp.finfo(jnp.float16).eps)
        np.testing.assert_allclose(found, expected, rtol=0, atol=step * np.abs(expected).max())


@pytest.mark.parametrize("size", [1e5, 1.0, 1e-9])
def test_magnitudes_of_complex_results(size: float) -> None:
    matrix = jnp.asarray([[1.0, -2.0], [3.0, 0.5]]) * size

    def radius(a: jax.Array) -> jax.Array:
        return jnp.abs(jnp.linalg.eigvals(a)).max()

    found = scalify(radius)(as_scaled(matrix, dtype="float16"))
    exact = np.abs(np.linalg.eigvals(np.asarray(matrix, np.float64))).max()
    np.testing.assert_allclose(to_array(found, jnp.float32), exact, rtol=2e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_reference_that_starts_from_a_scaled_array(dtype: str) -> None:
    def double(x: jax.Array) -> jax.Array:
        ref = jax.new_ref(x)
        ref[...] = 2 * ref[...]
        return ref[...] + 1

    found = jax.jit(scalify(double))(as_scaled(jnp.arange(4.0), dtype=dtype))
    np.testing.assert_array_equal(to_array(found, jnp.float32), [1, 3, 5, 7])
