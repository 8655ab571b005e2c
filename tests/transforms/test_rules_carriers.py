"""Primitives that move elements and keep the scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from unitscale import ScaledArray, to_array
from unitscale.transforms import scalify

from .law import law
from .table import SHAPES

test_value_and_gradient = law(SHAPES)


@pytest.mark.parametrize(
    "function",
    [jnp.ravel, jnp.transpose, jnp.flip, lambda x: x[1], lambda x: -x, jnp.abs, jnp.sort],
)
def test_data_moves_and_the_scale_stays(function: Callable[..., Any]) -> None:
    x = ScaledArray(jnp.arange(6.0).reshape(2, 3), jnp.float32(3.0))
    result = scalify(function)(x)
    assert float(result.scale) == 3.0
    np.testing.assert_array_equal(result.data, function(x.data))


def test_a_scale_per_row_is_reduced_where_elements_move() -> None:
    x = ScaledArray(jnp.ones((2, 3)), jnp.asarray([[1.0], [8.0]]))
    np.testing.assert_array_equal(to_array(scalify(jnp.ravel)(x)), [1, 1, 1, 8, 8, 8])
    assert scalify(jnp.negative)(x).scale.shape == (2, 1)
