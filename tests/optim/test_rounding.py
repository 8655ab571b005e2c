"""Rounding that saturates and shows what is not finite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale.core import cast, format_of
from unitscale.optim._storage import round_finite

DTYPES = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3", "float16", "bfloat16", "float32"]


@pytest.mark.parametrize("key", [None, 0], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_is_a_cast_of_finite_numbers_and_nan_of_others(dtype: str, key: int | None) -> None:
    largest = format_of(dtype).max
    x = np.random.default_rng(0).normal(0, 3, 500)
    x = np.float32([*x, 0.0, -0.0, 1e-30, *np.array([1, -1]) * min(4 * largest, 3e38)])
    bad = np.float32([np.inf, -np.inf, np.nan])
    rounding = "nearest" if key is None else "stochastic"
    key = None if key is None else jax.random.key(key)

    @jax.jit
    def run(x, bad):
        own = round_finite(x, dtype, key), round_finite(bad, dtype, key)
        return *own, cast(x, dtype, rounding, key)

    found, of_bad, expected = (np.asarray(y).astype(np.float32) for y in run(x, bad))
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(expected))
    assert np.isnan(of_bad).all()
    assert jnp.dtype(round_finite(x, dtype, key).dtype) == jnp.dtype(dtype)
