"""Powers of two against exact rational arithmetic."""

import math
from fractions import Fraction

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale.core import (
    exponent_of,
    normal_pow2,
    pow2,
    round_to_pow2,
    static_pow2,
    static_pow2_sqrt,
)

MODES = ["nearest", "up", "down"]


def exact(x: float, mode: str) -> float:
    """Rounds with fractions, saturating at 2**127."""
    if x == 0 or not math.isfinite(x):
        return x
    magnitude = Fraction(abs(x))
    floor = Fraction(2) ** (math.frexp(abs(x))[1] - 1)
    up = {"nearest": 2 * magnitude >= 3 * floor, "up": magnitude > floor, "down": False}[mode]
    return math.copysign(float(min(2 * floor if up else floor, Fraction(2) ** 127)), x)


def samples() -> np.ndarray:
    rng = np.random.default_rng(0)
    powers = 2.0 ** np.arange(-149, 128)
    bits = rng.integers(0, 2**32, 3000, np.uint32).view(np.float32)
    points = np.concatenate([powers, 1.5 * powers[1:]]).astype(np.float32)
    points = np.concatenate([points, np.nextafter(points, np.float32(np.inf))])
    points = np.concatenate([points, np.nextafter(points, np.float32(0)), bits])
    special = np.array([0, np.inf, np.nan, np.finfo(np.float32).max], np.float32)
    points = np.concatenate([points, special])
    return np.concatenate([points, -points])


@pytest.mark.parametrize("mode", MODES)
def test_rounding_is_exact(mode: str) -> None:
    x = samples()
    expected = np.array([exact(float(v), mode) for v in x], np.float32)
    got = np.asarray(jax.jit(lambda x: round_to_pow2(x, mode))(x))
    np.testing.assert_array_equal(got, expected)
    numbers = ~np.isnan(x)
    np.testing.assert_array_equal(np.signbit(got)[numbers], np.signbit(x)[numbers])


@pytest.mark.parametrize("mode", MODES)
def test_top_saturates(mode: str) -> None:
    top = np.finfo(np.float32).max
    np.testing.assert_array_equal(
        round_to_pow2(jnp.asarray([top, -top]), mode), [2**127, -(2**127)]
    )


@hypothesis.given(st.floats(width=32, allow_nan=False), st.sampled_from(MODES))
@hypothesis.settings(max_examples=60)
def test_rounding_twice_changes_nothing(x: float, mode: str) -> None:
    once = round_to_pow2(jnp.float32(x), mode)
    assert float(round_to_pow2(once, mode)) == float(once)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn])
def test_narrow_types_are_widened(dtype: type) -> None:
    got = round_to_pow2(jnp.asarray([0.7, 5.0, -3.0], dtype))
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, [0.5, 4.0, -4.0])


def test_unknown_mode() -> None:
    with pytest.raises(ValueError, match="rounding must be one of nearest, up, down; got 'even'"):
        round_to_pow2(jnp.ones(1), "even")  # type: ignore[arg-type]


def test_exponent_is_exact() -> None:
    x = samples()
    finite = x[np.isfinite(x) & (x != 0)]
    expected = [math.frexp(abs(float(v)))[1] - 1 for v in finite]
    got = exponent_of(jnp.asarray(finite))
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, expected)
    special = exponent_of(jnp.asarray([0.0, -0.0, np.inf, -np.inf, np.nan]))
    np.testing.assert_array_equal(special, [-150, -150, 128, 128, 128])


def test_pow2_is_exact_and_inverts_exponent_of() -> None:
    exponents = np.arange(-400, 400)
    expected = np.array([math.ldexp(1, int(e)) if -149 <= e < 128 else 0 for e in exponents])
    expected[exponents >= 128] = np.inf
    got = np.asarray(jax.jit(pow2)(exponents))
    np.testing.assert_array_equal(got, expected.astype(np.float32))
    inside = (exponents >= -149) & (exponents < 128)
    np.testing.assert_array_equal(exponent_of(got)[inside], exponents[inside])


@hypothesis.given(st.integers(1, 10**9))
@hypothesis.settings(max_examples=100)
def test_static_powers_are_the_nearest_in_log2(n: int) -> None:
    root = static_pow2_sqrt(n)
    assert math.frexp(root)[0] == 0.5
    assert Fraction(1, 2) <= Fraction(root) ** 2 / n <= 2
    power = static_pow2(n)
    assert Fraction(1, 2) <= (Fraction(power) / n) ** 2 <= 2


def test_static_edge_cases() -> None:
    assert static_pow2_sqrt(0) == 1
    for x in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="expected a positive finite number"):
            static_pow2(x)


def test_normal_powers_of_two_are_those_of_pow2() -> None:
    exponents = jnp.arange(-126, 128)
    np.testing.assert_array_equal(normal_pow2(exponents), pow2(exponents))
