import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from unitscale.core import cast, format_of
from unitscale.optim._float8 import decode, encode, has_fast_path
from unitscale.optim._rounding import round_finite

FORMATS = ["float8_e4m3fn", "float8_e5m2"]


def bits(x) -> np.ndarray:
    return np.asarray(lax.bitcast_convert_type(x, jnp.uint8))


@pytest.mark.parametrize("dtype", FORMATS)
def test_every_number_decodes_to_itself_and_back(dtype: str) -> None:
    codes = np.arange(256, dtype=np.uint8)
    data = lax.bitcast_convert_type(jnp.asarray(codes), jnp.dtype(dtype))
    expected = np.asarray(data).astype(np.float32)
    finite = np.isfinite(expected)
    found = np.asarray(jax.jit(decode)(data))
    np.testing.assert_array_equal(found[finite], expected[finite])
    np.testing.assert_array_equal(np.signbit(found), np.signbit(expected) | (codes >= 128))
    again = bits(jax.jit(encode, static_argnums=1)(jnp.asarray(expected[finite]), dtype))
    np.testing.assert_array_equal(again, codes[finite])


@pytest.mark.parametrize("dtype", FORMATS)
def test_rounds_as_cast_does(dtype: str) -> None:
    """Ties and their neighbours between all numbers, and random ones of every exponent."""
    fmt = format_of(dtype)
    codes = jnp.arange(128, dtype=jnp.uint8)
    grid = np.asarray(lax.bitcast_convert_type(codes, jnp.dtype(dtype))).astype(np.float32)
    grid = np.sort(grid[np.isfinite(grid)])
    ties = (grid[1:] + grid[:-1]) / 2
    rng = np.random.default_rng(0)
    some = 2.0 ** rng.uniform(-40, np.log2(fmt.max), 20000)
    x = np.concatenate([grid, ties, np.nextafter(ties, 0), np.nextafter(ties, np.inf), some])
    x = np.concatenate([x, -x]).astype(np.float32)
    found = bits(jax.jit(encode, static_argnums=1)(jnp.asarray(x), dtype))
    np.testing.assert_array_equal(found, bits(cast(jnp.asarray(x), dtype)))


@pytest.mark.parametrize("dtype", FORMATS)
def test_saturates_and_shows_what_is_not_finite(dtype: str) -> None:
    x = jnp.float32([1e6, -1e6, 3e38, jnp.inf, -jnp.inf, jnp.nan])
    data = jax.jit(encode, static_argnums=1)(x, dtype)
    largest = format_of(dtype).max
    expected = [largest, -largest, largest, *[np.nan] * 3]
    np.testing.assert_array_equal(np.asarray(data).astype(np.float32), np.float32(expected))
    np.testing.assert_array_equal(jax.jit(decode)(data), np.float32(expected))


@pytest.mark.parametrize("dtype", FORMATS)
def test_other_devices_round_alike(dtype: str) -> None:
    """By their own instructions, which this one does too, in more time."""
    x = np.random.default_rng(0).normal(0, 2, 4096).astype(np.float32)
    x = np.concatenate([x * 2.0**e for e in range(-20, 16, 5)])
    found = jax.jit(encode, static_argnums=1)(x, dtype)
    np.testing.assert_array_equal(bits(found), bits(round_finite(jnp.asarray(x), dtype)))
    np.testing.assert_array_equal(jax.jit(decode)(found), np.asarray(found).astype(np.float32))


def test_formats_with_another_zero_take_the_slow_path() -> None:
    assert all(map(has_fast_path, FORMATS))
    assert not has_fast_path("float8_e4m3fnuz")
    assert not has_fast_path("float16")
