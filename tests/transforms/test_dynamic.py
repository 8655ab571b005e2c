"""Scales read from data, against NumPy in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale.transforms._values import unit_of

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
    for exponent in (-84, -70, -48, -20, -5, 0, 28, 90, 103):
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
    ("numbers", "unit", "with_room"),
    [
        ([3e38, 0.0], 2.0**126, 2.0**126),
        ([1.0] * 7 + [2.0**10], 2.0**8, 2.0**8),
        ([0.0] * 2**16 + [2.0**20], 2.0**12, 2.0**12),
        ([0.0] * (2**18 - 1) + [2.0**20 - 1], 2.0**11, 2.0**11),
        ([1e-9] * 2**12 + [2.0**-9], 2.0**-15, 2.0**-15),
    ],
)
def test_the_largest_entry_has_room(numbers: list[float], unit: float, with_room: float) -> None:
    data = jnp.asarray(numbers, jnp.float32)
    assert float(unit_of(data)) == unit
    assert float(unit_of(data, "rms", 2.0**15)) == with_room
