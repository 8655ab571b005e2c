"""The evaluation of jaxprs, and random compositions of primitives against plain JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings, strategies as st
from jax import lax

from unitscale import ScaledArray, to_array
from unitscale.transforms import scalify

from .law import QUICK, close

UNARY: dict[str, Callable[[Any], Any]] = {
    "tanh": jnp.tanh,
    "negative": jnp.negative,
    "abs": jnp.abs,
    "times": lambda x: x * 0.3,
    "shift": lambda x: x - 1.7,
    "square": lambda x: jnp.tanh(x) ** 2,
    "root": lambda x: jnp.sqrt(x * x + 0.5),
    "transpose": lambda x: x.T,
    "roll": lambda x: jnp.roll(x, 1, 0),
    "norm": lambda x: x / (1 + jnp.max(jnp.abs(x))),
    "softmax": jax.nn.softmax,
    "mean": lambda x: x - jnp.mean(x, 0, keepdims=True),
    "cumsum": lambda x: jnp.cumsum(x, 1) / 3,
    "relu": jax.nn.relu,
    "loop": lambda x: lax.fori_loop(0, 3, lambda i, c: jnp.sin(c) + x, x),
    "branch": lambda x: lax.cond(jnp.sum(x) > 0, lambda a: a * 2, jnp.cos, x),
    "row": lambda x: x.at[1].set(x[0] * 2),
}
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": jnp.add,
    "subtract": lambda x, y: x - y,
    "multiply": lambda x, y: x * jnp.tanh(y),
    "matmul": lambda x, y: x @ y / 3,
    "divide": lambda x, y: x / (1 + y * y),
    "maximum": jnp.maximum,
    "where": lambda x, y: jnp.where(x > y, x, 0.5 * y),
    "halves": lambda x, y: jnp.concatenate([x[:2], y[2:]]),
}
# Each step names a function and the earlier results that it takes.
STEPS = st.lists(
    st.tuples(st.sampled_from([*UNARY, *BINARY]), st.integers(0, 9), st.integers(0, 9)),
    min_size=1,
    max_size=6,
)


def composed(steps: list[tuple[str, int, int]]) -> Callable[..., Any]:
    def program(x: Any, y: Any) -> Any:
        known = [x, y]
        for name, i, j in steps:
            first, second = known[i % len(known)], known[j % len(known)]
            known.append(UNARY[name](first) if name in UNARY else BINARY[name](first, second))
        return known[-1]

    return program


@settings(max_examples=15)
@given(steps=STEPS, exponent=st.integers(-20, 20))
def test_random_programs(steps: list[tuple[str, int, int]], exponent: int) -> None:
    """Value and derivative along a direction; rounding is relative to the largest element met."""
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.normal(size=(4, 4)), jnp.float32) for _ in range(2))
    program = composed(steps)

    def both(a: Any, b: Any) -> Any:
        return jax.value_and_grad(lambda p, q: jnp.sum(program(p, q)), argnums=(0, 1))(a, b)

    scale = jnp.float32(2.0**exponent)
    scaled = (ScaledArray(x / scale, scale), ScaledArray(y * scale, 1 / scale))
    actual = to_array(jax.jit(scalify(both), compiler_options=QUICK)(*scaled))
    expected = jax.jit(both, compiler_options=QUICK)(x, y)
    terms = 16 * 4 ** len(steps)
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5, atol=1e-6 * terms)
    close(actual[1], expected[1], 64.0 * terms, str(steps))


def test_values_are_dropped_after_their_last_use() -> None:
    """A long chain holds one value, so that eager calls do not keep every intermediate."""
    x = ScaledArray(jnp.ones(3), jnp.float32(2.0))

    def chain(a: Any) -> Any:
        for _ in range(30):
            a = jnp.sin(a)
        return a

    np.testing.assert_allclose(to_array(scalify(chain)(x)), chain(x.value), rtol=1e-6)
