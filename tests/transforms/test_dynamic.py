"""Scales read from data, against NumPy in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale.transforms._dynamic import room_of, unit_of

CASES: dict[str, Any] = {
    "ones": np.ones(5),
    "at the tie": np.full(3, 1.5),
    "below the tie": np.full(3, 1.49),
    "large": np.asarray([3e30, -1e30]),
    "small": np.asarray([3e-30, 1e-31]),
    "sparse": np.asarray([0, 0, 0, 100.0]),
    "infinite": np.asarray([np.inf, np.nan, 12.0]),
    "scalar": np.asarray(-0.3),
}


@pytest.mark.parametrize("name", CASES)
def test_nearest_power_of_two(name: str) -> None:
    x = CASES[name]
    finite = np.where(np.isfinite(x), x, 0)
    rms, amax = np.sqrt(np.mean(finite**2)), np.max(np.abs(finite))
    for statistic, size in (("rms", rms), ("amax", amax)):
        unit = float(jax.jit(unit_of, static_argnums=1)(jnp.asarray(x, jnp.float32), statistic))
        assert np.frexp(unit)[0] == 0.5
        assert 0.75 - 1e-6 < size / unit < 1.5


@pytest.mark.parametrize("x", [np.zeros(3), np.zeros(()), np.full(2, np.nan), np.zeros((0, 2))])
def test_one_where_there_is_nothing_to_measure(x: Any) -> None:
    assert float(unit_of(jnp.asarray(x, jnp.float32))) == 1.0


def test_not_differentiated() -> None:
    assert float(jax.grad(lambda x: unit_of(x) * 1.0)(jnp.float32(3.0))) == 0.0


@pytest.mark.parametrize("log2", [1, 10, 20])
def test_rms_of_small_and_large_numbers_is_not_their_largest(log2: int) -> None:
    """Of equal numbers but one, which is four times as large, and of one beside zeros."""
    units = jax.jit(lambda x: [unit_of(x), unit_of(x, "amax")])
    last = np.arange(2**log2) == 2**log2 - 1
    larger = 1.0 if log2 == 1 else 4.0
    for exponent in (-104, -70, -48, -20, -5, 0, 28, 90, 103):
        unit = 2.0**exponent
        data = np.where(last, larger * unit, unit).astype(np.float32)
        assert list(map(float, units(data))) == [unit, larger * unit]
        data = np.where(last, unit, 0).astype(np.float32)
        assert list(map(float, units(data))) == [unit / 2.0 ** ((log2 + 1) // 2), unit]


@pytest.mark.parametrize("shape", [(2,), (1000, 2), (2, 3, 1)])
def test_what_is_broadcast_has_the_size_of_what_it_was(shape: tuple[int, ...]) -> None:
    """A sum of equal numbers is compiled to a product with their number."""
    unit = jax.jit(lambda x: unit_of(jnp.broadcast_to(jnp.cos(x) + x, shape)))
    for exponent in (-104, -20, 5, 60, 104):
        row = jnp.full(shape[-1:], 2.0**exponent)
        assert float(unit(row)) == pytest.approx(max(2.0**exponent, 1.0), rel=1)


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([3e38, 0.0], 2.0**126),
        ([-3e38, np.inf], 2.0**126),
        ([1e33, 1.0, 1.0, 1.0], 1.0),
        ([-3e38, 1e-30], 2.0**-100),
        ([2e31, 1.0], 2.0**104 / 2),
    ],
)
def test_what_stands_for_infinity_is_left_out_beside_others(
    numbers: list[float], expected: float
) -> None:
    assert float(unit_of(jnp.asarray(numbers, jnp.float32))) == expected


# An array, and the size of what is not a mask.
ROOMS: dict[str, tuple[list[float], float]] = {
    "numbers": ([1.0, -3.0, 0.0], 4.0),
    "small numbers": ([1e-9, 0.0], 2.0**-30),
    "large numbers": ([1e11, 3e11], 2.0**38),
    "a mask": ([3.0, -1e9, -1e9], 4.0),
    "a mask beside zeros": ([0.0, -1e30], 2.0**-6),
    "a mask, twice": ([0.0, 8.0, -1e9, -2e9], 8.0),
    "an infinite mask": ([-np.inf, 3.0, np.nan], 4.0),
    "numbers of all sizes": ([1.0, 1e7, 1e9, 3e11], 2.0**38),
    "one mask everywhere": ([-1e9, -1e9], 2.0**30),
    "zeros": ([0.0, 0.0], 2.0**-126),
}


@pytest.mark.parametrize("name", ROOMS)
def test_room_for_an_array(name: str) -> None:
    numbers, expected = ROOMS[name]
    assert float(jax.jit(room_of)(jnp.asarray(numbers, jnp.float32))) == expected
    nonzero = jnp.asarray([n for n in numbers if n] or [0.0], jnp.float32)
    assert float(room_of(nonzero, zeros=True)) == float(room_of(jnp.append(nonzero, 0.0)))
