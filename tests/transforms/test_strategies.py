"""The static choice of scales."""

import math
from typing import Any

import jax.numpy as jnp
import pytest

from unitscale import ScaledArray, as_scaled
from unitscale.transforms import get_data_scale, scalify


def down(primitive: str, terms: int) -> float:
    return 2.0 ** math.floor(math.log2(terms) / 2)


@pytest.mark.parametrize(
    ("strategy", "scale"), [("unit", 8.0), ("identity", 1.0), (down, 4.0), (lambda p, n: n, 64.0)]
)
def test_growth_decides_the_scale_of_a_product(strategy: Any, scale: float) -> None:
    x = ScaledArray(jnp.ones((2, 48)), jnp.float32(1.0))
    product = scalify(lambda a: get_data_scale(a @ a.T)[1], static_scaling=strategy)(x)
    assert float(product) == scale


def test_no_growth_for_one_term() -> None:
    x = ScaledArray(jnp.ones((3, 1)), jnp.float32(1.0))
    product = scalify(lambda a: get_data_scale(a @ a.T)[1], static_scaling=lambda p, n: 16.0)(x)
    assert float(product) == 1.0


@pytest.mark.parametrize("result", [0.0, -1.0, math.inf, "big"])
def test_a_function_must_return_a_positive_number(result: Any) -> None:
    with pytest.raises(ValueError, match="must return a positive finite number; got"):
        scalify(jnp.dot, static_scaling=lambda p, n: result)(*[as_scaled(jnp.ones(4))] * 2)


def test_errors() -> None:
    with pytest.raises(ValueError, match="must be one of unit, identity or a function"):
        scalify(jnp.sin, static_scaling="rms")
    with pytest.raises(TypeError, match="got int"):
        scalify(jnp.sin, static_scaling=3)  # pyright: ignore[reportArgumentType]
