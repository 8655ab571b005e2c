"""Out-of-place updates against NumPy's in place."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.batching import compute, entry
from unitscale.core import ScaledArray

from .arrays import DTYPES, KINDS, assert_close, exact, make


@pytest.mark.parametrize("dtype", DTYPES)
def test_set_and_add(dtype: str) -> None:
    values = np.float32([1, 2, 4, 1, 2, 4])
    results = compute(
        {
            (name, kind): (lambda x, n=name: getattr(x.at[1], n)(values), make(kind, dtype))
            for name, kind in itertools.product(["set", "add"], KINDS)
        }
    )
    resolution = float(jnp.finfo(dtype).eps)
    smallest = float(jnp.finfo(dtype).smallest_subnormal) * 8
    for (name, kind), got in results.items():
        with entry((name, kind)):
            expected = exact(make(kind, dtype))
            expected[1] = values + (expected[1] if name == "add" else 0)
            assert got.dtype == jnp.dtype(dtype)
            assert_close(got, expected, resolution, np.abs(expected) + smallest / resolution)
            np.testing.assert_array_equal(exact(got)[[0, 2, 3]], expected[[0, 2, 3]])


def test_scale_stays() -> None:
    x = make("channel", "float16")
    np.testing.assert_array_equal(x.at[0].set(1.0).scale, x.scale)
    y = make("block", "float32").at[0, 0].set(3.0)
    assert y.block_shape == (2, 2)
    assert exact(y)[0, 0] == 3


def test_scaled_values() -> None:
    x, y = make("tensor", "float32"), make("row", "float32", 2)
    expected = exact(x)
    expected[:2] = exact(y)[:2]
    np.testing.assert_array_equal(exact(x.at[:2].set(y[:2])), expected)


def test_repeated_indices_add_up() -> None:
    x = ScaledArray(jnp.zeros(2), 2.0).at[jnp.array([0, 0, 1])].add(1.0)
    np.testing.assert_array_equal(x.value, [2, 1])


def test_multiply_and_get() -> None:
    x = make("row", "float32")
    expected = exact(x)
    expected[2] *= 3
    np.testing.assert_allclose(exact(x.at[2].multiply(3.0)), expected, rtol=2.0**-23)
    np.testing.assert_array_equal(exact(x.at[2].get()), exact(x)[2])


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_are_those_of_jax(kind: str) -> None:
    x = make(kind, "float32")
    rows, value = jnp.array([0, 2, 9]), exact(x)
    plain = jnp.asarray(value, jnp.float32).at[rows]
    for options in ({"mode": "clip"}, {"mode": "fill"}, {"mode": "fill", "fill_value": 3.0}):
        found = x.at[rows].get(indices_are_sorted=True, **options)
        np.testing.assert_allclose(exact(found), plain.get(**options), rtol=2.0**-22)
    for name in ("set", "add", "subtract", "multiply", "min", "max"):
        for mode in ("drop", "clip"):
            found = getattr(x.at[rows], name)(0.75, mode=mode)
            expected = getattr(plain, name)(0.75, mode=mode)
            np.testing.assert_allclose(exact(found), expected, rtol=2.0**-21, err_msg=name)


def test_8_bit_data_saturates() -> None:
    x = ScaledArray(jnp.ones(2, jnp.float8_e4m3fn), 2.0).at[0].set(1e6)
    np.testing.assert_array_equal(x.value, [896, 2])


def test_is_differentiable() -> None:
    x = ScaledArray(jnp.ones(3), 4.0)
    dx, dv = jax.grad(lambda x, v: x.at[1].set(v).value.sum(), (0, 1))(x, jnp.float32(2))
    np.testing.assert_array_equal(dx.data, [4, 0, 4])
    assert float(dv) == 1


@pytest.mark.parametrize("values", [None, "x", 1j])
def test_other_values_are_refused(values: object) -> None:
    with pytest.raises(TypeError, match=r"at\[\.\.\.\]\.multiply: expected a real array"):
        ScaledArray(jnp.ones(2)).at[0].multiply(values)
    with pytest.raises(TypeError, match=r"at\[\.\.\.\]\.set: expected a real array"):
        ScaledArray(jnp.ones(2)).at[0].set(values)
