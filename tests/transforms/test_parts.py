"""What may be of another size than it was made of: parts, choices, differences, functions.

In float16 their products are as in float32.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from .law import same_as_float32


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def factors(flat: Any) -> Any:
    """Low-rank factors that lie behind other weights in one flat array."""
    weights, left, right = jnp.split(flat, [4096, 4352])
    return left.reshape(64, 4) @ right.reshape(4, 64) + 0 * weights[0]


def looked_up(table: Any) -> Any:
    rows = table[jnp.asarray([5])]
    return rows @ rows.T


def scanned(items: Any) -> Any:
    return lax.map(lambda x: x @ x.T, items)


def squared(part: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A product of matrices, which rounds its operands, of the square of what is of an array."""
    return lambda x: jnp.square(part(x)) @ jnp.ones(part(x).shape[-1], x.dtype)


def cubed(x: Any) -> Any:
    differences = x[:, None] - x
    return (differences * differences * differences) @ jnp.ones(8)


def degrees(x: Any) -> Any:
    """Of a graph in which all edges lead to one node."""
    return jax.ops.segment_sum(x, jnp.zeros(512, jnp.int32), 512)


def gated(weight: Any) -> Any:
    """A gated layer whose gate is nearly shut."""
    product = jnp.ones((4, 8)) @ weight
    return (jax.nn.relu(product) * product) @ jnp.asarray(normal(0, 8, 3))


# One small positive number beside large negative ones.
SMALL = np.array([1e-2, *[-100.0] * 7])
TWO = np.array([1e-3, 100.0] * 4)
STEEP = normal(0, 8, 8) + np.linspace(-30, 30, 8)

# Columns in units of their own; one trained row of a table.
UNITS = np.stack([40 + 10 * normal(1, 64), 5e4 + 1e4 * normal(2, 64), 0.05 + 0.01 * normal(3, 64)])
TABLE = np.zeros((65536, 4))
TABLE[5] = [1, -2, 0.5, 1]

PROGRAMS: dict[str, tuple[Callable[..., Any], np.ndarray]] = {
    "elements": (lambda x: x[2] * x[3], np.array([1500.0, 800.0, 0.1, 0.2])),
    "a slice": (lambda x: jnp.dot(x[2:], x[2:]), np.array([1500.0, 800.0, 0.1, 0.2])),
    "a dynamic slice": (
        lambda x: jnp.square(lax.dynamic_slice(x, (jnp.int32(2),), (2,))) @ jnp.ones(2),
        np.array([1500.0, 800.0, 0.1, 0.2]),
    ),
    "columns": (lambda x: x[:, 0] * x[:, 2], UNITS.T),
    "parts of a flat array": (
        factors,
        np.concatenate([normal(3, 4096), 3e-4 * normal(4, 256), 3e-4 * normal(5, 256)]),
    ),
    "rows of a table": (looked_up, TABLE),
    "over the least": (lambda x: x / x.min(), np.array([1.0, 3e3, 1.2e5])),
    "over the first": (lambda x: x / x[0], np.exp(np.linspace(0, 11.7, 8))),
    "the least of many": (lambda x: -lax.top_k(-x, 2)[0] @ jnp.ones(2), UNITS.ravel()),
    "one of many": (squared(lambda x: x[jnp.zeros(8, jnp.int32)]), SMALL),
    "the least so far": (squared(lax.cummin), np.abs(SMALL)),
    "the largest so far": (squared(lax.cummax), np.array([600.0, *[0.0] * 4095])),
    "the least of a window": (
        squared(lambda x: lax.reduce_window(x, jnp.inf, lax.min, (2,), (2,), "VALID")),
        TWO,
    ),
    "relu": (squared(jax.nn.relu), SMALL),
    "where": (squared(lambda x: jnp.where(x > 0, x, 0.0)), SMALL),
    "a triangle": (squared(jnp.tril), np.where(np.tri(8) > 0, 1e-2, 300.0)),
    "the smaller": (squared(lambda x: jnp.minimum(x, x[::-1])), TWO),
    "what is not set": (squared(lambda x: x.at[1:].set(0)), SMALL),
    "the least of segments": (
        squared(lambda x: jax.ops.segment_min(x, jnp.arange(8) % 2, 2)),
        np.array([1e-3, 2e-3, 100.0, 50.0, 30.0, 20.0, 70.0, 80.0]),
    ),
    "a product of choices": (lambda x: jax.nn.relu(x) * jax.nn.relu(x[::1]), SMALL),
    "a gate": (gated, np.array([[*[-30.0] * 7, 1e-3]] * 8)),
    "degrees of nodes": (squared(degrees), np.ones(512)),
    "near a root": (squared(lambda x: 1 - jnp.cos(x)), 1e-2 * normal(0, 8)),
    "large logarithms": (
        lambda x: (jnp.log(x) * jnp.log(x) ** 2) @ jnp.ones(8),
        1e-25 * np.arange(1, 9),
    ),
    "a difference": (cubed, 1 + 4e-3 * normal(0, 8)),
    "a spectrum": (squared(lambda x: jnp.abs(jnp.fft.rfft(x))), np.ones(2**14)),
    "one in many": (squared(lambda x: x), np.array([300.0, *[0.0] * (2**14 - 1)])),
    "shares along another axis": (lambda x: (lambda e: e / e.sum(1)[None])(jnp.exp(x)), STEEP.T),
    "shares by reshape": (lambda x: (lambda e: e / e.sum(1).reshape(1, 8))(jnp.exp(x)), STEEP.T),
    "large in different places": (lambda x: x[0] * x[1], np.array([TWO / 20, TWO[::-1]])),
    "scanned items": (scanned, UNITS[..., None, :8] * normal(6, 3, 2, 8)),
}


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_is_as_in_float32(name: str, dtype: Any) -> None:
    program, x = PROGRAMS[name]
    same_as_float32(program, dtype, x)


@pytest.mark.parametrize("sharpness", [0.0, 1.0, 100.0])
def test_shares_are_of_known_size(sharpness: float) -> None:
    """Weights may be uniform or peaked."""

    def attend(scores: Any, values: Any) -> Any:
        return jax.nn.softmax(scores) @ values

    scores, values = sharpness * normal(0, 16, 256), normal(1, 256, 8)
    same_as_float32(attend, jnp.float16, scores, values)
