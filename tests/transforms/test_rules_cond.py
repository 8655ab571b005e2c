"""Branches agree on the scale of each result."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from unitscale import ScaledArray
from unitscale.transforms import scalify

from .law import law
from .table_control import CONDS

test_value_and_gradient = law(CONDS)


@pytest.mark.parametrize("value", [1.0, -1.0])
def test_each_branch_leaves_with_its_own_scale(value: float) -> None:
    x = ScaledArray(jnp.full(4, value, jnp.float16), jnp.float32(1.0))
    result = scalify(lambda a: lax.cond(a[0] > 0, lambda b: b * 2**20, lambda b: b / 2**20, a))(x)
    assert float(result.scale) == (2.0**20 if value > 0 else 2.0**-20)
    np.testing.assert_array_equal(np.abs(result.data), 1)
