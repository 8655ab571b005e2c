"""When data is brought back to unit size, and by what."""

import jax.numpy as jnp
import numpy as np
import pytest

from unitscale.transforms._doubt import Doubt
from unitscale.transforms._lazy_scale import LazyScale
from unitscale.transforms._settle import finish, leaving, measured, ready, settle, sized
from unitscale.transforms._values import Value

DATA = jnp.full(4, 64.0)


def worth(value: Value) -> np.ndarray:
    assert value.scale is not None
    return np.asarray(value.data, np.float64) * float(value.scale.array())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_narrow_data_is_brought_back_where_it_is_rounded_and_wide_data_later(dtype: type) -> None:
    value = finish(DATA, LazyScale(2), 6.0, dtype)
    np.testing.assert_array_equal(value.data, DATA)
    value = ready(value)
    assert value.data.dtype == dtype
    expected = 64.0 if dtype == jnp.float32 else 1.0
    np.testing.assert_array_equal(np.asarray(value.data, np.float32), expected)
    np.testing.assert_array_equal(worth(value), 256.0)


def test_float16_of_great_doubt_is_measured_once_where_it_is_rounded() -> None:
    value = finish(jnp.full(4, 1e9), LazyScale(-3), 0.0, jnp.float16, doubt=Doubt(5.0))
    assert value.data.dtype == jnp.float32
    assert value.scale == LazyScale(), "at its value, as a program in float32 has it"
    rounded = ready(value)
    assert ready(value) is rounded
    assert rounded.data.dtype == jnp.float16
    assert float(np.max(np.asarray(rounded.data, np.float32))) < 1.5
    np.testing.assert_allclose(worth(rounded), 1e9 / 8, rtol=1e-3)


def test_what_has_no_doubt_saturates_and_keeps_infinities() -> None:
    value = ready(finish(jnp.asarray([1e9, -jnp.inf]), LazyScale(), 0.0, jnp.float16))
    np.testing.assert_array_equal(np.asarray(value.data, np.float64), [65504.0, -np.inf])


@pytest.mark.parametrize("exponent", [-60, -8, 0, 9, 60])
def test_measured_settled_and_leaving_keep_the_value(exponent: int) -> None:
    data = jnp.full(4, 2.0**exponent)
    half = Value(data, LazyScale(3), exponent, jnp.float16, doubt=Doubt(3.0))
    for result in (measured(half), sized(half), settle(half), leaving(half)):
        np.testing.assert_array_equal(result.data, 1.0)
        np.testing.assert_array_equal(worth(result), 2.0 ** (exponent + 3))
    wide = leaving(Value(data, LazyScale(3), exponent, jnp.float32, doubt=Doubt(3.0)))
    assert wide.scale == LazyScale()
    np.testing.assert_array_equal(wide.data, 2.0 ** (exponent + 3))


@pytest.mark.parametrize(("dtype", "kept"), [(jnp.float16, 2.0**64), (jnp.float32, 1.0)])
def test_long_products_of_scales_become_one_array_or_one(dtype: type, kept: float) -> None:
    scale = LazyScale()
    for _ in range(8):
        scale = scale * LazyScale.of(jnp.float32(2.0**8))
    value = finish(jnp.full(2, 2.0**-60), scale, 0.0, dtype)
    assert value.scale is not None
    assert value.scale.degree <= 1
    assert float(value.scale.array()) == kept
    np.testing.assert_array_equal(worth(value), 16.0)
