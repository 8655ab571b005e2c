"""The static choice of scales."""

import math
from typing import Any

import jax.numpy as jnp
import pytest

from unitscale import ScaledArray
from unitscale.transforms import STRATEGIES, get_data_scale, growth_of, scalify


def down(primitive: str, terms: int) -> float:
    return 2.0 ** math.floor(math.log2(terms) / 2)


@pytest.mark.parametrize(
    ("strategy", "scale"), [("unit", 8.0), ("identity", 1.0), (down, 4.0), (lambda p, n: n, 64.0)]
)
def test_growth_decides_the_scale_of_a_product(strategy: Any, scale: float) -> None:
    x = ScaledArray(jnp.ones((2, 48)), jnp.float32(1.0))
    product = scalify(lambda a: get_data_scale(a @ a.T)[1], static_scaling=strategy)(x)
    assert float(product) == scale


@pytest.mark.parametrize(
    ("rounding", "one", "three"),
    # sqrt(48) is 2^2.79: carried, three of them are 2^8.38; rounded one by one, 2^9 or 2^6.
    [
        ("carried", 8.0, 2.0**8),
        ("nearest", 8.0, 2.0**9),
        ("down", 4.0, 2.0**6),
        ("up", 8.0, 2.0**9),
    ],
)
def test_rounding_is_carried_or_made_in_every_product(
    rounding: Any, one: float, three: float
) -> None:
    x = ScaledArray(jnp.ones((48, 48)), jnp.float32(1.0))

    def scale(f: Any) -> float:
        return float(scalify(lambda a: get_data_scale(f(a))[1], scale_rounding=rounding)(x))

    assert scale(lambda a: a @ a) == one
    assert scale(lambda a: a @ a @ a @ a) == three


def test_no_growth_for_one_term() -> None:
    assert growth_of("unit")("reduce_sum", 1) == 0.0
    assert set(STRATEGIES) == {"unit", "identity"}


@pytest.mark.parametrize("result", [0.0, -1.0, math.inf, "big"])
def test_a_function_must_return_a_positive_number(result: Any) -> None:
    with pytest.raises(ValueError, match="must return a positive finite number; got"):
        growth_of(lambda p, n: result)("add", 4)


def test_errors() -> None:
    with pytest.raises(ValueError, match="must be one of unit, identity or a function"):
        growth_of("rms")
    with pytest.raises(ValueError, match="scale_rounding must be one of carried, nearest"):
        scalify(jnp.sum, scale_rounding="even")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="got int"):
        growth_of(3)  # pyright: ignore[reportArgumentType]
