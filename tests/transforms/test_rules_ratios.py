"""Ratios and roots."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale import ScaledArray, as_scaled, to_array
from unitscale.transforms import get_data_scale, scalify

from .law import law
from .table import RATIOS

test_value_and_gradient = law(RATIOS)


@pytest.mark.parametrize("scale", [2.0**-40, 0.5, 1.0, 8.0, 2.0**41, 3.0])
def test_roots_have_the_scale_of_their_own_size(scale: float) -> None:
    for dtype, rtol in ((jnp.float16, 1e-3), (jnp.float32, 1e-6)):
        x = ScaledArray(jnp.asarray([1.0, 0.25, 4.0], dtype), jnp.float32(scale))
        value, root = scalify(lambda a: (jnp.sqrt(a), get_data_scale(jnp.sqrt(a))[1]))(x)
        assert dtype == jnp.float32 or 0.5 < float(root) / np.sqrt(scale) <= 2.0
        expected = np.sqrt(scale * np.asarray(x.data, np.float64))
        np.testing.assert_allclose(to_array(value), expected, rtol=rtol)


def test_small_second_moments_survive_float16() -> None:
    """g**2, its average and the ratio to its root are rounded once, at the end."""
    g = as_scaled(jnp.asarray([1e-4, 3e-8, -2e-7]), dtype=jnp.float16)
    update = jax.jit(scalify(lambda x: x / (jnp.sqrt(0.001 * x**2) + 1e-12)))(g)
    assert update.dtype == jnp.float16
    np.testing.assert_allclose(update.value, np.sign(g.value) * 1000**0.5, rtol=2e-3)
