"""Workarounds for XLA change the program, and never a result."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale.core import ScaledArray
from unitscale.quant import Contraction, _lowering, contract, scaled_matmul
from unitscale.quant._matmul import Core

FORMATS = ["float8_e4m3fn", "float8_e5m2"]
SPEC = Contraction("btk", "btn", "kn")
RNG = np.random.default_rng(0)


def on(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: platform)


def weight_gradient(lhs: Any, rhs: Any, spec: Contraction = SPEC, factor: Any = 1.0) -> jax.Array:
    """The matmul of a right gradient, as every use of the core computes it."""
    forward = Contraction(spec.lhs, spec.out, spec.rhs)
    core = Core(forward, (1.0, 1.0, 1.0), None, jnp.float32, (jnp.float32, jnp.float32))
    return core.weight_gradient(lhs, rhs, None, factor, jnp.float32)


def finite(shape: tuple[int, ...], dtype: str = FORMATS[0]) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape)).astype(dtype)


@pytest.mark.parametrize(
    ("shape", "count"), [((4, 1), 1), ((3, 8, 5), 2), ((8, 3, 2), 1), ((2, 3, 4, 7), 3)]
)
def test_moving_rows_in_words_is_transposing(shape: tuple[int, ...], count: int) -> None:
    """For every code of a format, NaN and infinity too."""
    codes = RNG.integers(0, 256, shape, np.uint8)
    for dtype in FORMATS:
        moved = _lowering.move_rows_last(jnp.asarray(codes).view(jnp.dtype(dtype)), count)
        assert moved.dtype == dtype
        order = (*range(count, len(shape)), *range(count))
        np.testing.assert_array_equal(moved.view(jnp.uint8), codes.transpose(order))


def scaled(x: jax.Array, scale: Any, **options: Any) -> ScaledArray:
    return ScaledArray(x, jnp.asarray(scale, jnp.float32), **options)


@pytest.mark.parametrize(
    ("lhs", "rhs", "spec", "moves"),
    [
        (finite((2, 8, 3)), finite((2, 8, 5)), SPEC, True),
        (scaled(finite((2, 8, 3), FORMATS[1]), 0.5), scaled(finite((2, 8, 5)), 8.0), SPEC, True),
        (finite((2, 6, 3)), finite((2, 6, 5)), SPEC, False),  # rows no multiple of 4
        (finite((2, 8, 3), "bfloat16"), finite((2, 8, 5), "bfloat16"), SPEC, False),
        (finite((2, 8, 3)), finite((2, 8, 5)), Contraction("btk", "btn", "bkn"), False),
        (finite((3, 8)), finite((8, 5)), Contraction("kb", "bn", "kn"), False),
        (scaled(finite((2, 8, 3)), [[[2, 2, 2]]]), finite((2, 8, 5)), SPEC, False),
        (
            scaled(finite((2, 8, 4)), jnp.full((2, 8, 2), 2.0), block_shape=(1, 1, 2)),
            finite((2, 8, 5)),
            SPEC,
            False,
        ),
    ],
)
def test_weight_gradients_on_a_gpu(lhs, rhs, spec, moves, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []
    moved = _lowering.move_rows_last
    on("gpu", monkeypatch)
    monkeypatch.setattr(_lowering, "move_rows_last", lambda *a: taken.append(a) or moved(*a))
    found = weight_gradient(lhs, rhs, spec, jnp.float32(0.3))
    assert bool(taken) == moves
    a, b = (np.float64(x.value if isinstance(x, ScaledArray) else x) for x in (lhs, rhs))
    expected = 0.3 * np.einsum(f"{spec.lhs},{spec.rhs}->{spec.out}", a, b)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("devices", [1, 2])
def test_programs_for_each_platform(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA GPUs move FP8 rows in words; a single CPU sums several dimensions as one.

    On several devices each dimension may be sharded over its own axis.
    """
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    x, y = finite((2, 8, 4)), finite((2, 8, 4))
    for platform in ("gpu", "tpu", "cpu"):
        on(platform, monkeypatch)
        text = jax.jit(lambda x, y: weight_gradient(x, y)).lower(x, y).as_text()
        assert ("ui32" in text) == (platform == "gpu"), platform
    for rows in ((3, 5), (2, 3, 5), (0, 5)):
        labels = "abt"[-len(rows) :]
        spec = Contraction(f"{labels}k", f"{labels}n", "kn")
        x, y = (jnp.float32(RNG.normal(size=(*rows, n))) for n in (7, 4))
        expected = 0.5 * np.einsum(f"{spec.lhs},{spec.rhs}->kn", x, y, dtype=np.float64)
        for platform in ("gpu", "cpu"):
            on(platform, monkeypatch)
            gradient = jax.jit(lambda x, y, spec=spec: scaled_matmul(x, y, spec, 0.5, "float32"))
            np.testing.assert_allclose(gradient(x, y), expected, rtol=1e-5, atol=1e-5)
            count = 1 if (platform, devices) == ("cpu", 1) else len(rows)
            text = gradient.lower(x, y).as_text()
            assert f"contracting_dims = {[*range(count)]} x {[*range(count)]}" in text


def test_bfloat16_into_float32_is_widened_on_a_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    x, spec = finite((4, 4), "bfloat16"), Contraction("bk", "kn", "bn")
    for platform, kind in (("cpu", "f32"), ("gpu", "bf16")):
        on(platform, monkeypatch)
        text = jax.jit(lambda x: contract(x, x, spec, out_dtype=jnp.float32)).lower(x).as_text()
        assert f"(tensor<4x4x{kind}>, tensor<4x4x{kind}>)" in text
