"""Formats, powers of two and casts, against the definition of each format."""

import math
from fractions import Fraction
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from tests.compilation import USUAL_EMITTER
from tests.refusals import refuses
from unitscale.core import (
    Format,
    cast,
    check_choice,
    dithered,
    exponent_of,
    format_of,
    is_float8,
    is_floating,
    materialize,
    narrow,
    normal_pow2,
    pow2,
    round_to_pow2,
    upcast,
    wide_dtype,
    widen,
)
from unitscale.core._formats import rounding_noise

from .grids import LAYOUTS, Layout, ieee, nearest, neighbours, probes


def limits(fmt: Format) -> tuple[float, ...]:
    return fmt.max, fmt.smallest_normal, fmt.smallest_subnormal, fmt.mantissa_bits


def test_limits_are_those_of_the_layout() -> None:
    for name, layout in LAYOUTS.items():
        fmt, grid = format_of(name), layout.values()
        normal = grid[2**layout.mantissa_bits]
        assert (fmt.name, *limits(fmt)) == (name, grid[-1], normal, grid[1], layout.mantissa_bits)
        assert (fmt.exponent_bits, 2.0**fmt.min_exponent) == (layout.exponent_bits, normal)
        assert fmt.eps == grid[np.searchsorted(grid, 1) + 1] - 1
        assert fmt.has_inf == np.isinf(layout.overflow)
        assert fmt.has_nan == (name[:6] not in ("float6", "float4"))
        assert fmt.signed
        assert fmt.simulated == name.startswith("float6")
        assert fmt.simulated or jnp.zeros(1, fmt.dtype).dtype == fmt.dtype
    fmt = format_of("e8m0")
    assert (fmt.max, fmt.smallest_normal, fmt.mantissa_bits) == (2.0**127, 2.0**-127, 0)
    assert (fmt.signed, fmt.has_inf, fmt.has_nan) == (False, False, True)


def test_simulated_formats() -> None:
    pairs = {"E4M3": "float8_e4m3", "E5M2": "float8_e5m2", "E3M4": "float8_e3m4"}
    for simulated, real in (pairs | {"E5M10": "float16", "E8M23": "float32"}).items():
        fmt = format_of(simulated)
        assert limits(fmt) == limits(format_of(real))
        assert (fmt.simulated, fmt.has_inf, fmt.has_nan, fmt.signed) == (True,) * 4
    for bits in ((2, 0), (2, 5), (6, 9), (8, 0)):
        fmt, grid = format_of("E{}M{}".format(*bits)), ieee(*bits).values()
        assert (fmt.max, fmt.smallest_subnormal) == (grid[-1], grid[1])


def test_spellings() -> None:
    for spelling, name in (
        ("e4m3fn", "float8_e4m3fn"),
        ("e5m2", "float8_e5m2"),
        ("e4m3b11fnuz", "float8_e4m3b11fnuz"),
        ("e8m0", "float8_e8m0fnu"),
        ("e2m1", "float4_e2m1fn"),
        ("e2m3", "float6_e2m3fn"),
        ("e3m2", "float6_e3m2fn"),
        ("half", "float16"),
        (jnp.bfloat16, "bfloat16"),
        (np.dtype("float16"), "float16"),
        (float, "float64"),
        (ml_dtypes.float8_e5m2fnuz, "float8_e5m2fnuz"),
    ):
        assert format_of(spelling).name == name
        assert format_of(format_of(spelling)) is format_of(spelling)


