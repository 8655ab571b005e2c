"""Quantization of one tensor: rounding, saturation, and the scale of every strategy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.gradients import jit
from unitscale.core import ScaledArray, format_of
from unitscale.quant import (
    Block,
    Delayed,
    Dynamic,
    MatmulConfig,
    QuantState,
    Static,
    Unit,
    dequantize,
    fake_quantize_operands,
    quantize,
)

FP8 = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"]
FORMATS = [*FP8, "float8_e5m2fnuz", "float4_e2m1fn", "float16", "E4M3"]
X = np.float32([0.0, -0.0, 0.3, -1.7, 3e-3, 2e-3, 1e-9, 17.0, 300.0])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", FP8)
def test_unit_rounds_to_nearest_and_saturates(name: str, dtype: str) -> None:
    top = float(ml_dtypes.finfo(name).max)
    x = X[np.abs(X) < top].astype(jnp.dtype(dtype))
    y = quantize(jnp.asarray(x), name)
    assert (y.dtype, y.scale) == (jnp.dtype(name), None)
    expected = x.astype(np.float32).astype(name)
    np.testing.assert_array_equal(np.float32(y.data), expected.astype(np.float32))
    # Finite values saturate; infinity and NaN are not hidden.
    largest = min(1e9, float(jnp.finfo(dtype).max))
    beyond = jnp.asarray([largest, -largest, jnp.inf, -jnp.inf, jnp.nan], dtype)
    inf = np.inf if name == "float8_e5m2" else np.nan
    found = np.float32(quantize(beyond, name).data)
    np.testing.assert_array_equal(found, [top, -top, inf, -inf, np.nan])


def test_unit_keeps_scales_and_takes_no_statistics() -> None:
    x = ScaledArray(jnp.ones((2, 3)), jnp.asarray([1.0, 2.0, 4.0]))
    y = quantize(x, "e4m3fn")
    np.testing.assert_array_equal(y.scale, x.scale)
    np.testing.assert_array_equal(y.value, x.value)
    for strategy in (Unit(), Dynamic()):
        jaxpr = str(jax.make_jaxpr(lambda x, s=strategy: quantize(x, "e4m3fn", s).data)(X))
        assert ("reduce" in jaxpr) == (strategy == Dynamic())


def least_exponent(amax: float, top: float) -> int:
    """The least k in range with amax <= top * 2**k, by trying."""
    return next((k for k in range(-126, 127) if amax <= np.ldexp(top, k)), 126)


@pytest.mark.parametrize("name", FORMATS)
def test_the_scale_is_the_least_power_of_two_that_does_not_saturate(name: str) -> None:
    top = format_of(name).max
    edges = [top * 2.0**k for k in (-110, -30, -9, -1, 0, 1, 7, 60, 100)] + [1.0, 2.0**-125, 3e38]
    near = [[np.nextafter(x, np.float32(0)), x, np.nextafter(x, np.float32(np.inf))] for x in edges]
    amaxes = np.float32(near).ravel()
    amaxes = amaxes[np.isfinite(amaxes)]
    scales = jax.vmap(lambda x: quantize(x, name, Dynamic()).scale)(amaxes[:, None])
    expected = [2.0 ** least_exponent(float(a), top) for a in amaxes]
    np.testing.assert_array_equal(np.ravel(scales), np.float32(expected))


@pytest.mark.parametrize(
    ("dtype", "below", "above"),
    [
        ("float32", 448 * (1 - 2**-24), 448 * (1 + 2**-23)),
        ("bfloat16", 446.0, 450.0),
        ("float16", 447.75, 448.25),
    ],
)
def test_amax_is_exact_in_the_tensors_own_dtype(dtype: str, below: float, above: float) -> None:
    for value, scale in ((below, 1), (448.0, 1), (above, 2), (-above, 2)):
        x = jnp.asarray([value, 1.0], dtype)
        assert float(x[0]) == pytest.approx(value, rel=2**-24)
        assert float(quantize(x, "e4m3fn", Dynamic()).scale) == scale


def test_margin() -> None:
    for margin in (0, 1, 3):
        q = quantize(jnp.asarray([448.0]), "e4m3fn", Dynamic(margin=margin))
        assert float(q.scale) == 2**margin
    assert float(quantize(jnp.asarray([3e38]), "e4m3fn", Dynamic(margin=126)).scale) == 2.0**126


def test_amax_of_zeros_tiny_numbers_and_what_is_not_finite() -> None:
    for value in (0.0, np.inf, -np.inf, np.nan):
        q = quantize(jnp.asarray([value, 0.0]), "e4m3fn", Dynamic())
        assert float(q.scale) == 1
        assert np.isnan(np.float32(q.data[0])) == (value != 0)  # e4m3fn has no infinity
    for amax in (1e-45, 1e-40, 2.0**-126, 1e-37):
        q = quantize(jnp.asarray([amax, 0.0], jnp.float32), "e4m3fn", Dynamic())
        # XLA may take subnormal numbers for zeros, which have scale 1.
        assert float(q.scale) == 2.0**-126 or (amax < 2.0**-126 and float(q.scale) == 1)
        assert float(q.value[0]) == pytest.approx(amax, rel=2**-4, abs=2.0**-126)
    empty = quantize(jnp.zeros((0, 3)), "e4m3fn", Dynamic())
    assert (empty.shape, float(empty.scale)) == ((0, 3), 1)


def test_formats_with_the_range_of_float32_need_no_scale() -> None:
    q = quantize(jnp.asarray([1e30, 1e-30]), "bfloat16", Dynamic())
    assert q.scale is None
    np.testing.assert_allclose(q.value.astype(jnp.float32), [1e30, 1e-30], rtol=2**-8)


def test_granularity_of_scales() -> None:
    x = np.float32([[448, 896, 0], [1, 0, 0], [0, 0, 0], [2, 7168, 0]])
    cases = [
        (Dynamic(), -1, 16),
        (Dynamic("channel"), -1, [[2], [2.0**-8], [1], [16]]),
        (Dynamic("channel"), 0, [[1, 16, 1]]),
        (Dynamic("channel"), (0, 1), [[16]]),
        (Static(0.5), -1, 0.5),
        (Block(2), -1, [[2, 1], [2.0**-8, 1], [1, 1], [16, 1]]),
        (Block(2, 2), -1, [[2, 1], [16, 1]]),
        (Block(3, 1, "float32"), 0, [[1, 2, 1], [2.0**-7, 16, 1]]),
    ]
    found = jax.jit(lambda x: [quantize(x, "e4m3fn", s, axis=a).scale for s, a, _ in cases])(x)
    for scale, (strategy, _, expected) in zip(found, cases, strict=True):
        np.testing.assert_array_equal(np.float32(scale), expected, str(strategy))


@pytest.mark.parametrize("scale_format", ["float8_e8m0fnu", "float32"])
@pytest.mark.parametrize("shape", [(4, 64), (3, 70), (5,)])
def test_blocks_of_32(shape, scale_format) -> None:
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32) * 1e4
    x.flat[:3] = 0
    q = quantize(jnp.asarray(x), "e4m3fn", Block(scale_format=scale_format))
    assert (q.dtype, q.scale.dtype.name) == (jnp.float8_e4m3fn, scale_format)
    assert q.scale.shape == (*shape[:-1], -(-shape[-1] // 32))
    value, full = np.float32(q.value), np.float32(q.full_scale)
    # Half of a step of E4M3: relative where the quotient is normal, else of subnormal numbers.
    assert np.all(np.abs(value - x) <= np.maximum(np.abs(x) * 2.0**-4, full * 2.0**-10))
    np.testing.assert_array_equal(dequantize(q).astype(jnp.float32), value)
    assert dequantize(q).dtype == jnp.bfloat16
    assert dequantize(quantize(jnp.asarray(x), "float16", Dynamic())).dtype == jnp.float32


def test_blocks_of_zeros_beside_others() -> None:
    x = jnp.zeros((2, 64)).at[0, 3].set(1e-30)
    q = quantize(x, "e4m3fn", Block())
    np.testing.assert_allclose(q.value, x, rtol=2**-4)
    np.testing.assert_array_equal(np.float32(q.scale)[1], [1, 1])


def test_scales_are_constants_of_the_gradient() -> None:
    """Data space: a whole number passes both casts, and the scale has no derivative."""
    x = jnp.asarray([[448.0, 896.0, 3.0], [2.0, 1.0, 0.0]])

    def total(x):
        strategies = Dynamic(), Dynamic("channel"), Static(2.0), Block(2)
        return sum(jnp.sum(quantize(x, "e4m3fn", s).value) for s in strategies)

    np.testing.assert_array_equal(jit(jax.grad(total))(x), jnp.full_like(x, 4))


LHS = jnp.asarray([[0.3, 500.0, -3.0, 7e-3]])
RHS = jnp.asarray([[1.0], [2e4], [0.0], [3.0]])
AXES = ((1,), (0,))


def test_fake_quantization_gives_the_values_of_quantize() -> None:
    strategies = [Unit(), Dynamic(), Dynamic("channel"), Static(8.0), Block(2)]

    def run(lhs, rhs, strategy):
        config = MatmulConfig(rhs="e5m2", strategy=strategy)
        found = (
            *fake_quantize_operands(lhs, rhs, config),
            *fake_quantize_operands(rhs, lhs, config, axes=((0,), (1,))),
        )
        wanted = (
            quantize(x, name, strategy, axis=axis).value
            for x, name, axis in ((lhs, "e4m3fn", 1), (rhs, "e5m2", 0), (rhs, "e4m3fn", 0))
        )
        return found[:3], tuple(wanted)

    for found, wanted in jit(lambda *a: [run(*a, s) for s in strategies])(LHS, RHS):
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_fake_quantization_keeps_dtypes_and_finite_values(dtype: str) -> None:
    """Rounded up to E4M3 the largest float16 would be beyond float16."""
    x = jnp.asarray([[jnp.finfo(dtype).max, jnp.finfo(dtype).max]], dtype)
    lhs, rhs = fake_quantize_operands(x, x.T, MatmulConfig(strategy=Dynamic()))
    assert lhs.dtype == rhs.dtype == dtype
    assert np.all(np.isfinite(np.float32(lhs)))


def test_fake_quantization_passes_cotangents_and_measures_both_operands() -> None:
    config = MatmulConfig(strategy=Delayed(history=2))
    state = QuantState.create(config.strategy)

    def loss(lhs, rhs, state):
        a, b = fake_quantize_operands(lhs, rhs, config, axes=AXES, state=state)
        return jnp.sum(jnp.sin(a)) + 2 * jnp.sum(b)

    dlhs, drhs, seen = jax.jit(jax.grad(loss, (0, 1, 2)))(LHS, RHS, state)
    rounded, _ = fake_quantize_operands(LHS, RHS, config, axes=AXES, state=state)
    np.testing.assert_allclose(dlhs, np.cos(rounded), rtol=1e-5)
    np.testing.assert_array_equal(drhs, np.full((4, 1), 2.0))
    after = state.advance(seen)
    np.testing.assert_array_equal(after.scale, [2.0, 64.0, 1.0])
    np.testing.assert_array_equal(after.counts[:, :2], [[1, 4], [1, 4], [0, 0]])


@pytest.mark.parametrize("strategy", [Dynamic(), Static(0.5), Block(2)])
def test_a_scaled_array_is_quantized_by_its_value(strategy) -> None:
    x = ScaledArray(jnp.asarray([[1.5, -2.0], [0.25, 3.0]], jnp.float16), 4.0)
    found, expected = (quantize(y, "e4m3fn", strategy) for y in (x, x.value))
    np.testing.assert_array_equal(found.value, expected.value)
    np.testing.assert_allclose(found.value, x.value, rtol=2**-4)
