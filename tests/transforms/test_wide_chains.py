"""Chains of narrow data that are rounded at their end alone: over turns of loops, under extremes.

Programs as graph networks, dynamic programs and recurrent models have them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from unitscale import as_scaled, scalify, to_array

SEGMENTS = np.array([0, 0, 1, 1, 2])
LABELS = np.array([[1, 2, 2, 3]])


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def peaks(x: Any) -> Any:
    heights = jnp.tanh(x)
    around = jnp.pad(heights, 1, constant_values=-jnp.inf)
    highest = jnp.maximum(jnp.maximum(around[:-2], around[1:-1]), around[2:])
    return jnp.where(heights == highest, heights, 0)


def chosen(x: Any) -> Any:
    heights = jnp.tanh(x)
    one = lax.cond(x[0] > 0, lambda: heights.max(), lambda: heights.min())
    return jnp.where(heights == one, heights, 0)


def warped(costs: Any, most: float = 1e10) -> Any:
    """Soft dynamic time warping, with a number that stands for no way."""

    def row(above: Any, costs: Any) -> Any:
        def cell(left: Any, item: Any) -> Any:
            cost, up, across = item
            best = cost - jax.nn.logsumexp(-jnp.stack([up, left, across]))
            return best, best

        after = lax.scan(cell, most, (costs, above[1:], above[:-1]))[1]
        return jnp.concatenate([jnp.array([most]), after]), None

    first = jnp.full(costs.shape[1] + 1, most).at[0].set(0.0)
    return lax.scan(row, first, costs)[0][-1]


def recurrent(x: Any) -> Any:
    def step(state: Any, row: Any) -> Any:
        state = jnp.tanh(row + state @ x[:4] / 4)
        return state, state

    return lax.scan(step, jnp.zeros(4), jnp.tile(x, (20, 1)))[1]


def ctc(x: Any) -> Any:
    return optax.ctc_loss(x[None], jnp.zeros((1, 40)), LABELS, jnp.zeros(LABELS.shape))


def extreme(f: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: f(function(x), SEGMENTS, 3)


PROGRAMS: dict[str, tuple[Callable[..., Any], Any]] = {
    "a sum of many": (
        lambda x: lax.scan(lambda c, row: (c + row * row, None), 0.0, jnp.tile(x, 1000))[0],
        normal(0, 4),
    ),
    "a sum of many by fori_loop": (
        lambda x: lax.fori_loop(0, 4000, lambda i, c: c + x[i % 4], jnp.zeros(3)),
        normal(1, 4, 3) + 1,
    ),
    "a running mean": (
        lambda x: lax.fori_loop(0, 3000, lambda i, c: 0.999 * c + 0.001 * x, jnp.zeros(3)),
        normal(2, 3),
    ),
    "a polynomial": (lambda x: jnp.polyval(jnp.ones(12), x), normal(3, 5)),
    "exponential integral": (jax.scipy.special.expi, jnp.asarray([13.0, 0.5])),
    "a recurrent network": (recurrent, normal(4, 6, 4)),
    "warped time": (warped, jnp.abs(normal(5, 6, 6))),
    "labels without alignment": (ctc, 2 * normal(6, 40, 5)),
    "peaks": (peaks, normal(7, 9)),
    "the highest or the lowest": (chosen, normal(9, 7)),
    **{
        f"{f.__name__} of {function.__name__}": (extreme(f, function), normal(8, 5, 3))
        for f in (jax.ops.segment_max, jax.ops.segment_min)
        for function in (jax.nn.silu, jax.nn.sigmoid, jax.nn.gelu, jax.nn.relu)
    },
}


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("name", PROGRAMS)
def test_value_and_gradient(name: str, dtype: Any) -> None:
    program, x = PROGRAMS[name]
    given = as_scaled(x, dtype=dtype)

    def both(x: Any) -> Any:
        y, pull = jax.vjp(program, x)
        return y, pull(jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))[0]

    found = to_array(jax.jit(scalify(both))(given))
    expected = jax.jit(both)(to_array(given).astype(jnp.float32))
    step = float(jnp.finfo(dtype).eps)
    for e, a in zip(expected, found, strict=True):
        np.testing.assert_allclose(a, e, rtol=0, atol=6 * step * np.max(np.abs(e)))


def test_what_a_loop_returns_is_narrow() -> None:
    x = as_scaled(normal(0, 8), dtype=jnp.float16)
    total = scalify(lambda x: lax.scan(lambda c, row: (c + row, None), 0.0, x)[0])(x)
    assert total.dtype == jnp.float16
