"""Workarounds for XLA change programs but not results."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.batching import compute
from unitscale.core import ScaledArray
from unitscale.quant import Contraction, contract, scaled_matmul
from unitscale.quant._lowering import move_rows_last
from unitscale.quant._matmul import Core

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
RNG = np.random.default_rng(0)


def on(platform: str, monkeypatch: pytest.MonkeyPatch, devices: int = 1) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    monkeypatch.setattr(jax, "device_count", lambda: devices)


def finite(*shape: int, dtype: str = E4M3) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape)).astype(dtype)


def test_moving_rows_in_words_is_transposing() -> None:
    """Test every code of a format, including NaN and infinity."""
    shapes = {(4, 1): 1, (3, 8, 5): 2, (8, 3, 2): 1, (2, 3, 4, 7): 3}
    codes = {shape: RNG.integers(0, 256, shape, np.uint8) for shape in shapes}

    def moved(codes: Any, count: int, dtype: str) -> Any:
        moved = move_rows_last(codes.view(jnp.dtype(dtype)), count)
        assert moved.dtype == dtype
        return moved.view(jnp.uint8)

    table = {
        (shape, dtype): (partial(moved, count=count, dtype=dtype), codes[shape])
        for shape, count in shapes.items()
        for dtype in (E4M3, E5M2)
    }
    for (shape, _), found in compute(table).items():
        count = shapes[shape]
        order = (*range(count, len(shape)), *range(count))
        np.testing.assert_array_equal(found, codes[shape].transpose(order))


def scaled(x: jax.Array, scale: Any, **options: Any) -> ScaledArray:
    return ScaledArray(x, jnp.asarray(scale, jnp.float32), **options)


DENSE = Contraction("btk", "kn", "btn")
GRADIENTS = [  # the spec of the forward matmul, its left operand, a cotangent
    (DENSE, finite(2, 8, 3), finite(2, 8, 5), True),
    (DENSE, scaled(finite(2, 8, 3, dtype=E5M2), 0.5), scaled(finite(2, 8, 5), 8.0), True),
    (DENSE, finite(2, 6, 3), finite(2, 6, 5), False),  # rows no multiple of 4
    (DENSE, finite(2, 8, 3, dtype="bfloat16"), finite(2, 8, 5, dtype="bfloat16"), False),
    (Contraction("btk", "bkn", "btn"), finite(2, 8, 3), finite(2, 8, 5), False),
    (Contraction("kb", "kn", "bn"), finite(3, 8), finite(8, 5), False),
    (DENSE, scaled(finite(2, 8, 3), [[[2, 2, 2]]]), finite(2, 8, 5), False),
    (
        DENSE,
        scaled(finite(2, 8, 4), np.full((2, 8, 2), 2), block_shape=(1, 1, 2)),
        finite(2, 8, 5),
        False,
    ),
]


def weight_gradient(forward: Contraction, x: Any, dy: Any, factor: Any = 1.0) -> jax.Array:
    """Compute a matmul like the callers in the library."""
    core = Core(forward, (1.0, 1.0, 1.0), None, jnp.float32, (jnp.float32, jnp.float32))
    return core.weight_gradient(x, dy, None, factor, jnp.float32)


@pytest.mark.parametrize(("forward", "x", "dy", "moves"), GRADIENTS)
def test_weight_gradients(forward, x, dy, moves, monkeypatch: pytest.MonkeyPatch) -> None:
    """On NVIDIA GPUs, FP8 rows are transposed in words if possible."""
    a, b = (np.float64(z.value if isinstance(z, ScaledArray) else z) for z in (x, dy))
    expected = 0.3 * np.einsum(f"{forward.lhs},{forward.out}->{forward.rhs}", a, b)
    for platform in ("gpu", "tpu"):
        on(platform, monkeypatch)
        gradient = jax.jit(lambda x, dy: weight_gradient(forward, x, dy, jnp.float32(0.3)))
        text = gradient.lower(x, dy).as_text()
        assert ("ui32" in text) == (moves and platform == "gpu"), platform
        np.testing.assert_allclose(gradient(x, dy), expected, rtol=1e-5, atol=1e-5)


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
    x, spec = finite(4, 4, dtype="bfloat16"), Contraction("bk", "kn", "bn")
    for platform, kind in (("cpu", "f32"), ("gpu", "bf16")):
        on(platform, monkeypatch)
        text = jax.jit(lambda x: contract(x, x, spec, out_dtype=jnp.float32)).lower(x).as_text()
        assert f"(tensor<4x4x{kind}>, tensor<4x4x{kind}>)" in text
