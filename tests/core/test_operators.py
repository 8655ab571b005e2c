"""Operators against NumPy in float64, over data types and kinds of scale."""

from __future__ import annotations

import operator

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale.core import ScaledArray, is_static, is_zero

from .arrays import DTYPES, KINDS, assert_close, eps, exact, make

ARITHMETIC = {f.__name__: f for f in (operator.add, operator.sub, operator.mul, operator.truediv)}
COMPARISONS = [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]


def reference(name: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return ARITHMETIC[name](x, y)


@pytest.mark.parametrize("name", ARITHMETIC)
@pytest.mark.parametrize("left", KINDS)
@pytest.mark.parametrize("right", KINDS)
def test_every_pair_of_scales(name: str, left: str, right: str) -> None:
    x, y = make(left, "float32", 0), make(right, "float32", 2)
    got, expected = ARITHMETIC[name](x, y), reference(name, exact(x), exact(y))
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.isnan(exact(got)), np.isnan(expected))
    assert finite.all() or right == "zero"
    assert np.isinf(exact(got))[np.isinf(expected)].all()
    terms = np.abs(exact(x)) + np.abs(exact(y)) if name in ("add", "sub") else None
    if finite.all():
        assert_close(got, expected, 2.0**-22, terms)


@jax.jit
def all_arithmetic(x, y):
    return {name: fn(x, y) for name, fn in ARITHMETIC.items()}


@pytest.mark.parametrize("left", DTYPES)
@pytest.mark.parametrize("right", DTYPES)
def test_every_pair_of_types(left: str, right: str) -> None:
    x, y = make("tensor", left, 0), make("row", right, 2)
    for name, got in all_arithmetic(x, y).items():
        terms = np.abs(exact(x)) + np.abs(exact(y)) if name in ("add", "sub") else None
        assert_close(got, reference(name, exact(x), exact(y)), eps(left, right), terms)


@pytest.mark.parametrize("name", ARITHMETIC)
@pytest.mark.parametrize("kind", ["none", "zero", "tensor", "block"])
@pytest.mark.parametrize(
    "other",
    [3, -0.1, 1e-30, np.float32(2.5), np.full((4, 1), 2.0, np.float32), jnp.full(6, 0.3), True],
    ids=["int", "float", "small", "numpy scalar", "numpy", "jax", "bool"],
)
def test_arrays_and_numbers(name: str, kind: str, other: object) -> None:
    x, value = make(kind, "float32"), np.asarray(other, np.float64)
    got = ARITHMETIC[name](x, other)
    assert isinstance(got, ScaledArray)
    terms = np.abs(exact(x)) + np.abs(value) if name in ("add", "sub") else None
    assert_close(got, reference(name, exact(x), value), 2.0**-21, terms)
    if kind != "zero":
        swapped = ARITHMETIC[name](other, x)
        assert isinstance(swapped, jax.Array if isinstance(other, jax.Array) else ScaledArray)
        assert_close(swapped, reference(name, value, exact(x)), 2.0**-21, terms)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("other", [2, 0.7])
def test_numbers_do_not_widen(dtype: str, other: float) -> None:
    x = make("tensor", dtype)
    expected = jnp.bfloat16 if dtype.startswith("float8") else jnp.dtype(dtype)
    for fn in ARITHMETIC.values():
        assert fn(x, other).dtype == fn(other, x).dtype == expected


@pytest.mark.parametrize("left", KINDS)
@pytest.mark.parametrize("right", ["none", "zero", "tensor", "channel", "row"])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn"])
def test_matmul(left: str, right: str, dtype: str) -> None:
    x, y = make(left, dtype, 0), make(right, dtype, 2).T
    terms = np.abs(exact(x)) @ np.abs(exact(y))
    # 6 products and 5 sums in float32, then one rounding.
    assert_close(x @ y, exact(x) @ exact(y), eps(dtype) + 6 * 2.0**-23, terms)


def test_matmul_with_arrays() -> None:
    x, w = make("tensor", "float32"), np.ones((6, 2), np.float32)
    for got in (x @ w, x @ jnp.asarray(w)):
        assert isinstance(got, ScaledArray)
        assert_close(got, exact(x) @ w, 2.0**-20, np.abs(exact(x)) @ w)
    got = np.ones((3, 4), np.float32) @ x
    assert isinstance(got, ScaledArray)
    assert got.shape == (3, 6)


def test_dot() -> None:
    x = make("tensor", "float32")
    assert_close(x[0].dot(x[1]), exact(x)[0] @ exact(x)[1], 2.0**-18, np.float64(2000))
    assert_close(x.dot(2.0), exact(x) * 2, 0)
    with pytest.raises(TypeError, match="at most 2 dimensions; got ScaledArray"):
        x.dot(ScaledArray(jnp.ones((2, 6, 3))))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("exponent", [3, 2, 1, 0, -1, -2, np.int64(2), 0.5, 2.0])
def test_power(kind: str, exponent: float) -> None:
    x = abs(make(kind, "float32"))
    with np.errstate(divide="ignore"):
        expected = exact(x) ** exponent
    got = x**exponent
    if np.isfinite(expected).all():
        assert_close(got, expected, 2.0**-20)
    else:
        np.testing.assert_array_equal(exact(got), expected)


