"""What a CPU does on integers is what other platforms do by their own instructions."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from unitscale.core import cast, decode_float8, format_of, is_float8
from unitscale.core._cast import _convert
from unitscale.optim._storage import round_finite

FORMATS = ["float8_e4m3fn", "float8_e5m2"]


def bits(x) -> np.ndarray:
    return np.asarray(lax.bitcast_convert_type(x, jnp.uint8))


def numbers(dtype: str) -> np.ndarray:
    """Ties and their neighbours between all numbers, and random ones of every exponent."""
    fmt = format_of(dtype)
    codes = jnp.arange(128, dtype=jnp.uint8)
    grid = np.asarray(lax.bitcast_convert_type(codes, jnp.dtype(dtype))).astype(np.float32)
    grid = np.sort(grid[np.isfinite(grid)])
    ties = (grid[1:] + grid[:-1]) / 2
    some = 2.0 ** np.random.default_rng(0).uniform(-40, 2 + np.log2(fmt.max), 20000)
    x = np.concatenate([grid, ties, np.nextafter(ties, 0), np.nextafter(ties, np.inf), some])
    return np.concatenate([x, -x]).astype(np.float32)


@pytest.mark.parametrize("dtype", FORMATS)
def test_every_number_decodes_to_itself_and_back(dtype: str) -> None:
    codes = np.arange(256, dtype=np.uint8)
    data = lax.bitcast_convert_type(jnp.asarray(codes), jnp.dtype(dtype))
    expected = np.asarray(data).astype(np.float32)
    finite = np.isfinite(expected)
    found = np.asarray(jax.jit(decode_float8)(data))
    np.testing.assert_array_equal(found[finite], expected[finite])
    np.testing.assert_array_equal(np.signbit(found), np.signbit(expected) | (codes >= 128))
    np.testing.assert_array_equal(bits(cast(expected[finite], dtype)), codes[finite])


@pytest.mark.parametrize("source", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", FORMATS)
def test_rounds_and_saturates_as_xla_does(dtype: str, source: str) -> None:
    x = jnp.asarray(numbers(dtype)).astype(source)
    expected = jax.jit(partial(_convert, fmt=format_of(dtype)))(x)
    np.testing.assert_array_equal(bits(cast(x, dtype)), bits(expected))


@pytest.mark.parametrize("dtype", FORMATS)
def test_optimizers_round_alike_on_other_devices(dtype: str) -> None:
    x, fmt = jnp.asarray(numbers(dtype)), format_of(dtype)
    expected = jax.jit(lambda x: jnp.clip(x, -fmt.max, fmt.max).astype(fmt.dtype))(x)
    found = round_finite(x, dtype)
    np.testing.assert_array_equal(bits(found), bits(expected))
    np.testing.assert_array_equal(jax.jit(decode_float8)(found), found.astype(jnp.float32))


@pytest.mark.parametrize("dtype", FORMATS)
def test_what_is_not_finite(dtype: str) -> None:
    """A cast keeps infinity where its format has it; what an optimizer stores is NaN."""
    x = jnp.float32([1e6, -1e6, 3e38, jnp.inf, -jnp.inf, jnp.nan])
    fmt = format_of(dtype)
    finite = np.float32([fmt.max, -fmt.max, fmt.max])
    for rounding, beyond in ((cast, np.inf if fmt.has_inf else np.nan), (round_finite, np.nan)):
        found = np.asarray(rounding(x, dtype)).astype(np.float32)
        np.testing.assert_array_equal(found, [*finite, beyond, -beyond, np.nan])
    np.testing.assert_array_equal(
        jax.jit(decode_float8)(round_finite(x, dtype)), [*finite, *[np.nan] * 3]
    )


def test_formats_with_another_zero_are_converted_by_xla() -> None:
    assert all(map(is_float8, FORMATS))
    assert not any(map(is_float8, ("float8_e4m3fnuz", "float16", None)))
