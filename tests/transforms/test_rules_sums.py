"""Sums and reductions."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from unitscale import as_scaled, to_array
from unitscale.transforms import scalify

from .law import law
from .table import REDUCTIONS

test_value_and_gradient = law(REDUCTIONS)


POOLS: dict[str, Callable[..., Any]] = {
    "maximum": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID"),
    "minimum": lambda x: lax.reduce_window(x, jnp.inf, lax.min, (2, 3), (1, 1), "SAME"),
}


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn])
@pytest.mark.parametrize("name", POOLS)
def test_gradients_without_a_scale_are_chosen_by_narrow_data(name: str, dtype: Any) -> None:
    """Those of a plain sum of the pooled extremes are plain ones."""
    gradient = jax.grad(lambda x: jnp.sum(POOLS[name](x)))
    x = as_scaled(jnp.asarray(np.random.default_rng(0).normal(size=(4, 6))), dtype=dtype)
    expected = gradient(x.value.astype(jnp.float32))
    np.testing.assert_array_equal(to_array(scalify(gradient)(x)), expected)


def test_many_terms_of_one_place() -> None:
    """Of one sign they grow by their number, here beyond float16."""
    x = as_scaled(jnp.ones(100_000), dtype=jnp.float16)
    found = scalify(lambda x: jax.ops.segment_sum(x, jnp.zeros(x.shape, int), 1))(x)
    np.testing.assert_allclose(to_array(found), [1e5], rtol=2**-11)
