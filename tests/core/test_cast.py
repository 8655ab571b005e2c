"""Casts against the definition of each format: nearest, stochastic, saturating and not."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.compilation import USUAL_EMITTER
from unitscale.core import ScaledArray, cast, format_of, narrow, widen

from .grids import LAYOUTS, Layout, nearest, neighbours, probes

SIMULATED = {
    "E4M3": "float8_e4m3",
    "E5M2": "float8_e5m2",
    "E3M4": "float8_e3m4",
    "E5M10": "float16",
    "E8M7": "bfloat16",
}
ALL_16_BIT = {
    t: np.arange(2**16, dtype=np.uint16).view(t) for t in (np.float16, ml_dtypes.bfloat16)
}


quick_cast = jax.jit(cast, static_argnums=(1, 2, 4), compiler_options=USUAL_EMITTER)


def stochastic(x: np.ndarray, name: str, seed: int) -> np.ndarray:
    """Casts in arrays of one size, so that each format compiles once."""
    size = 2**17
    flat = np.pad(np.ravel(x).astype(np.float32), (0, -np.size(x) % size)).reshape(-1, size)
    keys = jax.random.split(jax.random.key(seed), len(flat))
    parts = [quick_cast(row, name, "stochastic", key) for row, key in zip(flat, keys, strict=True)]
    return np.concatenate(parts).astype(np.float64)[: np.size(x)].reshape(np.shape(x))


@pytest.fixture(autouse=True)
def _no_floating_point_warnings():
    """NumPy warns of overflow and of signaling NaN, which these tests are about."""
    with np.errstate(all="ignore"):
        yield


def reference(x: np.ndarray, name: str, saturate: bool) -> np.ndarray:
    rounded = nearest(x, LAYOUTS[name], saturate)
    fmt = format_of(name)
    if fmt.simulated or (saturate and fmt.has_nan):
        # Infinity is not hidden: only finite values saturate.
        rounded = np.where(np.isinf(x), x if fmt.has_inf else np.nan, rounded)
    # FP6 has no NaN, but the wider type that holds its values has.
    return np.where(np.isnan(x), np.nan, rounded) if name.startswith("float6") else rounded


def assert_same(got: jax.Array, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(np.asarray(got).astype(np.float64), expected)


@pytest.mark.parametrize("saturate", [True, False], ids=["saturate", "overflow"])
@pytest.mark.parametrize("name", LAYOUTS)
class TestNearest:
    def test_float32(self, name: str, saturate: bool) -> None:
        x = probes(LAYOUTS[name], np.float32)
        got = quick_cast(x, name, "nearest", None, saturate)
        assert_same(got, reference(x, name, saturate))

    @pytest.mark.parametrize("source", ALL_16_BIT, ids=lambda t: t.__name__)
    def test_all_16_bit_values(self, name: str, saturate: bool, source: type) -> None:
        x = ALL_16_BIT[source]
        expected = reference(x.astype(np.float32), name, saturate)
        assert_same(quick_cast(x, name, "nearest", None, saturate), expected)

    def test_float64(self, name: str, saturate: bool) -> None:
        with jax.enable_x64(True):
            x = probes(LAYOUTS[name], np.float64)
            got = np.asarray(quick_cast(x, name, "nearest", None, saturate)).astype(np.float64)
        expected = reference(x, name, saturate)
        # XLA on the CPU flushes float64 that is subnormal in float32 when it narrows.
        flushed = (name == "bfloat16") & (np.abs(expected) < 2.0**-126)
        np.testing.assert_array_equal(got[~flushed], expected[~flushed])


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float6_e2m3fn", "bfloat16"])
def test_eager_and_under_vmap(name: str) -> None:
    x = probes(LAYOUTS[name], np.float32)[-4000:].reshape(4, -1)
    assert_same(jax.vmap(lambda row: cast(row, name))(x), reference(x, name, True))


@pytest.mark.parametrize("saturate", [True, False], ids=["saturate", "overflow"])
@pytest.mark.parametrize(("simulated", "name"), SIMULATED.items())
class TestSimulated:
    def test_is_the_real_format(self, simulated: str, name: str, saturate: bool) -> None:
        x = probes(LAYOUTS[name], np.float32)
        got = quick_cast(x, simulated, "nearest", None, saturate)
        assert got.dtype == jnp.float32
        assert_same(got, reference(x, name, saturate))

    @pytest.mark.parametrize("source", ALL_16_BIT, ids=lambda t: t.__name__)
    def test_in_16_bit(self, simulated: str, name: str, saturate: bool, source: type) -> None:
        x = ALL_16_BIT[source]
        got = quick_cast(x, simulated, "nearest", None, saturate)
        expected = reference(x.astype(np.float32), name, saturate)
        common = np.abs(expected) <= min(format_of(name).max, format_of(source).max)
        common &= expected.astype(source).astype(np.float64) == expected
        assert common.sum() > 2**15
        assert_same(got[common], expected[common])
        finite = np.asarray(got).astype(np.float64)
        finite = np.abs(finite[np.isfinite(finite)])
        assert finite.max() <= format_of(name).max
        assert saturate or np.isinf(np.asarray(got, np.float32)).any()


def test_no_value_but_nan_is_lost_when_a_format_is_cast_to_itself() -> None:
    for name in LAYOUTS:
        grid = LAYOUTS[name].values()
        x = np.resize(np.concatenate([-grid, grid]), 2**17)
        assert_same(quick_cast(x.astype(np.float32), name, "nearest", None, True), x)


@pytest.mark.parametrize(
    ("source", "target"),
    [("bfloat16", "float16"), ("float8_e5m2", "float8_e3m4"), ("float8_e5m2", "float4_e2m1fn"),
     ("float16", "bfloat16")],
)  # fmt: skip
def test_a_maximum_that_the_source_cannot_hold(source: str, target: str) -> None:
    fmt = format_of(target)
    x = jnp.asarray([fmt.max * 0.96, 57344, np.inf, -np.inf], jnp.float32).astype(source)
    got = np.asarray(cast(x, target)).astype(np.float64)
    np.testing.assert_array_equal(got, reference(np.asarray(x).astype(np.float64), target, True))


class TestE8M0:
    GRID = 2.0 ** np.arange(-127, 128)

    @staticmethod
    def expected(x: np.ndarray, saturate: bool) -> np.ndarray:
        lowest, highest = 2.0**-127, 2.0**127
        floor = 2.0 ** np.floor(np.log2(np.maximum(x, lowest)))
        y = np.where(x >= 1.5 * floor, 2 * floor, floor)
        if saturate:
            y = np.where(x <= lowest, lowest, np.minimum(y, highest))
            y = np.where(np.isinf(x), np.nan, y)
        else:
            y = np.where((x <= 0) | (y > highest), np.nan, y)
        return np.where(np.isnan(x), np.nan, y)

    @pytest.mark.parametrize("saturate", [True, False])
    @pytest.mark.parametrize("source", [np.float32, np.float16, ml_dtypes.bfloat16])
    def test_nearest(self, saturate: bool, source: type) -> None:
        near = np.concatenate([self.GRID, 1.5 * self.GRID, 1.49 * self.GRID, 1.51 * self.GRID])
        special = [0, -0.0, -1, -1e30, 1e-42, np.inf, -np.inf, np.nan, 3.4e38, 2.9e38]
        x = np.concatenate([near, special]).astype(source)
        expected = self.expected(x.astype(np.float64), saturate)
        got = cast(jnp.asarray(x), "e8m0", saturate=saturate)
        np.testing.assert_array_equal(np.asarray(got).astype(np.float64), expected)

    def test_stochastic_is_unbiased(self) -> None:
        n = 4000
        x = jnp.repeat(jnp.asarray([1.25, 3.9, 2.0**-126 * 1.5, 8.0]), n)
        got = np.asarray(cast(x, "e8m0", "stochastic", jax.random.key(0))).astype(np.float64)
        x = np.asarray(x, np.float64).reshape(-1, n)
        low = 2.0 ** np.floor(np.log2(x))
        assert np.isin(got.reshape(x.shape) / low, [1, 2]).all()
        fraction = x[:, 0] / low[:, 0] - 1
        error = 5 * np.sqrt(fraction * (1 - fraction) / n)
        assert (np.abs((got.reshape(x.shape) / low).mean(1) - 1 - fraction) <= error).all()

    def test_is_a_constant_of_differentiation(self) -> None:
        grad = jax.grad(lambda x: (x * cast(x, "e8m0").astype(jnp.float32)).sum())(jnp.full(2, 3.0))
        np.testing.assert_array_equal(grad, [4, 4])


def adjacent(x: np.ndarray, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    grid = layout.values()
    below, above = neighbours(np.minimum(np.abs(x), grid[-1]), grid)
    return grid[below], grid[above]


@pytest.mark.parametrize("name", [*LAYOUTS, *SIMULATED])
class TestStochastic:
    def layout(self, name: str) -> Layout:
        return LAYOUTS[SIMULATED.get(name, name)]

    def test_goes_to_a_neighbour(self, name: str) -> None:
        x = probes(self.layout(name), np.float32)
        x = x[np.isfinite(x)]
        if format_of(name).min_exponent > -126:  # XLA flushes subnormal float32: they round down
            x = x[(np.abs(x) >= 2.0**-126) | (x == 0)]
        got = np.abs(stochastic(x, name, 1))
        below, above = adjacent(x, self.layout(name))
        assert ((got == below) | (got == above)).all()
        assert (got[below == above] == below[below == above]).all()

    def test_is_unbiased(self, name: str) -> None:
        n, grid = 4000, self.layout(name).values()
        at = np.array([0, 1, len(grid) // 3, len(grid) // 2, len(grid) - 2])
        fraction = np.array([0.1, 0.5, 0.75, 0.25, 0.9])
        if name in ("bfloat16", "E8M7"):
            at[:2] = [130, 300]  # a fraction of a subnormal step is not a float32
        values = (grid[at] + fraction * (grid[at + 1] - grid[at])).astype(np.float32)
        fraction = (values - grid[at]) / (grid[at + 1] - grid[at])
        for sign in (1, -1):
            got = stochastic(np.repeat(sign * values[:, None], n, axis=1), name, 2)
            share = ((sign * got - grid[at, None]) / (grid[at + 1] - grid[at])[:, None]).mean(1)
            assert (np.abs(share - fraction) <= 5 * np.sqrt(fraction * (1 - fraction) / n)).all()

    def test_exact_values_stay(self, name: str) -> None:
        grid = self.layout(name).values()
        x = np.resize(np.concatenate([-grid, grid]), 2**17)
        assert_same(stochastic(x, name, 3), x)

    def test_saturates(self, name: str) -> None:
        top = format_of(name).max
        x = np.array([3.4e38, -3.4e38, np.inf, -np.inf, np.nan])
        got = stochastic(x, name, 4)
        np.testing.assert_array_equal(got[:2], [top, -top])
        if name == "float4_e2m1fn":
            np.testing.assert_array_equal(got[2:4], [top, -top])
        else:
            infinite = x[2:4] if format_of(name).has_inf else [np.nan, np.nan]
            np.testing.assert_array_equal(got[2:], [*infinite, np.nan])


def test_stochastic_rounding_of_exact_values_survives_the_widest_noise() -> None:
    """In float32 the sum of 127 and 23 random bits is rounded up to 128 once in 2**18 draws."""
    x = np.full(2**21, 127.0)
    assert (stochastic(x, "E4M6", 0) == 127).all()


def test_stochastic_float64() -> None:
    with jax.enable_x64(True):
        n = 20_000
        x = jnp.full(n, 1 + 2.0**-3 * 0.3, jnp.float64)
        got = np.asarray(cast(x, "E4M3", "stochastic", jax.random.key(0)))
        assert set(got) == {1.0, 1.125}
        assert abs((got > 1).mean() - 0.3) < 5 * np.sqrt(0.21 / n)


class TestGradient:
    @pytest.mark.parametrize("name", ["float8_e5m2", "E4M3", "float16", "float4_e2m1fn"])
    @pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
    def test_is_straight_through(self, name: str, rounding: str) -> None:
        key = jax.random.key(0)
        x, weight = jnp.asarray([0.3, 1e6, -1e-9]), jnp.asarray([1.0, 2.0, 4.0])

        def loss(x):
            return (widen(cast(x, name, rounding, key)) * weight).sum()

        np.testing.assert_array_equal(jax.grad(loss)(x), weight)

    def test_saturates_on_the_way_to_an_8_bit_source(self) -> None:
        x = jnp.ones(2, jnp.float8_e4m3fn)
        grad = jax.grad(lambda x: (cast(x, jnp.float32) * 1e6).sum())(x)
        np.testing.assert_array_equal(np.asarray(grad).astype(np.float32), [448, 448])

    def test_forward_mode_is_explained(self) -> None:
        with pytest.raises(TypeError, match="unitscale: cast defines its backward pass only"):
            jax.jvp(lambda x: cast(x, "e4m3fn"), (jnp.ones(2),), (jnp.ones(2),))


def test_scaled_array_keeps_its_scale() -> None:
    x = cast(ScaledArray(jnp.asarray([1000.0, 1.0]), 4.0), "e4m3fn")
    assert x.dtype == jnp.float8_e4m3fn
    np.testing.assert_array_equal(x.value, [448 * 4, 4])


@pytest.mark.parametrize(
    ("error", "message", "args"),
    [
        (ValueError, "rounding must be 'nearest' or 'stochastic'; got 'up'", ("e5m2", "up")),
        (ValueError, "needs key=, a jax.random key", ("e5m2", "stochastic")),
        (ValueError, "not a floating-point format", ("float7",)),
    ],
)
def test_wrong_arguments(error: type[Exception], message: str, args: tuple[str, ...]) -> None:
    with pytest.raises(error, match=message):
        cast(jnp.ones(2), *args)


@pytest.mark.parametrize("x", [jnp.arange(3), True, 1j])
def test_data_must_be_floating(x: object) -> None:
    with pytest.raises(TypeError, match=r"unitscale\.cast: expected a floating array; got dtype"):
        cast(x, "e5m2")


@pytest.mark.parametrize(
    ("dtype", "expected"), [(jnp.float16, np.inf), (jnp.float8_e4m3fn, 448), (jnp.float32, 1e6)]
)
def test_narrow_saturates_8_bits_only(dtype: type, expected: float) -> None:
    assert float(narrow(jnp.float32(1e6), dtype)) == expected


def test_widen() -> None:
    assert widen(jnp.ones(1, jnp.float8_e5m2)).dtype == jnp.float32
    with jax.enable_x64(True):
        assert widen(jnp.ones(1, jnp.float64)).dtype == jnp.float64


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float16", "bfloat16", "E4M3"])
def test_strict_promotion(name: str) -> None:
    with jax.numpy_dtype_promotion("strict"):
        for rounding in ("nearest", "stochastic"):
            key = jax.random.key(0) if rounding == "stochastic" else None
            assert cast(jnp.ones(8), name, rounding, key).astype(jnp.float32).sum() == 8
