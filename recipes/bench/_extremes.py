"""Programs that leave the range of float16, though nothing they are for is out of the ordinary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Program(NamedTuple):
    """A function of arrays and the float32 arrays it is given."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


def _normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def _loss(weights: Any, x: jax.Array) -> jax.Array:
    hidden = jax.nn.gelu(x @ weights["up"])
    return jnp.mean((hidden @ weights["down"]) ** 2)


def _chain(x: jax.Array, kernel: jax.Array) -> jax.Array:
    for _ in range(60):
        x = x @ kernel
    return x


def programs() -> list[Program]:
    """What plain float16 overflows or underflows on; the float32 answer is in float32's range."""
    width = 128
    weights = {"up": 1e-6 * _normal(0, width, 256), "down": 1e-6 * _normal(1, 256, width)}
    # 60 products that grow, or shrink, by 1.7 each: 7e13 and 1.5e-14 together.
    step = _normal(2, width, width) / width**0.5
    x = _normal(3, 32, width)
    return [
        Program("weights near 1e-6, inputs near 1e6", lambda w, x: x @ w, (weights["up"], 1e6 * x)),
        Program("... gradient of a loss", jax.grad(_loss), (weights, 1e6 * x)),
        Program("60 products in a row, growing", _chain, (x, 1.7 * step)),
        Program("60 products in a row, shrinking", _chain, (x, step / 1.7)),
        Program(
            "... gradient of their mean square",
            jax.grad(lambda k, x: jnp.mean(_chain(x, k) ** 2)),
            (step / 1.3, x),
        ),
        Program("layer norm of values near 1e6", _layer_norm, (1e6 * x,)),
    ]


def _layer_norm(x: jax.Array) -> jax.Array:
    centred = x - jnp.mean(x, -1, keepdims=True)
    return centred / jnp.sqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-5)


def error(found: Any, expected: Any) -> float:
    """Largest relative RMS error over the leaves; NaN where something is not finite."""
    errors = []
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        errors.append(float(np.sqrt(np.mean((a - b) ** 2) / np.mean(b**2))))
    return float(np.max(errors))
