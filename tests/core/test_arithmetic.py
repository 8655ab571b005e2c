"""Pair arithmetic below the operators: promotion, numbers as pairs, ranges, static choices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale.core import (
    ScaledArray,
    _arithmetic as arithmetic,
    as_scaled,
    result_dtype,
)

ONE = jnp.float32(1)
F8 = [jnp.float8_e4m3fn, jnp.float8_e5m2]


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        (("float16",), "float16"),
        (("float16", "float16"), "float16"),
        (("float16", "bfloat16"), "float32"),
        (("bfloat16", "float32"), "float32"),
        (("float8_e4m3fn",), "bfloat16"),
        (("float8_e4m3fn", "float8_e5m2"), "bfloat16"),
        (("float8_e4m3fn", "float16"), "float32"),
        (("float4_e2m1fn",), "bfloat16"),
        (("float16", "int32"), "float16"),
        (("float16", "bool"), "float16"),
    ],
)
def test_promotion(types: tuple[str, ...], expected: str) -> None:
    assert result_dtype(*(jnp.zeros(1, t) for t in types)).name == expected


def test_weak_types_do_not_widen() -> None:
    weak = jnp.asarray(2.0)
    assert result_dtype(jnp.zeros(1, jnp.float16), weak) == jnp.float16
    assert result_dtype(weak) == jnp.float32


@pytest.mark.parametrize(
    "x", [1.0, -3.0, 0.1, 1e30, -1e-30, 3.4e38, 2.0**-126, 0.0, float("inf"), -float("inf")]
)
def test_a_number_is_split_exactly(x: float) -> None:
    data, scale = arithmetic.scalar_pair(x)
    assert data.weak_type
    assert np.float32(data) * np.float32(1 if scale is None else scale) == np.float32(x)
    if 0 < abs(x) < 1e38:
        assert 0.5 < abs(float(data)) < 2


def test_nan_is_a_number() -> None:
    data, scale = arithmetic.scalar_pair(float("nan"))
    assert np.isnan(data)
    assert scale is None


@pytest.mark.parametrize("exponent", range(-120, 121, 40))
@pytest.mark.parametrize("other", range(-120, 121, 60))
def test_sums_of_far_scales(exponent: int, other: int) -> None:
    left = jnp.asarray([1.5], jnp.float16), jnp.float32(2.0**exponent)
    right = jnp.asarray([0.0, 0.75], jnp.float16), jnp.float32(2.0**other)
    data, scale = arithmetic.add(left, right)
    expected = 1.5 * 2.0**exponent + np.array([0, 0.75]) * 2.0**other
    assert data.dtype == jnp.float16
    got = np.asarray(data, np.float64) * float(scale)
    # Below the smallest subnormal of float16 at the common scale a term is lost.
    np.testing.assert_allclose(got, expected, rtol=2.0**-11, atol=2.0**-25 * float(scale))


def test_a_sum_is_rounded_once() -> None:
    """Operands rounded to float16 at the common scale would lose the small one's last bits."""
    left = jnp.asarray([1e-6], jnp.float16), jnp.float32(1)
    right = jnp.asarray([3e-6], jnp.float16), jnp.float32(64)
    data, scale = arithmetic.add(left, right)
    exact = np.float64(left[0][0]) / float(scale) + np.float64(right[0][0]) * 64 / float(scale)
    assert float(data[0]) == float(np.float16(exact))


def test_sums_with_a_zero_scale_entry() -> None:
    scale = jnp.asarray([0.0, 2.0])
    data, total = arithmetic.add((jnp.ones(2), scale), (jnp.ones(2), scale))
    np.testing.assert_array_equal(data * total, [0, 4])


@pytest.mark.parametrize("n", [1, 2, 3, 16, 64])
def test_contractions_divide_by_the_nearest_power_of_two_of_the_root(n: int) -> None:
    x = jnp.ones((2, n)), jnp.float32(2)
    data, scale = arithmetic.matmul(x, (jnp.ones((n, 3)), jnp.float32(4)))
    norm = 2.0 ** round(np.log2(np.sqrt(n)))
    assert float(scale) == 8 * norm
    np.testing.assert_array_equal(data, np.full((2, 3), n / norm))
    total, total_scale = arithmetic.reduce_sum(x, 1, False)
    assert float(total_scale) == 2 * norm
    np.testing.assert_array_equal(total, np.full(2, n / norm))


