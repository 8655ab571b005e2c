"""What a program does in float32 on purpose is float32 under scalify too, up to its last rounding.

References are float64 NumPy on the very 16-bit values.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from unitscale import as_scaled, scalify, to_array
from unitscale.transforms import cast_data

FORMATS = [jnp.float16, jnp.bfloat16]


def around(mean: float, dtype: Any) -> tuple[Any, np.ndarray]:
    """Values of standard deviation 1, scaled, and as float64."""
    x = np.random.default_rng(0).normal(mean, 1, size=(16, 512)).astype(np.float32)
    given = as_scaled(jnp.asarray(x), dtype=dtype)
    return given, np.asarray(to_array(given), np.float64)


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def divergence(of: Callable[..., Any], exp: Callable[..., Any]) -> Callable[..., Any]:
    def program(x: Any) -> Any:
        near = x + x[::-1] / 64
        return (exp(of(x)) * (of(x) - of(near))).sum(-1)

    return program


# What a user may cast to float32 for, and the same in NumPy.
ISLANDS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "mean of squares less square of the mean": (
        lambda x: (x * x).mean(-1) - x.mean(-1) ** 2,
        lambda x: x.var(-1),
    ),
    "square": (lambda x: jnp.square(x).mean(-1) - x.mean(-1) ** 2, lambda x: x.var(-1)),
    "var": (lambda x: x.var(-1), lambda x: x.var(-1)),
    "what is left of the mean": (
        lambda x: jnp.square(x - x.sum(-1, keepdims=True) / x.shape[-1]).sum(-1),
        lambda x: x.var(-1) * x.shape[-1],
    ),
    "logarithm of softmax": (
        lambda x: jax.nn.log_softmax(x)[:, :1] - jax.nn.log_softmax(x)[:, 1:2],
        lambda x: x[:, :1] - x[:, 1:2],
    ),
    "divergence": (divergence(jax.nn.log_softmax, jnp.exp), divergence(log_softmax, np.exp)),
    "loss": (
        lambda x: jax.nn.logsumexp(x, -1) - x[:, 0],
        lambda x: -log_softmax(x)[:, 0],
    ),
}


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("mean", [0.0, 16.0, 60.0])
@pytest.mark.parametrize("name", ISLANDS)
def test_what_follows_a_cast_is_float32(name: str, mean: float, dtype: Any) -> None:
    program, reference = ISLANDS[name]
    given, exact = around(mean, dtype)
    found = to_array(jax.jit(scalify(lambda x: program(x.astype(jnp.float32))))(given))
    expected = reference(exact)
    # One rounding at the end, and float32 before: of sums of 512 squares, the largest term.
    step = float(jnp.finfo(dtype).eps)
    before = 8 * float(jnp.finfo(jnp.float32).eps) * (mean + 4) ** 2
    scale = np.max(np.abs(expected))
    np.testing.assert_allclose(found, expected, rtol=0, atol=step * scale + before * max(scale, 1))


@pytest.mark.parametrize("dtype", FORMATS)
def test_an_island_of_products_is_asked_for(dtype: Any) -> None:
    given, exact = around(16.0, dtype)

    def variance(x: Any) -> Any:
        return (x * x) @ jnp.ones(512) / 512 - x.mean(-1) ** 2

    def program(x: Any) -> Any:
        y = variance(cast_data(x, jnp.float32))
        return y, y.astype(dtype), x * 2

    wide, cast, beside = scalify(program)(given)
    assert (wide.dtype, cast.dtype, beside.dtype) == (jnp.float32, dtype, dtype)
    np.testing.assert_allclose(to_array(wide), exact.var(-1), rtol=1e-3)
    jaxpr = str(jax.make_jaxpr(scalify(program))(given))
    assert "preferred_element_type=float32" in jaxpr
    outside = scalify(lambda x: lax.add(cast_data(x, jnp.float32), x))(given)
    np.testing.assert_allclose(to_array(outside), 2 * exact, rtol=1e-6)
