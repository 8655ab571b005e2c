"""Loops: carried scales reach a fixed point."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from unitscale import ScaledArray, as_scaled, to_array
from unitscale.transforms import scalify

from .law import law
from .table_control import LOOPS

test_value_and_gradient = law(LOOPS)


@pytest.mark.parametrize("factor", [0.5, 0.75, 0.99, 3.0])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_what_a_loop_carries_stays_at_unit_size_or_at_its_value(factor: float, dtype: Any) -> None:
    x = as_scaled(jnp.asarray([1.0, -2.0, 0.5]), dtype=dtype)
    result = scalify(lambda a: lax.fori_loop(0, 50, lambda i, c: c * factor, a))(x)
    if dtype == jnp.float16:
        assert 0.25 <= np.sqrt(np.mean(np.square(np.asarray(result.data, np.float64)))) <= 4
    else:
        assert float(result.scale) == 1
    exact = np.asarray(x.value, np.float64) * factor**50
    tolerance = 50 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(result.value, exact, rtol=tolerance)


def test_an_accumulator_that_starts_at_zero_takes_the_scale_of_its_terms() -> None:
    x = as_scaled(jnp.full((8, 3), 3e-7), dtype=jnp.float16)
    total = scalify(lambda a: lax.scan(lambda c, v: (c + v, None), jnp.zeros(3), a)[0])(x)
    assert total.dtype == jnp.float16
    np.testing.assert_allclose(total.value, 8 * 3e-7, rtol=4e-3)


def test_scanned_items_have_a_scale_each() -> None:
    x = ScaledArray(jnp.ones((2, 3)), jnp.asarray([[2.0], [16.0]]))
    sums = scalify(lambda a: lax.map(lambda v: v * 2, a))(x)
    np.testing.assert_array_equal(to_array(sums), 2 * x.value)
    assert sums.scale.size == 2


def test_no_turns() -> None:
    def run(x, rows):
        return lax.scan(lambda c, a: (c + a, c * a), x, rows), lax.map(lambda a: a * 2, rows)

    x, rows = as_scaled((jnp.float32(3), jnp.zeros(0)), dtype=jnp.float16)
    (carry, out), doubled = scalify(run)(x, rows)
    assert (carry.value, out.shape, doubled.shape) == (3, (0,), (0,))


@pytest.mark.parametrize("size", [1.0, 1e6, 1e-9])
def test_complex_numbers_cross(size: float) -> None:
    def states(x):
        turn = 0.9 * jnp.exp(0.3j)
        step = lambda h, u: (turn * h + u, (h.real, jnp.abs(h)))  # noqa: E731
        return lax.scan(step, jnp.zeros(3, jnp.complex64), x)[1]

    x = jnp.asarray(np.random.default_rng(0).normal(size=(6, 3)) * size, jnp.float32)
    found = to_array(jax.jit(scalify(states))(as_scaled(x, dtype="float16")), jnp.float32)
    for a, b in zip(found, states(x), strict=True):
        np.testing.assert_allclose(a, b, rtol=5e-3, atol=5e-3 * size)
