"""Rotary positions against complex numbers in float64, and the scalings of their frequencies."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from recipes.config import RopeConfig
from recipes.hf._positions import read_rope
from recipes.hf.rope import check_length, frequencies, rotate

LLAMA3 = RopeConfig(base=50.0, scaling="llama3", factor=8.0, context=64)
YARN = RopeConfig(base=50.0, scaling="yarn", factor=8.0, context=64, fast=4.0, attention_factor=1.2)


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


def yarn(size: int, base: float, context: int, given: dict[str, Any]) -> tuple[np.ndarray, float]:
    """Frequencies and the factor of queries and keys, by Peng et al. (2023), a pair at a time.

    The paper's ramp is over the turns of a pair in the context; its code and `transformers` ramp
    over the index of the pair, between those that turn beta_fast and beta_slow times.
    """
    factor, context = given["factor"], given.get("original_max_position_embeddings", context)
    ends = []
    for turns in (given.get("beta_fast", 32), given.get("beta_slow", 1)):
        wavelength = context / turns  # of the pair i with 2 pi base^(2 i / size) = wavelength
        ends.append(size / 2 * np.log(wavelength / (2 * np.pi)) / np.log(base))
    if given.get("truncate", True):
        ends = [np.floor(ends[0]), np.ceil(ends[1])]
    first, last = max(ends[0], 0), min(ends[1], size - 1)
    found = []
    for pair in range(size // 2):
        frequency = base ** (-2 * pair / size)
        if pair <= first:
            ramp = 1.0
        elif pair >= last:
            ramp = 0.0
        else:
            ramp = (last - pair) / (last - first)
        found.append((1 - ramp) * frequency / factor + ramp * frequency)
    if given.get("mscale") and given.get("mscale_all_dim"):
        weights = (0.1 * given[key] * np.log(factor) + 1 for key in ("mscale", "mscale_all_dim"))
        attention = next(weights) / next(weights)
    else:
        attention = 0.1 * np.log(factor) + 1
    return np.asarray(found), given.get("attention_factor", attention)


# Of yarn, beside the factor: Qwen's, each key, a context from max_position_embeddings.
SCALINGS: list[dict[str, Any]] = [
    {"factor": 4.0, "original_max_position_embeddings": 32768},
    {"factor": 4, "rope_theta": 500.0},
    {"factor": 8.0, "beta_fast": 16, "beta_slow": 2},
    {"factor": 8.0, "truncate": False},
    {"factor": 8.0, "attention_factor": 1.5, "mscale": 2.0, "mscale_all_dim": 1.0},
    {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.5},
    {"factor": 40.0, "mscale": 0.7, "mscale_all_dim": 0.0},
]


@pytest.mark.parametrize("given", SCALINGS, ids=str)
@pytest.mark.parametrize("size", [64, 128])
def test_yarn(size: int, given: dict[str, Any]) -> None:
    rope = read_rope({"type": "yarn", **given}, 1e6, 2048, Path("folder"), "rope_scaling")
    expected, attention = yarn(size, given.get("rope_theta", 1e6), 2048, given)
    found = frequencies(size, rope)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert rope.attention_factor == pytest.approx(attention, rel=1e-12)
    share = found / frequencies(size, RopeConfig(base=rope.base))
    kept, divided = np.isclose(share, 1), np.isclose(share, 1 / given["factor"])
    assert all(band.any() for band in (kept, divided, ~kept & ~divided))


@pytest.mark.parametrize(("context", "share"), [(6, 1 / 8), (2, 1.0)])
def test_a_band_of_no_width(context: int, share: float) -> None:
    """Of contexts that no pair turns in, as `transformers` has it: the first pair is kept."""
    rope = RopeConfig(base=10.0, scaling="yarn", factor=8.0, context=context)
    found = frequencies(8, rope) / frequencies(8, RopeConfig(base=10.0))
    np.testing.assert_allclose(found, [1, share, share, share], rtol=1e-6)


def test_no_scaling_up_to_the_context() -> None:
    values = {"rope_type": "dynamic", "factor": 2.0}
    rope = read_rope(values, 500.0, 32, Path("folder"), "rope_scaling")
    assert (rope.scaling, rope.factor, rope.context) == ("dynamic", 2.0, 32)
    np.testing.assert_array_equal(frequencies(8, rope), frequencies(8, RopeConfig(base=500.0)))
    check_length(rope, 32)
    with pytest.raises(ValueError, match=r"at most 32 positions, .* dynamic .*; got 33; use short"):
        check_length(rope, 33)
    check_length(YARN, 10**6)


@pytest.mark.parametrize("rope", [RopeConfig(), LLAMA3, YARN], ids=["plain", "llama3", "yarn"])
def test_rotation_is_a_product_of_complex_numbers(rope: RopeConfig) -> None:
    draw = np.random.default_rng(0)
    x = draw.standard_normal((2, 3, 2, 8)).astype(np.float32)
    positions = np.asarray([0, 5, 17])
    turn = frequencies(8, rope).astype(np.float64)
    pairs = x[..., :4].astype(np.float64) + 1j * x[..., 4:]
    factor = rope.attention_factor
    turned = factor * pairs * np.exp(1j * positions[:, None, None] * turn)
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    found = rotate(jnp.asarray(x), jnp.asarray(positions), frequencies(8, rope), factor)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    half = rotate(jnp.asarray(x, jnp.float16), jnp.asarray(positions), frequencies(8, rope))
    assert half.dtype == jnp.float16


def test_bands_that_are_none() -> None:
    with pytest.raises(ValueError, match=r"high_factor above its low_factor; got 1.0 and 2.0"):
        RopeConfig(scaling="llama3", low_factor=2.0, high_factor=1.0)
    with pytest.raises(ValueError, match=r"beta_fast of at least its beta_slow, .*; got 1.0, 2.0 "):
        RopeConfig(scaling="yarn", fast=1.0, slow=2.0)
