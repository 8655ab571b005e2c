"""Programs that `python -m recipes bench fuzz` has found wrong."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale import ScaledArray, to_array
from unitscale.transforms import scalify


def scaled(data: Any, scale: Any = 1.0, dtype: Any = jnp.float16) -> ScaledArray:
    return ScaledArray(jnp.asarray(data, dtype), jnp.asarray(scale, jnp.float32))


ROWS = scaled([[1.0, 2.0], [1.0, 3.0]], [[0.5], [16.0]])
NO_ROWS = scaled(jnp.zeros((0, 2)), jnp.zeros((0, 1)))
SMALL = scaled([0.5, 1.25, 2.0], 2.0**-24)
TINY_ROWS = [[2.0**-33], [2.0**-38]]
EIGHT = scaled([1.0, -0.5, 1.5], 0.5, jnp.float8_e4m3fn)

FOUND: dict[str, tuple[Callable[..., Any], Any]] = {
    "a number and a scale per row": (lambda x: 1 - x, ROWS),
    "a number of the program and a scale per row": (lambda x: x + x.sum(), ROWS),
    "a choice of a number and a scale per row": (lambda x: jnp.where(x > 1, x, 3.0), ROWS),
    "a maximum with a number and a scale per row": (lambda x: jnp.maximum(x, 2.0), ROWS),
    "clamped at numbers with a scale per row": (lambda x: jax.lax.clamp(1.0, x, 4.0), ROWS),
    "a row at a scale per item and a scale per row": (lambda x: x[:, -1] - x, ROWS),
    "a scale per row without rows": (lambda x: (1 - x).T, NO_ROWS),
    "a scale per item and one item": (
        lambda x: (lambda y: y - y.mean(-1, keepdims=True))(jax.lax.map(lambda v: 2 * v, x)),
        scaled([1.0, 1.0, 5.0]),
    ),
    "a maximum so far, row by row, from the lowest number": (
        lambda x: jax.lax.scan(
            lambda c, i: (c.at[i].set(jnp.maximum(c[i], x[i] * x[i])), None),
            jnp.full(x.shape, jnp.finfo(jnp.float32).min / 2),
            jnp.arange(2),
        )[0][:2],
        scaled([[1.0, 2.0], [-1.0, 3.0], [0.0, 1.0]], 2.0**-8, jnp.float32),
    ),
    "a number far above the operand, squared": (
        lambda x: (x + 1) ** 2 * (x + 1) + x,
        scaled([1.0, 2.0], 2.0**-40),
    ),
    "a number and zeros, squared": (lambda x: (2 * x + 1) * (1 - x) + x, scaled([0.0, 0.0])),
    "8 bits compared with more": (lambda x: jnp.minimum(x, x.min()), EIGHT),
    "a moment that starts at zero": (lambda x: 0.1 * x + 0.9 * jnp.zeros_like(x), SMALL),
    "an angle near zero": (lambda x: jnp.arctan2(x, jnp.ones_like(x)), SMALL),
    "a remainder near zero": (lambda x: jax.lax.rem(x, jnp.cos(x)), SMALL),
    "the small part of a complex number": (lambda x: jax.lax.complex(x + 1, x).imag, SMALL),
    "a part that is zero, at a large scale": (
        lambda x: (lambda y: jnp.angle(jax.lax.complex(y * y + 1, y)))((1j * x).real),
        scaled([1.0], 2.0**37),
    ),
    "small zeros at a scale per row": (lambda x: x.T + 1, scaled([[0.0], [0.0]], TINY_ROWS)),
    "cotangents that cancel": (
        jax.grad(lambda x: jnp.sum(x - (x * x + x))),
        scaled([1.0], 2.0**-40),
    ),
    "a transform of what was small": (
        lambda x: jnp.fft.irfft(jnp.fft.rfft(jax.lax.erf(x))),
        scaled([1.0, 1.0, 1.0], 2.0**-26),
    ),
    "turns of a loop whose first is zero, laid out anew": (
        lambda x: (
            jax.lax.scan(lambda c, _: (0.9 * c + 0.1 * x, c), jnp.zeros_like(x), length=3)[1].T
        ),
        scaled([[1.0, 0.7]], [[2.0**-24]]),
    ),
    "rows of which one is zero, at a large scale": (
        lambda x: x.reshape(-1) * 2,
        scaled([[0.0, 0.0], [1.0, 1.5]], [[1.0], [2.0**-30]]),
    ),
    "the tail of a sigmoid": (lambda x: x * jax.nn.sigmoid(x), scaled([-1.0], 32.0)),
    "a convolution of 8 bits with a plain array": (lambda x: jnp.convolve(x, jnp.ones(2)), EIGHT),
    **{
        f"{f.__name__} near zero": (f, SMALL)
        for f in (jnp.tanh, jnp.sin, jnp.log1p, jnp.arctan, jnp.arcsinh, jnp.arctanh, jax.lax.erf)
    },
}


@pytest.mark.parametrize("name", FOUND)
def test_found(name: str) -> None:
    function, x = FOUND[name]

    def both(x: Any) -> Any:
        return function(x), jax.grad(lambda x: jnp.sum(jnp.sin(function(x))))(x)

    found = to_array(scalify(both)(x))
    expected = both(to_array(x).astype(jnp.float32))
    # bfloat16, as which 8 bits are computed with, is the widest step.
    step = float(jnp.finfo(jnp.bfloat16 if x.dtype.itemsize == 1 else jnp.float16).eps)
    for e, a in zip(expected, found, strict=True):
        np.testing.assert_allclose(a, e, rtol=0, atol=8 * step * np.max(np.abs(e), initial=0))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_what_is_measured_of_a_broadcast(dtype: str) -> None:
    """Compiled as one program, in which the sum of squares is a product."""
    x = scaled([[1.0, 1.0, 1.0]], 2.0, dtype)
    found = jax.jit(scalify(lambda x: jnp.prod(jnp.broadcast_to(x, (2, 1, 3)), axis=-1)))(x)
    np.testing.assert_array_equal(to_array(found), [[8.0], [8.0]])


def test_numbers_of_64_bits_of_no_rows() -> None:
    with jax.enable_x64(True):
        x = ScaledArray(jnp.zeros((0, 1), jnp.float64), jnp.float32(1.0))
        found = scalify(jax.grad(lambda x: jnp.sum(jax.nn.softmax(x) ** 2)))(x)
        divided = scalify(lambda x: x / jnp.full((3, 0), 2.0))(x.T.reshape(1, 0))
    assert found.shape == (0, 1)
    assert divided.shape == (3, 0)
