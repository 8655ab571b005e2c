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
        # Where squares leave the range of float32, the largest magnitude stands for the RMS.
        least = 0.75 if 1e-13 < size < 1e18 else 0.75 * size / amax
        assert least <= size / unit * (1 + 1e-6) or amax / unit >= 0.75
        assert size / unit < 1.5


@pytest.mark.parametrize("x", [np.zeros(3), np.zeros(()), np.full(2, np.nan), np.zeros((0, 2))])
def test_one_where_there_is_nothing_to_measure(x: Any) -> None:
    assert float(unit_of(jnp.asarray(x, jnp.float32))) == 1.0


def test_not_differentiated() -> None:
    assert float(jax.grad(lambda x: unit_of(x) * 1.0)(jnp.float32(3.0))) == 0.0


@pytest.mark.parametrize("exponent", [-70, -56, -20, 0, 28])
def test_rms_of_small_and_large_numbers_is_not_their_largest(exponent: int) -> None:
    data = np.float32(2.0**exponent) * np.append(np.ones(1023, np.float32), np.float32(16))
    assert float(unit_of(data)) == 2.0**exponent
    assert float(unit_of(data, "amax")) == 2.0 ** (exponent + 4)


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
