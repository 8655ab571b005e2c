"""The bits of stochastic rounding are uniform, and tell nothing of one another."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale.core import cast, dithered, format_of
from unitscale.core._cast import rounding_noise

SIZE = 2**18
KEY = jax.random.key(3)
SIGMAS = 5.0


def bits_of(words: np.ndarray) -> np.ndarray:
    """(32, n) zeros and ones."""
    return (words >> np.arange(32, dtype=np.uint32)[:, None]) & 1


def noise(key: jax.Array, shape: tuple[int, ...] = (SIZE,)) -> np.ndarray:
    return np.asarray(rounding_noise(key, shape))


def test_is_uniform() -> None:
    """Every bit by itself, and the upper and lower bytes together."""
    words = noise(KEY)
    assert np.all(abs(bits_of(words).mean(1) - 0.5) < SIGMAS * 0.5 / SIZE**0.5)
    for shift in (0, 24):
        counts = np.bincount((words >> shift) & 255, minlength=256)
        expected = SIZE / 256
        chi_square = np.sum((counts - expected) ** 2) / expected
        assert abs(chi_square - 255) < SIGMAS * (2 * 255) ** 0.5


def shifted(by: int) -> Callable[[], np.ndarray]:
    return lambda: np.roll(noise(KEY), by)


OTHERS = {
    "the next entry": shifted(1),
    "the next row": shifted(1024),
    "another key": lambda: noise(jax.random.key(4)),
    "the key of the next step": lambda: noise(jax.random.split(KEY)[0]),
    "the next key of a split": lambda: noise(jax.random.split(KEY, 4)[1]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_is_independent_of(name: str) -> None:
    """No bit goes with any bit of the other; 32 x 32 correlations."""
    one, other = (2.0 * bits_of(words) - 1 for words in (noise(KEY), OTHERS[name]()))
    correlations = one @ other.T / SIZE
    # Of a thousand, the largest is expected at 3.3 sigmas.
    assert np.max(abs(correlations)) < 5.5 / SIZE**0.5


def test_no_two_entries_are_alike() -> None:
    assert len(np.unique(noise(KEY))) == SIZE


def test_a_place_counts_and_not_the_shape() -> None:
    np.testing.assert_array_equal(noise(KEY, (4, 8, 2)).ravel(), noise(KEY, (64,)))
    assert noise(KEY, ()) == noise(KEY, (1,))[0]
    assert noise(KEY, (0, 3)).shape == (0, 3)


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
def test_any_key_does(implementation: str) -> None:
    keys = jax.random.split(jax.random.key(0, impl=implementation), 3)
    together = jax.vmap(lambda key: rounding_noise(key, (5,)))(keys)
    one_by_one = jnp.stack([rounding_noise(key, (5,)) for key in keys])
    if implementation == "threefry2x32":  # others draw other words under vmap
        np.testing.assert_array_equal(together, one_by_one)
    assert len(np.unique(together)) == 15


@pytest.mark.parametrize("dtype", ["float8_e5m2", "float8_e4m3fn"])
@pytest.mark.parametrize("value", [0.3, 1.2, 14.4, -200.0])
def test_dithered_numbers_round_without_bias(value: float, dtype: str) -> None:
    """At any power of two, which a scale may be; without it all of them round the same way."""
    x = np.float32(value) * np.linspace(1, 1.001, 2**14, dtype=np.float32)
    bits = format_of(dtype).mantissa_bits
    for scale in (1.0, 0.5):
        moved = scale * np.asarray(dithered(jnp.asarray(x), bits))
        rounded = np.asarray(cast(moved, dtype)).astype(np.float64) / scale
        spread = rounded.std() / x.size**0.5
        assert abs(rounded.mean() - x.mean()) < SIGMAS * spread
    plain = np.asarray(cast(x, dtype)).astype(np.float64)
    assert abs(plain.mean() - x.mean()) > 2 * SIGMAS * spread


def test_a_sum_of_numbers_of_all_sizes_stays() -> None:
    """Rounded to the nearest it shrinks: below the middle of a step there are more than above."""
    x = np.exp(np.random.default_rng(0).uniform(-3, 3, 2**20)).astype(np.float32)
    moved, plain = (
        np.asarray(cast(y, "float8_e5m2")).astype(np.float64) - x
        for y in (np.asarray(dithered(jnp.asarray(x), 2)), x)
    )
    assert abs(moved.mean()) < SIGMAS * moved.std() / x.size**0.5
    assert plain.mean() < -2 * SIGMAS * plain.std() / x.size**0.5


@pytest.mark.parametrize("bits", [2, 3])
def test_numbers_of_the_format_stay(bits: int) -> None:
    """At a power of two, too, below which steps are half as large."""
    x = np.outer([-1, 1], np.outer(2.0 ** np.arange(-6, 7), 1 + np.arange(2**bits) / 2**bits))
    np.testing.assert_array_equal(dithered(jnp.asarray(x, jnp.float32), bits), x)


@pytest.mark.parametrize("dtype", ["float8_e5m2", "float8_e4m3fn"])
def test_what_is_dithered_is_of_the_format(dtype: str) -> None:
    """One of the two numbers that x is between; a cast by way of bfloat16 changes nothing."""
    x = jax.random.uniform(jax.random.key(0), (1000,), minval=-400, maxval=400)
    found = dithered(x, format_of(dtype).mantissa_bits)
    np.testing.assert_array_equal(found.astype("bfloat16").astype(dtype).astype("float32"), found)
    step = 2.0 ** (np.floor(np.log2(np.abs(x))) - format_of(dtype).mantissa_bits)
    assert np.all(np.abs(found - x) < step)


def test_dithering_leaves_what_is_not_normal() -> None:
    x = np.array([0.0, -0.0, 1e-40, -1e-40, 3e38, np.inf, -np.inf, np.nan], np.float32)
    found = np.asarray(dithered(jnp.asarray(x), 2))
    np.testing.assert_array_equal(found.view(np.uint32), x.view(np.uint32))


def test_float64_is_dithered_as_float32() -> None:
    with jax.enable_x64(True):
        found = dithered(jnp.asarray([1.3, -2.7], jnp.float64), 2)
        assert found.dtype == jnp.float32
        np.testing.assert_array_equal(found, dithered(jnp.asarray([1.3, -2.7], jnp.float32), 2))
