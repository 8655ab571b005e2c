"""Functions of the value, and random numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from unitscale import ScaledArray, as_scaled, to_array
from unitscale.transforms import scalify

from .law import law
from .table import ACTIVATIONS, FUNCTIONS, RANDOM, SPECIAL

test_value_and_gradient = law([*FUNCTIONS, *ACTIVATIONS, *SPECIAL, *RANDOM])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_results_beyond_16_bits_are_kept(dtype: Any) -> None:
    x = as_scaled(jnp.asarray([20.0, 30.0, -30.0]), dtype=dtype)
    result = scalify(jnp.exp)(x)
    assert result.dtype == dtype
    exact = np.exp(np.asarray(x.value, np.float64))
    step = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(result.value, exact, rtol=8 * step, atol=step * exact.max())


TAILS: dict[str, Any] = {
    "log of a sigmoid": lambda x: jnp.log(jax.nn.sigmoid(-x)),
    "log of a distribution": jax.scipy.stats.norm.logsf,
    "log of its tail": lambda x: jnp.log(jax.lax.erfc(x)),
    "tail": jax.lax.erfc,
    "tail of gamma": lambda x: jax.scipy.special.gammaincc(2.0, 3 * x),
    "tail of beta": lambda x: jax.scipy.special.betainc(9.0, 2.0, x / 50),
}


@pytest.mark.parametrize("name", TAILS)
def test_tails_are_not_lost(name: str) -> None:
    """They are below the least float16, and one function of them is not."""
    x = as_scaled(jnp.asarray([5.0, 6.0, 7.0, 8.0]), dtype=jnp.float16)
    found = jax.jit(scalify(TAILS[name]))(x)
    assert found.dtype == jnp.float16
    step = float(jnp.finfo(jnp.float16).eps)
    expected = TAILS[name](x.value)
    np.testing.assert_allclose(
        found.value, expected, rtol=4 * step, atol=step * np.abs(expected).max()
    )


def test_random_numbers_are_those_of_the_plain_program() -> None:
    def draw(x: jax.Array, key: jax.Array) -> jax.Array:
        return x + jax.random.normal(key, x.shape)

    x, key = jnp.zeros(5), jax.random.key(1)
    actual = to_array(scalify(draw)(ScaledArray(x, jnp.float32(0.5)), key))
    np.testing.assert_allclose(actual, draw(x, key), rtol=1e-6)


def test_cumulated_logarithms_are_as_large_as_their_argument() -> None:
    x = jnp.array([1e6, 2e6, 3e6])
    found = scalify(lax.cumlogsumexp)(as_scaled(x, dtype=jnp.float16))
    np.testing.assert_allclose(to_array(found), x, rtol=2**-10)
