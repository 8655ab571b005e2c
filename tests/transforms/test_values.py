"""Values, and the small operations on their data."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale.transforms._lazy_scale import LazyScale
from unitscale.transforms._values import (
    Value,
    constant_of,
    data_dtype,
    numeric,
    saturate,
    times,
    uniform,
)


def test_only_concrete_floating_scalars_are_constants() -> None:
    assert constant_of(np.float32(0.5)) == 0.5
    assert constant_of(np.int32(3)) is None
    assert constant_of(np.ones(2)) is None
    assert jax.jit(lambda x: jnp.float32(constant_of(x) is None))(1.0) == 1.0


@pytest.mark.parametrize("exponent", [-140, -126, 0, 127, 140])
def test_times_a_power_of_two_beyond_float32(exponent: int) -> None:
    data = jnp.float32(2.0 ** (-exponent // 2))
    assert float(times(data, LazyScale(exponent))) == 2.0 ** (-exponent // 2 + exponent)


@pytest.mark.parametrize("how", [lambda f: f, jax.jit], ids=["eager", "jitted"])
def test_saturate_clamps_what_is_finite(how: Callable[[Any], Any]) -> None:
    clamp = how(lambda x: saturate(x, jnp.float16))
    numbers = [1e6, -1e6, 3e38, -3e38, 65519.0, 0.0, -0.0, jnp.inf, -jnp.inf, jnp.nan]
    expected = [65504, -65504] * 2 + [65504, 0.0, -0.0, np.inf, -np.inf, np.nan]
    found = clamp(jnp.asarray(numbers))
    np.testing.assert_array_equal(found, np.asarray(expected, np.float32))
    np.testing.assert_array_equal(np.signbit(found[5:7]), [False, True])
    np.testing.assert_array_equal(saturate(found, jnp.float32), found)


def test_plain_operands_never_widen() -> None:
    half, plain = Value(jnp.ones(2, jnp.float16), LazyScale()), Value(jnp.ones(2))
    assert data_dtype(half, plain) == jnp.float16
    assert data_dtype(half, Value(jnp.ones(2), LazyScale())) == jnp.float32


def test_uniform_keeps_the_value() -> None:
    scales = LazyScale.of(jnp.asarray([[1.0], [8.0]]))
    value = uniform(Value(jnp.ones((2, 3)), scales))
    assert value.scale is not None
    assert value.scale.ndim == 0
    np.testing.assert_array_equal(numeric(value), [[1, 1, 1], [8, 8, 8]])