def test_power_of_powers() -> None:
    x, y = abs(make("tensor", "float32")), make("row", "float32", 2)
    np.testing.assert_allclose(exact(x**y), exact(x) ** exact(y), rtol=1e-4)
    np.testing.assert_allclose(exact(2**y), 2 ** exact(y), rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_signs_are_exact(dtype: str, kind: str) -> None:
    x = make(kind, dtype)
    for got, expected in ((-x, -exact(x)), (+x, exact(x)), (abs(x), np.abs(exact(x)))):
        assert got.dtype == x.dtype
        np.testing.assert_array_equal(exact(got), expected)


@pytest.mark.parametrize("compare", COMPARISONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("left", KINDS)
def test_comparisons(compare: operator, left: str) -> None:
    x = make(left, "float8_e4m3fn")
    for y in (x, make("row", "float8_e5m2", 5), make("zero", "float32"), 0.5, jnp.ones(6)):
        got = compare(x, y)
        assert got.dtype == bool
        np.testing.assert_array_equal(got, compare(exact(x), exact(y)))


def test_equal_values_at_different_scales_are_equal() -> None:
    assert bool((ScaledArray(jnp.ones(2), 4.0) == ScaledArray(jnp.full(2, 2.0), 2.0)).all())


def test_zero_arrays_are_zero_whatever_their_data() -> None:
    x, y = ScaledArray(jnp.ones(2), 0), ScaledArray(jnp.full(2, 3.0), 0)
    assert bool((x == y).all())
    assert not bool((x < y).any())
    assert is_zero((x + y).scale)
    assert is_zero((x * 2.0).scale)
    other = ScaledArray(jnp.ones(2), 8.0)
    assert float((x + other).scale) == float((other - x).scale) == 8


@pytest.mark.parametrize("other", [None, "x", 1j, jnp.ones(2, jnp.complex64), [1.0, 2.0]])
def test_other_operands_are_refused(other: object) -> None:
    x = ScaledArray(jnp.ones(2), 2.0)
    for fn in (*ARITHMETIC.values(), operator.lt, operator.matmul):
        assert getattr(x, f"__{fn.__name__}__")(other) is NotImplemented
    assert (x == None) is False  # noqa: E711
    assert (x != "x") is True


def test_unhashable_as_arrays_are() -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(ScaledArray(jnp.ones(2)))


scaled = st.builds(
    lambda data, e: ScaledArray.from_exponent(jnp.asarray(data, jnp.float32), e),
    st.lists(st.floats(-4, 4, width=16), min_size=2, max_size=2),
    st.integers(-30, 30),
)


@hypothesis.given(scaled, scaled)
@hypothesis.settings(max_examples=60)
def test_sums_and_products_commute(x: ScaledArray, y: ScaledArray) -> None:
    for fn in (operator.add, operator.mul):
        left, right = fn(x, y), fn(y, x)
        assert float(left.scale) == float(right.scale)
        np.testing.assert_array_equal(left.data, right.data)


@hypothesis.given(scaled)
@hypothesis.settings(max_examples=40)
def test_identities(x: ScaledArray) -> None:
    for same in (x * 1, x + 0, x - 0, x / 1, x**1, x * 8 / 8, -(0 - x)):
        np.testing.assert_array_equal(same.value, x.value)
    np.testing.assert_array_equal((x - x).value, [0, 0])


class TestGradient:
    """Cotangents live in data space: the ordinary derivative, with scales held constant."""

    WEIGHT = np.random.default_rng(7).standard_normal((4, 6)).astype(np.float32)

    @pytest.mark.parametrize("left", ["none", "one", "tensor", "channel", "block"])
    @pytest.mark.parametrize("right", ["none", "tensor", "row"])
    def test_is_that_of_the_value(self, left: str, right: str) -> None:
        x, y = make(left, "float32", 0), make(right, "float32", 2)
        weights = dict(zip(ARITHMETIC, (1.0, -2.0, 0.5, 3.0), strict=True))

        def loss(x, y):
            results = {name: fn(x, y).value for name, fn in ARITHMETIC.items()}
            return sum((weights[name] * r * self.WEIGHT).sum() for name, r in results.items())

        def plain(x_data, y_data):
            x_scale, y_scale = exact(x) / np.asarray(x.data), exact(y) / np.asarray(y.data)
            values = x_data * x_scale, y_data * y_scale
            results = {name: fn(*values) for name, fn in ARITHMETIC.items()}
            return sum((weights[name] * r * self.WEIGHT).sum() for name, r in results.items())

        got = jax.jit(jax.grad(loss, (0, 1)))(x, y)
        expected = jax.jit(jax.grad(plain, (0, 1)))(x.data, y.data)
        for g, e in zip(got, expected, strict=True):
            # Four terms, each rounded a few times, and as large as the largest.
            np.testing.assert_allclose(g.data, e, rtol=0, atol=16 * 2.0**-23 * np.abs(e).max())
        for g in got:
            if not is_static(g.scale):
                np.testing.assert_array_equal(g.scale, np.zeros(g.scale.shape))

    def test_of_a_value_used_twice_adds_up(self) -> None:
        x = ScaledArray(jnp.asarray([3.0]), 4.0)
        grad = jax.grad(lambda x: (x * x + x).value.sum())(x)
        assert float(grad.data[0]) == 2 * 3 * 16 + 4

    @pytest.mark.parametrize("kind", ["tensor", "row", "channel"])
    def test_of_a_product(self, kind: str) -> None:
        x, w = make(kind, "float32"), make("tensor", "float32", 2).T
        grad = jax.grad(lambda x: (x @ w).value.sum())(x)
        scale = exact(x) / np.asarray(x.data)
        expected = exact(w).sum(1) * scale
        np.testing.assert_allclose(grad.data, expected, rtol=1e-4)
        np.testing.assert_array_equal(grad.scale, np.zeros_like(x.scale))
