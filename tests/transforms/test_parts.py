"""Parts of an array, which are of other sizes than the whole, have products as in float32."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from unitscale import as_scaled, scalify

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
    "scanned items": (scanned, UNITS[..., None, :8] * normal(6, 3, 2, 8)),
}


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_is_as_in_float32(name: str, dtype: Any) -> None:
    program, x = PROGRAMS[name]
    same_as_float32(program, dtype, x)


@pytest.mark.parametrize("sharpness", [0.0, 1.0, 100.0])
def test_shares_are_of_known_size(sharpness: float) -> None:
    """Of uniform or of peaked weights nothing is measured but the result, which leaves."""

    def attend(scores: Any, values: Any) -> Any:
        return jax.nn.softmax(scores) @ values

    scores, values = sharpness * normal(0, 16, 256), normal(1, 256, 8)
    same_as_float32(attend, jnp.float16, scores, values)
    arrays = [as_scaled(jnp.asarray(a, jnp.float32), dtype=jnp.float16) for a in (scores, values)]
    found = [e.maker for e in scalify(attend).report(*arrays).exponents]
    assert found == ["argument", "argument", "result"]
