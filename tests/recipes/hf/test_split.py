"""Weights as scale and data, to the bit, and imported models in 16 and 8 bits under scalify."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as arrays

from recipes.config import ScalifyConfig
from recipes.hf import join, load, save, split
from recipes.run.scaling import plain, scaled
from tests.recipes.pretrained import FIXTURES, copied, one_layer, reference
from unitscale import ScaledArray, scalify, to_array

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
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_every_bit_comes_back(dtype: str, data) -> None:
    """Any numbers: subnormal ones, the largest, infinities and both zeros."""
    width = jnp.dtype(dtype).itemsize
    word = {2: np.uint16, 4: np.uint32}[width]
    drawn = data.draw(arrays.arrays(word, 8))
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
    leaves = jax.tree.leaves(split(params), is_leaf=lambda x: isinstance(x, ScaledArray))
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


FLOAT16 = ScalifyConfig(storage="float16")
FP8 = ScalifyConfig(storage="float16", products="float8_e4m3fn", gradients="float8_e5m2")


def error(name: str, config: ScalifyConfig) -> tuple[float, int]:
    """RMS error of the logits over their RMS, and the number of operations behind them."""
    inputs, expected = reference(FIXTURES / name)
    pretrained = load(FIXTURES / name, scalify=config)
    graphdef, params, rest = nnx.split(pretrained.model, nnx.Param, ...)

    def logits(params):
        return nnx.merge(graphdef, params, rest)(*inputs)

    operations = len(jax.make_jaxpr(logits)(params).eqns)
    found = to_array(jax.jit(scalify(logits))(split(params, jnp.float16)))
    difference = np.asarray(found, np.float64) - expected
    return float(np.sqrt(np.mean(difference**2) / np.mean(expected**2))), operations


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama3", "gemma3", "bert-classes", "modernbert-mlm"])
def test_logits_in_16_and_8_bits(name: str) -> None:
    """Each operation rounds to 2^-11 in float16, and rounding errors add in squares.

    In FP8 each operand of a product rounds to at most 2^-4, an RMS of that over sqrt(3); a sum of
    many such products has an error of sqrt(2) of it, and eight products of linear layers follow
    each other (two layers of values, output, up and down).
    """
    half, operations = error(name, FLOAT16)
    eighth, _ = error(name, FP8)
    assert half <= 2**-11 * operations**0.5
    assert eighth <= (2 / 3) ** 0.5 * 2**-4 * 8**0.5
    assert eighth > half, "FP8 has an effect"


@pytest.mark.slow
def test_a_step_of_fine_tuning(tmp_path) -> None:
    """The loss of a batch falls in FP8, all stays finite, and the folder is written again."""
    folder = one_layer(copied("bert-mlm", tmp_path))
    (ids, segments, mask), _ = reference(folder)
    labels = np.where(mask == 1, ids, -100)
    pretrained = load(folder, scalify=FP8, dropout=0.0)
    graphdef, params, rest = nnx.split(pretrained.model, nnx.Param, ...)
    optimizer = optax.sgd(0.1)

    def step(params, state):
        def loss(params):
            return nnx.merge(graphdef, params, rest).loss(ids, segments, mask, labels)

        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state, value

    run = jax.jit(scalify(step))
    state = scaled(FP8, optimizer.init(params))
    params, losses = scaled(FP8, params), []
    for _ in range(3):
        params, state, value = run(params, state)
        losses.append(float(plain(FP8, value)))
    assert losses[0] == pytest.approx(np.log(pretrained.config.vocab), rel=0.5)
    assert losses[2] < losses[1] < losses[0]
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, ScaledArray))
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype("float16")}
    assert all(np.isfinite(leaf.data).all() for leaf in leaves)
    save(pretrained, folder, params)
    again = load(folder).model
    tuned = nnx.merge(graphdef, plain(FP8, params), rest)
    np.testing.assert_array_equal(again(ids, segments, mask), tuned(ids, segments, mask))
