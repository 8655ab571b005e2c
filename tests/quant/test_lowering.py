"""Workarounds for XLA change programs but not results."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale.quant import (
    PRESETS,
    Block,
    Contraction,
    Dynamic,
    MatmulConfig,
    Unit,
    _lowering,
    contract,
    scaled_matmul,
)

from .products import three_products

RNG = np.random.default_rng(0)


def on(platform: str, monkeypatch: pytest.MonkeyPatch, devices: int = 1) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    monkeypatch.setattr(jax, "device_count", lambda: devices)


DENSE = Contraction("btk", "kn", "btn")
BATCHED = Contraction("btk", "bkn", "btn")
COLUMNS = Contraction("kb", "kn", "bn")
EINSUM = Contraction("bthd", "hdn", "btn")
# Spec, shapes of operands, strategy, and how many of the three tensors have both layouts.
MATMULS = [
    (DENSE, (2, 8, 4), (4, 12), Unit(), 3),
    (DENSE, (2, 8, 4), (4, 12), Dynamic(), 3),
    (EINSUM, (2, 4, 3, 4), (3, 4, 8), Unit(), 3),
    (DENSE, (2, 6, 4), (4, 12), Unit(), 1),  # rows no multiple of 4
    (DENSE, (2, 8, 3), (3, 12), Unit(), 1),  # features no multiple of 4
    (DENSE, (2, 8, 4), (4, 12), Dynamic("channel"), 0),
    (DENSE, (2, 8, 4), (4, 12), Block(4), 0),
    (BATCHED, (4, 8, 4), (4, 4, 12), Unit(), 0),
    (COLUMNS, (4, 8), (4, 12), Unit(), 2),
]


@pytest.mark.parametrize(("spec", "left", "right", "strategy", "count"), MATMULS)
def test_layouts_do_not_change_a_matmul(
    spec, left, right, strategy, count, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NVIDIA GPUs, matmuls get FP8 operands in TN layout if possible."""
    config = MatmulConfig(cotangent="float8_e5m2", strategy=strategy)
    sizes = dict(zip(spec.lhs + spec.rhs, left + right, strict=True))
    out = tuple(sizes[c] for c in spec.out)
    operands = [jnp.bfloat16(RNG.normal(size=shape)) for shape in (left, right, out)]
    results, texts = {}, {}
    for platform in ("gpu", "tpu"):
        on(platform, monkeypatch)

        def three(x: Any, w: Any, dy: Any, _: str = platform) -> Any:
            y, vjp = jax.vjp(lambda x, w: contract(x, w, spec, config=config), x, w)
            return y, *vjp(dy)

        program = jax.jit(three)
        texts[platform] = program.lower(*operands).as_text()
        results[platform] = program(*operands)
    assert texts["gpu"].count("@LayoutConstraint") == 2 * count
    assert "@LayoutConstraint" not in texts["tpu"]
    for found, expected in zip(results["gpu"], results["tpu"], strict=True):
        np.testing.assert_array_equal(np.float32(found), np.float32(expected))


@pytest.mark.slow
def test_kernels_for_blocks_multiply_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Blackwell, MXFP8 and NVFP4 operands go to `jax.nn.scaled_matmul` in its layout."""
    calls = []

    def scaled_matmul(lhs, rhs, lhs_scales, rhs_scales, preferred_element_type):
        calls.append((lhs.dtype, lhs_scales.shape[-1]))
        pairs = (lhs, lhs_scales), (rhs, rhs_scales)
        wide = [
            jnp.float32(x) * jnp.repeat(jnp.float32(s), x.shape[-1] // s.shape[-1], -1)
            for x, s in pairs
        ]
        return jnp.einsum("bmk,bnk->bmn", *wide).astype(preferred_element_type)

    monkeypatch.setattr(jax.nn, "scaled_matmul", scaled_matmul)
    monkeypatch.setattr(_lowering, "gpu_capability", lambda: 10.0)
    cases = [
        ("mxfp8", DENSE, (2, 32, 64), (64, 96), 3),
        ("nvfp4", DENSE, (2, 16, 32), (32, 48), 3),
        ("nvfp4", EINSUM, (2, 16, 3, 32), (3, 32, 48), 3),
        ("mxfp8", BATCHED, (4, 32, 64), (4, 64, 32), 3),
        ("mxfp8", DENSE, (2, 8, 64), (64, 32), 2),  # the weight gradient sums over 8 tokens
        ("nvfp4_dynamic", DENSE, (2, 16, 32), (32, 48), 0),
        ("fp8_block", DENSE, (2, 128, 128), (128, 128), 0),
    ]
    for preset, spec, left, right, count in cases:
        sizes = dict(zip(spec.lhs + spec.rhs, left + right, strict=True))
        shapes = left, right, tuple(sizes[c] for c in spec.out)
        operands = [jnp.float32(RNG.normal(size=shape)) for shape in shapes]
        results, config = {}, PRESETS[preset]
        for platform in ("tpu", "gpu"):
            calls.clear()
            on(platform, monkeypatch)
            results[platform] = jax.jit(three_products(config, spec))(*operands)[:3]
        assert len(calls) == count, preset
        for found, expected in zip(results["gpu"], results["tpu"], strict=True):
            size = float(jnp.linalg.norm(expected))
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6 * size)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_single_cpu_sums_several_dimensions_as_one(
    devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several devices they stay separate, as each may be sharded over its own mesh axis."""
    for rows in ((3, 5), (2, 3, 5), (0, 5)):
        labels = "abt"[-len(rows) :]
        spec = Contraction(f"{labels}k", f"{labels}n", "kn")
        x, y = (jnp.float32(RNG.normal(size=(*rows, n))) for n in (7, 4))
        expected = 0.5 * np.einsum(f"{spec.lhs},{spec.rhs}->kn", x, y, dtype=np.float64)
        for platform in ("gpu", "cpu"):
            on(platform, monkeypatch, devices)
            gradient = jax.jit(lambda x, y, spec=spec: scaled_matmul(x, y, spec, 0.5, "float32"))
            np.testing.assert_allclose(gradient(x, y), expected, rtol=1e-5, atol=1e-5)
            count = 1 if (platform, devices) == ("cpu", 1) else len(rows)
            text = gradient.lower(x, y).as_text()
            assert f"contracting_dims = {[*range(count)]} x {[*range(count)]}" in text


def test_bfloat16_into_float32_is_widened_on_a_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    x, spec = jnp.bfloat16(RNG.normal(size=(4, 4))), Contraction("bk", "kn", "bn")
    for platform, kind in (("cpu", "f32"), ("gpu", "bf16")):
        on(platform, monkeypatch)
        text = jax.jit(lambda x: contract(x, x, spec, out_dtype=jnp.float32)).lower(x).as_text()
        assert f"(tensor<4x4x{kind}>, tensor<4x4x{kind}>)" in text
