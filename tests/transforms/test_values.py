"""Values, and the small operations on their data."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale.core._lazy_scale import LazyScale
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


def test_saturate_clamps_what_is_finite() -> None:
    wide = jnp.asarray([1e6, -1e6, jnp.inf, jnp.nan])
    np.testing.assert_array_equal(saturate(wide, jnp.float16), [65504, -65504, np.inf, np.nan])
    np.testing.assert_array_equal(saturate(wide, jnp.float32), wide)


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
