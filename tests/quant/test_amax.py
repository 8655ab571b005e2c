"""From an amax to a scale: exact at every boundary of every format."""

import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale.core import format_of
from unitscale.quant import Dynamic, quantize

FORMATS = [
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float4_e2m1fn",
    "float16",
    "E4M3",
]


def least_exponent(amax: float, top: float) -> int:
    """The least k in range with amax <= top * 2**k, by trying."""
    return next((k for k in range(-126, 127) if amax <= math.ldexp(top, k)), 126)


def around(x: float) -> list[np.float32]:
    x = np.float32(x)
    return [np.nextafter(x, np.float32(0)), x, np.nextafter(x, np.float32(np.inf))]


@pytest.mark.parametrize("name", FORMATS)
def test_the_scale_is_the_least_power_of_two_that_does_not_saturate(name: str) -> None:
    top = format_of(name).max
    edges = [top * 2.0**k for k in (-110, -30, -9, -1, 0, 1, 7, 60, 100)] + [1.0, 2.0**-125, 3e38]
    amaxes = np.float32([x for edge in edges for x in around(edge) if np.isfinite(x)])
    scales = jax.vmap(lambda x: quantize(x, name, Dynamic()).scale)(amaxes[:, None])
    expected = [2.0 ** least_exponent(float(a), top) for a in amaxes]
    np.testing.assert_array_equal(np.ravel(scales), np.float32(expected))


@hypothesis.given(st.floats(2.0**-100, 2.0**127, width=32), st.sampled_from(FORMATS[:2]))
def test_nothing_saturates_and_half_the_range_is_used(amax: float, name: str) -> None:
    scale = float(_scale_of[name](np.float32([amax])))
    top = format_of(name).max
    assert amax <= top * scale
    assert amax > top * scale / 2


_scale_of = {
    name: jax.jit(lambda x, name=name: quantize(x, name, Dynamic()).scale) for name in FORMATS[:2]
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_amax_is_that_of_the_tensors_own_dtype(dtype: str) -> None:
    """The largest float16 or bfloat16 below a boundary must not be rounded up to it."""
    below = {"float32": 448 * (1 - 2**-24), "bfloat16": 446.0, "float16": 447.75}[dtype]
    above = {"float32": 448 * (1 + 2**-23), "bfloat16": 450.0, "float16": 448.25}[dtype]
    for value, scale in ((below, 1), (448.0, 1), (above, 2)):
        x = jnp.asarray([value, -1.0], dtype)
        assert float(x[0]) == pytest.approx(value, rel=2**-24)
        assert float(quantize(x, "e4m3fn", Dynamic()).scale) == scale
        assert float(quantize(-x, "e4m3fn", Dynamic()).scale) == scale


def test_margin_leaves_powers_of_two_free() -> None:
    x = jnp.asarray([448.0])
    for margin in (0, 1, 3):
        assert float(quantize(x, "e4m3fn", Dynamic(margin=margin)).scale) == 2**margin
    assert float(quantize(jnp.asarray([3e38]), "e4m3fn", Dynamic(margin=126)).scale) == 2.0**126


@pytest.mark.parametrize("value", [0.0, -0.0, np.inf, -np.inf, np.nan])
def test_an_amax_that_says_nothing_has_scale_1(value: float) -> None:
    q = quantize(jnp.asarray([value, 0.0]), "e4m3fn", Dynamic())
    assert float(q.scale) == 1
    if value == 0:
        np.testing.assert_array_equal(q.value, [0, 0])
    else:  # not hidden: e4m3fn has no infinity
        assert np.isnan(np.float32(q.data[0]))


def test_an_empty_tensor() -> None:
    q = quantize(jnp.zeros((0, 3)), "e4m3fn", Dynamic())
    assert (q.shape, float(q.scale)) == ((0, 3), 1)


@pytest.mark.parametrize("amax", [1e-45, 1e-40, 2.0**-126, 1e-37])
def test_tiny_and_subnormal_amax_gives_finite_numbers(amax: float) -> None:
    q = quantize(jnp.asarray([amax, 0.0], jnp.float32), "e4m3fn", Dynamic())
    # XLA may take subnormal numbers for zeros, which have scale 1.
    assert float(q.scale) == 2.0**-126 or (amax < 2.0**-126 and float(q.scale) == 1)
    assert float(q.value[0]) == pytest.approx(amax, rel=2**-4, abs=2.0**-126)


def test_formats_of_float32s_range_are_cast_without_a_scale() -> None:
    q = quantize(jnp.asarray([1e30, 1e-30]), "bfloat16", Dynamic())
    assert q.scale is None
    np.testing.assert_allclose(q.value.astype(jnp.float32), [1e30, 1e-30], rtol=2**-8)