MEANT = r"f: x must be one of mean, sum; got 'men'.*'mean'\?"
NOT_FORMATS = ["int8", complex, bool, None, "float9", 3, "finfo", "E9M3", "E1M3", "E4M24", "e4M3"]
test_errors = refuses(
    [
        *(
            (ValueError, lambda f=f: format_of(f), r"unitscale\.core\.format_of: .*format")
            for f in NOT_FORMATS
        ),
        (ValueError, lambda: cast(jnp.ones(2), "e5m2", "up"), "rounding"),
        (ValueError, lambda: cast(jnp.ones(2), "e5m2", "stochastic"), "key="),
        (ValueError, lambda: cast(jnp.ones(2), "float7"), "floating-point format"),
        (TypeError, lambda: cast(jnp.arange(3), "e5m2"), "floating array"),
        (TypeError, lambda: cast(1j, "e5m2"), "floating array"),
        (ValueError, lambda: check_choice("f", "x", "men", ("mean", "sum")), MEANT),
        (ValueError, lambda: round_to_pow2(jnp.ones(1), 7), r"rounding must be .*; got 7\.\n"),
    ]
)


def test_wide_dtypes_and_choices() -> None:
    narrow = ("float16", jnp.float8_e5m2, jnp.bfloat16, "float32", "int32")
    assert {wide_dtype(dtype).name for dtype in narrow} == {"float32"}
    assert wide_dtype("float64").name == "float64"
    assert is_floating(jax.ShapeDtypeStruct((), jnp.float8_e5m2))
    assert not any(map(is_floating, (1.0, jnp.arange(2), None)))
    assert all(map(is_float8, FP8))
    assert not any(map(is_float8, ("float8_e4m3fnuz", "float16", None)))
    check_choice("f", "x", 2, (1, 2))
    check_choice("f", "x", None, (None, "a"))


def samples() -> np.ndarray:
    powers = 2.0 ** np.arange(-149, 128)
    bits = np.random.default_rng(0).integers(0, 2**32, 3000, np.uint32).view(np.float32)
    points = np.concatenate([powers, 1.5 * powers[1:]]).astype(np.float32)
    points = np.concatenate([points, np.nextafter(points, np.float32(np.inf))])
    special = np.array([0, np.inf, np.nan, np.finfo(np.float32).max], np.float32)
    points = np.concatenate([points, np.nextafter(points, np.float32(0)), bits, special])
    return np.concatenate([points, -points])


def rounded(x: float, mode: str) -> float:
    """Round to a power of two with Python's fractions, saturating at 2**127."""
    if x == 0 or not math.isfinite(x):
        return x
    magnitude = Fraction(abs(x))
    floor = Fraction(2) ** (math.frexp(abs(x))[1] - 1)
    up = {"nearest": 2 * magnitude >= 3 * floor, "up": magnitude > floor, "down": False}[mode]
    return math.copysign(float(min(2 * floor if up else floor, Fraction(2) ** 127)), x)


@pytest.mark.parametrize("mode", ["nearest", "up", "down"])
def test_rounding_to_powers_of_two_is_exact(mode: str) -> None:
    x = samples()
    expected = np.array([rounded(float(v), mode) for v in x], np.float32)
    got = np.asarray(round_to_pow2(x, mode))
    np.testing.assert_array_equal(got, expected)
    numbers = ~np.isnan(x)
    np.testing.assert_array_equal(np.signbit(got)[numbers], np.signbit(x)[numbers])
    np.testing.assert_array_equal(round_to_pow2(got, mode), got)
    narrow = round_to_pow2(jnp.asarray([4.0, -0.25], jnp.float8_e4m3fn), mode)
    assert narrow.dtype == jnp.float32
    np.testing.assert_array_equal(narrow, [4, -0.25])


def test_exponents_are_exact() -> None:
    x = samples()
    finite = x[np.isfinite(x) & (x != 0)]
    expected = [math.frexp(abs(float(v)))[1] - 1 for v in finite]
    got = exponent_of(np.concatenate([finite, np.float32([0, -0.0, np.inf, -np.inf, np.nan])]))
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, [*expected, -150, -150, 128, 128, 128])
    exponents = np.arange(-400, 400)
    powers = [math.ldexp(1, int(min(e, 128))) if e >= -149 else 0 for e in exponents]
    np.testing.assert_array_equal(pow2(exponents), np.where(exponents > 127, np.inf, powers))
    normal = np.arange(-126, 128)
    np.testing.assert_array_equal(normal_pow2(normal), 2.0**normal)


