"""Primitives that move elements and keep the scale."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale import ScaledArray, as_scaled, to_array
from unitscale.transforms import scalify

from .law import law
from .table import IDS, SHAPES, A

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


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_scatters_of_narrow_data(dtype: Any) -> None:
    def function(x: jax.Array) -> Any:
        ends = jax.ops.segment_max(x, IDS, 4), jax.ops.segment_min(x, IDS, 4)
        return *ends, x.at[IDS[1:3]].apply(jnp.sin), jnp.zeros_like(x).at[IDS].add(x)

    def within(x: jax.Array) -> Any:
        return jax.ops.segment_sum(x.astype(jnp.bfloat16), IDS, 4).astype(jnp.float32)

    x, step = as_scaled(50 * A, dtype=dtype), float(jnp.finfo(jnp.bfloat16).eps)
    for f in (function, within):
        expected, actual = f(x.value), to_array(scalify(f)(x))
        for e, a in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
            np.testing.assert_allclose(a, e, rtol=4 * step, atol=step)
