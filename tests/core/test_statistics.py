"""Statistics against float64, and the least quantization error against a search by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale.core import amax, optimal_scale, rms

from .grids import LAYOUTS, nearest

X = np.random.default_rng(0).standard_normal((4, 50, 3)).astype(np.float32)
AXES = [None, 0, -1, (0, 2), (1, 2)]


both = jax.jit(lambda x, axis: (amax(x, axis), rms(x, axis)), static_argnums=1)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e30])
def test_against_float64(axis: object, size: float, dtype: type) -> None:
    x = (X * np.float32(size)).astype(dtype)
    exact = np.asarray(x).astype(np.float64)
    keep = axis is not None
    largest, root = both(x, axis)
    np.testing.assert_array_equal(largest, np.abs(exact).max(axis, keepdims=keep))
    expected = np.sqrt((exact**2).mean(axis, keepdims=keep))
    np.testing.assert_allclose(root, expected, rtol=X.size * 2.0**-24)
    assert largest.dtype == root.dtype == jnp.float32


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_narrow_types_do_not_overflow(dtype: type) -> None:
    top = float(jnp.finfo(dtype).max)
    x = jnp.full(1000, top, dtype)
    assert float(amax(x)) == top
    assert float(rms(x)) == pytest.approx(top, rel=2.0**-20)


@pytest.mark.parametrize("statistic", [amax, rms])
class TestSpecialValues:
    @pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,)])
    def test_zeros_and_nothing(self, statistic: object, shape: tuple[int, ...]) -> None:
        assert float(statistic(jnp.zeros(shape))) == 0

    def test_dimensions_of_nothing(self, statistic: object) -> None:
        assert statistic(jnp.zeros((3, 0)), -1).shape == (3, 1)

    def test_infinity_and_nan_are_propagated(self, statistic: object) -> None:
        assert float(statistic(jnp.asarray([1.0, -np.inf]))) == np.inf
        assert np.isnan(float(statistic(jnp.asarray([1.0, np.nan]))))

    @pytest.mark.parametrize("wrong", [np.nan, -np.nan])
    def test_one_nan_of_many(self, statistic: object, wrong: float) -> None:
        # XLA's CPU backend leaves NaN out of the maximum of a large array.
        assert np.isnan(float(statistic(jnp.ones(2**16).at[777].set(wrong))))


def test_the_largest_numbers() -> None:
    x = jnp.array([3e38, 1e38])
    for axis in (None, 0):
        np.testing.assert_allclose(rms(x, axis), np.sqrt(5e76), rtol=1e-6)


def test_float64() -> None:
    with jax.enable_x64(True):
        x = jnp.asarray([1e-200, 1e-200])
        assert float(amax(x)) == 1e-200
        assert rms(x).dtype == jnp.float64


def _error(x: np.ndarray, scale: float, name: str) -> float:
    return float(np.mean((nearest(x / scale, LAYOUTS[name]) * scale - x) ** 2))


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "float6_e2m3fn"])
@pytest.mark.parametrize("size", [1e-20, 1.0, 300.0])
def test_no_power_of_two_has_less_error(name: str, size: float) -> None:
    x = (np.random.default_rng(1).standard_t(3, 400) * size).astype(np.float32)
    scale = float(optimal_scale(jnp.asarray(x), name))
    assert np.frexp(scale)[0] == 0.5
    errors = [_error(x.astype(np.float64), scale * 2.0**k, name) for k in range(-8, 9)]
    # Float32 sums of the squares decide between neighbours of nearly the same error.
    assert errors[8] <= min(errors) * (1 + 400 * 2.0**-23)


def test_channels_have_their_own_scale() -> None:
    x = jnp.asarray([[1.0, 1.1, 1.2, 1.3], [1e-6, 1.1e-6, 1.2e-6, 1.3e-6]])
    together = optimal_scale(x, "float8_e4m3fn", axis=1)
    alone = [float(optimal_scale(row, "float8_e4m3fn")) for row in x]
    assert together.shape == (2, 1)
    np.testing.assert_array_equal(together[:, 0], alone)


@pytest.mark.parametrize("x", [np.zeros(3), [np.inf, 1], [np.nan, 1], [1e-45, 0]])
def test_scales_are_never_nan(x: object) -> None:
    scale = float(optimal_scale(jnp.asarray(x, jnp.float32), "e4m3fn"))
    assert 0 < scale < np.inf


def test_zeros_have_scale_1() -> None:
    assert float(optimal_scale(jnp.zeros(4), "e5m2")) == 1


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match=r"search must be \(low, high\), low <= .*; got \(2, 1\)"):
        optimal_scale(jnp.ones(2), "e5m2", search=(2, 1))
    with pytest.raises(ValueError, match="not a floating-point format"):
        optimal_scale(jnp.ones(2), "e5m9")
