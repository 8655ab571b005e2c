"""The default rule: dequantize, apply, rescale."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from unitscale import ScaledArray
from unitscale.transforms import scalify

from .law import law
from .table import LINEAR_ALGEBRA

test_value_and_gradient = law(LINEAR_ALGEBRA)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("scale", [2.0**-30, 2.0**30])
def test_results_are_rescaled_to_unit_size(scale: float, dtype: Any) -> None:
    matrix = ScaledArray(jnp.asarray([[4.0, 1.0], [1.0, 3.0]], dtype), jnp.float32(scale))
    result = scalify(jnp.linalg.cholesky)(matrix)
    assert result.dtype == dtype
    assert 0.5 <= np.sqrt(np.mean(np.square(np.asarray(result.data, np.float32)))) <= 2
    exact = np.linalg.cholesky(np.asarray(matrix.value, np.float64))
    step = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(result.value, exact, rtol=2 * step, atol=0)