@pytest.mark.parametrize(
    ("left", "right", "shape"),
    [
        ((4, 3), (3, 5), (4, 5)),
        ((3,), (3, 5), (5,)),
        ((4, 3), (3,), (4,)),
        ((3,), (3,), ()),
        ((2, 4, 3), (3, 5), (2, 4, 5)),
        ((4, 3), (2, 3, 5), (2, 4, 5)),
        ((3,), (2, 3, 5), (2, 5)),
    ],
)
@pytest.mark.parametrize("contracted", [False, True], ids=["outer", "contracted"])
def test_scales_of_a_product(left, right, shape, contracted: bool) -> None:
    """Scales along the other axes stay out of the product; along the contraction they cannot."""

    def pair(dims, axis, seed):
        rng = np.random.default_rng(seed)
        scale_shape = [1 if (i == axis) != contracted else n for i, n in enumerate(dims)]
        data = rng.choice([-1.0, 0.5, 2.0], dims)
        scale = 2.0 ** rng.integers(-4, 4, scale_shape)
        return (jnp.asarray(data, jnp.float32), jnp.asarray(scale, jnp.float32)), data * scale

    x, x_value = pair(left, len(left) - 1, 0)
    y, y_value = pair(right, max(len(right) - 2, 0), 1)
    data, scale = arithmetic.matmul(x, y)
    assert (scale is None) == contracted
    value = np.asarray(arithmetic.value(data, scale))
    assert value.shape == shape
    np.testing.assert_array_equal(value, x_value @ y_value)


@pytest.mark.parametrize("left", F8)
@pytest.mark.parametrize("right", [*F8, jnp.float16, jnp.float32])
def test_products_of_mixed_types(left: type, right: type) -> None:
    data, _ = arithmetic.matmul((jnp.ones((2, 4), left), ONE), (jnp.ones((4, 2), right), ONE))
    assert data.dtype == result_dtype(jnp.ones(1, left), jnp.ones(1, right))
    np.testing.assert_array_equal(data.astype(jnp.float32), np.full((2, 2), 2))


def test_no_scale_prunes_the_program() -> None:
    def count(scale):
        jaxpr = jax.make_jaxpr(lambda x, y: arithmetic.multiply((x, scale), (y, scale))[0])
        return len(jaxpr(jnp.ones(2), jnp.ones(2)).eqns)

    assert count(None) == 1 < count(jnp.float32(1))


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
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
def test_scales_stay_within_float32(name: str, operation, exponents, jit: bool) -> None:
    """What does not fit into the scale moves into data, exactly: nothing becomes NaN."""
    data = np.array([1, -1, 0.5, 1]), np.array([1, 1, 0.25, -0.25])
    scales = [np.float64(2) ** e for e in exponents]

    def apply(*pairs):
        return operation(*(ScaledArray(*pair) for pair in pairs))

    pairs = [(jnp.float32(d), jnp.float32(s)) for d, s in zip(data, scales, strict=True)]
    got = (jax.jit(apply) if jit else apply)(*pairs)
    want = operation(*(d * s for d, s in zip(data, scales, strict=True)))
    assert 2.0**-126 <= float(got.scale) <= 2.0**127
    np.testing.assert_array_equal(np.float64(got.data) * np.float64(got.scale), want)
    if name == "multiply in range":
        assert got.scale == 2


def test_zeros_stay_zeros_beside_large_values() -> None:
    x = as_scaled(jnp.array([0.0, 1e25]))
    for y in (x * x, x**2, x**20, x * x.value, x / (1 / x)):
        assert y.value[0] == 0
    assert float((x[:1] @ x[1:]).value) == 0


def test_zero_entries_of_scales_make_zeros() -> None:
    x, zero = ScaledArray(jnp.ones(2), 8.0), ScaledArray(jnp.ones(2), jnp.float32([0, 1]))
    for y in (x * zero, zero / x, zero**2):
        assert float(y.value[0]) == 0
