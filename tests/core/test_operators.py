"""Operators against NumPy in float64, over data types and kinds of scale."""

import ast
import functools
import itertools
import operator
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.batching import chunks, compute, entry
from unitscale.core import ScaledArray

from .arrays import DTYPES, KINDS, assert_close, eps, exact, make

ARITHMETIC = {f.__name__: f for f in (operator.add, operator.sub, operator.mul, operator.truediv)}
COMPARISONS = {name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")}


def reference(name: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return ARITHMETIC[name](x, y)


def assert_arithmetic(name: str, got: ScaledArray, left, right, tolerance: float) -> None:
    """A sum may be off by the tolerance of its terms, any other result by that of itself."""
    x, y = exact(left), exact(right)
    terms = np.abs(x) + np.abs(y) if name in ("add", "sub") else None
    assert_close(got, reference(name, x, y), tolerance, terms)


@pytest.mark.parametrize("names", chunks(itertools.product(ARITHMETIC, KINDS, KINDS), 32))
def test_every_pair_of_scales(names: list[tuple[str, str, str]]) -> None:
    table = {
        n: (ARITHMETIC[n[0]], make(n[1], "float32", 0), make(n[2], "float32", 2)) for n in names
    }
    for name, got in compute(table).items():
        with entry(name):
            x, y = table[name][1:]
            expected = reference(name[0], exact(x), exact(y))
            np.testing.assert_array_equal(np.isnan(exact(got)), np.isnan(expected))
            assert np.isinf(exact(got))[np.isinf(expected)].all()
            if np.isfinite(expected).all():
                assert_arithmetic(name[0], got, x, y, 2.0**-22)


@pytest.mark.parametrize("names", chunks(itertools.product(ARITHMETIC, DTYPES, DTYPES), 50))
def test_every_pair_of_types(names: list[tuple[str, str, str]]) -> None:
    table = {n: (ARITHMETIC[n[0]], make("tensor", n[1], 0), make("row", n[2], 2)) for n in names}
    for name, got in compute(table).items():
        with entry(name):
            assert_arithmetic(name[0], got, *table[name][1:], eps(*name[1:]))


OTHERS = {
    "int": 3,
    "float": -0.1,
    "small": 1e-30,
    "numpy scalar": np.float32(2.5),
    "numpy": np.full((4, 1), 2.0, np.float32),
    "jax": jnp.asarray(np.full(6, 0.3, np.float32)),
    "bool": True,
}


@pytest.mark.parametrize("kind", ["none", "tensor", "block"])
def test_arrays_and_numbers(kind: str) -> None:
    x = make(kind, "float32")

    def both_ways(fn, other, x):
        return fn(x, other), fn(other, x)

    table = {
        (name, what): (functools.partial(both_ways, fn, other), x)
        for name, fn in ARITHMETIC.items()
        for what, other in OTHERS.items()
    }
    for (name, what), (got, swapped) in compute(table).items():
        with entry((name, what)):
            value = np.asarray(OTHERS[what], np.float64)
            assert isinstance(got, ScaledArray)
            assert_arithmetic(name, got, x, value, 2.0**-21)
            assert isinstance(swapped, ScaledArray)
            assert_arithmetic(name, swapped, value, x, 2.0**-21)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("other", [2, 0.7])
def test_numbers_do_not_widen(dtype: str, other: float) -> None:
    x = make("tensor", dtype)
    expected = jnp.bfloat16 if dtype.startswith("float8") else jnp.dtype(dtype)
    for fn in ARITHMETIC.values():
        for swapped in (lambda x: fn(x, other), lambda x: fn(other, x)):  # noqa: B023
            assert jax.eval_shape(swapped, x).dtype == expected


def test_matmul() -> None:
    dtype, rights = "float8_e4m3fn", ["none", "one", "tensor", "channel", "row"]
    table = {
        (left, right): (operator.matmul, make(left, dtype, 0), make(right, dtype, 2).T)
        for left, right in itertools.product(KINDS, rights)
    }
    for name, got in compute(table).items():
        with entry(name):
            x, y = map(exact, table[name][1:])
            # 6 products and 5 sums in float32, then one rounding.
            assert_close(got, x @ y, eps(dtype) + 6 * 2.0**-23, np.abs(x) @ np.abs(y))


def test_matmul_with_arrays() -> None:
    x, w = make("tensor", "float32"), np.ones((6, 2), np.float32)
    for got in (x @ w, x @ jnp.asarray(w)):
        assert isinstance(got, ScaledArray)
        assert_close(got, exact(x) @ w, 2.0**-20, np.abs(exact(x)) @ w)
    got = np.ones((3, 4), np.float32) @ x
    assert isinstance(got, ScaledArray)
    assert got.shape == (3, 6)


EXPONENTS = [3, 2, 1, 0, -1, -2, np.int64(2), 0.5, 2.0]


@pytest.mark.parametrize("names", chunks(itertools.product(KINDS, range(len(EXPONENTS))), 36))
def test_power(names: list[tuple[str, int]]) -> None:
    def power(exponent, x):
        return abs(x) ** exponent

    table = {n: (functools.partial(power, EXPONENTS[n[1]]), make(n[0], "float32")) for n in names}
    for name, got in compute(table).items():
        with entry(name), np.errstate(divide="ignore"):
            expected = np.abs(exact(table[name][1])) ** EXPONENTS[name[1]]
            if np.isfinite(expected).all():
                assert_close(got, expected, 2.0**-20)
            else:
                np.testing.assert_array_equal(exact(got), expected)


def test_power_of_powers() -> None:
    x, y = abs(make("tensor", "float32")), make("row", "float32", 2)
    powers, powers_of_2 = jax.jit(lambda x, y: (x**y, 2**y))(x, y)
    np.testing.assert_allclose(exact(powers), exact(x) ** exact(y), rtol=1e-4)
    np.testing.assert_allclose(exact(powers_of_2), 2 ** exact(y), rtol=1e-5)


def test_signs_are_exact() -> None:
    table = {n: (lambda x: (-x, +x, abs(x)), make(*n)) for n in itertools.product(KINDS, DTYPES)}
    for name, got in compute(table).items():
        with entry(name):
            x = table[name][1]
            assert [y.dtype for y in got] == [x.dtype] * 3
            for y, expected in zip(got, (-exact(x), exact(x), np.abs(exact(x))), strict=True):
                np.testing.assert_array_equal(exact(y), expected)


@pytest.mark.parametrize("names", chunks(itertools.product(COMPARISONS, KINDS), 24))
def test_comparisons(names: list[tuple[str, str]]) -> None:
    others = make("row", "float8_e5m2", 5), ScaledArray(jnp.zeros(6), 4.0), 0.5, 0.0, jnp.ones(6)
    x = {kind: make(kind, "float8_e4m3fn") for kind in KINDS}

    def compared(fn, x):
        return [(fn(x, y), fn(y, x)) for y in (x, *others)]

    table = {n: (functools.partial(compared, COMPARISONS[n[0]]), x[n[1]]) for n in names}
    for (name, kind), results in compute(table).items():
        for got, y in zip(results, (x[kind], *others), strict=True):
            pair = x[kind], y
            for result, operands in zip(got, (pair, pair[::-1]), strict=True):
                with entry((name, kind, *map(type, operands))):
                    assert result.dtype == bool
                    expected = COMPARISONS[name](*map(exact, operands))
                    np.testing.assert_array_equal(result, expected)


def test_equal_values_at_different_scales_are_equal() -> None:
    assert bool((ScaledArray(jnp.ones(2), 4.0) == ScaledArray(jnp.full(2, 2.0), 2.0)).all())


@pytest.mark.parametrize("scale", [2.0**-40, 2.0**40])
@pytest.mark.parametrize("number", [0, 0.0, float("inf"), -float("inf"), float("nan")])
def test_numbers_that_every_scale_holds_take_it(number: float, scale: float) -> None:
    x = ScaledArray(jnp.asarray([1.0, -0.75], jnp.float16), scale)
    for got, expected in (
        (x + number, exact(x) + number),
        (number - x, number - exact(x)),
        (sum([x, x]) + number, 2 * exact(x) + number),
    ):
        assert float(got.scale) == scale
        np.testing.assert_array_equal(exact(got), expected)
    np.testing.assert_array_equal(x > number, exact(x) > number)


def test_a_zero_array_has_the_scale_that_it_was_given() -> None:
    x, y = ScaledArray(jnp.zeros(2), 2.0), ScaledArray(jnp.ones(2), 8.0)
    assert float((x + y).scale) == float((y - x).scale) == 8
    assert float((y / x).value[0]) == np.inf


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

    def test_is_that_of_the_value(self) -> None:
        weights = dict(zip(ARITHMETIC, (1.0, -2.0, 0.5, 3.0), strict=True))

        def loss(x, y):
            results = {name: fn(x, y).value for name, fn in ARITHMETIC.items()}
            return sum((weights[name] * r * self.WEIGHT).sum() for name, r in results.items())

        lefts, rights = ["none", "one", "tensor", "channel", "block"], ["none", "tensor", "row"]
        table = {
            (left, right): (
                jax.grad(loss, (0, 1)),
                make(left, "float32", 0),
                make(right, "float32", 2),
            )
            for left, right in itertools.product(lefts, rights)
        }
        for name, got in compute(table).items():
            with entry(name):
                left, right = table[name][1:]
                x, y = exact(left), exact(right)
                of_x = 1 - 2 + 0.5 * y + 3 / y
                of_y = 1 + 2 + 0.5 * x - 3 * x / y**2
                for g, operand, slope in ((got[0], left, of_x), (got[1], right, of_y)):
                    expected = self.WEIGHT * slope * exact(operand) / np.asarray(operand.data)
                    # Four terms, each rounded a few times, and as large as the largest.
                    atol = 16 * 2.0**-23 * np.abs(expected).max()
                    np.testing.assert_allclose(g.data, expected, rtol=0, atol=atol)
                    if g.scale is not None:
                        np.testing.assert_array_equal(g.scale, np.zeros(g.scale.shape))

    def test_of_a_value_used_twice_adds_up(self) -> None:
        x = ScaledArray(jnp.asarray([3.0]), 4.0)
        grad = jax.grad(lambda x: (x * x + x).value.sum())(x)
        assert float(grad.data[0]) == 2 * 3 * 16 + 4

    def test_of_a_product(self) -> None:
        w = make("tensor", "float32", 2).T
        table = {
            kind: (jax.grad(lambda x: (x @ w).value.sum()), make(kind, "float32"))
            for kind in ("tensor", "row", "channel")
        }
        for kind, grad in compute(table).items():
            with entry(kind):
                x = table[kind][1]
                expected = exact(w).sum(1) * exact(x) / np.asarray(x.data)
                np.testing.assert_allclose(grad.data, expected, rtol=1e-4)
                np.testing.assert_array_equal(grad.scale, np.zeros_like(x.scale))


@pytest.mark.parametrize(("number", "difference"), [("uint8", 5.0 - 1), ("int8", 5.0 + 128)])
def test_integers_become_floats_before_they_are_subtracted(number: str, difference: float) -> None:
    smallest = jnp.array([1 if number == "uint8" else -128], number)
    assert (ScaledArray(jnp.array([5.0])) - smallest).value == difference


@pytest.mark.parametrize("exponent", [2.0, np.float32(3.0), -1.0])
def test_a_whole_power_is_that_of_an_integer(exponent: float) -> None:
    x = ScaledArray(jnp.array([1.5, -2.0], jnp.float16), 4.0)
    found, expected = x**exponent, x ** int(exponent)
    assert found.dtype == expected.dtype == jnp.float16
    np.testing.assert_array_equal(found.value, expected.value)


OF_VALUE: dict[str, list[dict[str, Any]]] = {
    name: [{}, {"axis": 0}, {"axis": 1, "keepdims": True}]
    for name in ("all", "any", "argmax", "argmin", "std", "var")
}


@pytest.mark.parametrize("kind", KINDS)
def test_methods_without_a_scale_are_those_of_the_value(kind: str) -> None:
    x = make(kind, "float32")
    x = x.map_data(lambda data: data.at[1, 2].set(0.0))
    table = {
        (name, str(kwargs)): (functools.partial(_method, name, kwargs), x)
        for name, rows in OF_VALUE.items()
        for kwargs in rows
    }
    for (name, kwargs), got in compute(table).items():
        with entry((name, kwargs)):
            expected = getattr(exact(x), name)(**ast.literal_eval(kwargs))
            assert isinstance(got, jax.Array)
            np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert x.tolist() == exact(x).tolist()
    assert x[3, 1].item() == exact(x)[3, 1]
    assert x.block_until_ready().value[0, 0] == x.value[0, 0]
    assert "jax.Array.argmax" in (ScaledArray.argmax.__doc__ or "")


def _method(name: str, kwargs: dict[str, Any], x: ScaledArray) -> Any:
    return getattr(x, name)(**kwargs)


def test_arrays_of_truth_are_zeros_and_ones() -> None:
    x = ScaledArray(jnp.float32([1, 2, 3]), 4.0)
    for mask in (np.array([True, False, True]), jnp.array([True, False, True])):
        np.testing.assert_array_equal((x * mask).value, [4, 0, 12])
        np.testing.assert_array_equal((mask * x).value, [4, 0, 12])
