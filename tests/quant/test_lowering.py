"""FP8 operands turned by words: bit for bit their transposes, and the products those of others."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale.core import ScaledArray
from unitscale.quant import Contraction, _lowering, scaled_matmul
from unitscale.quant._lowering import move_rows_last
from unitscale.quant._matmul import Core

FORMATS = ["float8_e4m3fn", "float8_e5m2"]
SPEC = Contraction("btk", "btn", "kn")


def right_gradient(lhs: Any, rhs: Any, spec: Contraction, factor: Any, dtype: Any) -> jax.Array:
    """The matmul of a right gradient, as every use of the core computes it."""
    forward = Contraction(spec.lhs, spec.out, spec.rhs)
    core = Core(forward, (1.0, 1.0, 1.0), None, dtype, (dtype, dtype))
    return core.weight_gradient(lhs, rhs, None, factor, dtype)


def drawn(seed: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Every code of a format, NaN and infinity too."""
    codes = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    return jnp.asarray(codes).view(jnp.dtype(dtype))


def finite(seed: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape)).astype(dtype)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(
    ("shape", "count"),
    [((4, 1), 1), ((8, 5), 1), ((3, 8, 5), 2), ((8, 3, 2), 1), ((2, 3, 4, 7), 3)],
)
def test_turning_is_transposing(shape: tuple[int, ...], count: int, dtype: str) -> None:
    x = drawn(0, shape, dtype)
    order = (*range(count, len(shape)), *range(count))
    found = np.asarray(jax.jit(move_rows_last, static_argnums=1)(x, count).view(jnp.uint8))
    assert np.array_equal(found, np.asarray(x.view(jnp.uint8)).transpose(order))


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Takes what is for an NVIDIA GPU; whether anything was."""
    taken: list[bool] = []

    def choose(*args: Any, default: Callable[..., Any], **own: Callable[..., Any]) -> Any:
        if "cuda" in own:
            taken.append(True)
            return own["cuda"](*args)
        return own.get("cpu", default)(*args)

    monkeypatch.setattr(_lowering.lax, "platform_dependent", choose)
    return taken


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(("scaled", "factor"), [(False, 0.3), (True, jnp.float32(0.3))])
def test_gradients_are_the_same(on_gpu: list[bool], dtype: str, scaled: bool, factor: Any) -> None:
    x: Any = finite(0, (2, 8, 3), dtype)
    y: Any = finite(1, (2, 8, 5), "float8_e4m3fn")
    if scaled:
        x, y = ScaledArray(x, 0.5), ScaledArray(y, jnp.float32(8.0))
    found = right_gradient(x, y, SPEC, factor, jnp.float32)
    assert on_gpu == [True]
    wanted = scaled_matmul(x, y, SPEC, factor, jnp.float32)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    np.testing.assert_allclose(
        found,
        float(factor)
        * np.einsum(
            "btk,btn->kn", *(np.asarray(z.value if scaled else z, np.float64) for z in (x, y))
        ),
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize(
    ("lhs", "rhs", "spec"),
    [
        (finite(0, (2, 6, 3), FORMATS[0]), finite(1, (2, 6, 5), FORMATS[0]), SPEC),
        (finite(0, (2, 8, 3), "bfloat16"), finite(1, (2, 8, 5), "bfloat16"), SPEC),
        (
            finite(0, (2, 8, 3), FORMATS[0]),
            finite(1, (2, 8, 5), FORMATS[0]),
            Contraction("btk", "btn", "bkn"),
        ),
        (
            finite(0, (3, 8), FORMATS[0]),
            finite(1, (8, 5), FORMATS[0]),
            Contraction("kb", "bn", "kn"),
        ),
        (
            ScaledArray(finite(0, (2, 8, 3), FORMATS[0]), jnp.full((1, 1, 3), 2.0)),
            finite(1, (2, 8, 5), FORMATS[0]),
            SPEC,
        ),
        (
            ScaledArray(
                finite(0, (2, 8, 4), FORMATS[0]), jnp.full((2, 8, 2), 2.0), block_shape=(1, 1, 2)
            ),
            finite(1, (2, 8, 5), FORMATS[0]),
            SPEC,
        ),
    ],
    ids=["rows no multiple of 4", "16 bits", "a batch", "last dimension", "channels", "blocks"],
)
def test_others_are_left_as_they_are(on_gpu: list[bool], lhs: Any, rhs: Any, spec: Any) -> None:
    found = right_gradient(lhs, rhs, spec, 1.0, jnp.float32)
    assert not on_gpu
    np.testing.assert_array_equal(found, scaled_matmul(lhs, rhs, spec, 1.0, jnp.float32))


def test_platforms() -> None:
    """Only a program for an NVIDIA GPU turns; on a CPU the product is that of `product`."""
    x, y = (finite(seed, (2, 8, 4), FORMATS[0]) for seed in (0, 1))

    def run(x: jax.Array, y: jax.Array) -> jax.Array:
        return right_gradient(x, y, SPEC, 1.0, jnp.float32)

    traced = jax.jit(run).trace(x, y)
    for platform in ("cpu", "cuda", "tpu"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert ("ui32" in text) == (platform == "cuda"), platform
    np.testing.assert_array_equal(run(x, y), scaled_matmul(x, y, SPEC, 1.0, jnp.float32))
