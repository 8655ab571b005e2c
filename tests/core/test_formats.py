"""Limits of formats against their layouts, and powers of two against exact arithmetic."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from unitscale.core import (
    Format,
    check_choice,
    exponent_of,
    format_of,
    is_floating,
    normal_pow2,
    pow2,
    round_to_pow2,
    wide_dtype,
)

from .grids import LAYOUTS, ieee


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


@pytest.mark.parametrize(
    "spelling", ["int8", complex, bool, None, "float9", 3, "finfo", "E9M3", "E1M3", "E4M24", "e4M3"]
)
def test_other_types_are_refused(spelling: object) -> None:
    with pytest.raises(ValueError, match=r"unitscale\.core\.format_of: .*format"):
        format_of(spelling)


def test_wide_dtypes() -> None:
    narrow = ("float16", jnp.float8_e5m2, jnp.bfloat16, "float32", "int32")
    assert {wide_dtype(dtype).name for dtype in narrow} == {"float32"}
    assert wide_dtype("float64").name == "float64"
    assert is_floating(jax.ShapeDtypeStruct((), jnp.float8_e5m2))
    assert not any(map(is_floating, (1.0, jnp.arange(2), None)))


def test_choices() -> None:
    check_choice("f", "x", 2, (1, 2))
    check_choice("f", "x", None, (None, "a"))
    with pytest.raises(ValueError, match=r"f: x must be one of mean, sum; got 'men'.*'mean'\?"):
        check_choice("f", "x", "men", ("mean", "sum"))
    with pytest.raises(ValueError, match=r"rounding must be one of .*; got 7\.\n"):
        round_to_pow2(jnp.ones(1), 7)  # type: ignore[arg-type]


def samples() -> np.ndarray:
    powers = 2.0 ** np.arange(-149, 128)
    bits = np.random.default_rng(0).integers(0, 2**32, 3000, np.uint32).view(np.float32)
    points = np.concatenate([powers, 1.5 * powers[1:]]).astype(np.float32)
    points = np.concatenate([points, np.nextafter(points, np.float32(np.inf))])
    special = np.array([0, np.inf, np.nan, np.finfo(np.float32).max], np.float32)
    points = np.concatenate([points, np.nextafter(points, np.float32(0)), bits, special])
    return np.concatenate([points, -points])


def rounded(x: float, mode: str) -> float:
    """Rounds with fractions, saturating at 2**127."""
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
