import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from unitscale.core import cast, format_of
from unitscale.optim._float8 import decode, encode, has_fast_path

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


def test_formats_with_another_zero_take_the_slow_path() -> None:
    assert all(map(has_fast_path, FORMATS))
    assert not has_fast_path("float8_e4m3fnuz")
    assert not has_fast_path("float16")
