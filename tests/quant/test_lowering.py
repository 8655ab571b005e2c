"""Workarounds for XLA change the program, and never a result."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale.core import ScaledArray
from unitscale.quant import Contraction, _lowering, contract, scaled_matmul
from unitscale.quant._lowering import move_rows_last
from unitscale.quant._matmul import Core

FORMATS = ["float8_e4m3fn", "float8_e5m2"]
SPEC = Contraction("btk", "btn", "kn")
RNG = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("shape", "count"),
    [((4, 1), 1), ((8, 5), 1), ((3, 8, 5), 2), ((8, 3, 2), 1), ((2, 3, 4, 7), 3)],
)
def test_moving_rows_in_words_is_transposing(shape: tuple[int, ...], count: int) -> None:
    """For every code of a format, NaN and infinity too."""
    codes = RNG.integers(0, 256, shape, np.uint8)
    order = (*range(count, len(shape)), *range(count))
    for dtype in FORMATS:
        x = jnp.asarray(codes).view(jnp.dtype(dtype))
        moved = move_rows_last(x, count)
        assert moved.dtype == dtype
        np.testing.assert_array_equal(moved.view(jnp.uint8), codes.transpose(order))


def weight_gradient(lhs: Any, rhs: Any, spec: Contraction, factor: Any) -> jax.Array:
    """The matmul of a right gradient, as every use of the core computes it."""
    forward = Contraction(spec.lhs, spec.out, spec.rhs)
    core = Core(forward, (1.0, 1.0, 1.0), None, jnp.float32, (jnp.float32, jnp.float32))
    return core.weight_gradient(lhs, rhs, None, factor, jnp.float32)


def finite(shape: tuple[int, ...], dtype: str = FORMATS[0]) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape)).astype(dtype)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Takes what is for an NVIDIA GPU; whether anything was."""
    taken: list[bool] = []
    moved = _lowering.move_rows_last

    def record(*args: Any) -> Any:
        taken[:] = [True]
        return moved(*args)

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(_lowering, "move_rows_last", record)
    return taken


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(("scaled", "factor"), [(False, 0.3), (True, jnp.float32(0.3))])
def test_weight_gradients_on_a_gpu(on_gpu: list[bool], dtype: str, scaled: bool, factor) -> None:
    x: Any = finite((2, 8, 3), dtype)
    y: Any = finite((2, 8, 5))
    if scaled:
        x, y = ScaledArray(x, 0.5), ScaledArray(y, jnp.float32(8.0))
    found = weight_gradient(x, y, SPEC, factor)
    assert on_gpu == [True]
    values = (np.asarray(z.value if scaled else z, np.float64) for z in (x, y))
    expected = float(factor) * np.einsum("btk,btn->kn", *values)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


OTHERS = {
    "rows no multiple of 4": (finite((2, 6, 3)), finite((2, 6, 5)), SPEC),
    "16 bits": (finite((2, 8, 3), "bfloat16"), finite((2, 8, 5), "bfloat16"), SPEC),
    "a batch": (finite((2, 8, 3)), finite((2, 8, 5)), Contraction("btk", "btn", "bkn")),
    "last dimension": (finite((3, 8)), finite((8, 5)), Contraction("kb", "bn", "kn")),
    "channels": (
        ScaledArray(finite((2, 8, 3)), jnp.full((1, 1, 3), 2.0)),
        finite((2, 8, 5)),
        SPEC,
    ),
    "blocks": (
        ScaledArray(finite((2, 8, 4)), jnp.full((2, 8, 2), 2.0), block_shape=(1, 1, 2)),
        finite((2, 8, 5)),
        SPEC,
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_weight_gradients_are_plain_matmuls(on_gpu: list[bool], name: str) -> None:
    lhs, rhs, spec = OTHERS[name]
    found = weight_gradient(lhs, rhs, spec, 1.0)
    assert not on_gpu
    np.testing.assert_array_equal(found, scaled_matmul(lhs, rhs, spec, 1.0, jnp.float32))


@pytest.mark.parametrize("devices", [1, 2])
def test_programs_for_each_platform(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA GPUs move FP8 rows in words; a single CPU sums several dimensions as one.

    On several devices each dimension may be sharded over its own axis.
    """
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    x, y = finite((2, 8, 4)), finite((2, 8, 4))
    for platform in ("gpu", "tpu", "cpu"):
        monkeypatch.setattr(jax, "default_backend", lambda platform=platform: platform)
        text = jax.jit(lambda x, y: weight_gradient(x, y, SPEC, 1.0)).lower(x, y).as_text()
        assert ("ui32" in text) == (platform == "gpu"), platform
    for rows in ((3, 5), (2, 3, 5), (0, 5)):
        labels = "abt"[-len(rows) :]
        spec = Contraction(f"{labels}k", f"{labels}n", "kn")
        x, y = (jnp.float32(RNG.normal(size=(*rows, n))) for n in (7, 4))
        expected = 0.5 * np.einsum(f"{spec.lhs},{spec.rhs}->kn", x, y, dtype=np.float64)
        for platform in ("gpu", "cpu"):
            monkeypatch.setattr(jax, "default_backend", lambda platform=platform: platform)
            gradient = jax.jit(lambda x, y, spec=spec: scaled_matmul(x, y, spec, 0.5, "float32"))
            np.testing.assert_allclose(gradient(x, y), expected, rtol=1e-5, atol=1e-5)
            count = 1 if (platform, devices) == ("cpu", 1) else len(rows)
            text = gradient.lower(x, y).as_text()
            assert f"contracting_dims = {[*range(count)]} x {[*range(count)]}" in text


def test_bfloat16_into_float32_is_widened_on_a_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    x, spec = finite((4, 4), "bfloat16"), Contraction("bk", "kn", "bn")
    for platform, kind in (("cpu", "f32"), ("gpu", "bf16")):
        monkeypatch.setattr(jax, "default_backend", lambda platform=platform: platform)
        text = jax.jit(lambda x: contract(x, x, spec, out_dtype=jnp.float32)).lower(x).as_text()
        assert f"(tensor<4x4x{kind}>, tensor<4x4x{kind}>)" in text
