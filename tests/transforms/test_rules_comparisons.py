"""Comparisons, choices and extremes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale import as_scaled, to_array
from unitscale.transforms import scalify

from .law import law
from .table import COMPARISONS

test_value_and_gradient = law(COMPARISONS)


@pytest.mark.parametrize("fill", [0.0, -np.inf, np.inf, np.nan])
def test_constant_fills_take_the_scale_of_the_other_operand(fill: float) -> None:
    x = as_scaled(jnp.asarray([1e-3, -2e-3, 3e-3]), dtype=jnp.float16)
    keep = jnp.asarray([True, False, True])
    result = scalify(lambda a: jnp.where(keep, a, fill))(x)
    np.testing.assert_allclose(result.value[keep], x.value[keep], rtol=1e-3)
    np.testing.assert_array_equal(result.value[1], np.float32(fill))


def test_gradient_of_a_maximum_of_different_scales() -> None:
    x = as_scaled(jnp.asarray([1.0, 300.0, -2.0]), dtype=jnp.float16)
    y = as_scaled(jnp.asarray([2e-3, -1e-3, 1e-3]), dtype=jnp.float16)
    gradient = scalify(jax.grad(lambda a, b: jnp.sum(jnp.maximum(a, b)), argnums=(0, 1)))(x, y)
    np.testing.assert_array_equal(to_array(gradient[0]), [1.0, 1.0, 0.0])
    np.testing.assert_array_equal(to_array(gradient[1]), [0.0, 0.0, 1.0])
