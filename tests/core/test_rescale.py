"""Moving a scale: values stay, statistics arrive at their target."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.batching import compute, entry
from unitscale.core import (
    ScaledArray,
    as_scaled,
    cast,
    format_of,
    rebalance,
    rescale,
    to_float,
)

DTYPES = [jnp.float32, jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2]
X = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
SCALES = {
    "none": None,
    "one": 1,
    "tensor": 8.0,
    "channel": np.float32([1, 2, 4, 8, 16, 32]),
    "row": np.float32([[1], [2], [4], [0.5]]),
    "e8m0": jnp.asarray([[1], [2], [4], [0.5]], jnp.float8_e8m0fnu),
}


def value(x: ScaledArray) -> np.ndarray:
    return np.asarray(x.value).astype(np.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: t.__name__)
@pytest.mark.parametrize("kind", SCALES)
def test_rebalance_by_a_power_of_two_is_exact(dtype: type, kind: str) -> None:
    # Twice the smallest normal and more, so that halving leaves no bit behind.
    data = jnp.asarray(np.sign(X) * np.maximum(np.abs(X), 0.1), dtype)
    x = ScaledArray(data, SCALES[kind])
    by = {"twice": 2.0, "half": 0.5, "one": 1, "rows": jnp.asarray([[2.0], [4.0], [1.0], [0.5]])}

    def rebalanced(s, x):
        y = rebalance(x, s)
        return y, y.value, to_float(y.scale) / to_float(x.scale)

    table = {name: (functools.partial(rebalanced, s), x) for name, s in by.items()}
    for name, (y, of_y, ratio) in compute(table).items():
        with entry(name):
            assert y.dtype == dtype
            np.testing.assert_array_equal(np.float64(of_y), value(x))
            expected = np.broadcast_to(by[name], (4, 6))
            np.testing.assert_array_equal(np.broadcast_to(ratio, (4, 6)), expected)


@hypothesis.given(st.integers(-20, 20), st.integers(-20, 20), st.floats(0.5, 2, width=16))
@hypothesis.settings(max_examples=50)
def test_rebalance_forth_and_back(a: int, b: int, number: float) -> None:
    x = ScaledArray.from_exponent(jnp.full(2, number, jnp.float32), a)
    y = rebalance(x, 2.0**b)
    assert int(y.exponent) == a + b
    np.testing.assert_array_equal(y.value, x.value)
    np.testing.assert_array_equal(rebalance(y, 2.0**-b).data, x.data)


def test_rebalance_within_blocks() -> None:
    x = ScaledArray(jnp.ones((4, 6)), jnp.full((2, 2), 4.0), block_shape=(2, 3))
    for s in (2.0, jnp.asarray([[1.0, 2.0], [4.0, 8.0]])):
        y = rebalance(x, s)
        assert y.block_shape == (2, 3)
        np.testing.assert_array_equal(y.value, x.value)
    with pytest.raises(ValueError, match=r"s must broadcast against \(2, 2\); got shape \(3,\)"):
        rebalance(x, jnp.ones(3))


@pytest.mark.parametrize("s", [0.0, np.inf, np.nan])
def test_rebalance_by_what_cannot_divide_changes_nothing(s: float) -> None:
    x = ScaledArray(jnp.ones(3), 4.0)
    y = rebalance(x, jnp.asarray([s, 2.0, s]))
    np.testing.assert_array_equal(y.data, [1, 0.5, 1])
    np.testing.assert_array_equal(y.value, x.value)


def test_a_scale_stays_within_float32() -> None:
    """What it has no room for stays in the data."""
    for size in (2.0**100, 2.0**-100):
        y = rebalance(ScaledArray(jnp.array([0.0, 1.0]), size), size)
        assert 2.0**-126 <= float(y.scale) <= 2.0**127
        np.testing.assert_array_equal(y.value, np.float32([0, size]))
    tiny = rescale(ScaledArray(jnp.array([1e-30]), 1e-20))
    np.testing.assert_allclose((tiny * 1e30 * 1e10).value, [1e-10], rtol=1e-6)
    blocks = ScaledArray(jnp.ones((1, 4)), jnp.float32([[2.0**100, 1.0]]), block_shape=(1, 2))
    np.testing.assert_array_equal(rebalance(blocks, 2.0**60).value, blocks.value)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("shape", [(2,), (2, 1)])
def test_the_largest_numbers_are_kept(jit: bool, shape: tuple[int, ...]) -> None:
    """The inverse of 2^127 is subnormal, and XLA multiplies by it in place of a division."""
    x = jnp.array([3e38, 1e38]).reshape(shape)
    ways = [functools.partial(rebalance, s=s) for s in (2.0**126, 2.0**127, 1.7 * 2.0**126)]
    ways += [functools.partial(rescale, strategy=s) for s in ("rms", "amax", "mse")]
    ways += [lambda x: rescale(x, axis=0), as_scaled]
    for way in ways:
        y = (jax.jit(way) if jit else way)(x)
        np.testing.assert_allclose(y.value, x, rtol=1e-6)


def test_zeros_keep_their_scale() -> None:
    x = rescale(ScaledArray(jnp.zeros(3), 4.0))
    assert float(x.scale) == 4
    assert float(rescale(jnp.zeros(3)).scale) == 1


@pytest.mark.parametrize("s", [0, -1.0, np.inf, np.nan, np.float32(0)])
def test_rebalance_refuses_numbers(s: float) -> None:
    with pytest.raises(ValueError, match=r"unitscale\.rebalance: s must be positive and finite"):
        rebalance(jnp.ones(2), s)


@pytest.mark.parametrize("shape", [(2,), (2, 1), (5, 4, 6)])
def test_rebalance_does_not_broadcast_data(shape: tuple[int, ...]) -> None:
    x = jnp.ones(3) if shape == (2, 1) else jnp.ones((4, 6))
    with pytest.raises(ValueError, match="s must broadcast against"):
        rebalance(x, jnp.ones(shape))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: t.__name__)
@pytest.mark.parametrize("axis", [None, 1])
class TestRescale:
    def data(self, dtype: type) -> jax.Array:
        return jnp.asarray(X * 0.05 + 0.1, dtype)

    def test_rms_is_near_1(self, dtype: type, axis: object) -> None:
        x = rescale(self.data(dtype), "rms", axis=axis)
        rms = np.sqrt((np.asarray(x.data).astype(np.float64) ** 2).mean(axis))
        # Nearest in value: from 3/4 to 3/2 of a power of two; data is rounded to its format.
        assert ((rms > 0.74) & (rms < 1.51)).all()
        np.testing.assert_array_equal(value(x), np.asarray(self.data(dtype)).astype(np.float64))

    def test_amax_is_below_the_maximum(self, dtype: type, axis: object) -> None:
        x = rescale(self.data(dtype), "amax", axis=axis, dtype="e4m3fn")
        top = np.abs(np.asarray(x.data).astype(np.float64)).max(axis)
        if dtype != jnp.float8_e4m3fn:  # data of 0.1 * 448 leaves no room for rounding
            assert ((top > 224) & (top <= 448)).all()
        if dtype == jnp.float32:
            assert (np.frexp(np.asarray(x.scale))[0] == 0.5).all()
        np.testing.assert_array_equal(value(x), np.asarray(self.data(dtype)).astype(np.float64))

    def test_mse(self, dtype: type, axis: object) -> None:
        x = self.data(dtype)
        y = rescale(x, "mse", dtype="e2m1", axis=axis)
        exact = np.asarray(x).astype(np.float64)
        errors = [
            ((value(cast(rebalance(y, 2.0**k), "e2m1")) - exact) ** 2).mean(axis)
            for k in (-1, 0, 1)
        ]
        assert (errors[1] <= np.minimum(errors[0], errors[2]) * (1 + 2.0**-15)).all()


@pytest.mark.parametrize("strategy", ["rms", "amax", "mse"])
@pytest.mark.parametrize("special", [0.0, np.inf, np.nan, 1e-45])
def test_scales_stay_finite(strategy: str, special: float) -> None:
    x = rescale(jnp.full(4, special, jnp.float32), strategy, dtype="e4m3fn")
    assert 0 < float(x.scale) < np.inf


@pytest.mark.parametrize("strategy", ["rms", "amax", "mse"])
def test_empty_data(strategy: str) -> None:
    assert rescale(jnp.zeros((0, 3)), strategy).shape == (0, 3)


@pytest.mark.parametrize("strategy", ["rms", "amax", "mse"])
def test_blocks_become_one_scale(strategy: str) -> None:
    data = jnp.asarray([[1.0, 2.0], [4.0, 8.0]], jnp.float8_e4m3fn)
    x = ScaledArray(data, jnp.asarray([[2.0**20], [2.0**18]]), block_shape=(1, 2))
    y = rescale(x, strategy)
    assert y.block_shape is None
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(y.value, x.value)


def test_a_scaled_array_is_rescaled_by_its_data() -> None:
    x = ScaledArray(jnp.full(4, 8.0, jnp.float16), 4.0)
    y = rescale(x)
    assert (float(y.scale), float(y.data[0])) == (32, 1)


def test_value_is_differentiable_with_the_scale_constant() -> None:
    grad = jax.jit(jax.grad(lambda x: (rescale(x).value * X).sum()))(jnp.full((4, 6), 3.0))
    np.testing.assert_array_equal(grad, X)


def test_unknown_strategy() -> None:
    with pytest.raises(ValueError, match="strategy must be one of rms, amax, mse; got 'max'"):
        rescale(jnp.ones(2), "max")  # type: ignore[arg-type]


def test_amax_default_target_is_the_dtype_of_data() -> None:
    x = rescale(jnp.asarray([3.0], jnp.float16), "amax")
    top = float(x.data[0])
    assert top <= format_of("float16").max < 2 * top
