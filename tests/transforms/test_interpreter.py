"""The evaluation of jaxprs, and random compositions of primitives against plain JAX."""

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.batching import chunks, compute, entry
from unitscale import ScaledArray, to_array
from unitscale.transforms import scalify

from .law import close

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
RANDOM = random.Random(0)


def drawn() -> list[tuple[str, int, int]]:
    """Up to six steps, each the name of a function and the earlier results that it takes."""
    names = [*UNARY, *BINARY]
    return [
        (RANDOM.choice(names), RANDOM.randrange(10), RANDOM.randrange(10))
        for _ in range(RANDOM.randint(1, 6))
    ]


PROGRAMS = [(drawn(), np.float32(2.0 ** RANDOM.randint(-20, 20))) for _ in range(24)]


def composed(steps: list[tuple[str, int, int]]) -> Callable[..., Any]:
    def program(x: Any, y: Any) -> Any:
        known = [x, y]
        for name, i, j in steps:
            first, second = known[i % len(known)], known[j % len(known)]
            known.append(UNARY[name](first) if name in UNARY else BINARY[name](first, second))
        return known[-1]

    return program


def plain_and_scaled(steps: list[tuple[str, int, int]]) -> Callable[..., Any]:
    """Value and gradient; the arguments of the scalified program have different scales."""

    def both(a: Any, b: Any) -> Any:
        return jax.value_and_grad(lambda p, q: jnp.sum(composed(steps)(p, q)), argnums=(0, 1))(a, b)

    def result(x: Any, y: Any, scale: Any) -> Any:
        scaled = (ScaledArray(x / scale, scale), ScaledArray(y * scale, 1 / scale))
        return both(x, y), to_array(scalify(both)(*scaled))

    return result


@pytest.mark.parametrize("numbers", chunks(range(len(PROGRAMS))))
def test_random_programs(numbers: list[int]) -> None:
    """Rounding is relative to the largest element met."""
    rng = np.random.default_rng(0)
    x, y = (np.asarray(rng.normal(size=(4, 4)), np.float32) for _ in range(2))
    results = compute(
        {i: (plain_and_scaled(PROGRAMS[i][0]), x, y, PROGRAMS[i][1]) for i in numbers}
    )
    for i, (expected, actual) in results.items():
        steps, scale = PROGRAMS[i]
        with entry(f"{steps} at scale {scale}"):
            terms = 16 * 4 ** len(steps)
            np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5, atol=1e-6 * terms)
            close(actual[1], expected[1], 64.0 * terms, "gradient")


def test_values_are_dropped_after_their_last_use() -> None:
    """A long chain holds one value, so that eager calls do not keep every intermediate."""
    x = ScaledArray(jnp.ones(3), jnp.float32(2.0))

    def chain(a: Any) -> Any:
        for _ in range(30):
            a = jnp.sin(a)
        return a

    np.testing.assert_allclose(to_array(scalify(chain)(x)), chain(x.value), rtol=1e-6)
