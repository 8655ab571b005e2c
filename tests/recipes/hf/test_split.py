"""Weights as scale and data: every bit comes back, whatever the numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as arrays

from recipes.hf import join, load, split
from tests.recipes.pretrained import FIXTURES
from unitscale import ScaledArray

DTYPES = ["float32", "float16", "bfloat16"]


def bits(array) -> np.ndarray:
    array = np.asarray(array)
    return array.view({2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


def check(array: np.ndarray) -> ScaledArray:
    """The split of an array, proved to lose nothing."""
    scaled = split(array)
    assert isinstance(scaled, ScaledArray)
    assert scaled.dtype == array.dtype
    scale = np.asarray(scaled.scale)
    assert scale.dtype == np.float32
    assert np.frexp(scale)[0] == 0.5, "a power of two"
    value = np.asarray(scaled.data).astype(np.float64) * scale.astype(np.float64)
    np.testing.assert_array_equal(value, array.astype(np.float64))
    np.testing.assert_array_equal(bits(join(scaled)), bits(array))
    return scaled


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_every_bit_comes_back(dtype: str, data) -> None:
    """Any numbers: subnormal ones, the largest, infinities and both zeros."""
    width = jnp.dtype(dtype).itemsize
    word = {2: np.uint16, 4: np.uint32}[width]
    drawn = data.draw(arrays.arrays(word, st.integers(1, 8)))
    array = drawn.view(jnp.dtype(dtype))
    check(np.where(np.isnan(array), np.asarray(0, array.dtype), array))


@pytest.mark.parametrize("dtype", DTYPES)
def test_ordinary_weights_have_data_near_one(dtype: str) -> None:
    array = (0.02 * np.random.default_rng(0).standard_normal((64, 64))).astype(jnp.dtype(dtype))
    scaled = check(array)
    assert float(scaled.scale) == 2.0**-6
    rms = float(np.sqrt(np.mean(np.square(np.asarray(scaled.data, np.float64)))))
    assert 2**-0.5 <= rms <= 2**0.5, "the nearest power of two"


def test_a_scale_stops_where_bits_would_be_lost() -> None:
    """Beside 3000, the least subnormal float16 allows no scale above 1."""
    tiny = np.asarray([6e-8, 3000, 3000], np.float16)
    assert float(check(tiny).scale) == 1.0
    assert float(check(tiny * np.float16(8)).scale) == 8.0
    zeros = np.asarray([0.0, -0.0], np.float16)
    assert float(check(zeros).scale) == 1.0


def test_a_model_s_state_is_split(tmp_path) -> None:
    params = load(FIXTURES / "gpt2").params
    scaled = split(params)
    leaves = jax.tree.leaves(scaled, is_leaf=lambda x: isinstance(x, ScaledArray))
    assert len(leaves) == len(jax.tree.leaves(params))
    for leaf, original in zip(leaves, jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(bits(join(leaf)), bits(original))
    assert len({float(leaf.scale) for leaf in leaves}) > 1
    half = split(params, jnp.float16)
    for leaf, original in zip(
        jax.tree.leaves(half, is_leaf=lambda x: isinstance(x, ScaledArray)),
        jax.tree.leaves(params),
        strict=True,
    ):
        assert leaf.dtype == jnp.float16
        np.testing.assert_allclose(join(leaf, np.float32), original, rtol=2**-11, atol=2**-30)


def test_other_leaves_are_kept() -> None:
    tree = {"n": jnp.arange(3), "x": split(jnp.ones(2)), "flag": True}
    assert split(tree)["n"] is tree["n"]
    assert split(tree)["x"] is tree["x"]
    assert split(tree)["flag"] is True
    np.testing.assert_array_equal(join(ScaledArray(jnp.ones(2))), np.ones(2))
