"""Functions computed in float16 where scale and data show that it is safe."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from unitscale import ScaledArray, to_array
from unitscale.transforms import scalify

ALL = np.arange(2**16, dtype=np.uint16).view(np.float16)
ALL = ALL[np.isfinite(ALL)]

# A function, up to which magnitude float16 computes it, and whether at scales below 1 too.
FUNCTIONS: dict[str, tuple[Callable[[Any], Any], float, bool]] = {
    "exp": (lax.exp, np.log(16), True),
    "cosh": (lax.cosh, np.log(16), True),
    "cos": (lax.cos, 65504, True),
    "erfc": (lax.erfc, 2, True),
    "log": (lax.log, 65504, False),
    "sinh": (lax.sinh, np.log(16), False),
    "tanh": (lax.tanh, 65504, False),
    "erf": (lax.erf, 65504, False),
    "sin": (lax.sin, 65504, False),
    "atan": (lax.atan, 65504, False),
    "sqrt": (lax.sqrt, 256, False),
}


def ulp(x: np.ndarray) -> np.ndarray:
    """Steps of float16, subnormal numbers counted in."""
    return np.spacing(np.minimum(np.abs(x), 65472).astype(np.float16)).astype(np.float64)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_all_of_float16_is_within_one_ulp_of_float32(name: str) -> None:
    function, most, below_one = FUNCTIONS[name]
    run = scalify(function, decouple=True)
    for log2 in (-14, -3, 0, 1, 7, 15):
        value = np.abs(ALL.astype(np.float64)) * 2.0**log2
        data = np.where(value <= most, ALL, np.float16(0))  # of one shape: compiled once
        x = ScaledArray(jnp.asarray(data), jnp.float32(2.0**log2))
        (branch,) = run.branches(x)
        assert (branch.narrow, branch.wide) == ((1, 0) if log2 >= 0 or below_one else (0, 1)), log2
        assert branch.ulps <= 1
        exact = np.asarray(function(x.value), np.float64)
        result = run(x)
        actual, kept = np.asarray(result.value, np.float64), np.isfinite(exact)
        np.testing.assert_array_equal(actual[~kept], exact[~kept])
        step = float(result.scale) * ulp(exact[kept] / float(result.scale))
        assert (np.abs(actual[kept] - exact[kept]) <= step).all()


@pytest.mark.parametrize(
    ("function", "data", "log2", "narrow"),
    [
        (jnp.exp, [1.0, -2.0], 0, 1),
        (jnp.exp, [1.0, -2.0], 1, 0),  # e^4 is over 16
        (jnp.exp, [2.0**10, 1.0], -10, 1),
        (jnp.exp, [2.0**12, 1.0], -10, 0),
        (jnp.exp, [0.0, 0.0], 20, 0),  # at a scale that float16 does not hold
        (jnp.tanh, [1.0, 2.0**-20], -1, 0),  # small numbers would lose bits
        (jnp.tanh, [0.01, 0.01], 0, 0),  # and so would what is made of small numbers alone
        (jnp.tanh, [jnp.inf, 1.0], 0, 0),
        (jnp.tanh, [jnp.nan, 1.0], 0, 0),
    ],
)
def test_which_way(function: Any, data: list[float], log2: int, narrow: int) -> None:
    x = ScaledArray(jnp.asarray(data, jnp.float16), jnp.float32(2.0**log2))
    (branch,) = scalify(function, decouple=True).branches(x)
    assert (branch.narrow, branch.wide) == (narrow, 1 - narrow)
    expected = scalify(function)(x).value
    np.testing.assert_allclose(scalify(function, decouple=True)(x).value, expected, rtol=2.0**-10)


@pytest.mark.parametrize(
    "x",
    [
        ScaledArray(jnp.ones(3, jnp.float32), jnp.float32(1)),
        ScaledArray(jnp.ones(3, jnp.bfloat16), jnp.float32(1)),
        ScaledArray(jnp.ones((2, 3), jnp.float16), jnp.ones((2, 1), jnp.float32)),
        ScaledArray(jnp.ones((0,), jnp.float16), jnp.float32(1)),
        jnp.ones(3, jnp.float16),
    ],
    ids=["float32", "bfloat16", "a scale per row", "empty", "no scale"],
)
def test_what_has_one_way(x: Any) -> None:
    run = scalify(jnp.exp, decouple=True)
    assert run.branches(x) == []
    np.testing.assert_array_equal(to_array(run(x)), to_array(scalify(jnp.exp)(x)))


def looped(x: jax.Array) -> jax.Array:
    return lax.scan(lambda carry, row: (carry + jnp.tanh(row), jnp.exp(row)), 0 * x[0], x)[1]


def sharded(x: jax.Array) -> jax.Array:
    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    return jax.shard_map(jnp.exp, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(x)


@pytest.mark.parametrize(
    "function",
    [
        jax.nn.softmax,
        jax.nn.logsumexp,
        looped,
        jax.jit(lambda x: jnp.sin(x) * jnp.exp(x)),
        jax.grad(lambda x: jnp.sum(jnp.tanh(x) * jnp.exp(x))),
        jax.vmap(lambda row: jnp.log(jnp.abs(row))),
        jax.checkpoint(jnp.tanh),
        pytest.param(
            sharded, marks=pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
        ),
    ],
    ids=["softmax", "logsumexp", "scan", "jit", "grad", "vmap", "remat", "shard_map"],
)
def test_programs(function: Any) -> None:
    # Narrow in the first case alone; the sum of three rounded numbers is within two of its ulps.
    data = jnp.asarray(np.random.default_rng(0).uniform(0.25, 2.0, (4, 8)), jnp.float16)
    for scale in (1.0, 8.0, 2.0**-8):
        x = ScaledArray(data, jnp.float32(scale))
        exact = np.asarray(function(x.value), np.float64)
        for run in (scalify(function, decouple=True), jax.jit(scalify(function, decouple=True))):
            np.testing.assert_allclose(run(x).value, exact, atol=2.0**-9 * np.abs(exact).max())


def test_differentiated_outside_and_mapped_outside() -> None:
    x = ScaledArray(jnp.asarray([[0.5], [1.0], [4.0]], jnp.float16), jnp.float32(1))
    run = scalify(jnp.exp, decouple=True)
    mapped = jax.vmap(run, in_axes=(jax.tree.map(lambda leaf: 0 if leaf.ndim else None, x),))(x)
    np.testing.assert_allclose(mapped.value, jnp.exp(x.value), rtol=2.0**-10)

    def loss(data: jax.Array, function: Any) -> jax.Array:
        return jnp.sum(function(ScaledArray(data, jnp.float32(1))).value)

    one, other = (jax.grad(partial(loss, function=f))(x.data) for f in (run, scalify(jnp.exp)))
    np.testing.assert_allclose(one, other, rtol=2.0**-9)


def test_turns_of_a_loop_are_counted_with_their_line() -> None:
    data = jnp.asarray([[1.0], [2.0], [4.0]], jnp.float16)
    tanh, exp = scalify(looped, decouple=True).branches(ScaledArray(data, jnp.float32(1)))
    assert (tanh.primitive, tanh.narrow, tanh.wide) == ("tanh", 3, 0)
    assert (exp.primitive, exp.narrow, exp.wide) == ("exp", 2, 1)
    assert f"{__file__}:{looped.__code__.co_firstlineno + 1} " in str(exp)
