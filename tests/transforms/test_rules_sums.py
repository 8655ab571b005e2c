"""Sums and reductions."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

from unitscale import ScaledArray
from unitscale.transforms import get_data_scale, scalify

from .law import law
from .table import REDUCTIONS

test_value_and_gradient = law(REDUCTIONS)


@pytest.mark.parametrize(
    ("function", "scale"),
    [
        (lambda x, y: x + y, 8.0),
        (lambda x, y: y - x, 8.0),
        (lambda x, y: x + x, 2.0),
        (lambda x, y: x + 1e-30, 2.0),
        (lambda x, y: x + 0.0, 2.0),
        (lambda x, y: jnp.sum(x), 2 * 16.0),
        (lambda x, y: jnp.sum(x, axis=0), 2 * 4.0),
        (lambda x, y: jnp.cumsum(x, axis=1), 2 * 4.0),
    ],
)
def test_static_scale(function: Callable[..., Any], scale: float) -> None:
    """Sums meet at the larger scale and grow by the root of the number of terms."""
    x = ScaledArray(jnp.ones((16, 16)), jnp.float32(2.0))
    y = ScaledArray(jnp.ones((16, 16)), jnp.float32(8.0))
    result = scalify(lambda a, b: get_data_scale(function(a, b))[1])(x, y)
    assert float(result) == scale
