"""Operators of ScaledArray and the scales of their results, against NumPy in float64."""

import functools
import itertools
import operator

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.batching import chunks, compute, entry
from unitscale.core import ScaledArray, as_scale, as_scaled, result_dtype, safe_scale, to_float

from .arrays import DTYPES, KINDS, assert_close, eps, exact, make

ARITHMETIC = {f.__name__: f for f in (operator.add, operator.sub, operator.mul, operator.truediv)}
COMPARISONS = {name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")}
KINDS_3 = ["none", "tensor", "block"]


def assert_arithmetic(name: str, got: ScaledArray, left, right, tolerance: float) -> None:
    """Compare with NumPy; the tolerance of sums is relative to their terms."""
    x, y = exact(left), exact(right)
    assert isinstance(got, ScaledArray)
    terms = np.abs(x) + np.abs(y) if name in ("add", "sub") else None
    assert_close(got, ARITHMETIC[name](x, y), tolerance, terms)


@pytest.mark.parametrize(
    "names",
    [
        *chunks(itertools.product(ARITHMETIC, KINDS_3, ["none", "channel", "block"]), 36),
        *[
            pytest.param(*p.values, id=p.id, marks=pytest.mark.slow)
            for p in chunks(itertools.product(ARITHMETIC, KINDS, KINDS), 49)
        ],
    ],
)
def test_every_pair_of_scales(names: list[tuple[str, str, str]]) -> None:
    table = {
        n: (ARITHMETIC[n[0]], make(n[1], "float32", 0), make(n[2], "float32", 2)) for n in names
    }
    for name, got in compute(table).items():
        with entry(name):
            assert_arithmetic(name[0], got, *table[name][1:], 2.0**-22)


def test_every_pair_of_types() -> None:
    pairs = [*zip(DTYPES, DTYPES, strict=True), *itertools.combinations(DTYPES, 2)]
    table = {
        (name, left, right): (fn, make("tensor", left, 0), make("row", right, 2))
        for i, (left, right) in enumerate(pairs)
        for name, fn in list(ARITHMETIC.items())[i % 2 :: 2]
    }
    for name, got in compute(table).items():
        with entry(name):
            assert_arithmetic(name[0], got, *table[name][1:], eps(*name[1:]))
            wide = [t if not t.startswith("float8") else "bfloat16" for t in name[1:]]
            assert got.dtype == jnp.result_type(*wide)


OTHERS = {
    "int": 3,
    "float": -0.1,
    "small": 1e-30,
    "numpy scalar": np.float32(2.5),
    "numpy": np.full((4, 1), 2.0, np.float32),
    "jax": jnp.asarray(np.full(6, 0.3, np.float32)),
    "mask": np.array([True, False, True, True, True, True]),
}


@pytest.mark.parametrize(
    "kind", ["block", *(pytest.param(k, marks=pytest.mark.slow) for k in ("none", "tensor"))]
)
def test_arrays_and_numbers_on_either_side(kind: str) -> None:
    x = make(kind, "float32")

    def both_ways(fn, other, x):
        return fn(x, other), fn(other, x)

    table = {
        (name, what): (functools.partial(both_ways, fn, other), x)
        for name, fn in ARITHMETIC.items()
        for what, other in OTHERS.items()
        if (name, what) != ("truediv", "mask")
    }
    for (name, what), (got, swapped) in compute(table).items():
        with entry((name, what)):
            value = np.asarray(OTHERS[what], np.float64)
            assert_arithmetic(name, got, x, value, 2.0**-21)
            assert_arithmetic(name, swapped, value, x, 2.0**-21)


def test_numbers_do_not_widen() -> None:
    for dtype, number in itertools.product(DTYPES, (2, 0.7, jnp.asarray(2.0))):
        expected = jnp.bfloat16 if dtype.startswith("float8") else jnp.dtype(dtype)
        for fn in ARITHMETIC.values():
            swapped = jax.eval_shape(lambda x: fn(number, x), make("tensor", dtype))  # noqa: B023
            assert swapped.dtype == expected
    assert result_dtype(jnp.asarray(2.0)) == jnp.float32
    for left, right in (("float16", "int32"), ("float16", "bool")):
        assert result_dtype(jnp.zeros(1, left), jnp.zeros(1, right)) == jnp.float16


@pytest.mark.parametrize("scale", [2.0**-40, 2.0**40])
@pytest.mark.parametrize("number", [0, float("inf"), float("nan")])
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


@pytest.mark.parametrize("x", [-3.0, 0.1, 1e30, -1e-30, 3.4e38, 2.0**-126])
def test_a_number_is_split_exactly(x: float) -> None:
    got = ScaledArray(jnp.ones(1, jnp.float32)) * x
    np.testing.assert_array_equal(exact(got), np.float32(x))
    if abs(x) < 1e38:
        assert 0.5 < abs(float(got.data[0])) < 2


def test_matmul() -> None:
    dtype, rights = "float8_e4m3fn", ["none", "tensor", "row"]
    table = {
        (left, right): (operator.matmul, make(left, dtype, 0), make(right, dtype, 2).T)
        for left, right in itertools.product(("one", "tensor", "channel", "row", "block"), rights)
    }
    for name, got in compute(table).items():
        with entry(name):
            x, y = map(exact, table[name][1:])
            # 6 products and 5 sums in float32, then one rounding.
            assert_close(got, x @ y, eps(dtype) + 6 * 2.0**-23, np.abs(x) @ np.abs(y))
    x, w = make("tensor", "float32"), np.ones((6, 2), np.float32)
    assert_close(x @ w, exact(x) @ w, 2.0**-20, np.abs(exact(x)) @ w)
    got = np.ones((3, 4), np.float32) @ x
    assert isinstance(got, ScaledArray)
    assert_close(got, np.ones((3, 4)) @ exact(x), 2.0**-20, np.ones((3, 4)) @ np.abs(exact(x)))


@pytest.mark.parametrize(("left", "right"), [((3,), (3,)), ((2, 4, 3), (3, 5)), ((3,), (2, 3, 5))])
@pytest.mark.parametrize("contracted", [False, True], ids=["outer", "contracted"])
def test_scales_of_a_product(left, right, contracted: bool) -> None:
    """Only scales along the contracted axis enter the matmul."""

    def array(dims, axis, seed):
        rng = np.random.default_rng(seed)
        scale_shape = [1 if (i == axis) != contracted else n for i, n in enumerate(dims)]
        data, scale = rng.choice([-1.0, 0.5, 2.0], dims), 2.0 ** rng.integers(-4, 4, scale_shape)
        return ScaledArray(jnp.float32(data), jnp.float32(scale)), data * scale

    x, x_value = array(left, len(left) - 1, 0)
    y, y_value = array(right, max(len(right) - 2, 0), 1)
    got = x @ y
    assert (got.scale is None) == contracted
    np.testing.assert_array_equal(exact(got), x_value @ y_value)


@pytest.mark.parametrize("n", [1, 3, 1000])
def test_sums_of_terms_grow_the_scale_by_the_nearest_power_of_two_of_the_root(n: int) -> None:
    x = ScaledArray(jnp.ones((2, n), jnp.float16), 2.0)
    norm = 2.0 ** round(np.log2(np.sqrt(n)))
    product = x @ ScaledArray(jnp.ones((n, 3), jnp.float16), 4.0)
    assert float(product.scale) == 8 * norm
    np.testing.assert_array_equal(product.data, np.full((2, 3), np.float16(n / norm)))
    assert float(x.sum(1).scale) == 2 * norm
    np.testing.assert_array_equal(x.sum(1).data, np.full(2, np.float16(n / norm)))
    assert (float(x[0].sum().scale), x[0].sum().data) == (2 * norm, np.float16(n / norm))


EXPONENTS = [3, 2, 1, 0, -1, -2, np.int64(2), 0.5, 2.0]


def test_power() -> None:
    table = {
        (kind, i): (lambda x, e=exponent: abs(x) ** e, make(kind, "float32"))
        for kind in KINDS
        for i, exponent in enumerate(EXPONENTS)
    }
    for name, got in compute(table).items():
        with entry(name):
            assert_close(got, np.abs(exact(table[name][1])) ** EXPONENTS[name[1]], 2.0**-20)
    x, y = abs(make("tensor", "float32")), make("row", "float32", 2)
    np.testing.assert_allclose(exact(x**y), exact(x) ** exact(y), rtol=1e-4)
    np.testing.assert_allclose(exact(2**y), 2 ** exact(y), rtol=1e-5)
    for exponent in (2.0, np.float32(3.0), -1.0):
        assert (make("tensor", "float16") ** exponent).dtype == jnp.float16


def test_signs_are_exact() -> None:
    table = {n: (lambda x: (-x, +x, abs(x)), make(*n)) for n in itertools.product(KINDS, DTYPES)}
    for name, got in compute(table).items():
        with entry(name):
            x = table[name][1]
            assert [y.dtype for y in got] == [x.dtype] * 3
            for y, expected in zip(got, (-exact(x), exact(x), np.abs(exact(x))), strict=True):
                np.testing.assert_array_equal(exact(y), expected)


@pytest.mark.parametrize("kind", ["none", "block"])
def test_comparisons(kind: str) -> None:
    x = make(kind, "float8_e4m3fn")
    others = make("row", "float8_e5m2", 5), ScaledArray(jnp.zeros(6), 4.0), 0.5, 0.0, jnp.ones(6)

    def compared(fn, x):
        return [(fn(x, y), fn(y, x)) for y in (x, *others)]

    table = {name: (functools.partial(compared, fn), x) for name, fn in COMPARISONS.items()}
    for name, results in compute(table).items():
        for got, y in zip(results, (x, *others), strict=True):
            for result, operands in zip(got, ((x, y), (y, x)), strict=True):
                with entry((name, *map(type, operands))):
                    assert result.dtype == bool
                    expected = COMPARISONS[name](*map(exact, operands))
                    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("other", [None, "x", 1j, jnp.ones(2, jnp.complex64), [1.0, 2.0]])
def test_other_operands_are_refused(other: object) -> None:
    x = ScaledArray(jnp.ones(2), 2.0)
    for fn in (*ARITHMETIC.values(), operator.lt, operator.matmul):
        assert getattr(x, f"__{fn.__name__}__")(other) is NotImplemented
    assert (x == None) is False  # noqa: E711
    assert (x != "x") is True
    with pytest.raises(TypeError, match="unhashable"):
        hash(x)


scaled = st.builds(
    lambda data, e: ScaledArray(jnp.asarray(data, jnp.float32), 2.0**e),
    st.lists(st.floats(-4, 4, width=16), min_size=2, max_size=2),
    st.integers(-30, 30),
)


@hypothesis.given(scaled, scaled)
@hypothesis.settings(max_examples=8)
def test_identities(x: ScaledArray, y: ScaledArray) -> None:
    for fn in (operator.add, operator.mul):
        left, right = fn(x, y), fn(y, x)
        assert float(left.scale) == float(right.scale)
        np.testing.assert_array_equal(left.data, right.data)
    for same in (x * 1, x + 0, x - 0, x / 1, x**1, x * 8 / 8, -(0 - x)):
        np.testing.assert_array_equal(same.value, x.value)
    np.testing.assert_array_equal((x - x).value, [0, 0])


@pytest.mark.parametrize(
    ("name", "operation", "exponents"),
    [
        ("multiply", lambda x, y: x * y, (80, 60)),
        ("multiply small", lambda x, y: x * y, (-80, -60)),
        ("multiply in range", lambda x, y: x * y, (127, -126)),
        ("divide", lambda x, y: x / y, (80, -60)),
        ("divide small", lambda x, y: x / y, (-80, 60)),
        ("divide one", lambda x, y: 1 / y, (0, 127)),
        ("square", lambda x, y: x**2, (80, 0)),
        ("cube small", lambda x, y: x**3, (-60, 0)),
        ("inverse square", lambda x, y: x**-2, (100, 0)),
        ("matmul", lambda x, y: x @ y, (80, 60)),
        ("sum", lambda x, y: x.sum(), (127, 0)),
    ],
)
def test_scales_stay_within_float32(name: str, operation, exponents) -> None:
    """Powers of two that would overflow the scale are moved into the data, without NaN."""
    data = np.array([1, -1, 0.5, 1]), np.array([1, 1, 0.25, -0.25])
    scales = [np.float64(2) ** e for e in exponents]
    pairs = [(jnp.float32(d), jnp.float32(s)) for d, s in zip(data, scales, strict=True)]
    want = operation(*(d * s for d, s in zip(data, scales, strict=True)))

    def apply(*pairs):
        return operation(*(ScaledArray(*pair) for pair in pairs))

    for got in (apply(*pairs), jax.jit(apply)(*pairs)):
        assert 2.0**-126 <= float(got.scale) <= 2.0**127
        np.testing.assert_array_equal(np.float64(got.data) * np.float64(got.scale), want)
        assert name != "multiply in range" or got.scale == 2


@pytest.mark.parametrize(
    ("exponent", "other"), [(-120, 120), (0, -1), (120, 120), (120, -120), (-120, -120)]
)
def test_sums_of_far_scales(exponent: int, other: int) -> None:
    left, right = np.float16(1.5), np.float16([0, 0.75])
    got = ScaledArray(left, 2.0**exponent) + ScaledArray(right, 2.0**other)
    assert got.dtype == jnp.float16
    expected = np.float64(left) * 2.0**exponent + np.float64(right) * 2.0**other
    # Below the smallest subnormal of float16 at the common scale a term is lost.
    np.testing.assert_allclose(exact(got), expected, 2.0**-11, 2.0**-25 * float(got.scale))


def test_zeros() -> None:
    x = as_scaled(jnp.array([0.0, 1e25]))
    for y in (x * x, x**2, x**20, x * x.value, x / (1 / x)):
        assert y.value[0] == 0
    assert float((x[:1] @ x[1:]).value) == 0
    x, zero = ScaledArray(jnp.ones(2), 8.0), ScaledArray(jnp.ones(2), jnp.float32([0, 1]))
    for y in (x * zero, zero / x, zero**2, zero + zero):
        assert float(y.value[0]) == 0
    assert float((x / (0 * x)).value[0]) == np.inf


def test_integers_become_floats_before_they_are_subtracted() -> None:
    for number, difference in ((np.uint8(1), 4.0), (np.int8(-128), 133.0)):
        assert (ScaledArray(jnp.array([5.0])) - jnp.array([number])).value == difference


def test_no_scale_prunes_the_program() -> None:
    def count(scale):
        jaxpr = jax.make_jaxpr(lambda x, y: (ScaledArray(x, scale) * ScaledArray(y, scale)).data)
        return len(jaxpr(jnp.ones(2), jnp.ones(2)).eqns)

    assert count(None) == 1 < count(jnp.float32(1))


class TestGradient:
    """Cotangents are those of data: ordinary derivatives with constant scales."""

    WEIGHT = np.random.default_rng(7).standard_normal((4, 6)).astype(np.float32)

    def test_is_that_of_the_value(self) -> None:
        weights = dict(zip(ARITHMETIC, (1.0, -2.0, 0.5, 3.0), strict=True))

        def loss(x, y):
            results = {name: fn(x, y).value for name, fn in ARITHMETIC.items()}
            return sum((weights[name] * r * self.WEIGHT).sum() for name, r in results.items())

        pairs = [("none", "row"), ("one", "tensor"), ("channel", "none"), ("block", "row")]
        table = {
            pair: (jax.grad(loss, (0, 1)), make(pair[0], "float32", 0), make(pair[1], "float32", 2))
            for pair in pairs
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


def test_scales_are_arrays_or_none() -> None:
    e8m0 = jnp.asarray([2.0, 4.0]).astype(jnp.float8_e8m0fnu)
    assert as_scale(None) is None
    numbers = (1, 0.5, np.float64(8), jnp.ones(2, jnp.bfloat16), np.array([1, 2]))
    for scale in (*numbers, jnp.ones(2, jnp.float8_e5m2)):
        got = as_scale(scale)
        assert got.dtype == jnp.float32
        np.testing.assert_array_equal(got, np.asarray(scale).astype(np.float32))
    e4m3 = jnp.ones(2, jnp.float8_e4m3fn)
    assert as_scale(e8m0) is e8m0
    assert as_scale(e4m3) is e4m3
    np.testing.assert_array_equal(to_float(e8m0), np.float32([2, 4]))
    with jax.enable_x64(True):
        assert as_scale(jnp.ones(2, jnp.float64)).dtype == jnp.float64


def test_scales_of_sums_are_the_larger_ones_and_constants() -> None:
    ones, exponents = jnp.ones((200, 1)), np.random.default_rng(0).uniform(-125, 125, (2, 200, 1))
    exponents[1, 100:] = exponents[0, 100:] + exponents[1, 100:] / 100
    x, y = (ScaledArray(ones, jnp.float32(2.0**e)) for e in exponents)
    got, root = np.float64((x + y).scale), np.hypot(*2.0**exponents)
    assert ((got / root > 0.7) & (got / root < 1.001)).all()
    np.testing.assert_array_equal((y + x).scale, got)
    x, y = (ScaledArray(jnp.ones(3), jnp.float32(s)) for s in ([0, 0, 2], [0, 4, 0]))
    np.testing.assert_array_equal((x + y).scale, [0, 4, 2])
    of_scale = jax.grad(lambda s: (ScaledArray(jnp.ones(2), s) * ScaledArray(jnp.ones(2), s)).scale)
    assert float(of_scale(jnp.float32(5))) == 0
    np.testing.assert_array_equal(safe_scale([0.0, -1.0, 2.0, np.inf, np.nan]), [1, 1, 2, 1, 1])


def test_inverses_of_scales_are_normal() -> None:
    """XLA flushes the inverse of 2^127 to 0."""
    small = ScaledArray(jnp.float32(2.0**-20), 2.0**100) * 2.0**27
    assert float((small**-1).value) == 2.0**-107
    large = ScaledArray(jnp.float32(1.0), 2.0**100) * 2.0**27
    np.testing.assert_allclose((ScaledArray(jnp.float32(1e38)) + large).value, 1e38 + 2.0**127)
    assert float((ScaledArray(jnp.float32(1.0)) * 2**70).value) == 2.0**70
