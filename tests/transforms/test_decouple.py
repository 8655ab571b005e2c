"""Functions that run in float16 if scale and data show that it is safe."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from unitscale import ScaledArray, to_array
from unitscale.transforms import get_data_scale, scalify

ALL = np.arange(2**16, dtype=np.uint16).view(np.float16)
ALL = ALL[np.isfinite(ALL)]

# A function, and up to which magnitude float16 computes it.
FUNCTIONS: dict[str, tuple[Callable[[Any], Any], float]] = {
    "exp": (lax.exp, np.log(16)),
    "cosh": (lax.cosh, np.log(16)),
    "cos": (lax.cos, 65504),
    "erfc": (lax.erfc, 2),
    "log": (lax.log, 65504),
    "sinh": (lax.sinh, np.log(16)),
    "tanh": (lax.tanh, 65504),
    "erf": (lax.erf, 65504),
    "sin": (lax.sin, 65504),
    "atan": (lax.atan, 65504),
    "sqrt": (lax.sqrt, 256),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_all_of_float16_is_within_one_ulp_of_float32(name: str) -> None:
    function, most = FUNCTIONS[name]
    run = jax.jit(scalify(function, decouple=True))
    for log2 in (-14, -3, 0, 1, 7, 15):
        value = np.abs(ALL.astype(np.float64)) * 2.0**log2
        data = np.where(value <= most, ALL, np.float16(0))
        x = ScaledArray(jnp.asarray(data), jnp.float32(2.0**log2))
        exact, result = np.asarray(function(x.value), np.float64), run(x)
        actual, kept = np.asarray(result.value, np.float64), np.isfinite(exact)
        np.testing.assert_array_equal(actual[~kept], exact[~kept])
        small = np.minimum(np.abs(exact[kept] / float(result.scale)), 65472)
        step = float(result.scale) * np.spacing(small.astype(np.float16)).astype(np.float64)
        assert (np.abs(actual[kept] - exact[kept]) <= step).all()


@pytest.mark.parametrize(
    ("function", "data", "log2", "is_narrow"),
    [
        (jnp.exp, [1.0, -2.0], 0, True),
        (jnp.exp, [1.0, -2.0], 1, False),  # e^4 is over 16
        (jnp.exp, [2.0**10, 1.0], -10, True),
        (jnp.exp, [2.0**12, 1.0], -10, False),
        (jnp.cosh, [0.0, 4.0], 20, False),  # at a scale that float16 does not hold
        (jnp.tanh, [1.0, 2.0**-20], -1, False),  # small numbers would lose bits
        (jnp.tanh, [0.01, 0.01], 0, False),  # and so would what is made of small numbers alone
        (jnp.exp, [jnp.inf, 2.0], 0, False),
    ],
)
def test_which_way(function: Any, data: list[float], log2: int, is_narrow: bool) -> None:
    """Results of the float16 path have scale 1, those of the float32 path do not."""
    x = ScaledArray(jnp.asarray(data, jnp.float16), jnp.float32(2.0**log2))

    @jax.jit
    def run(x: Any) -> Any:
        _, scale = scalify(lambda x: get_data_scale(function(x)), decouple=True)(x)
        both = scalify(function, decouple=True)(x), scalify(function)(x)
        return to_array(scale), *to_array(both, jnp.float32)

    scale, found, expected = run(x)
    assert (float(scale) == 1) == is_narrow
    np.testing.assert_allclose(found, expected, rtol=2.0**-10)


def test_what_has_one_way() -> None:
    rows = ScaledArray(jnp.ones((2, 3), jnp.float16), jnp.ones((2, 1), jnp.float32))
    for x in (ScaledArray(jnp.ones(3, jnp.bfloat16), jnp.float32(1)), rows, jnp.float16(1)):
        assert "cond" not in str(jax.make_jaxpr(scalify(jnp.exp, decouple=True))(x))


PROGRAMS: list[Any] = [
    lambda x: lax.scan(lambda c, row: (c + jnp.tanh(row), jnp.exp(row)), 0 * x[0], x)[1],
    jax.jit(lambda x: jnp.sin(x) * jnp.exp(x)),
    jax.grad(lambda x: jnp.sum(jnp.tanh(x) * jnp.exp(x))),
]


def test_programs() -> None:
    run = jax.jit(lambda x: [(f(x.value), scalify(f, decouple=True)(x)) for f in PROGRAMS])
    # Narrow in the first case alone; the sum of three rounded numbers is within two of its ulps.
    data = jnp.asarray(np.random.default_rng(0).uniform(0.25, 2.0, (4, 8)), jnp.float16)
    for scale in (1.0, 8.0, 2.0**-8):
        for exact, found in run(ScaledArray(data, jnp.float32(scale))):
            atol = 2.0**-9 * np.abs(exact).max()
            np.testing.assert_allclose(found.value, exact, rtol=0, atol=atol)
