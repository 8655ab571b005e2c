"""Functions that run in float16 if scale and data show that it is safe."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.batching import compute, entry
from unitscale import ScaledArray
from unitscale.transforms import get_data_scale, scalify

from .agreement import check, scaled

ALL = np.arange(2**16, dtype=np.uint16).view(np.float16)
ALL = ALL[np.isfinite(ALL)]
LARGEST, LOG = 65504.0, np.log(16)


class Safe(NamedTuple):
    """A function, and where float16 computes it: up to a magnitude, and from a scale on.

    At scales below 1 small numbers lose bits, which matters to those with `least`, whose largest
    magnitude must reach it.
    """

    function: Callable[[Any], Any]
    most: float
    scale: float = 1.0
    least: float = 0.0


FUNCTIONS = {
    "exp": Safe(lax.exp, LOG, 2.0**-14),
    "cosh": Safe(lax.cosh, LOG, 2.0**-14),
    "cos": Safe(lax.cos, LARGEST, 2.0**-14),
    "erfc": Safe(lax.erfc, 2, 2.0**-14),
    "log": Safe(lax.log, LARGEST),
    "sinh": Safe(lax.sinh, LOG, least=1 / 16),
    "tanh": Safe(lax.tanh, LARGEST, least=1 / 16),
    "erf": Safe(lax.erf, LARGEST, least=1 / 16),
    "sin": Safe(lax.sin, LARGEST, least=1 / 16),
    "atan": Safe(lax.atan, LARGEST, least=1 / 16),
    "sqrt": Safe(lax.sqrt, 256, least=1 / 16),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_all_of_float16_is_within_one_ulp_of_float32(name: str) -> None:
    function, most, *_ = FUNCTIONS[name]
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


def ends(f: Safe) -> list[tuple[float, float, bool]]:
    """List values and scales at the ends of where a function is safe, and whether they are."""
    most, least = np.float16(f.most), np.float16(f.least)
    most = np.nextafter(most, np.float16(0)) if most > f.most else most
    cases = [(1.5, 2.0**15, True), (1.5, 2.0**16, False)]  # float16 holds no larger scale
    cases += [(most, 1.0, True), (1.5, f.scale, True), (1.5, f.scale / 2, False)]
    if f.most == LARGEST:
        cases.append((2.0**16, 2.0**15, False))
    else:
        cases.append((np.nextafter(most, np.float16(np.inf)), 1.0, False))
    if f.least:
        cases += [(least, 1.0, True), (np.nextafter(least, np.float16(0)), 1.0, False)]
    return cases


def test_where_float16_is_safe() -> None:
    """Results of the float16 path have scale 1; those of float32, which are measured, do not."""
    table = {}
    for name, f in FUNCTIONS.items():
        values, scales, _ = np.transpose(ends(f))
        # Zeros keep the RMS of odd functions and roots away from 1.
        data = np.float16((values / scales)[:, None] * ([1] + [0] * 15 if f.least else [1]))

        def measure(case: Any, f: Safe = f) -> Any:
            x = ScaledArray(case[0], case[1])
            return scalify(lambda x: get_data_scale(f.function(x))[1], decouple=True)(x)

        table[name] = functools.partial(lax.map, measure), (data, np.float32(scales))
    for name, found in compute(table).items():
        with entry(name):
            is_safe = [case[-1] for case in ends(FUNCTIONS[name])]
            np.testing.assert_array_equal(np.asarray(found) == 1, is_safe)


def test_what_has_one_way() -> None:
    rows, one = scaled(np.ones((2, 3)), [[1.0], [1.0]]), scaled(1.0)
    for x in (scaled(np.ones(3), dtype="bfloat16"), rows, jnp.float16(1), scaled(np.ones(0)), one):
        is_chosen = "cond" in str(jax.make_jaxpr(scalify(jnp.exp, decouple=True))(x))
        assert is_chosen == (x is one)


PROGRAMS: list[Any] = [
    lambda x: lax.scan(lambda c, row: (c + jnp.tanh(row), jnp.exp(row)), 0 * x[0], x)[1],
    jax.jit(lambda x: jnp.sin(x) * jnp.exp(x)),
    jax.grad(lambda x: jnp.sum(jnp.tanh(x) * jnp.exp(x))),
    lambda x: [jnp.exp(x), jnp.tanh(x / 64), jnp.exp(jnp.where(x > 1.9, jnp.inf, x))],
]


@pytest.mark.slow
def test_programs() -> None:
    data = np.random.default_rng(0).uniform(0.25, 2.0, (4, 8))
    # Narrow in the first case alone; the sum of three rounded numbers is within two of its ulps.
    scales = (1.0, 8.0, 2.0**-8)
    table = {(i, n): (f, scaled(data, n)) for i, f in enumerate(PROGRAMS) for n in scales}
    check(table, atol=2.0**-9, decouple=True)


def test_scales_that_are_no_powers_of_two() -> None:
    x = ScaledArray(jnp.float16(333.25), jnp.float32(3.0))
    cosine = scalify(jnp.cos, decouple=True)(x)
    np.testing.assert_allclose(cosine.value, np.cos(999.75), atol=2.0**-11)
