"""Quantization of one tensor: rounding, saturation, and the scale of every strategy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.gradients import jit
from unitscale.core import ScaledArray, cast, format_of
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

FORMATS = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn"]
FORMATS += ["float16", "E4M3"]
X = np.float32([0.0, -0.0, 0.3, -1.7, 3e-3, 2e-3, 1e-9, 17.0, 300.0])


def test_unit_keeps_scales_and_takes_no_statistics() -> None:
    plain = quantize(2 * X, "e4m3fn")  # 600 saturates
    assert plain.scale is None
    np.testing.assert_array_equal(*map(np.float32, (plain.data, cast(2 * X, "e4m3fn"))))
    x = ScaledArray(jnp.ones((2, 3)), jnp.asarray([1.0, 2.0, 4.0]))
    y = quantize(x, "e4m3fn")
    np.testing.assert_array_equal(y.scale, x.scale)
    np.testing.assert_array_equal(y.value, x.value)
    for strategy in (Unit(), Dynamic()):
        jaxpr = str(jax.make_jaxpr(lambda x, s=strategy: quantize(x, "e4m3fn", s).data)(X))
        assert ("reduce" in jaxpr) == (strategy == Dynamic())


def least_exponent(amax: float, top: float) -> int:
    """Find the least k in range with amax <= top * 2**k, by trying."""
    return next((k for k in range(-126, 127) if amax <= np.ldexp(top, k)), 126)


def test_the_scale_is_the_least_power_of_two_that_does_not_saturate() -> None:
    tables = []
    for name in FORMATS:
        top = format_of(name).max
        edges = [top * 2.0**k for k in (-110, -30, -9, -1, 0, 1, 7, 60, 100)] + [1, 2.0**-125, 3e38]
        near = [[np.nextafter(np.float32(x), np.float32(to)) for x in edges] for to in (0, np.inf)]
        amaxes = np.float32([*edges, *near[0], *near[1]])
        tables.append(amaxes[np.isfinite(amaxes)])

    def scales(name, amaxes):
        return jax.vmap(lambda x: quantize(x, name, Dynamic()).scale)(amaxes[:, None])

    found = jax.jit(lambda ts: list(map(scales, FORMATS, ts)))(tables)
    for name, amaxes, own in zip(FORMATS, tables, found, strict=True):
        expected = [2.0 ** least_exponent(float(a), format_of(name).max) for a in amaxes]
        np.testing.assert_array_equal(np.ravel(own), np.float32(expected), name)


NEXT = {  # neighbours of 448
    "float32": (448 * (1 - 2**-24), 448 * (1 + 2**-23)),
    "bfloat16": (446.0, 450.0),
    "float16": (447.75, 448.25),
}


def test_amax_is_exact_in_the_tensors_own_dtype() -> None:
    tables = [
        np.asarray([[below, 1.0], [448.0, 1.0], [above, 1.0], [-above, 1.0]]).astype(dtype)
        for dtype, (below, above) in NEXT.items()
    ]
    scales = jax.vmap(lambda x: quantize(x, "e4m3fn", Dynamic()).scale)
    for found in jax.jit(lambda xs: [scales(x) for x in xs])(tables):
        np.testing.assert_array_equal(found.ravel(), [1, 1, 2, 2])


def test_margin_zeros_tiny_numbers_and_what_is_not_finite() -> None:
    margins = {0: 448.0, 1: 448.0, 3: 448.0, 126: 3e38}
    special, tiny = (0.0, np.inf, -np.inf, np.nan), (1e-45, 1e-40, 2.0**-126, 1e-37)

    def run() -> Any:
        each = lambda xs: [quantize(jnp.float32([x, 0.0]), "e4m3fn", Dynamic()) for x in xs]  # noqa: E731
        scales = [
            quantize(jnp.float32([x]), "e4m3fn", Dynamic(margin=m)).scale
            for m, x in margins.items()
        ]
        empty = quantize(jnp.zeros((0, 3)), "e4m3fn", Dynamic())
        wide = quantize(jnp.asarray([1e30, 1e-30]), "bfloat16", Dynamic())
        return scales, each(special), each(tiny), empty, wide

    scales, of_special, of_tiny, empty, wide = jax.jit(run)()
    np.testing.assert_array_equal(scales, [2.0**m for m in margins])
    for value, q in zip(special, of_special, strict=True):
        assert float(q.scale) == 1
        assert np.isnan(np.float32(q.data[0])) == (value != 0)  # e4m3fn has no infinity
    for amax, q in zip(tiny, of_tiny, strict=True):
        # XLA may take subnormal numbers for zeros, which have scale 1.
        assert float(q.scale) == 2.0**-126 or (amax < 2.0**-126 and float(q.scale) == 1)
        value = float(q.data[0]) * float(q.scale)
        assert value == pytest.approx(amax, rel=2**-4, abs=2.0**-126)
    assert (empty.shape, float(empty.scale)) == ((0, 3), 1)
    assert wide.scale is None  # a format with the range of float32
    np.testing.assert_allclose(np.float32(wide.data), [1e30, 1e-30], rtol=2**-8)


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
        (Block(2, 1, "e4m3fn"), -1, [[2, 1], [2.0**-9, 1], [1, 1], [16, 1]]),
        (Block(2, 2, "e4m3fn", tensor_scale=True), -1, [[2, 2.0**-4], [16, 2.0**-4]]),
    ]
    found = jax.jit(lambda x: [quantize(x, "e4m3fn", s, axis=a).scale for s, a, _ in cases])(x)
    for scale, (strategy, _, expected) in zip(found, cases, strict=True):
        np.testing.assert_array_equal(np.float32(scale), expected, str(strategy))


def test_scales_of_blocks_in_e4m3() -> None:
    """As NVFP4: scales are amax / 6 in E4M3, or amax / 4 if adaptive and that has less error.

    With a scale per tensor too, powers of two change nothing else, down to 2**-100.
    """
    rng = np.random.default_rng(1)
    x = rng.standard_normal((4, 32)).astype(np.float32)
    whole, adaptive = {"tensor_scale": True}, {"adaptive": True}
    switches = {}, whole, adaptive, whole | adaptive
    configs = [Block(16, 1, "e4m3fn", **switch) for switch in switches]
    run = jax.jit(lambda x: [quantize(x, "e2m1", config) for config in configs])
    for size in (1.0, 1e-6):
        one, two, three, four = run(x * size)
        top = np.abs(x * size).reshape(4, 2, 16).max(-1)
        if size == 1:
            blocks = x.reshape(4, 2, 16)
            scales = [(top / n).astype(jnp.float8_e4m3fn).astype(np.float32) for n in (6, 4)]
            data = [np.float32((blocks / s[..., None]).astype(jnp.float4_e2m1fn)) for s in scales]
            pairs = zip(data, scales, strict=True)
            errors = [np.sum((d * s[..., None] - blocks) ** 2, -1) for d, s in pairs]
            best = np.argmin(errors, 0)[None]
            assert 0 < best.sum() < best.size
            mixed = np.take_along_axis(np.stack(scales), best, 0)[0]
            every = zip((one, two, three, four), (scales[0], scales[0], mixed, mixed), strict=True)
            for q, scale in every:
                expected = (blocks / scale[..., None]).astype(jnp.float4_e2m1fn).reshape(4, 32)
                np.testing.assert_array_equal(np.float32(q.scale), scale)
                np.testing.assert_array_equal(np.float32(q.data), np.float32(expected))
            tiny = run(x * 2.0**-100)[3].value
            np.testing.assert_array_equal(np.float32(tiny) * 2.0**100, np.float32(four.value))
        else:
            np.testing.assert_array_equal(np.float32(one.scale), 2.0**-9)
            assert not np.any(np.float32(one.value))
            np.testing.assert_allclose(np.float32(two.scale), top / 6, rtol=2**-4)
        assert (one.scale.dtype, two.scale.dtype) == (jnp.float8_e4m3fn, jnp.float32)
    x[0, 3], x[2, 20] = np.nan, np.inf  # E2M1 has neither, so the scale of their block is NaN
    for q in [*run(x), quantize(x, "e2m1", Block(16))]:
        broken = np.isnan(np.float32(q.value)).reshape(4, 2, 16)
        np.testing.assert_array_equal(broken.all(-1), [[1, 0], [0, 0], [0, 1], [0, 0]])
        np.testing.assert_array_equal(broken.any(-1), broken.all(-1))
    exact = dequantize(one)
    assert exact.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.float32(exact), np.float32(one.value))


def test_blocks_of_32() -> None:
    rng = np.random.default_rng(0)
    arrays = [1e4 * rng.standard_normal(s).astype(np.float32) for s in [(4, 64), (3, 70), (5,)]]
    arrays[0][0, :32], arrays[0][1, :32] = 0, 1e-30  # a block of zeros beside others
    arrays[0][1, 3:32] = 0
    formats = "float8_e8m0fnu", "float32"

    @jax.jit
    def run(arrays):
        each = [[quantize(x, "e4m3fn", Block(scale_format=f)) for f in formats] for x in arrays]
        return [[(q, dequantize(q)) for q in row] for row in each]

    for x, row in zip(arrays, run(arrays), strict=True):
        for scale_format, (q, back) in zip(formats, row, strict=True):
            assert (q.dtype, q.scale.dtype.name) == (jnp.float8_e4m3fn, scale_format)
            assert q.scale.shape == (*x.shape[:-1], -(-x.shape[-1] // 32))
            value, full = np.float32(back), np.repeat(np.float32(q.scale), 32, -1)
            full = full[..., : x.shape[-1]]
            # Half of a step of E4M3: relative where the quotient is normal, else of subnormals.
            bound = np.maximum(np.abs(x) * 2.0**-4, full * 2.0**-10)
            assert np.all(np.abs(value - x) <= bound)
            assert back.dtype == jnp.bfloat16
            data = np.asarray(q.data).astype(np.float32)
            np.testing.assert_array_equal(value, data * full)
    assert dequantize(quantize(jnp.ones(2), "float16", Dynamic())).dtype == jnp.float32


def test_scales_are_constants_of_the_gradient() -> None:
    """Whole numbers pass both casts unchanged, and scales have no derivative."""
    x = jnp.asarray([[448.0, 896.0, 3.0], [2.0, 1.0, 0.0]])

    def total(x):
        strategies = Dynamic(), Dynamic("channel"), Static(2.0), Block(2)
        return sum(jnp.sum(quantize(x, "e4m3fn", s).value) for s in strategies)

    np.testing.assert_array_equal(jit(jax.grad(total))(x), jnp.full_like(x, 4))


LHS = jnp.asarray([[0.3, 500.0, -3.0, 7e-3]])
RHS = jnp.asarray([[1.0], [2e4], [1e-12], [3.0]])


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
    # Rounded up to E4M3 the largest float16 would be beyond float16.
    x, config = np.full((1, 2), 65504, np.float16), MatmulConfig(strategy=Dynamic())
    for y in jit(lambda x: fake_quantize_operands(x, x.T, config))(x):
        assert y.dtype == jnp.float16
        assert np.all(np.isfinite(np.float32(y)))


def test_fake_quantization_passes_cotangents_and_measures_both_operands() -> None:
    config = MatmulConfig(strategy=Delayed(history=2))
    state = QuantState.create(config.strategy)

    def loss(lhs, rhs, state):
        a, b = fake_quantize_operands(lhs, rhs, config, axes=((1,), (0,)), state=state)
        return jnp.sum(jnp.sin(a)) + 2 * jnp.sum(b), a

    (dlhs, drhs, seen), rounded = jit(jax.grad(loss, (0, 1, 2), has_aux=True))(LHS, RHS, state)
    np.testing.assert_allclose(dlhs, np.cos(rounded), rtol=1e-5)
    np.testing.assert_array_equal(drhs, np.full((4, 1), 2.0))
    after = state.advance(seen)
    np.testing.assert_array_equal(after.scale, [2.0, 64.0, 1.0])
    np.testing.assert_array_equal(after.counts[:, :2], [[1, 4], [1, 4], [0, 0]])


def test_a_scaled_array_is_quantized_by_its_value() -> None:
    x = ScaledArray(jnp.asarray([[1.5, -2.0], [0.25, 3.0]], jnp.float16), 4.0)
    strategies = Dynamic(), Static(0.5), Block(2)
    run = jit(lambda xs: [[quantize(y, "e4m3fn", s).value for y in xs] for s in strategies])
    for found, expected in run((x, x.value)):
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_allclose(found, x.value, rtol=2**-4)


def test_nan_spreads_over_its_block_in_a_large_array() -> None:
    x = jnp.ones((64, 1024)).at[0, 5].set(jnp.nan)
    found = jnp.isnan(quantize(x, "float4_e2m1fn", Block(16)).value)
    np.testing.assert_array_equal(found, (np.arange(64)[:, None] == 0) & (np.arange(1024) < 16))
