"""Where careless scales give NaN: infinities, zeros, masks, scales at the ends of their range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, nn

from unitscale import ScaledArray, as_scaled, to_array
from unitscale.transforms import scalify

INF, NAN = float("inf"), float("nan")
X = jnp.asarray([[0.5, -2.0, 3.0, 1.0], [0.0, 1.5, -0.25, 7.0]], jnp.float32)
HALF = float(np.finfo(np.float16).eps)

CAREFUL: dict[str, Callable[..., Any]] = {
    "logsumexp": nn.logsumexp,
    "log_softmax": nn.log_softmax,
    "softmax": nn.softmax,
    "max": lambda x: jnp.max(x, axis=1, initial=-INF),
    "min": lambda x: jnp.min(x, axis=0),
    "var": lambda x: jnp.var(x, axis=-1),
    "mean": jnp.mean,
    "sum": lambda x: jnp.sum(x, axis=0),
    "relu": nn.relu,
    "gelu": nn.gelu,
    "abs": jnp.abs,
    "add": lambda x: x + 1.5,
    "add other": lambda x: x + jnp.flip(x) * 3,
    "multiply": lambda x: x * x,
    "divide": lambda x: 1 / x,
    "divide self": lambda x: x / jnp.flip(x),
    "sqrt": lambda x: jnp.sqrt(jnp.abs(x)),
    "log": lambda x: jnp.log(jnp.abs(x)),
    "exp": jnp.exp,
    "matmul": lambda x: x @ x.T,
    "where": lambda x: jnp.where(x > 0, x, -INF),
    "isfinite": lambda x: jnp.where(jnp.isfinite(x), x, 0.0),
    "sort": lambda x: jnp.sort(x, axis=-1),
    "argmax": lambda x: jnp.argmax(x, axis=-1),
    "cumsum": lambda x: jnp.cumsum(x, axis=-1),
    "clip": lambda x: jnp.clip(x, -1.0, 1.0),
    "layer norm": lambda x: (
        (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    ),
}
INPUTS = {
    "finite": X,
    "zeros": jnp.zeros_like(X),
    "one infinity": X.at[0, 1].set(INF),
    "both infinities": X.at[0, 1].set(INF).at[1, 2].set(-INF),
    "minus infinity row": X.at[0].set(-INF),
    "nan": X.at[1, 1].set(NAN),
}


def same_pattern(actual: Any, expected: Any, tolerance: float, what: str) -> None:
    actual, expected = np.asarray(actual), np.asarray(expected)
    if expected.dtype.kind != "f":
        np.testing.assert_array_equal(actual, expected, err_msg=what)
        return
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected), err_msg=what)
    np.testing.assert_array_equal(np.isinf(actual), np.isinf(expected), err_msg=what)
    finite = np.isfinite(expected)
    size = np.max(np.abs(expected[finite]), initial=0.0)
    np.testing.assert_allclose(
        actual[finite], expected[finite], rtol=0, atol=tolerance * size + 1e-35, err_msg=what
    )


@pytest.mark.parametrize("name", CAREFUL)
def test_same_pattern_of_infinities_and_nans(name: str) -> None:
    function = CAREFUL[name]
    plain = jax.jit(function)

    @jax.jit
    def scaled(x: jax.Array, scale: jax.Array) -> Any:
        return to_array(scalify(function)(ScaledArray(x / scale, scale)))

    for kind, x in INPUTS.items():
        for scale in (1.0, 2.0**12, 2.0**-12):
            actual = scaled(x, jnp.float32(scale))
            same_pattern(actual, plain(x), 1e-5, f"{name}, {kind}, scale {scale}")


@pytest.mark.parametrize("name", sorted(set(CAREFUL) - {"argmax", "divide self"}))
def test_special_zero(name: str) -> None:
    """The static zero, and a scale that is zero at run time, are arrays of zeros."""
    function, zeros = CAREFUL[name], jnp.zeros_like(X)
    expected = function(zeros)
    same_pattern(to_array(scalify(function)(ScaledArray(X, 0))), expected, 1e-6, name)
    same_pattern(to_array(scalify(function)(as_scaled(zeros))), expected, 1e-6, name)


@pytest.mark.parametrize("exponent", [-110, -60, 60, 110])
def test_scales_at_the_ends_of_their_range(exponent: int) -> None:
    scale = jnp.float32(2.0**exponent)
    x = ScaledArray(X, scale)

    def function(a: jax.Array) -> Any:
        unit = a / jnp.max(jnp.abs(a))
        return unit, jnp.sum(a), -a, jnp.sort(a), jnp.where(a > 0, a, 0), a + a * 0.5

    actual = to_array(jax.jit(scalify(function))(x))
    for a, e in zip(actual, function(X * scale), strict=True):
        same_pattern(a, e, 1e-5, f"2**{exponent}")


def test_subnormal_scale_and_data_stay_finite() -> None:
    x = ScaledArray(X * 2.0**-130, jnp.float32(2.0**100))
    actual = to_array(scalify(lambda a: nn.softmax(a * 2.0**20))(x))
    assert np.all(np.isfinite(actual))


MASKS = {
    "infinite": -INF,
    "lowest": float(np.finfo(np.float32).min),
    "large": -1e9,
    "moderate": -1e4,
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("mask", MASKS)
def test_masks_do_not_take_the_scale(mask: str, dtype: Any) -> None:
    keep = jnp.asarray([[True, False, True, True], [True, True, False, True]])

    def chosen(x: jax.Array) -> jax.Array:
        return nn.softmax(jnp.where(keep, x, MASKS[mask]))

    def added(x: jax.Array) -> jax.Array:
        return nn.softmax(x + jnp.where(keep, 0.0, MASKS[mask]))

    for scale in (2.0**-18, 2.0**-4, 1.0, 2.0**8):
        for function in (chosen, added):
            value = X * scale
            actual = to_array(scalify(function)(ScaledArray(X.astype(dtype), jnp.float32(scale))))
            tolerance = 4 * HALF * max(1.0, float(jnp.max(value))) if dtype == jnp.float16 else 1e-6
            same_pattern(actual, function(value), tolerance, f"{function.__name__} at {scale}")


def test_constants_keep_float16_data() -> None:
    x = as_scaled(X, dtype=jnp.float16)
    result = scalify(lambda a: (a * 1e-6 + 1e-8) / 3.0 * jnp.arange(4.0) - jnp.ones(4) * 1e-7)(x)
    assert result.dtype == jnp.float16
    expected = (X * 1e-6 + 1e-8) / 3.0 * jnp.arange(4.0) - 1e-7
    same_pattern(result.value, expected, 4 * HALF, "constants")


HALF_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{
        k: CAREFUL[k]
        for k in ("log_softmax", "softmax", "gelu", "mean", "var", "layer norm", "exp")
    },
    "exp of large": lambda x: jnp.exp(4 * x),
    "cube": lambda x: x**3,
    "tanh": jnp.tanh,
    "norm": lambda x: x / jnp.sqrt(jnp.sum(x * x)),
    "product": lambda x: x @ jnp.ones((4, 300)) @ jnp.ones((300, 5)),
}


@pytest.mark.parametrize("name", HALF_FUNCTIONS)
@pytest.mark.parametrize("exponent", [-30, 0, 30])
def test_float16_data_keeps_type_and_value(name: str, exponent: int) -> None:
    function = HALF_FUNCTIONS[name]
    if name not in ("mean", "var", "norm", "product", "cube") and exponent:
        exponent //= 30
    x = ScaledArray(X.astype(jnp.float16), jnp.float32(2.0**exponent))
    result = jax.jit(scalify(function))(x)
    assert result.dtype == jnp.float16
    same_pattern(result.value, function(x.value), 16 * HALF, name)


def deep_chain(x: jax.Array, weights: jax.Array) -> jax.Array:
    for w in weights:
        x = x @ w
    return x


def scanned_chain(x: jax.Array, weights: jax.Array) -> jax.Array:
    return lax.scan(lambda c, w: (c @ w, None), x, weights)[0]


@pytest.mark.parametrize("chain", [deep_chain, scanned_chain])
@pytest.mark.parametrize("width", [24, 32, 48])
def test_sixty_products_neither_overflow_nor_underflow(chain: Any, width: int) -> None:
    """Each product grows data by a root that is no power of two; the drift is bounded."""
    rng = np.random.default_rng(0)
    weights = jnp.asarray(rng.normal(size=(60, width, width)), jnp.float32) * 1e-1
    x = jnp.asarray(rng.normal(size=(8, width)), jnp.float32) * 1e-3
    exact = np.asarray(x, np.float64)
    for w in np.asarray(weights, np.float64):
        exact = exact @ w
    half = as_scaled((x, weights), dtype=jnp.float16)
    result = jax.jit(scalify(chain))(*half)
    assert result.dtype == jnp.float16
    rms = float(jnp.sqrt(jnp.mean(result.data.astype(jnp.float32) ** 2)))
    assert 2.0**-6 < rms < 2.0**6
    value = np.asarray(result.data, np.float64) * float(result.scale)
    error = np.linalg.norm(value - exact) / np.linalg.norm(exact)
    assert error < 0.02