SIMULATED = {"E4M3": "float8_e4m3", "E5M2": "float8_e5m2", "E5M10": "float16", "E8M7": "bfloat16"}
FP8 = ["float8_e4m3fn", "float8_e5m2"]
ALL_16_BIT = {
    t.__name__: np.arange(2**16, dtype=np.uint16).view(t) for t in (np.float16, ml_dtypes.bfloat16)
}
OFTEN = {*FP8, "bfloat16", "E4M3"}
NAMES = [
    pytest.param(name, marks=[] if name in OFTEN else pytest.mark.slow)
    for name in (*LAYOUTS, *SIMULATED)
]
quick_cast = jax.jit(cast, static_argnums=(1, 2, 4), compiler_options=USUAL_EMITTER)


@pytest.fixture(autouse=True)
def _no_floating_point_warnings():
    """Silence NumPy's warnings of overflow and signaling NaN, which these tests cause."""
    with np.errstate(all="ignore"):
        yield


def layout_of(name: str) -> Layout:
    return LAYOUTS[SIMULATED.get(name, name)]


def reference(x: np.ndarray, name: str, saturate: bool) -> np.ndarray:
    rounded = nearest(x, layout_of(name), saturate)
    fmt = format_of(name)
    if fmt.simulated or (saturate and fmt.has_nan):
        # Infinity is not hidden: only finite values saturate.
        rounded = np.where(np.isinf(x), x if fmt.has_inf else np.nan, rounded)
    # FP6 has no NaN, but the wider type that holds its values has.
    return np.where(np.isnan(x), np.nan, rounded) if name.startswith("float6") else rounded


