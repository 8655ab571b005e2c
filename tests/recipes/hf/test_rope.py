"""Rotary positions against complex numbers in float64, and the scalings of their frequencies."""

import jax.numpy as jnp
import numpy as np
import pytest

from recipes.config import RopeConfig
from recipes.hf.rope import frequencies, rotate

LLAMA3 = RopeConfig(base=50.0, scaling="llama3", factor=8.0, context=64)


def llama3(size: int, rope: RopeConfig) -> np.ndarray:
    """By wavelengths, as in the model's published code, a frequency at a time."""
    found = []
    for pair in range(size // 2):
        frequency = 1.0 / rope.base ** (2 * pair / size)
        wavelength = 2 * np.pi / frequency
        if wavelength > rope.context / rope.low_factor:
            frequency /= rope.factor
        elif wavelength >= rope.context / rope.high_factor:
            smooth = rope.context / wavelength - rope.low_factor
            smooth /= rope.high_factor - rope.low_factor
            frequency = (1 - smooth) * frequency / rope.factor + smooth * frequency
        found.append(frequency)
    return np.asarray(found)


def test_frequencies() -> None:
    plain = frequencies(8, RopeConfig(base=16.0))
    np.testing.assert_allclose(plain, [1, 1 / 2, 1 / 4, 1 / 8], rtol=1e-7)
    assert plain.dtype == np.float32
    linear = frequencies(8, RopeConfig(base=16.0, scaling="linear", factor=5.0))
    np.testing.assert_allclose(linear, plain / 5, rtol=1e-6)
    scaled = frequencies(16, LLAMA3)
    np.testing.assert_allclose(scaled, llama3(16, LLAMA3), rtol=1e-6)
    share = scaled / frequencies(16, RopeConfig(base=50.0))
    kept, divided = np.isclose(share, 1), np.isclose(share, 1 / 8)
    bands = kept, divided, ~kept & ~divided
    assert all(band.any() for band in bands)


@pytest.mark.parametrize("rope", [RopeConfig(), LLAMA3], ids=["plain", "llama3"])
def test_rotation_is_a_product_of_complex_numbers(rope: RopeConfig) -> None:
    draw = np.random.default_rng(0)
    x = draw.standard_normal((2, 3, 2, 8)).astype(np.float32)
    positions = np.asarray([0, 5, 17])
    turn = frequencies(8, rope).astype(np.float64)
    pairs = x[..., :4].astype(np.float64) + 1j * x[..., 4:]
    turned = pairs * np.exp(1j * positions[:, None, None] * turn)
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    found = rotate(jnp.asarray(x), jnp.asarray(positions), frequencies(8, rope))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    half = rotate(jnp.asarray(x, jnp.float16), jnp.asarray(positions), frequencies(8, rope))
    assert half.dtype == jnp.float16


def test_bands_that_are_none() -> None:
    with pytest.raises(ValueError, match=r"high_factor above its low_factor; got 1.0 and 2.0"):
        RopeConfig(scaling="llama3", low_factor=2.0, high_factor=1.0)
