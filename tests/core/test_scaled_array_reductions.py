"""Reductions against NumPy in float64, over data types, kinds of scale and axes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.batching import compute, entry
from unitscale.core import ScaledArray

from .arrays import DTYPES, KINDS, assert_close, eps, exact, make

REDUCTIONS = ["sum", "mean", "max", "min"]
AXES = [None, 0, -1, ()]


def reduced(x, **kwargs):
    return {name: getattr(x, name)(**kwargs) for name in REDUCTIONS}


@pytest.mark.parametrize("kind", KINDS)
def test_every_scale_and_axis(kind: str) -> None:
    x = make(kind, "float32")
    table = {
        (name, axis, keepdims): (lambda x, n=name, kw=keywords: getattr(x, n)(**kw), x)
        for name, axis, keepdims in itertools.product(REDUCTIONS, AXES, [False, True])
        for keywords in [{"axis": axis, "keepdims": keepdims}]
    }
    for (name, axis, keepdims), got in compute(table).items():
        with entry((name, axis, keepdims)):
            expected = getattr(exact(x), name)(axis=axis, keepdims=keepdims)
            largest = np.abs(exact(x)).max(axis=axis, keepdims=keepdims)
            largest = {"sum": 24 * largest}.get(name, largest)
            # 24 terms, each with a rounding or two in float32.
            assert_close(got, expected, 48 * 2.0**-23, largest)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["none", "channel"])
def test_every_type(dtype: str, kind: str) -> None:
    x = make(kind, dtype)
    for name, got in jax.jit(lambda x: reduced(x, axis=0))(x).items():
        assert got.dtype == (jnp.bfloat16 if dtype.startswith("float8") else jnp.dtype(dtype))
        expected = getattr(exact(x), name)(axis=0)
        # One rounding, and float32 sums of terms as large as the largest.
        largest = np.abs(exact(x)).max(axis=0)
        largest = {"sum": 4 * largest}.get(name, largest)
        assert_close(
            got, expected, eps(dtype), np.abs(expected) + 8 * largest * 2.0**-23 / eps(dtype)
        )


def test_other_reductions_take_the_value() -> None:
    x = make("row", "float8_e5m2")
    assert int(jnp.argmax(x)) == exact(x).argmax()
    np.testing.assert_allclose(jnp.std(x, 0), exact(x).std(0), rtol=1e-5)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 1000])
def test_sums_grow_the_scale_by_the_root(count: int) -> None:
    x = ScaledArray(jnp.ones((count, 3), jnp.float16), jnp.full((1, 3), 4.0)).sum(0)
    norm = 2.0 ** round(np.log2(np.sqrt(count)))
    np.testing.assert_array_equal(x.scale, np.full(3, 4 * norm))
    assert_close(x, np.full(3, 4.0 * count), 2.0**-11)


def test_unit_data_stays_near_unit() -> None:
    data = np.random.default_rng(0).standard_normal((4096, 50))
    x = ScaledArray(jnp.asarray(data, jnp.float16), 1).sum(0)
    # The variance of 50 sums, and a power of two that is up to 2**0.5 off (here 64: exact).
    assert abs(float(np.std(np.asarray(x.data, np.float64))) - 1) < 5 / np.sqrt(2 * 50)


def test_no_elements() -> None:
    x = ScaledArray(jnp.zeros((0, 3), jnp.float16), 2.0)
    np.testing.assert_array_equal(x.sum(0).value, [0, 0, 0])
    assert float(x.sum().value) == 0


def test_large_sums_do_not_overflow_16_bits() -> None:
    x = ScaledArray(jnp.full(2**14, 16.0, jnp.float16), 1)
    assert float(x.sum().value) == 2.0**18
    assert float(x.mean().value) == 16


def test_gradient() -> None:
    def gradients(name: str, x: ScaledArray) -> tuple:
        scale = np.float32(exact(x) / np.asarray(x.data))

        def both(x: ScaledArray) -> tuple:
            plain = jax.grad(lambda data: getattr(data * scale, name)(axis=0).sum())(x.data)
            return jax.grad(lambda x: getattr(x, name)(axis=0).value.sum())(x), plain

        return both, x

    pairs = itertools.product(["sum", "mean", "max"], ["tensor", "channel", "row"])
    table = {(name, kind): gradients(name, make(kind, "float32")) for name, kind in pairs}
    for name, (grad, expected) in compute(table).items():
        with entry(name):
            np.testing.assert_allclose(grad.data, expected, rtol=1e-6)
            np.testing.assert_array_equal(grad.scale, np.zeros(grad.scale.shape))


def test_8_bits_are_reduced_in_float32() -> None:
    x = ScaledArray(jnp.full(1000, 1.25, jnp.float8_e4m3fn))
    assert x.sum(where=np.ones(1000, bool)).value == x.sum().value == 1248  # in bfloat16
    assert (x.std(), x.var(), x.mean(where=np.ones(1000, bool)).value) == (0, 0, 1.25)


@pytest.mark.parametrize("name", ["sum", "mean", "max", "min"])
def test_options_are_those_of_arrays(name: str) -> None:
    """As losses of optax, and functions of NumPy, give them to what has such methods."""
    x = ScaledArray(jnp.asarray([[1.0, -2.0], [3.0, 0.5]]), 4.0)
    numbers = np.asarray(x.value)
    options = {"axis": 0, "where": numbers > 0}
    options |= {} if name == "mean" else {"initial": 1.0}
    found = getattr(x, name)(**options).value
    np.testing.assert_allclose(found, getattr(numbers, name)(**options))
    assert getattr(np, name)(x).value == getattr(numbers, name)()