def assert_same(got: jax.Array, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(np.asarray(got).astype(np.float64), expected)


@partial(jax.jit, static_argnums=1, compiler_options=USUAL_EMITTER)
def both_casts(x: jax.Array, name: str) -> dict[bool, jax.Array]:
    """Cast with and without saturation."""
    return {saturate: cast(x, name, saturate=saturate) for saturate in (True, False)}


@pytest.mark.parametrize("name", NAMES)
class TestNearest:
    def test_float32(self, name: str) -> None:
        x = probes(layout_of(name), np.float32)
        for saturate, got in both_casts(x, name).items():
            assert got.dtype == (jnp.float32 if format_of(name).simulated else jnp.dtype(name))
            assert_same(got, reference(x, name, saturate))

    def test_all_16_bit_values(self, name: str) -> None:
        for source, x in ALL_16_BIT.items():
            for saturate, got in both_casts(x, name).items():
                expected = reference(x.astype(np.float32), name, saturate)
                if not format_of(name).simulated:
                    assert_same(got, expected)
                    continue
                # The dtype of x keeps the values; it may not hold all of the format.
                common = np.abs(expected) <= min(format_of(name).max, format_of(source).max)
                common &= expected.astype(x.dtype).astype(np.float64) == expected
                assert common.sum() > 2**14
                assert_same(got[common], expected[common])
                finite = np.asarray(got).astype(np.float64)
                assert np.abs(finite[np.isfinite(finite)]).max() <= format_of(name).max

    def test_float64(self, name: str) -> None:
        with jax.enable_x64(True):
            x = probes(layout_of(name), np.float64)
            found = {s: np.asarray(y).astype(np.float64) for s, y in both_casts(x, name).items()}
        for saturate, got in found.items():
            expected = reference(x, name, saturate)
            # XLA on the CPU flushes float64 that is subnormal in float32 when it narrows.
            flushed = (name == "bfloat16") & (np.abs(expected) < 2.0**-126)
            if name in SIMULATED:  # infinity is beyond a format whose values are float64
                flushed |= np.isinf(expected) & ~np.isinf(x)
            np.testing.assert_array_equal(got[~flushed], expected[~flushed])


def test_ties_of_a_format_without_mantissa_bits_go_to_even_codes() -> None:
    x, layout = np.float32([1.5, 3, 6, 12, -3]), Layout(4, 0, 7, "ieee", np.inf)
    assert_same(cast(x, "E4M0"), nearest(x, layout))
    # One bit less than float32.
    x = np.float32([1 + 2.0**-23, 1 + 3 * 2.0**-23])
    assert_same(cast(x, "E8M22"), np.array([1, 1 + 2.0**-21]))


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


def assert_share(up: np.ndarray, fraction: np.ndarray) -> None:
    """Check that means along the last axis are those of coins, within 5 standard deviations."""
    error = 5 * np.sqrt(fraction * (1 - fraction) / up.shape[-1])
    assert (np.abs(up.mean(-1) - fraction) <= error).all()


class TestE8M0:
    @pytest.mark.parametrize("source", [np.float32, np.float16, ml_dtypes.bfloat16])
    def test_nearest(self, source: type) -> None:
        grid = 2.0 ** np.arange(-127, 128)
        special = [0, -0.0, -1, -1e30, 1e-42, np.inf, -np.inf, np.nan, 3.4e38, 2.9e38]
        points = np.concatenate([grid, 1.5 * grid, 1.49 * grid, 1.51 * grid, special])
        x = points.astype(source).astype(np.float64)
        floor = 2.0 ** np.floor(np.log2(np.maximum(x, grid[0])))
        y = np.where(x >= 1.5 * floor, 2 * floor, floor)
        saturated = np.where(x <= grid[0], grid[0], np.minimum(y, grid[-1]))
        others = np.where((x <= 0) | (y > grid[-1]), np.nan, y)
        for saturate, wanted in ((True, saturated), (False, others)):
            got = cast(jnp.asarray(points.astype(source)), "e8m0", saturate=saturate)
            assert_same(got, np.where(np.isfinite(x), wanted, np.nan))

    def test_stochastic_is_unbiased(self) -> None:
        x = np.float32([1.25, 3.9, 2.0**-126 * 1.5, 8.0])
        many = jnp.repeat(jnp.asarray(x)[:, None], 4000, 1)
        got = np.asarray(cast(many, "e8m0", "stochastic", jax.random.key(0))).astype(np.float64)
        low = 2.0 ** np.floor(np.log2(x.astype(np.float64)))
        assert np.isin(got / low[:, None], [1, 2]).all()
        assert_share(got / low[:, None] - 1, x / low - 1)

    def test_is_a_constant_of_differentiation(self) -> None:
        grad = jax.grad(lambda x: (x * cast(x, "e8m0").astype(jnp.float32)).sum())(jnp.full(2, 3.0))
        np.testing.assert_array_equal(grad, [4, 4])


def stochastic(x: np.ndarray, name: str, seed: int) -> np.ndarray:
    """Cast in chunks of one size, so that each format compiles once."""
    size = 2**17
    flat = np.pad(np.ravel(x).astype(np.float32), (0, -np.size(x) % size)).reshape(-1, size)
    keys = jax.random.split(jax.random.key(seed), len(flat))
    parts = [quick_cast(row, name, "stochastic", key) for row, key in zip(flat, keys, strict=True)]
    return np.concatenate(parts).astype(np.float64)[: np.size(x)].reshape(np.shape(x))


@pytest.mark.parametrize("name", NAMES)
class TestStochastic:
    def test_goes_to_a_neighbour(self, name: str) -> None:
        grid = layout_of(name).values()
        x = probes(layout_of(name), np.float32)
        x = np.concatenate([-grid, x[np.isfinite(x)]])
        if format_of(name).min_exponent > -126:  # XLA flushes subnormal float32: they round down
            x = x[(np.abs(x) >= 2.0**-126) | (x == 0)]
        got = stochastic(x, name, 1)
        unsigned = (got == 0) & name.endswith("fnuz")  # which has one zero
        assert (unsigned | (np.signbit(got) == np.signbit(x))).all()
        below, above = (grid[i] for i in neighbours(np.minimum(np.abs(x), grid[-1]), grid))
        assert ((np.abs(got) == below) | (np.abs(got) == above)).all()

    def test_is_unbiased(self, name: str) -> None:
        grid = layout_of(name).values()
        at = np.array([0, 1, len(grid) // 3, len(grid) // 2, len(grid) - 2])
        fraction = np.array([0.1, 0.5, 0.75, 0.25, 0.9])
        if name in ("bfloat16", "E8M7"):
            at[:2] = [130, 300]  # a fraction of a subnormal step is not a float32
        step = grid[at + 1] - grid[at]
        values = (grid[at] + fraction * step).astype(np.float32)
        for sign in (1, -1):
            got = stochastic(np.repeat(sign * values[:, None], 4000, axis=1), name, 2)
            assert_share((sign * got - grid[at, None]) / step[:, None], (values - grid[at]) / step)

    def test_saturates(self, name: str) -> None:
        top, x = format_of(name).max, np.array([3.4e38, -3.4e38, np.inf, -np.inf, np.nan])
        infinite = x[2:4] if format_of(name).has_inf else [np.nan, np.nan]
        expected = [top, -top, *infinite, np.nan]
        if name == "float4_e2m1fn":
            expected[2:] = [top, -top, stochastic(x, name, 4)[4]]
        np.testing.assert_array_equal(stochastic(x, name, 4), expected)


def test_stochastic_rounding_of_exact_values_survives_the_widest_noise() -> None:
    """In float32, 127 plus 23 random bits would be rounded up to 128 once in 2**18 draws."""
    assert (stochastic(np.full(2**20, 127.0), "E4M6", 0) == 127).all()


class TestFloat8:
    """The bit arithmetic used on CPUs gives the same results as other platforms' instructions."""

    @pytest.mark.parametrize("dtype", FP8)
    def test_every_number_is_cast_to_itself(self, dtype: str) -> None:
        codes = np.arange(256, dtype=np.uint8)
        expected = codes.view(jnp.dtype(dtype)).astype(np.float32)
        finite = np.isfinite(expected)
        again = np.asarray(cast(expected[finite], dtype))
        np.testing.assert_array_equal(again.view(np.uint8), codes[finite])
        tiny = np.asarray(cast(jnp.float32([1e-30, -1e-30, 1e-40, -1e-40]), dtype))
        np.testing.assert_array_equal(tiny.view(np.uint8), [0, 0x80, 0, 0x80])

    @pytest.mark.parametrize("dtype", FP8)
    def test_what_is_not_finite(self, dtype: str) -> None:
        fmt, x = format_of(dtype), jnp.float32([1e6, -3e38, jnp.inf, -jnp.inf, jnp.nan])
        beyond, found = np.inf if fmt.has_inf else np.nan, cast(x, dtype).astype(jnp.float32)
        np.testing.assert_array_equal(found, [fmt.max, -fmt.max, beyond, -beyond, np.nan])


class TestNoise:
    """The bits of stochastic rounding are uniform and independent."""

    SIZE, KEY = 2**16, jax.random.key(3)

    def noise(self, key: jax.Array, *shape: int) -> np.ndarray:
        return np.asarray(rounding_noise(key, shape))

    def test_is_uniform_and_independent(self) -> None:
        """Test single bits, and pairs of bits of one entry, different entries or keys."""
        words = self.noise(self.KEY, self.SIZE)
        keys = jax.random.key(4), jax.random.split(self.KEY)[0], jax.random.split(self.KEY, 4)[1]
        others = [np.roll(words, by) for by in (1, 1024)]
        others += [self.noise(key, self.SIZE) for key in keys]
        signs = [
            np.float32(((w >> np.arange(32, dtype=np.uint32)[:, None]) & 1) * 2.0 - 1)
            for w in (words, *others)
        ]
        assert np.all(abs(signs[0].mean(1)) < 5 / self.SIZE**0.5)
        for i, other in enumerate(signs):
            # The largest of a thousand is expected at 3.3 standard deviations.
            products = signs[0] @ other.T / self.SIZE - (i == 0) * np.eye(32)
            assert np.max(abs(products)) < 5.5 / self.SIZE**0.5
        assert len(np.unique(words)) == self.SIZE

    def test_a_place_counts_and_not_the_shape(self) -> None:
        flat = self.noise(self.KEY, 64)
        np.testing.assert_array_equal(self.noise(self.KEY, 4, 8, 2).ravel(), flat)
        assert self.noise(self.KEY) == self.noise(self.KEY, 1)[0]
        assert self.noise(self.KEY, 0, 3).shape == (0, 3)
        keys = jax.random.split(jax.random.key(0, impl="rbg"), 3)
        assert len(np.unique(jax.vmap(lambda key: rounding_noise(key, (5,)))(keys))) == 15


class TestDithered:
    def test_goes_to_a_neighbour_of_the_format_and_leaves_what_is_not_normal(self) -> None:
        special = np.float32([0.0, -0.0, 1e-40, -1e-40, 3e38, np.inf, -np.inf, np.nan])
        x = np.random.default_rng(0).uniform(-400, 400, 1000).astype(np.float32)
        for bits in (2, 3):
            exact = np.outer(2.0 ** np.arange(-6, 7), 1 + np.arange(2**bits) / 2**bits).ravel()
            for kept in (exact.astype(np.float32), -exact.astype(np.float32), special):
                found = np.asarray(dithered(jnp.asarray(kept), bits))
                np.testing.assert_array_equal(found.view(np.uint32), kept.view(np.uint32))
            found = np.asarray(dithered(jnp.asarray(x), bits))
            step = 2.0 ** (np.floor(np.log2(np.abs(x))) - bits)
            assert np.all(np.abs(found - x) < step)
            assert not np.any(found % step)


class TestGradient:
    @pytest.mark.parametrize("name", ["float8_e5m2", "E4M3", "float16", "float4_e2m1fn"])
    def test_is_straight_through(self, name: str) -> None:
        x, weight = jnp.asarray([0.3, 1e6, -1e-9]), jnp.asarray([1.0, 2.0, 4.0])
        for options in ((), ("stochastic", jax.random.key(0))):
            grad = jax.grad(lambda x: (widen(cast(x, name, *options)) * weight).sum())  # noqa: B023
            np.testing.assert_array_equal(grad(x), weight)

    def test_saturates_on_the_way_to_an_8_bit_source(self) -> None:
        x = jnp.ones(2, jnp.float8_e4m3fn)
        for wider in (cast, upcast):
            grad = jax.grad(lambda x: (wider(x, jnp.float32) * 1e6).sum())(x)  # noqa: B023
            np.testing.assert_array_equal(np.asarray(grad).astype(np.float32), [448, 448])


def test_narrow_saturates_8_bits_only() -> None:
    for dtype, expected in ((jnp.float16, np.inf), (jnp.float8_e4m3fn, 448), (jnp.float32, 1e6)):
        assert float(narrow(jnp.float32(1e6), dtype)) == expected
    with jax.enable_x64(True):
        assert widen(jnp.ones(1, jnp.float64)).dtype == jnp.float64


def test_materialize_keeps_a_rounding() -> None:
    there_and_back = partial(lax.convert_element_type, new_dtype=jnp.float32)
    y = jax.jit(lambda x: there_and_back(materialize(x.astype(jnp.float8_e5m2))))(jnp.float32(1.2))
    assert float(y) == 1.25


@pytest.mark.parametrize("name", ["float8_e4m3fn", "E4M3"])
def test_strict_promotion(name: str) -> None:
    with jax.numpy_dtype_promotion("strict"):
        for options in ((), ("stochastic", jax.random.key(0))):
            assert cast(jnp.ones(8), name, *options).astype(jnp.float32).sum() == 8


def test_dithered_numbers_beyond_a_format_saturate() -> None:
    x = jnp.array([3.4e38, -500.0, jnp.inf, jnp.nan])
    found = dithered(x, format_of("float8_e4m3fn"))
    np.testing.assert_array_equal(found, [448.0, -448.0, jnp.inf, jnp.nan])
