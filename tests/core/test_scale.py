"""Arithmetic of scales: canonical form, special scales, the scale of a sum."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale.core import (
    as_scale,
    bounded_product,
    common_scale,
    safe_scale,
    to_float,
)
from unitscale.core._scale import bounded_quotient

KINDS = {"none": None, "one": jnp.float32(1), "array": jnp.float32(4)}
E8M0 = jnp.asarray([2.0, 4.0]).astype(jnp.float8_e8m0fnu)


def number(scale: object) -> float:
    return 1.0 if scale is None else float(np.asarray(scale, np.float32))


def test_none_stays_none() -> None:
    assert as_scale(None) is None


@pytest.mark.parametrize(
    ("scale", "dtype"),
    [
        (1, "float32"),
        (np.float32(1), "float32"),
        (2, "float32"),
        (0.5, "float32"),
        (np.float64(8), "float32"),
        (jnp.float32(1), "float32"),
        (jnp.ones(2, jnp.bfloat16), "float32"),
        (np.array([1, 2]), "float32"),
        (jnp.ones(2, jnp.float8_e4m3fn), "float32"),
        (E8M0, "float8_e8m0fnu"),
    ],
)
def test_array_scales(scale: object, dtype: str) -> None:
    got = as_scale(scale)
    assert got.dtype.name == dtype
    np.testing.assert_array_equal(
        np.asarray(got).astype(np.float32), np.asarray(scale).astype(np.float32)
    )


def test_float64_scales_stay() -> None:
    with jax.enable_x64(True):
        assert as_scale(jnp.ones(2, jnp.float64)).dtype == jnp.float64


@pytest.mark.parametrize(
    ("scale", "error", "message"),
    [
        (-1.0, ValueError, r"positive and finite; got -1\.0. Put sign and zeros into data"),
        (0, ValueError, "positive and finite; got 0. Put sign and zeros into data"),
        (np.float32(0), ValueError, "positive and finite"),
        (float("nan"), ValueError, "got nan"),
        (float("inf"), ValueError, "got inf"),
        (1e39, ValueError, r"normal float32 number; got 1e\+39"),
        (1e-40, ValueError, r"normal float32 number; got 1e-40"),
        (True, TypeError, "got bool True"),
        ("2", TypeError, "got str '2'"),
        (2j, TypeError, "got complex"),
        ([1.0, 2.0], TypeError, "got list"),
        (jnp.ones(2, bool), TypeError, "float array; got dtype bool"),
        (jnp.ones(2, jnp.complex64), TypeError, "float array; got dtype complex64"),
    ],
)
def test_wrong_scales(scale: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=rf"unitscale\.ScaledArray: scale must be .*{message}"):
        as_scale(scale)


@pytest.mark.parametrize("left", KINDS)
@pytest.mark.parametrize("right", KINDS)
class TestPairs:
    def test_product(self, left: str, right: str) -> None:
        a, b = KINDS[left], KINDS[right]
        product = bounded_product(a, b)[0]
        assert number(product) == number(a) * number(b)
        assert (product is None) == (a is None and b is None)

    def test_quotient(self, left: str, right: str) -> None:
        a, b = KINDS[left], KINDS[right]
        assert number(bounded_quotient(a, b)[0]) == number(a) / number(b)

    def test_sum(self, left: str, right: str) -> None:
        a, b = KINDS[left], KINDS[right]
        scale = common_scale(a, b)
        if a is None and b is None:
            assert scale is None
        else:
            root = np.hypot(number(a), number(b))
            assert 2 / 3 <= number(scale) / root <= 4 / 3
            assert np.frexp(number(scale))[0] == 0.5


@hypothesis.given(st.floats(-125, 125), st.floats(-125, 125))
@hypothesis.settings(max_examples=60)
def test_the_scale_of_a_sum_neither_overflows_nor_underflows(a: float, b: float) -> None:
    left, right = jnp.float32(2.0**a), jnp.float32(2.0**b)
    scale = float(common_scale(left, right))
    assert scale == float(common_scale(right, left))
    assert 2 / 3 <= scale / np.hypot(float(left), float(right)) <= 4 / 3


def test_zero_entries_of_a_sum_are_no_nan() -> None:
    scale = common_scale(jnp.asarray([0.0, 0.0, 2.0]), jnp.asarray([0.0, 4.0, 0.0]))
    np.testing.assert_array_equal(scale, [0, 4, 2])


def test_safe_scale() -> None:
    scale = jnp.asarray([0.0, -1.0, 2.0, np.inf, np.nan])
    np.testing.assert_array_equal(safe_scale(scale), [1, 1, 2, 1, 1])


def test_to_float() -> None:
    assert [float(to_float(scale)) for scale in KINDS.values()] == [1, 1, 4]
    np.testing.assert_array_equal(to_float(E8M0), [2, 4])
    assert to_float(E8M0).dtype == jnp.float32


def test_scales_are_constants_of_differentiation() -> None:
    grad = jax.grad(lambda s: to_float(s) * 3 + jnp.asarray(bounded_product(s, jnp.float32(2))[0]))
    assert float(grad(jnp.float32(5))) == 0
