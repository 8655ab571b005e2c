"""Loops: their carried values, and loops with a data-dependent exit."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.batching import compute, entry
from unitscale import ScaledArray, as_scaled, to_array
from unitscale.transforms import scalify

CARRIED = [(0.5, "float16"), (0.99, "float16"), (3.0, "float16"), (3.0, "bfloat16")]


def test_what_a_loop_carries_stays_at_unit_size_or_at_its_value() -> None:
    table = {
        (factor, dtype): (
            scalify(lambda a, n=factor: lax.fori_loop(0, 50, lambda i, c: c * n, a)),
            as_scaled(jnp.asarray([1.0, -2.0, 0.5]), dtype=dtype),
        )
        for factor, dtype in CARRIED
    }
    for (factor, dtype), result in compute(table).items():
        if dtype == "float16":
            assert 0.25 <= np.sqrt(np.mean(np.square(np.asarray(result.data, np.float64)))) <= 4
        else:
            assert float(result.scale) == 1
        exact = np.asarray([1.0, -2.0, 0.5]) * factor**50
        values = np.asarray(result.data, np.float64) * float(result.scale)
        np.testing.assert_allclose(values, exact, rtol=50 * float(jnp.finfo(dtype).eps))


def test_accumulators_that_start_at_zero_items_and_loops_without_turns() -> None:
    """Accumulators take the scale of their terms; stacked items have scales of their own."""

    def run(x, rows):
        return lax.scan(lambda c, a: (c + a, c * a), x, rows), lax.map(lambda a: a * 2, rows)

    tiny = as_scaled(jnp.full((8, 3), 3e-7), dtype=jnp.float16)
    items = ScaledArray(jnp.ones((2, 3), jnp.float16), jnp.asarray([[2.0], [16.0]]))
    three, none = as_scaled((jnp.float32(3), jnp.zeros((0, 3))), dtype=jnp.float16)
    double = scalify(lambda a: lax.map(lambda v: v * 2, a))
    total, doubled, ((carry, out), empty), no_numbers = compute(
        {
            0: (scalify(lambda a: lax.scan(lambda c, v: (c + v, None), jnp.zeros(3), a)[0]), tiny),
            1: (double, items),
            2: (scalify(lambda c, rows: run(jnp.full(3, c), rows)), three, none),
            3: (double, as_scaled(jnp.zeros(0))),
        }
    ).values()
    assert total.dtype == jnp.float16
    np.testing.assert_allclose(total.value, 8 * 3e-7, rtol=4e-3)
    np.testing.assert_array_equal(doubled.value, 2 * items.value)
    assert doubled.scale.size == 2
    np.testing.assert_array_equal(carry.value, [3, 3, 3])
    assert (out.shape, empty.shape, no_numbers.shape) == ((0, 3), (0, 3), (0,))


# So that a loop that never ends fails a test instead of holding it.
MOST = 300
POSITIVE = jnp.asarray(np.random.default_rng(0).uniform(0.5, 3.0, 8), jnp.float16)


def turns(stop: Callable[[Any], Any], turn: Callable[[Any], Any], start: Any) -> Any:
    """Run a while loop that counts; return the result and the number of iterations."""
    return lax.while_loop(
        lambda s: ~stop(s[0]) & (s[1] < MOST), lambda s: (turn(s[0]), s[1] + 1), (start, 0)
    )


def newton(x: Any) -> Any:
    return turns(
        lambda r: jnp.max(jnp.abs(r * r - x)) <= 1e-5, lambda r: (r + x / r) / 2, jnp.ones_like(x)
    )


def flagged(x: Any) -> Any:
    """Like `newton`, with a flag as the condition."""
    return lax.while_loop(
        lambda s: s[1] & (s[2] < MOST),
        lambda s: ((s[0] + x / s[0]) / 2, jnp.any(jnp.abs(s[0] * s[0] - x) > 1e-5), s[2] + 1),
        (jnp.ones_like(x), True, 0),
    )[::2]


def nested(x: Any) -> Any:
    """Compute the cube root by iterating r -> sqrt(x / r)."""
    return turns(
        lambda r: jnp.max(jnp.abs(r**3 - x)) <= 1e-4, lambda r: newton(x / r)[0], jnp.ones_like(x)
    )


def root(x: Any) -> Any:
    return lax.custom_root(
        lambda r: r * r - x,
        jnp.ones_like(x),
        lambda f, r: turns(
            lambda r: jnp.max(jnp.abs(f(r))) <= 1e-5, lambda r: r - f(r) / (2 * r), r
        )[0],
        lambda g, y: y / g(jnp.ones_like(y)),
    )


LOOPS: dict[str, Callable[[Any], Any]] = {
    "newton": newton,
    "a flag": flagged,
    "nested": nested,
    "gradient of a scan of roots": lambda x: (
        jax.grad(lambda x: lax.scan(lambda c, v: (root(c + v), None), 0.1, x)[0])(x),
        jnp.zeros(()),
    ),
    "forward": lambda x: (jax.jvp(newton, (x,), (x,))[1][0], newton(x)[1]),
}


@pytest.mark.parametrize("dtype", [jnp.float16, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)])
def test_loops_take_no_more_turns_than_in_float32(dtype: Any) -> None:
    programs = {}
    x = POSITIVE.astype(dtype)
    scaled = ScaledArray(x / 4, jnp.float32(4))
    for name, f in LOOPS.items():

        def both(x: Any, scaled: Any, f: Any = f) -> Any:
            result = scalify(f)(scaled)
            return f(x.astype(jnp.float32)), to_array(result), result[0]

        programs[name] = both, x, scaled
    for name, (plain, found, result) in compute(programs).items():
        with entry(name):
            assert np.all(np.asarray(plain[1]) < MOST), "the plain program ends"
            assert np.all(np.asarray(found[1]) <= np.asarray(plain[1])), (found[1], plain[1])
            assert result.dtype == dtype
            # What goes in and comes out is rounded, a few times; what is between is not.
            tolerance = 16 * float(jnp.finfo(dtype).eps) * float(np.max(np.abs(plain[0])))
            np.testing.assert_allclose(found[0], plain[0], rtol=0, atol=tolerance)


def test_what_a_counter_stops_stays_narrow() -> None:
    def f(x: Any, n: Any) -> Any:
        return lax.fori_loop(0, n, lambda i, c: jnp.sin(c) + x, x)

    scaled = as_scaled(POSITIVE, dtype=jnp.float16)
    carried = [
        eqn.params["body_jaxpr"].in_avals
        for eqn in jax.make_jaxpr(scalify(f))(scaled, 3).jaxpr.eqns
        if eqn.primitive.name == "while"
    ]
    assert len(carried) == 1
    assert {a.dtype for a in carried[0] if a.shape == POSITIVE.shape} == {jnp.dtype(jnp.float16)}
